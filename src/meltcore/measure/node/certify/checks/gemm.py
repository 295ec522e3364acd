"""GEMM: does every GPU multiply matrices as fast as its SMs and clock allow?"""

from collections.abc import Iterator, Sequence

from meltcore.measure.documents.node import CheckReport, Expectation, Tier
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

Shape = tuple[int, int, int]
SQUARE: Shape = (8192, 8192, 8192)
SMALL_SQUARE: Shape = (4096, 4096, 4096)
# Tokens x outputs x inputs of large models' feed-forward layers, and a shape that reaches every GPU's power limit.
MODEL_SHAPES: tuple[Shape, ...] = ((4096, 14336, 4096), (8192, 28672, 8192), (16384, 16384, 8192))

_DTYPES = ("bf16", "fp16", "tf32", "fp8")
_MIN_FP8_CAPABILITY = (8, 9)  # compute capability
_PLANS: dict[Tier, tuple[tuple[Shape, ...], tuple[str, ...]]] = {
    "quick": ((SQUARE,), ("bf16",)),
    "standard": ((SQUARE, MODEL_SHAPES[0]), _DTYPES),
}
_FULL_TIER = ((SMALL_SQUARE, SQUARE, *MODEL_SHAPES), _DTYPES)


class GemmCheck(MeasuredCheck):
    """Times GEMMs by dtype and shape, on all GPUs concurrently."""

    name = "gemm"
    title = "GEMM"
    unit = "TFLOP/s"
    seconds = (1.0, 1.0, 3.0)
    setup_s = 2.0

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request per dtype and shape."""
        shapes, dtypes = _PLANS.get(context.tier, _FULL_TIER)
        seconds = self.request_s(context)
        return [
            ProbeRequest(
                key=f"gemm/{dtype}/{m}x{n}x{k}",
                gpus=context.gpu_indices,
                per_gpu=True,
                settings={"dtype": dtype, "m": m, "n": n, "k": k, "seconds": seconds},
            )
            for dtype in dtypes
            if dtype != "fp8" or has_fp8(context)
            for m, n, k in shapes
        ]

    def measure(self, context: CertifyContext) -> CheckReport:
        """Return the report, whose reason names missing FP8 support and GPU types without a known data-sheet peak."""
        report = super().measure(context)
        reasons = []
        if "fp8" in _PLANS.get(context.tier, _FULL_TIER)[1] and not has_fp8(context):
            reasons.append("fp8: these GPUs have no FP8 GEMM")
        names = sorted({gpu.name for gpu in context.snapshot.gpus if not gpu.mig} - set(expectations.BF16_PEAKS))
        if names:
            reasons.append(f"data-sheet peak UNKNOWN: no entry for {', '.join(names)}; judged by SMs x maximum clock")
        report.reason = "; ".join(filter(None, [report.reason, *reasons]))
        return report

    def topology(self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expected TFLOP/s, as `gemm_expectation` does."""
        settings = request.settings
        shape = "square" if settings["m"] == settings["n"] == settings["k"] else "model"
        return expectations.gemm_expectation(context.snapshot.gpus[gpus[0]], str(settings["dtype"]), shape)


def has_fp8(context: CertifyContext) -> bool:
    """Return whether any GPU may support FP8.

    If the capability is unreadable, the result is True and the probe tests the GPU.
    """
    capabilities = [str(gpu.facts.get("compute_capability", "")).split(".") for gpu in context.snapshot.gpus]
    return all((int(parts[0]), int(parts[1])) >= _MIN_FP8_CAPABILITY for parts in capabilities if len(parts) == 2)


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the TFLOP/s of each GPU, on all GPUs concurrently. Settings: dtype, m, n, k, seconds."""
    import torch

    from meltcore.measure.node.certify.gpu_timing import gemm_rates

    settings = request.settings
    shape = (int(settings["m"]), int(settings["n"]), int(settings["k"]))
    samples_per_gpu = gemm_rates(
        request.gpus, str(settings["dtype"]), shape, float(settings["seconds"]), uses_graph=True
    )
    for device, samples in zip(request.gpus, samples_per_gpu, strict=True):
        yield ProbeResult(key=request.key, gpus=(device,), samples=samples)
    torch.cuda.empty_cache()
