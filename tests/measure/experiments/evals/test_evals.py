"""Answers and API conformance, against a conforming server and servers with one known fault."""

import itertools
import re
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
from fake_openai import FakeServer
from waiting import WAIT_S, wait_until

import meltcore
from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure import problems
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.evals.run import evaluate, run_eval
from meltcore.measure.experiments.servers import Api, ApiError, ApiResponse, ApiTimeoutError

UNREACHABLE = "http://127.0.0.1:9"
TOKENIZER = Path(meltcore.__file__).parent / "bundled" / "sums"


@pytest.fixture
def run() -> Iterator[Callable[[FakeServer], FakeServer]]:
    servers: list[FakeServer] = []

    def begin(server: FakeServer) -> FakeServer:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def start(run: Callable[[FakeServer], FakeServer]) -> Callable[..., FakeServer]:
    def begin(fault: str = "none") -> FakeServer:
        return run(FakeServer(fault, {problem.question: problem.value for problem in problems.evaluation_set()}))

    return begin


REASONING = "reasoning stays out of the answer's content"  # the fake server's model does not reason


def test_conforming_server_passes_every_check(start: Callable[..., FakeServer]) -> None:
    results = run_checks(Api(start().address), "fake")
    assert [result.name for result in results if result.status != "PASS"] == [REASONING]
    assert [result.status for result in results if result.name == REASONING] == ["NOT_APPLICABLE"]
    assert len(results) >= 15


def test_reasoning_beside_the_content_passes(start: Callable[..., FakeServer]) -> None:
    results = {result.name: result.status for result in run_checks(Api(start("reasons").address), "fake")}
    assert results[REASONING] == "PASS"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("no-usage", "usage adds up"),
        ("thinks-aloud", "reasoning stays out of the answer's content"),
        ("bare-errors", "an unknown model is a 404 error object"),
        ("never-ready", "GET /health answers 200"),
    ],
)
def test_violation_fails_its_check_with_its_finding(start: Callable[..., FakeServer], fault: str, check: str) -> None:
    results = {result.name: result for result in run_checks(Api(start(fault).address), "fake")}
    assert results[check].status == "FAIL"
    assert results[check].detail


