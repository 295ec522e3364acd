"""The probe process, which measures the requests of a check on the GPUs. Only probes use torch.

`python -m meltcore.measure.node.certify.probe NAME` reads one ProbeJob from standard input and writes one ProbeResult
per line. A probe that hangs in the driver hangs alone and can be killed.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

Setting = int | float | str


class ProbeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One measurement. `gpus` are indices into the snapshot, which are also the probe's device numbers.

    With `per_gpu` all GPUs are measured concurrently, with one result per GPU. Otherwise there is one result for all
    GPUs together.
    """

    key: str
    gpus: tuple[int, ...]
    per_gpu: bool = False
    settings: dict[str, Setting] = {}

    def targets(self) -> list[tuple[int, ...]]:
        """Return the GPUs of each result."""
        return [(gpu,) for gpu in self.gpus] if self.per_gpu else [self.gpus]


class ProbeResult(msgspec.Struct, kw_only=True):
    """The result of one request on one target.

    `samples` are in the check's unit. A sample is None if it was NaN or infinite, which JSON cannot express. `details`
    holds values that are not rates (digests, counts). `error` says why there are no samples.
    """

    key: str
    gpus: tuple[int, ...]
    samples: Sequence[float | None] = ()
    details: dict[str, str | int] = {}
    error: str = ""


class ProbeJob(msgspec.Struct, kw_only=True):
    """All requests to one probe process."""

    requests: list[ProbeRequest]


encode = msgspec.json.encode
decode_job = msgspec.json.Decoder(ProbeJob).decode
decode_request = msgspec.json.Decoder(ProbeRequest).decode
decode_result = msgspec.json.Decoder(ProbeResult).decode


def read_results(stdout: bytes) -> list[ProbeResult]:
    """Return the results in a probe's output. Incomplete lines and lines that libraries printed are skipped."""
    results = []
    for line in stdout.splitlines():
        with suppress(msgspec.MsgspecError):  # a result that is missing makes its row UNKNOWN
            results.append(decode_result(line))
    return results


def main(name: str) -> None:
    """Run one check's probe over the requests of a job. A request that fails becomes a result with its error."""
    job = decode_job(sys.stdin.buffer.read())
    probe = importlib.import_module(f"meltcore.measure.node.certify.checks.{name}").probe
    for request in job.requests:
        try:
            results = list(probe(request))
        except (RuntimeError, ValueError, AssertionError, OSError) as error:  # a torch without CUDA asserts
            first_line = next(iter(str(error).strip().splitlines()), "no message")
            message = f"{type(error).__name__}: {first_line}"[:300]
            results = [ProbeResult(key=request.key, gpus=target, error=message) for target in request.targets()]
        for result in results:
            # One write per line, past Python's buffers: what was written before a kill is kept.
            os.write(sys.stdout.fileno(), encode(result) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
