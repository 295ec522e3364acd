"""Every check, one by one, on a scripted node: healthy, degraded, unreadable, hung, not applicable, each exit code."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from certify_tools import certified, demo_run, findings_in, h200s, node_of
from fake_gpu import FakeGpu
from fake_node import FakeNode

from meltcore.common.options import add_options, from_options
from meltcore.common.process import CompletedRun
from meltcore.measure.documents.node import Certificate, CheckReport
from meltcore.measure.experiments.demo.config import DemoConfig
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_healthy_check_passes(name: str, tmp_path: Path) -> None:
    found = report(certified(tmp_path, node_of(h200s(2))), name)
    assert (found.verdict, found.findings) == (healthy_verdict(name), [])


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBED)
def test_missing_result_is_unknown_in_every_check(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, faulty_node(name, lambda result: None))
    assert report(certificate, name).verdict == "UNKNOWN"
    assert others_pass(certificate, name)
    assert certificate.exit_code == 3


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ran", "verdict", "code", "reason"),
    [
        ({"code": 1, "share": 0.5}, "FAIL", "WRONG_ANSWERS", "unloaded 50.0 % right"),
        ({"code": 1, "share": 1.0, "loaded_share": 0.5}, "FAIL", "WRONG_ANSWERS", "under load 50.0 % right"),
        ({"code": 0, "share": 0.5}, "FAIL", "WRONG_ANSWERS", "unloaded 50.0 % right"),
        ({"code": 1, "share": 1.0, "failed": 150}, "UNKNOWN", "PROBE_FAILED", "the run did not pass: a reason"),
        ({"code": 0, "share": 1.0, "device": "CPU"}, "UNKNOWN", "PROBE_FAILED", "sums ran on CPU"),
        ({"code": 1, "share": 0.5, "device": "CPU"}, "UNKNOWN", "PROBE_FAILED", "sums ran on CPU"),
        ({"code": 0, "share": 1.0, "device": ""}, "UNKNOWN", "PROBE_FAILED", "the server named no device"),
        (CompletedRun(1, b"", b"no such engine"), "UNKNOWN", "PROBE_FAILED", "no such engine"),
        (CompletedRun(None, b"", b""), "UNKNOWN", "TIMED_OUT", "more than 300 s"),
    ],
)
def test_inference_passes_only_with_right_answers_of_its_gpu(
    ran: dict[str, Any] | CompletedRun, verdict: str, code: str, reason: str, tmp_path: Path
) -> None:
    def program(command: Sequence[str], environment: Mapping[str, str]) -> CompletedRun:
        if environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000000-fake":
            return demo_run(command, code=0, share=0.99)
        return ran if isinstance(ran, CompletedRun) else demo_run(command, **ran, reasons=["a reason"])

    certificate = certified(tmp_path, node_of(h200s(2), program=program))
    assert findings_in(certificate) == [(verdict, code, "GPU 1")]
    [healthy, faulty] = report(certificate, "inference").rows[:2]
    assert (healthy.verdict, faulty.verdict) == ("PASS", verdict)
    assert healthy.note == "sums on NVIDIA H200: unloaded 99.0 % right, under load 99.0 % right"
    assert reason in faulty.note
    assert others_pass(certificate, "inference")
    assert certificate.exit_code == {"FAIL": 2, "UNKNOWN": 3}[verdict]


def test_inference_serves_on_the_gpu_under_test_without_clients(tmp_path: Path) -> None:
    commands = []

    def program(command: Sequence[str], environment: Mapping[str, str]) -> CompletedRun:
        commands.append((list(command), environment["CUDA_VISIBLE_DEVICES"]))
        return demo_run(command, code=0, share=0.99)

    certified(tmp_path, node_of(h200s(2), program=program))
    assert sorted(gpu for _, gpu in commands) == ["GPU-00000000-fake", "GPU-00000001-fake"]
    parser = argparse.ArgumentParser()
    add_options(parser, DemoConfig)
    for command, _ in commands:
        config = from_options(DemoConfig, parser.parse_args(command[command.index("demo") + 1 :]))
        assert (config.device, config.clients) == ("cuda", False)


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
