"""The frame of the command: fast help, examples, errors as one line, exit codes."""

import importlib
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meltcore import __version__
from meltcore.cli.main import VERBS, main
from meltcore.errors import ConfigError

HELP_LIMIT_S = 0.3


def children_cpu_s() -> float:
    """Of all processes started here that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_within_300_ms_and_names_every_verb() -> None:
    """In processor time, which other work on the machine does not lengthen; it waits for nothing but its own files."""
    times = []
    for _ in range(5):
        before_s = children_cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "meltcore.cli.main", "--help"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        times.append(children_cpu_s() - before_s)
    assert min(times) < HELP_LIMIT_S
    assert all(f"  {verb}" in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_parts_and_shows_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(VERBS[verb].module)
    assert module.HELP
    assert module.EXAMPLES
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"meltcore {verb}" in shown.split("examples:")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_imports_no_torch_and_answers_soon(verb: str) -> None:
    code = (
        "import sys\nfrom meltcore.cli.main import main\n"
        f"try: main([{verb!r}, '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=30, check=False)
    assert done.returncode == 0


def test_help_defines_the_metrics_a_verb_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "TTFT (ms): Time to first token: from the intended start" in capsys.readouterr().out


def test_an_unknown_verb_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lod"]) == 2
    assert "no verb 'lod'; there are serve, stop, demo, load" in capsys.readouterr().err


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"meltcore {__version__}\n"


def verb_that(monkeypatch: pytest.MonkeyPatch, verb: str, outcome: object) -> None:
    """Make `verb` raise `outcome`, or return it."""

    def run(args: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, int)
        return outcome

    module = SimpleNamespace(HELP="h", EXAMPLES="e", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, VERBS[verb].module, module)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules[name])


def test_an_error_of_ours_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that(monkeypatch, "load", ConfigError("rate must be more than 0"))
    assert main(["load"]) == 2
    assert capsys.readouterr().err == "meltcore load: rate must be more than 0\n"


def test_an_interruption_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(monkeypatch, "load", KeyboardInterrupt())
    assert main(["load"]) == 130


def test_the_verbs_own_exit_code_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(monkeypatch, "load", 1)
    assert main(["load"]) == 1


def test_a_missing_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that(monkeypatch, "serve", ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["serve"]) == 2
    assert "torch is not installed: pip install 'meltcore[engine]'" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "name"), [("serve", "meltcore.server.missing"), ("load", "numpy")])
def test_a_missing_module_that_the_extra_would_not_bring_is_a_bug_and_shows(
    monkeypatch: pytest.MonkeyPatch, verb: str, name: str
) -> None:
    verb_that(monkeypatch, verb, ModuleNotFoundError(f"No module named {name!r}", name=name))
    with pytest.raises(ModuleNotFoundError):
        main([verb])


def test_snapshot_prints_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot"]) == 0
    assert f"meltcore {__version__}" in capsys.readouterr().out
    assert main(["snapshot", "--json"]) == 0
    assert '"cores"' in capsys.readouterr().out


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_the_shell_closed_goes_nowhere(closed: str, tmp_path: Path) -> None:
    """Or the next file that is opened gets its number, and what is printed would go there."""
    code = (
        "import os, sys; from meltcore.cli.main import main; code = main(['rank', 'nothing-here']); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print(code, file.fileno() > 2, file=file); print('more')"
    )
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "2 True\n"
