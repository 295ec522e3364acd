"""Counts what makes the package large: things that exist several times. `tests/test_layout.py` lets them only fall.

source_counts.py            each count with its number
source_counts.py NAME       what is counted under a name

Every count comes from the syntax trees, so that a new name for the same thing does not change it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeGuard

from import_graph import SOURCE, circles, folders, imports, parsed_files, two_way_pairs

TASKS = ("generation", "translation", "transcription", "synthesis")
# Roots of everything that can be set: fleet.yaml, and the settings of an engine process.
SETTING_ROOTS = ("FleetSpec", "EngineConfig")
# What is None, or says no, where a server is no fleet, or its engines are here. The last four came when none was left.
MODES = ("policy", "fleet", "cluster", "ray", "is_fleet", "planner", "site", "in_turns")
# What starts a process: a name of `common/process.py` that a module imports, or one that it calls.
STARTS = ("start", "start_async", "LoggedProcess", "Popen", "create_subprocess_exec", "start_process")
CLIENT_LIBRARIES = ("http.client", "urllib.request", "aiohttp", "httpx")
CLIENT_BASES = ("Protocol", "BufferedProtocol")
MOST_VERDICTS = 20  # fault codes are more
ABSENT = {"NOT_APPLICABLE", "UNKNOWN"}  # what stands for a reading that is missing
# The forms of a chat request: what each holds, and the process border that it crosses or how long it lives. Then the
# same of a model between fleet.yaml and its engine.
CHAT_FORMS = {
    "connection": ("the socket of its client, with what was read of it", "several requests, one after another"),
    "scope": ("method, path and headers, as ASGI has them", "border of the HTTP server"),
    "Exchange": ("its key, class and time limit, how to answer it, its log line", "from the gate to the log line"),
    "body": ("the bytes of JSON", "until they are decoded, or sent to an upstream server"),
    "ChatRequest": ("the fields of the body; first four where an upstream may answer", "until it is submitted"),
    "GenerationTicket": (
        "its choices, its place and cost in the queue",
        "from the decoded body to its end at the model, before and after its admission",
    ),
    "token ids": ("the prompt of a chat after its template", "until its choice has packed them"),
    "SamplingParams": ("how tokens are chosen", "border of the engine, with each prompt"),
    "Choice": (
        "one answer to a prompt: its text so far, its detokenizer",
        "as long as its ticket, at one replica after another",
    ),
    "AddRequest": ("prompt, sampling, priority", "border of the engine"),
    "Request": ("tokens and pages of one sequence", "from its arrival in the engine to its last token"),
    "Chunk": ("its tokens in one step", "one step"),
    "Batch": (
        "the chunks of all sequences, flat",
        "one step; all ranks get a `Step` with it, or with row numbers alone where a decode graph needs no more",
    ),
    "PaddedInputs": ("the batch, padded to a prefill graph", "one step with prompts or drafts, on the device"),
    "AttentionMetadata": ("where its keys and values are", "one step, on the device"),
    "SampleResult": ("sampled tokens and log-probabilities", "until the host has read them from the device"),
    "SequenceOutput": ("new tokens of one sequence", "border of the API server"),
    "StepOutputs": ("the outputs of a step for one API server", "border of the API server"),
}
MODEL_FORMS = {
    "ModelSection": (
        "what fleet.yaml or the flags of `serve` say; a plan adds memory and GPUs",
        "until a reload, and to API servers",
    ),
    "PlannedEngine": (
        "the bytes that an engine takes, which replica it is, and where it may be",
        "while a fleet is planned, from one attempt to the next",
    ),
    "Plan": ("engines by GPU and by host, with their needs", "until the next plan, and on a page"),
    "AddModel": ("its section, and what API servers know of its engines", "border of the API server"),
    "ServedModel": (
        "its replicas, each with its EngineConfig, its GPUs and its state",
        "from its first start to its end; the EngineConfig crosses the border of the engine",
    ),
}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_files = parsed_files


@cache
def _imports() -> dict[str, set[str]]:
    return imports(_files())


@cache
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def rooms() -> list[str]:
    """Return the modules and folders at the top."""
    files = (path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted({file.parts[0] for file in files if len(file.parts) > 1 or file.suffix == ".py"})


def fullest_folder() -> list[str]:
    """Return the modules of the folder that has the most."""
    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for path in _files():
        by_folder[path.rpartition("/")[0]].append(path)
    return max(by_folder.values(), key=len)


def import_circles() -> list[str]:
    """Return the circles of modules that import each other, imports in functions and for types included."""
    return [", ".join(circle) for circle in circles(_imports())]


def engine_pairs() -> list[str]:
    """Return the pairs of folders in engine/ that import each other."""
    return [pair for pair in folder_pairs() if all(each.startswith("engine") for each in pair.split(" and "))]


def folder_pairs() -> list[str]:
    """Return the pairs of folders that import each other, anywhere in the package."""
    return [f"{one or '.'} and {two}" for one, two in two_way_pairs(folders(_imports()))]


def task_names() -> list[str]:
    """Return the modules that name a task by a string, or by a constant or an enum's member of that name."""
    return [path for path, tree in _files().items() if _names_a_task(tree)]


