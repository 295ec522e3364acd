"""Every check, one by one, on a scripted node: healthy, degraded, unreadable, hung, not applicable, each exit code."""

from collections.abc import Callable
from pathlib import Path

import pytest
from certify_tools import certified, demo_run, h200s, node_of, told

from meltcore.hardware.checks import inference
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.fake_node import FakeNode
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.node import Ran
from meltcore.results.certificate import Certificate, CheckReport

FLOORED = ("product", "memory", "host", "peers", "collectives", "sustained")
PROBED = (*FLOORED, "corruption")
ALL = ("state", *PROBED, "inference")
NO_PERMISSION, TIMEOUT = 4, 10
Spoiler = Callable[[Answer], Answer | None]


def report(certificate: Certificate, name: str) -> CheckReport:
    return next(each for each in certificate.checks if each.name == name)


def others_pass(certificate: Certificate, name: str) -> bool:
    return all(each.verdict == "PASS" for each in certificate.checks if each.name != name)


def spoilt(name: str, spoiler: Spoiler, gpu: int = 0) -> FakeNode:
    """Two GPUs, of which every figure of one check that concerns `gpu` is spoilt."""

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        return spoiler(answer) if question.key.split("/")[0] == name and gpu in target else answer

    return node_of(h200s(2), spoil)


def slow(answer: Answer) -> Answer:
    answer.samples = [0.3 * sample for sample in answer.samples]
    return answer


def wrong(answer: Answer) -> Answer:
    answer.marks["wrong"] = 2
    return answer


def unreadable(answer: Answer) -> Answer:
    answer.samples = [*answer.samples[:-1], float("nan")]
    return answer


def mute(answer: Answer) -> Answer:
    answer.samples = []
    return answer


@pytest.mark.parametrize("name", ALL)
def test_a_healthy_check_passes(name: str, tmp_path: Path) -> None:
    found = report(certified(tmp_path, node_of(h200s(2))), name)
    assert (found.verdict, found.findings) == ("PASS", [])


@pytest.mark.parametrize("name", FLOORED)
def test_a_slow_gpu_fails_its_check_and_no_other(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, spoilt(name, slow))
    assert report(certificate, name).verdict == "FAIL"
    assert {finding.code for finding in certificate.findings} == {"BELOW_FLOOR"}
    assert others_pass(certificate, name)
    assert certificate.exit_code == 2


@pytest.mark.parametrize("name", ["corruption", "collectives"])
def test_wrong_bits_fail_their_check(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, spoilt(name, wrong))
    assert {finding.code for finding in report(certificate, name).findings} == {"WRONG_RESULT"}
    assert others_pass(certificate, name)
    assert (certificate.verdict, certificate.exit_code) == ("FAIL", 2)


@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize(("spoiler", "code"), [(unreadable, "NO_READING"), (mute, "PROBE_FAILED")])
def test_what_cannot_be_read_is_unknown_in_every_check(name: str, spoiler: Spoiler, code: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, spoilt(name, spoiler))
    assert report(certificate, name).verdict == "UNKNOWN"
    assert {finding.code for finding in certificate.findings} == {code}
    assert others_pass(certificate, name)
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)
    assert certificate.unseen


@pytest.mark.parametrize("name", PROBED)
def test_an_answer_that_is_missing_is_unknown_in_every_check(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, spoilt(name, lambda answer: None))
    assert report(certificate, name).verdict == "UNKNOWN"
    assert others_pass(certificate, name)
    assert certificate.exit_code == 3


@pytest.mark.parametrize("name", PROBED)
def test_a_probe_that_hangs_is_unknown_and_those_after_it_still_run(name: str, tmp_path: Path) -> None:
    node = node_of(h200s(2), hung={name})
    certificate = certified(tmp_path, node)
    assert [(verdict, code) for verdict, code, _ in told(certificate)] == [("UNKNOWN", "TIMED_OUT")]
    assert report(certificate, name).verdict == "UNKNOWN"
    assert others_pass(certificate, name)
    assert certificate.exit_code == 3


@pytest.mark.parametrize("error", [NO_PERMISSION, TIMEOUT])
def test_a_state_that_is_refused_or_hangs_in_the_driver_is_unknown(error: int, tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].refused = {"ecc_on": error}
    certificate = certified(tmp_path, node_of(gpus))
    assert told(certificate) == [("UNKNOWN", "STATE_UNREADABLE", "GPU 1")]
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
def test_inference_that_is_wrong_crashes_or_hangs(
    ran: str, verdict: str, code: str, exit_code: int, tmp_path: Path
) -> None:
    outcomes = {"crashed": Ran(1, b"", b"no such engine"), "hung": Ran(None, b"", b"")}
    node = node_of(
        h200s(2),
        program=lambda command, environment: outcomes.get(ran) or demo_run(command, 1, 0.5, ["accuracy is 50 %"]),
    )
    certificate = certified(tmp_path, node)
    assert {(each, of) for each, of, _ in told(certificate)} == {(verdict, code)}
    assert others_pass(certificate, "inference")
    assert certificate.exit_code == exit_code


@pytest.mark.parametrize("name", ["peers", "collectives"])
def test_one_gpu_has_no_peers_and_that_is_named_and_neutral(name: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, node_of(h200s(1)))
    found = report(certificate, name)
    assert (found.verdict, found.why) == ("NOT_APPLICABLE", "one GPU has no peer")
    assert (certificate.verdict, certificate.exit_code) == ("PASS", 0)
    assert any("no peer" in line for line in certificate.unseen)


def test_inference_does_not_apply_where_the_engine_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "find_spec", lambda name: None)
    certificate = certified(tmp_path, node_of(h200s(1)))
    found = report(certificate, "inference")
    assert (found.verdict, certificate.verdict) == ("NOT_APPLICABLE", "PASS")
    assert "the engine is not installed" in found.why


def test_fp8_products_are_left_out_and_named_where_a_gpu_has_none(tmp_path: Path) -> None:
    a100 = FakeGpu(name="NVIDIA A100-SXM4-80GB", architecture=7, capability=(8, 0))
    found = report(certified(tmp_path, node_of([a100])), "product")
    assert not any("fp8" in row.key for row in found.rows)
    assert "fp8" in found.why


def test_a_warning_alone_exits_1(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].readings["power_limit_w"] = 500
    certificate = certified(tmp_path, node_of(gpus))
    assert (report(certificate, "state").verdict, certificate.exit_code) == ("WARN", 1)
