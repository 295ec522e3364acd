"""The rules of the house, read from the source itself (see DESIGN.md)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meltcore

SOURCE = Path(meltcore.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# An import points down its own half's list or to the ground floor; the halves never meet.
RUN = ("server", "engine", "models", "layers", "kernels", "text")
MEASURE = ("demo", "tune", "trials", "bench", "report", "evals", "load", "hardware", "forensics")
GROUND = ("results", "problems", "errors", "config")
ALLOWED = {
    "llm": ("engine", "models", "text"),
    "server": (
        "text",
        "engine.messages",
        "engine.sampling_params",
        "engine.host_memory",
        "engine.socket_folder",
        "models.checkpoint",
    ),
    "engine": ("models", "layers", "kernels", "text"),
    "models": ("layers", "kernels"),
    "layers": ("kernels",),
    "kernels": (),
    "text": ("engine.sampling_params", "models.checkpoint"),
    "demo": ("report", "evals", "load"),
    "tune": ("trials", "report", "evals", "load"),
    "trials": ("report", "evals", "load"),
    "bench": ("report", "hardware"),
    "report": ("evals", "load"),
    "evals": ("load",),
    "load": (),
    "forensics": (),
    "hardware": (),
    "results": (),
    "problems": (),
    "errors": (),
    "config": (),
}
NO_TORCH = (*MEASURE, *GROUND, "cli", "server", "text")
# What runs on the GPU for a hardware check: programs of their own, started as processes and imported by nobody.
PROBES = "hardware.probes"
HEAVY = {"torch", "transformers", "triton", "pandas", "aiohttp", "httpx", "safetensors"}
LONGEST_FILE, LONGEST_FUNCTION = 500, 70
LONGEST_KERNEL = 100  # the schedule of a Triton kernel reads worse in pieces
IMPORT_LIMIT_S = 0.2


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(SOURCE).with_suffix("").parts


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports at any depth, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "meltcore" if node.level else ""
            assert node.level == 0, f"{path.name} imports relatively; {base} imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(parts(path)))
def test_imports_point_down_or_to_the_ground_floor(path: Path) -> None:
    room = parts(path)[0]
    if room in ("cli", "__init__"):
        return
    assert room in ALLOWED, f"{room} has no place in the house yet: add it here and to DESIGN.md"
    inner = [name.removeprefix("meltcore.") for name in imports(path) if name.startswith("meltcore.")]
    allowed = (room, "__version__", *GROUND, *ALLOWED[room])
    assert [name for name in inner if not within(name, allowed)] == []


@pytest.mark.parametrize("room", NO_TORCH)
def test_measuring_and_front_rooms_import_nothing_heavy(room: str) -> None:
    files = [path for path in FILES if parts(path)[0] == room and not within(".".join(parts(path)), (PROBES,))]
    assert files
    heavy = {(path.name, name) for path in files for name in imports(path) if name.split(".")[0] in HEAVY}
    assert heavy == set()


def test_probes_are_imported_by_probes_only() -> None:
    outside = [path for path in FILES if not within(".".join(parts(path)), (PROBES,))]
    assert [path.name for path in outside for name in imports(path) if within(name, (f"meltcore.{PROBES}",))] == []


def test_the_halves_do_not_overlap() -> None:
    assert not set(RUN) & set(MEASURE)
    for room in MEASURE:
        assert not any(within(place, RUN) for place in ALLOWED[room])
    for room in RUN:
        assert not any(within(place, MEASURE) for place in ALLOWED[room])


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the parameters, which stand one a line in a kernel."""
    return (function.end_lineno or 0) - function.body[0].lineno + 2


def longest(name: str) -> int:
    return LONGEST_KERNEL if name.endswith("_kernel") else LONGEST_FUNCTION


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(parts(path)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name for node in functions if lines_of(node) > longest(node.name)}
    assert long == set()


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_verb_imports_its_work_only_when_run(path: Path) -> None:
    """At the top of a verb's file stand argparse and the standard library; `--help` must be fast."""
    if path.stem == "main":
        return
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == set()


def test_importing_meltcore_is_quick_and_brings_no_torch() -> None:
    code = (
        "import sys, time; started = time.process_time(); import meltcore; "
        "print(time.process_time() - started); sys.exit('torch' in sys.modules)"
    )
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
        times.append(float(done.stdout))
    assert min(times) < IMPORT_LIMIT_S


@pytest.mark.parametrize(
    "name",
    ["report", "evals", "load", "demo", "bench.run", "hardware.certify", "results.fingerprint", "results.tables"],
)
def test_measuring_modules_load_without_torch(name: str) -> None:
    code = f"import sys, meltcore.{name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