class BriefServer(FakeServer):
    """Sums are answered by the bare number, which is one token; `counts` is what it says when it is to count."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.counts = counts

    def answer(self, question: str, streamed: bool) -> str:
        return "19" if question == "What is 12 + 7?" else self.counts


@pytest.mark.parametrize("counts", [" ".join(map(str, range(1, 21))), "1 2 3", "abc", "11"])
def test_short_answer_passes_every_check(run: Callable[[FakeServer], FakeServer], counts: str) -> None:
    results = {result.name: result for result in run_checks(Api(run(BriefServer(counts)).address), "fake")}
    assert results["a stop string ends the answer and stays out of it"].status == "PASS"
    if counts.count(" ") > 1:
        assert [result.name for result in results.values() if result.status != "PASS"] == [REASONING]


def test_only_an_empty_answer_cannot_be_stopped(run: Callable[[FakeServer], FakeServer]) -> None:
    results = {result.name: result for result in run_checks(Api(run(BriefServer("")).address), "fake")}
    stopped = results["a stop string ends the answer and stays out of it"]
    assert (stopped.status, stopped.detail) == ("FAIL", "the answer is empty: there is nothing to stop")


def test_checks_are_skipped_after_two_timeouts(start: Callable[..., FakeServer]) -> None:
    server = start("stuck")  # it refuses without waiting, as a front end does
    results = run_checks(Api(server.address, timeout_s=0.3), "fake")
    told = [result.detail for result in results if result.status == "FAIL"]
    late = "POST /v1/chat/completions: no answer within 0.3 s"
    assert told == [late] * 2 + ["skipped: the server did not answer 2 times"] * 8
    assert server.posts == 2
    assert [result.status for result in results if "error object" in result.name] == ["PASS"] * 7


def test_refusal_checks_are_skipped_after_three_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def never(self: Api, path: str, body: object) -> None:
        asked.append(path)
        raise ApiTimeoutError("no answer within 120 s")

    monkeypatch.setattr(Api, "post", never)
    monkeypatch.setattr(Api, "get", lambda self, path: ApiResponse(404 if "no-such" in path else 200, {}, b"{}"))
    results = run_checks(Api(UNREACHABLE), "fake")
    assert len(asked) == 3
    assert [result.detail for result in results[-7:-1]] == ["skipped: the server did not answer 3 times"] * 6
    assert results[-1].status == "PASS"


def test_check_that_cannot_run_fails() -> None:
    results = run_checks(Api(UNREACHABLE, timeout_s=2.0), "fake")
    assert {result.status for result in results} == {"FAIL"}


def test_every_answer_is_graded_against_its_known_value(start: Callable[..., FakeServer]) -> None:
    seen: list[tuple[int, int, int]] = []
    found = evaluate(Api(start().address), "fake", on_progress=lambda *progress: seen.append(progress))
    assert (found.total, found.correct, found.failed, found.incorrect) == (200, 200, 0, [])
    assert 0.98 < found.ci_low < found.ci_high == pytest.approx(1.0)
    assert seen[-1] == (200, 200, 200)


def test_wrong_answers_are_counted_and_kept(start: Callable[..., FakeServer]) -> None:
    found = evaluate(Api(start("wrong-answers").address), "fake", problems=problems.evaluation_set()[:15])
    assert (found.total, found.correct, found.failed) == (15, 0, 0)
    assert len(found.incorrect) == 10
    assert found.incorrect[0].actual == f"The answer is {int(found.incorrect[0].expected) + 1}."


def test_failed_requests_stay_in_the_denominator() -> None:
    found = evaluate(Api(UNREACHABLE, timeout_s=2.0), "fake", problems=problems.evaluation_set()[:5])
    assert (found.total, found.correct, found.failed) == (5, 0, 5)
    assert found.incorrect[0].actual.startswith("request failed")
    assert found.first_failure == "POST /v1/chat/completions: 127.0.0.1:9 refused the connection"


def test_reason_of_failed_requests_is_reported(start: Callable[..., FakeServer]) -> None:
    result = run_eval(start().address, "problems", model="no-such-model")
    assert result.verdict == "FAILED"
    assert result.reasons[0].startswith("200 of 200 requests failed, the first one: status 404: ")
    assert "no such model" in result.reasons[0]


def test_server_that_dies_leaves_no_accuracy(start: Callable[..., FakeServer]) -> None:
    server = start()

    def end_half_way(done: int, right: int, asked: int) -> None:
        if done == asked // 2:
            server.shutdown()
            server.server_close()

    result = run_eval(server.address, "problems", min_accuracy=0.9, on_answer=end_half_way)
    assert (result.status, result.verdict) == ("partial", "SERVER_DIED")
    assert (result.accuracy, result.evaluation) == (None, None)
    assert result.reasons[0].startswith("the server ended after 1")


@pytest.mark.slow
def test_accuracy_below_the_minimum_fails_the_run(start: Callable[..., FakeServer]) -> None:
    address = start("wrong-answers").address
    assert run_eval(address, "problems").verdict == "OK"
    failed = run_eval(address, "problems", min_accuracy=0.5)
    assert failed.verdict == "FAILED"
    assert "0 % correct; at least 50 %" in failed.reasons[0]


def test_command_writes_a_run_folder_and_exits_by_the_verdict(
    start: Callable[..., FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = start().address
    assert main(["eval", "problems", address, "--out", str(tmp_path), "--min-accuracy", "0.95"]) == 0
    assert "200 of 200 correct" in capsys.readouterr().out
    [folder] = tmp_path.iterdir()
    result = read_result(folder)
    assert (result.command, result.accuracy, result.settings["model"]) == ("eval", 1.0, "fake")
    assert (folder / "report.html").exists()
    assert main(["eval", "conformance", start("no-usage").address, "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["conformance"],
        ["problems"],
        ["gsm8k", "--data", "meltcore/problems"],
        ["gsm8k", "--data", "meltcore/problems", "--model", "given"],
        ["throughput", "--speed-only"],
        ["all", "--data", "meltcore/problems", "--tokenizer", str(TOKENIZER)],
    ],
)
def test_unreachable_server_is_a_one_line_error(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", words[0], UNREACHABLE, *words[1:], "--out", str(tmp_path)]) == 2
    assert capsys.readouterr() == (
        "",
        f"meltcore eval: no answer from {UNREACHABLE}: GET /v1/models: 127.0.0.1:9 refused the connection\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_server_without_models_listing_works_with_a_model_name(start: Callable[..., FakeServer]) -> None:
    address = start("no-listing").address
    with pytest.raises(ConfigError, match=r"names no model \(status 404, .*\); give one with --model"):
        run_eval(address, "problems")
    result = run_eval(address, "problems", model="fake")
    assert (result.verdict, result.accuracy) == ("OK", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["problems"], ["gsm8k", "--data", "meltcore/problems"]])
def test_interruption_does_not_wait_for_answers(start: Callable[..., FakeServer], words: list[str]) -> None:
    server = start("stuck")
    command = [sys.executable, "-m", "meltcore.cli.main", "eval", words[0], server.address, *words[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: server.posts >= 8, "the requests")
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "interrupted" in printed) == (130, True)


def test_unwritable_output_folder_is_refused_before_any_request(
    start: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    assert main(["eval", "problems", server.address, "--out", "/proc/runs"]) == 2
    assert "cannot create the run folder /proc/runs" in capsys.readouterr().err
    assert server.posts == 0


@pytest.mark.parametrize("share", ["95", "-0.1", "nan"])
def test_minimum_accuracy_out_of_range_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "problems", UNREACHABLE, "--min-accuracy", share])
    assert "is not a number of at least 0 and at most 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://host:port", "http://host:99999", "http://[::1", "a..b"),
        *("http://host/ä", "http://host/日本/v1", "http://host/a b", "http://ho st", "http://host/\x7f"),
    ],
)
def test_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        Api(url)


def test_non_ascii_path_is_a_one_line_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "conformance", f"{UNREACHABLE}/ä", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"meltcore eval: '{UNREACHABLE}/ä': not a server address")


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_malformed_api_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        Api("http://host", api_key=key)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "connection closed before a response"),
        (b"\0garbage\r\n\r\n", "bad status line: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "connection closed inside a response"),
    ],
)
def test_incomplete_response_is_an_error_with_its_reason(sent: bytes, why: str) -> None:
    with sends(sent) as address, pytest.raises(ApiError, match=f"^GET /health: {re.escape(why)}"):
        Api(address).get("/health")


@contextmanager
def sends(*parts: bytes) -> Iterator[str]:
    """A server's address; it sends the first part immediately, then one of the others every 50 ms, without an end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(parts[0])
                    for part in itertools.cycle(parts[1:]):
                        time.sleep(0.05)
                        connection.sendall(part)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((HEAD + b"\r\n", b": ping\n\n"), "the answer was not complete"),
        ((HEAD + b"Content-Length: 9999\r\n\r\n", b" "), "the answer was not complete"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"8\r\n: ping\n\n\r\n"), "the answer was not complete"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"), "the answer was not complete"),
        ((HEAD, b"X: y\r\n"), "no answer"),
        ((b"HTTP/1.1 200 ", b"O"), "no answer"),
    ],
)
def test_slowly_sent_response_has_the_same_deadline(parts: tuple[bytes, ...], why: str) -> None:
    late = rf"^POST /v1/completions: {why} within 0\.4 s$"
    with sends(*parts) as address, pytest.raises(ApiTimeoutError, match=late):
        Api(address, timeout_s=0.4).post("/v1/completions", {})


