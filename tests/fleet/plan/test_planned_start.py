"""What `up` starts: each engine on its GPUs with its budget, and nothing where the fleet does not fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.process import call_with_timeout
from meltcore.common.sizes import GIB
from meltcore.engine.memory import memory_needs
from meltcore.fleet.admin.operations import check_startable, check_unchanged
from meltcore.fleet.plan import measured
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.planned import FleetPlanner, does_not_fit, find_plan
from meltcore.fleet.plan.running_fleet import Running
from meltcore.fleet.plan.site import OneMachine
from meltcore.fleet.run.engines import place_replicas
from meltcore.settings.fleet_file import parse_fleet
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

QWEN = "checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, max_model_len: 4096, max_num_seqs: 4"


def machine(*gib: float, used_gib: float = 0.5, host_gib: float = 64) -> Machine:
    gpus = (VisibleGpu(at, "NVIDIA Scripted", int(size * GIB), int(used_gib * GIB)) for at, size in enumerate(gib))
    return Machine(tuple(gpus), "570.1", int(host_gib * GIB))


def planned(text: str, there: Machine) -> FleetSpec:
    found = find_plan(parse_fleet(text), OneMachine.of(there), print)
    if found.plan is None:
        raise ConfigError(does_not_fit(found, there))
    return found.spec


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ("device: [0, 1], replicas: 2", [["4"], ["GPU-5"]]),
        ("device: [3, 1], replicas: 2", [["7"], ["GPU-5"]]),
        ("device: [0, 1, 2, 3], replicas: 2, tensor_parallel_size: 2", [["4", "GPU-5"], ["6", "7"]]),
        ("device: [1, 3], tensor_parallel_size: 2", [["GPU-5", "7"]]),
        ("device: [2], replicas: 2", [["6"], ["6"]]),  # they share it
        ("replicas: 4", [["4"], ["GPU-5"], ["6"], ["7"]]),
    ],
)
def test_replicas_get_the_gpus_of_the_file(fields: str, gpus: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6,7")
    spec = planned(f"models: {{a: {{{QWEN}, {fields}}}}}", machine(40, 40, 40, 40))
    replicas = place_replicas(PlacedFleet(spec), "a")
    assert [each.environment["CUDA_VISIBLE_DEVICES"].split(",") for each in replicas] == gpus
    assert [each.gpu_names for each in replicas] == [frozenset(names) for names in gpus]
    assert {each.engine.device for each in replicas} == {"cuda"}
    assert {each.engine.memory_bytes for each in replicas} == {spec.models["a"].memory} != {None}


def test_gpu_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"models\.a\.device: got GPU 1; 1 is visible, numbered from 0"):
        planned(f"models: {{a: {{{QWEN}, device: [0, 1], replicas: 2}}}}", machine(40))
    with pytest.raises(ConfigError, match=r"gpus\[0\]\.id: got 2; 1 is visible"):
        planned(f"gpus: [{{id: 2}}]\nmodels: {{a: {{{QWEN}}}}}", machine(40))
    unplanned = PlacedFleet(FleetSpec(models={"a": ModelSection(checkpoint="m", device=(1,))}))
    with pytest.raises(ConfigError, match=r"models\.a\.device: got GPU 1; 1 are visible"):
        place_replicas(unplanned, "a")


@pytest.mark.slow
def test_more_memory_than_there_is_ends_before_anything_starts(tmp_path: Path) -> None:
    text = f"models: {{a: {{{QWEN}, max_num_seqs: 512}}, b: {{checkpoint: x, url: 'http://h'}}}}"
    text = text.replace("max_num_seqs: 4, ", "").replace("checkpoint: x, ", "")
    with pytest.raises(ConfigError) as error:
        planned(text, machine(24, used_gib=4))
    assert "on GPUs it needs a 2" in str(error.value)
    assert "GPU 0 20.62 GiB (others use 3.38 GiB more)" in str(error.value)
    assert "The nearest plan that fits: models.a.max_num_seqs: " in str(error.value)
    with pytest.raises(ConfigError, match=r"there is GPU 0 8 GiB \(its `memory` under `gpus` is the limit\)"):
        planned(f"gpus: [{{id: 0, memory: 8GiB}}]\n{text}", machine(24, used_gib=4))
    with pytest.raises(ConfigError, match=r"No plan fits, .*: remove a model or add a GPU"):
        planned("models: {a: {checkpoint: meltcore/sums, memory: 90GiB}}", machine(80))
    turns = f"models: {{a: {{{QWEN}, residency: sleepable}}, b: {{{QWEN}, residency: sleepable}}}}"
    planned(turns, machine(6.25, host_gib=3))
    with pytest.raises(
        ConfigError, match=r"weights of models that sleep 2\.\d+ GiB pinned, .*`residency: \{keep: disk\}`"
    ):
        planned(turns, machine(6.25, host_gib=2))
    planned(f"residency: {{keep: disk}}\n{turns}", machine(6.25, host_gib=2))
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {a: {checkpoint: meltcore/sums, device: cpu, memory: 4000GiB}}")
    state = tmp_path / "state"
    command = [sys.executable, "-m", "meltcore.cli.main", "up", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=_environment(state), check=False)
    assert done.returncode == 2
    assert "its models on the CPU need 4,000.75 GiB of host memory" in done.stderr
    assert done.stdout == ""
    assert not state.exists()


def _environment(state: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(state), "CUDA_VISIBLE_DEVICES": ""}


def test_without_a_gpu_models_get_budgets_of_host_memory() -> None:
    text = "models: {a: {checkpoint: meltcore/sums, max_num_seqs: 8}, b: {checkpoint: meltcore/sums, replicas: 2}}"
    config = planned(text, machine(host_gib=8))
    assert [model.device for model in config.models.values()] == ["cpu", "cpu"]
    assert all(0 < (model.memory or 0) < GIB for model in config.models.values())
    with pytest.raises(ConfigError, match=r"models on the CPU need 2\.\d+ GiB of host memory, and 1\.50 GiB are avail"):
        planned(text, machine(host_gib=1.5))
    with pytest.raises(ConfigError, match=r"models\.a\.tensor_parallel_size: got 2; this machine has no GPU"):
        planned("models: {a: {checkpoint: meltcore/sums, tensor_parallel_size: 2}}", machine())
    with pytest.raises(ConfigError, match=r"models\.a\.device: got cuda; this machine has no GPU"):
        planned("models: {a: {checkpoint: meltcore/sums, device: cuda}}", machine())


def test_model_of_unknown_size_is_left_to_its_engine() -> None:
    lines: list[str] = []
    spec = parse_fleet("models: {gone: {checkpoint: /none}, a: {checkpoint: meltcore/sums}}")
    config = find_plan(spec, OneMachine.of(machine(24)), lines.append).spec
    assert lines == [line for line in lines if line.startswith("models.gone is not in the plan: /none")]
    assert len(lines) == 1
    assert [model.memory is None for model in config.models.values()] == [True, False]


def test_hub_that_does_not_answer_holds_up_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asked for one model after another, each many times, and printed nothing for minutes."""
    released, asked, lines = threading.Event(), list[str](), list[str]()

    def open_checkpoint(name: str, **_: object) -> None:
        asked.append(name)
        released.wait()

    monkeypatch.setattr(memory_needs, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(memory_needs, "recognized_task", lambda *_, **__: None)
    monkeypatch.setattr(memory_needs, "_NOTICE_S", 0.05)
    text = "timeouts: {start_s: 0.1}\nmodels: {a: {checkpoint: far/a}, b: {checkpoint: far/b, memory: 4GiB}}"
    try:
        found = find_plan(parse_fleet(text), OneMachine.of(machine(40)), lines.append)
    finally:
        released.set()
        memory_needs.forget_failures()
    assert found.plan is not None
    assert sorted(asked) == ["far/a", "far/b"]
    assert lines == [
        "asking the hub for far/a, far/b",
        "models.a is not in the plan: far/a: the hub has not sent its configuration within 0.1 s",
    ]


@pytest.mark.parametrize("fields", ["", ", memory: 1GiB", ", shapes: Qwen/Qwen3-0.6B, load_format: dummy"])
@pytest.mark.parametrize("command", ["plan", "up"])
def test_checkpoint_that_hangs_ends_a_plan_at_its_limit(
    command: str, fields: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a mount whose server is gone: `plan` and `up` waited for ever, without a word."""
    far, file = tmp_path / "far", tmp_path / "fleet.yaml"
    far.mkdir()
    os.mkfifo(far / "config.json")
    file.write_text(f"timeouts: {{start_s: 0.1}}\nmodels: {{far: {{checkpoint: {far}, device: cpu{fields}}}}}")
    monkeypatch.setattr(memory_needs, "_NOTICE_S", 0.05)
    try:
        assert call_with_timeout(WAIT_S, lambda: main([command, str(file)])) == 2
    finally:
        memory_needs.forget_failures()
    assert capsys.readouterr().err.splitlines() == [
        f"meltcore: models.far: reading {far}",
        f"meltcore {command}: models.far: {far} was not read within 0.1 s (timeouts.start_s)",
    ]


@pytest.mark.parametrize(
    ("there", "fits", "says"),
    [
        (machine(8), True, "The fleet fits on GPU 0"),
        (machine(8, used_gib=4), False, "Other processes use 3.38 GiB of GPU 0, which the plan leaves to them."),
        (machine(8, 8), True, "GPU 1 is idle"),
        (machine(host_gib=32), True, "this machine has no NVIDIA GPU, so this is the plan of its CPUs"),
        (machine(host_gib=4), False, "DOES NOT FIT"),
    ],
)
def test_plan_of_this_machine_is_that_of_up(
    there: Machine,
    fits: bool,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{a: {{{QWEN}}}, gone: {{checkpoint: /none}}}}")
    monkeypatch.setattr("meltcore.fleet.plan.machine.read_machine", lambda: there)
    assert main(["plan", str(file)]) == (0 if fits else 1)
    printed = capsys.readouterr()
    assert says in " ".join(f"{printed.out} {printed.err}".split())
    assert "models.gone is not in the plan: /none" in printed.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(gpu.number) for gpu in there.gpus))
    if fits:
        placed = FleetPlanner(file, lambda _: OneMachine.of(there)).config()
        assert placed.places == {"a": (Place("", (0,) if there.gpus else ()),)}
        assert placed.spec.models["a"].device == ((0,) if there.gpus else "cpu")
    else:
        with pytest.raises(ConfigError, match="the fleet does not fit"):
            FleetPlanner(file, lambda _: OneMachine.of(there)).config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "checkpoint: meltcore/tones, task: synthesis",
            "got synthesis; meltcore/tones is a model of task transcription",
        ),
        ("checkpoint: meltcore/sums, task: translation, memory: 1GiB", "got translation; .* of task generation"),
        ("checkpoint: meltcore/tones", r"got generation \(the default\); .*: write `task: transcription`"),
        ("checkpoint: meltcore/voice, task: translation", "got translation; .* of task synthesis"),
        (
            "checkpoint: no/1, shapes: ai4bharat/IndicF5",
            "got generation .*; ai4bharat/IndicF5 is a model of task synthesis",
        ),
        ("checkpoint: FOLDER/a.nemo, memory: 1GiB", r"got generation .*a\.nemo is a model of task transcription"),
    ],
)
def test_task_that_is_not_the_checkpoints_ends_plan_up_and_reload(
    fields: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.nemo").touch()
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{t: {{{fields.replace('FOLDER', str(tmp_path))}, device: cpu}}}}")
    for command in (["plan", str(file), "--vram", "80"], ["plan", str(file)], ["up", str(file)]):
        assert main(command) == 2
        output = capsys.readouterr()
        assert re.search(rf"models\.t\.task: {message}", " ".join(output.err.split()))
        assert output.out == ""
    with pytest.raises(ConfigError, match=r"models\.t\.task: got "):
        FleetPlanner(file, lambda _: OneMachine.of(machine())).config()  # as a reload reads the file


def test_reload_plans_for_the_memory_of_the_start(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {a: {checkpoint: meltcore/sums, device: cpu, memory: 1GiB}}")
    planner = FleetPlanner(file, lambda _: OneMachine.of(machine(host_gib=4)))
    first = planner.config()
    assert planner.config() == first
    file.write_text("models: {a: {checkpoint: meltcore/sums, device: cpu, memory: 5GiB}}")
    with pytest.raises(ConfigError, match="the fleet does not fit"):
        planner.config()


def test_reload_keeps_models_that_did_not_change_in_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    file = tmp_path / "fleet.yaml"
    small, pinned = f"a: {{{QWEN}, memory: 4GiB}}", f"p: {{{QWEN}, memory: 4GiB, device: [1]}}"
    file.write_text(f"models: {{{small}, {pinned}}}")
    planner = FleetPlanner(file, lambda _: OneMachine.of(machine(40, 40)))
    first = planner.config()
    assert first.places == {"a": (Place("", (0,)),), "p": (Place("", (1,)),)}
    first = msgspec.structs.replace(first, spec=check_startable(first.spec))
    running = Running(first, {("a", 0): Place("", (0,)), ("p", 0): Place("", (1,))})

    # By itself a larger model comes first, on GPU 0. What runs keeps its place, and the very same settings.
    file.write_text(f"models: {{{small}, b: {{{QWEN}, memory: 36GiB}}}}")
    assert [model.device for model in planner.config().spec.models.values()] == [(1,), (0,)]
    file.write_text(f"models: {{{small}, b: {{{QWEN}, memory: 36GiB}}}}")
    second = planner.config(running=running)
    assert (second.spec.models["a"], second.places["a"]) == (first.spec.models["a"], first.places["a"])
    assert (second.spec.models["b"].device, second.places["b"]) == ((1,), (Place("", (1,)),))
    file.write_text(f"models: {{{small}, {pinned}, b: {{{QWEN}, memory: 38GiB}}}}")
    with pytest.raises(ConfigError, match=r"Models that did not change stay where they are \(a, p\)\. No plan fits"):
        planner.config(running=running)

    # Another budget, or GPUs that the file no longer allows: it is another model.
    for change in (small.replace("4GiB", "5GiB"), small.replace("4GiB", "4GiB, device: [1]")):
        file.write_text(f"models: {{b: {{{QWEN}, memory: 36GiB, device: [0]}}, {change}}}")
        assert planner.config(running=running).spec.models["a"].device == (1,)


def test_reload_may_change_the_room_for_models_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{a: {{{QWEN}}}}}")
    planner = FleetPlanner(file, lambda _: OneMachine.of(machine(80)))
    first = planner.config()
    file.write_text(f"models: {{a: {{{QWEN}}}, b: {{{QWEN}}}}}")
    second = planner.config()
    assert second.room_bytes["0"] < first.room_bytes["0"]
    check_unchanged(first.spec, second.spec)
    file.write_text(f"residency: {{turn_s: 7}}\nmodels: {{a: {{{QWEN}}}}}")
    with pytest.raises(ConfigError, match=r"and residency\.turn_s changed"):
        check_unchanged(first.spec, planner.config().spec)
    file.write_text(f"gpus: [{{id: 0}}]\nmodels: {{a: {{{QWEN}}}}}")
    with pytest.raises(ConfigError, match="and gpus changed"):
        check_unchanged(first.spec, planner.config().spec)


def test_planned_settings_survive_the_way_to_a_daemon() -> None:
    spec = planned(f"models: {{a: {{{QWEN}, device: [0, 1], replicas: 2}}}}", machine(40, 40))
    placed = PlacedFleet(spec, {"a": (Place("", (0,)), Place("", (1,)))}, {"0": 3})
    assert msgspec.json.decode(json.dumps(msgspec.to_builtins(placed)), type=PlacedFleet) == placed


def test_ps_shows_planned_bytes_beside_those_of_nvml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = VisibleGpu(0, "NVIDIA Scripted", 80 * GIB, 13 * GIB)
    monkeypatch.setattr(measured, "read_gpus", lambda: ((gpu,), "570.1"))
    monkeypatch.setattr(measured, "process_bytes", lambda: {7: 10 * GIB, 9: GIB})
    row = {"model": "a", "replica": 0, "state": "ready", "status": "ready", "reason": "", "restarts": 0}
    row |= {"open_requests": 0, "port": 1, "log": "", "node": None}
    engine = row | {"task": "generation", "pid": 7, "memory_bytes": 10 * GIB, "gpus": 1}
    hidden = row | {"task": "transcription", "pid": 8, "memory_bytes": GIB, "gpus": 1}
    on_cpu = row | {"task": "generation", "pid": 9, "memory_bytes": GIB, "gpus": 0}
    monkeypatch.setattr("meltcore.fleet.daemon.find_fleet", lambda _: SimpleNamespace(admin=""))
    monkeypatch.setattr(
        "meltcore.fleet.admin.admin.call_admin", lambda *_: [dict(each) for each in (engine, hidden, on_cpu)]
    )
    assert main(["ps", "--nvml"]) == 0
    *table, total = capsys.readouterr().out.splitlines()
    assert [re.findall(r"[\d.]+ GiB|-(?= )", line) for line in table[-3:]] == [
        ["10 GiB", "10.78 GiB", "10 GiB"],
        ["1 GiB", "1.78 GiB", "-"],
        ["1 GiB", "-", "-"],
    ]
    assert total.startswith("GPU: 13.19 GiB planned with driver and contexts, 13 GiB in use by NVML (-1.4%). Of each")
    monkeypatch.setattr(measured, "read_gpus", lambda: ((), ""))
    assert main(["ps", "--nvml"]) == 2
