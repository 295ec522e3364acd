"""Every metric is a number, NOT_APPLICABLE or UNKNOWN, and never zero in place of these."""

import time
from types import SimpleNamespace

import msgspec
import pynvml
import pytest
from fake_gpu import HEALTHY, FakeNvml
from hardware_tools import LOST, NO_FUNCTION, NO_PERMISSION, NOT_SUPPORTED, FakeReader

from meltcore.common.gpus.driver import DriverStartError, NoDriverError, Nvml
from meltcore.common.gpus.gpu_types import GpuType, lacks_feature
from meltcore.common.gpus.metrics import METRICS, NOT_APPLICABLE, UNKNOWN, clock_reason_names
from meltcore.common.gpus.reader import MIN_GPM_WINDOW_S, GpmWindow

GPM_KEYS = [metric.key for metric in METRICS if metric.feature in ("gpm", "gpm_nvlink")]


def test_healthy_gpu_gives_a_number_for_every_metric() -> None:
    fake = FakeReader()
    time.sleep(MIN_GPM_WINDOW_S)
    found = fake.read()
    assert found.values == {metric.key: pytest.approx(HEALTHY[metric.key]) for metric in METRICS}
    assert found.gpm_window_s is not None
    assert found.gpm_window_s >= MIN_GPM_WINDOW_S
    assert (found.clock_reasons, found.xids, found.lost) == ([], [], False)


def test_unsupported_is_not_applicable_only_where_gpu_type_lacks_feature() -> None:
    refused = {"ecc_corrected": NOT_SUPPORTED, "memory_temperature_c": NOT_SUPPORTED, "temperature_c": NOT_SUPPORTED}
    gaming = FakeReader(name="NVIDIA GeForce RTX 4090", architecture=8, refused=refused).read().values
    server = FakeReader(name="NVIDIA H200", refused=refused).read().values
    assert (gaming["ecc_corrected"], gaming["memory_temperature_c"]) == (NOT_APPLICABLE, NOT_APPLICABLE)
    assert (server["ecc_corrected"], server["memory_temperature_c"]) == (UNKNOWN, UNKNOWN)
    assert gaming["temperature_c"] == UNKNOWN, "every GPU type has a temperature"


@pytest.mark.parametrize("error", [NO_PERMISSION, NO_FUNCTION, 999])
def test_other_error_is_unknown_also_where_gpu_type_lacks_feature(error: int) -> None:
    values = FakeReader(name="NVIDIA GeForce RTX 4090", refused={"ecc_corrected": error}).read().values
    assert values["ecc_corrected"] == UNKNOWN


def test_unreadable_field_does_not_affect_others() -> None:
    fake = FakeReader(refused={"power_w": NOT_SUPPORTED, "memory_used_bytes": NO_PERMISSION})
    time.sleep(MIN_GPM_WINDOW_S)
    unreadable = {key for key, value in fake.read().values.items() if value == UNKNOWN}
    assert unreadable == {"power_w", "memory_used_bytes", "memory_total_bytes"}, "memory is one call"


def test_nan_is_unknown() -> None:
    assert FakeReader(readings={"temperature_c": float("nan")}).read().values["temperature_c"] == UNKNOWN


def test_gpm_is_not_applicable_before_hopper_and_unknown_where_hopper_refuses() -> None:
    ampere = FakeReader(name="NVIDIA A100-SXM4-80GB", architecture=7).read()
    assert {ampere.values[key] for key in GPM_KEYS} == {NOT_APPLICABLE}
    assert ampere.gpm_window_s is None
    hopper = FakeReader(refused={"gpm_supported": NO_PERMISSION}).read()
    assert {hopper.values[key] for key in GPM_KEYS} == {UNKNOWN}


def test_first_sample_after_start_has_no_gpm_window() -> None:
    found = FakeReader().read()
    assert found.values["sm_active_percent"] == UNKNOWN
    assert found.gpm_window_s is None


@pytest.mark.parametrize("step_s", [0.02, 0.0999, 0.1001, 0.5])
def test_gpm_windows_are_minimal(step_s: float) -> None:
    fake = FakeReader()
    window = GpmWindow(fake.nvml, fake.chosen)
    before = fake.nvml.gpm_buffers
    lengths = [window.read(index * step_s)[1] for index in range(30)]
    known = [length for length in lengths if length is not None]
    assert len(known) == sum(index * step_s >= MIN_GPM_WINDOW_S for index in range(30))
    assert all(MIN_GPM_WINDOW_S <= length < MIN_GPM_WINDOW_S + step_s for length in known)
    assert fake.nvml.gpm_buffers - before <= MIN_GPM_WINDOW_S / step_s + 3, "buffers are reused"


def test_gpm_failure_is_unknown_until_it_works_again() -> None:
    fake = FakeReader()
    time.sleep(MIN_GPM_WINDOW_S)
    fake.gpu.refused["gpm_take"] = 999
    assert fake.read().values["sm_active_percent"] == UNKNOWN
    fake.gpu.refused.clear()
    assert fake.read().values["sm_active_percent"] == HEALTHY["sm_active_percent"]


