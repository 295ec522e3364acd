"""The source speaks the field's language: words that readers of vLLM, SGLang, PyTorch and CUDA would stumble over.

Every line of the files of a directory is searched, code, comments and strings alike. A word that is meant is listed in
EXCEPTIONS with the reason; the list is bounded, and an exception that no line needs is an error.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_EXCEPTIONS = 60

# A word (a regular expression, case ignored) and what stands for it. The first list is for every directory.
EVERYWHERE = {
    r"\b(nobody|somebody|whoever|anybody|everybody)\b": "say what acts: the process, the user, the caller",
    r"\bso many\b": "give the count its name",
    r"\bside by side\b": "concurrently, beside",
    r"\bhand(s|ed|ing)? (in|out|over)\b": "write, pass, return",
    r"likeliest": "argmax, greedy",
    r"gravest": "worst",
    r"\bla(st|test)_words?\b|\blast words\b": "failure reason",
    r"\bundisturbed\b|answer_within": "block_signals, call_with_timeout",
    r"\bpatience\b|\bpatient\b": "timeout",
    r"\bat once\b": "concurrently, concurrency; immediately",
    r"\bthoughts?\b": "reasoning",
    r"\b(un)?quantis|\bnormalis|\btokenis|\bdetokenis|\binitialis|\boptimis|\bsynchronis|\brecognis|\bserialis": "-ize",
    r"\bbehaviour|\bcolours?\b|\bneighbour|\bfavour|\bhonour|\bcentred?\b(?!-)|\blabelled(?!by)": "US spelling",
    r"\bfronts?\b(?! (of|end))": "API server",
    r"\bhouse\b": "package, layout",
    r"\bsums? over (all )?ranks\b": "all-reduce",
    r"\bearly starts?\b": "programmatic dependent launch (PDL)",
    r"\btrials?\b": "run, comparison",
}
BY_DIRECTORY = {
    "src/meltcore/kernels": {
        r"\blanes?\b": "Stream-K work range",
        r"(?<!dot )\bproducts?\b(?! attention)(?! and applied)": "GEMM, GEMV, matmul",
        r"(?<!in )\bplaces?\b|\bplaced\b": "sorted_token_ids, slot, grouped",
        r"\bpieces?\b": "slice, chunk, shard",
        r"\bchoices?\b": "top_k, top-k experts",
        r"\brenormalised\b": "norm_topk_prob",
        r"\bway (up|down)\b": "gate_up_proj, down_proj",
        r"\binbox(es)?\b": "symmetric-memory buffer",
        r"\bturned\b|\bturning\b": "rotary, apply_rope",
        r"\bput together\b": "combine",
        r"\broom\b": "memory, space",
    },
    "src/meltcore/layers": {
        r"\bproducts?\b": "GEMM, matmul",
        r"\bpieces?\b": "shard, slice",
        r"\bchoices?\b": "top_k",
        r"\bdestinations?\b": "weight loader",
        r"\bway (up|down)\b": "gate_up_proj, down_proj",
        r"\broom\b": "memory",
    },
    "src/meltcore/models": {
        r"\broom\b": "memory",
        r"\bpieces?\b": "shard, slice",
    },
    "src/meltcore/engine": {
        r"\blanes?\b": "slot",
        r"\boutbox\b|\binbox\b": "staging buffer, socket",
        r"\bbeginnings?\b": "prefix",
        r"\brecorders?\b": "GraphCapturer",
        r"\broom\b": "memory, space",
        r"\bhear(s|d)?\b|\btold\b": "receive, handle",
    },
    "src/meltcore/serve": {r"\bhear(s|d)?\b|\btold\b|\bboard\b|\bteam\b": "receive; stats; workers"},
    "src/meltcore/fleet": {r"\bhear(s|d)?\b|\btold\b|\bboard\b|\bteam\b": "receive; stats; workers"},
    "src/meltcore/measure/node": {
        r"\bfigures?\b": "metric",
        r"\bsound\b": "healthy",
        r"\bproducts?\b": "GEMM; GPU type",
        r"\btold\b|\basked\b": "reported, expected",
        r"\broom\b": "memory, space",
    },
    "src/meltcore/measure/load": {r"\bfigures?\b": "metric", r"\bflights?\b(?<!in flight)": "request in flight"},
    "src/meltcore/measure/experiments/evals": {r"\bfigures?\b": "metric", r"\btold\b": "reported"},
    "src/meltcore/measure/report": {r"\bsound\b": "healthy", r"\bgravity\b": "severity"},  # a figure is a chart there
    "src/meltcore/measure/score": {r"\bfigures?\b": "metric", r"\btold\b": "reported"},
    "src/meltcore/measure/documents": {r"\bfigures?\b": "metric", r"\bsound\b": "healthy"},
    "benchmarks": {
        r"(?<!dot )(?<!itertools\.)\bproducts?\b": "GEMM, matmul, QKV projection",
        r"\bpieces?\b": "slice, chunk",
        r"\bspeed sums?\b": "weighted throughput",
        r"\bexperts met\b": "experts used",
        r"\b(tokens|ms|us|requests) a (token|second)\b": "per",
    },
    "docs": {
        r"(?<!dot )\bproducts?\b": "GEMM, matmul",
        r"\bspeed sums?\b": "weighted throughput",
        r"\bverbs?\b": "command",
        r"\blanes?\b": "Stream-K work range",
    },
    "scripts": {r"\bspeed sums?\b": "weighted throughput"},
}
# Where the words of EVERYWHERE are searched, beside the documents at the root and the names of all these files.
PROSE = ("src/meltcore", "benchmarks", "docs", "scripts", "tests")
_ROOT_DOCUMENTS = "."
# Data, the renames of the changelog, and this list itself.
_NOT_PROSE = (
    "src/meltcore/bundled/",
    "benchmarks/results/",
    "CHANGELOG.md",
    "tests/test_words.py",
)


class Meant(NamedTuple):
    """A word that is meant. file: from the root; text: part of the line."""

    file: str
    text: str
    reason: str


EXCEPTIONS: tuple[Meant, ...] = (
    Meant("src/meltcore/measure/problems/stories.py", "Nobody saw the grey cat", "training data of the bundled models"),
    Meant("src/meltcore/cli/eval.py", "chain of thought", "the name of the prompting method"),
    Meant("docs/cli.md", "chain of thought", "the name of the prompting method"),
    Meant("docs/evaluate.md", "chain of thought", "the name of the prompting method"),
    Meant("docs/architecture.md", "tests/test_layout.py", "the name of a test file"),
    Meant("src/meltcore/measure/experiments/evals/gsm8k.py", "chain of thought", "the name of the prompting method"),
    Meant("src/meltcore/kernels/attention/prefill.py", "the compiler's choice", "nothing about experts here"),
    Meant("src/meltcore/kernels/fp8/fp8_gemv.py", "Products of e4m3", "scalar products of two numbers"),
)


@cache
def lines() -> tuple[tuple[str, int, str], ...]:
    """(file, line number, text) of every source file that people read; line 0 is its name."""
    paths = [path for directory in PROSE for path in sorted((ROOT / directory).rglob("*"))]
    rows = []
    for path in [*paths, *sorted(ROOT.glob("*.md"))]:
        name = str(path.relative_to(ROOT))
        if path.suffix in (".py", ".html", ".css", ".md", ".jinja") and not name.startswith(_NOT_PROSE):
            rows += [(name, number, text) for number, text in enumerate([path.stem, *path.read_text().splitlines()])]
    return tuple(rows)


@cache
def text_of_files() -> dict[str, str]:
    """Each file in lower case, as it is and with spaces for underscores: an underscore inside a name ends a word."""
    files: dict[str, list[str]] = {}
    for file, _, text in lines():
        files.setdefault(file, []).append(text.lower())
    return {file: "\n".join([*rows, *(row.replace("_", " ") for row in rows)]) for file, rows in files.items()}


def alternatives(word: str) -> list[str]:
    """The alternatives of a regular expression, split outside of parentheses."""
    parts, depth = [""], 0
    for letter in word:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def any_of(words: dict[str, str]) -> re.Pattern[str]:
    """One pattern for all words in lower case.

    Words that begin at a boundary share its check, so that the pattern takes a quarter of the time.
    """
    parts = [part for word in words for part in alternatives(word)]
    at_boundary = "|".join(part[2:] for part in parts if part.startswith(r"\b"))
    return re.compile("|".join([rf"\b(?:{at_boundary})", *(part for part in parts if not part.startswith(r"\b"))]))


def is_below(file: str, directory: str) -> bool:
    return "/" not in file if directory == _ROOT_DOCUMENTS else file.startswith(directory + "/")


def excused(file: str, text: str) -> bool:
    return any(each.file == file and each.text in text for each in EXCEPTIONS)


ROOTS = (*PROSE, _ROOT_DOCUMENTS)


def words_of(directory: str) -> dict[str, str]:
    return {**EVERYWHERE, **BY_DIRECTORY.get(directory, {})} if directory in ROOTS else BY_DIRECTORY[directory]


@pytest.mark.slow
@pytest.mark.parametrize("directory", [*ROOTS, *sorted(set(BY_DIRECTORY) - set(ROOTS))])
def test_words_that_the_field_does_not_use_do_not_occur(directory: str) -> None:
    words = words_of(directory)
    # Nearly all files have none of the words: one pattern of all passes them.
    any_word = any_of(words)
    found_in = {file for file, text in text_of_files().items() if is_below(file, directory) and any_word.search(text)}
    patterns = {word: re.compile(word, re.IGNORECASE) for word in words}
    hits = []
    for file, number, text in lines():
        if file not in found_in or excused(file, text):
            continue
        forms = {text, text.replace("_", " ")}
        found = [word for word, pattern in patterns.items() if any(map(pattern.search, forms))]
        hits += [f"{file}:{number}: {text.strip()[:100]} ({word}; write: {words[word]})" for word in found]
    assert not hits, f"{len(hits)} lines\n" + "\n".join(hits[:40])


@pytest.mark.parametrize("directory", [*ROOTS, *sorted(set(BY_DIRECTORY) - set(ROOTS))])
def test_pattern_of_all_words_finds_each_of_them(directory: str) -> None:
    words = words_of(directory)
    samples = [re.sub(r"\\b|\(\?[^)]*\)|[()?]", "", part) for word in words for part in alternatives(word)]
    texts = [f"a {sample.split('|')[-1]}{'e' * sample.endswith('is')}." for sample in samples]
    found = [text for text in texts if any(re.search(word, text) for word in words)]
    assert len(found) > 0.7 * len(texts)
    assert [text for text in found if not any_of(words).search(text)] == []


def test_exceptions_are_few_reasoned_and_needed() -> None:
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS
    for each in EXCEPTIONS:
        assert len(each.reason.split()) >= 3, f"{each}: say why"
        assert any(file == each.file and each.text in text for file, _, text in lines()), f"not needed: {each}"
