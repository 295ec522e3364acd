"""The load generator against a server whose every token has a known time, and against every fault of that server.

No token is early. How late one may be depends on the machine, so later times are bounded by the times around them.
"""

import asyncio
import ctypes
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.load.config import LoadConfig, Timeouts
from meltcore.measure.load.record import RESERVE_BYTES, RecordFile, RequestRecord
from meltcore.measure.load.run.runner import measure, run_levels
from meltcore.measure.load.run.streams import Progress
from meltcore.measure.load.wire import probe
from meltcore.measure.load.wire.connection import parse_target
from meltcore.measure.load.wire.probe import InFlightProbe
from meltcore.measure.load.workloads.workload import max_output_tokens

Start = Callable[..., object]

QUICK = {"workload": "random:in=8,out=64", "num_warmups": 0}


def load(server: object, **fields: object) -> LevelResult:
    begin_s = time.monotonic()
    [result] = run_levels(LoadConfig(url=server.url, **{**QUICK, **fields}))  # type: ignore[attr-defined, arg-type]
    assert result.duration_s < time.monotonic() - begin_s
    return result


def assert_times(result: LevelResult, *, ttft_ms: float, itl_ms: float, tokens: int) -> None:
    """Assert that times follow the script, and that the gaps after the first token add up to the whole."""
    assert result.failures == {}
    assert 0.95 * ttft_ms < result.ttft_ms.p50 < result.e2e_ms.p50 < 1e3 * result.duration_s
    e2e_ms = ttft_ms + (tokens - 1) * itl_ms
    assert 0.95 * e2e_ms < result.e2e_ms.p50
    assert result.e2e_ms.mean is not None
    assert result.ttft_ms.mean is not None
    each_ms = (result.e2e_ms.mean - result.ttft_ms.mean) / (tokens - 1)
    assert result.tpot_ms.mean == pytest.approx(each_ms, rel=0.1)
    # Tokens that arrive together have no gap, and the end of an answer may come later than its last token.
    whole_ms = each_ms * (tokens - 1) * result.succeeded
    assert result.itl_ms.mean is not None
    assert 0.6 * whole_ms < result.itl_ms.mean * result.itl_ms.n < 1.001 * whole_ms
    assert result.output_tokens == result.succeeded * tokens


def test_closed_loop_metrics_match_the_script(scripted: Start) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "16")
    result = load(server, concurrency=(20,), num_prompts=(60,))
    assert_times(result, ttft_ms=100, itl_ms=20, tokens=16)
    assert result.succeeded == 60
    assert result.peak_in_flight == 20
    assert result.server_peak_in_flight == 20
    # Three waves of 0.1 + 15 * 0.02 = 0.4 s.
    assert result.duration_s > 0.95 * 1.2
    assert result.output_tokens_per_s == pytest.approx(60 * 16 / result.duration_s)
    assert result.total_tokens_per_s == pytest.approx(60 * 24 / result.duration_s)
    assert result.steady is not None
    assert result.events_per_token == 1.0
    assert result.itl_unit == "token"


def test_chat_problems_are_graded(scripted: Start) -> None:
    result = load(
        scripted("--ttft-ms", "5", "--itl-ms", "1"), workload="problems:short", concurrency=(5,), num_prompts=(10,)
    )
    assert result.succeeded == 10
    assert result.accuracy == 0.0, "the scripted server knows no arithmetic"


def test_answers_to_a_file_are_graded(scripted: Start, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "a", "answer": "w3"}\n{"prompt": "b", "answer": "w99"}\n')
    result = load(scripted("--tokens", "8"), workload=str(path), concurrency=(2,), num_prompts=(10,))
    assert result.accuracy == 0.5


