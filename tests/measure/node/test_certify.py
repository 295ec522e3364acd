"""Certificates of scripted nodes: exactly the expected findings, and no PASS for what was not verified."""

from pathlib import Path

import pytest
from certify_tools import certified, demo_run, findings_in, h200s, node_of
from fake_gpu import FakeGpu, ReadingChange

from meltcore.common.errors import ConfigError
from meltcore.common.process import CompletedRun
from meltcore.measure.documents.node import TIERS, Certificate
from meltcore.measure.node.certify.checks.run import checks_of, sampling_interval_s
from meltcore.measure.node.certify.expectations import make_baseline
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15
HW_THERMAL = 0x40


def check(certificate: Certificate, name: str) -> str:
    return next(report.verdict for report in certificate.checks if report.name == name)


@pytest.mark.slow
def test_healthy_node_passes_every_tier_without_findings(tmp_path: Path) -> None:
    for tier in TIERS:
        folder = tmp_path / tier
        folder.mkdir()
        certificate = certified(folder, node_of(h200s()), tier, hours=1.0 if tier == "soak" else 0.0)
        assert findings_in(certificate) == []
        assert (certificate.verdict, certificate.exit_code) == ("PASS", 0)
        optional = ["system"] if tier in ("quick", "standard") else []  # a container hides what it reads
        assert [report.name for report in certificate.checks] == [*certificate.required, *optional]


def test_callbacks_get_title_at_start_and_report_at_end_of_each_check(tmp_path: Path) -> None:
    events: list[str] = []
    certificate = certified(
        tmp_path,
        node_of(h200s(1)),
        "quick",
        on_start=events.append,
        on_report=lambda report: events.append(report.name),
    )
    titles = [report.title for report in certificate.checks]
    assert events == [each for pair in zip(titles, [*certificate.required, "system"], strict=True) for each in pair]


def test_four_faults_of_four_gpus_give_exactly_four_findings(tmp_path: Path) -> None:
    gpus = h200s()
    gpus[1].readings["clock_reasons"] = 0  # explicit, as on the healthy GPUs
    gpus[3].changes = [ReadingChange(1.0, "clock_reasons", HW_THERMAL)]
    gpus[6].readings["row_remap_pending"] = 1

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("peers") and target in ((2, 5), (5, 2)):
            result.samples = [sample / 2 for sample in result.samples]
        if request.key.startswith("memory") and target == (4,):
            result.samples = [0.0] * len(result.samples)
        return result

    certificate = certified(tmp_path, node_of(gpus, modify))
    assert sorted(findings_in(certificate)) == [
        ("FAIL", "BELOW_FLOOR", "GPU 2 -> GPU 5"),
        ("FAIL", "ROW_REMAP_PENDING", "GPU 6"),
        ("UNKNOWN", "NO_READING", "GPU 4"),
        ("WARN", "THROTTLED", "GPU 3"),
    ]
    assert (certificate.verdict, certificate.exit_code) == ("FAIL", 2)
    assert all(finding.action for finding in certificate.findings)
    slow = next(finding for finding in certificate.findings if finding.code == "BELOW_FLOOR")
    assert "NVLinks between the two" in slow.action, "the action for a slow link is about links"
    rows = [row for report in certificate.checks for row in report.rows if row.gpus == [3] and row.floor is not None]
    assert {row.verdict for row in rows} == {"WARN"}, "a floor reached while throttled is no PASS"


@pytest.mark.parametrize("reading", [0.0, float("nan"), float("inf"), -1.0])
def test_unusable_sample_makes_metric_unknown(tmp_path: Path, reading: float) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("memory") and target == (0,):
            result.samples = [*result.samples[:-1], reading]
        return result

    certificate = certified(tmp_path, node_of(h200s(2), modify), "quick")
    assert findings_in(certificate) == [("UNKNOWN", "NO_READING", "GPU 0")]
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)
    assert any("memory/copy" in line for line in certificate.unverified)


