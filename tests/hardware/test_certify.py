"""Certificates of scripted nodes: exactly the right findings, and no pass without having seen."""

from pathlib import Path

import pytest
from certify_tools import certified, demo_run, h200s, node_of, told

from meltcore.errors import ConfigError
from meltcore.hardware.certify import sampling_interval_s
from meltcore.hardware.fake import Change, FakeGpu
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.tiers import required
from meltcore.results.certificate import TIERS, Certificate

NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15
HW_THERMAL = 0x40


def check(certificate: Certificate, name: str) -> str:
    return next(report.verdict for report in certificate.checks if report.name == name)


def test_a_healthy_node_passes_every_tier_without_a_finding(tmp_path: Path) -> None:
    for tier in TIERS:
        folder = tmp_path / tier
        folder.mkdir()
        certificate = certified(folder, node_of(h200s()), tier, hours=1.0 if tier == "soak" else 0.0)
        assert told(certificate) == []
        assert (certificate.verdict, certificate.exit_code) == ("PASS", 0)
        assert [report.name for report in certificate.checks] == certificate.required


def test_each_check_is_named_when_it_begins_and_reported_when_it_ends(tmp_path: Path) -> None:
    heard: list[str] = []
    certificate = certified(
        tmp_path, node_of(h200s(1)), "quick", begun=heard.append, told=lambda report: heard.append(report.name)
    )
    titles = [report.title for report in certificate.checks]
    assert heard == [each for pair in zip(titles, certificate.required, strict=True) for each in pair]


def test_four_faults_of_four_gpus_give_exactly_four_findings(tmp_path: Path) -> None:
    gpus = h200s()
    gpus[1].readings["clock_reasons"] = 0  # a healthy neighbour says so too
    gpus[3].changes = [Change(1.0, "clock_reasons", HW_THERMAL)]
    gpus[6].readings["row_remap_pending"] = 1

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("peers") and target in ((2, 5), (5, 2)):
            answer.samples = [sample / 2 for sample in answer.samples]
        if question.key.startswith("memory") and target == (4,):
            answer.samples = [0.0] * len(answer.samples)
        return answer

    certificate = certified(tmp_path, node_of(gpus, spoil))
    assert sorted(told(certificate)) == [
        ("FAIL", "BELOW_FLOOR", "GPU 2 -> GPU 5"),
        ("FAIL", "ROW_REMAP_PENDING", "GPU 6"),
        ("UNKNOWN", "NO_READING", "GPU 4"),
        ("WARN", "THROTTLED", "GPU 3"),
    ]
    assert (certificate.verdict, certificate.exit_code) == ("FAIL", 2)
    assert all(finding.action for finding in certificate.findings)
    slow = next(finding for finding in certificate.findings if finding.code == "BELOW_FLOOR")
    assert "NVLinks between the two" in slow.action, "a slow link is not looked for among clocks"
    rows = [row for report in certificate.checks for row in report.rows if row.gpus == [3] and row.floor is not None]
    assert {row.verdict for row in rows} == {"WARN"}, "a floor met while throttling is no pass"


@pytest.mark.parametrize("reading", [0.0, float("nan"), float("inf"), -1.0])
def test_a_figure_that_is_none_is_unknown(tmp_path: Path, reading: float) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("memory") and target == (0,):
            answer.samples = [*answer.samples[:-1], reading]
        return answer

    certificate = certified(tmp_path, node_of(h200s(2), spoil), "quick")
    assert told(certificate) == [("UNKNOWN", "NO_READING", "GPU 0")]
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)
    assert any("memory/copy" in line for line in certificate.unseen)


