"""The life of a replica: each row of its table is reached by a model with scripted processes, and no other row is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from places import ROOT
from replica_picture import NARROW, WIDE, Layout, picture
from waiting import until

from meltcore.common.errors import ConfigError, EngineDeadError, EnginePendingError
from meltcore.fleet.admin.operations import FleetOperations
from meltcore.fleet.plan.placement import engine_config
from meltcore.fleet.run import served_model, supervised_model, upstream_model
from meltcore.fleet.run.replica import LIFE, BaseReplica, Replica, ReplicaEvent, ReplicaState
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.run.start_gate import StartGate
from meltcore.fleet.run.supervised_model import ServerContext
from meltcore.fleet.run.upstream_model import UpstreamModel
from meltcore.fleet.swap.sleep import put_to_sleep, wake_up
from meltcore.protocol.generation import GenerationReady
from meltcore.protocol.shell import Asleep, Awake, Sleep
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import ModelSection, TimeoutsSection

LIMITS = GenerationReady("CPU", "float32", "dummy", [], 0.0, 64, 8, 300, 64, 64, ["float32"], "float32", "none")
ROWS = [(state, event) for state, events in LIFE.items() for event in events]
STATES: list[ReplicaState] = list(get_args(ReplicaState))
EVENTS: list[ReplicaEvent] = [event for part in get_args(ReplicaEvent) for event in get_args(part)]
LONG_S = 1000.0
AWAKE_STATES = ("waiting", "pending", "loading", "pausing")


class Process:
    """An engine, or a server that a command starts. A test decides what becomes of it."""

    loaded = pid = node = None
    cpus = ()

    def __init__(self, on_message: Any) -> None:
        loop = asyncio.get_running_loop()
        self.placed, self.ready, self.ended = loop.create_future(), loop.create_future(), loop.create_future()
        self.answers: asyncio.Queue[str | None] = asyncio.Queue()  # why it cannot sleep or wake; None: it can
        self.is_evicted = False
        self.problem = ""  # of its GPU's sharing
        self._on_message = on_message

    async def prepare(self) -> None:
        await self.placed

    async def start(self) -> Any:
        await asyncio.wait({self.ready, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise EngineDeadError(self.ended.result())
        return self.ready.result()

    async def sharing_problem(self) -> str:
        return self.problem

    async def wait(self) -> str:
        return str(await asyncio.shield(self.ended))

    async def stop(self) -> None:
        self.die("stopped")

    async def leave(self) -> None:
        """Nothing is left of it."""

    wait_freed = leave

    def die(self, reason: str = "a fault", *, is_evicted: bool = False) -> None:
        if not self.ended.done():
            self.is_evicted = is_evicted
            self.ended.set_result(reason)

    def send(self, message: Any) -> None:
        async def answer() -> None:
            error = await self.answers.get()
            self._on_message(Asleep(0, 0.0, 7, error) if isinstance(message, Sleep) else Awake(0.0, 0, error))

        self._asked = asyncio.create_task(answer())

    async def post(self, _path: str, _limit_s: float) -> None:
        if (error := await self.answers.get()) is not None:
            raise ConfigError(error)

    def log_tail(self) -> str:
        return "its last line"


class Policy(RestartAfterPause):
    """Restarts after the pause that a test sets; an engine serves without a probe."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = [0.0]

    def pause_s(self, deaths: Any) -> float | None:
        return self.pauses[-1]

    async def prove(self, probe: Any, left_s: float) -> None:
        """An engine that is scripted answers."""