def test_impossible_value_is_no_reading(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("memory") and target == (0,):
            result.samples = [9000.0] * 4
        return result

    assert findings_in(certified(tmp_path, node_of(h200s(2), modify), "quick")) == [("UNKNOWN", "NO_READING", "GPU 0")]


def test_single_impossible_sample_is_no_reading(tmp_path: Path) -> None:
    """A rate of another GPU was once taken for this one, visible in the first samples only."""

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("gemm") and target == (1,):
            result.samples = [5e5] + [760.0] * 19
        return result

    certificate = certified(tmp_path, node_of(h200s(2), modify), "quick")
    assert findings_in(certificate) == [("UNKNOWN", "NO_READING", "GPU 1")]
    assert "1 of 20 samples are more than 2 times the expected 780" in certificate.findings[0].message


def test_hung_probe_is_killed_and_gives_one_finding(tmp_path: Path) -> None:
    node = node_of(h200s(), hung={"host"})
    certificate = certified(tmp_path, node, "quick")
    assert [(verdict, code) for verdict, code, _ in findings_in(certificate)] == [("UNKNOWN", "TIMED_OUT")]
    assert "and was killed: waiting;" in certificate.findings[0].message
    assert certificate.exit_code == 3
    assert check(certificate, "collectives") == "PASS", "later checks still run"


def test_crashed_probe_reports_its_last_line(tmp_path: Path) -> None:
    node = node_of(h200s(2), crashed={"gemm": "Traceback\nModuleNotFoundError: No module named 'torch'"})
    certificate = certified(tmp_path, node, "quick")
    (finding,) = certificate.findings
    assert (finding.verdict, finding.code) == ("UNKNOWN", "PROBE_FAILED")
    assert "No module named 'torch'" in finding.message


def test_probe_that_crashes_after_its_last_result_does_not_pass(tmp_path: Path) -> None:
    node = node_of(h200s(2), crashed_late={"gemm"})
    certificate = certified(tmp_path, node, "quick")
    assert check(certificate, "gemm") == certificate.verdict == "UNKNOWN"
    (report,) = [report for report in certificate.checks if report.name == "gemm"]
    assert report.reason == "the probe ended with status 1: no message"
    assert check(certificate, "collectives") == "PASS"


def test_missing_result_is_unknown(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        return None if target == (1,) and request.key.startswith("gemm") else result

    certificate = certified(tmp_path, node_of(h200s(2), modify), "quick")
    assert findings_in(certificate) == [("UNKNOWN", "PROBE_FAILED", "GPU 1")]


def test_other_program_on_gpu_makes_metrics_invalid_not_failed(tmp_path: Path) -> None:
    gpus = h200s()
    gpus[5].processes = [4242]

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if 5 in target:
            result.samples = [sample / 3 for sample in result.samples]
        return result

    other = {"/proc/4242/stat": "4242 (python) R 1 4242"}
    certificate = certified(tmp_path, node_of(gpus, modify, files=other), "quick")
    assert {(verdict, code) for verdict, code, _ in findings_in(certificate)} == {("INVALID", "BUSY")}
    assert (certificate.verdict, certificate.exit_code) == ("UNKNOWN", 3)


def test_new_error_during_a_check_fails(tmp_path: Path) -> None:
    gpus = h200s(4)
    gpus[0].changes = [ReadingChange(1.0, "ecc_uncorrected", 1)]
    gpus[1].xids = [(0xFFFFFFFF, 48)]
    gpus[2].changes = [ReadingChange(5.0, "pcie_replays", 90)]
    gpus[3].changes = [ReadingChange(7.0, "nvlink_errors", 2)]
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert sorted(findings_in(certificate)) == [
        ("FAIL", "NEW_ECC_ERRORS", "GPU 0"),
        ("FAIL", "NEW_NVLINK_ERRORS", "GPU 3"),
        ("FAIL", "NEW_PCIE_REPLAYS", "GPU 2"),
        ("FAIL", "NEW_XID", "GPU 1"),
    ]
    (xid,) = [finding for finding in certificate.findings if finding.code == "NEW_XID"]
    assert "XID 48" in xid.message
    assert "reset" in xid.action


def test_slowdown_between_samples_is_found_by_its_counter(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].changes = [ReadingChange(1.0, "hw_power_brake_s", 0.02)]
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert findings_in(certificate) == [("WARN", "THROTTLED", "GPU 1")]
    assert certificate.findings[0].message == "its clocks were held down: briefly, between two samples"


def test_dead_sampler_makes_telemetry_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_node.FakeTelemetry.since", lambda self, from_s: None)
    certificate = certified(tmp_path, node_of(h200s(1)), "quick")
    assert findings_in(certificate) == [("UNKNOWN", "TELEMETRY_UNREADABLE", "GPU 0")]


def test_lost_gpu_fails(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].lost_after_s = 1.0
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert ("FAIL", "GPU_LOST", "GPU 1") in findings_in(certificate)


def test_unreadable_telemetry_does_not_pass(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].refused = {"clock_reasons": NO_PERMISSION}
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert sorted(findings_in(certificate)) == [
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
def test_each_faulty_state_has_its_code(tmp_path: Path, key: str, value: int, verdict: str, code: str) -> None:
    gpus = h200s(2)
    gpus[1].readings[key] = value
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert findings_in(certificate) == [(verdict, code, "GPU 1")]
    assert certificate.exit_code == {"FAIL": 2, "WARN": 1}[verdict]


@pytest.mark.parametrize("key", ["ecc_on", "row_remap_pending", "recovery_action", "pcie_width_max", "processes"])
def test_unreadable_state_is_unknown_even_if_driver_says_unsupported(tmp_path: Path, key: str) -> None:
    gpus = h200s(1)
    keys = (
        ["rows_remapped_corrected"] if key == "row_remap_pending" else ["pcie_generation_max"] if "pcie" in key else []
    )
    gpus[0].refused = dict.fromkeys([key, *keys], NOT_SUPPORTED)
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert ("UNKNOWN", "STATE_UNREADABLE", "GPU 0") in findings_in(certificate)
    assert certificate.exit_code == 3


def test_gpu_that_shares_the_hosts_memory_passes_by_a_baseline(tmp_path: Path) -> None:
    """A GB10 reports no memory, PCIe link, power limit, ECC or NVLink. No speed of it is known."""
    absent = (
        *("memory_used_bytes", "memory_total_bytes", "memory_clock_mhz", "memory_clock_max_mhz", "memory_bus_bits"),
        *("pcie_generation", "pcie_width", "pcie_generation_max", "pcie_width_max", "gpu_pcie_generation_max"),
        *("pcie_replays", "power_limit_w", "power_limit_default_w", "ecc_on", "ecc_corrected", "ecc_uncorrected"),
        *("rows_remapped_corrected", "recovery_action", "mig_on", "nvlinks", "memory_temperature_c"),
    )
    gpu = FakeGpu(
        name="NVIDIA GB10",
        architecture=10,
        capability=(12, 1),
        refused=dict.fromkeys(absent, NOT_SUPPORTED),
        readings={"fabric_state": 0},
    )
    first = certified(tmp_path, node_of([gpu]), "quick")
    assert {(verdict, code) for verdict, code, _ in findings_in(first)} == {("UNKNOWN", "NO_EXPECTATION")}
    second = certified(tmp_path, node_of([gpu]), "quick", baseline=make_baseline(first))
    assert (findings_in(second), second.verdict) == ([], "PASS")


def test_feature_that_gpu_type_lacks_is_not_applicable_and_listed(tmp_path: Path) -> None:
    lacking = ("ecc_on", "ecc_corrected", "ecc_uncorrected", "rows_remapped_corrected", "recovery_action", "mig_on",
               "nvlinks")  # fmt: skip
    gpu = FakeGpu(
        name="NVIDIA GeForce RTX 5090",
        architecture=10,
        capability=(12, 0),
        readings={"memory_clock_max_mhz": 14001, "memory_bus_bits": 512, "sm_clock_max_mhz": 3090, "cores": 170 * 128},
        refused=dict.fromkeys(lacking, NOT_SUPPORTED),
    )

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        slower = {"gemm": 240 / 790, "memory": 1650 / 4280}
        result.samples = [sample * slower.get(request.key.split("/")[0], 1.0) for sample in result.samples]
        return result

    certificate = certified(tmp_path, node_of([gpu], modify), "quick")
    assert findings_in(certificate) == []
    assert certificate.verdict == "PASS"
    assert check(certificate, "collectives") == "NOT_APPLICABLE"
    seen = "\n".join(certificate.unverified)
    assert "one GPU has no peer" in seen
    assert "state/ecc_on" in seen


def test_links_down_fail_with_several_gpus_only(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[0].links_down = [4, 9]
    several = certified(tmp_path, node_of(gpus), "quick")
    assert ("FAIL", "NVLINK_DOWN", "GPU 0") in findings_in(several)
    alone = h200s(1)
    alone[0].links_down = list(range(18))
    assert findings_in(certified(tmp_path, node_of(alone), "quick")) == []


def test_straggler_above_its_floor_is_a_warning(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("memory") and target == (7,):
            result.samples = [0.915 * 4280.0] * 4
        return result

    certificate = certified(tmp_path, node_of(h200s(), modify), "quick")
    assert findings_in(certificate) == [("WARN", "STRAGGLER", "GPU 7")]
    assert certificate.exit_code == 1


@pytest.mark.slow
def test_healthy_spread_at_power_limit_gives_no_finding(tmp_path: Path) -> None:
    """682 of 795 TFLOP/s, as measured on two healthy H200s; the other GPUs of this node are fast."""

    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith(("gemm", "sustained")) and target == (7,):
            result.samples = [sample * 682 / 795 for sample in result.samples if sample is not None]
        return result

    for tier in TIERS[:3]:
        folder = tmp_path / tier
        folder.mkdir()
        certificate = certified(folder, node_of(h200s(), modify), tier)
        assert findings_in(certificate) == []
        assert certificate.verdict == "PASS"


def test_asymmetric_pair_is_a_warning(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key == "peers/unidirectional":
            result.samples = [350.0 if target == (1, 0) else 392.0] * 4
        return result

    certificate = certified(tmp_path, node_of(h200s(2), modify))
    assert findings_in(certificate) == [("WARN", "ASYMMETRY", "GPU 1 -> GPU 0")]


def test_falling_speed_under_load_is_drift(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("sustained") and target == (0,):
            result.samples = [700.0 - 3 * second for second in range(20)]
        return result

    certificate = certified(tmp_path, node_of(h200s(2), modify))
    assert findings_in(certificate) == [("WARN", "DRIFT", "GPU 0")]


def test_wrong_bits_fail_against_repetition_and_against_peers(tmp_path: Path) -> None:
    def modify(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("corruption") and target == (0,):
            result.details["wrong"] = 1
        if request.key.startswith("corruption") and target == (2,):
            result.details["digest"] = "bad"
        if request.key.startswith("collectives/all_gather/4/1GiB"):
            result.details["wrong"] = 3
        return result

    certificate = certified(tmp_path, node_of(h200s(4), modify))
    assert findings_in(certificate) == [
        ("FAIL", "WRONG_RESULT", "4 GPUs"),
        ("FAIL", "WRONG_RESULT", "GPU 0"),
        ("FAIL", "WRONG_RESULT", "GPU 2"),
    ]


def test_wrong_answers_of_engine_have_their_own_code(tmp_path: Path) -> None:
    node = node_of(h200s(1), program=lambda command, environment: demo_run(command, 1, 0.5, ["accuracy is 50 %"]))
    certificate = certified(tmp_path, node)
    assert findings_in(certificate) == [("FAIL", "WRONG_ANSWERS", "GPU 0")]


def test_engine_without_result_is_unknown(tmp_path: Path) -> None:
    node = node_of(h200s(1), program=lambda command, environment: CompletedRun(0, b"", b""))
    assert findings_in(certified(tmp_path, node)) == [("UNKNOWN", "PROBE_FAILED", "GPU 0")]


def test_probes_see_selected_gpus_in_order_without_multicast(tmp_path: Path) -> None:
    node = node_of(h200s(4))
    certificate = certified(tmp_path, node, "quick", requested="3,1")
    assert [gpu.index for gpu in certificate.snapshot.gpus] == [3, 1]
    assert len(node.probes) == 4
    for _, environment in node.probes:
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000003-fake,GPU-00000001-fake"
        assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert any("NCCL_NVLS_ENABLE=0" in note for note in certificate.notes)


def test_mig_device_has_only_baseline_expectations_and_must_be_alone(tmp_path: Path) -> None:
    gpus = h200s(1)
    gpus[0].mig_instances = {"MIG-one": 3, "MIG-two": 4}
    gpus[0].readings["mig_on"] = 1
    certificate = certified(tmp_path, node_of(gpus), "quick", requested="MIG-one")
    assert {(verdict, code) for verdict, code, _ in findings_in(certificate)} == {("UNKNOWN", "NO_EXPECTATION")}
    with pytest.raises(ConfigError, match="one MIG device"):
        certified(tmp_path, node_of(gpus), "quick", requested="MIG-one,MIG-two")


def test_host_copies_get_cpus_of_gpu_socket(tmp_path: Path) -> None:
    cpus: dict[tuple[int, ...], object] = {}

    def record(request: ProbeRequest, target: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
        if request.key.startswith("host"):
            cpus[target] = request.settings["cpus"]
        return result

    files = {"/sys/bus/pci/devices/0000:01:00.0/local_cpulist": "64-127\n"}
    certified(tmp_path, node_of(h200s(2), record, files=files), "quick")
    assert cpus == {(0,): "", (1,): "64-127"}


def test_soak_of_days_keeps_no_more_samples_than_an_hour() -> None:
    assert sampling_interval_s(0) == sampling_interval_s(1.0) == 0.1
    assert sampling_interval_s(72.0) == pytest.approx(7.2)
    assert sampling_interval_s(8760.0) == 60.0


def test_long_sampling_interval_of_a_soak_is_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples 8 s apart: the interval of a soak of 80 hours, a gap in one of 1 hour."""
    monkeypatch.setattr("fake_node._STEPS", 1)
    monkeypatch.setattr("fake_node.round", lambda seconds: round(seconds / 8), raising=False)
    for hours, codes in ((80.0, set()), (1.0, {"TELEMETRY_UNREADABLE"})):
        folder = tmp_path / f"{hours:.0f}"
        folder.mkdir()
        certificate = certified(folder, node_of(h200s(1), probe_s=64.0), "soak", hours=hours)
        assert {finding.code for finding in certificate.findings} == codes


def test_hours_are_for_a_soak_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hours"):
        certified(tmp_path, node_of(h200s(1)), "soak")
    with pytest.raises(ConfigError, match="--hours"):
        certified(tmp_path, node_of(h200s(1)), "quick", hours=1.0)


def test_help_lists_checks_that_each_tier_requires() -> None:
    from meltcore.cli.gpu.certify import EXAMPLES

    text = EXAMPLES.replace(",\n    ", ", ")  # a list of checks may go on in the next line
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line.split()}
    assert all(check.name in lines["quick"] for check in checks_of("quick"))
    assert all(check.name in lines["standard"] for check in checks_of("full"))
    assert {type(one) for one in checks_of("full")} == {type(one) for one in checks_of("soak")}
