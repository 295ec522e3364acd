"""Expectations: arithmetic of the topology, priors by exact product, the user's baseline, and the strictest of them."""

from pathlib import Path

import msgspec
import pytest
from certify_tools import certified, h200s, node_of, told

from meltcore.errors import ConfigError
from meltcore.hardware import expect
from meltcore.hardware.checks.peers import link_speed
from meltcore.hardware.expect import Baseline, make_baseline, prior, strictest
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.priors import PRIORS
from meltcore.hardware.site import Site
from meltcore.hardware.snapshot import take_snapshot
from meltcore.results.certificate import read_certificate
from meltcore.results.snapshot import GpuState


def state(**others: object) -> GpuState:
    node = node_of(h200s(1))
    return msgspec.structs.replace(take_snapshot(node, node.gpus()).gpus[0], **others)


def test_ceilings_are_those_of_the_data_sheets() -> None:
    gpu = state()
    assert expect.product_ceiling(gpu, "bf16") == pytest.approx(1070.5, rel=1e-3)  # 989 at 1.83 GHz
    assert expect.product_ceiling(gpu, "fp8") == pytest.approx(2141, rel=1e-3)
    memory, host = expect.memory(gpu, "copy"), expect.host(gpu)
    assert memory is not None
    assert memory.value / 0.85 == pytest.approx(4917, rel=1e-3)  # 4.8 TB/s and a little
    assert host is not None
    assert host.value / 0.86 == pytest.approx(63.0, rel=1e-3)


@pytest.mark.parametrize("key", ["sm_count", "sm_clock_max_mhz", "compute_capability"])
def test_without_a_fact_there_is_no_expectation_rather_than_a_low_one(key: str) -> None:
    gpu = state()
    gpu.facts[key] = "UNKNOWN"
    assert expect.product(gpu, "bf16", "square") is None


def test_measured_figures_of_an_h200_meet_every_floor() -> None:
    gpu = state()
    measured = [
        (expect.product(gpu, "bf16", "square"), (682, 688, 726, 791)),
        (prior([gpu], "product/bf16/8192x8192x8192"), (682, 688, 769, 791)),
        (expect.product(gpu, "bf16", "model"), (667, 688)),
        (expect.product(gpu, "fp8", "square"), (1453, 1498)),
        (expect.memory(gpu, "copy"), (4270,)),
        (expect.memory(gpu, "read"), (4380,)),
        (expect.host(gpu), (53, 55)),
        (expect.peer(18 * 26.562, 18, 1), (386, 396)),
        (expect.peer(6 * 26.562, 6, 1), (133,)),
        (expect.collective(18 * 26.562, "all_reduce", 2), (328,)),
        (expect.collective(18 * 26.562, "all_gather", 2), (266,)),
        (expect.collective(18 * 26.562, "reduce_scatter", 2), (277,)),
        (expect.collective(18 * 26.562, "all_reduce", 4), (352, 356)),
        (expect.collective(18 * 26.562, "all_gather", 4), (325, 332)),
        (expect.collective(18 * 26.562, "reduce_scatter", 4), (325, 332)),
        (expect.collective(18 * 26.562, "all_reduce", 8), (361, 367)),
    ]
    for expectation, values in measured:
        assert expectation is not None
        assert all(value >= 1.04 * expectation.floor for value in values), "not within a machine's own difference"
        assert min(values) <= 1.25 * expectation.value, "and the expectation is not far under what is real"


def test_every_prior_names_its_source() -> None:
    assert {"NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090"} <= PRIORS.keys()
    for figures in PRIORS.values():
        assert all(found.value > 0 and len(found.source) > 20 for found in figures.values())


def test_priors_hold_for_the_exact_product_and_whole_gpus_only() -> None:
    key = "memory/copy"
    assert prior([state()], key) is not None
    assert prior([state(name="NVIDIA H200 NVL X")], key) is None
    assert prior([state(mig=True)], key) is None
    assert prior([state(), state(name="NVIDIA H100 80GB HBM3")], "peers/one-way") is None


def test_the_strictest_floor_counts() -> None:
    gpu = state()
    topology, shipped = expect.memory(gpu, "copy"), prior([gpu], "memory/copy")
    own = Baseline(taken="t", products=[gpu.name], figures={}, medians={"memory/copy": 4300.0})
    slow = Baseline(taken="t", products=[gpu.name], figures={}, medians={"memory/copy": 2000.0})
    assert topology is not None
    assert shipped is not None
    mine, poor = own.expectation([gpu], "memory/copy"), slow.expectation([gpu], "memory/copy")
    assert mine is not None
    assert poor is not None
    assert strictest([topology, shipped, mine]) == mine
    assert strictest([topology, shipped, poor]) == shipped, "a slow baseline excuses nothing"


def test_a_baseline_catches_a_loss_that_priors_let_pass(tmp_path: Path) -> None:
    baseline = make_baseline(certified(tmp_path, node_of(h200s(2)), "quick"))

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("memory") and target == (1,):
            answer.samples = [0.93 * 4280.0] * 4
        return answer

    assert told(certified(tmp_path, node_of(h200s(2), spoil), "quick")) == []
    certificate = certified(tmp_path, node_of(h200s(2), spoil), "quick", baseline=baseline)
    assert told(certificate) == [("FAIL", "BELOW_FLOOR", "GPU 1")]
    assert "set by the baseline" in certificate.findings[0].message


def test_a_product_nobody_knows_is_judged_by_its_own_first_certificate(tmp_path: Path) -> None:
    def strange() -> list[FakeGpu]:
        return h200s(1, name="NVIDIA X900", capability=(15, 0), refused={"memory_bus_bits": 3, "pcie_width_max": 3})

    first = certified(tmp_path, node_of(strange()), "quick")
    assert ("UNKNOWN", "NO_EXPECTATION", "GPU 0") in told(first)
    second = certified(tmp_path, node_of(strange()), "quick", baseline=make_baseline(first))
    assert "NO_EXPECTATION" not in {code for _, code, _ in told(second)}
    product = next(check for check in second.checks if check.name == "product")
    assert (product.verdict, product.rows[0].floor_set_by) == ("PASS", "baseline")


def test_no_baseline_is_made_of_a_certificate_that_failed(tmp_path: Path) -> None:
    gpus = h200s(1)
    gpus[0].readings["row_remap_failed"] = 1
    with pytest.raises(ConfigError, match="FAIL"):
        make_baseline(certified(tmp_path, node_of(gpus), "quick"))


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_certificate(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"schema_version": 1}')
    with pytest.raises(ConfigError, match="no certificate"):
        read_certificate(tmp_path / "other.json")


def test_a_link_of_unknown_speed_gives_no_expectation(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].refused = {"nvlink_speed_mbps": 3}
    node = node_of(gpus)
    snapshot = take_snapshot(node, node.gpus())
    site = Site(
        node=node,
        gpus=node.gpus(),
        snapshot=snapshot,
        tier="quick",
        telemetry=node.telemetry(tmp_path, node.gpus(), 0.1),
        folder=tmp_path,
    )
    assert link_speed(site, 0, 1) is None
    assert link_speed(site, 1, 0) == pytest.approx(18 * 26.562)
