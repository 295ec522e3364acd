"""The documents say what is there: links, paths and tables, and pages that load nothing from other hosts."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import check_site
import performance_tables
import pytest
import report_picture
from code_tables import API_ROUTES, UNKNOWN_FIELDS, api_routes, threats

from meltcore.cli.main import COMMANDS, Command, command_parser
from meltcore.common.errors import RequestError
from meltcore.measure.documents.values.definitions import DEFINITIONS
from meltcore.serve.requests.protocol import ChatRequest, decode_request
from meltcore.text.chat_template import ChatTemplate

ROOT = Path(__file__).resolve().parent.parent

# What lives in a folder, its rules, where a fix belongs and which tests guard it.
AGENTS = [
    *(path / "AGENTS.md" for path in sorted((ROOT / "src/meltcore").iterdir()) if (path / "__init__.py").exists()),
    *(ROOT / folder / "AGENTS.md" for folder in ("benchmarks", "docs", "scripts", "tests")),
]
MOST_WORDS_OF_AGENTS = 150
# What is said twice is said once with a link; measurements and rejected attempts stand in the decisions.
MOST_WORDS_OF_READER_PAGES = 32_000
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.md") if path.name != "AGENTS.md"),
    *AGENTS,
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")
# A path of the project in backticks: with a folder of the project first and an ending last.
PATH = re.compile(r"`((?:src|tests|scripts|benchmarks|docs)/[\w./{},*-]+\.(?:py|md|json|html|sh|cu|yml|svg))`")

# A path below the package, such as `kernels/launch.py`, and a module or a name of one: `meltcore.kernels.launch`.
FOLDER = re.compile(r"`((?:src|tests|scripts|benchmarks|docs)/[\w/]+/)`")
INNER_PATH = re.compile(r"`([a-z_]+/[a-z_/]+\.(?:py|cu))`")
MODULE = re.compile(r"`(?:python -m )?meltcore((?:\.\w+)+)")
# A class: two words or more, joined by capitals.
CLASS = re.compile(r"`([A-Z][a-z0-9]+[A-Z][A-Za-z0-9]*)\b")
# A member of a class, and a file by its name alone.
MEMBER = re.compile(r"`([A-Z][a-z]\w+)\.([a-z_]\w*)")
FILE_NAME = re.compile(r"`([\w-]+\.(?:py|cu|svg|yml))`")
LOCAL_FILE = re.compile(r"`([\w-]+\.(?:py|cu|md|sh|yml))`")
LOCAL_FOLDER = re.compile(r"`([a-z_]+(?:/[a-z_]+)*/)`")
REMOVED_FILES = {"layer_gemms.cu"}  # which a decision looks for in git's history
# Names of others, and attributes of traces, which have the form of a class or of a module.
NOT_OURS = re.compile(r".*For(CausalLM|ConditionalGeneration)|NaN|MoE|HuggingFaceTB|QdstrmImporter|Node\w+Strategy")
TRACE_ATTRIBUTES = (".priority_class", ".replica", ".task")

# A name before the file that has it: `name` (`src/file.py`), or `name` in `src/file.py`.
NAME_OF_A_FILE = re.compile(
    r"`([A-Za-z_][\w.]*)(?:\(\))?` (?:\(|in )`((?:src|tests|scripts|benchmarks)/[\w/-]+\.(?:py|cu))`"
)

# A path of a result, also in a command line or a fence. Of one that ends a sentence, the period is no part.
RESULT = re.compile(r"benchmarks/results/[^\s`\"'|)\],;:]*")
RECORDED = re.compile(r"\bpython benchmarks/(\w+)\.py\b([^`\n#]*)")
JSON_COMMAND = re.compile(r'"command": ("(?:[^"\\]|\\.)*")')
# Their options have other names since: the commit of the result runs them.
RECORDED_BEFORE_A_RENAME = (
    *(f"story/{name}.json" for name in ("comparison", "tuning", "tuning_answers")),
    *(f"weighted_throughput_35b/h200-x{gpus}.json" for gpus in (4, 8)),
)

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_CELL_EDGE = re.compile(r"(?<!\\)\|")  # also in backticks: Markdown ends a cell there, unless a backslash is before it
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_and_paths_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    links = [target for pair in LINK.findall(text) for target in pair if target]
    local = [target.partition("#")[0] for target in links if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in local if not (document.parent / target).exists()]
    missing += [path for path in PATH.findall(text) if not re.search(r"[*{]", path) and not (ROOT / path).exists()]
    assert missing == []


def test_a_file_has_the_name_that_a_document_gives_for_it() -> None:
    found = [(document, *pair) for document in DOCUMENTS for pair in NAME_OF_A_FILE.findall(document.read_text())]
    assert len(found) > 30
    words = {path: set(re.findall(r"\w+", (ROOT / path).read_text())) for _, _, path in found}
    assert [each for each in found if each[1].split(".")[-1] not in words[each[2]]] == []


@cache
def project_files() -> frozenset[str]:
    """Return the names of all files of the project that a document may name without a folder."""
    folders = ("src", "tests", "scripts", "benchmarks", "docs", "docker")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    return frozenset(path.name for path in paths)


@cache
def module_of_class(name: str) -> str:
    """Return the text of the modules in src that define a class; empty where none does."""
    texts = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    return "".join(text for text in texts if re.search(rf"^class {name}\b", text, re.MULTILINE))


@cache
def defined_names() -> frozenset[str]:
    """Return the names of classes and functions, and of what modules assign, in all Python files of the project."""
    definition = re.compile(r"\b(?:class|def)\s+(\w+)|^(\w+)(?:: TypeAlias)? = ", re.MULTILINE)
    sources = (path for folder in ("src", "tests", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    return frozenset(name for path in sources for pair in definition.findall(path.read_text()) for name in pair)


def is_module_or_name(dotted: str) -> bool:
    """Return whether `.a.b` is a module or a package of meltcore, or a name in one."""
    path = ROOT / "src/meltcore" / dotted.strip(".").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists()


CURRENT = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which has old names


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_classes_and_modules_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in CLASS.findall(text) if name not in defined_names() and not NOT_OURS.fullmatch(name)]
    missing += [name for name in MODULE.findall(text) if name not in TRACE_ATTRIBUTES and not is_module_or_name(name)]
    missing += [folder for folder in FOLDER.findall(text) if not (ROOT / folder).is_dir()]
    roots = (ROOT, ROOT / "src/meltcore", ROOT / "tests", document.parent)
    missing += [path for path in INNER_PATH.findall(text) if not any((root / path).exists() for root in roots)]
    missing += [
        f"{name}.{member}"
        for name, member in MEMBER.findall(text)
        if not re.search(rf"\b{member}\b", module_of_class(name))
    ]
    missing += [name for name in FILE_NAME.findall(text) if name not in project_files() | REMOVED_FILES]
    assert missing == []


@pytest.mark.parametrize("document", AGENTS, ids=name_of)
def test_agents_of_a_folder_are_short_and_name_what_is_in_it(document: Path) -> None:
    text = document.read_text()
    assert text.startswith(f"# {document.parent.name}\n")
    assert len(text.split()) <= MOST_WORDS_OF_AGENTS
    missing = [name for name in LOCAL_FILE.findall(text) if not any(document.parent.rglob(name))]
    assert [name for name in missing if not (ROOT / name).exists()] == []
    roots = (document.parent, ROOT, ROOT / "src/meltcore")
    folders = LOCAL_FOLDER.findall(text)
    assert [name for name in folders if not any((root / name).is_dir() for root in roots)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_results_that_a_document_names_exist(document: Path) -> None:
    named = {found.rstrip(".") for found in RESULT.findall(document.read_text())}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def recorded_arguments(value: Any) -> Iterator[list[str]]:
    """Yield each list `arguments` of a decoded result file, at any depth."""
    if isinstance(value, dict):
        yield from ([value["arguments"]] if isinstance(value.get("arguments"), list) else [])
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from recorded_arguments(part)


def accepts(arguments: Sequence[str]) -> bool:
    """Return whether the parser of a command of `meltcore` takes the arguments."""
    name, *rest = arguments
    try:
        command_parser(name, importlib.import_module(Command.module(name))).parse_args(rest)
    except SystemExit:
        return False
    return True


@pytest.mark.slow
def test_printed_commands_of_benchmarks_parse_when_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*DOCUMENTS, *(ROOT / "benchmarks/results").rglob("*.json")]
    found = {(name, line) for path in files for name, line in RECORDED.findall(printed_text(path))}
    assert len(found) > 80
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise StopIteration

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(tmp_path)
    for name, line in sorted(found):
        for folder in re.findall(r"\.\.\./[\w.-]+", line):  # a path without its folders, of which some must exist
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(line)])
        try:
            with pytest.raises(StopIteration):
                importlib.import_module(name).main()
        except SystemExit:
            pytest.fail(f"not a command: python benchmarks/{name}.py{line}")


def printed_text(path: Path) -> str:
    """Return the text of a document, or the recorded commands of a result file."""
    if path.suffix != ".json":
        return path.read_text()
    return "\n".join(json.loads(text) for text in JSON_COMMAND.findall(path.read_text()))


@pytest.mark.slow
def test_recorded_arguments_of_meltcore_parse() -> None:
    files = (ROOT / "benchmarks/results").rglob("*.json")
    found = {name_of(path): [*recorded_arguments(json.loads(path.read_text()))] for path in files}
    refused = {path for path, recorded in found.items() if not all(accepts(each) for each in recorded if each)}
    assert refused == {f"benchmarks/results/{name}" for name in RECORDED_BEFORE_A_RENAME}


def test_every_folder_of_results_has_a_script_or_a_line() -> None:
    described = set(re.findall(r"`(\w+)/`", (ROOT / "benchmarks/README.md").read_text()))
    folders = {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert folders - scripts - described == set()
    assert described <= folders, "described, not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_rows_of_a_table_have_as_many_cells_as_its_header(document: Path) -> None:
    assert uneven_rows(document.read_text()) == []


def uneven_rows(text: str) -> list[str]:
    tables = _TABLE.findall(_FENCED.sub("", text))
    return [
        row
        for table in tables
        for row in table.splitlines()
        if len(_CELL_EDGE.findall(row)) != len(_CELL_EDGE.findall(table.partition("\n")[0]))
    ]


def test_row_with_a_cell_too_many_or_too_few_is_found() -> None:
    table = "\n| a | `b` |\n|---|---|\n| 1 | x \\| y |\n| 2 |\n| 3 | 4 | 5 |\n"
    assert uneven_rows(f"text{table}text") == ["| 2 |", "| 3 | 4 | 5 |"]
    assert uneven_rows(f"```\n{table}```\n") == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_of_a_document_parse(document: Path) -> None:
    if document.name == "cli.md":  # generated from the parsers
        return
    lines = [line for block in _FENCED.findall(document.read_text()) for line in block.replace("\\\n", "").splitlines()]
    for line in (line for line in lines if line.startswith("meltcore ")):
        arguments = shlex.split(line, comments=True)[1:]
        assert arguments[0] in COMMANDS, line
        assert accepts(arguments), line


@pytest.mark.slow
def test_tables_are_what_the_result_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the GPU score's levels is checked beside these: tests/benchmarks/test_gpu_types.py."""
    page = (ROOT / "docs" / "gpu-score.md").read_text()
    ladder = page.partition("score ladder -->\n\n")[2].partition("\n\n<!--")[0].splitlines()
    assert len(ladder) > 2
    monkeypatch.setitem(performance_tables._TABLES, "score ladder", lambda: ladder)
    stale = [
        name_of(path)
        for path in performance_tables.documents()
        if performance_tables.rendered(text := path.read_text()) != text
    ]
    assert stale == [], "run `make tables`"


