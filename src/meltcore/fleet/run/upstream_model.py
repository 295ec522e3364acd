"""Runs one upstream model of the supervisor: servers that run elsewhere, or processes that the supervisor starts.

The supervisor gives API servers the addresses only. Each API server checks the health of the servers itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meltcore.common.errors import ConfigError
from meltcore.common.process import free_port
from meltcore.common.process_output import one_line
from meltcore.fleet.processes.upstream_command import upstream_command
from meltcore.fleet.processes.upstream_process import UpstreamProcess
from meltcore.fleet.run.logs import log_path
from meltcore.fleet.run.replica import BaseReplica
from meltcore.fleet.run.supervised_model import ServerContext, SupervisedModel
from meltcore.protocol.channel import AddModel
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.tasks.forwarding import forwarded_paths
from meltcore.serve.upstream.http_backend import upstream_api_key
from meltcore.serve.upstream.http_replica import UpstreamReplica as Upstream
from meltcore.settings.fleet_spec import ModelSection

# Of vLLM. Level 1 keeps the weights in host memory; level 2 would need them to be loaded by another call.
_SLEEP_PATH, _WAKE_PATH = "/sleep?level=1", "/wake_up"
_HEALTH_POLL_S = 0.5  # of servers that run elsewhere, until one answers


@dataclass(eq=False, kw_only=True)
class UpstreamServer(BaseReplica[UpstreamProcess]):
    """One replica of an upstream model. A command starts its server."""

    log: Path
    port: int


class UpstreamModel(SupervisedModel[UpstreamServer]):
    """Runs the servers of one upstream model, from their first start until the server ends or the model is removed."""

    def __init__(self, number: int, name: str, config: ModelSection, stats: ModelStats, parts: ServerContext) -> None:
        """Add the model to all API servers. Raises ConfigError if the upstream's API key is missing."""
        key = upstream_api_key(name, config)  # a message here, not a death of every API server
        folder, count = parts.log_folder or parts.sockets, 0 if config.url else config.replicas
        servers = [
            UpstreamServer(index=index, port=free_port(), log=log_path(folder, name, index, count))
            for index in range(count)
        ]
        super().__init__(
            number,
            (name, *config.aliases),
            servers,
            stats,
            parts,
            is_sleepable=config.is_sleepable,
            priority_class=config.priority,
        )
        self.config = config
        stats.task = config.task  # for the metrics of this process
        for server in servers:
            server.process = self._new_process(server)
        # A fleet is not ready before servers that run elsewhere have answered.
        self._elsewhere = None if config.url is None else Upstream(0, config.url, parts.timeouts.connect_s, key)
        urls = [config.url] if config.url else [f"http://127.0.0.1:{server.port}" for server in self.replicas]
        parts.pool.add_model(AddModel(number, name, config, config.task, urls=urls))

    # --- starting

    async def load(self) -> None:
        """Start all servers and wait for them, or wait for the server that runs elsewhere, up to `timeouts.start_s`.

        Raises MeltcoreError if the model cannot serve.
        """
        if self._elsewhere:
            await self._wait_elsewhere(self._elsewhere, self._parts.timeouts.start_s)
        await self._start_all()
        self.update_status()

    async def load_or_fail(self) -> None:
        """Load the model. If it cannot serve, keep it in the server with the status failed."""
        await super().load_or_fail()
        if self._elsewhere and self.status == "failed":  # it may be started yet
            await self._wait_elsewhere(self._elsewhere, math.inf)
            self.update_status()

    async def _wait_elsewhere(self, server: Upstream, limit_s: float) -> None:
        """Wait until the server at the address is healthy. Raises ConfigError if it is not healthy in time."""
        deadline_s = time.monotonic() + limit_s
        while True:
            await server.check_health()
            if server.state == "up":
                return
            if server.leads_back and limit_s < math.inf:
                raise ConfigError(server.reason)
            if time.monotonic() >= deadline_s:
                raise ConfigError(f"no answer within {limit_s:g} s (timeouts.start_s): {server.reason}")
            await asyncio.sleep(min(_HEALTH_POLL_S, max(0.0, deadline_s - time.monotonic())))

    async def fail_loading(self, reason: str) -> None:
        """End the start of a model that takes too long to load for the first time.

        The error has the last output of its server.
        """
        late = next((each.process for each in self.replicas if each.state == "loading"), None)
        await super().fail_loading(reason if late is None else f"{reason}; its last output:\n{late.log_tail()}")

    def _shortened(self, reason: str) -> str:
        return one_line(reason)

    async def _start(self, server: UpstreamServer) -> float:
        """Start the process of a replica. Return the seconds until it could serve.

        Raises ConfigError if the process ends or is not ready in time.
        """
        server.apply("start")
        self.stats.set("start_s", time.monotonic())
        async with self._gate(server.index):
            server.apply("placed")
            self.stats.set("start_s", time.monotonic())
            server.process = self._new_process(server)
            return await server.process.start()

    def _new_process(self, server: UpstreamServer) -> UpstreamProcess:
        parts = self._parts
        return UpstreamProcess(
            self.name, self.config, server.index, server.port, server.log, parts.report, parts.timeouts
        )

    def _gate(self, replica: int) -> AbstractAsyncContextManager[None]:
        """Wait for engines that load on the same GPUs. A server without GPUs does not wait."""
        if not (gpus := self.config.replica_gpus[replica]):
            return nullcontext()
        return self._parts.gate.loading(frozenset(map(str, gpus)), has_budget=self.config.memory is not None)

    def _on_ready(self, server: UpstreamServer, load_s: float) -> None:
        server.apply("loaded")
        server.reason = ""
        self.stats.set("start_took_s", load_s)
        self.stats.mark_replica_ready(server.index)
        self._note_started(server, load_s)
        self._parts.log.write("engine_ready", model=self.name, replica=server.index, load_s=round(load_s, 3))
        self.update_status()

    # --- ending

    def _tell_end(self, server: UpstreamServer, *, was_serving: bool, num_open: int, plan: str) -> None:
        event, what = ("engine_died", "has ended") if was_serving else ("engine_failed", "could not start")
        reason = server.reason
        self._parts.log.write(
            event, model=self.name, replica=server.index, why=one_line(reason), open_requests=num_open
        )
        subject = f"the server of {self.name}" + (f" (replica {server.index})" if len(self.replicas) > 1 else "")
        self._parts.report(f"{subject} {what}: {reason}; {plan}")

    # --- sleeping

    async def sleep_process(self, server: UpstreamServer, keep: Literal["host", "disk"], limit_s: float) -> bool:
        """Put a server to sleep if it has a sleep mode. Return whether it sleeps.

        This method reports a server that refuses to sleep.
        """
        if self.config.sleep_mode != "vllm" or keep != "host":
            return False
        try:
            await server.process.post(_SLEEP_PATH, limit_s)
        except ConfigError as error:
            if server.state == "draining":  # else it has ended, which was reported
                self._parts.report(f"the server of {self.name} cannot sleep ({error}): it is ended, and started again")
            return False
        return True

    async def wake_process(self, server: UpstreamServer, limit_s: float) -> str:
        """Wake a server. If the server does not wake, end it and start it again.

        Return "", because it serves or is starting.
        """
        problem = ""
        try:
            await server.process.post(_WAKE_PATH, limit_s)
        except ConfigError as error:
            problem = str(error)
        if server.state != "sleeping":  # it has ended, and is started again
            return ""
        if problem:
            self._parts.report(f"the server of {self.name} could not be woken ({problem}): it is started again")
            await self.end_engine(server)
        else:
            server.apply("woke")
            self.stats.mark_replica_ready(server.index)
        return ""

    # --- state

    @property
    def is_loading(self) -> bool:
        """Whether the model is loaded for the first time."""
        return self.status == "loading"

    def update_status(self, pause_s: float | None = None) -> None:  # noqa: ARG002 - its clients see no pause
        """Update the model's status from its processes."""
        if self._draining:
            return
        states = [server.state for server in self.replicas]
        reason = next((one_line(server.reason) for server in self.replicas if server.reason), "")
        if not self.may_run.is_set():
            if self.status != "loading" and set(states) != {"failed"}:
                self.set_status("sleeping", f"{self.name} sleeps; requests wait until it is woken")
        elif not states or "ready" in states or "draining" in states:
            self.set_status("ready", "ready")
        elif set(states) == {"failed"}:
            self.set_status("failed", f"the server of {self.name} has ended and is not started again: {reason}")
        elif reason:
            self.set_status("restarting", f"the server of {self.name} has ended ({reason}); it is started again")


def check_upstream(name: str, config: ModelSection) -> None:
    """Raise ConfigError if an upstream model cannot work: a key or a program is missing, or a path has no route."""
    upstream_api_key(name, config)
    if config.command is not None:
        upstream_command(name, config, 0, 1)
    for path in config.upstream_paths:
        if path not in (known := forwarded_paths()):
            raise ConfigError(f"models.{name}.paths: got {path!r}; may be {', '.join(known)}")