class Life:
    """A model with one replica, and what its table has been asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, upstream: bool = False) -> None:
        self.seen: list[tuple[ReplicaState, ReplicaEvent]] = []
        self.processes: list[Process] = []
        self.policy, self.pool, self.log = Policy(), Mock(num_models=1), Mock()
        self.tasks: list[asyncio.Task[Any]] = []
        apply = BaseReplica.apply

        def record(replica: BaseReplica[Any], event: ReplicaEvent) -> None:
            before = replica.state
            apply(replica, event)
            assert replica.state == LIFE[before][event]
            self.seen.append((before, event))

        monkeypatch.setattr(BaseReplica, "apply", record)
        monkeypatch.setattr(supervised_model, "ROOM_POLL_S", 0.0)
        monkeypatch.setattr(served_model, "ROOM_POLL_S", 0.0)
        monkeypatch.setattr(upstream_model, "UpstreamProcess", lambda *_: self.new_process(Mock()))
        self.stats = ServerStats().models[0]
        parts = ServerContext(
            pool=self.pool,
            gate=StartGate(),
            log=self.log,
            report=Mock(),
            sockets=folder,
            next_engine=itertools.count().__next__,
            launcher=SimpleNamespace(problem="", new_engine=lambda *call: self.new_process(call[3])),  # type: ignore[arg-type]
            policy=self.policy,
            timeouts=TimeoutsSection(),
            log_folder=folder,
        )
        self.model: ServedModel | UpstreamModel
        if upstream:
            command = ModelSection(command="x {port}", residency="sleepable", sleep_mode="vllm")
            self.model = UpstreamModel(0, "far", command, self.stats, parts)
        else:
            near = ModelSection(checkpoint="near", device="cpu", residency="sleepable")
            replica = Replica(index=0, log=None, engine=engine_config(near))
            self.model = ServedModel(0, "near", near, None, [replica], self.stats, parts)
        self.processes.clear()  # the first one is never started
        self.replica = self.model.replicas[0]
        self.model.may_run.set()

    def new_process(self, on_message: Any) -> Process:
        self.processes.append(Process(on_message))
        return self.processes[-1]

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def run(self, action: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(asyncio.create_task(action))

    def replace(self) -> None:
        self.run(self.model.replace_engines(LONG_S))

    def sleep(self) -> None:
        self.run(put_to_sleep(self.model, "host", LONG_S))

    def wake(self) -> None:
        self.run(wake_up(self.model, 600.0))

    async def is_in(self, state: ReplicaState) -> None:
        await until(lambda: self.replica.state == state, f"{state}; it is {self.replica.state}", 20.0)

    async def load(self) -> None:
        num = len(self.processes)
        await until(lambda: len(self.processes) > num or not self.process.placed.done(), "a process", 20.0)
        self.process.placed.set_result(None)
        await self.is_in("loading")
        self.process.ready.set_result(LIMITS)
        await self.is_in("ready")

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.process.die()
        await self.model.stop()


async def reach(life: Life, state: ReplicaState, event: ReplicaEvent) -> None:
    """Bring a replica to a state, such that the event can follow."""
    process_states = ("waiting", "pending", "loading")
    life.run(life.model._start_all())
    await until(lambda: life.processes, "the first process", 20.0)
    if state == "waiting":
        return
    if state == "pending":
        life.process.placed.set_exception(EnginePendingError("no room"))
        await until(lambda: len(life.processes) == 2, "another try", 20.0)
        assert life.replica.reason == "no room"
    elif state in process_states:
        life.process.placed.set_result(None)
    elif state in ("pausing", "failed"):
        life.policy.pauses.append({"failed": None, "pausing": 0.0 if event == "start" else LONG_S}[state])
        life.process.placed.set_result(None)
        life.process.die()
    else:
        await life.load()
    if state in ("draining", "sleeping", "unloaded"):
        life.stats.assign(0, 1)
        is_replaced = state == "draining" and event in ("died", "unplaced", "gave up", "replace")
        life.replace() if is_replaced else life.sleep()
        await life.is_in("draining")
    if state in ("sleeping", "unloaded"):
        life.stats.unassign(0, 1)
        life.process.answers.put_nowait(None if state == "sleeping" else "no sleep mode")
    if state == "sleeping" and event in ("woke", "died", "unplaced", "gave up"):
        await life.is_in("sleeping")
        life.wake()
        await until(life.model.may_run.is_set, "it may run", 20.0)
    if (state, event) != ("pausing", "start"):
        await life.is_in(state)


async def make(life: Life, state: ReplicaState, event: ReplicaEvent) -> None:
    """Let the event happen to a replica in the state."""
    process = life.process
    if event == "gave up":
        life.policy.pauses.append(None)
    if event == "died asleep":
        life.model.may_run.clear()
    if event in ("died", "died asleep", "gave up", "unplaced"):
        if state in ("waiting", "pending"):
            process.placed.set_exception(
                EnginePendingError("no room") if event == "unplaced" else EngineDeadError("its node is gone")
            )
        else:
            process.die(is_evicted=event == "unplaced")
    elif event == "start":
        if state == "unloaded":
            life.wake()
    elif event == "placed":
        process.placed.set_result(None)
    elif event == "loaded":
        process.ready.set_result(LIMITS)
    elif event in ("slept", "woke"):
        if event == "slept":
            life.stats.unassign(0, 1)
        process.answers.put_nowait(None)
    elif event == "drain":
        life.stats.assign(0, 1)
        life.replace()
    elif event == "unload":
        if state == "draining":
            life.stats.unassign(0, 1)
            process.answers.put_nowait("no sleep mode")
        elif state in AWAKE_STATES:
            life.sleep()
        else:
            life.model.may_run.clear()
            life.replace()
    elif (
        state == "ready"
    ):  # it has died while it was drained to be replaced, and is back before its requests have ended
        life.stats.assign(0, 1)
        life.replace()
        await life.is_in("draining")
        process.die()
        await until(lambda: life.process is not process, "another process", 20.0)
        await life.load()
        life.stats.unassign(0, 1)
    elif state == "draining":
        life.stats.unassign(0, 1)
    else:
        life.replace()


@pytest.mark.parametrize(("state", "event"), ROWS)
def test_each_row_is_reached(
    state: ReplicaState, event: ReplicaEvent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def live() -> None:
        life = Life(monkeypatch, tmp_path)
        try:
            await reach(life, state, event)
            await make(life, state, event)
            await until(lambda: (state, event) in life.seen, f"the row; it had {life.seen}", 20.0)
            await asyncio.sleep(0)
            assert not [task for task in life.tasks if task.done() and isinstance(task.exception(), ValueError)]
        finally:
            await life.end()

    asyncio.run(live())


def test_other_events_are_refused() -> None:
    for state, event in itertools.product(STATES, EVENTS):
        replica = BaseReplica[Any](index=3, log=None, state=state)
        if (state, event) in ROWS:
            replica.apply(event)
            assert replica.state == LIFE[state][event]
            continue
        with pytest.raises(ValueError, match=f"replica 3 is {state}, and '{event}' cannot happen there"):
            replica.apply(event)
        assert replica.state == state


def test_error_of_an_engine_names_keys_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def live() -> None:
        life = Life(monkeypatch, tmp_path)
        try:
            life.policy.pauses.append(None)
            life.run(life.model._start_all())
            await until(lambda: life.processes, "the process", 20.0)
            life.process.placed.set_result(None)
            life.process.ready.set_exception(ConfigError("lower --max-num-seqs, or start it without --no-such"))
            await life.is_in("failed")
            assert life.replica.reason == "lower models.near.max_num_seqs, or start it without --no-such"
        finally:
            await life.end()

    asyncio.run(live())


def test_time_sliced_engine_serves_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def live() -> None:
        life = Life(monkeypatch, tmp_path)
        metrics = Metrics(ServerStats(), lambda: {"near": life.stats})
        gauge = 'meltcore:engines_time_sliced{model_name="near"} '
        try:
            life.run(life.model._start_all())
            await until(lambda: life.processes, "the process", 20.0)
            life.process.problem = "MPS lists 0 of its processes"
            await life.load()
            life.model.set_status("ready", "ready")
            (row,) = FleetOperations(Mock(models={0: life.model}, port=1), Mock()).rows()
            assert (row.state, row.status, row.reason) == ("loading", "ready", "MPS lists 0 of its processes")
            (log,) = [each for each in life.log.write.call_args_list if each.args[0] == "engine_time_sliced"]
            assert log.kwargs == {"model": "near", "replica": 0, "why": "MPS lists 0 of its processes"}
            assert f"{gauge}1.0\n" in metrics.text().decode()
            first = life.process
            first.die()
            await until(lambda: life.process is not first, "another process", 20.0)
            assert f"{gauge}0.0\n" in metrics.text().decode(), "it has ended"
            await life.load()
            assert life.replica.sharing_problem == ""
        finally:
            await life.end()

    asyncio.run(live())


def test_api_servers_open_a_model_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model whose tokenizer an API server never finished to load was loading for ever."""

    async def live() -> None:
        life = Life(monkeypatch, tmp_path)
        try:
            endless = asyncio.get_running_loop().create_future
            life.pool.model_failed = lambda _: endless()
            life.pool.open_model = lambda _: endless()
            life.policy.start_limit_s = Mock(side_effect=[None, 0.01])  # type: ignore[method-assign]
            loading = asyncio.create_task(life.model.load())
            await until(lambda: life.processes, "the process", 20.0)
            life.process.placed.set_result(None)
            life.process.ready.set_result(LIMITS)
            with pytest.raises(ConfigError, match=r"not all API server processes have opened it within 0\.01 s"):
                await loading
        finally:
            await life.end()

    asyncio.run(live())


