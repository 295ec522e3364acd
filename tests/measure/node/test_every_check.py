"""Every check, one by one, on a scripted node: healthy, degraded, unreadable, hung, not applicable, each exit code."""

from collections.abc import Callable
from pathlib import Path

import pytest
from certify_tools import certified, demo_run, findings_in, h200s, node_of
from fake_gpu import FakeGpu
from fake_node import FakeNode

from meltcore.common.process import CompletedRun
from meltcore.measure.documents.node import Certificate, CheckReport
from meltcore.measure.node.certify.checks import inference
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

FLOORED = ("gemm", "memory", "host", "peers", "collectives", "sustained")
COMPARED = ("corruption", "pulse", "patterns")
PROBED = (*FLOORED, *COMPARED, "host_load")
ALL = ("state", "system", *PROBED, "inference")
NO_PERMISSION, TIMEOUT = 4, 10
Modify = Callable[[ProbeResult], ProbeResult | None]


def report(certificate: Certificate, name: str) -> CheckReport:
    return next(each for each in certificate.checks if each.name == name)


def others_pass(certificate: Certificate, name: str) -> bool:
    return all(each.verdict == healthy_verdict(each.name) for each in certificate.checks if each.name != name)


def healthy_verdict(name: str) -> str:
    """How much a host carries is not known, so its copies are recorded."""
    return "RECORDED" if name == "host_load" else "PASS"


def faulty_node(name: str, modify: Modify, gpu: int = 0) -> FakeNode:
    """Returns two GPUs; every metric of one check that includes `gpu` is modified."""

    def modified(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        return modify(result) if request.key.split("/")[0] == name and gpu in target else result

    return node_of(h200s(2), modified)


def slow(result: ProbeResult) -> ProbeResult:
    result.samples = [0.3 * sample for sample in result.samples]
    return result


def wrong(result: ProbeResult) -> ProbeResult:
    result.details["wrong"] = 2
    return result


def unreadable(result: ProbeResult) -> ProbeResult:
    result.samples = [*result.samples[:-1], float("nan")]
    return result


def empty(result: ProbeResult) -> ProbeResult:
    result.samples = []
    return result


@pytest.mark.parametrize("name", ALL)
def test_healthy_check_passes(name: str, tmp_path: Path) -> None:
    found = report(certified(tmp_path, node_of(h200s(2))), name)
    assert (found.verdict, found.findings) == (healthy_verdict(name), [])


@pytest.mark.parametrize("name", FLOORED)
def test_slow_gpu_fails_its_check_and_no_other(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, faulty_node(name, slow))
    assert report(certificate, name).verdict == "FAIL"
    assert {finding.code for finding in certificate.findings} == {"BELOW_FLOOR"}
    assert others_pass(certificate, name)
    assert certificate.exit_code == 2


@pytest.mark.parametrize("name", [*COMPARED, "collectives"])
def test_wrong_bits_fail_their_check(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, faulty_node(name, wrong))
    assert {finding.code for finding in report(certificate, name).findings} == {"WRONG_RESULT"}
    assert others_pass(certificate, name)
    assert (certificate.verdict, certificate.exit_code) == ("FAIL", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize(("modify", "code"), [(unreadable, "NO_READING"), (empty, "PROBE_FAILED")])
def test_unusable_result_is_unknown_in_every_check(name: str, modify: Modify, code: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, faulty_node(name, modify))
    assert report(certificate, name).verdict == "UNKNOWN"
    assert {finding.code for finding in certificate.findings} == {code}
    assert others_pass(certificate, name)
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)
    assert certificate.unverified


@pytest.mark.parametrize("name", PROBED)
def test_missing_result_is_unknown_in_every_check(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, faulty_node(name, lambda result: None))
    assert report(certificate, name).verdict == "UNKNOWN"
    assert others_pass(certificate, name)
    assert certificate.exit_code == 3


@pytest.mark.parametrize("name", PROBED)
def test_hung_probe_is_unknown_and_later_checks_run(name: str, tmp_path: Path) -> None:
    node = node_of(h200s(2), hung={name})
    certificate = certified(tmp_path, node)
    assert [(verdict, code) for verdict, code, _ in findings_in(certificate)] == [("UNKNOWN", "TIMED_OUT")]
    assert report(certificate, name).verdict == "UNKNOWN"
    assert others_pass(certificate, name)
    assert certificate.exit_code == 3


@pytest.mark.parametrize("error", [NO_PERMISSION, TIMEOUT])
def test_state_refused_or_hanging_in_driver_is_unknown(error: int, tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].refused = {"ecc_on": error}
    certificate = certified(tmp_path, node_of(gpus))
    assert findings_in(certificate) == [("UNKNOWN", "STATE_UNREADABLE", "GPU 1")]
    assert others_pass(certificate, "state")
    assert certificate.exit_code == 3


@pytest.mark.parametrize(
    ("ran", "verdict", "code", "exit_code"),
    [
        ("wrong", "FAIL", "WRONG_ANSWERS", 2),
        ("crashed", "UNKNOWN", "PROBE_FAILED", 3),
        ("hung", "UNKNOWN", "TIMED_OUT", 3),
    ],
)
def test_inference_with_wrong_answers_crash_or_hang(
    ran: str, verdict: str, code: str, exit_code: int, tmp_path: Path
) -> None:
    outcomes = {"crashed": CompletedRun(1, b"", b"no such engine"), "hung": CompletedRun(None, b"", b"")}
    node = node_of(
        h200s(2),
        program=lambda command, environment: outcomes.get(ran) or demo_run(command, 1, 0.5, ["accuracy is 50 %"]),
    )
    certificate = certified(tmp_path, node)
    assert {(each, of) for each, of, _ in findings_in(certificate)} == {(verdict, code)}
    assert others_pass(certificate, "inference")
    assert certificate.exit_code == exit_code


@pytest.mark.parametrize("name", ["peers", "collectives"])
def test_single_gpu_has_no_peers_which_is_listed_and_neutral(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, node_of(h200s(1)))
    found = report(certificate, name)
    assert (found.verdict, found.reason) == ("NOT_APPLICABLE", "one GPU has no peer")
    assert (certificate.verdict, certificate.exit_code) == ("PASS", 0)
    assert any("no peer" in line for line in certificate.unverified)


def test_inference_is_not_applicable_without_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "find_spec", lambda name: None)
    certificate = certified(tmp_path, node_of(h200s(1)))
    found = report(certificate, "inference")
    assert (found.verdict, certificate.verdict) == ("NOT_APPLICABLE", "PASS")
    assert "the engine is not installed" in found.reason


def test_fp8_gemm_is_left_out_and_listed_on_gpus_without_fp8(tmp_path: Path) -> None:
    a100 = FakeGpu(name="NVIDIA A100-SXM4-80GB", architecture=7, capability=(8, 0))
    found = report(certified(tmp_path, node_of([a100])), "gemm")
    assert not any("fp8" in row.key for row in found.rows)
    assert "fp8" in found.reason


def test_slow_driver_call_is_a_warning_with_the_name_of_its_gpu(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].slow_call_s = 5.5
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert findings_in(certificate) == [("WARN", "SLOW_DRIVER", "GPU 1")]
    assert certificate.findings[0].message == "the driver took 5.5 s to answer a call about it"


def test_single_warning_exits_1(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].readings["power_limit_w"] = 500
    certificate = certified(tmp_path, node_of(gpus))
    assert (report(certificate, "state").verdict, certificate.exit_code) == ("WARN", 1)
