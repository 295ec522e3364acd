"""Silent data corruption: does every GPU compute the same bits each time, and the same bits as GPUs of its type?"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.judge import Judgment
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, Setting

_SIZE = 4096
_GEMMS_PER_ROUND = 100

GpuModel = tuple[str, object]  # GPUs with equal name and SM count compute equal bits


class CorruptionCheck(MeasuredCheck):
    """Repeats a GEMM on all GPUs concurrently and compares every result bit by bit."""

    name = "corruption"
    title = "Silent data corruption"
    unit = "GEMM/s compared"
    limit_factor = 1.2  # its duration is fixed
    seconds = (0.0, 10.0, 120.0)
    setup_s = 10.0
    soak_fraction = 0.2
    is_recorded = True  # until `adjust` has compared the bits
    has_expectations = False

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request."""
        settings: dict[str, Setting] = {"dtype": "bf16", "size": _SIZE, "seconds": self.request_s(context)}
        return [ProbeRequest(key="corruption/repeat", gpus=context.gpu_indices, per_gpu=True, settings=settings)]

    def adjust(self, context: CertifyContext, results: Sequence[ProbeResult], judgments: list[Judgment]) -> None:
        """Fail GPUs whose results changed or differ from most GPUs of their type."""
        details = {result.gpus: result.details for result in results}
        usual_digests_by_model = _usual_digests(context, results)
        for judgment in judgments:
            detail = details.get(tuple(judgment.row.gpus), {})
            if judgment.row.verdict not in ("RECORDED", "INVALID"):
                continue
            digest, num_wrong = detail.get("digest"), detail.get("wrong")
            if num_wrong is None or digest is None:
                judgment.set_verdict("UNKNOWN", "NO_READING", "the probe did not report what it compared")
            elif num_wrong:
                judgment.set_verdict(
                    "FAIL", "WRONG_RESULT", f"{num_wrong} of {detail.get('compared')} equal GEMMs differed"
                )
            elif digest not in usual_digests_by_model[_gpu_model(context, judgment.row.gpus[0])]:
                judgment.set_verdict("FAIL", "WRONG_RESULT", "computes other bits than the other GPUs of its type")
            elif judgment.row.verdict == "RECORDED":
                judgment.row.verdict = "PASS"
                judgment.row.note = f"{detail.get('compared')} GEMMs, all bits equal"


def _gpu_model(context: CertifyContext, gpu_index: int) -> GpuModel:
    gpu = context.snapshot.gpus[gpu_index]
    return gpu.name, gpu.facts.get("sm_count")


def _usual_digests(context: CertifyContext, results: Sequence[ProbeResult]) -> dict[GpuModel, set[object]]:
    """Return for each GPU model the digest of the result that most GPUs of the model have.

    After a tie the set is empty, because neither result is certain.
    """
    counts_by_model: dict[GpuModel, Counter[object]] = {}
    for result in results:
        if "digest" in result.details:
            counts_by_model.setdefault(_gpu_model(context, result.gpus[0]), Counter())[result.details["digest"]] += 1
    usual_digests_by_model: dict[GpuModel, set[object]] = {
        _gpu_model(context, gpu_index): set() for gpu_index in context.gpu_indices
    }
    for gpu_model, digest_counts in counts_by_model.items():
        most_common = digest_counts.most_common(2)
        if len(most_common) == 1 or most_common[0][1] > most_common[1][1]:
            usual_digests_by_model[gpu_model] = {most_common[0][0]}
    return usual_digests_by_model


class RepeatedGemm:
    """A repeated GEMM on one GPU. Each result is compared with the first result, bit by bit, on the GPU."""

    def __init__(self, dtype: str, size: int, device: int) -> None:
        import torch

        from meltcore.measure.node.certify.gpu_timing import random_matrix

        self.left = random_matrix(size, size, dtype, device, seed=1)
        self._rhs = random_matrix(size, size, dtype, device, seed=2)
        self._first = torch.mm(self.left, self._rhs).view(torch.int16)
        self._out = torch.empty(size, size, device=f"cuda:{device}", dtype=self.left.dtype)
        self._mismatches = torch.zeros((), device=f"cuda:{device}", dtype=torch.int64)

    def enqueue(self) -> None:
        """Enqueue one GEMM and its comparison."""
        import torch

        torch.mm(self.left, self._rhs, out=self._out)
        self._mismatches += (self._out.view(torch.int16) != self._first).any()

    def num_wrong(self) -> int:
        """Return the number of results that differed."""
        return int(self._mismatches)

    def digest(self) -> str:
        """Return a digest of the first result."""
        return hashlib.blake2b(self._first.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the compared GEMMs per second of each GPU, on all GPUs concurrently.

    Settings: dtype (two bytes wide), size, seconds.
    """
    import torch

    settings = request.settings
    gemms = {device: RepeatedGemm(str(settings["dtype"]), int(settings["size"]), device) for device in request.gpus}
    digests = {device: gemm.digest() for device, gemm in gemms.items()}
    start_s = time.monotonic()
    count = 0
    while (elapsed_s := time.monotonic() - start_s) < float(settings["seconds"]):
        for _ in range(_GEMMS_PER_ROUND):
            for gemm in gemms.values():
                gemm.enqueue()
        count += _GEMMS_PER_ROUND
        for device in gemms:
            torch.cuda.synchronize(device)
    for device, gemm in gemms.items():
        details: dict[str, str | int] = {"compared": count, "wrong": gemm.num_wrong(), "digest": digests[device]}
        yield ProbeResult(key=request.key, gpus=(device,), samples=[count / max(elapsed_s, 1e-3)], details=details)
