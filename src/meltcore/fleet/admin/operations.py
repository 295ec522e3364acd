"""Operations on a running fleet: list its engines, restart them one by one, and follow a changed fleet.yaml."""

from __future__ import annotations

import asyncio
import time
from asyncio import wrap_future
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.process import start_call
from meltcore.common.process_output import one_line
from meltcore.fleet.plan.placement import PlacedFleet, loaded_section
from meltcore.fleet.plan.running_fleet import Running
from meltcore.fleet.run.engines import place_replicas
from meltcore.fleet.run.replica import Replica
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.run.supervised_model import POLL_S, wait_while
from meltcore.fleet.run.upstream_model import UpstreamModel, UpstreamServer, check_upstream
from meltcore.fleet.swap.turns import Turns
from meltcore.protocol.channel import EndRequests
from meltcore.serve.http.tls import TlsCertificate
from meltcore.serve.requests.keys import resolve_keys
from meltcore.serve.requests.tracing import resolve_tracing
from meltcore.serve.tasks.generation.servable import check_servable
from meltcore.serve.tasks.generation.text_model import find_task
from meltcore.settings.fleet_checks import keys_for_flags, model_error
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

if TYPE_CHECKING:
    from meltcore.fleet.plan.planned import FleetPlanner

Model = ServedModel | UpstreamModel
_END_LIMIT_S = 1.0  # for API servers to end requests that were given an error


class EngineRow(msgspec.Struct, frozen=True):
    """One engine in `meltcore ps`. The names of the fields are the keys of --json, and most are table columns."""

    model: str
    replica: int
    task: str
    state: str  # of the replica
    status: str  # of the model, as /health has it
    reason: str  # why the model cannot serve, or what ails this replica of a model that can; "": nothing
    pid: int | None
    memory_bytes: int  # as the engine planned it; 0 before it is loaded; what it holds while it sleeps
    restarts: int
    open_requests: int
    port: int
    log: str
    aliases: tuple[str, ...]
    gpus: int = 0  # that it takes memory_bytes of, each; 0 on a CPU and for other servers
    node: str | None = None  # of a cluster, where pid is; "": it runs on none now; None: no engine of a cluster


class ReloadResult(msgspec.Struct, frozen=True):
    """The names of the models that a reload has added, removed, changed or left unchanged."""

    added: list[str]
    removed: list[str]
    changed: list[str]
    unchanged: list[str]


class FleetModels(Protocol):
    """Defines the methods of the supervisor by which operations read and change a fleet."""

    fleet: PlacedFleet
    port: int
    models: dict[int, Model]
    turns: Turns

    async def read_running(self, checkpoints: Sequence[str]) -> Running:
        """Return the running fleet, with the node and the GPUs of each engine.

        In a cluster the result also says which of `checkpoints` each node cannot load. Raises ConfigError if the
        cluster cannot be read.
        """

    async def add_fleet_model(self, name: str) -> Model:
        """Add a model to the fleet and begin to load it."""

    def forget_model(self, model: Model) -> None:
        """Remove a model whose engines have ended."""

    def change_fleet(self, fleet: PlacedFleet) -> None:
        """Replace the settings of the running fleet by the settings of `fleet`, which a reload has read."""

    def broadcast(self, message: EndRequests) -> None:
        """Send a message to all API servers."""