def test_a_figure_beyond_what_the_hardware_can_give_is_no_reading(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("memory") and target == (0,):
            answer.samples = [9000.0] * 4
        return answer

    assert told(certified(tmp_path, node_of(h200s(2), spoil), "quick")) == [("UNKNOWN", "NO_READING", "GPU 0")]


def test_a_single_sample_beyond_that_is_enough(tmp_path: Path) -> None:
    """Another GPU's pace once passed for this one's, and only the first samples told."""

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("product") and target == (1,):
            answer.samples = [5e5] + [760.0] * 19
        return answer

    certificate = certified(tmp_path, node_of(h200s(2), spoil), "quick")
    assert told(certificate) == [("UNKNOWN", "NO_READING", "GPU 1")]
    assert "1 of 20 samples are more than 2 times the expected 780" in certificate.findings[0].message


def test_a_hung_probe_is_killed_told_once_and_never_passes(tmp_path: Path) -> None:
    node = node_of(h200s(), hung={"host"})
    certificate = certified(tmp_path, node, "quick")
    assert [(verdict, code) for verdict, code, _ in told(certificate)] == [("UNKNOWN", "TIMED_OUT")]
    assert certificate.exit_code == 3
    assert check(certificate, "collectives") == "PASS", "what comes after is still seen"


def test_a_probe_that_crashes_says_its_last_words(tmp_path: Path) -> None:
    node = node_of(h200s(2), crashed={"product": "Traceback\nModuleNotFoundError: No module named 'torch'"})
    certificate = certified(tmp_path, node, "quick")
    (finding,) = certificate.findings
    assert (finding.verdict, finding.code) == ("UNKNOWN", "PROBE_FAILED")
    assert "No module named 'torch'" in finding.message


def test_an_answer_that_never_comes_is_unknown(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        return None if target == (1,) and question.key.startswith("product") else answer

    certificate = certified(tmp_path, node_of(h200s(2), spoil), "quick")
    assert told(certificate) == [("UNKNOWN", "PROBE_FAILED", "GPU 1")]


def test_another_program_makes_figures_invalid_not_failed(tmp_path: Path) -> None:
    gpus = h200s()
    gpus[5].processes = [4242]

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if 5 in target:
            answer.samples = [sample / 3 for sample in answer.samples]
        return answer

    certificate = certified(tmp_path, node_of(gpus, spoil), "quick")
    assert {(verdict, code) for verdict, code, _ in told(certificate)} == {("INVALID", "BUSY")}
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)


def test_a_new_error_during_a_pass_fails(tmp_path: Path) -> None:
    gpus = h200s(4)
    gpus[0].changes = [Change(1.0, "ecc_uncorrected", 1)]
    gpus[1].xids = [(0xFFFFFFFF, 48)]
    gpus[2].changes = [Change(5.0, "pcie_replays", 90)]
    gpus[3].changes = [Change(7.0, "nvlink_errors", 2)]
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert sorted(told(certificate)) == [
        ("FAIL", "NEW_ECC_ERRORS", "GPU 0"),
        ("FAIL", "NEW_NVLINK_ERRORS", "GPU 3"),
        ("FAIL", "NEW_PCIE_REPLAYS", "GPU 2"),
        ("FAIL", "NEW_XID", "GPU 1"),
    ]
    (xid,) = [finding for finding in certificate.findings if finding.code == "NEW_XID"]
    assert "XID 48" in xid.message
    assert "reset" in xid.action


def test_a_slowdown_that_no_sample_saw_is_told_by_its_counter(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].changes = [Change(1.0, "hw_power_brake_s", 0.02)]
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert told(certificate) == [("WARN", "THROTTLED", "GPU 1")]
    assert certificate.findings[0].message == "its clocks were held down: for moments between two samples"


def test_a_sampler_that_died_leaves_nothing_vouched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meltcore.hardware.fake_node._FakeTelemetry.since", lambda self, from_s: None)
    certificate = certified(tmp_path, node_of(h200s(1)), "quick")
    assert told(certificate) == [("UNKNOWN", "TELEMETRY_UNREADABLE", "GPU 0")]


def test_a_lost_gpu_fails(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].lost_after_s = 1.0
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert ("FAIL", "GPU_LOST", "GPU 1") in told(certificate)


def test_telemetry_that_cannot_be_read_is_no_pass(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].refused = {"clock_reasons": NO_PERMISSION}
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert sorted(told(certificate)) == [
        ("UNKNOWN", "STATE_UNREADABLE", "GPU 0"),
        ("UNKNOWN", "TELEMETRY_UNREADABLE", "GPU 0"),
    ]
    assert certificate.exit_code == 3


@pytest.mark.parametrize(
    ("key", "value", "verdict", "code"),
    [
        ("ecc_uncorrected", 1, "FAIL", "ECC_UNCORRECTED"),
        ("row_remap_pending", 1, "FAIL", "ROW_REMAP_PENDING"),
        ("row_remap_failed", 1, "FAIL", "ROW_REMAP_FAILED"),
        ("rows_remapped_uncorrected", 513, "FAIL", "ROWS_REMAPPED_MANY"),
        ("recovery_action", 1, "FAIL", "RECOVERY_ACTION"),
        ("pcie_width", 8, "FAIL", "PCIE_WIDTH"),
        ("pcie_generation", 3, "FAIL", "PCIE_GENERATION"),
        ("ecc_on", 0, "WARN", "ECC_OFF"),
        ("power_limit_w", 500, "WARN", "POWER_LIMIT_LOWERED"),
        ("gpu_pcie_generation_max", 6, "WARN", "PCIE_GENERATION"),
        ("mig_on", 1, "WARN", "MIG_ON"),
        ("clock_reasons", HW_THERMAL, "WARN", "THROTTLED"),
    ],
)
def test_each_state_that_is_wrong_has_its_code(tmp_path: Path, key: str, value: int, verdict: str, code: str) -> None:
    gpus = h200s(2)
    gpus[1].readings[key] = value
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert told(certificate) == [(verdict, code, "GPU 1")]
    assert certificate.exit_code == {"FAIL": 2, "WARN": 1}[verdict]


@pytest.mark.parametrize("key", ["ecc_on", "row_remap_pending", "recovery_action", "pcie_width_max", "processes"])
def test_a_state_that_cannot_be_read_is_unknown_even_where_the_driver_says_unsupported(
    tmp_path: Path, key: str
) -> None:
    gpus = h200s(1)
    keys = (
        ["rows_remapped_corrected"] if key == "row_remap_pending" else ["pcie_generation_max"] if "pcie" in key else []
    )
    gpus[0].refused = dict.fromkeys([key, *keys], NOT_SUPPORTED)
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert ("UNKNOWN", "STATE_UNREADABLE", "GPU 0") in told(certificate)
    assert certificate.exit_code == 3


def test_what_a_product_never_had_is_neutral_and_named(tmp_path: Path) -> None:
    lacking = ("ecc_on", "ecc_corrected", "ecc_uncorrected", "rows_remapped_corrected", "recovery_action", "mig_on",
               "nvlinks")  # fmt: skip
    gpu = FakeGpu(
        name="NVIDIA GeForce RTX 5090",
        architecture=10,
        capability=(12, 0),
        readings={"memory_clock_max_mhz": 14001, "memory_bus_bits": 512, "sm_clock_max_mhz": 3090, "cores": 170 * 128},
        refused=dict.fromkeys(lacking, NOT_SUPPORTED),
    )

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        slower = {"product": 240 / 790, "memory": 1650 / 4280}
        answer.samples = [sample * slower.get(question.key.split("/")[0], 1.0) for sample in answer.samples]
        return answer

    certificate = certified(tmp_path, node_of([gpu], spoil), "quick")
    assert told(certificate) == []
    assert certificate.verdict == "PASS"
    assert check(certificate, "collectives") == "NOT_APPLICABLE"
    seen = "\n".join(certificate.unseen)
    assert "one GPU has no peer" in seen
    assert "state/ecc_on" in seen


def test_links_that_are_down_fail_on_several_gpus_and_do_not_matter_to_one(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].links_down = [4, 9]
    several = certified(tmp_path, node_of(gpus), "quick")
    assert ("FAIL", "NVLINK_DOWN", "GPU 0") in told(several)
    alone = h200s(1)
    alone[0].links_down = list(range(18))
    assert told(certified(tmp_path, node_of(alone), "quick")) == []


def test_a_straggler_is_told_though_it_meets_the_floor(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("memory") and target == (7,):
            answer.samples = [0.915 * 4280.0] * 4
        return answer

    certificate = certified(tmp_path, node_of(h200s(), spoil), "quick")
    assert told(certificate) == [("WARN", "STRAGGLER", "GPU 7")]
    assert certificate.exit_code == 1


def test_cards_that_differ_at_their_power_limit_as_healthy_ones_do_are_no_finding(tmp_path: Path) -> None:
    """682 of 795 TFLOP/s, as two healthy H200s gave; the others of this node are fast ones."""

    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith(("product", "sustained")) and target == (7,):
            answer.samples = [sample * 682 / 795 for sample in answer.samples if sample is not None]
        return answer

    for tier in TIERS[:3]:
        folder = tmp_path / tier
        folder.mkdir()
        certificate = certified(folder, node_of(h200s(), spoil), tier)
        assert told(certificate) == []
        assert certificate.verdict == "PASS"


def test_two_directions_that_differ_are_told(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key == "peers/one-way":
            answer.samples = [350.0 if target == (1, 0) else 392.0] * 4
        return answer

    certificate = certified(tmp_path, node_of(h200s(2), spoil))
    assert told(certificate) == [("WARN", "ASYMMETRY", "GPU 1 -> GPU 0")]


def test_a_load_that_sags_is_drift(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("sustained") and target == (0,):
            answer.samples = [700.0 - 3 * second for second in range(20)]
        return answer

    certificate = certified(tmp_path, node_of(h200s(2), spoil))
    assert told(certificate) == [("WARN", "DRIFT", "GPU 0")]


def test_wrong_bits_fail_by_repetition_and_against_the_peers(tmp_path: Path) -> None:
    def spoil(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("corruption") and target == (0,):
            answer.marks["wrong"] = 1
        if question.key.startswith("corruption") and target == (2,):
            answer.marks["digest"] = "bad"
        if question.key.startswith("collectives/all_gather/4/1GiB"):
            answer.marks["wrong"] = 3
        return answer

    certificate = certified(tmp_path, node_of(h200s(4), spoil))
    assert told(certificate) == [
        ("FAIL", "WRONG_RESULT", "4 GPUs"),
        ("FAIL", "WRONG_RESULT", "GPU 0"),
        ("FAIL", "WRONG_RESULT", "GPU 2"),
    ]


def test_wrong_answers_of_the_engine_have_a_code_of_their_own(tmp_path: Path) -> None:
    node = node_of(h200s(1), program=lambda command, environment: demo_run(command, 1, 0.5, ["accuracy is 50 %"]))
    certificate = certified(tmp_path, node)
    assert told(certificate) == [("FAIL", "WRONG_ANSWERS", "GPU 0")]


def test_an_engine_that_ends_without_a_result_is_unknown(tmp_path: Path) -> None:
    from meltcore.hardware.node import Ran

    node = node_of(h200s(1), program=lambda command, environment: Ran(0, b"", b""))
    assert told(certified(tmp_path, node)) == [("UNKNOWN", "PROBE_FAILED", "GPU 0")]


def test_probes_see_the_chosen_gpus_in_order_and_never_multicast(tmp_path: Path) -> None:
    node = node_of(h200s(4))
    certificate = certified(tmp_path, node, "quick", wanted="3,1")
    assert [gpu.index for gpu in certificate.snapshot.gpus] == [3, 1]
    assert len(node.ran) == 4
    for _, environment in node.ran:
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000003-fake,GPU-00000001-fake"
        assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert any("NCCL_NVLS_ENABLE=0" in note for note in certificate.notes)


def test_a_mig_slice_has_no_expectation_but_its_own_and_comes_alone(tmp_path: Path) -> None:
    gpus = h200s(1)
    gpus[0].slices = {"MIG-one": 3, "MIG-two": 4}
    gpus[0].readings["mig_on"] = 1
    certificate = certified(tmp_path, node_of(gpus), "quick", wanted="MIG-one")
    assert {(verdict, code) for verdict, code, _ in told(certificate)} == {("UNKNOWN", "NO_EXPECTATION")}
    with pytest.raises(ConfigError, match="one MIG slice"):
        certified(tmp_path, node_of(gpus), "quick", wanted="MIG-one,MIG-two")


def test_host_copies_are_told_which_processors_are_near(tmp_path: Path) -> None:
    asked: dict[tuple[int, ...], object] = {}

    def noted(question: Question, target: tuple[int, ...], answer: Answer) -> Answer | None:
        if question.key.startswith("host"):
            asked[target] = question.settings["cpus"]
        return answer

    files = {"/sys/bus/pci/devices/0000:01:00.0/local_cpulist": "64-127\n"}
    certified(tmp_path, node_of(h200s(2), noted, files=files), "quick")
    assert asked == {(0,): "", (1,): "64-127"}


def test_a_soak_of_days_holds_no_more_samples_than_an_hour() -> None:
    assert sampling_interval_s(0) == sampling_interval_s(1.0) == 0.1
    assert sampling_interval_s(72.0) == pytest.approx(7.2)
    assert sampling_interval_s(8760.0) == 60.0


def test_the_holes_between_samples_of_a_soak_are_no_blindness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples 8 s apart: as they should be in 80 hours, a hole in 1."""
    monkeypatch.setattr("meltcore.hardware.fake_node._STEPS", 1)
    monkeypatch.setattr("meltcore.hardware.fake_node.round", lambda seconds: round(seconds / 8), raising=False)
    for hours, codes in ((80.0, set()), (1.0, {"TELEMETRY_UNREADABLE"})):
        folder = tmp_path / f"{hours:.0f}"
        folder.mkdir()
        certificate = certified(folder, node_of(h200s(1), probe_s=64.0), "soak", hours=hours)
        assert {finding.code for finding in certificate.findings} == codes


def test_a_soak_needs_hours_and_only_a_soak(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hours"):
        certified(tmp_path, node_of(h200s(1)), "soak")
    with pytest.raises(ConfigError, match="--hours"):
        certified(tmp_path, node_of(h200s(1)), "quick", hours=1.0)


def test_the_help_names_the_checks_each_tier_requires() -> None:
    from meltcore.cli.certify import EXAMPLES

    lines = {line.split()[0]: line for line in EXAMPLES.splitlines() if line.startswith("  ") and line.split()}
    assert all(check.name in lines["quick"] for check in required("quick"))
    assert all(check.name in lines["standard"] for check in required("full"))
    assert {type(one) for one in required("full")} == {type(one) for one in required("soak")}
