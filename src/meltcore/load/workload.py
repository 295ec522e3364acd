"""What is asked of a server: prompts with their output limits, and where known the way to mark an answer.

Request `i` of a workload is the same whoever asks for it, so worker processes need no channel to share prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from meltcore import problems
from meltcore.errors import ConfigError
from meltcore.load.config import Span, parse_options, parse_span

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

PROBLEM_KINDS = ("short", "long", "mixed")
PROBLEM_MAX_TOKENS = 512
# Above every control id and below the vocabulary of any published model; a server refuses an id it does not have.
RANDOM_LOW_ID, RANDOM_HIGH_ID = 100, 30_000

_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
# That a line of a file may set for its own request.
_SAMPLING_FIELDS = ("temperature", "ignore_eos", "skip_special_tokens")
# An answer that goes on after its end. Special tokens are part of it then: without their text an answer of nothing else
# is empty, one that begins with some has a late first text, and none can be counted again.
WHOLE_LENGTH = {"ignore_eos": True, "skip_special_tokens": False}

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """One request: its path, the fields of its body that are its own, and a judge of the answer where there is one."""

    path: str
    fields: dict[str, Any]
    judge: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class Workload:
    """`prompt(i)` is request i of the run, for any i from 0; `judged` says whether every answer can be marked."""

    name: str
    prompt: Callable[[int], Prompt]
    judged: bool


def load_workload(text: str, *, count: int, seed: int, max_tokens: int | None) -> Workload:
    """Read `problems:KIND`, `random:in=SPAN,out=SPAN[,vocab=N][,eos=1]` or a path to a JSONL file.

    `count` is how many requests the run will make at most. Raises ConfigError with what is wrong with the text.
    """
    kind, _, rest = text.partition(":")
    if kind == "problems":
        return _problems(text, rest or "short", count, seed, max_tokens)
    if kind == "random":
        return _random_ids(text, rest, seed, max_tokens)
    return _file(Path(text), max_tokens)


def check_workload(text: str, *, max_tokens: int | None) -> None:
    """Raises ConfigError as `load_workload`: to find out before a server is started for it."""
    load_workload(text, count=1, seed=0, max_tokens=max_tokens)


def _problems(name: str, kind: str, count: int, seed: int, max_tokens: int | None) -> Workload:
    if kind not in PROBLEM_KINDS:
        raise ConfigError(f"workload {name}: there are problems:{', problems:'.join(PROBLEM_KINDS)}")
    made = problems.generate("heldout", kind=cast(Literal["short", "long", "mixed"], kind), count=count, seed=seed)
    limit = max_tokens or PROBLEM_MAX_TOKENS

    def prompt(index: int) -> Prompt:
        problem = made[index % len(made)]
        fields = {"messages": [{"role": "user", "content": problem.question}], "max_tokens": limit}
        return Prompt(CHAT_PATH, fields, lambda text: problems.is_right(problem, text))

    return Workload(name, prompt, judged=True)


def _random_ids(name: str, rest: str, seed: int, max_tokens: int | None) -> Workload:
    """Token ids, not text: decoding random ids and encoding the text again changes the length of most prompts."""
    options = parse_options(rest, f"workload {name}", ("in", "out", "vocab", "eos"))
    lengths = parse_span(options.get("in", "128"), "random:in")
    outputs = parse_span(options.get("out", str(max_tokens or 128)), "random:out")
    high = parse_span(options.get("vocab", str(RANDOM_HIGH_ID)), "random:vocab").high
    low = min(RANDOM_LOW_ID, high // 2)
    ignore_eos = options.get("eos", "0") == "0"

    def prompt(index: int) -> Prompt:
        # A generator per request: no shared state, and the run's seed in it keeps prefix caches of other runs cold.
        rng = random.Random(f"{seed}/{index}")
        ids = [rng.randrange(low, high) for _ in range(_draw(rng, lengths))]
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": _draw(rng, outputs)}
        if ignore_eos:
            fields |= WHOLE_LENGTH
        return Prompt(COMPLETIONS_PATH, fields)

    return Workload(name, prompt, judged=False)


def _draw(rng: random.Random, span: Span) -> int:
    return rng.randint(span.low, span.high)


def _file(path: Path, max_tokens: int | None) -> Workload:
    """One JSON object a line; when the run needs more requests than there are lines, it starts again at the first."""
    try:
        # Not splitlines(): JSON leaves U+0085, U+2028 and U+2029 as they are inside its strings, and it splits there.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"workload {path}: cannot be read ({error}); a workload is a JSONL file, problems:short|long|mixed, "
            f"or random:in=128-1024,out=128"
        ) from error
    prompts = [
        _file_prompt(line, f"{path} line {number}", max_tokens) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"workload {path}: the file has no requests")
    judged = all(prompt.judge is not None for prompt in prompts)
    return Workload(path.name, lambda index: prompts[index % len(prompts)], judged)


def _file_prompt(line: str, where: str, max_tokens: int | None) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: not a JSON object")
    given = [name for name in _PROMPT_FIELDS if name in entry]
    unknown = set(entry) - {*_PROMPT_FIELDS, *_SAMPLING_FIELDS, "max_tokens", "answer"}
    if len(given) != 1 or unknown:
        raise ConfigError(
            f"{where}: needs exactly one of prompt, messages, prompt_token_ids (and may have max_tokens, answer, "
            f"{', '.join(_SAMPLING_FIELDS)}); "
            f"it has {', '.join(entry)}"
        )
    limit = entry.get("max_tokens", max_tokens)
    fields: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    fields |= {name: entry[name] for name in _SAMPLING_FIELDS if name in entry}
    if given == ["messages"]:
        path, fields["messages"] = CHAT_PATH, entry["messages"]
    else:
        path, fields["prompt"] = COMPLETIONS_PATH, entry[given[0]]
    return Prompt(path, fields, _judge(str(entry["answer"])) if "answer" in entry else None)


def _judge(answer: str) -> Callable[[str], bool]:
    """A number must be the last number of the text (worked answers end with it); words must occur in it."""
    wanted = _as_number(answer)

    def last_number_agrees(text: str) -> bool:
        found = _NUMBER.findall(text)
        return bool(found) and _as_number(found[-1]) == wanted

    if wanted is None:
        return lambda text: answer.casefold() in text.casefold()
    return last_number_agrees


def _as_number(text: str) -> float | None:
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text.strip()) else None