def test_server_of_a_command_lives_by_the_same_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def live() -> None:
        life = Life(monkeypatch, tmp_path, upstream=True)

        async def start() -> None:
            await life.is_in("loading")
            life.process.ready.set_result(0.5)
            await life.is_in("ready")

        async def sleep(error: str | None, state: ReplicaState) -> None:
            life.sleep()
            await life.is_in("draining")
            life.process.answers.put_nowait(error)
            await life.is_in(state)

        life.run(life.model._start_all())
        await start()
        life.process.die()
        await until(lambda: len(life.processes) == 2, "another process", 20.0)
        await start()
        await sleep(None, "sleeping")
        life.wake()
        life.process.answers.put_nowait(None)
        await life.is_in("ready")
        await sleep(None, "sleeping")
        life.process.die()
        await life.is_in("unloaded")
        life.wake()
        await start()
        await sleep("404", "unloaded")
        life.wake()
        await start()
        life.replace()
        await until(lambda: len(life.processes) == 5, "another process", 20.0)
        await start()
        life.policy.pauses.append(None)
        life.process.die()
        await life.is_in("failed")
        begun = [("waiting", "start"), ("waiting", "placed"), ("loading", "loaded")]
        assert life.seen == [
            *[("waiting", "replace"), *begun],
            *[("ready", "died"), ("pausing", "start"), *begun[1:]],
            *[("ready", "drain"), ("draining", "slept"), ("sleeping", "woke")],
            *[
                ("ready", "drain"),
                ("draining", "slept"),
                ("sleeping", "died asleep"),
                ("unloaded", "start"),
                *begun[1:],
            ],
            *[("ready", "drain"), ("draining", "unload"), ("unloaded", "start"), *begun[1:]],
            *[("ready", "drain"), ("draining", "replace"), *begun],
            ("ready", "gave up"),
        ]
        await life.end()

    asyncio.run(live())


@pytest.mark.parametrize("layout", [WIDE, NARROW])
def test_drawing_is_what_the_table_says(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (ROOT / "docs" / layout.file).read_text(encoding="utf-8")
    assert drawn == picture(layout), "run `make tables`"
    monkeypatch.setitem(LIFE, "failed", {**LIFE["failed"], "start": "waiting"})  # type: ignore[arg-type]
    assert drawn != picture(layout)
    monkeypatch.setitem(LIFE, "failed", {**LIFE["failed"], "woke": "ready"})  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="has no arrow for"):
        picture(layout)
