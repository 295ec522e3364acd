"""The full evaluation and its score: when there is one, and when it is zero."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fake_openai import ITEMS, TOKENIZER, EvaluationServer, write_items
from waiting import WAIT_S, wait_until

from meltcore.cli.main import main
from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.common.errors import ConfigError
from meltcore.common.process import block_signals
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.documents.schema import CheckResult, LevelResult, RunResult
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.evaluation import score
from meltcore.measure.experiments.servers import accepts_connections

SERVER = Path(__file__).parent / "fake_openai.py"
QUICK = ["--num-prompts", "8", "--input-len", "8", "--output-len", "20", "--tokenizer", TOKENIZER, "--seed", "1"]
FEW = ["--levels", "1", "--num-prompts", "4", "--limit", "20"]


@pytest.fixture
def items(tmp_path: Path) -> Path:
    return write_items(tmp_path / "items.jsonl")


@pytest.fixture
def whole() -> Iterator[Callable[[int], EvaluationServer]]:
    servers: list[EvaluationServer] = []

    def start(right: int) -> EvaluationServer:
        servers.append(EvaluationServer(ITEMS, right))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def only_run(out: Path) -> tuple[Path, RunResult]:
    [folder] = out.iterdir()
    return folder, read_result(folder)


def level(load: int, verdict: Verdict = "OK") -> LevelResult:
    return LevelResult(
        concurrency=load, requests=1, succeeded=1, failed=0, peak_in_flight=1, duration_s=1.0,
        output_tokens_per_s=10.0 * load, total_tokens_per_s=100.0 * load, prompt_tokens=1, output_tokens=1,
        verdict=verdict,
    )  # fmt: skip


PASSED = [CheckResult(name="GSM8K", status="PASS")]
LEVELS = [level(load) for load in WEIGHTS]


# --- the score


def test_score_weights_both_token_counts() -> None:
    found = score(PASSED, LEVELS)
    weighted = 1 * 1 + 1 * 2 + 2 * 4 + 2 * 8 + 4 * 16 + 4 * 32 + 8 * 64
    assert (found.total_tokens_per_s, found.output_tokens_per_s) == (100.0 * weighted, 10.0 * weighted)


def test_published_numbers_of_vllm_make_the_published_score() -> None:
    published = dict(zip(WEIGHTS, (984, 1753, 3038, 4749, 6446, 11144, 12810), strict=True))
    levels = [level(load) for load in WEIGHTS]
    for each in levels:
        each.total_tokens_per_s = published[each.concurrency]
    assert score(PASSED, levels).total_tokens_per_s == 191_151


@pytest.mark.parametrize(
    ("gates", "levels", "because"),
    [
        ([CheckResult(name="GSM8K", status="FAIL", detail="174")], LEVELS, "GSM8K: 174"),
        (PASSED, [*LEVELS[:-1], level(64, "FAILED")], "concurrency 64: FAILED"),
    ],
)
def test_failed_gate_or_level_makes_the_score_zero(
    gates: list[CheckResult], levels: list[LevelResult], because: str
) -> None:
    found = score(gates, levels)
    assert (found.total_tokens_per_s, found.output_tokens_per_s, found.zero_reasons) == (0.0, 0.0, [because])


@pytest.mark.parametrize(
    ("gates", "levels", "match"),
    [
        (PASSED, LEVELS[:3] + LEVELS[4:], r"levels \[8\];"),
        (PASSED, [*LEVELS[:-1], level(64, "SERVER_DIED")], r"levels \[64\];"),
        ([CheckResult(name="GSM8K", status="NOT RUN")], LEVELS, "GSM8K NOT RUN"),
        ([], LEVELS, "without its gates"),
    ],
)
def test_without_a_level_or_a_gate_there_is_no_score(
    gates: list[CheckResult], levels: list[LevelResult], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        score(gates, levels)


# --- the full evaluation


@pytest.mark.slow
@pytest.mark.parametrize(("right", "code"), [(174, 1), (175, 0)])
def test_gate_flips_the_score_between_174_and_175(
    whole: Callable[[int], EvaluationServer],
    items: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    right: int,
    code: int,
) -> None:
    out = tmp_path / "runs"
    assert main(["eval", "all", whole(right).address, "--data", str(items), "--out", str(out), *QUICK]) == code
    printed = capsys.readouterr().out
    folder, result = only_run(out)
    assert {check.status for check in result.checks} == {"PASS", "NOT_APPLICABLE"}
    assert result.evaluation is not None
    assert result.evaluation.correct == right
    assert [each.concurrency for each in result.levels] == list(WEIGHTS)
    assert result.eval_score is not None
    report = (folder / "report.html").read_text()
    files = {"gsm8k.jsonl", "prompts.jsonl", "requests.jsonl", "result.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == files
    if right == 175:
        expected = sum(WEIGHTS[each.concurrency] * each.output_tokens_per_s for each in result.levels)
        assert result.eval_score.output_tokens_per_s == pytest.approx(expected)
        assert result.eval_score.total_tokens_per_s > 1.5 * expected
        assert [gate.status for gate in result.gates] == ["PASS"] * 4
        assert "by answers alone (the written rule)" in printed
        assert ">Score<" in report
    else:
        assert (result.verdict, result.eval_score.total_tokens_per_s) == ("FAILED", 0.0)
        assert "score: 0, because of GSM8K: at least 175 of 200 correct: 174 by flexible" in printed.replace("\n", " ")
        assert "score: 0, because" in report
    assert any("not comparable with published ones" in note for note in result.notes)


def test_full_evaluation_runs_with_few_levels_and_prompts(
    whole: Callable[[int], EvaluationServer], items: Path, tmp_path: Path
) -> None:
    words = ["eval", "all", whole(200).address, "--data", str(items), "--out", str(tmp_path / "runs"), *QUICK]
    assert main([*words, "--levels", "1,8", "--num-prompts", "4", "--limit", "20"]) == 0
    _, result = only_run(tmp_path / "runs")
    assert [(each.concurrency, each.requests) for each in result.levels] == [(1, 4), (8, 4)]
    assert (result.status, result.eval_score) == ("complete", None)
    assert any(note.startswith("No score without the levels [2, 4, 16, 32, 64]") for note in result.notes)


@pytest.mark.slow
def test_runs_made_one_by_one_have_the_same_score(
    whole: Callable[[int], EvaluationServer], items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = whole(200).address
    asked, loaded, scored, short = (tmp_path / name for name in ("asked", "loaded", "scored", "short"))
    assert main(["eval", "gsm8k", address, "--data", str(items), "--out", str(asked)]) == 0
    assert main(["eval", "throughput", address, "--out", str(loaded), *QUICK]) == 0
    runs = [str(only_run(asked)[0]), str(only_run(loaded)[0])]
    assert main(["eval", "score", *runs, "--out", str(scored)]) == 0
    found = only_run(scored)[1]
    assert found.eval_score is not None
    levels = only_run(loaded)[1].levels
    total = sum(WEIGHTS[each.concurrency] * each.total_tokens_per_s for each in levels)
    assert found.eval_score.total_tokens_per_s == pytest.approx(total)
    # One of them alone, twice the same, or fewer levels: no score.
    capsys.readouterr()
    assert main(["eval", "score", runs[0]]) == 2
    assert "no score without the levels [1, 2, 4, 8, 16, 32, 64]" in capsys.readouterr().err
    assert main(["eval", "score", runs[1]]) == 2
    assert "no score without GSM8K" in capsys.readouterr().err
    assert main(["eval", "score", runs[1], runs[1]]) == 2
    assert "measured the same" in capsys.readouterr().err
    assert main(["eval", "throughput", address, "--levels", "1,2", "--out", str(short), *QUICK]) == 0
    assert main(["eval", "score", runs[0], str(only_run(short)[0])]) == 2
    assert "no score without the levels [4, 8, 16, 32, 64]" in capsys.readouterr().err


def test_unusable_data_or_tokenizer_is_refused_before_any_request(
    whole: Callable[[int], EvaluationServer], items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = whole(200)
    out = ["--out", str(tmp_path / "runs")]
    assert main(["eval", "all", server.address, "--data", str(tmp_path / "absent.jsonl"), *out, *QUICK]) == 2
    assert main(["eval", "all", server.address, "--data", str(items), *out, "--tokenizer", str(tmp_path)]) == 2
    assert server.asked == []
    assert not (tmp_path / "runs").exists()


# --- a server of another's


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def baseline(items: Path, out: Path, *options: str, limit_s: float = WAIT_S) -> list[str]:
    port = free_port()
    command = shlex.join([sys.executable, str(SERVER), "--items", str(items), "--port", str(port), *options])
    address = f"http://127.0.0.1:{port}"
    return ["eval", "baseline", address, "--command", command, "--start-timeout", str(limit_s), "--data", str(items),
            "--out", str(out), *QUICK]  # fmt: skip


def gone(pid: int) -> bool:
    """Whether a process ends; one that waits for its parent has ended."""

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    return wait_until(has_ended, f"the end of process {pid}")


@pytest.mark.slow
def test_baseline_runs_in_its_own_environment_and_ends_with_its_children(
    items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, child, ours = tmp_path / "runs", tmp_path / "child", tmp_path / "ours"
    ours.mkdir()
    (ours / "tokenizers.py").write_text("raise ImportError('a package of another environment')")
    monkeypatch.setenv("PYTHONPATH", str(ours))
    assert main(baseline(items, out, "--child", str(child))) == 0
    folder, result = only_run(out)
    assert result.settings["what"] == "baseline"
    assert "fake_openai.py" in str(result.settings["server_command"])
    assert str(SERVER.parent) not in str(result.settings["server_command"])
    assert result.eval_score is not None
    assert result.eval_score.total_tokens_per_s > 0
    assert (folder / "server.log").exists()
    assert gone(int(child.read_text()))


@pytest.mark.slow
def test_baseline_that_does_not_become_ready_is_ended_and_reported(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    assert main(baseline(items, tmp_path / "runs", "--never", "--child", str(child), limit_s=6.0)) == 2
    assert "did not become ready within 6 s" in capsys.readouterr().err
    assert gone(int(child.read_text()))
    missing = ["--command", "/no/such/program serve"]
    assert main([*baseline(items, tmp_path / "runs"), *missing]) == 2
    assert "/no/such/program cannot be started" in capsys.readouterr().err


TOOL = [sys.executable, "-m", "meltcore.cli.main"]
# Stands in front of fake_openai.py's words: a server that takes its time to end, or asks its key for /health too.
SLOW_TO_END = """
def slowly(number, frame):
    print("told to end", flush=True)
    time.sleep(3)
    os._exit(0)
