"""Every metric is a number, NOT_APPLICABLE or UNKNOWN, and never a made-up zero."""

import time
from types import SimpleNamespace

import msgspec
import pytest
from hardware_tools import LOST, NO_FUNCTION, NO_PERMISSION, NOT_SUPPORTED, Bench

from meltcore.hardware.fake import HEALTHY, FakeNvml
from meltcore.hardware.gpm import MIN_WINDOW_S, GpmWindow
from meltcore.hardware.metrics import METRICS, NOT_APPLICABLE, UNKNOWN
from meltcore.hardware.nvml import NoDriverError, Nvml
from meltcore.hardware.products import Product, lacks
from meltcore.hardware.throttle import words

GPM_KEYS = [metric.key for metric in METRICS if metric.feature in ("gpm", "gpm_nvlink")]


def test_a_healthy_gpu_gives_a_number_for_every_metric() -> None:
    bench = Bench()
    time.sleep(MIN_WINDOW_S)
    found = bench.read()
    assert found.values == {metric.key: pytest.approx(HEALTHY[metric.key]) for metric in METRICS}
    assert found.gpm_window_s is not None
    assert found.gpm_window_s >= MIN_WINDOW_S
    assert (found.clock_reasons, found.xids, found.lost) == ([], [], False)


def test_unsupported_is_not_applicable_only_where_the_product_has_no_such_feature() -> None:
    refused = {"ecc_corrected": NOT_SUPPORTED, "memory_temperature_c": NOT_SUPPORTED, "temperature_c": NOT_SUPPORTED}
    gaming = Bench(name="NVIDIA GeForce RTX 4090", architecture=8, refused=refused).read().values
    server = Bench(name="NVIDIA H200", refused=refused).read().values
    assert (gaming["ecc_corrected"], gaming["memory_temperature_c"]) == (NOT_APPLICABLE, NOT_APPLICABLE)
    assert (server["ecc_corrected"], server["memory_temperature_c"]) == (UNKNOWN, UNKNOWN)
    assert gaming["temperature_c"] == UNKNOWN, "every product has a temperature"


@pytest.mark.parametrize("error", [NO_PERMISSION, NO_FUNCTION, 999])
def test_another_refusal_is_unknown_also_where_the_product_has_no_such_feature(error: int) -> None:
    values = Bench(name="NVIDIA GeForce RTX 4090", refused={"ecc_corrected": error}).read().values
    assert values["ecc_corrected"] == UNKNOWN


def test_one_unreadable_field_spoils_no_other() -> None:
    bench = Bench(refused={"power_w": NOT_SUPPORTED, "memory_used_bytes": NO_PERMISSION})
    time.sleep(MIN_WINDOW_S)
    unreadable = {key for key, value in bench.read().values.items() if value == UNKNOWN}
    assert unreadable == {"power_w", "memory_used_bytes", "memory_total_bytes"}, "memory is one question"


def test_not_a_number_is_unknown() -> None:
    assert Bench(readings={"temperature_c": float("nan")}).read().values["temperature_c"] == UNKNOWN


def test_gpm_is_not_applicable_before_hopper_and_unknown_where_hopper_refuses_it() -> None:
    ampere = Bench(name="NVIDIA A100-SXM4-80GB", architecture=7).read()
    assert {ampere.values[key] for key in GPM_KEYS} == {NOT_APPLICABLE}
    assert ampere.gpm_window_s is None
    hopper = Bench(refused={"gpm_supported": NO_PERMISSION}).read()
    assert {hopper.values[key] for key in GPM_KEYS} == {UNKNOWN}


def test_the_first_sample_right_after_the_start_has_no_gpm_window_yet() -> None:
    found = Bench().read()
    assert found.values["sm_active_percent"] == UNKNOWN
    assert found.gpm_window_s is None


@pytest.mark.parametrize("step_s", [0.02, 0.0999, 0.1001, 0.5])
def test_gpm_windows_are_long_enough_and_as_short_as_can_be(step_s: float) -> None:
    bench = Bench()
    window = GpmWindow(bench.nvml, bench.chosen)
    before = bench.nvml.gpm_buffers
    lengths = [window.read(place * step_s)[1] for place in range(30)]
    known = [length for length in lengths if length is not None]
    assert len(known) == sum(place * step_s >= MIN_WINDOW_S for place in range(30))
    assert all(MIN_WINDOW_S <= length < MIN_WINDOW_S + step_s for length in known)
    assert bench.nvml.gpm_buffers - before <= MIN_WINDOW_S / step_s + 3, "buffers are used again"


def test_gpm_that_stops_working_becomes_unknown_and_comes_back() -> None:
    bench = Bench()
    time.sleep(MIN_WINDOW_S)
    bench.gpu.refused["gpm_take"] = 999
    assert bench.read().values["sm_active_percent"] == UNKNOWN
    bench.gpu.refused.clear()
    assert bench.read().values["sm_active_percent"] == HEALTHY["sm_active_percent"]