def test_performance_page_begins_with_the_table_of_the_readme() -> None:
    documents = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
    of_readme, of_page = (_TABLE.findall(text) for text in documents)
    assert of_page[0].startswith("| concurrency |")
    assert of_page[0] in of_readme


def test_picture_of_the_report_is_of_the_page_that_is_rendered_now() -> None:
    picture = report_picture.PICTURE.read_bytes()
    assert report_picture.shown(picture) == report_picture.digest(report_picture.page()), "run `make tables`"
    other = report_picture.named(picture, "other")
    assert report_picture.shown(other) == "other", "the first digest counts"
    assert report_picture.shown(picture[:33]) is None


def words_by_page() -> dict[str, int]:
    """Return the words of each page that is written by hand, without generated tables and the decisions."""
    generated = re.compile(r"<!-- (?:results|generated):.*?<!-- end of (?:results|generated) -->", re.DOTALL)
    others = {"AGENTS.md", "changelog.md", "cli.md", "fleet-yaml.md"}
    pages = (path for path in (ROOT / "docs").rglob("*.md") if path.name not in others)
    texts = {name_of(path): generated.sub("", path.read_text()) for path in pages if path.parent.name != "decisions"}
    return {name: len(re.findall(r"\S*\w\S*", text)) for name, text in texts.items()}


