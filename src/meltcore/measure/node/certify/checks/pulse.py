"""Power transients: does every GPU compute the same bits while all GPUs start and stop work together?"""

import time
from collections.abc import Iterator

from meltcore.measure.node.certify.checks.corruption import CorruptionCheck, RepeatedGemm
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, Setting

# A GEMM of this size reaches the power limit within a burst; constant load never drops from it to idle.
_SIZE = 8192
_BURST_S, _PAUSE_S = 0.05, 0.05
_CALIBRATION_GEMMS = 5


class PulseCheck(CorruptionCheck):
    """Repeats bursts of GEMMs and pauses on all GPUs concurrently, and compares every result bit by bit.

    Power brakes, resets and errors that the steps of power cause are findings of the telemetry.
    """

    name = "pulse"
    title = "Power transients"
    seconds = (0.0, 10.0, 60.0)
    soak_fraction = 0.0

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request."""
        settings: dict[str, Setting] = {
            "dtype": "bf16",
            "size": _SIZE,
            "seconds": self.request_s(context),
            "burst_s": _BURST_S,
            "pause_s": _PAUSE_S,
        }
        return [ProbeRequest(key="pulse/bf16", gpus=context.gpu_indices, per_gpu=True, settings=settings)]


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the compared GEMMs per second of each GPU, pauses included.

    Settings: dtype (two bytes wide), size, seconds, burst_s, pause_s.
    """
    import torch

    settings = request.settings
    gemms = {device: RepeatedGemm(str(settings["dtype"]), int(settings["size"]), device) for device in request.gpus}
    digests = {device: gemm.digest() for device, gemm in gemms.items()}

    def burst(count: int) -> None:
        for _ in range(count):
            for gemm in gemms.values():
                gemm.enqueue()
        for device in gemms:
            torch.cuda.synchronize(device)

    burst(_CALIBRATION_GEMMS)
    start_s = time.monotonic()
    burst(_CALIBRATION_GEMMS)
    gemm_s = max(1e-6, (time.monotonic() - start_s) / _CALIBRATION_GEMMS)
    per_burst = max(1, round(float(settings["burst_s"]) / gemm_s))
    count = 2 * _CALIBRATION_GEMMS
    while (elapsed_s := time.monotonic() - start_s) < float(settings["seconds"]):
        burst(per_burst)
        count += per_burst
        time.sleep(float(settings["pause_s"]))
    for device, gemm in gemms.items():
        details: dict[str, str | int] = {"compared": count, "wrong": gemm.num_wrong(), "digest": digests[device]}
        yield ProbeResult(key=request.key, gpus=(device,), samples=[count / max(elapsed_s, 1e-3)], details=details)