class FleetOperations:
    """Changes a running fleet. Changes are made one after another; a reload reads its file and checkpoints before."""

    def __init__(self, supervisor: FleetModels, planner: Callable[[], FleetPlanner]) -> None:
        """Create the operations.

        `planner` returns the planner of the fleet.yaml. It raises ConfigError if the server cannot be changed.
        """
        self._supervisor = supervisor
        self._planner = planner
        self._lock, self._reloading = asyncio.Lock(), asyncio.Lock()
        self._reading_since_s: float | None = None  # while a reload reads its file and checkpoints

    def rows(self) -> list[EngineRow]:
        """Return one row for each engine of all models."""
        models = self._supervisor.models.values()
        return [row for model in models for row in _rows(model, self._supervisor.port)]

    async def restart(self, name: str | None) -> list[str]:
        """Replace the engines of the model `name`, or of all models, one after another. Return the names of the models.

        Raises ConfigError if the name is unknown, or if an engine does not come back. The remaining engines are then
        not replaced; the error names both kinds of models.
        """
        self._planner()  # raises if the server cannot be changed
        async with self._lock:
            models = list(self._supervisor.models.values()) if name is None else [self._find(name)]
            names = [model.name for model in models]
            for at, model in enumerate(models):
                try:
                    await self._restart(model)
                except ConfigError as error:
                    if name is not None:
                        raise
                    done, left = (", ".join(part) or "none" for part in (names[:at], names[at + 1 :]))
                    raise ConfigError(f"{error}; restarted before: {done}; not restarted: {left}") from error
            return names

    async def sleep(self, name: str) -> str:
        """Put a sleepable model to sleep until a request wakes it. Return the model's name.

        Raises ConfigError if the name is unknown, or if the model cannot sleep.
        """
        self._planner()  # raises if the server cannot be changed
        model = self._find(name)
        await self._supervisor.turns.sleep(model)
        return model.name

    async def wake(self, name: str) -> str:
        """Wake a sleeping model before a request needs it. Return the model's name.

        Raises ConfigError if the name is unknown, or if the model does not wake.
        """
        self._planner()  # raises if the server cannot be changed
        model = self._find(name)
        await self._supervisor.turns.wake(model)
        return model.name

    def _find(self, name: str) -> Model:
        models = self._supervisor.models.values()
        found = [model for model in models if name in model.names]
        if staying := [model for model in found if model.status != "draining"]:
            return staying[0]
        if found:
            raise ConfigError(f"{name} is draining: {found[0].reason}")
        known = ", ".join(model.name for model in models)
        raise ConfigError(f"there is no model {name!r} in the fleet; it has {known}")

    async def _restart(self, model: Model) -> None:
        if model.status == "draining":
            raise ConfigError(f"{model.name} is draining: {model.reason}")
        try:
            if isinstance(model, UpstreamModel) or model.limits is not None:
                await model.replace_engines(self._supervisor.fleet.spec.timeouts.drain_s)
                return
            started = await self._replace(model)
            if started.loading is not None:
                await _wait_loaded(started, started.loading)
                if started.loading.cancelled():  # by `meltcore down`
                    raise ConfigError(f"{model.name} was ended while it was loading")
                if started.loading.done():
                    started.loading.result()
        except MeltcoreError as error:  # of an engine
            raise ConfigError(f"{model.name} did not come back: {error}") from error
        if started.status == "failed" or (isinstance(started, ServedModel) and started.is_pending):
            raise ConfigError(started.reason)

    async def reload(self) -> ReloadResult:
        """Read fleet.yaml again. End removed models, start added models, and replace changed models.

        Other models continue. If the file is invalid, or changes settings that cannot change while the server runs,
        raise ConfigError and change nothing.
        """
        planner = self._planner()
        if self._reading_since_s is not None:
            seconds = time.monotonic() - self._reading_since_s
            limit_s = self._supervisor.fleet.spec.timeouts.start_s
            raise ConfigError(
                f"another reload has been reading fleet.yaml and its checkpoints for {seconds:.0f} s, and may for "
                f"{limit_s:g} s (timeouts.start_s): reload when it has ended"
            )
        async with self._reloading:
            fleet = await self._read(planner)
            async with self._lock:
                return await self._change(planner, fleet)

    async def _read(self, planner: FleetPlanner) -> PlacedFleet:
        """Return the fleet of fleet.yaml, whose models can be loaded, while other operations may run.

        Raises ConfigError if the file is invalid, or if a checkpoint is not read within `timeouts.start_s`.
        """
        limit_s = self._supervisor.fleet.spec.timeouts.start_s
        self._reading_since_s = time.monotonic()
        late: list[str] = []
        try:
            async with asyncio.timeout(limit_s):
                running = await self._supervisor.read_running(await wrap_future(start_call(planner.checkpoints)))
                fleet = await wrap_future(start_call(partial(planner.config, late.append, running=running)))
                fleet = msgspec.structs.replace(fleet, spec=check_startable_fleet(fleet.spec))
                for name in fleet.spec.engines:
                    place_replicas(fleet, name)
                check_unchanged(self._supervisor.fleet.spec, fleet.spec)
                configs = {model.name: model.config for model in self._supervisor.models.values()}
                for name, model in fleet.spec.engines.items():
                    if model != configs.get(name) and not fleet.on_nodes(name):
                        late = [f"models.{name}: reading {model.model}"]
                        await wrap_future(start_call(partial(_check_checkpoint, name, model)))
                return fleet
        except TimeoutError as error:
            raise ConfigError(
                f"fleet.yaml and the checkpoints of its models were not read within {limit_s:g} s (timeouts.start_s): "
                f"nothing has changed{''.join(f'; {line}' for line in late)}"
            ) from error
        finally:
            self._reading_since_s = None

    async def _change(self, planner: FleetPlanner, fleet: PlacedFleet) -> ReloadResult:
        """End, start and replace models until the running fleet is `fleet`, which `_read` has returned."""
        supervisor = self._supervisor
        old = {model.name: model for model in supervisor.models.values()}
        new = fleet.spec.models
        planner.accept()
        result = ReloadResult(
            added=[name for name in new if name not in old],
            removed=[name for name in old if name not in new],
            changed=[name for name in new if name in old and new[name] != old[name].config],
            unchanged=[name for name in new if name in old and new[name] == old[name].config],
        )
        supervisor.fleet = fleet  # its engines share the cores as it says
        await asyncio.gather(
            *(self._end(old[name], f"{name} is being removed from the fleet") for name in result.removed)
        )
        leaving = [old[name] for name in (*result.removed, *result.changed)]
        # A name that moves to another model leads to the old one until the new one is there.
        kept = [
            model
            for model in leaving
            if any(fleet.spec.resolve(each) not in (None, model.name) for each in model.names)
        ]
        for name in result.removed:
            if old[name] not in kept:
                supervisor.forget_model(old[name])
        for name in result.changed:
            await self._replace(old[name], is_kept=old[name] in kept)
        for name in result.added:
            await supervisor.add_fleet_model(name)
        for model in kept:
            supervisor.forget_model(model)
        supervisor.change_fleet(fleet)
        return result

    async def _replace(self, model: Model, *, is_kept: bool = False) -> Model:
        """End a model, add the model that replaces it, and return the new model.

        At any time, requests with the model's name find one of the two. If `is_kept` is true, the caller forgets the
        old model.
        """
        await self._end(model, f"{model.name} is being replaced in the fleet")
        successor = await self._supervisor.add_fleet_model(model.name)
        if not is_kept:
            self._supervisor.forget_model(model)
        return successor

    async def _end(self, model: Model, reason: str) -> None:
        """Refuse new requests to a model, let its open requests finish within the drain limit, and end its engines."""
        limit_s = self._supervisor.fleet.spec.timeouts.drain_s
        model.drain(reason)
        if not await wait_while(lambda: model.stats.total("in_flight"), limit_s):
            error = f"{reason}, and {limit_s:g} s were not enough for this answer"
            self._supervisor.broadcast(EndRequests(model.number, error, 503, "model_stopping"))
            await wait_while(lambda: model.stats.total("in_flight"), _END_LIMIT_S)
        await model.stop()
        # An API server may have accepted a request after its count was read, before it knew that the model drains.
        self._supervisor.broadcast(EndRequests(model.number, reason, 503, "model_stopping"))
        self._supervisor.turns.remove(model)  # its successor may load


