"""The largest context and the most sequences at once before memory runs out: found by search, beside the arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meltcore.evals.api import Api, ApiError
from meltcore.load.config import LoadConfig
from meltcore.load.probe import read_gauges
from meltcore.results.schema import RunResult
from meltcore.results.tuning import Fact, TuningPoint
from meltcore.trials.server import RunningServer
from meltcore.tune.arithmetic import reported_capacity, sequences_that_fit
from meltcore.tune.attempt import Bench, attempt
from meltcore.tune.search import largest

_ANSWER_TOKENS = 16  # of the one request that fills a context
LEAST_LENGTH = _ANSWER_TOKENS + 1  # that a context can be tried at
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`length` is what each of the sequences holds, prompt and answer; `most_*` and `step` bound the searches.

    `load` carries model, seed and the vocabulary's workload options. `bytes_per_token` is the arithmetic's, if known.
    """

    load: LoadConfig
    least_length: int = 1024
    most_length: int | None = None
    step: int = 1024
    length: int = 2048
    most_seqs: int = 1024
    vocabulary: int | None = None
    bytes_per_token: int | None = None


@dataclass
class Found:
    """`capacity`: tokens of the largest cache a server reported, and its page."""

    points: list[TuningPoint] = field(default_factory=list)
    model_length: int | None = None
    length: int | None = None
    seqs: int | None = None
    capacity: int | None = None
    page: int = 1


def search_context(bench: Bench, wanted: Wanted) -> Found:
    """Search the context first, then the sequences, each try a fresh start."""
    found = Found()
    most = wanted.most_length or _own_length(bench, found)
    if most is not None:
        found.length = largest(
            lambda length: _holds_length(bench, wanted, found, length),
            min(wanted.least_length, most),
            most,
            min(wanted.step, most),
        )
    found.seqs = largest(lambda seqs: _holds_seqs(bench, wanted, found, seqs), 1, wanted.most_seqs, 1)
    return found


def facts(found: Found, wanted: Wanted) -> list[Fact]:
    """What was found beside what is reported and reckoned."""
    rows = []
    if found.model_length is not None:
        rows.append(Fact(name="context as started", value=f"{found.model_length:,} tokens", source="server-reported"))
    rows.append(Fact(name="largest context", value=_tokens(found.length), source="found by search"))
    seqs = "none" if found.seqs is None else f"{found.seqs:,}"
    rows.append(Fact(name=f"sequences of {wanted.length:,} tokens at once", value=seqs, source="found by search"))
    if found.capacity is None:
        rows.append(Fact(name="cache", value="not told", source="server-reported"))
        return rows
    rows.append(Fact(name="largest cache seen", value=_tokens(found.capacity), source="server-reported"))
    fitting = sequences_that_fit(found.capacity, wanted.length, found.page)
    rows.append(
        Fact(name=f"sequences of {wanted.length:,} tokens that it holds", value=f"{fitting:,}", source="reckoned")
    )
    if wanted.bytes_per_token is not None:
        size = found.capacity * wanted.bytes_per_token / 2**20
        value = f"{wanted.bytes_per_token:,} bytes a token, {size:,.1f} MiB in all"
        rows.append(Fact(name="keys and values", value=value, source="reckoned from config.json"))
    return rows


def finding(found: Found, wanted: Wanted) -> str:
    """The answer in a sentence."""
    seqs = "no sequence" if found.seqs is None else f"{found.seqs:,} sequences"
    bound = " (the most that was tried)" if found.seqs == wanted.most_seqs else ""
    return (
        f"The largest context that starts and answers is {_tokens(found.length)}; {seqs} of {wanted.length:,} tokens "
        f"run at once without preemption{bound}."
    )


def _own_length(bench: Bench, found: Found) -> int | None:
    """The context the server takes by itself, asked of a start without settings."""

    def look(server: RunningServer, result: RunResult | None, point: TuningPoint) -> None:
        del result
        found.model_length = _listed_length(Api(server.url))
        if found.model_length is None:
            point.why = "the server does not say its context: give one with --most"

    found.points.append(attempt(bench, {"length": "as started"}, None, words=[], look=look))
    return found.model_length


def _listed_length(api: Api) -> int | None:
    listing: Any = api.get("/v1/models").json()
    try:
        return int(listing["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _holds_length(bench: Bench, wanted: Wanted, found: Found, length: int) -> bool:
    """Whether a context of `length` starts, and answers one request that fills it."""
    load = _load(wanted, length - _ANSWER_TOKENS, _ANSWER_TOKENS, at_once=1)
    point = attempt(bench, {"length": length}, load, look=_note_capacity(found))
    found.points.append(point)
    return point.ok


def _holds_seqs(bench: Bench, wanted: Wanted, found: Found, seqs: int) -> bool:
    """Whether `seqs` sequences run at once, all of them, and none is preempted.

    Half of each is answer, so that the first still run when the last has been read in.
    """
    load = _load(wanted, wanted.length // 2, wanted.length - wanted.length // 2, at_once=seqs)
    settings: dict[str, int | str] = {"length": wanted.length, "seqs": seqs}
    note = _note_capacity(found)
    watch: _Watch | None = None

    def before(server: RunningServer) -> None:
        nonlocal watch
        watch = _Watch(Api(server.url, timeout_s=10.0))

    def look(server: RunningServer, result: RunResult | None, point: TuningPoint) -> None:
        note(server, result, point)
        assert watch is not None
        point.running_peak, point.preemptions = watch.stop()
        if point.ok and point.preemptions:
            point.ok, point.why = False, f"memory ran out: {point.preemptions:,} preempted"
        elif point.ok and point.running_peak is not None and point.running_peak < seqs:
            point.ok, point.why = False, f"at most {point.running_peak:,} ran at once"

    point = attempt(bench, settings, load, before=before, look=look)
    found.points.append(point)
    return point.ok


def _load(wanted: Wanted, prompt: int, answer: int, *, at_once: int) -> LoadConfig:
    vocabulary = "" if wanted.vocabulary is None else f",vocab={wanted.vocabulary}"
    workload = f"random:in={prompt},out={answer}{vocabulary}"
    return replace(wanted.load, concurrency=(at_once,), requests=at_once, warmup=0, workload=workload)


def _note_capacity(found: Found) -> Callable[[RunningServer, RunResult | None, TuningPoint], None]:
    def look(server: RunningServer, result: RunResult | None, point: TuningPoint) -> None:
        del result, point
        capacity = reported_capacity(server.process.log)
        if capacity is not None and capacity[0] > (found.capacity or 0):
            found.capacity, found.page = capacity

    return look


def _tokens(count: int | None) -> str:
    return "none" if count is None else f"{count:,} tokens"


class _Watch:
    """Samples the server's own counts from a thread: most sequences running, and preemptions since the start."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._peak: int | None = None
        self._stopping = threading.Event()
        self._first = self._read().get("num_preemptions_total")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int | None, int | None]:
        """(most running, preemptions); None where the server has no such gauge."""
        self._stopping.set()
        self._thread.join(15.0)
        last = self._read().get("num_preemptions_total")
        return self._peak, None if last is None or self._first is None else round(last - self._first)

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            running = self._read().get("num_requests_running")
            if running is not None:
                self._peak = max(self._peak or 0, round(running))

    def _read(self) -> dict[str, float]:
        try:
            reply = self._api.get("/metrics")
        except ApiError:
            return {}  # a server without such a page is judged by its answers alone
        return read_gauges(reply.body.decode("utf-8", "replace")) if reply.status == 200 else {}