@pytest.mark.slow
def test_events_of_several_tokens_count_their_tokens(scripted: Start) -> None:
    server = scripted("--ttft-ms", "50", "--itl-ms", "20", "--tokens", "16", "--merge", "4")
    result = load(server, concurrency=(12,), num_prompts=(24,))
    assert result.event_gap_ms.mean is not None
    assert result.event_gap_ms.mean > 0.5 * 80
    assert result.itl_ms.mean is not None
    whole_ms = result.event_gap_ms.mean * result.event_gap_ms.n
    assert result.itl_ms.n >= 4 * result.event_gap_ms.n, "a gap is shared by 4 tokens, or by 8 that arrive together"
    assert result.itl_ms.mean * result.itl_ms.n == pytest.approx(whole_ms)
    first_ms = 50 + 3 * 20  # the first chunk waits for its fourth token
    assert 0.9 * first_ms < result.ttft_ms.p50 < result.e2e_ms.p50 < 1e3 * result.duration_s
    assert result.events_per_token == 0.25
    assert result.tokens_per_event == 4.0
    unweighted = load(server, concurrency=(12,), num_prompts=(24,), continuous_usage=False)
    assert unweighted.itl_unit == "event"
    assert unweighted.itl_ms.mean is not None
    assert unweighted.itl_ms.mean > 0.5 * 80
    assert unweighted.event_gap_ms.mean is not None
    whole_ms = unweighted.event_gap_ms.mean * unweighted.event_gap_ms.n
    assert unweighted.itl_ms.mean * unweighted.itl_ms.n == pytest.approx(whole_ms)
    assert unweighted.itl_ms.n < 2 * 4 * unweighted.event_gap_ms.n, "events count, not tokens"


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_open_loop_keeps_its_rate_and_its_metrics_match(scripted: Start, arrivals: str) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "16")
    result = load(server, request_rate=(40.0,), num_prompts=(80,), arrivals=arrivals)
    assert_times(result, ttft_ms=100, itl_ms=20, tokens=16)
    # The last arrival is at 79 / 40 s and takes 0.4 s.
    assert result.duration_s > 0.95 * (79 / 40 + 0.4)
    assert (result.load_kind, result.rate_per_s, result.steady) == ("open", 40.0, None)
    assert result.queue_delay_ms.min is not None
    assert result.queue_delay_ms.min >= 0


@pytest.mark.slow
def test_two_worker_processes_have_one_clock_and_one_release(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "200", "--itl-ms", "20", "--tokens", "16")
    records = tmp_path / "requests.jsonl"
    result = load(server, concurrency=(21,), num_prompts=(42,), processes=2, records_path=records)
    assert_times(result, ttft_ms=200, itl_ms=20, tokens=16)
    assert result.peak_in_flight == 21
    assert result.client is not None
    assert result.client.processes == 2
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(42))
    assert all(line["intended_s"] == 0 for line in lines if line["index"] < 21)


@pytest.mark.timeout(30)
def test_no_more_worker_processes_than_connections(scripted: Start) -> None:
    """A process without a connection would hold requests that are never sent."""
    result = load(scripted("--tokens", "4"), concurrency=(1,), num_prompts=(6,), num_warmups=0, processes=3)
    assert (result.succeeded, result.requests, result.peak_in_flight) == (6, 6, 1)
    assert result.client is not None
    assert result.client.processes == 1


def test_warmup_requests_stay_out_of_the_results(scripted: Start, tmp_path: Path) -> None:
    records = tmp_path / "requests.jsonl"
    result = load(scripted("--tokens", "4"), concurrency=(3,), num_prompts=(6,), num_warmups=5, records_path=records)
    levels = [json.loads(line)["level"] for line in records.read_text().splitlines()]
    assert (result.requests, result.warmup_requests) == (6, 5)
    assert (levels.count("warm-up"), levels.count("concurrency 3")) == (5, 6)


