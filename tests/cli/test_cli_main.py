"""The `meltcore` program: fast help, examples, errors as one line, exit codes."""

import argparse
import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import WAIT_S

from meltcore import __version__
from meltcore.cli.gpu import certify
from meltcore.cli.main import COMMANDS, Command, command_parser, main
from meltcore.common.errors import ConfigError

HELP_MODULES = 80  # 48 today; numpy alone brings 100


def test_help_loads_few_modules_and_names_every_command() -> None:
    code = (
        "import sys; before = len(sys.modules); sys.argv = ['meltcore', '--help']\n"
        "from meltcore.cli.main import main\n"
        "try: main()\nexcept SystemExit: print(len(sys.modules) - before, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert int(done.stderr) <= HELP_MODULES
    assert all(f"  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(Command.module(name))
    assert module.HELP
    description = command_parser(name, module).description
    assert description is not None
    assert max(map(len, description.splitlines())) <= 80
    assert module.EXAMPLES
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"meltcore {name}" in shown.split("examples:")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    code = (
        "import sys\nfrom meltcore.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=WAIT_S, check=False)
    assert done.returncode == 0


def test_help_defines_the_metrics_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "TTFT (ms): Time to first token: from the intended start" in capsys.readouterr().out


def test_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lod"]) == 2
    assert "unknown command 'lod'; commands are serve, stop, up, down, ps, logs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        ("load", "load URL", "the following arguments are required: URL"),
        ("load URL --concurency 3", "load URL", "unrecognized arguments: --concurency 3 (did you mean --concurrency?)"),
        ("load URL --zzz", "load URL", "unrecognized arguments: --zzz"),
        ("tune batching --max-num-seq=4", "tune KIND ...", "--max-num-seq=4 (did you mean --max-num-seqs?)"),
        ("tune batching --run", "tune batching [MODEL]", "argument --run: expected one argument"),
        ("certify --teir quick", "certify", "UNKNOWN: unrecognized arguments: --teir quick (did you mean --tier?)"),
    ],
)
def test_wrong_usage_is_one_line_of_usage_and_the_option_that_was_meant(
    arguments: str, usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"usage: meltcore {usage} [options] (--help lists them)"
    assert second.endswith(error)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Measure a server:" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"meltcore {__version__}\n"


def fake_command(monkeypatch: pytest.MonkeyPatch, name: str, outcome: object) -> None:
    """Make a command raise `outcome`, call it, or return it."""

    def run(args: object) -> int:
        if callable(outcome):
            return outcome(args)  # type: ignore[no-any-return]
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, int)
        return outcome

    module = SimpleNamespace(HELP="h", EXAMPLES="e", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, Command.module(name), module)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules[name])


def test_meltcore_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, "load", ConfigError("rate must be more than 0"))
    assert main(["load"]) == 2
    assert capsys.readouterr().err == "meltcore load: rate must be more than 0\n"


def interrupt_a_constructor(args: object) -> int:
    """Raise KeyboardInterrupt while an event loop exists that has no attributes yet. Its destructor raises, too."""
    loop = asyncio.SelectorEventLoop.__new__(asyncio.SelectorEventLoop)
    raise KeyboardInterrupt(str(type(loop)))


def test_interruption_is_exit_code_130_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    fake_command(monkeypatch, "load", interrupt_a_constructor)
    assert (main(["load"]), capsys.readouterr().err) == (130, "meltcore load: interrupted\n")
    assert certify.run(argparse.Namespace(), interrupt_a_constructor) == 3
    assert capsys.readouterr().err == "meltcore certify: UNKNOWN: interrupted\n"
    assert not unraisable


def test_exit_code_of_the_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, "load", 1)
    assert main(["load"]) == 1


def test_missing_engine_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, "serve", ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["serve"]) == 2
    assert "torch is not installed: pip install 'meltcore[engine]'" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "module"), [("serve", "meltcore.fleet.missing"), ("load", "numpy")])
def test_missing_module_outside_the_extra_is_raised(monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    fake_command(monkeypatch, command, ModuleNotFoundError(f"No module named {module!r}", name=module))
    with pytest.raises(ModuleNotFoundError):
        main([command])


def test_snapshot_prints_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot"]) == 0
    assert f"meltcore {__version__}" in capsys.readouterr().out
    assert main(["snapshot", "--json"]) == 0
    assert '"cores"' in capsys.readouterr().out


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_stream_is_discarded(closed: str, tmp_path: Path) -> None:
    """Otherwise the next opened file gets its number and the output."""
    code = (
        "import os, sys; from meltcore.cli.main import main; code = main(['rank', 'nothing-here']); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print(code, file.fileno() > 2, file=file); print('more')"
    )
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=True, timeout=WAIT_S)
    assert (tmp_path / "file").read_text() == "2 True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["leaderboard", "--help"], 2, "meltcore leaderboard: cannot write"),
        (["fleet", "init", "--tiny", "FILE"], 2, "meltcore fleet: cannot write"),
        (["certify", "--help"], 3, "meltcore certify: cannot write"),
        (["--help"], 2, "meltcore: cannot write"),
        ([], 2, "meltcore: cannot write"),
    ],
)
def test_lost_output_is_one_line_and_an_error(arguments: list[str], code: int, line: str, tmp_path: Path) -> None:
    """Status 1 would be the answer no; of `certify`, 2 would be FAIL."""
    arguments = [str(tmp_path / "fleet.yaml") if each == "FILE" else each for each in arguments]
    for unbuffered in ("", "1"):
        (tmp_path / "fleet.yaml").unlink(missing_ok=True)
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "meltcore.cli.main", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        assert (done.returncode, done.stderr) == (code, f"{line} to standard output: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x", "x\n" * 5000])
@pytest.mark.parametrize("way", ["print(TEXT)", "rich.print(TEXT)", "sys.stdout.buffer.write(TEXT.encode())"])
def test_closed_pipe_ends_a_command_quietly(way: str, text: str) -> None:
    code = (
        "import rich, sys, types; from meltcore.cli import main\n"
        f"def run(args): {way.replace('TEXT', repr(text))}; return 0\n"
        "sys.modules['meltcore.cli.load'] = types.SimpleNamespace(\n"
        "    HELP='h', EXAMPLES='e', add_arguments=lambda parser: None, run=run)\n"
        "sys.exit(main.main(['load']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["http://127.0.0.1:1"], "conformance"),
        (["localhost:1"], "conformance"),
        (["problems", "localhost:1"], "problems"),
    ],
)
def test_eval_of_an_address_alone_is_conformance(words: list[str], what: str) -> None:
    from meltcore.cli import eval as eval_command

    assert command_parser("eval", eval_command).parse_args(words).what == what