signal.signal(signal.SIGTERM, slowly)
"""
PROTECTED = """
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import fake_openai
open_to_all = fake_openai._Handler.do_GET
def do_GET(self):
    known = self.headers.get("Authorization") == "Bearer a-key"
    open_to_all(self) if known else self._json(401, {})
fake_openai._Handler.do_GET = do_GET
"""
# Starts the server in a session of its own, is there until it answers and for --stay seconds more, and ends well.
BACKGROUND = """
stay, *words = sys.argv[1:]
process = subprocess.Popen([sys.executable, *words], start_new_session=True)
Path(os.environ["SERVER_PID"]).write_text(str(process.pid))
while not accepts_connections("127.0.0.1:" + words[words.index("--port") + 1]):
    time.sleep(0.05)
time.sleep(float(stay))
sys.exit(0)
"""
IMPORTS = """
import os, runpy, signal, subprocess, sys, time
from pathlib import Path
from meltcore.measure.experiments.servers import accepts_connections
"""
SERVE = """
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def through(words: list[str], script: Path, text: str, *arguments: str) -> list[str]:
    """The words of a baseline, its server started by a script that is `text` and gets the server's own words."""
    script.write_text(IMPORTS + text)
    at = words.index("--command") + 1
    program, *server = shlex.split(words[at])
    return [*words[:at], shlex.join([program, str(script), *arguments, *server]), *words[at + 1 :]]