def test_a_mig_slice_has_its_own_memory_and_counters_and_its_boards_clocks() -> None:
    bench = Bench("MIG-aa", slices={"MIG-aaaa": 7})
    time.sleep(MIN_WINDOW_S)
    values = bench.read().values
    assert bench.chosen.info.mig
    assert values["memory_total_bytes"] == HEALTHY["memory_total_bytes"] // 8
    assert values["sm_active_percent"] == HEALTHY["sm_active_percent"] / 8
    assert values["sm_clock_mhz"] == HEALTHY["sm_clock_mhz"]
    assert values["nvml_utilization_percent"] == NOT_APPLICABLE


def test_clock_reasons_come_as_words_and_a_new_one_by_its_number() -> None:
    assert words(0) == []
    assert words(0x1 | 0x4) == ["GPU_IDLE", "SW_POWER_CAP"]
    assert words(0x8 | 0x20 | 0x40 | 0x80) == [
        *("HW_SLOWDOWN", "SW_THERMAL_SLOWDOWN", "HW_THERMAL_SLOWDOWN", "HW_POWER_BRAKE"),
    ]
    assert words(0x2 | 0x10 | 0x100) == ["APPLICATION_CLOCKS", "SYNC_BOOST", "DISPLAY_CLOCKS"]
    assert words(1 << 40) == ["REASON_0x10000000000"]


def test_clock_reasons_that_cannot_be_read_are_unknown_not_none() -> None:
    assert Bench(refused={"clock_reasons": NOT_SUPPORTED}).read().clock_reasons == UNKNOWN


def test_an_xid_is_told_once() -> None:
    bench = Bench()
    bench.gpu.xids += [(0xFFFFFFFF, 31), (0xFFFFFFFF, 43)]
    assert bench.read().xids == [31, 43]
    assert bench.read().xids == []


def test_an_xid_of_another_mig_slice_is_not_this_ones() -> None:
    bench = Bench("MIG-aa", slices={"MIG-aaaa": 7, "MIG-bbbb": 8})
    bench.gpu.xids += [(8, 31), (7, 13), (0xFFFFFFFF, 79)]
    assert bench.read().xids == [13, 79]


@pytest.mark.parametrize("question", ["watch_xids", "next_xid"])
def test_a_watch_that_does_not_work_is_unknown_not_silence(question: str) -> None:
    bench = Bench(refused={question: NOT_SUPPORTED})
    bench.gpu.xids.append((0xFFFFFFFF, 31))
    bench.read()
    assert bench.read().xids == UNKNOWN


def test_a_lost_gpu_says_so() -> None:
    bench = Bench()
    assert not bench.read().lost
    bench.gpu.refused["temperature_c"] = LOST
    assert bench.read().lost


def test_a_sample_is_one_json_line_with_words_for_what_is_missing() -> None:
    line = msgspec.json.encode(Bench(refused={"power_w": NO_PERMISSION}).read())
    assert b"\n" not in line
    assert b'"power_w":"UNKNOWN"' in line


@pytest.mark.parametrize(
    ("name", "architecture", "lacking"),
    [
        ("NVIDIA H200", 9, set()),
        ("NVIDIA B200", 10, set()),
        ("NVIDIA Rubin R100", 13, set()),
        ("NVIDIA A100-SXM4-80GB", 7, {"gpm", "gpm_nvlink"}),
        ("NVIDIA L4", 8, {"gpm", "gpm_nvlink", "memory_temperature"}),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 10, {"gpm_nvlink", "memory_temperature"}),
        ("NVIDIA GeForce RTX 5090", 10, {"ecc", "gpm", "gpm_nvlink", "memory_temperature"}),
        ("Tesla P40", 4, {"energy", "gpm", "gpm_nvlink", "memory_temperature"}),
    ],
)
def test_the_product_table_knows_what_products_lack(name: str, architecture: int, lacking: set[str]) -> None:
    features = {metric.feature for metric in METRICS if metric.feature is not None}
    assert {feature for feature in features if lacks(Product(name, architecture), feature)} == lacking


def test_the_fake_answers_every_question_of_the_seam() -> None:
    questions = {name for name in vars(Nvml) if not name.startswith("_")}
    assert questions <= set(vars(FakeNvml))


def test_no_driver_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with pytest.raises(NoDriverError, match="no NVIDIA driver"):
        Nvml()


def test_a_field_is_read_by_its_type_and_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only decoding in the seam that the fake does not stand for."""
    import pynvml

    def field(kind: int, status: int, **value: float) -> SimpleNamespace:
        return SimpleNamespace(valueType=kind, nvmlReturn=status, value=SimpleNamespace(dVal=-1.0, **value))

    answers = [
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 0, uiVal=612_000),
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 0, ullVal=2**40),
        field(0, NOT_SUPPORTED),
        field(99, 0),
    ]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda board, ids: answers)
    power, energy, unsupported, strange = Nvml.fields(object.__new__(Nvml), None, [186, 83, 82, 1])
    assert (power, energy) == (612_000.0, 2.0**40)
    assert isinstance(unsupported, pynvml.NVMLError)
    assert unsupported.value == NOT_SUPPORTED
    assert isinstance(strange, pynvml.NVMLError)