def test_reader_pages_are_short() -> None:
    by_page = words_by_page()
    assert sum(by_page.values()) <= MOST_WORDS_OF_READER_PAGES, "\n".join(
        f"{by_page[each]:5} {each}" for each in by_page
    )


def generated_lines(document: str, name: str) -> list[str]:
    text = (ROOT / document).read_text()
    return text.partition(f"<!-- generated: {name} -->\n")[2].partition("<!-- end of generated -->")[0].splitlines()


def test_load_page_defines_every_metric_as_the_code_does() -> None:
    lines = generated_lines("docs/load.md", "load metrics")
    for each in DEFINITIONS:
        [line] = [line for line in lines if line.startswith(f"- **{each.name}** ")]
        assert line == f"- **{each.name}** ({each.unit}): {each.text}"
    assert len(list(filter(None, lines))) == len(DEFINITIONS)


@pytest.mark.parametrize(
    ("field", "accepted"),
    [
        ("functions", "[]"),
        ("function_call", '"none"'),
        ("service_tier", '"auto"'),
        ("verbosity", '"medium"'),
        ("moderation", None),
    ],
)
def test_api_page_lists_what_an_unsupported_field_accepts(field: str, accepted: str | None) -> None:
    cells = [line.split(" | ") for line in generated_lines("docs/api.md", "request fields")]
    [values] = [re.findall(r"`([^`]+)`", cell[2]) for cell in cells if f"`{field}`" in cell[0]]

    def decode(value: str) -> None:
        body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
        decode_request(body.encode(), ChatRequest)

    for value in values:
        decode(value)
    assert accepted in values if accepted else values == ["null"]
    with pytest.raises(RequestError, match=field):
        decode('"something else"')