@contextmanager
def tool(words: list[str], child: Path) -> "Iterator[subprocess.Popen[str]]":
    """`meltcore` as a process; what a failed test leaves of it and of the group of `child`, a file, is ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        with suppress(ValueError, ProcessLookupError):
            os.killpg(os.getpgid(int(text_of(child))), signal.SIGKILL)


def wait_while_runs(look: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Until `look` finds something while `process` runs."""

    def found() -> object:
        assert process.poll() is None, process.stderr and process.stderr.read()
        return look()

    wait_until(found)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def measuring(out: Path) -> bool:
    """Whether the run in `out` has come to its levels of load."""
    return any(path.stat().st_size for path in out.glob("*/requests.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_baseline_leaves_no_server_behind(items: Path, tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "child"
    words = baseline(items, tmp_path / "runs", "--never", "--child", str(child))
    with tool([*TOOL, *words], child) as process:
        wait_while_runs(lambda: text_of(child), process)
        process.send_signal(number)
        _, error = process.communicate(timeout=WAIT_S)
        assert (process.returncode, error) == (130, "meltcore eval: interrupted\n")
        assert gone(int(child.read_text()))


@pytest.mark.slow
def test_hangup_ends_the_server_and_keeps_the_results(items: Path, tmp_path: Path) -> None:
    child, out = tmp_path / "child", tmp_path / "runs"
    words = [*baseline(items, out, "--child", str(child)), "--num-prompts", "400", "--limit", "20"]
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    # The first terminal that the leader of a session opens is its own: SIGHUP comes when that goes.
    script = (
        "import os, sys; from meltcore.cli.main import main\n"
        f"terminal = os.open({os.ttyname(end)!r}, os.O_RDWR)\n"
        "for each in range(3): os.dup2(terminal, each)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )

    def shown() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        return measuring(out)

    with tool([sys.executable, "-c", script, *words], child) as process:
        wait_while_runs(shown, process)
        os.close(terminal)
        os.close(end)
        process.wait(timeout=WAIT_S)
        assert process.returncode == 130
        assert gone(int(child.read_text()))
    _, result = only_run(out)
    assert (result.status, result.verdict) == ("partial", "PARTIAL")
    assert result.evaluation is not None


@pytest.mark.slow
def test_repeated_ctrl_c_keeps_the_result_and_ends_the_server(items: Path, tmp_path: Path) -> None:
    child, out = tmp_path / "child", tmp_path / "runs"
    words = [*baseline(items, out, "--child", str(child)), "--num-prompts", "400", "--limit", "20"]
    with tool([*TOOL, *through(words, tmp_path / "slow.py", SLOW_TO_END + SERVE)], child) as process:
        wait_while_runs(lambda: measuring(out), process)
        process.send_signal(signal.SIGINT)
        wait_while_runs(lambda: any("told to end" in log.read_text() for log in out.glob("*/server.log")), process)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert gone(int(child.read_text()))
    assert not accepts_connections(words[2])
    folder, result = only_run(out)
    assert (result.status, result.verdict) == ("partial", "PARTIAL")
    assert (folder / "report.html").exists()


def test_hangup_interrupts_once_and_not_where_it_is_ignored() -> None:
    with pytest.raises(KeyboardInterrupt), signals_as_ctrl_c():
        signal.raise_signal(signal.SIGHUP)
    with signals_as_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the shell's, after the kernel's
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_program_that_ignores_ctrl_c_can_be_ended(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), signals_as_ctrl_c(), block_signals():
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, before)


def test_baseline_refuses_a_server_that_runs_already(
    whole: Callable[[int], EvaluationServer], items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = baseline(items, tmp_path / "runs")
    words[2] = whole(200).address
    assert main(words) == 2
    assert "answers at" in capsys.readouterr().err


def test_baseline_refuses_a_server_that_is_still_loading(
    whole: Callable[[int], EvaluationServer], items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, server = baseline(items, tmp_path / "runs"), whole(200)
    words[2], server.fault = server.address, "never-ready"
    words[words.index("--command") + 1] = "sleep 30"
    ready = threading.Timer(1.0, setattr, (server, "fault", "none"))
    ready.start()
    try:
        assert main(words) == 2
    finally:
        ready.cancel()
    assert "answers at" in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.slow
def test_baseline_whose_command_leaves_its_server_in_the_background_is_refused(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, out = tmp_path / "server", tmp_path / "runs"
    monkeypatch.setenv("SERVER_PID", str(server))
    try:
        assert main(through(baseline(items, out), tmp_path / "start.py", BACKGROUND, "0.3")) == 2
    finally:
        os.killpg(int(server.read_text()), signal.SIGKILL)
    printed = capsys.readouterr()
    assert "start.py 0.3" in printed.err
    assert "ended with code 0, and a server answers at" in printed.err
    assert "still answers at" in printed.out
    assert not list(out.glob("*/result.json"))


def test_command_that_ends_before_its_server_is_ready_gets_a_hint(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*baseline(items, tmp_path / "runs"), "--command", "true"]) == 2
    assert "ended with code 0 before it could become ready (a process that it left in the background" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_server_that_outlives_its_command_is_reported(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, out = tmp_path / "server", tmp_path / "runs"
    monkeypatch.setenv("SERVER_PID", str(server))
    try:
        words = through(baseline(items, out), tmp_path / "start.py", BACKGROUND, "600")
        assert main([*words, *FEW]) == 0
    finally:
        os.killpg(int(server.read_text()), signal.SIGKILL)
    assert "end it yourself" in capsys.readouterr().out
    assert any("still answers at" in note for note in only_run(out)[1].notes)


@pytest.mark.slow
def test_health_request_carries_the_api_key(items: Path, tmp_path: Path) -> None:
    words = through(baseline(items, tmp_path / "runs"), tmp_path / "protected.py", PROTECTED + SERVE)
    assert main([*words, *FEW, "--api-key", "a-key"]) == 0


@pytest.mark.parametrize(
    ("command", "said"), [("", "is empty"), ("'", "cannot be parsed"), ("A=1 serve", "write env A=1")]
)
def test_invalid_start_command_is_refused(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    words = baseline(items, tmp_path / "runs")
    words[words.index("--command") + 1] = command
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
