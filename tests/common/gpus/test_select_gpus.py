"""Which GPUs are read: --gpu, else CUDA_VISIBLE_DEVICES, else all."""

import threading

import pytest
from fake_gpu import FakeGpu, FakeNvml
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.driver import NvmlWithTimeout
from meltcore.common.gpus.select import select_gpus

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"]


def chosen(requested: str | None = None, gpus: list[FakeGpu] | None = None, **environment: str) -> list[str]:
    machine = gpus or [
        FakeGpu(uuid=uuid, mig_instances={"MIG-1111": 1, "MIG-2222": 2} if index == 2 else {})
        for index, uuid in enumerate(UUIDS)
    ]
    return [gpu.info.uuid for gpu in select_gpus(FakeNvml(machine), requested, environment)]


def test_all_gpus_by_default() -> None:
    assert chosen() == UUIDS


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("0,2", [UUIDS[0], UUIDS[2]]),
        ("2, 0", [UUIDS[2], UUIDS[0]]),
        ("1,1,GPU-aaaa2", [UUIDS[1]]),
        ("GPU-b", [UUIDS[2]]),
        ("MIG-2222,0", ["MIG-2222", UUIDS[0]]),
        ("MIG-GPU-bbbb3333/1/0", ["MIG-1111"]),
    ],
)
def test_gpus_are_named_by_index_uuid_or_prefix(requested: str, expected: list[str]) -> None:
    assert chosen(requested) == expected
    assert chosen(None, CUDA_VISIBLE_DEVICES=requested) == expected


@pytest.mark.parametrize("call", ["architecture", "name", "uuid"])
@pytest.mark.parametrize(("requested", "indices"), [(None, [0, 1, 2]), ("0", [0]), ("2,1", [2, 1]), ("GPU-b", [2])])
def test_gpu_about_which_the_driver_hangs_hinders_no_other(
    call: str, requested: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeNvml([FakeGpu(uuid=uuid) for uuid in UUIDS])
    answers, answer = threading.Event(), getattr(machine, call)
    hanging = machine.device(1)
    monkeypatch.setattr(machine, call, lambda gpu: (gpu is not hanging or answers.wait(WAIT_S)) and answer(gpu))
    for split_mig in (False, True):
        timed = NvmlWithTimeout(machine, limit_s=0.05)
        found = select_gpus(timed, requested, {"CUDA_VISIBLE_DEVICES": "0"}, split_mig=split_mig)
        expected = [0] if requested is None else indices
        assert [(gpu.info.index, gpu.info.answers) for gpu in found] == [(index, index != 1) for index in expected]
    assert [gpu.info.index for gpu in select_gpus(timed, None, {})] == [0, 1, 2]
    answers.set()


def test_named_gpus_override_visible_ones() -> None:
    assert chosen("0", CUDA_VISIBLE_DEVICES="2") == [UUIDS[0]]


def test_visible_gpus_end_at_negative_index_as_in_cuda() -> None:
    assert chosen(CUDA_VISIBLE_DEVICES="1,-1,2") == [UUIDS[1]]
    assert chosen(CUDA_VISIBLE_DEVICES="1,,2") == [UUIDS[1]]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_nothing_visible_is_an_error(visible: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        chosen(CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("3", "there are GPUs 0 to 2"),
        ("GPU-aaaa", "which matches 2 GPUs"),
        ("GPU-cccc", r"which matches no GPU; there are 0 \(GPU-aaaa1111\), 1 \(GPU-aaaa2222\)"),
        ("0-2", "names '0-2', which matches no GPU; there are 0 "),
        ("all", "which matches no GPU"),
        ("-1", "which matches no GPU"),
        ("MIG-GPU-bbbb3333/7/0", "which matches no GPU"),
        ("MIG-GPU-aaaa1111/1/0", "which matches no GPU"),
        ("", "--gpu holds an empty name"),
        ("MIG-9", "which matches no GPU; there are MIG-1111, MIG-2222"),
        ("0,", "--gpu holds an empty name"),
    ],
)
def test_name_that_matches_no_gpu_or_several_is_an_error(requested: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(requested)


def test_indices_among_different_gpus_need_bus_order() -> None:
    """CUDA counts by speed then, and NVML by bus: the index would name another GPU than the program uses."""
    unlike = [FakeGpu(uuid="GPU-1", name="NVIDIA T4"), FakeGpu(uuid="GPU-2")]
    with pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        chosen(gpus=unlike, CUDA_VISIBLE_DEVICES="0")
    assert chosen(gpus=unlike, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-1"]
    assert chosen(gpus=unlike, CUDA_VISIBLE_DEVICES="GPU-2") == ["GPU-2"]


def test_machine_without_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="sees no GPU"):
        select_gpus(FakeNvml([]), None, {})


def test_mig_device_has_gpu_index_and_instance() -> None:
    machine = FakeNvml([FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1", mig_instances={"MIG-1": 5})])
    (gpu,) = select_gpus(machine, "MIG-1", {})
    assert (gpu.info.index, gpu.info.mig, gpu.gpu_instance) == (1, True, 5)


def test_split_mig_replaces_gpu_by_its_mig_devices() -> None:
    machine = FakeNvml([FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1", mig_instances={"MIG-1": 5, "MIG-2": 6})])

    def runnable(requested: str | None) -> list[str]:
        return [gpu.info.uuid for gpu in select_gpus(machine, requested, {}, split_mig=True)]

    assert runnable(None) == ["GPU-0", "MIG-1", "MIG-2"]
    assert runnable("MIG-2,1") == ["MIG-2", "MIG-1"]
    assert runnable("0") == ["GPU-0"]