def _check_checkpoint(name: str, model: ModelSection) -> None:
    """Raise ConfigError if the files of a model that is new or has changed cannot be loaded.

    Of a model with random weights only the task is read. Checkpoints on other nodes are checked by the plan.
    """
    try:
        find_task(model) if model.load_format == "dummy" else check_servable(model)
    except ConfigError as error:
        raise ConfigError(model_error(name, error)) from error


async def _wait_loaded(model: Model, loading: asyncio.Task[None]) -> None:
    """Wait until a model is loaded, has failed, or is pending because no node has memory for it."""
    while not loading.done() and not (isinstance(model, ServedModel) and model.is_pending):
        await asyncio.wait({loading}, timeout=POLL_S)


def check_startable(spec: FleetSpec) -> FleetSpec:
    """Return the configuration in the form in which a server runs it.

    Keys become hashes, the endpoint of traces is resolved, and `shapes` become checkpoints. No process is started. Two
    configurations can be compared only if this function has returned both. Raises ConfigError if a key, a program, an
    endpoint, a certificate or a model's shapes cannot be used.
    """
    if spec.server.ssl_certfile is not None:
        TlsCertificate(spec.server.ssl_certfile, spec.server.ssl_keyfile)
    for name, model in spec.models.items():
        if model.kind != "engine":
            check_upstream(name, model)
    models = {name: loaded_section(model) for name, model in spec.models.items()}
    return resolve_tracing(resolve_keys(msgspec.structs.replace(spec, models=models)))