def test_api_page_says_of_each_route_whether_the_server_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line for line in generated_lines("docs/api.md", "API routes") if line] == api_routes()
    for paths, note in ((("/v1/files",), "yes"), (("/v1/embeddings",), ""), (("/v1/rerank", "/v1/other"), "yes")):
        others = {each: row for each, row in API_ROUTES.items() if not {*each} & {*paths}}
        monkeypatch.setattr("code_tables.API_ROUTES", others | {paths: (("yes", "yes"), note)})
        with pytest.raises(ValueError, match=paths[0] if paths[0] != "/v1/rerank" else "/score"):
            api_routes()


def test_claim_of_the_threat_page_needs_a_test_below_it(tmp_path: Path) -> None:
    path = tmp_path / "tests/test_a.py"
    path.parent.mkdir()
    path.write_text("# threat: a page: it cannot act\n@mark\nasync def test_it() -> None: ...\n")
    assert threats(path.parent)[2:] == ["| a page | it cannot act | `tests/test_a.py`: `test_it` |"]
    path.write_text("# threat: a page: it cannot act\nOTHER = 1\n\n\ndef test_it() -> None: ...\n")
    with pytest.raises(ValueError, match="no test is below '# threat: a page: it cannot act"):
        threats(path.parent)


@pytest.mark.parametrize("field", UNKNOWN_FIELDS)
def test_field_of_vllm_that_is_not_known_is_refused_by_name(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: None}
    with pytest.raises(RequestError, match=f"{field}: this field is not known here"):
        decode_request(json.dumps(body).encode(), ChatRequest)


def test_gemma_template_of_the_api_page_writes_its_turns() -> None:
    """As the published one: the system message begins the first turn, and texts are trimmed."""
    [source] = re.findall(r"^```jinja\n(.*?)^```", (ROOT / "docs/api.md").read_text(), re.MULTILINE | re.DOTALL)
    template = ChatTemplate(source, {"bos_token": "<bos>"})
    texts = [("system", "Be brief."), ("user", " Hi\n"), ("assistant", "Hello."), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in texts]
    turns = ["user\nBe brief.\n\nHi", "model\nHello.", "user\nBye"]
    whole = "<bos>" + "".join(f"<start_of_turn>{turn}<end_of_turn>\n" for turn in turns) + "<start_of_turn>model\n"
    assert template.render(messages) == whole
    assert template.render(messages[1:]) == whole.replace("Be brief.\n\n", "")


def test_table_of_rows_that_do_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        performance_tables.rendered("<!-- results: offline/h200.json | nothing -->\n<!-- end of results -->")


@pytest.mark.parametrize(
    ("page", "loads"),
    [
        ('<script src="https://a.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//a.example/x.css">', True),
        ('<img src="http://a.example/x.png">', True),
        ("<style>@import url(https://a.example/f.css);</style>", True),
        ('<a href="https://a.example">read</a><img src="x.svg"><link rel="canonical" href="https://a.example">', False),
    ],
)
def test_page_that_loads_from_another_host_is_found(tmp_path: Path, page: str, loads: bool) -> None:
    (tmp_path / "index.html").write_text(f"<html><body>{page}</body></html>")
    assert bool(check_site.external_loads(tmp_path)) is loads


def test_page_without_search_from_a_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "a.html").write_text('<script src="iframe-worker.js"></script>')
    (tmp_path / "b.html").write_text("<p>text</p>")
    assert check_site.without_search(tmp_path) == ["a.html", "b.html"], "there is no index"
    (tmp_path / "search" / "search_index.js").write_text("var __index = {}")
    assert check_site.without_search(tmp_path) == ["b.html"]


def test_command_line_page_lists_the_environment_variables_that_a_user_may_set() -> None:
    own = {"PATH", "PYTHONPATH", "NCCL_NVLS_ENABLE", "HF_XET_CLIENT_READ_TIMEOUT", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"}
    pattern = re.compile(r'environ(?:\.get|\.setdefault)?[\[(]"([A-Z_]+)"')
    read = {name for path in (ROOT / "src").rglob("*.py") for name in pattern.findall(path.read_text())}
    page = (ROOT / "docs" / "cli.md").read_text()
    assert len(read) > 8
    assert [name for name in sorted(read - own - {"RAY_USAGE_STATS_ENABLED"}) if f"`{name}`" not in page] == []