def _names_a_task(tree: ast.Module) -> bool:
    docstrings = set(map(id, _docstrings(tree)))
    return any(
        (isinstance(node, ast.Constant) and node.value in TASKS and id(node) not in docstrings)
        or (isinstance(node, ast.Name | ast.Attribute) and _last(node) in map(str.upper, TASKS))
        for node in _nodes(tree)
    )


def synthesis_files() -> list[str]:
    """Return the modules outside its folders and its modules that name synthesis in an identifier or a string."""
    others = {path: tree for path, tree in _files().items() if "synthesis" not in path.split("/")}
    return [path for path, tree in others.items() if any("synthes" in word.lower() for word in _words(tree))]


def _words(tree: ast.Module) -> Iterator[str]:
    docstrings = set(map(id, _docstrings(tree)))
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute):
            yield _last(node)
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in _nodes(tree):
        if isinstance(node, (ast.Module, *_DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _last(node: ast.AST) -> str:
    """Return the last name of an expression: `policy` of `self._parts.policy`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def settings() -> list[str]:
    """Return the fields of the classes that are reached from SETTING_ROOTS through the types of fields."""
    classes = {path: {each.name: each for each in tree.body if _has_fields(each)} for path, tree in _files().items()}
    pending = [(path, name) for path, named in classes.items() for name in SETTING_ROOTS if name in named]
    found: list[str] = []
    seen = set(pending)
    while pending:
        path, name = pending.pop()
        node = classes[path][name]
        found += [f"{name}.{ast.unparse(field.target)}" for field in _fields(node)]
        for part in [*node.bases, *(field.annotation for field in _fields(node))]:
            types = {_last(each) for each in ast.walk(part)}
            reached = {(_origin(path, each), each) for each in types if each in classes[_origin(path, each)]} - seen
            pending += sorted(reached)
            seen |= reached
    return found


def _has_fields(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and bool(_fields(node))


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in node.body if isinstance(each, ast.AnnAssign)]


def _origin(path: str, name: str) -> str:
    """Return the module that a module imports a name from; itself where it imports none of that name."""
    for node in ast.walk(_files()[path]):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            origin = (node.module or "").partition(".")[2].replace(".", "/")
            return origin if origin in _files() else path
    return path


def chat_forms() -> list[str]:
    """Return the forms of a chat request, from the socket to the kernel and back."""
    return _existing(CHAT_FORMS)


def model_forms() -> list[str]:
    """Return the forms of a model between fleet.yaml and its engine."""
    return _existing(MODEL_FORMS)


def _existing(forms: Iterable[str]) -> list[str]:
    """Return the forms after a check that each named class exists. Raises LookupError for one that does not."""
    classes = {node.name for tree in _files().values() for node in _nodes(tree) if isinstance(node, ast.ClassDef)}
    missing = {name for form in forms if (name := form.partition(" ")[0]).lstrip("_")[0].isupper()} - classes
    if missing:
        raise LookupError(f"no class {', '.join(sorted(missing))}: correct the list of forms")
    return list(forms)


def mode_branches() -> list[str]:
    """Return the conditions on whether a server is a fleet, restarts its engines, or has them on a cluster."""
    found = []
    for path, tree in _files().items():
        for node in _nodes(tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
                found += [f"{path}:{each.lineno}" for each in _operands(node.test) if _is_mode(each)]
            elif isinstance(node, ast.comprehension):
                found += [f"{path}:{each.lineno}" for test in node.ifs for each in _operands(test) if _is_mode(each)]
            elif isinstance(node, ast.Compare) and _is_none_test(node) and _is_mode(node):
                found.append(f"{path}:{node.lineno}")
    return sorted(set(found))


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a condition that `and`, `or` and `not` join."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand)
    else:
        yield test


def _is_none_test(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], ast.Is | ast.IsNot) and ast.unparse(node.comparators[0]) == "None"


def _is_mode(test: ast.expr) -> bool:
    """Return whether a condition asks for the presence, the truth or the type of one of MODES."""
    if isinstance(test, ast.Compare) and _is_none_test(test):
        subject: ast.AST = test.left
    elif isinstance(test, ast.Call) and _last(test.func) == "isinstance":
        subject = test.args[0]
    else:
        subject = test
    if isinstance(subject, ast.NamedExpr):
        subject = subject.value
    return _last(subject).lstrip("_") in MODES


def server_starters() -> list[str]:
    """Return the modules that start a process and, in a loop of their own, wait until it is ready or raise an error."""
    return [
        path for path, tree in _files().items() if {*STARTS} & _process_names(tree) and any(map(_is_wait, _nodes(tree)))
    ]


def _process_names(tree: ast.Module) -> set[str]:
    """Return what a module calls of the standard library to start a process, and imports of `common/process.py`."""
    nodes = _nodes(tree)
    calls = {_last(node.func) for node in nodes if isinstance(node, ast.Call) and _last(node.func) != "start"}
    imported = [node.names for node in nodes if isinstance(node, ast.ImportFrom) and _is_process_module(node)]
    return calls | {alias.name for names in imported for alias in names}


def _is_process_module(node: ast.ImportFrom) -> bool:
    return node.module == "meltcore.common.process"


def _is_wait(node: ast.AST) -> bool:
    """Return whether a loop sleeps between attempts and ends with an error."""
    inner = list(ast.walk(node)) if isinstance(node, ast.While | ast.For) else []
    sleeps = any(isinstance(each, ast.Call) and _last(each.func) == "sleep" for each in inner)
    return sleeps and any(isinstance(each, ast.Raise) for each in inner)


def http_clients() -> list[str]:
    """Return the ways to send an HTTP request: own connections on asyncio, and libraries.

    The clients of users (openai, dwani, requests) do not count: the demo opens every route with them.
    """
    libraries = {
        name
        for tree in _files().values()
        for node in _nodes(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if (name := alias.name) in CLIENT_LIBRARIES
    }
    own = [path for path, tree in _files().items() if any(map(_is_connection, _nodes(tree)))]
    return [*own, *sorted(libraries)]


def _is_connection(node: ast.AST) -> bool:
    """Return whether a class is an asyncio protocol that reads responses, so a client's."""
    return (
        isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).startswith("asyncio.") and _last(base) in CLIENT_BASES for base in node.bases)
        and not any(_last(each) == "HttpRequestParser" for each in ast.walk(node))
    )