def check_startable_fleet(spec: FleetSpec) -> FleetSpec:
    """Return what `check_startable` returns for a fleet.yaml. Its errors name keys of the file instead of flags."""
    try:
        return check_startable(spec)
    except ConfigError as error:
        raise ConfigError(keys_for_flags(error)) from error


def check_unchanged(old: FleetSpec, new: FleetSpec) -> None:
    """Raise ConfigError if two configurations differ in settings that API servers read only when they start."""
    changed = []
    for section in ("server", "limits", "timeouts", "residency", "sharing"):
        before, after = getattr(old, section), getattr(new, section)
        names = (name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name))
        changed += [f"{section}.{name}" for name in names]
    if old.gpus != new.gpus:
        changed.append("gpus")
    if old.keys != new.keys:
        old_keys, new_keys = ({key.name: key for key in config.keys} for config in (old, new))
        names = (name for name in old_keys | new_keys if old_keys.get(name) != new_keys.get(name))
        changed.append(f"keys ({', '.join(names) or 'their order'})")
    if changed:
        raise ConfigError(
            f"only models, languages and routes can change while the fleet runs, and {', '.join(changed)} changed: "
            "end it with `meltcore down` and start it again"
        )


def _rows(model: Model, port: int) -> list[EngineRow]:
    if isinstance(model, UpstreamModel):
        return [_upstream_row(model, replica, port) for replica in range(model.config.replicas)]
    return [_row(model, replica, port) for replica in model.replicas]


def _row(model: ServedModel, replica: Replica, port: int) -> EngineRow:
    is_open = model.limits is not None
    state = _state(model, replica)
    return EngineRow(
        model=model.name,
        replica=replica.index,
        task="unknown" if model.task is None else model.task.name,
        state="loading" if state == "ready" and not is_open else state,
        status=model.status,
        reason=(replica.reason or replica.sharing_problem or model.cluster_problem)
        if model.status == "ready"
        else model.reason,
        pid=replica.process.pid,
        memory_bytes=_memory_bytes(replica),
        restarts=replica.restarts,
        open_requests=round(model.stats.open_requests(replica.index)),
        port=port,
        log=str(replica.log or ""),
        aliases=model.config.aliases,
        gpus=len(replica.gpu_names),
        node=replica.process.node,
    )


def _state(model: Model, replica: Replica | UpstreamServer) -> str:
    """Return the state of a replica as operators see it. If a model sleeps, a replica without a process sleeps too."""
    if model.status == "failed":
        return "failed"
    return "sleeping" if replica.state == "unloaded" else replica.state


def _upstream_row(model: UpstreamModel, replica: int, port: int) -> EngineRow:
    """Return the row of `meltcore ps` for an upstream server. Its memory is 0, because Meltcore cannot know it."""
    server = model.replicas[replica] if model.replicas else None  # none: it runs elsewhere
    return EngineRow(
        model=model.name,
        replica=replica,
        task=model.config.task,
        state=model.status if server is None else _state(model, server),
        status=model.status,
        reason=model.reason if model.status != "ready" else one_line(server.reason) if server is not None else "",
        pid=server.process.pid if server is not None else None,
        memory_bytes=0,
        restarts=server.restarts if server is not None else 0,
        open_requests=round(model.stats.open_requests(replica)),
        port=port,
        log=str(server.log) if server is not None else "",
        aliases=model.config.aliases,
    )


def _memory_bytes(replica: Replica) -> int:
    """Return the bytes of memory that an engine holds.

    An engine that sleeps has reported this number. For an engine that is awake it is the sum of its memory table. CUDA
    graphs beyond the engine's reserve, and weights that sleep in host memory, are left out of the sum.
    """
    if replica.state in ("sleeping", "unloaded"):
        return replica.resident_bytes if replica.state == "sleeping" else 0
    rows = () if replica.limits is None else replica.limits.memory
    return sum(row.size_bytes for row in rows if row.note != "out of the reserve" and row.name != "weights asleep")
