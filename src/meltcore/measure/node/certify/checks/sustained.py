"""Sustained load: is the speed of every GPU constant, or do heat or power reduce the speed?"""

from collections.abc import Iterator, Sequence
from statistics import harmonic_mean, median

from meltcore.measure.documents.node import Expectation
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.checks.gemm import MODEL_SHAPES
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.judge import Judgment, format_three_digits
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, Setting

_MAX_SAMPLES = 600
# A warm GPU is up to 3 % slower than a cold one (H200 SXM: 1 to 2 steps of 15 MHz, and leakage under its power limit).
_DRIFT_FRACTION = 0.95
_MIN_SAMPLES = 8  # so that a quarter has two


class SustainedCheck(MeasuredCheck):
    """Times GEMMs of the shape that draws the most power, for 30 s to hours, on all GPUs concurrently."""

    name = "sustained"
    title = "Sustained load"
    unit = "TFLOP/s"
    limit_factor = 1.2  # its duration is fixed
    seconds = (0.0, 30.0, 300.0)
    setup_s = 10.0
    soak_fraction = 0.8  # the rest is for silent data corruption

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request."""
        seconds = self.request_s(context)
        m, n, k = MODEL_SHAPES[-1]
        every_s = max(1.0, seconds / _MAX_SAMPLES)
        settings: dict[str, Setting] = {"dtype": "bf16", "m": m, "n": n, "k": k, "seconds": seconds, "every_s": every_s}
        return [ProbeRequest(key="sustained/bf16", gpus=context.gpu_indices, per_gpu=True, settings=settings)]

    def topology(self, context: CertifyContext, _request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation from the number of SMs and the maximum clock, or None if either is unknown."""
        return expectations.gemm_expectation(context.snapshot.gpus[gpus[0]], "bf16", "model")

    def adjust(self, _context: CertifyContext, _results: Sequence[ProbeResult], judgments: list[Judgment]) -> None:
        """Change PASS to WARN on GPUs whose last quarter of samples is slower than their first quarter."""
        for judgment in judgments:
            quarter = len(judgment.row.samples) // 4
            if judgment.row.verdict != "PASS" or len(judgment.row.samples) < _MIN_SAMPLES:
                continue
            samples = judgment.row.samples
            first_median, last_median = median(samples[:quarter]), median(samples[-quarter:])
            if last_median < _DRIFT_FRACTION * first_median:
                speeds = f"from {format_three_digits(first_median)} to {format_three_digits(last_median)}"
                drift = f"drifted {speeds} over the run"
                judgment.set_verdict("WARN", "DRIFT", drift)


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the TFLOP/s of each GPU, on all GPUs concurrently.

    Settings: dtype, m, n, k, seconds, every_s (of a sample).
    """
    from meltcore.measure.node.certify.gpu_timing import gemm_rates

    settings = request.settings
    shape = (int(settings["m"]), int(settings["n"]), int(settings["k"]))
    seconds, every_s = float(settings["seconds"]), float(settings["every_s"])
    samples_per_gpu = gemm_rates(request.gpus, str(settings["dtype"]), shape, seconds, launch_group_s=every_s)
    for device, samples in zip(request.gpus, samples_per_gpu, strict=True):
        yield ProbeResult(key=request.key, gpus=(device,), samples=downsample(samples, round(seconds / every_s)))


def downsample(samples: Sequence[float], maximum: int) -> list[float]:
    """Return at most `maximum` samples, each the mean rate of several groups. A soak has more groups than `maximum`."""
    group_size = -(-len(samples) // max(1, maximum))
    return [harmonic_mean(samples[start : start + group_size]) for start in range(0, len(samples), group_size)]