def test_mig_device_has_its_own_memory_and_counters_and_gpu_clocks() -> None:
    fake = FakeReader("MIG-aa", mig_instances={"MIG-aaaa": 7})
    time.sleep(MIN_GPM_WINDOW_S)
    values = fake.read().values
    assert fake.chosen.info.mig
    assert values["memory_total_bytes"] == HEALTHY["memory_total_bytes"] // 8
    assert values["sm_active_percent"] == HEALTHY["sm_active_percent"] / 8
    assert values["sm_clock_mhz"] == HEALTHY["sm_clock_mhz"]
    assert values["nvml_utilization_percent"] == NOT_APPLICABLE


def test_clock_reasons_have_names_and_unknown_bits_numbers() -> None:
    assert clock_reason_names(0) == []
    assert clock_reason_names(0x1 | 0x4) == ["GPU_IDLE", "SW_POWER_CAP"]
    assert clock_reason_names(0x8 | 0x20 | 0x40 | 0x80) == [
        *("HW_SLOWDOWN", "SW_THERMAL_SLOWDOWN", "HW_THERMAL_SLOWDOWN", "HW_POWER_BRAKE"),
    ]
    assert clock_reason_names(0x2 | 0x10 | 0x100) == ["APPLICATION_CLOCKS", "SYNC_BOOST", "DISPLAY_CLOCKS"]
    assert clock_reason_names(1 << 40) == ["REASON_0x10000000000"]


def test_unreadable_clock_reasons_are_unknown() -> None:
    assert FakeReader(refused={"clock_reasons": NOT_SUPPORTED}).read().clock_reasons == UNKNOWN


def test_xid_is_reported_once() -> None:
    fake = FakeReader()
    fake.gpu.xids += [(0xFFFFFFFF, 31), (0xFFFFFFFF, 43)]
    assert fake.read().xids == [31, 43]
    assert fake.read().xids == []


def test_xid_of_another_mig_device_is_not_reported() -> None:
    fake = FakeReader("MIG-aa", mig_instances={"MIG-aaaa": 7, "MIG-bbbb": 8})
    fake.gpu.xids += [(8, 31), (7, 13), (0xFFFFFFFF, 79)]
    assert fake.read().xids == [13, 79]


@pytest.mark.parametrize("method", ["watch_xids", "next_xid"])
def test_failing_xid_watch_is_unknown(method: str) -> None:
    fake = FakeReader(refused={method: NOT_SUPPORTED})
    fake.gpu.xids.append((0xFFFFFFFF, 31))
    fake.read()
    assert fake.read().xids == UNKNOWN


def test_lost_gpu_is_marked() -> None:
    fake = FakeReader()
    assert not fake.read().lost
    fake.gpu.refused["temperature_c"] = LOST
    assert fake.read().lost


def test_sample_is_one_json_line_with_unknown_for_missing_values() -> None:
    line = msgspec.json.encode(FakeReader(refused={"power_w": NO_PERMISSION}).read())
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
def test_gpu_type_table_lists_lacking_features(name: str, architecture: int, lacking: set[str]) -> None:
    features = {metric.feature for metric in METRICS if metric.feature is not None}
    assert {feature for feature in features if lacks_feature(GpuType(name, architecture), feature)} == lacking


def test_fake_implements_every_method_of_nvml() -> None:
    methods = {name for name in vars(Nvml) if not name.startswith("_")}
    assert methods <= set(vars(FakeNvml))


@pytest.mark.parametrize(
    ("code", "is_absent", "text"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, "no NVIDIA driver here .*docker run --gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, True, "no NVIDIA driver here .*load the driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, False, "does not start: .*version mismatch; .*: reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, False, "does not start: Insufficient Permissions; give .*access"),
        (pynvml.NVML_ERROR_UNKNOWN, False, "does not start: Unknown Error; look in the kernel log"),
    ],
)
def test_faulty_driver_is_not_a_missing_one(
    code: int, is_absent: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(DriverStartError, match=text) as error:
        Nvml()
    assert isinstance(error.value, NoDriverError) == is_absent


def test_field_is_read_by_its_type_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only decoding in the driver module that the fake does not replace."""

    def field(kind: int, status: int, **value: float) -> SimpleNamespace:
        return SimpleNamespace(valueType=kind, nvmlReturn=status, value=SimpleNamespace(dVal=-1.0, **value))

    results = [
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 0, uiVal=612_000),
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 0, ullVal=2**40),
        field(0, NOT_SUPPORTED),
        field(99, 0),
    ]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda device, ids: results)
    power, energy, unsupported, strange = Nvml.fields(object.__new__(Nvml), None, [186, 83, 82, 1])
    assert (power, energy) == (612_000.0, 2.0**40)
    assert isinstance(unsupported, pynvml.NVMLError)
    assert unsupported.value == NOT_SUPPORTED
    assert isinstance(strange, pynvml.NVMLError)