FAULTS = {
    "429": "http 429: the queue is full",
    "reset": "connection reset",
    "no-finish": "truncated stream: no finish_reason",
    "bad-json": "bad json",
    "bad-chunk": "malformed response: bad chunk size",
    "error-event": "error event: the engine is gone",
    "plain": "not a stream",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_by_its_reason_and_affects_no_other_request(scripted: Start, fault: str) -> None:
    server = scripted("--ttft-ms", "2", "--itl-ms", "1", "--tokens", "4", "--fault", fault, "--fault-every", "3")
    result = load(server, concurrency=(4,), num_prompts=(30,))
    assert (result.requests, result.succeeded, result.failed) == (30, 20, 10)
    [(reason, count)] = merge_closed_and_reset(result.failures).items()
    assert reason.startswith(FAULTS[fault])
    assert count == 10
    assert result.verdict == "FAILED"


@pytest.mark.parametrize(
    ("fault", "verdict", "source", "said"),
    [
        ("no-done", "OK", "server-reported", "10 of 30 streams ended after finish_reason, without [DONE]"),
        ("no-usage", "OK", "events", "10 of 30 answers came without usage: their tokens are counted as events"),
        ("empty", "NO_TEXT", "server-reported", "10 of 30 answers had no text; the server counted 40 tokens in them"),
    ],
)
def test_answers_without_done_usage_or_text_count_with_a_note(
    scripted: Start, fault: str, verdict: str, source: str, said: str
) -> None:
    server = scripted("--ttft-ms", "2", "--itl-ms", "1", "--tokens", "4", "--fault", fault, "--fault-every", "3")
    result = load(server, concurrency=(4,), num_prompts=(30,))
    assert (result.failures, result.succeeded, result.output_tokens) == ({}, 30, 120)
    assert (result.token_count_source, result.verdict in (verdict, "CLIENT_BOUND")) == (source, True)
    assert any(reason.startswith(said) for reason in result.reasons)
    seen = 20 if fault == "empty" else 30
    assert (result.ttft_ms.n, result.tpot_ms.n, result.e2e_ms.n) == (seen, seen, 30)


@pytest.mark.parametrize("rate", [None, 200.0])
def test_connection_closed_between_requests_is_opened_again(
    scripted: Start, tmp_path: Path, rate: float | None
) -> None:
    """llama.cpp closes every connection after a stream, and no header says so."""
    server = scripted("--ttft-ms", "2", "--itl-ms", "1", "--tokens", "4", "--fault", "close")
    records = tmp_path / "requests.jsonl"
    fields = {"concurrency": (4,)} if rate is None else {"request_rate": (rate,)}
    result = load(server, num_prompts=(30,), records_path=records, **fields)
    assert (result.failures, result.succeeded, result.output_tokens) == ({}, 30, 120)
    num_reconnected = sum("reconnected" in json.loads(line) for line in records.read_text().splitlines())
    assert num_reconnected > 0 or rate is not None
    said = f"{num_reconnected} of 30 requests were sent again over a new connection"
    assert num_reconnected == 0 or any(reason.startswith(said) for reason in result.reasons)


@pytest.mark.slow
def test_request_that_the_server_drops_after_reading_it_is_a_failure(scripted: Start) -> None:
    server = scripted("--ttft-ms", "300", "--tokens", "2", "--fault", "drop", "--fault-every", "2")
    result = load(server, concurrency=(1,), num_prompts=(4,))
    assert (result.succeeded, result.failures) == (2, {"connection closed: connection closed before a response": 2})


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_tokenizer_counts_prompts_and_answers_of_a_server_without_usage(
    scripted: Start, tmp_path: Path, processes: int
) -> None:
    server = scripted("--ttft-ms", "2", "--tokens", "5", "--merge", "2", "--fault", "no-usage")
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "one two three"}\n{"messages": [{"role": "user", "content": "four five"}]}\n')
    records = tmp_path / "requests.jsonl"
    fields = {"workload": str(path), "concurrency": (2,), "num_prompts": (100,), "processes": processes}
    counted = load(server, **fields, tokenizer=word_tokenizer(tmp_path), records_path=records)
    assert (counted.token_count_source, counted.output_tokens) == ("tokenizer", 500)
    assert counted.prompt_tokens == 50 * 3 + 50 * 2
    assert any("counted with the tokenizer" in reason for reason in counted.reasons)
    assert {json.loads(line)["output_tokens"] for line in records.read_text().splitlines()} == {None}
    by_events = load(server, **fields)
    assert (by_events.token_count_source, by_events.output_tokens, by_events.prompt_tokens) == ("events", 300, 0)


