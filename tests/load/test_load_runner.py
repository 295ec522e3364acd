"""The generator against a server whose every token has a known time, and against every fault that server knows.

Tolerances: timers of both sides have 1 ms, and the machine may be shared. Medians are held to 10 %.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from meltcore.errors import ConfigError
from meltcore.load import LoadConfig, Progress, Timeouts, run_levels
from meltcore.results.schema import LevelResult

Start = Callable[..., object]

QUICK = {"workload": "random:in=8,out=64", "warmup": 0}


def load(server: object, **fields: object) -> LevelResult:
    [result] = run_levels(LoadConfig(url=server.url, **{**QUICK, **fields}))  # type: ignore[attr-defined, arg-type]
    return result


def assert_times(result: LevelResult, *, ttft_ms: float, itl_ms: float, tokens: int) -> None:
    assert result.failures == {}
    assert result.ttft_ms.p50 == pytest.approx(ttft_ms, rel=0.10)
    assert result.itl_ms.p50 == pytest.approx(itl_ms, rel=0.10)
    assert result.tpot_ms.p50 == pytest.approx(itl_ms, rel=0.10)
    assert result.e2e_ms.p50 == pytest.approx(ttft_ms + (tokens - 1) * itl_ms, rel=0.10)
    assert result.output_tokens == result.succeeded * tokens


def test_closed_loop_numbers_match_the_script(scripted: Start) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "16")
    result = load(server, concurrency=(20,), requests=60)
    assert_times(result, ttft_ms=100, itl_ms=20, tokens=16)
    assert result.succeeded == 60
    assert result.peak_in_flight == 20
    assert result.server_peak_in_flight == 20
    # Three waves of 0.1 + 15 * 0.02 = 0.4 s.
    assert result.duration_s == pytest.approx(1.2, rel=0.15)
    assert result.output_tokens_per_s == pytest.approx(60 * 16 / 1.2, rel=0.15)
    assert result.total_tokens_per_s == pytest.approx(60 * 24 / 1.2, rel=0.15)
    assert result.steady is not None
    assert result.chunk_to_token_ratio == 1.0
    assert result.itl_unit == "token"


def test_chat_problems_are_asked_and_marked(scripted: Start) -> None:
    result = load(scripted("--ttft-ms", "5", "--itl-ms", "1"), workload="problems:short", concurrency=(5,), requests=10)
    assert result.succeeded == 10
    assert result.accuracy == 0.0, "the scripted server knows no arithmetic"


def test_answers_of_a_file_are_marked(scripted: Start, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "a", "answer": "w3"}\n{"prompt": "b", "answer": "w99"}\n')
    result = load(scripted("--tokens", "8"), workload=str(path), concurrency=(2,), requests=10)
    assert result.accuracy == 0.5


def test_merged_chunks_count_their_tokens(scripted: Start) -> None:
    server = scripted("--ttft-ms", "50", "--itl-ms", "20", "--tokens", "16", "--merge", "4")
    result = load(server, concurrency=(12,), requests=24)
    assert result.itl_ms.p50 == pytest.approx(20, rel=0.10), "80 ms between chunks, shared by 4 tokens"
    assert result.ttft_ms.p50 == pytest.approx(50 + 3 * 20, rel=0.10), "the first chunk waits for its fourth token"
    assert result.chunk_to_token_ratio == 0.25
    unweighted = load(server, concurrency=(12,), requests=24, continuous_usage=False)
    assert unweighted.itl_unit == "chunk"
    assert unweighted.itl_ms.p50 == pytest.approx(80, rel=0.10)


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_open_loop_keeps_its_rate_and_its_numbers_match(scripted: Start, arrivals: str) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "16")
    result = load(server, rates=(40.0,), requests=80, arrivals=arrivals)
    assert_times(result, ttft_ms=100, itl_ms=20, tokens=16)
    # The last arrival is at 79 / 40 s and takes 0.4 s.
    assert result.duration_s == pytest.approx(79 / 40 + 0.4, rel=0.10)
    assert (result.load_kind, result.rate_per_s, result.steady) == ("open", 40.0, None)
    assert result.queue_delay_ms.min is not None
    assert result.queue_delay_ms.min >= 0


def test_two_processes_share_one_clock_and_one_release(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "200", "--itl-ms", "20", "--tokens", "16")
    records = tmp_path / "requests.jsonl"
    result = load(server, concurrency=(21,), requests=42, processes=2, records_path=records)
    assert_times(result, ttft_ms=200, itl_ms=20, tokens=16)
    assert result.peak_in_flight == 21
    assert result.client is not None
    assert result.client.processes == 2
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(42))
    assert all(line["intended_s"] == 0 for line in lines if line["index"] < 21)


def test_warmup_is_recorded_apart_and_stays_out_of_the_results(scripted: Start, tmp_path: Path) -> None:
    records = tmp_path / "requests.jsonl"
    result = load(scripted("--tokens", "4"), concurrency=(3,), requests=6, warmup=5, records_path=records)
    levels = [json.loads(line)["level"] for line in records.read_text().splitlines()]
    assert (result.requests, result.warmup_requests) == (6, 5)
    assert (levels.count("warm-up"), levels.count("concurrency 3")) == (5, 6)


FAULTS = {
    "429": "http 429: the queue is full",
    "reset": "connection reset",
    "no-finish": "truncated stream: no finish_reason",
    "no-done": "truncated stream: no [DONE]",
    "no-usage": "no usage",
    "bad-json": "bad json",
    "bad-chunk": "malformed response: bad chunk size",
    "error-event": "error event: the engine is gone",
    "empty": "empty answer",
    "plain": "not a stream",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_by_its_reason_and_touches_no_other_request(scripted: Start, fault: str) -> None:
    server = scripted("--ttft-ms", "2", "--itl-ms", "1", "--tokens", "4", "--fault", fault, "--fault-every", "3")
    result = load(server, concurrency=(4,), requests=30)
    assert (result.requests, result.succeeded, result.failed) == (30, 20, 10)
    [(reason, count)] = merge_closed_and_reset(result.failures).items()
    assert reason.startswith(FAULTS[fault])
    assert count == 10
    assert result.verdict == "FAILED"


def merge_closed_and_reset(failures: dict[str, int]) -> dict[str, int]:
    """A dropped connection reads as reset or as closed, by what was in the buffers; both are the same fault."""
    merged: dict[str, int] = {}
    for reason, count in failures.items():
        name = "connection reset" if reason.startswith("connection ") else reason
        merged[name] = merged.get(name, 0) + count
    return merged


@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("silent", Timeouts(first_byte_s=0.3), "first byte timeout"),
        ("stall", Timeouts(idle_s=0.3), "idle timeout"),
        ("stall", Timeouts(total_s=0.4), "total timeout"),
    ],
)
def test_each_time_limit_ends_a_request_with_its_own_reason(
    scripted: Start, fault: str, limits: Timeouts, reason: str
) -> None:
    result = load(scripted("--fault", fault, "--fault-every", "2"), concurrency=(2,), requests=4, timeouts=limits)
    assert (result.succeeded, result.failed) == (2, 2)
    assert next(iter(result.failures)).startswith(reason)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_dead_server_is_the_verdict_and_every_planned_request_is_counted(scripted: Start, processes: int) -> None:
    server = scripted("--ttft-ms", "50", "--tokens", "8", "--die-after", "12")
    config = LoadConfig(url=server.url, concurrency=(5, 5), requests=40, processes=processes, **QUICK)  # type: ignore[attr-defined, arg-type]
    results = run_levels(config)
    assert len(results) == 1, "no further level is tried"
    [result] = results
    assert result.verdict == "SERVER_DIED"
    assert result.requests == 40
    assert 1 <= result.succeeded <= 12
    assert any("server died" in reason for reason in result.reasons)


def test_interrupt_leaves_a_partial_level_with_its_records(scripted: Start, tmp_path: Path) -> None:
    server = scripted("--ttft-ms", "100", "--itl-ms", "20", "--tokens", "10")
    records = tmp_path / "requests.jsonl"
    fired = threading.Event()

    def interrupt_once(progress: Progress) -> None:
        if progress.done >= 8 and not fired.is_set():
            fired.set()
            os.kill(os.getpid(), signal.SIGINT)

    config = LoadConfig(url=server.url, concurrency=(4, 4), requests=400, records_path=records, **QUICK)  # type: ignore[attr-defined, arg-type]
    [result] = run_levels(config, interrupt_once)
    assert result.verdict == "PARTIAL"
    assert 8 <= result.succeeded < 400
    assert result.requests == result.succeeded + result.failed < 400
    assert len(records.read_text().splitlines()) == result.requests


def test_an_address_without_a_server_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="refused"):
        run_levels(LoadConfig(url="http://127.0.0.1:9"))


def test_results_survive_the_schema(scripted: Start) -> None:
    result = load(scripted("--tokens", "4"), concurrency=(2,), requests=4)
    assert msgspec.json.decode(msgspec.json.encode(result), type=LevelResult) == result


@pytest.mark.slow
def test_two_thousand_streams_are_in_flight_together(scripted: Start) -> None:
    server = scripted("--ttft-ms", "3000", "--itl-ms", "200", "--tokens", "4")
    result = load(server, concurrency=(2000,))
    assert (result.succeeded, result.failed) == (2000, 0)
    assert result.peak_in_flight == 2000
    assert result.server_peak_in_flight == 2000
