"""The layout of the package (docs/architecture.md): which package may import which, and the size of its files."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import source_counts
from import_graph import circles, parsed_files, two_way_pairs
from source_counts import COUNTS
from waiting import WAIT_S

import meltcore

SOURCE = Path(meltcore.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# What each package may import beside itself. Imports point down a half's list; the halves never meet.
GROUND = ("common", "settings", "protocol")
RUN = ("fleet", "serve", "offline", "engine", "models", "layers", "kernels", "text", "audio")
MEASURE = "measure"
# What the halves share beside `common`.
SHARED = (
    "protocol.json_lines",
    "protocol.step_sums",
    "protocol.cluster",
    "protocol.fleet_plan",
    "settings.server_templates",
)
_MEASURED = ("measure.documents", "measure.problems")
ALLOWED = {
    "common": (),
    "settings": ("common",),
    "protocol": ("common", "settings"),
    "fleet": (
        *("serve", "engine.memory.memory_needs", "models.checkpoints.checkpoint", "models.checkpoints.hub", *GROUND),
    ),
    "serve": ("audio", "text", "models.checkpoints.checkpoint", "models.configs.config_fields", *GROUND),
    "offline": ("engine", "models", "text", "audio", *GROUND),
    "engine": ("models", "layers", "kernels", "text", *GROUND),
    "models": ("layers", "kernels", *GROUND),
    "layers": ("kernels", "common"),
    "kernels": ("common",),
    "text": (
        *("models.checkpoints.checkpoint", "models.checkpoints.fairseq_config", "models.checkpoints.gguf.gguf_config"),
        *("models.checkpoints.gguf.gguf_file", "models.checkpoints.gguf.gguf_tokens", "models.configs.config_fields"),
        *("models.configs.turn_tokens", "models.configs.json_file", *GROUND),
    ),
    "audio": ("common",),
    "measure.experiments.demo": (
        *("measure.experiments.evals", "measure.experiments.servers", "measure.report", "measure.load", *_MEASURED),
    ),
    "measure.experiments.tune": (
        *("measure.experiments.compare", "measure.experiments.evals", "measure.experiments.servers", "measure.report"),
        *("measure.load", *_MEASURED),
    ),
    "measure.experiments.compare": (
        *("measure.experiments.servers", "measure.report", "measure.load", "measure.node", *_MEASURED),
    ),
    "measure.experiments.evals": ("measure.experiments.servers", "measure.load", *_MEASURED),
    "measure.experiments.servers": ("measure.load", *_MEASURED),
    "measure.score": ("measure.report", "measure.load", "measure.node", *_MEASURED),
    # A page shows the rows and charts that the record of a task names.
    "measure.report": ("measure.load.tasks", *_MEASURED),
    "measure.load": _MEASURED,
    "measure.node": _MEASURED,
    "measure.trace": _MEASURED,
    "measure.documents": (),
    "measure.problems": (),
    "measure": (),
}
NO_TORCH = ("measure", *GROUND, "cli", "fleet", "serve", "text", "audio")
# Hardware checks run their probe functions in processes of their own, so these alone use torch: inside functions, or in
# a module that only such functions import.
CHECKS, GPU_TIMING = "measure.node.certify.checks", "measure.node.certify.gpu_timing"
HEAVY = {"torch", "transformers", "triton", "pandas", "aiohttp", "httpx", "safetensors"}
LONGEST_FILE, LONGEST_FUNCTION = 500, 70
LONGEST_KERNEL = 100  # the schedule of a Triton kernel reads worse in pieces
IMPORTED_MODULES = 40  # 26 today; numpy alone brings 100
# Numbers that may only fall (docs/decisions/package-layout.md has their goals). Lower one with the code that lowers it.
MOST = {
    "rooms": 16,
    "fullest folder": 18,
    "import circles": 0,
    "two-way pairs of folders in engine": 0,
    "two-way pairs of folders": 0,
    "files that name a task": 2,
    "files that name synthesis": 4,
    "settings": 125,
    "forms of a chat request": 18,
    "forms of a model at start": 5,
    "branches by mode": 0,
    "server starters": 1,
    "HTTP clients": 2,
    "NVML readers": 1,
    "verdict types": 2,
    "repeated class names": 3,
}


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCE).with_suffix("").parts


@pytest.fixture(scope="module", autouse=True)
def _syntax_trees() -> Iterator[None]:
    """Let go of the trees afterwards: each collection of garbage in a later test would walk their million nodes."""
    yield
    for cached in (parsed_files, nodes, source_counts._nodes):
        cached.cache_clear()


def parsed(path: Path) -> ast.Module:
    return parsed_files()["/".join(parts(path))]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and functions of a file, at any depth."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(parsed(path)) if isinstance(node, kinds))


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports at any depth, those for type checkers included."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; imports of meltcore are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def package_of(path: Path) -> str | None:
    """Return the package of ALLOWED that holds a file, the innermost one; None where none does."""
    name = ".".join(parts(path))
    return max((package for package in ALLOWED if within(name, (package,))), key=len, default=None)


@pytest.mark.slow
def test_imports_point_down_or_to_the_ground_floor() -> None:
    wrong = []
    for path in FILES:
        if parts(path)[0] in ("cli", "__init__"):
            continue
        package = package_of(path)
        assert package is not None, f"{path} is not in the layout yet: add it here and to docs/architecture.md"
        inner = [name.removeprefix("meltcore.") for name in imports(path) if name.startswith("meltcore.")]
        shared = ("common", *SHARED) if within(package, (MEASURE,)) else ()
        allowed = (package, "__version__", *ALLOWED[package], *shared)
        wrong += ["/".join(parts(path)) + " imports " + name for name in inner if not within(name, allowed)]
    assert wrong == []


@pytest.mark.slow
def test_packages_without_torch_import_nothing_heavy() -> None:
    files = [path for path in FILES if not within(".".join(parts(path)), (CHECKS, GPU_TIMING))]
    assert set(NO_TORCH) <= {parts(path)[0] for path in files}
    files = [path for path in files if parts(path)[0] in NO_TORCH]
    heavy = {("/".join(parts(path)), name) for path in files for name in imports(path) if name.split(".")[0] in HEAVY}
    assert heavy == set()


def imports_at_load(path: Path) -> Iterator[str]:
    """Names that a file imports when it is loaded: outside functions and `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, functions)]


@pytest.mark.slow
def test_hardware_checks_import_torch_in_probe_functions_only() -> None:
    checks = [path for path in FILES if within(".".join(parts(path)), (CHECKS,))]
    at_load = {(path.name, name) for path in checks for name in imports_at_load(path)}
    assert {entry for entry in at_load if entry[1].split(".")[0] in HEAVY} == set()
    assert {entry for entry in at_load if within(entry[1], (f"meltcore.{GPU_TIMING}",))} == set()
    others = [path for path in FILES if path not in checks]
    assert [path.name for path in others for name in imports(path) if within(name, (f"meltcore.{GPU_TIMING}",))] == []


def test_halves_share_what_is_named_here() -> None:
    for package, allowed in ALLOWED.items():
        other = RUN if within(package, (MEASURE, *GROUND)) else (MEASURE,)
        assert not any(within(place, other) for place in allowed), package


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_what_exists_several_times_becomes_less(name: str) -> None:
    found = COUNTS[name]()
    assert len(found) <= MOST[name], "\n".join(found)


def test_circles_and_pairs_of_imports_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"b"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert two_way_pairs(graph) == []
    assert two_way_pairs(graph | {"c": {"a", "b"}}) == [("b", "c")]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the parameters, which stand one a line in a kernel."""
    return (function.end_lineno or 0) - function.body[0].lineno + 2


def longest(name: str) -> int:
    return LONGEST_KERNEL if name.endswith("_kernel") else LONGEST_FUNCTION


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by name: of two alike it collects one."""
    names = [path.name for path in (SOURCE.parents[1] / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.slow
def test_files_and_functions_are_short() -> None:
    assert ["/".join(parts(path)) for path in FILES if len(path.read_text().splitlines()) > LONGEST_FILE] == []
    functions = [
        (path, node)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = ["/".join(parts(path)) + ": " + node.name for path, node in functions if lines_of(node) > longest(node.name)]
    assert long == []


def is_compiled_by_triton(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def has_all_types(function: ast.FunctionDef) -> bool:
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    untyped = {each.arg for each in parameters if each is not None and each.annotation is None}
    return function.returns is not None and untyped <= {"self", "cls"}


@pytest.mark.slow
def test_functions_beside_triton_kernels_have_types() -> None:
    """pyproject.toml lets mypy pass untyped functions in `kernels`, for what Triton compiles and nothing else."""
    files = [path for path in FILES if parts(path)[0] == "kernels"]
    functions = [(path, node) for path in files for node in nodes(path) if isinstance(node, ast.FunctionDef)]
    assert any(is_compiled_by_triton(each) for _, each in functions)
    untyped = [(path, each) for path, each in functions if not is_compiled_by_triton(each) and not has_all_types(each)]
    assert ["/".join(parts(path)) + ": " + each.name for path, each in untyped] == []


@pytest.mark.slow
def test_verbs_import_their_work_only_when_run() -> None:
    """At the top of a verb's file stand argparse and the standard library; `--help` must be fast."""
    files = [path for path in (SOURCE / "cli").rglob("[a-z]*.py") if path.stem != "main"]
    assert len(files) > 20
    for path in files:
        top = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
        assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == set(), path.stem


def test_importing_meltcore_loads_few_modules() -> None:
    code = "import sys; before = len(sys.modules); import meltcore; print(len(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert int(done.stdout) <= IMPORTED_MODULES


def modules_with(heavy: set[str], names: Sequence[str]) -> str:
    """What importing these modules, one after another in one process, loads of `heavy`; by module."""
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('meltcore.' + name)\n"
        f"    for each in {heavy!r} & set(sys.modules):\n"
        "        print(name, each)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    ).stdout


@pytest.mark.slow
def test_measuring_modules_load_without_torch() -> None:
    names = ("report", "report.load.run", "load", "experiments.evals", "experiments.demo.run", "score.run")
    others = ("node.certify.checks.run", "documents.fingerprint")
    assert modules_with({"torch", "transformers"}, [f"measure.{name}" for name in (*names, *others)]) == ""


def test_serving_processes_load_without_numpy() -> None:
    """It takes 0.1 s of CPU time and 16 MB in the supervisor and in each API server."""
    assert modules_with({"numpy", "torch", "gguf"}, ("fleet.supervisor", "serve.api_server")) == ""


@pytest.mark.slow
def test_importing_the_offline_api_collects_no_garbage() -> None:
    """Full collections took 0.26 s of its 2.5 s of CPU time."""
    code = (
        "import gc; runs = []; gc.callbacks.append(lambda phase, info: runs.append(info['generation'])); "
        "import meltcore; before = runs.count(2); meltcore.LLM; print(runs.count(2) - before, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["0", "True"]
