"""One model of the supervisor: its engines are started, watched, restarted and replaced. API servers follow its state.

An engine that dies ends its own requests only. Whether and when it is started again, its server's policy says.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError, EngineDeadError, EnginePendingError, MeltcoreError
from meltcore.common.tasks import DEFAULT, Task
from meltcore.fleet.plan.placement import Placement
from meltcore.fleet.run.logs import log_path
from meltcore.fleet.run.readiness import probe, probe_error
from meltcore.fleet.run.replica import Death, Replica
from meltcore.fleet.run.restart_policy import Outage
from meltcore.fleet.run.supervised_model import ServerParts, SupervisedModel
from meltcore.protocol.batch import BatchReady
from meltcore.protocol.channel import AddModel, OpenModel, ReplicaEnded, ReplicaStarted
from meltcore.protocol.engines import FromEngine, shared_stats
from meltcore.protocol.shell import Asleep, Awake, EngineOutputs, EngineReady, Loading
from meltcore.serve.engines.engine_link import socket_folder
from meltcore.serve.engines.engine_process import EngineProcess, common_limits
from meltcore.serve.requests.stats import ModelStats
from meltcore.settings.server_config import ModelConfig

REPLICA_DEAD = "the replica that worked on this has died; the others go on, so the request can be sent again"
REPLICA_REPLACED = "the engine that worked on this is replaced, and its time to finish is over"
ROOM_POLL_S = 5.0  # until an engine is tried again that no node has room for


class ServedModel(SupervisedModel[Replica]):
    """The engines of one model, from their first start to the end of the server, or of the model in it."""

    def __init__(
        self,
        number: int,
        config: ModelConfig,
        task: Task | None,
        placements: Sequence[Placement],
        stats: ModelStats,
        parts: ServerParts,
    ) -> None:
        """Create the engines and add the model to all API servers. `task`: None where it could not be found out."""
        folder, name, count = parts.log_folder, config.names[0], len(placements)
        replicas = [
            Replica(index=index, placement=placement, log=folder and log_path(folder, name, index, count))
            for index, placement in enumerate(placements)
        ]
        super().__init__(number, config, replicas, stats, parts)
        self.config, self.task = config, task
        stats.task = (task or DEFAULT).name  # for the metrics of this process
        self.limits: EngineReady | None = None  # of all replicas, once the model is open
        self.synthetic_tokenizer = False
        self.engines = [self._new_engine(replica) for replica in self.replicas]
        parts.pool.add_model(AddModel(number, config, None if task is None else task.name, [None] * count), stats)

    # --- starting

    async def load(self) -> None:
        """Start all engines and open the model to requests. Raises MeltcoreError when it cannot serve."""
        text_failed = self._parts.pool.model_failed(self.number)
        started = asyncio.create_task(self._start_all())
        try:
            waited: set[asyncio.Future[Any]] = {started, text_failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if text_failed.done():
                text_failed.result()
            await started
        finally:
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)  # left unread, its error prints a traceback
        await self._open(common_limits(self._starts.results))
        for replica in self.replicas:
            if replica.state == "ready":
                self.stats.mark_replica_ready(replica.index)
        self.update_status()

    async def _open(self, limits: EngineReady) -> None:
        self.synthetic_tokenizer = await self._parts.pool.open_model(self._opened(limits))
        self.limits = limits

    async def _keep(self, replica: Replica) -> None:
        """Start the engine of a replica, and start it again each time that it dies, as the policy has it."""
        while True:
            await self.may_run.wait()
            try:
                limits = await self._start(replica)
            except EnginePendingError as error:
                await self._wait_for_room(replica, str(error))
                continue
            except MeltcoreError as error:
                reason, is_final = str(error), isinstance(error, ConfigError) and replica.limits is None
                failure: MeltcoreError = error
                await self.engines[replica.index].stop()
            else:
                self._on_ready(replica, limits)
                reason, is_final = await self.engines[replica.index].wait(), False
                failure = EngineDeadError(reason)
            engine = self.engines[replica.index]
            pause_s = self._after_end(replica, reason, is_final, is_evicted=engine.is_evicted)
            await engine.leave()
            if pause_s is None:
                self._give_up(replica, failure)
                return
            await asyncio.gather(asyncio.sleep(pause_s), engine.wait_freed())  # not beside one that has the memory
            replica.restarts += 1

    async def _start(self, replica: Replica) -> EngineReady:
        """Start an engine for a replica and wait until it can serve. Raises MeltcoreError."""
        if replica.state != "pending":
            replica.state = "waiting"
        self.stats.set("start_s", time.monotonic())
        async with self._parts.gate.loading(replica.placement):
            number = self._parts.next_engine()
            replica.sockets = socket_folder(self._parts.sockets, number)
            engine = self.engines[replica.index] = self._new_engine(replica)
            if replica.state != "pending":
                replica.state = "loading"
                self.update_status()
            limit_s, began_s = self.config.start_timeout_s, time.monotonic()
            self.stats.set("start_s", began_s)
            try:
                async with asyncio.timeout(limit_s):
                    await engine.prepare()
                    if replica.state == "pending":
                        replica.state, replica.reason = "loading", ""
                        self.update_status()
                    self._parts.pool.broadcast(ReplicaStarted(self.number, replica.index, number))
                    limits = await engine.start()
            except TimeoutError:
                raise EngineDeadError(f"it was not loaded within {limit_s:g} s (timeouts.start_s)") from None
        left_s = math.inf if limit_s is None else began_s + limit_s - time.monotonic()
        await self._parts.policy.prove(partial(probe, replica, engine, limits), left_s)
        self.stats.set("start_took_s", time.monotonic() - began_s)
        return limits

    async def _wait_for_room(self, replica: Replica, reason: str) -> None:
        """Wait until the engine of a replica is tried again, which was not started. That is no death."""
        await self.engines[replica.index].stop()
        self._remove_sockets(replica)
        if (replica.state, replica.reason) != ("pending", reason):
            replica.state, replica.reason = "pending", reason
            self.log("engine_pending", replica, why=reason)
            self.report(f"{self.describe(replica.index, 'the engine')} is pending: {reason}")
        self._starts.note()
        self.update_status()
        await asyncio.gather(asyncio.sleep(ROOM_POLL_S), self.engines[replica.index].wait_freed())

    def _on_ready(self, replica: Replica, limits: EngineReady) -> None:
        replica.limits, replica.state, replica.reason = limits, "ready", ""
        self._note_started(replica, limits)
        if self.limits is not None:  # a restart, or one that came later than the others
            self._reopen(limits)
            self.stats.mark_replica_ready(replica.index)
            self.update_status()
        self._parts.policy.tell(lambda: self.log("engine_ready", replica, load_s=limits.load_s))

    def _reopen(self, limits: EngineReady) -> None:
        """Tell API servers when a new engine can do less than those before: another process has taken memory."""
        assert self.limits is not None
        common = msgspec.structs.replace(
            common_limits([self.limits, limits]), load_s=self.limits.load_s, memory=self.limits.memory
        )
        if common != self.limits and not (isinstance(limits, BatchReady) and self.stats.live_replicas()):
            self.limits = common
            self._parts.pool.broadcast(self._opened(common))

    def _opened(self, limits: EngineReady) -> OpenModel:
        return OpenModel(self.number, msgspec.Raw(msgspec.msgpack.encode(limits)), int(time.time()))

    # --- ending

    def _after_end(self, replica: Replica, reason: str, is_final: bool, *, is_evicted: bool) -> float | None:
        """Fail the requests of an engine that has ended; returns the pause until the next start, None for no start.

        is_evicted: that is no death, and it is pending until then.
        """
        policy, now_s = self._parts.policy, time.monotonic()
        was_serving = replica.state in ("ready", "draining", "sleeping")
        is_asleep, replica.is_asleep = not self.may_run.is_set(), False
        num_failed = round(self.stats.open_requests(replica.index))
        replica.reason = reason
        if not is_evicted:
            replica.deaths.append(Death(now_s, replica.placement.node))
        pause_s = None
        if not is_final and not self._draining:
            pause_s = ROOM_POLL_S if is_evicted else policy.pause_s(replica.deaths_s, now_s)
        replica.state = "failed" if pause_s is None else "pending" if is_evicted else "pausing"
        self._starts.note()  # a pending one is not waited for
        self.stats.set("start_s", now_s + (pause_s or 0.0))
        if is_asleep and pause_s is not None:  # the requests that wait for it wait on
            replica.state, pause_s = "sleeping", 0.0
        else:
            self.stats.mark_replica_dead(replica.index)
        num_live, num_models = len(self.stats.live_replicas()), self._parts.pool.num_models
        self._end_requests(replica, REPLICA_DEAD if num_live else policy.death_text(pause_s, num_models))
        self.update_status(pause_s)
        subject = self.describe(replica.index, "the engine")
        if was_serving:
            self.log("engine_died", replica, why=reason, open_requests=num_failed)
            ended, num_replicas = "failed", self.stats.replicas
            if num_replicas > 1:
                ended = "are retried or failed" if num_live else ended
                ended += f"; {num_live} of {num_replicas} replicas go on without it"
            text = f"{subject} has died: {reason}; {num_failed} open requests {ended}"
            self._parts.report(replica.note_end(text))
        else:
            policy.tell(partial(self._tell_failed_start, replica, f"{subject} could not start: {reason}"))
        if not self._draining:
            plan = "it is not started again" if pause_s is None else f"it is started again in {pause_s:g} s"
            if is_asleep and pause_s is not None:
                plan = "it is started again when it is wanted"
            policy.tell(lambda: self._parts.report(f"{subject}: {plan}"))
        return pause_s

    def _tell_failed_start(self, replica: Replica, text: str) -> None:
        self.log("engine_failed", replica, why=replica.reason)
        self._parts.report(replica.note_end(text))

    def _end_requests(self, replica: Replica, message: str) -> None:
        self._parts.pool.broadcast(ReplicaEnded(self.number, replica.index, message))
        self._remove_sockets(replica)

    def _remove_sockets(self, replica: Replica) -> None:
        if replica.sockets is not None:
            shutil.rmtree(replica.sockets, ignore_errors=True)

    def _on_replaced(self, replica: Replica) -> None:
        self._end_requests(replica, REPLICA_REPLACED)

    async def _stop_process(self, replica: Replica) -> None:
        await self.engines[replica.index].stop()

    async def _wait_freed(self, replica: Replica) -> None:
        await self.engines[replica.index].wait_freed()

    def fail_start(self, replica: int, reason: str) -> None:
        """End an engine that takes too long to start; it is started again like one that has died."""
        self.engines[replica].fail(reason)

    def kill(self) -> None:
        """End all engines without waiting."""
        for engine in self.engines:
            engine.kill()

    # --- state

    @property
    def is_pending(self) -> bool:
        """Whether no engine serves or loads, as one waits for room on a node."""
        return self._starts.is_pending

    @property
    def is_loading(self) -> bool:
        """Whether the model is loaded for the first time."""
        return self.limits is None and self.status != "failed"

    def log(self, event: str, replica: Replica, **fields: Any) -> None:
        """Write a line about an engine to the server's log."""
        self._parts.log.write(event, model=self.name, replica=replica.index, **fields)

    def update_status(self, pause_s: float | None = None) -> None:
        """Derive the status from the replicas. `pause_s`: until an engine is started again."""
        if self._draining:
            return
        if self.limits is not None and self.stats.live_replicas():
            self.set_status("ready", "ready")
            return
        outage = Outage(
            name=self.name,
            status=self.status,
            text=self.reason,
            is_open=self.limits is not None,
            may_run=self.may_run.is_set(),
            states=frozenset(replica.state for replica in self.replicas),
            reason=next((replica.reason for replica in reversed(self.replicas) if replica.reason), ""),
            pause_s=pause_s,
            num_deaths=max(len(replica.deaths) for replica in self.replicas),
            num_models=self._parts.pool.num_models,
        )
        self.set_status(*self._parts.policy.status(outage))

    def describe(self, replica: int, default: str) -> str:
        """Return the name of an engine in messages; `default`: of the single engine of a server."""
        name = self._parts.policy.model_name(self.name, self._parts.pool.num_models)
        return f"{name} replica {replica}".strip() if len(self.replicas) > 1 else name or default

    # --- engines

    @property
    def cluster_problem(self) -> str:
        """Why the cluster of the engines cannot be changed; "": it can, or there is none."""
        problem = self._parts.launcher.problem
        return problem and f"the cluster cannot be changed: {problem}"

    def _new_engine(self, replica: Replica) -> EngineProcess:
        failed_nodes = self._parts.policy.failed_nodes(replica.deaths, time.monotonic())
        on_message = partial(self._on_engine_message, replica)
        return self._parts.launcher.new_engine(replica, self.config.priority_class, failed_nodes, on_message)

    def _on_engine_message(self, replica: Replica, message: FromEngine) -> None:
        if isinstance(message, EngineOutputs):  # also without outputs: a sign of life
            self.stats.record_step(shared_stats(message.stats), message.step_ended_s, replica.index)
            if replica.probe is not None and not replica.probe.done():
                error = probe_error(message)
                if error is not None:
                    replica.probe.set_result(error)
        elif isinstance(message, Asleep | Awake):
            if replica.answer is not None and not replica.answer.done():
                replica.answer.set_result(message)
        elif isinstance(message, Loading) and replica.index == 0:  # all load the same; together, they would alternate
            progress_note = f" ({message.fraction:.0%})" if message.fraction else ""  # unknown for many stages
            if self.status == "loading":
                self.set_status("loading", f"loading: {message.stage}{progress_note}")