def word_tokenizer(folder: Path) -> str:
    """A tokenizer for which each word is a token."""
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_full_disk_ends_the_record_file_and_not_the_run(scripted: Start, tmp_path: Path) -> None:
    records = tmp_path / "requests.jsonl"
    records.symlink_to("/dev/full")
    result = load(
        scripted("--ttft-ms", "2", "--tokens", "4"), concurrency=(4,), num_prompts=(12,), records_path=records
    )
    assert (result.succeeded, result.output_tokens) == (12, 48)
    assert any(
        "requests.jsonl is incomplete: No space left on device; it holds 0 requests and lacks 12" in reason
        for reason in result.reasons
    )
    assert list(tmp_path.iterdir()) == [records], "the reserve is freed"


def reserved_bytes(folder: Path) -> int:
    """Bytes of unlinked files that this process holds open in `folder`."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith(f"{folder}/") and (status := each.stat()).st_nlink == 0:
                found += status.st_blocks * 512
    return found


def test_record_file_reserves_space_for_the_result_until_it_is_closed(tmp_path: Path) -> None:
    records = tmp_path / "requests.jsonl"
    file = RecordFile(records)
    assert reserved_bytes(tmp_path) >= RESERVE_BYTES
    assert list(tmp_path.iterdir()) == [records], "a killed run leaves nothing else behind"
    file.close()
    assert reserved_bytes(tmp_path) == 0
    with pytest.raises(ConfigError, match="cannot write"):
        RecordFile(tmp_path / "absent" / "requests.jsonl")


def test_record_file_without_room_for_its_reserve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError) as refused:
        RecordFile(tmp_path / "requests.jsonl")
    assert f"{tmp_path}: cannot reserve" in str(refused.value)
    assert "No space left on device): 8,388,608 bytes are needed, " in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert reserved_bytes(tmp_path) == 0


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """Mount a tmpfs of `mib` MiB at `folder`; skips the test where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={mib}m".encode()
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options):
        pytest.skip(f"mounting a tmpfs is not permitted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        detach = 2  # MNT_DETACH
        assert libc.umount2(str(folder).encode(), detach) == 0


def test_run_on_a_disk_smaller_than_the_reserve_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path, 4):
        with pytest.raises(ConfigError, match="8,388,608 bytes are needed, 4,194,304 are free"):
            RecordFile(tmp_path / "requests.jsonl")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "other").write_bytes(bytes(3 * 2**20))


def test_result_is_written_after_records_have_filled_the_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 10):
        file = RecordFile(tmp_path / "requests.jsonl")
        records = [RequestRecord(index=0, intended_s=1.0, detail="x" * 2**20)]
        while file.problem is None:
            file.write("concurrency 1", 0.0, records)
        assert "it holds 1 requests and lacks 1" in file.problem
        file.close()
        (tmp_path / "result.json").write_bytes(bytes(RESERVE_BYTES))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 64}, 64),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 64, "n": 3}, 192),
        ({"max_tokens": 64, "n": 2, "best_of": 4}, 256),
        ({"max_tokens": None}, None),
        ({}, None),
    ],
)
def test_limit_of_output_tokens_is_of_all_choices(fields: dict[str, Any], limit: int | None) -> None:
    assert max_output_tokens(fields) == limit


