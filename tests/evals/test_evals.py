"""Answers and API forms, checked against a server that keeps the rules and ones that break a known one."""

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

import meltcore
from meltcore import problems
from meltcore.cli.main import main
from meltcore.errors import ConfigError
from meltcore.evals import Api, evaluate, run_checks, run_eval
from meltcore.evals.api import ApiError, ApiTimeoutError, Reply
from meltcore.results.runfolder import read_result

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


def test_a_conforming_server_passes_every_check(start: Callable[..., FakeServer]) -> None:
    results = run_checks(Api(start().address), "fake")
    assert [result for result in results if result.status != "PASS"] == []
    assert len(results) >= 15


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("no-usage", "usage adds up"),
        ("thinks-aloud", "thinking stays out of the answer's content"),
        ("bare-errors", "an unknown model is a 404 error object"),
        ("never-ready", "GET /health answers 200"),
    ],
)
def test_a_broken_rule_fails_its_check_with_what_was_seen(
    start: Callable[..., FakeServer], fault: str, check: str
) -> None:
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
def test_a_short_answer_is_no_fault(run: Callable[[FakeServer], FakeServer], counts: str) -> None:
    results = {result.name: result for result in run_checks(Api(run(BriefServer(counts)).address), "fake")}
    assert results["a stop string ends the answer and stays out of it"].status == "PASS"
    if counts.count(" ") > 1:
        assert [result for result in results.values() if result.status != "PASS"] == []


def test_only_an_empty_answer_cannot_be_stopped(run: Callable[[FakeServer], FakeServer]) -> None:
    results = {result.name: result for result in run_checks(Api(run(BriefServer("")).address), "fake")}
    stopped = results["a stop string ends the answer and stays out of it"]
    assert (stopped.status, stopped.detail) == ("FAIL", "the answer is empty: there is nothing to be stopped")


def test_a_server_that_stops_answering_is_asked_twice(start: Callable[..., FakeServer]) -> None:
    server = start("stuck")  # it refuses without waiting, as a front end does
    results = run_checks(Api(server.address, timeout_s=0.3), "fake")
    told = [result.detail for result in results if result.status == "FAIL"]
    late = "POST /v1/chat/completions: no answer within 0.3 s"
    assert told == [late] * 2 + ["not asked: the server did not answer 2 times"] * 8
    assert server.posts == 2
    assert [result.status for result in results if "error object" in result.name] == ["PASS"] * 7


def test_a_server_that_does_not_even_refuse_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def never(self: Api, path: str, body: object) -> None:
        asked.append(path)
        raise ApiTimeoutError("no answer within 120 s")

    monkeypatch.setattr(Api, "post", never)
    monkeypatch.setattr(Api, "get", lambda self, path: Reply(404 if "no-such" in path else 200, {}, b"{}"))
    results = run_checks(Api(UNREACHABLE), "fake")
    assert len(asked) == 3
    assert [result.detail for result in results[-7:-1]] == ["not asked: the server did not answer 3 times"] * 6
    assert results[-1].status == "PASS"


def test_a_check_that_cannot_run_fails() -> None:
    results = run_checks(Api(UNREACHABLE, timeout_s=2.0), "fake")
    assert {result.status for result in results} == {"FAIL"}


def test_every_answer_is_marked_against_its_known_value(start: Callable[..., FakeServer]) -> None:
    seen: list[tuple[int, int, int]] = []
    found = evaluate(Api(start().address), "fake", on_progress=lambda *progress: seen.append(progress))
    assert (found.asked, found.right, found.failed, found.wrong) == (200, 200, 0, [])
    assert 0.98 < found.low < found.high == pytest.approx(1.0)
    assert seen[-1] == (200, 200, 200)


def test_wrong_answers_are_counted_and_kept(start: Callable[..., FakeServer]) -> None:
    found = evaluate(Api(start("wrong-answers").address), "fake", problems=problems.evaluation_set()[:15])
    assert (found.asked, found.right, found.failed) == (15, 0, 0)
    assert len(found.wrong) == 10
    assert found.wrong[0].got == f"The answer is {int(found.wrong[0].expected) + 1}."


def test_failed_requests_stay_in_the_denominator() -> None:
    found = evaluate(Api(UNREACHABLE, timeout_s=2.0), "fake", problems=problems.evaluation_set()[:5])
    assert (found.asked, found.right, found.failed) == (5, 0, 5)
    assert found.wrong[0].got.startswith("request failed")
    assert found.first_failure == "POST /v1/chat/completions: Connection refused"


def test_why_requests_failed_is_told(start: Callable[..., FakeServer]) -> None:
    result = run_eval(start().address, "problems", model="no-such-model")
    assert result.verdict == "FAILED"
    assert result.reasons[0].startswith("200 of 200 requests failed, the first one: status 404: ")
    assert "no such model" in result.reasons[0]


def test_a_server_that_ends_half_way_leaves_no_share_of_right_answers(start: Callable[..., FakeServer]) -> None:
    server = start()

    def end_half_way(done: int, right: int, asked: int) -> None:
        if done == asked // 2:
            server.shutdown()
            server.server_close()

    result = run_eval(server.address, "problems", at_least=0.9, on_answer=end_half_way)
    assert (result.status, result.verdict) == ("partial", "SERVER_DIED")
    assert (result.accuracy, result.evaluation) == (None, None)
    assert result.reasons[0].startswith("the server ended after 1")