def nvml_readers() -> list[str]:
    """Return the modules that open NVML themselves."""
    return [path for path, tree in _files().items() if any(_last(node) == "nvmlInit" for node in _nodes(tree))]


def verdict_types() -> list[str]:
    """Return the sets of verdicts: Literal types of two to MOST_VERDICTS words in capitals, equal sets once."""
    found = {
        " ".join(sorted(words))
        for tree in _files().values()
        for node in _nodes(tree)
        if isinstance(node, ast.Subscript)
        and _last(node.value) == "Literal"
        and _are_verdicts(words := _words_of(node))
    }
    return sorted(found)


def _words_of(literal: ast.Subscript) -> set[str]:
    return {str(each.value) for each in ast.walk(literal.slice) if isinstance(each, ast.Constant)}


def _are_verdicts(words: set[str]) -> bool:
    return 1 < len(words) <= MOST_VERDICTS and all(map(str.isupper, words)) and not words <= ABSENT


def repeated_classes() -> list[str]:
    """Return the names of public classes at the top of modules that occur more than once."""
    names = Counter(
        node.name
        for tree in _files().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


COUNTS: Mapping[str, Callable[[], list[str]]] = {
    "rooms": rooms,
    "fullest folder": fullest_folder,
    "import circles": import_circles,
    "two-way pairs of folders in engine": engine_pairs,
    "two-way pairs of folders": folder_pairs,
    "files that name a task": task_names,
    "files that name synthesis": synthesis_files,
    "settings": settings,
    "forms of a chat request": chat_forms,
    "forms of a model at start": model_forms,
    "branches by mode": mode_branches,
    "server starters": server_starters,
    "HTTP clients": http_clients,
    "NVML readers": nvml_readers,
    "verdict types": verdict_types,
    "repeated class names": repeated_classes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=tuple(COUNTS), help="the count whose entries to list")
    name = parser.parse_args().name
    for each in COUNTS if name is None else ():
        print(f"{len(COUNTS[each]()):4} {each}")
    if name is not None:
        print("\n".join(COUNTS[name]()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
