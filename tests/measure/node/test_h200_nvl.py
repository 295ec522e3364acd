"""H200 NVL boards: judged by their own peak and by the six NVLinks of a pair, never by an SXM board's figures."""

from pathlib import Path

import pytest
from certify_tools import certified, correct_answers, findings_in
from fake_gpu import FakeGpu
from fake_node import H200_NVL_VALUES, FakeNode, h200_nvl_board, healthy_result

from meltcore.measure.documents.node import Certificate, CertificateRow, GpuSnapshot
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult


def node(gpus: list[FakeGpu], **factors: float) -> FakeNode:
    """The board with its published values, some of them scaled by a factor (by the check's name)."""

    def measure(request: ProbeRequest, target: tuple[int, ...]) -> ProbeResult:
        result = healthy_result(request, target, H200_NVL_VALUES)
        factor = factors.get(request.key.split("/")[0], 1.0)
        result.samples = [sample * factor for sample in result.samples if sample is not None]
        return result

    return FakeNode(fakes=gpus, measure=measure, program=correct_answers(gpus[0].name))


def rows(certificate: Certificate) -> dict[tuple[str, tuple[int, ...]], CertificateRow]:
    return {(row.key, tuple(row.gpus)): row for check in certificate.checks for row in check.rows}


def basis(row: CertificateRow) -> dict[str, tuple[float, str]]:
    return {each.source: (each.value, each.basis) for each in row.expectations}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certified(tmp_path_factory.mktemp("pair"), node(h200_nvl_board()), "full")


def test_published_pair_passes(pair: Certificate) -> None:
    assert findings_in(pair) == []
    assert (pair.verdict, pair.exit_code) == ("PASS", 0)
    assert pair.snapshot.topology == [["X", "NV6"], ["NV6", "X"]]
    assert len(pair.snapshot.gpus[0].links_up()) == 18


def test_gemm_is_judged_by_the_boards_own_peak(pair: Certificate) -> None:
    row = rows(pair)["gemm/bf16/8192x8192x8192", (0,)]
    assert row.verdict == "PASS"
    assert row.measured == pytest.approx(720.0, rel=0.01)
    value, why = basis(row)["topology"]
    assert why == "data sheet of NVIDIA H200 NVL = 836, 76 % of it"
    assert value == pytest.approx(0.70 * 836 * 1980 / 1830)
    assert (row.floor_set_by, row.expected, row.floor) == ("prior", 720.0, pytest.approx(576.0))
    fp8 = rows(pair)["gemm/fp8/8192x8192x8192", (0,)]
    assert basis(fp8)["topology"][1] == "data sheet of NVIDIA H200 NVL = 1672, 71 % of it"


def test_pair_is_judged_by_its_six_links(pair: Certificate) -> None:
    copy = rows(pair)["peers/unidirectional", (0, 1)]
    assert basis(copy)["topology"] == (pytest.approx(0.81 * 6 * 26.562), "6 NVLinks x speed = 159, 81 % of it")
    assert copy.verdict == "PASS"
    assert copy.measured == pytest.approx(133.26, rel=0.01)
    reduced = rows(pair)["collectives/all_reduce/2/1GiB", (0, 1)]
    assert basis(reduced)["topology"][0] == pytest.approx(0.66 * 6 * 26.562)
    assert (reduced.verdict, reduced.floor_set_by) == ("PASS", "prior")
    small = rows(pair)["collectives/all_reduce/2/4MiB", (0, 1)]
    assert (small.verdict, small.measured) == ("RECORDED", pytest.approx(14.29, rel=0.01))


@pytest.mark.parametrize(
    ("check", "code"), [("gemm", "BELOW_FLOOR"), ("peers", "BELOW_FLOOR"), ("collectives", "BELOW_FLOOR")]
)
def test_slow_pair_fails(tmp_path: Path, check: str, code: str) -> None:
    certificate = certified(tmp_path, node(h200_nvl_board(), **{check: 0.75}))
    assert certificate.verdict == "FAIL"
    assert {(finding.check, finding.code) for finding in certificate.findings} == {(check, code)}


def test_missing_link_of_a_pair_is_found(tmp_path: Path) -> None:
    gpus = h200_nvl_board()
    gpus[0].links_down = [0]  # one of the six to GPU 1
    certificate = certified(tmp_path, node(gpus))
    assert certificate.snapshot.topology[0] == ["X", "NV5"]
    assert ("FAIL", "NVLINK_DOWN", "GPU 0") in findings_in(certificate)


def test_unknown_product_has_no_peak_of_another(tmp_path: Path) -> None:
    gpus = h200_nvl_board()
    for gpu in gpus:
        gpu.name = "NVIDIA H200 NVL 2"
    certificate = certified(tmp_path, node(gpus))
    gemm = next(check for check in certificate.checks if check.name == "gemm")
    reason = "data-sheet peak UNKNOWN: no entry for NVIDIA H200 NVL 2; judged by SMs x maximum clock"
    assert gemm.reason == reason
    assert f"GEMM: {reason}" in certificate.unverified
    row = rows(certificate)["gemm/bf16/8192x8192x8192", (0,)]
    assert {each.source for each in row.expectations} == {"topology"}
    assert "SMs x maximum clock = 965" in basis(row)["topology"][1]
    for gpu in gpus:
        gpu.capability = (9, 9)  # and no known rate: nothing to judge by
    unknown = rows(certified(tmp_path / "rate", node(gpus)))["gemm/bf16/8192x8192x8192", (0,)]
    assert (unknown.verdict, unknown.note) == ("UNKNOWN", "there is no expectation to compare it with")


@pytest.mark.parametrize("name", ["NVIDIA H200 NV", "nvidia h200 nvl", "NVIDIA H200 NVL ", "H200", ""])
def test_peak_needs_the_exact_name(name: str) -> None:
    assert expectations.data_sheet_peak(name, "bf16") is None


def test_sxm_expectation_is_that_of_its_clock() -> None:
    """The data sheet's figure and SMs x maximum clock state the same expectation for H200 SXM, within 0.1 %."""
    facts = {"sm_count": 132, "sm_clock_max_mhz": 1980, "compute_capability": "9.0"}
    known = expectations.gemm_expectation(
        GpuSnapshot(index=0, name="NVIDIA H200", uuid="a", facts=facts), "bf16", "square"
    )
    other = expectations.gemm_expectation(GpuSnapshot(index=0, name="another", uuid="b", facts=facts), "bf16", "square")
    assert known is not None
    assert other is not None
    assert known.floor == pytest.approx(other.floor, rel=1e-3)