def test_a_share_below_what_was_asked_for_fails_the_run(start: Callable[..., FakeServer]) -> None:
    address = start("wrong-answers").address
    assert run_eval(address, "problems").verdict == "OK"
    failed = run_eval(address, "problems", at_least=0.5)
    assert failed.verdict == "FAILED"
    assert "0 % right; at least 50 %" in failed.reasons[0]


def test_the_verb_writes_a_run_folder_and_exits_by_the_verdict(
    start: Callable[..., FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = start().address
    assert main(["eval", "problems", address, "--out", str(tmp_path), "--at-least", "0.95"]) == 0
    assert "200 of 200 right" in capsys.readouterr().out
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
def test_a_server_that_is_not_there_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", words[0], UNREACHABLE, *words[1:], "--out", str(tmp_path)]) == 2
    assert capsys.readouterr() == (
        "",
        f"meltcore eval: no answer from {UNREACHABLE}: GET /v1/models: Connection refused\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_the_listing_can_be_asked_by_name(start: Callable[..., FakeServer]) -> None:
    address = start("no-listing").address
    with pytest.raises(ConfigError, match=r"names no model \(status 404, .*\); name one with --model"):
        run_eval(address, "problems")
    result = run_eval(address, "problems", model="fake")
    assert (result.verdict, result.accuracy) == ("OK", 1.0)


@pytest.mark.parametrize("words", [["problems"], ["gsm8k", "--data", "meltcore/problems"]])
def test_an_interruption_does_not_wait_for_answers(start: Callable[..., FakeServer], words: list[str]) -> None:
    server = start("stuck")
    command = [sys.executable, "-m", "meltcore.cli.main", "eval", words[0], server.address, *words[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while server.posts < 8:
            time.sleep(0.02)
        interrupted_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    assert (process.returncode, "interrupted" in printed) == (130, True)
    assert time.monotonic() - interrupted_s < 10


def test_a_place_that_cannot_hold_a_run_is_found_out_before_anything_is_asked(
    start: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    assert main(["eval", "problems", server.address, "--out", "/proc/runs"]) == 2
    assert "cannot make the run folder /proc/runs" in capsys.readouterr().err
    assert server.posts == 0


@pytest.mark.parametrize("share", ["95", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "problems", UNREACHABLE, "--at-least", share]) == 2
    assert "--at-least is a share from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://host:port", "http://host:99999", "http://[::1", "a..b"),
        *("http://host/ä", "http://host/日本/v1", "http://host/a b", "http://ho st", "http://host/\x7f"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        Api(url)


def test_a_path_that_no_request_can_carry_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "conformance", f"{UNREACHABLE}/ä", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"meltcore eval: '{UNREACHABLE}/ä' is no address of a server")


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        Api("http://host", api_key=key)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "the connection was closed without an answer"),
        (b"\0garbage\r\n\r\n", "not HTTP: BadStatusLine("),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "the answer broke off"),
    ],
)
def test_what_is_no_whole_answer_is_told_in_words(sent: bytes, why: str) -> None:
    with sends(sent) as address, pytest.raises(ApiError, match=f"^GET /health: {re.escape(why)}"):
        Api(address).get("/health")


@contextmanager
def sends(*parts: bytes) -> Iterator[str]:
    """A server's address; it sends the first part at once and then one of the others every 50 ms, without an end."""
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


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((HEAD + b"\r\n", b": ping\n\n"), "the answer was not whole"),
        ((HEAD + b"Content-Length: 9999\r\n\r\n", b" "), "the answer was not whole"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"8\r\n: ping\n\n\r\n"), "the answer was not whole"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"), "the answer was not whole"),
        ((HEAD, b"X: y\r\n"), "no answer"),
        ((b"H", b"T"), "no answer"),
    ],
)
def test_an_answer_in_drops_has_no_more_time_than_another(parts: tuple[bytes, ...], why: str) -> None:
    with sends(*parts) as address:
        begun_s = time.monotonic()
        with pytest.raises(ApiTimeoutError, match=rf"^POST /v1/completions: {why} within 0\.4 s$"):
            Api(address, timeout_s=0.4).post("/v1/completions", {})
        assert 0.4 <= time.monotonic() - begun_s < 3


@pytest.mark.parametrize("head", [b"", b"Content-Length: 101\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_an_answer_has_a_most(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr("meltcore.evals.api.MAX_BODY_BYTES", 100)
    begin, end = (b"65\r\n", b"\r\n0\r\n\r\n") if b"chunked" in head else (b"", b"")
    answer = HEAD + head + b"\r\n" + begin + b"x" * 101 + end
    too_long = r"^GET /health: the answer is longer than 100 bytes$"
    with sends(answer) as address, pytest.raises(ApiError, match=too_long):
        Api(address).get("/health")
    monkeypatch.setattr("meltcore.evals.api.MAX_BODY_BYTES", 101)
    with sends(answer) as address:
        assert Api(address).get("/health").body == b"x" * 101


def test_a_server_that_does_not_answer_is_waited_for_so_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = Api(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(ApiError, match=r"no answer within 0\.2 s"):
            silent.get("/health")
        patient = Api(silent.address, timeout_s=30.0)
        with pytest.raises(ApiError, match=r"no answer within 0\.3 s"):
            patient.get("/v1/models", limit_s=0.3)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(start: Callable[..., FakeServer], suffix: str) -> None:
    assert Api(start().address + suffix).first_model() == "fake"


def test_a_body_that_is_no_json_is_an_api_error(start: Callable[..., FakeServer]) -> None:
    reply = Api(start("bare-errors").address).get("/nowhere")
    with pytest.raises(ApiError, match="not JSON"):
        reply.json()
