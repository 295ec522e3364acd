"""Expectations: topology, priors by exact GPU type, the user's baseline, and the strictest of them."""

from pathlib import Path

import msgspec
import pytest
from certify_tools import certified, findings_in, h200s, node_of
from fake_gpu import FakeGpu

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.node import GpuSnapshot, read_certificate
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.checks.peers import link_gbps
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.expectations import (
    PRIORS,
    Baseline,
    make_baseline,
    shipped_expectation,
    strictest_expectation,
)
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult
from meltcore.measure.node.snapshot import take_snapshot


def state(**others: object) -> GpuSnapshot:
    node = node_of(h200s(1))
    return msgspec.structs.replace(take_snapshot(node, node.gpus()).gpus[0], **others)


def test_ceilings_match_data_sheets() -> None:
    gpu = state()
    assert expectations.gemm_ceiling(gpu, "bf16") == pytest.approx(1070.5, rel=1e-3)  # 989 at 1.83 GHz
    assert expectations.gemm_ceiling(gpu, "fp8") == pytest.approx(2141, rel=1e-3)
    memory, host = expectations.memory_expectation(gpu, "copy"), expectations.host_expectation(gpu)
    assert memory is not None
    assert memory.value / 0.85 == pytest.approx(4917, rel=1e-3)  # 4.8 TB/s and a little
    assert host is not None
    assert host.value / 0.86 == pytest.approx(63.0, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "boost_mhz", "tflops"),
    [
        ("NVIDIA GeForce RTX 3090", "8.6", 82, 1695, 71.2),
        ("NVIDIA GeForce RTX 4090", "8.9", 128, 2520, 165.2),
        ("NVIDIA GeForce RTX 5090", "12.0", 170, 2407, 209.5),
    ],
)
def test_ceilings_of_geforce_gpus_match_their_data_sheets(
    name: str, capability: str, sms: int, boost_mhz: int, tflops: float
) -> None:
    gpu = state(name=name)
    gpu.facts |= {"compute_capability": capability, "sm_count": sms, "sm_clock_max_mhz": boost_mhz}
    assert expectations.gemm_ceiling(gpu, "bf16") == pytest.approx(tflops, rel=5e-3)


@pytest.mark.parametrize("key", ["sm_count", "sm_clock_max_mhz", "compute_capability"])
def test_missing_fact_gives_no_expectation(key: str) -> None:
    gpu = state()
    gpu.facts[key] = "UNKNOWN"
    assert expectations.gemm_expectation(gpu, "bf16", "square") is None


def test_measured_h200_values_meet_every_floor() -> None:
    gpu = state()
    measured = [
        (expectations.gemm_expectation(gpu, "bf16", "square"), (682, 688, 726, 791)),
        (shipped_expectation([gpu], "gemm/bf16/8192x8192x8192"), (682, 688, 769, 791)),
        (expectations.gemm_expectation(gpu, "bf16", "model"), (667, 688)),
        (expectations.gemm_expectation(gpu, "fp8", "square"), (1453, 1498)),
        (expectations.memory_expectation(gpu, "copy"), (4270,)),
        (expectations.memory_expectation(gpu, "read"), (4380,)),
        (expectations.host_expectation(gpu), (53, 55)),
        (expectations.peer_expectation(18 * 26.562, 18, 1), (386, 396)),
        (expectations.peer_expectation(6 * 26.562, 6, 1), (133,)),
        (expectations.collective_expectation(18 * 26.562, "all_reduce", 2), (328,)),
        (expectations.collective_expectation(18 * 26.562, "all_gather", 2), (266,)),
        (expectations.collective_expectation(18 * 26.562, "reduce_scatter", 2), (277,)),
        (expectations.collective_expectation(18 * 26.562, "all_reduce", 4), (352, 356)),
        (expectations.collective_expectation(18 * 26.562, "all_gather", 4), (325, 332)),
        (expectations.collective_expectation(18 * 26.562, "reduce_scatter", 4), (325, 332)),
        (expectations.collective_expectation(18 * 26.562, "all_reduce", 8), (361, 367)),
    ]
    for expectation, values in measured:
        assert expectation is not None
        assert all(value >= 1.04 * expectation.floor for value in values), "beyond the differences of one machine"
        assert min(values) <= 1.25 * expectation.value, "and the expectation is not far below measured values"


def test_every_prior_names_its_source() -> None:
    assert {"NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090"} <= PRIORS.keys()
    for priors in PRIORS.values():
        assert all(found.value > 0 and len(found.source) > 20 for found in priors.values())


def test_priors_apply_to_exact_gpu_type_and_whole_gpus_only() -> None:
    key = "memory/copy"
    assert shipped_expectation([state()], key) is not None
    assert shipped_expectation([state(name="NVIDIA H200 NVL X")], key) is None
    assert shipped_expectation([state(mig=True)], key) is None
    assert shipped_expectation([state(), state(name="NVIDIA H100 80GB HBM3")], "peers/unidirectional") is None


