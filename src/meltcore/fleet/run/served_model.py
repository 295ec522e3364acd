"""Runs one model of the supervisor on Meltcore's engines: starts, watches, restarts and replaces them.

API servers receive the state of the model. When an engine dies, only the requests on this engine fail. The restart
policy of the server decides whether and when the engine is started again.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from meltcore.common.cores import format_cpus
from meltcore.common.errors import ConfigError, EngineDeadError, EnginePendingError, MeltcoreError
from meltcore.common.process import start_call
from meltcore.common.tasks import DEFAULT, Task
from meltcore.fleet.processes.engine_process import EngineProcess, common_limits
from meltcore.fleet.run.readiness import probe, probe_error
from meltcore.fleet.run.replica import Replica
from meltcore.fleet.run.restart_policy import Outage
from meltcore.fleet.run.supervised_model import POLL_S, ROOM_POLL_S, ServerContext, SupervisedModel
from meltcore.protocol.batch import BatchReady
from meltcore.protocol.channel import AddModel, OpenModel, ReplicaEnded, ReplicaStarted
from meltcore.protocol.engines import FromEngine, shared_stats
from meltcore.protocol.shell import Asleep, Awake, EngineOutputs, EngineReady, Loading, Sleep, Wake
from meltcore.serve.engines.engine_link import socket_folder
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.tasks.generation.text_model import find_task
from meltcore.settings.fleet_spec import ModelSection


class ServedModel(SupervisedModel[Replica]):
    """Runs the engines of one model, from their first start until the server ends or the model is removed."""

    def __init__(
        self,
        number: int,
        name: str,
        config: ModelSection,
        task: Task | None,
        replicas: Sequence[Replica],
        stats: ModelStats,
        parts: ServerContext,
    ) -> None:
        """Create the engines, and add the model to all API servers. `task` is None if `prepare` shall find the task."""
        super().__init__(
            number,
            (name, *config.aliases),
            replicas,
            stats,
            parts,
            is_sleepable=config.is_sleepable,
            priority_class=config.priority,
        )
        self.config, self.task = config, task
        stats.task = (task or DEFAULT).name  # for the metrics of this process
        self.limits: EngineReady | None = None  # of all replicas, once the model is open
        self.synthetic_tokenizer = False
        for replica in replicas:
            replica.process = self._new_engine(replica)
        self._add_to_api_servers(None if task is None else task.name)

    def _add_to_api_servers(self, task: str | None) -> None:
        """Add the model to all API servers. From the second call on it replaces the model, whose task was unknown."""
        engines: list[int | None] = [None] * len(self.replicas)
        self._parts.pool.add_model(AddModel(self.number, self.name, self.config, task, engines))

    # --- starting

    async def prepare(self) -> None:
        """Find the task of the checkpoint, which may download its configuration, within `timeouts.start_s`.

        API servers then load what they need for the task. Raises ConfigError if the task cannot be found.
        """
        limit_s, policy = self._parts.timeouts.start_s, self._parts.policy
        try:
            async with asyncio.timeout(limit_s):
                self.task = await find_on_thread(self.config)
        except TimeoutError:
            raise ConfigError(f"its configuration was not read within {limit_s:g} s (timeouts.start_s)") from None
        except MeltcoreError as error:
            raise ConfigError(policy.error_text(self.name, error)) from error
        except Exception as error:  # a fault of ours, which must not leave the model loading
            raise ConfigError(f"its configuration cannot be read: {error!r}") from error
        finally:
            self.prepared.set()
        self.stats.task = self.task.name
        self._add_to_api_servers(self.task.name)

    async def load(self) -> None:
        """Start all engines, and accept requests for the model. Raises MeltcoreError if the model cannot serve."""
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
        limit_s = self._parts.policy.start_limit_s(self._parts.timeouts.start_s)
        try:
            async with asyncio.timeout(limit_s):
                self.synthetic_tokenizer = await self._parts.pool.open_model(self._opened(limits))
        except TimeoutError:
            text = f"not all API server processes have opened it within {limit_s:g} s (timeouts.start_s)"
            raise ConfigError(text) from None
        self.limits = limits

    async def _start(self, replica: Replica) -> EngineReady:
        """Start the engine of a replica as soon as a node has memory for it. Return the engine's limits.

        Raises MeltcoreError if the engine cannot be started.
        """
        while True:
            try:
                return await self._start_placed(replica)
            except EnginePendingError as error:
                await self._wait_for_room(replica, str(error))
            except ConfigError as error:
                raise ConfigError(self._parts.policy.error_text(self.name, error)) from error
            await self.may_run.wait()

    async def _start_placed(self, replica: Replica) -> EngineReady:
        """Start the engine of a replica, wait until it can serve, and return its limits.

        Raises MeltcoreError if the engine cannot serve, and EnginePendingError if no node has memory for it.
        """
        replica.apply("start")
        self.stats.set("start_s", time.monotonic())
        has_budget, in_cluster = replica.engine.memory_bytes is not None, bool(replica.node)
        async with self._parts.gate.loading(replica.gpu_names, has_budget=has_budget, in_cluster=in_cluster):
            number = self._parts.next_engine()
            replica.sockets = socket_folder(self._parts.sockets, number)
            engine = replica.process = self._new_engine(replica)
            limit_s, began_s = self._parts.policy.start_limit_s(self._parts.timeouts.start_s), time.monotonic()
            self.stats.set("start_s", began_s)
            try:
                async with asyncio.timeout(limit_s):
                    await engine.prepare()
                    if replica.state == "pending":
                        replica.reason = ""
                    replica.apply("placed")
                    self.update_status()
                    self._parts.pool.broadcast(ReplicaStarted(self.number, replica.index, number))
                    limits = await engine.start()
            except TimeoutError:
                raise EngineDeadError(f"it was not loaded within {limit_s:g} s (timeouts.start_s)") from None
        left_s = math.inf if limit_s is None else began_s + limit_s - time.monotonic()
        await self._parts.policy.prove(partial(probe, replica, engine, limits), left_s)
        self.stats.set("start_took_s", time.monotonic() - began_s)
        self._note_sharing(replica, await engine.sharing_problem())
        if problem := replica.sharing_problem:
            self.log("engine_time_sliced", replica, why=problem)
            self._parts.report(f"{self.describe(replica.index, 'the engine')}: {problem}")
        return limits

    def _note_sharing(self, replica: Replica, problem: str) -> None:
        replica.sharing_problem = problem
        self.stats.set("time_sliced", sum(bool(each.sharing_problem) for each in self.replicas))

    async def _wait_for_room(self, replica: Replica, reason: str) -> None:
        """Wait until it is time to try the start of a replica's engine again.

        An engine that found no memory has not started, so this does not count as an exit.
        """
        await replica.process.stop()
        self._remove_sockets(replica)
        if (replica.state, replica.reason) != ("pending", reason):
            replica.reason = reason
            self.log("engine_pending", replica, why=reason)
            self.report(f"{self.describe(replica.index, 'the engine')} is pending: {reason}")
        replica.apply("unplaced")
        self._starts.note()
        self.update_status()
        await asyncio.gather(asyncio.sleep(ROOM_POLL_S), replica.process.wait_freed())

    def _on_ready(self, replica: Replica, limits: EngineReady) -> None:
        replica.apply("loaded")
        replica.limits, replica.reason = limits, ""
        self._note_started(replica, limits)
        if self.limits is not None:  # a restart, or one that came later than the others
            self._reopen(limits)
            self.stats.mark_replica_ready(replica.index)
            self.update_status()
        cpus = format_cpus(replica.process.cpus)
        self._parts.policy.tell(lambda: self.log("engine_ready", replica, load_s=limits.load_s, cpus=cpus))

    def _reopen(self, limits: EngineReady) -> None:
        """Lower the limits in API servers if a new engine has lower limits. Another process may have taken memory."""
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

    def _tell_end(self, replica: Replica, *, was_serving: bool, num_open: int, plan: str) -> None:
        policy, subject, reason = self._parts.policy, self.describe(replica.index, "the engine"), replica.reason
        if was_serving:
            self.log("engine_died", replica, why=reason, open_requests=num_open)
            ended, num_live, num_replicas = "failed", len(self.stats.live_replicas()), self.stats.replicas
            if num_replicas > 1:
                ended = "are retried or failed" if num_live else ended
                ended += f"; {num_live} of {num_replicas} replicas go on without it"
            text = f"{subject} has died: {reason}; {num_open} open requests {ended}"
            self._parts.report(replica.note_end(text))
        else:
            policy.tell(partial(self._tell_failed_start, replica, f"{subject} could not start: {reason}"))
        if not self._draining:
            policy.tell(lambda: self._parts.report(f"{subject}: {plan}"))

    def _tell_failed_start(self, replica: Replica, text: str) -> None:
        self.log("engine_failed", replica, why=replica.reason)
        self._parts.report(replica.note_end(text))

    def _end_requests(self, replica: Replica, message: str) -> None:
        self._parts.pool.broadcast(ReplicaEnded(self.number, replica.index, message))
        self._note_sharing(replica, "")
        self._remove_sockets(replica)

    def _remove_sockets(self, replica: Replica) -> None:
        if replica.sockets is not None:
            shutil.rmtree(replica.sockets, ignore_errors=True)

    def _is_final(self, replica: Replica, error: MeltcoreError) -> bool:
        return isinstance(error, ConfigError) and replica.limits is None

    # --- sleeping

    async def sleep_process(self, replica: Replica, keep: Literal["host", "disk"], limit_s: float) -> bool:
        """Put an engine to sleep. Return whether it sleeps.

        If the engine refuses to sleep, this method reports it. The death of an engine is reported elsewhere.
        """
        answer = await self._ask(replica, Sleep(keep), limit_s)
        if isinstance(answer, Asleep) and answer.error is None:
            replica.resident_bytes = answer.resident_bytes
            self.log("engine_asleep", replica, freed_bytes=answer.freed_bytes, seconds=round(answer.seconds, 6))
            return True
        reason = answer.error if isinstance(answer, Asleep) else answer
        if replica.state == "draining":
            subject = self.describe(replica.index, self.name)
            self.report(f"{subject} cannot sleep ({reason}): its process is ended, and started when it is wanted")
        return False

    async def wake_process(self, replica: Replica, limit_s: float) -> str:
        """Wake an engine. Return the reason if it still sleeps, or "" if it serves or has died."""
        answer = await self._ask(replica, Wake(), limit_s)
        if replica.state != "sleeping":  # it has died, and is started again
            return ""
        if isinstance(answer, Awake) and answer.error is None:
            replica.apply("woke")
            self.stats.mark_replica_ready(replica.index)
            self.log("engine_awake", replica, bytes_copied=answer.bytes_copied, seconds=round(answer.seconds, 6))
            return ""
        reason = str(answer.error if isinstance(answer, Awake) else answer)
        self.log("wake_failed", replica, why=reason)
        self.report(f"{self.describe(replica.index, self.name)} could not be woken: {reason}")
        return reason

    async def _ask(self, replica: Replica, message: Sleep | Wake, limit_s: float) -> Asleep | Awake | str:
        """Send a message to an engine. Return the engine's answer, or the reason why no answer came."""
        engine = replica.process
        answer: asyncio.Future[Asleep | Awake] = asyncio.get_running_loop().create_future()
        replica.answer = answer
        engine.send(message)
        ended = asyncio.create_task(engine.wait())
        waited: set[asyncio.Future[Any]] = {answer, ended}
        try:
            await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if ended.done():
                await asyncio.sleep(POLL_S)  # its death is noted meanwhile
                return ended.result()
            return f"it did not answer within {limit_s:g} s"
        finally:
            ended.cancel()
            replica.answer = None

    # --- state

    @property
    def is_pending(self) -> bool:
        """Whether no engine serves or loads, and at least one waits for memory on a node."""
        return self._starts.is_pending

    @property
    def is_loading(self) -> bool:
        """Whether the model is loaded for the first time."""
        return self.limits is None and self.status != "failed"

    def log(self, event: str, replica: Replica, **fields: Any) -> None:
        """Write a line about an engine to the server's log."""
        self._parts.log.write(event, model=self.name, replica=replica.index, **fields)

    def update_status(self, pause_s: float | None = None) -> None:
        """Update the model's status from its replicas. `pause_s` is the time until an engine is started again."""
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
        """Return the name of an engine for messages. If it is the server's only engine, return `default`."""
        name = self._parts.policy.model_name(self.name, self._parts.pool.num_models)
        return f"{name} replica {replica}".strip() if len(self.replicas) > 1 else name or default

    # --- engines

    @property
    def cluster_problem(self) -> str:
        """The reason why the cluster of the engines cannot be changed now, or ""."""
        problem = self._parts.launcher.problem
        return problem and f"the cluster cannot be changed: {problem}"

    def _new_engine(self, replica: Replica) -> EngineProcess:
        exits_by_failed_node = self._parts.policy.exits_by_failed_node(replica.deaths, time.monotonic())
        on_message = partial(self._on_engine_message, replica)
        return self._parts.launcher.new_engine(replica, self.config.priority, exits_by_failed_node, on_message)

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


async def find_on_thread(config: ModelSection) -> Task:
    """Return the task of a model, as `find_task` does. Raises the errors of `find_task`.

    A hub that does not answer holds up a thread of this model alone. The thread does not delay the end of the process.
    """
    return await asyncio.wrap_future(start_call(partial(find_task, config)))