@pytest.mark.parametrize(
    ("fault", "count"),
    [("negative-usage", "-6"), ("inflated-usage", "1000, the request allows at most 64")],
)
@pytest.mark.parametrize("fields", [{}, {"continuous_usage": False, "stream": False}])
def test_token_counts_that_cannot_be_true_fail_the_level(
    scripted: Start, fault: str, count: str, fields: dict[str, object]
) -> None:
    server = scripted("--ttft-ms", "2", "--tokens", "1", "--fault", fault)
    result = load(server, concurrency=(2,), num_prompts=(4,), **fields)
    assert (result.verdict, result.output_tokens_per_s) == ("FAILED", 0)
    assert result.failures == {f"implausible usage: completion_tokens {count}": 4}


class _Gauges:
    """A probe whose reads return `values` in order, each `step_s` after the one before; the last one repeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *values: dict[str, float]) -> None:
        self._values = list(values)
        monkeypatch.setattr(probe, "SAMPLE_S", 0.02)
        monkeypatch.setattr(InFlightProbe, "_read_gauges", self.read)

    async def read(self) -> dict[str, float]:
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]


async def _probed(level_s: float) -> int | None:
    sampled = InFlightProbe(parse_target("http://127.0.0.1:9"))
    await sampled.start()
    start_s = time.monotonic()
    await asyncio.sleep(level_s)
    end_s = time.monotonic()
    await asyncio.sleep(0.05)  # samples after the level do not count
    return await sampled.finish(start_s, end_s)


def test_server_peak_without_a_sample_inside_the_level_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _Gauges(monkeypatch, {"requests_in_flight": 0.0})
    assert asyncio.run(_probed(0.0)) is None


def test_server_peak_is_the_highest_sample_or_a_mark_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}, {"requests_in_flight": 7.0}
    _Gauges(monkeypatch, idle, busy, {"num_requests_running": 3.0, "num_requests_waiting": 1.0})
    assert asyncio.run(_probed(1.0)) == 7
    _Gauges(monkeypatch, {"requests_in_flight_peak": 4.0}, {"requests_in_flight_peak": 20.0})
    assert asyncio.run(_probed(0.0)) == 20
    _Gauges(monkeypatch, {"requests_in_flight_peak": 20.0})
    assert asyncio.run(_probed(0.0)) is None, "an unchanged mark may be older than the level"


def merge_closed_and_reset(failures: dict[str, int]) -> dict[str, int]:
    """A dropped connection reads as reset or as closed, by what was in the buffers; both are the same fault."""
    merged: dict[str, int] = {}
    for reason, count in failures.items():
        name = "connection reset" if reason.startswith("connection ") else reason
        merged[name] = merged.get(name, 0) + count
    return merged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("silent", Timeouts(first_byte_s=0.3), "first byte timeout"),
        ("stall", Timeouts(idle_s=0.3), "idle timeout"),
        ("stall", Timeouts(total_s=0.4), "total timeout"),
    ],
)
def test_each_timeout_fails_a_request_with_its_own_reason(
    scripted: Start, fault: str, limits: Timeouts, reason: str
) -> None:
    result = load(scripted("--fault", fault, "--fault-every", "2"), concurrency=(2,), num_prompts=(4,), timeouts=limits)
    assert (result.succeeded, result.failed) == (2, 2)
    assert next(iter(result.failures)).startswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_dead_server_is_the_verdict_and_every_planned_request_is_counted(scripted: Start, processes: int) -> None:
    server = scripted("--ttft-ms", "50", "--tokens", "8", "--die-after", "12")
    config = LoadConfig(url=server.url, concurrency=(5, 5), num_prompts=(40,), processes=processes, **QUICK)  # type: ignore[attr-defined, arg-type]
    results = run_levels(config)
    assert len(results) == 1, "no further level is tried"
    [result] = results
    assert result.verdict == "SERVER_DIED"
    assert result.requests == 40
    assert 1 <= result.succeeded <= 12
    assert any("server died" in reason for reason in result.reasons)


def test_interrupted_level_is_partial_and_keeps_its_records(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "10")
    records = tmp_path / "requests.jsonl"
    fired = threading.Event()

    def interrupt_once(progress: Progress) -> None:
        if progress.num_done >= 8 and not fired.is_set():
            fired.set()
            os.kill(os.getpid(), signal.SIGINT)

    config = LoadConfig(url=server.url, concurrency=(4, 4), num_prompts=(400,), records_path=records, **QUICK)  # type: ignore[attr-defined, arg-type]
    [result] = run_levels(config, interrupt_once)
    assert result.verdict == "PARTIAL"
    assert 8 <= result.succeeded < 400
    assert result.requests == result.succeeded + result.failed < 400
    assert len(records.read_text().splitlines()) == result.requests


def test_interrupt_after_the_last_answer_is_not_lost(scripted: Start) -> None:
    config = LoadConfig(url=scripted("--tokens", "4").url, concurrency=(2,), num_prompts=(4,), **QUICK)  # type: ignore[attr-defined, arg-type]
    [result] = run_levels(config, on_level=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert (result.verdict, result.succeeded) == ("PARTIAL", 4)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_address_without_a_server_is_an_error() -> None:
    with pytest.raises(ConfigError, match="refused"):
        run_levels(LoadConfig(url="http://127.0.0.1:9"))


def test_result_round_trips_through_json(scripted: Start) -> None:
    result = load(scripted("--tokens", "4"), concurrency=(2,), num_prompts=(4,))
    assert msgspec.json.decode(msgspec.json.encode(result), type=LevelResult) == result


@pytest.mark.slow
def test_two_thousand_streams_are_in_flight_concurrently(scripted: Start) -> None:
    server = scripted("--ttft-ms", "3000", "--itl-ms", "200", "--tokens", "4")
    result = load(server, concurrency=(2000,), num_prompts=(2000,))
    assert (result.succeeded, result.failed) == (2000, 0)
    assert result.peak_in_flight == 2000
    assert result.server_peak_in_flight == 2000


@pytest.mark.parametrize("num_warmups", [2, 0])
def test_models_without_a_chat_template_complete_the_texts(scripted: Start, tmp_path: Path, num_warmups: int) -> None:
    path = tmp_path / "chats.jsonl"
    parts = '[{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]'
    system = '{"role": "system", "content": "be brief"}'
    path.write_text(f'{{"messages": [{system}, {{"role": "user", "content": {parts}}}]}}')
    server = scripted("--fault", "no-template", "--tokens", "4", "--ttft-ms", "1", "--itl-ms", "1")
    fields = {"workload": str(path), "concurrency": (2, 3), "num_prompts": (4,), "num_warmups": num_warmups}
    result = measure(LoadConfig(url=server.url, **fields), [])  # type: ignore[attr-defined, arg-type]
    assert [(level.succeeded, level.failed) for level in result.levels] == [(4, 0), (4, 0)]
    assert [level.prompt_tokens for level in result.levels] == [4 * 5] * 2
    told = "messages were sent as text to /v1/completions: this model has no chat template"
    assert (result.verdict, result.notes.count(told)) == ("OK", 1)


@pytest.mark.parametrize(
    ("num_warmups", "reason", "num_requests"),
    [(2, "no warm-up request succeeded, so the level was not sent", 2), (0, "4 of 4 requests failed", 4)],
)
def test_a_level_that_fails_whole_ends_the_run(
    scripted: Start, num_warmups: int, reason: str, num_requests: int
) -> None:
    server = scripted("--fault", "429")
    fields = {**QUICK, "concurrency": (2, 3, 4), "num_prompts": (4,), "num_warmups": num_warmups}
    result = measure(LoadConfig(url=server.url, **fields), [])  # type: ignore[attr-defined, arg-type]
    [level] = result.levels
    assert (level.concurrency, level.requests, level.verdict) == (2, num_requests, "FAILED")
    assert level.failures == {"http 429: the queue is full; try again later": num_requests}
    assert any(reason in each for each in level.reasons)
    assert level.reasons[-1] == "no request succeeded, so the levels after it (2) were not run"
    assert (result.status, result.verdict) == ("partial", "FAILED")