@pytest.mark.parametrize("head", [b"", b"Content-Length: 101\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_response_body_has_a_size_limit(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr("meltcore.measure.load.wire.connection.MAX_BODY_BYTES", 100)
    begin, end = (b"65\r\n", b"\r\n0\r\n\r\n") if b"chunked" in head else (b"", b"")
    answer = HEAD + head + b"\r\n" + begin + b"x" * 101 + end
    too_long = r"^GET /health: the body is longer than 100 bytes$"
    with sends(answer) as address, pytest.raises(ApiError, match=too_long):
        Api(address).get("/health")
    monkeypatch.setattr("meltcore.measure.load.wire.connection.MAX_BODY_BYTES", 101)
    with sends(answer) as address:
        assert Api(address).get("/health").body == b"x" * 101


def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = Api(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(ApiError, match=r"no answer within 0\.2 s"):
            silent.get("/health")
        slow_api = Api(silent.address, timeout_s=30.0)
        with pytest.raises(ApiError, match=r"no answer within 0\.3 s"):
            slow_api.get("/v1/models", timeout_s=0.3)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_address_may_end_in_v1(start: Callable[..., FakeServer], suffix: str) -> None:
    assert Api(start().address + suffix).resolve_model()[0] == "fake"


def test_body_that_is_not_json_is_an_api_error(start: Callable[..., FakeServer]) -> None:
    reply = Api(start("bare-errors").address).get("/nowhere")
    with pytest.raises(ApiError, match="not JSON"):
        reply.json()