def test_strictest_floor_counts() -> None:
    gpu = state()
    topology, shipped = expectations.memory_expectation(gpu, "copy"), shipped_expectation([gpu], "memory/copy")
    own = Baseline(taken="t", gpu_types=[gpu.name], values={}, medians={"memory/copy": 4300.0})
    slow = Baseline(taken="t", gpu_types=[gpu.name], values={}, medians={"memory/copy": 2000.0})
    assert topology is not None
    assert shipped is not None
    mine, poor = own.expectation([gpu], "memory/copy"), slow.expectation([gpu], "memory/copy")
    assert mine is not None
    assert poor is not None
    assert strictest_expectation([topology, shipped, mine]) == mine
    assert strictest_expectation([topology, shipped, poor]) == shipped, "a slow baseline does not excuse a slow node"


def test_baseline_finds_loss_that_priors_allow(tmp_path: Path) -> None:
    baseline = make_baseline(certified(tmp_path, node_of(h200s(2)), "quick"))

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("memory") and target == (1,):
            result.samples = [0.93 * 4280.0] * 4
        return result

    assert findings_in(certified(tmp_path, node_of(h200s(2), modify), "quick")) == []
    certificate = certified(tmp_path, node_of(h200s(2), modify), "quick", baseline=baseline)
    assert findings_in(certificate) == [("FAIL", "BELOW_FLOOR", "GPU 1")]
    assert "set by the baseline" in certificate.findings[0].message


@pytest.mark.parametrize("metric", ["host_load", "collectives/all_to_all"])
def test_loss_of_a_metric_without_a_known_ceiling_is_found_by_the_baseline_alone(metric: str, tmp_path: Path) -> None:
    def modify(request: ProbeRequest, _target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith(metric):
            result.samples = [0.7 * sample for sample in result.samples]
        return result

    baseline = make_baseline(certified(tmp_path, node_of(h200s(2))))
    assert findings_in(certified(tmp_path, node_of(h200s(2), modify))) == []
    found = certified(tmp_path, node_of(h200s(2), modify), baseline=baseline)
    assert found.verdict == "FAIL"
    assert {(each.check, each.code) for each in found.findings} == {(metric.partition("/")[0], "BELOW_FLOOR")}


def test_stored_certificate_is_a_baseline(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_bytes(msgspec.json.encode(certified(tmp_path, node_of(h200s(2)), "quick")))
    certificate = read_certificate(tmp_path / "certificate.json")
    assert certificate.checks[1].title == "GEMM"
    baseline = make_baseline(certificate)
    assert {"gemm/bf16/8192x8192x8192", "memory/copy", "host/host-to-device"} <= baseline.values.keys()
    expectation = baseline.expectation(certificate.snapshot.gpus[:1], "gemm/bf16/8192x8192x8192")
    assert expectation is not None
    assert expectation.value == certificate.checks[1].rows[0].measured


def test_unknown_gpu_type_is_judged_by_its_first_certificate(tmp_path: Path) -> None:
    def unknown_gpus() -> list[FakeGpu]:
        return h200s(1, name="NVIDIA X900", capability=(15, 0), refused={"memory_bus_bits": 3, "pcie_width_max": 3})

    first = certified(tmp_path, node_of(unknown_gpus()), "quick")
    assert ("UNKNOWN", "NO_EXPECTATION", "GPU 0") in findings_in(first)
    second = certified(tmp_path, node_of(unknown_gpus()), "quick", baseline=make_baseline(first))
    assert "NO_EXPECTATION" not in {code for _, code, _ in findings_in(second)}
    gemm = next(check for check in second.checks if check.name == "gemm")
    assert (gemm.verdict, gemm.rows[0].floor_set_by) == ("PASS", "baseline")


def test_failed_certificate_makes_no_baseline(tmp_path: Path) -> None:
    gpus = h200s(1)
    gpus[0].readings["row_remap_failed"] = 1
    with pytest.raises(ConfigError, match="FAIL"):
        make_baseline(certified(tmp_path, node_of(gpus), "quick"))


def test_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_certificate(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"schema_version": 1}')
    with pytest.raises(ConfigError, match="not a meltcore document"):
        read_certificate(tmp_path / "other.json")


def test_link_of_unknown_speed_gives_no_expectation(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].refused = {"nvlink_speed_mbps": 3}
    node = node_of(gpus)
    snapshot = take_snapshot(node, node.gpus())
    context = CertifyContext(
        node=node,
        gpus=node.gpus(),
        snapshot=snapshot,
        tier="quick",
        telemetry=node.telemetry(tmp_path, node.gpus(), 0.1),
        folder=tmp_path,
    )
    assert link_gbps(context, 0, 1) is None
    assert link_gbps(context, 1, 0) == pytest.approx(18 * 26.562)
