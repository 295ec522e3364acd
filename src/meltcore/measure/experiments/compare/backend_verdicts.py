"""Names the best backend of each set-up and model, and states the findings on the nine aspects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean

from meltcore.common.sizes import GIB, size_text
from meltcore.measure.documents.backends import (
    MAX_FAILED_RATIO,
    START_KIND_BY_SET_UP,
    Aspect,
    BackendComparison,
    BackendRun,
    BestBackend,
    SetUp,
    StartKind,
)
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.formatting import format_number

MIN_LEAD = 0.05  # each level is one run: a smaller lead is no lead
MAX_TTFT_MS, MAX_ITL_MS = 2000.0, 100.0  # of interactive use, 95th percentiles
UNMEASURED = "not measured"
_MAX_REASON_CHARS = 60  # characters, in a cell of the aspects


def best_backends(comparison: BackendComparison) -> list[BestBackend]:
    """Return the best backend of each set-up, then of each model over all set-ups.

    Each model has two entries: at the lowest and at the highest concurrency.
    """
    best = [_best_of_set_up(comparison, set_up) for set_up in comparison.set_ups]
    levels = [int(level) for level in comparison.load["concurrency"]]
    starts = list(dict.fromkeys(START_KIND_BY_SET_UP[set_up] for set_up in comparison.set_ups))
    groups: dict[str, list[StartKind]] = {comparison.model: [start for start in starts if start != "quantized"]}
    if "quantized" in starts:
        groups[f"{comparison.model}, quantized"] = ["quantized"]
    for model, kinds in groups.items():
        runs = [run for run in comparison.runs if run.start in kinds]
        best += [_best(model, "", [level], runs) for level in dict.fromkeys((min(levels), max(levels)))]
    return best


def _best_of_set_up(comparison: BackendComparison, set_up: SetUp) -> BestBackend:
    runs = [run for run in comparison.runs if run.start == START_KIND_BY_SET_UP[set_up]]
    model = f"{comparison.model}, quantized" if set_up == "quantized" else comparison.model
    return _best(model, set_up, comparison.levels_of(set_up), runs)


def mean_rate(run: BackendRun, levels: Sequence[int]) -> float | None:
    """Return the geometric mean of output tokens/s over `levels`.

    Returns None if a level was not measured or produced no tokens.
    """
    rates = [0.0 if (level := run.level(each)) is None else level.output_tokens_per_s for each in levels]
    return geometric_mean(rates) if rates and all(rates) else None


def _best(model: str, set_up: str, levels: list[int], runs: Sequence[BackendRun]) -> BestBackend:
    best = BestBackend(model=model, set_up=set_up, levels=levels)
    rated_runs = [(rate, run) for run in runs if (rate := mean_rate(run, levels)) is not None]
    if not rated_runs:
        best.reason = "no backend completed all levels" if levels else "it has no level of its own"
        best.reason += _failed_shares(runs, levels)
        return best
    rated_runs.sort(key=lambda pair: pair[0], reverse=True)
    rate, leader = rated_runs[0]
    best.output_tokens_per_s = rate
    rivals = [(other, run) for other, run in rated_runs if run.backend != leader.backend]
    start_note = "" if set_up else f" ({leader.start})"
    if not rivals:
        best.reason = f"no comparison: only {leader.backend} completed all levels{start_note}"
    elif rate < (1 + MIN_LEAD) * rivals[0][0]:
        best.reason = (
            f"no clear best: {leader.backend} leads {rivals[0][1].backend} by {100 * (rate / rivals[0][0] - 1):.1f} %, "
            f"and a lead below {100 * MIN_LEAD:.0f} % may be noise"
        )
    else:
        best.backend = leader.backend
        best.reason = f"{rate / rivals[0][0]:.2f} times {rivals[0][1].backend}{start_note}"
    best.reason += _failed_shares(runs, levels)
    return best


def _failed_shares(runs: Sequence[BackendRun], levels: Sequence[int]) -> str:
    """Return a text with the shares of failed requests in `levels`, for each start with failures."""
    texts = []
    for run in runs:
        shares = [100 * each.failed / each.requests for each in run.levels if each.concurrency in levels]
        if any(run.failure(each) for each in levels):
            lowest, highest = f"{min(shares):.0f}", f"{max(shares):.0f}"
            share = lowest if lowest == highest else f"{lowest} to {highest}"
            texts.append(f"; {run.backend} failed {share} % ({run.start})")
    return "".join(texts)


def find_aspects(comparison: BackendComparison) -> list[Aspect]:
    """Return the nine aspects, each with the findings of the runs by backend.

    Findings compare several runs of a backend, or judge its run with one server on one GPU.
    """
    levels = sorted(int(level) for level in comparison.load["concurrency"])

    def of_single(find: Callable[[BackendRun | None, Sequence[int]], str]) -> Callable[[str], str]:
        return lambda backend: find(comparison.run(backend, "single"), levels)

    finders: list[tuple[str, str, Callable[[str], str]]] = [
        (
            "Performance",
            "output tok/s at the highest and the lowest concurrency, TTFT p50 at the highest",
            of_single(_speed),
        ),
        (
            "Concurrency",
            f"highest level at which at most {100 * MAX_FAILED_RATIO:.0f} % of requests fail",
            of_single(_concurrency),
        ),
        (
            "Multi-GPU support",
            "output tok/s of data parallel and split model, against one GPU",
            partial(_multi_gpu, comparison),
        ),
        (
            "Quantization support",
            "output tok/s of the quantized model, against the other",
            partial(_quantization, comparison),
        ),
        (
            "Hardware requirements",
            "peak memory of GPUs under load, memory of its processes after it",
            of_single(_hardware),
        ),
        ("Ease of use and deployment", "start to first answer, arguments, settings that it lacks", of_single(_ease)),
        (
            "Use case fit",
            f"highest level for interactive use: TTFT p95 up to {MAX_TTFT_MS:,.0f} ms, ITL p95 up to "
            f"{MAX_ITL_MS:.0f} ms",
            of_single(_fit),
        ),
        (
            "Memory efficiency",
            "output tok/s at the highest level per GiB of GPU memory, reserved memory too",
            of_single(_memory),
        ),
        ("Community and ecosystem", "no run shows it", lambda _: UNMEASURED),
    ]
    return [
        Aspect(name=name, measured_as=measured_as, findings={each: find(each) for each in comparison.backends})
        for name, measured_as, find in finders
    ]


def unmeasured(run: BackendRun | None, levels: Sequence[int] = ()) -> str:
    """Return "not measured" with the run's reason, or how many requests of `levels` failed and why.

    A reason that is too long for a table is left out. The page shows it with the run.
    """
    if run is None:
        return f"{UNMEASURED}: not part of this comparison"
    failed_concurrency = next((each for each in levels if run.failure(each)), None)
    if failed_concurrency is not None:
        return f"at {failed_concurrency} {run.failure(failed_concurrency)}"
    if run.reason and run.ready_s is None and (run.command or len(run.reason) > _MAX_REASON_CHARS):
        return f"{UNMEASURED}: it did not start"
    if run.command and run.reason:
        return f"{UNMEASURED}: it did not finish the load"
    return f"{UNMEASURED}: {run.reason or 'it was not loaded so far'}"


def _measured(run: BackendRun | None, levels: Sequence[int]) -> list[LevelResult]:
    """Return the levels of a run that were measured, by rising concurrency."""
    return [] if run is None else [level for each in levels if (level := run.level(each)) is not None]


def _speed(run: BackendRun | None, levels: Sequence[int]) -> str:
    lowest_concurrency, highest_concurrency = levels[0], levels[-1]
    if (
        run is None
        or (highest_level := run.level(highest_concurrency)) is None
        or (lowest_level := run.level(lowest_concurrency)) is None
    ):
        return unmeasured(run, (highest_concurrency, lowest_concurrency))
    ttft = format_number(highest_level.ttft_ms.p50) if highest_level.ttft_ms.p50 is not None else UNMEASURED
    return (
        f"{format_number(highest_level.output_tokens_per_s)} tok/s at {highest_concurrency}, "
        f"{format_number(lowest_level.output_tokens_per_s)} at {lowest_concurrency}; TTFT {ttft} ms"
    )


def _concurrency(run: BackendRun | None, levels: Sequence[int]) -> str:
    measured = _measured(run, levels)
    if not measured:
        return unmeasured(run, levels)
    first, last = measured[0], measured[-1]
    if len(measured) == 1 or not first.output_tokens_per_s:
        return f"{last.concurrency} concurrent"
    gain = last.output_tokens_per_s / first.output_tokens_per_s
    return f"{last.concurrency} concurrent, {gain:.1f} times the rate of {first.concurrency}"


def _relative_rate_text(comparison: BackendComparison, backend: str, kind: StartKind) -> str:
    """Return the rate of one kind of start at the highest concurrency, relative to one server on one GPU, as text."""
    run, single = comparison.run(backend, kind), comparison.run(backend, "single")
    highest_concurrency = max(int(level) for level in comparison.load["concurrency"])
    level = run.level(highest_concurrency) if run is not None else None
    if level is None:
        return unmeasured(run, (highest_concurrency,))
    single_level = single.level(highest_concurrency) if single is not None else None
    rate = f"{format_number(level.output_tokens_per_s)} tok/s at {highest_concurrency}"
    if single_level is None or not single_level.output_tokens_per_s:
        return rate
    return f"{rate}, {level.output_tokens_per_s / single_level.output_tokens_per_s:.2f} times"


def _multi_gpu(comparison: BackendComparison, backend: str) -> str:
    kinds: tuple[tuple[str, StartKind], ...] = (("data parallel", "data-parallel"), ("split model", "split"))
    text_by_kind = {name: _relative_rate_text(comparison, backend, kind) for name, kind in kinds}
    if len(set(text_by_kind.values())) == 1:
        return next(iter(text_by_kind.values()))
    return "; ".join(f"{name} {text}" for name, text in text_by_kind.items())


def _quantization(comparison: BackendComparison, backend: str) -> str:
    text = _relative_rate_text(comparison, backend, "quantized")
    run = comparison.run(backend, "quantized")
    return text if run is None or not run.levels else f"{run.model}: {text}"


def _hardware(run: BackendRun | None, _levels: Sequence[int]) -> str:
    if run is None or not run.levels:
        return unmeasured(run)
    sizes = {"GPUs": run.gpu_memory_bytes, "host": run.host_memory_bytes}
    return ", ".join(
        f"{name} {UNMEASURED}" if size is None else f"{name} {size_text(size)}" for name, size in sizes.items()
    )


def _ease(run: BackendRun | None, _levels: Sequence[int]) -> str:
    if run is None or run.ready_s is None:
        return unmeasured(run) if run is None or run.reason else f"{UNMEASURED}: it ran already"
    lacks = f"; lacks {', '.join(run.lacks)}" if run.lacks else ""
    return f"{run.ready_s:.0f} s, {len(run.command.split()) - 1} arguments{lacks}"


def _fit(run: BackendRun | None, levels: Sequence[int]) -> str:
    measured = _measured(run, levels)
    if not measured:
        return unmeasured(run, levels)
    latencies = [(level.concurrency, level.ttft_ms.p95, level.itl_ms.p95) for level in measured]
    measured_latencies = [
        (concurrency, ttft, itl) for concurrency, ttft, itl in latencies if ttft is not None and itl is not None
    ]
    if not measured_latencies:
        return f"{UNMEASURED}: too few requests for a 95th percentile"
    highest = max(
        (concurrency for concurrency, ttft, itl in measured_latencies if ttft <= MAX_TTFT_MS and itl <= MAX_ITL_MS),
        default=None,
    )
    return "interactive at no measured level" if highest is None else f"interactive up to {highest}"


def _memory(run: BackendRun | None, levels: Sequence[int]) -> str:
    level = run.level(levels[-1]) if run is not None else None
    if run is None or level is None:
        return unmeasured(run, levels[-1:])
    if not run.gpu_memory_bytes:
        return f"{UNMEASURED}: no reading of a GPU's memory"
    return f"{format_number(level.output_tokens_per_s / (run.gpu_memory_bytes / GIB))} tok/s per GiB"
