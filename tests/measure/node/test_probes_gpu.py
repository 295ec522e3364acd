"""Every probe on real GPUs, briefly: each type of request has a plausible result before a tier runs for minutes."""

import subprocess
import sys

import pytest

from meltcore.measure.node.certify.probe import ProbeJob, ProbeRequest, ProbeResult, Setting, encode, read_results

MIB = 2**20
BRIEF: dict[str, Setting] = {"seconds": 0.1}
# Beyond every GPU of today, in TFLOP/s and GB/s: a value above is a measurement error.
LIMITS = {
    "gemm": 5000.0,
    "sustained": 5000.0,
    "memory": 20_000.0,
    "host": 200.0,
    "peers": 4000.0,
    "collectives": 4000.0,
}


def run_probe(probe: str, *requests: ProbeRequest, limit_s: float = 120.0) -> list[ProbeResult]:
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.measure.node.certify.probe", probe],
        input=encode(ProbeJob(requests=list(requests))),
        capture_output=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    results = read_results(done.stdout)
    assert [(result.key, result.gpus) for result in results] == [
        (request.key, target) for request in requests for target in request.targets()
    ]
    assert [result.error for result in results if result.error] == []
    for result in results:
        assert result.samples
        assert all(sample is not None and 0 < sample < LIMITS.get(probe, 1e9) for sample in result.samples)
    return results


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_gemm_of_every_dtype() -> None:
    import torch

    dtypes = ["bf16", "fp16", "tf32"] + (["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])
    sizes: dict[str, Setting] = {"m": 4096, "n": 14336, "k": 4096}
    all_gpus = tuple(range(gpus()))
    requests = [
        ProbeRequest(key=f"gemm/{dtype}", gpus=all_gpus, per_gpu=True, settings={**BRIEF, **sizes, "dtype": dtype})
        for dtype in dtypes
    ]
    assert len(run_probe("gemm", *requests)) == len(dtypes) * len(all_gpus)


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_memory_and_host_copies_of_every_type() -> None:
    operations = [
        ProbeRequest(key=operation, gpus=(0,), per_gpu=True, settings={**BRIEF, "op": operation, "bytes": 512 * MIB})
        for operation in ("copy", "read", "write")
    ]
    run_probe("memory", *operations)
    directions = [
        ProbeRequest(
            key=direction, gpus=(0,), settings={**BRIEF, "direction": direction, "bytes": 256 * MIB, "cpus": ""}
        )
        for direction in ("host-to-device", "device-to-host")
    ]
    run_probe("host", *directions)


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_sustained_load_and_repeated_gemm_have_equal_bits() -> None:
    sizes: dict[str, Setting] = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    load = ProbeRequest(key="s", gpus=(0,), per_gpu=True, settings={**sizes, "seconds": 2.0, "every_s": 0.25})
    (result,) = run_probe("sustained", load)
    assert 4 <= len(result.samples) <= 8
    again = ProbeRequest(key="c", gpus=(0,), per_gpu=True, settings={"dtype": "bf16", "size": 4096, "seconds": 1.0})
    (first,), (second,) = run_probe("corruption", again), run_probe("corruption", again)
    assert (first.details["wrong"], second.details["wrong"]) == (0, 0)
    assert int(first.details["compared"]) >= 100
    assert first.details["digest"] == second.details["digest"], "the same bits in another process"


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_peer_copies_and_collectives_of_two_gpus() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    pair = [
        ProbeRequest(
            key=f"directions {directions}",
            gpus=(0, 1),
            settings={**BRIEF, "directions": directions, "bytes": 256 * MIB},
        )
        for directions in (1, 2)
    ]
    run_probe("peers", *pair)
    together = [
        ProbeRequest(key=f"{op} {size}", gpus=(0, 1), settings={**BRIEF, "op": op, "bytes": size})
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for size in (4096, MIB, 256 * MIB)
    ]
    assert {result.details["wrong"] for result in run_probe("collectives", *together)} == {0}


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_pulses_patterns_and_host_copies_of_all_gpus_together() -> None:
    every_gpu = tuple(range(gpus()))
    pulses: dict[str, Setting] = {"dtype": "bf16", "size": 8192, "seconds": 2.0, "burst_s": 0.05, "pause_s": 0.05}
    memory: dict[str, Setting] = {"share": 0.05, "chunk_bytes": 2**30, "seconds": 0.0}
    copies: dict[str, Setting] = {**BRIEF, "bytes": 256 * MIB, **{f"cpus/{gpu}": "" for gpu in every_gpu}}
    for name, settings in (("pulse", pulses), ("patterns", memory), ("host_load", copies)):
        for result in run_probe(name, ProbeRequest(key=name, gpus=every_gpu, per_gpu=True, settings=settings)):
            assert result.details.get("wrong", 0) == 0
