"""An upstream server that the supervisor starts: its process group, log, readiness and end.

The server is ready once it has answered one tiny real request. The supervisor starts, watches and restarts the server.
API servers only know its address.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from meltcore.common.die_with_parent import GuardedProcess
from meltcore.common.errors import ConfigError
from meltcore.common.process import describe_exit
from meltcore.fleet.processes.upstream_command import upstream_command
from meltcore.serve.upstream.http_backend import upstream_api_key
from meltcore.serve.upstream.http_connection import UpstreamError
from meltcore.serve.upstream.http_replica import UpstreamReplica
from meltcore.settings.fleet_spec import ModelSection, TimeoutsSection

_POLL_S = 0.1
STOP_LIMIT_S = 10.0  # from SIGTERM to SIGKILL
_PROBES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1},
}


class UpstreamProcess:
    """Runs one replica of a model whose server is started by a command."""

    is_evicted = False  # no cluster has it

    def __init__(
        self,
        name: str,
        config: ModelSection,
        replica: int,
        port: int,
        log_path: Path,
        report: Callable[[str], None],
        timeouts: TimeoutsSection,
    ) -> None:
        """Prepare the process. Raises ConfigError if the command cannot work.

        Args:
            name: name of the model.
            config: settings of the model.
            replica: index of the replica, from 0.
            port: port on which the server shall listen.
            log_path: file for the server's output. The output of an earlier process is kept beside it as *.previous.
            report: receives a line if the process has to be killed.
            timeouts: time limits of the fleet.
        """
        self.url = f"http://127.0.0.1:{port}"
        self._config = config
        self._start_s = timeouts.start_s
        self._model = config.upstream_model or name
        self._command = upstream_command(name, config, replica, port)
        self._name = f"the server of {name}" + (f" (replica {replica})" if config.replicas > 1 else "")
        self._upstream = UpstreamReplica(replica, self.url, timeouts.connect_s, upstream_api_key(name, config))
        self._log_path = log_path
        self._report = report
        self._process: GuardedProcess | None = None

    async def start(self) -> float:
        """Start the server and wait until it has answered a request. Return the seconds from the start to this answer.

        Raises ConfigError if the server ends before it answers, or if it takes longer than `timeouts.start_s`. The
        message contains the end of the server's output.
        """
        started_s = time.monotonic()
        if self._log_path.exists():
            self._log_path.replace(self._log_path.with_name(self._log_path.name + ".previous"))
        self._process = GuardedProcess(
            self._command.arguments,
            self._log_path,
            name=self._name,
            report=self._report,
            environment=self._command.environment,
            stop_limit_s=STOP_LIMIT_S,
        ).start()
        try:
            await self._become_ready(started_s + self._start_s)
        except BaseException:
            await self.stop()
            raise
        return time.monotonic() - started_s

    async def wait(self) -> str:
        """Wait until the server has ended. Return the reason, followed by the end of the server's output."""
        assert self._process is not None
        while self._process.running:  # noqa: ASYNC110 - a process of LoggedProcess has no event
            await asyncio.sleep(_POLL_S)
        return f"{self._how_it_ended()}:\n{self.log_tail()}"

    async def stop(self) -> None:
        """End the whole process group. Can be called twice."""
        if self._process is not None:
            # On a thread: a server may take seconds to end, and others go on meanwhile.
            await asyncio.shield(asyncio.to_thread(self._process.stop))

    async def leave(self) -> None:
        """End the processes that an ended server left behind in its process group. Can be called twice."""
        await self.stop()

    async def wait_freed(self) -> None:
        """Return immediately, because `leave` has already ended the process group."""

    def kill(self) -> None:
        """Kill the process group immediately."""
        if self._process is not None:
            self._process.stop(0.0)

    def fail(self, reason: str) -> None:
        """Report the reason why a server cannot be used, and kill the server."""
        self._report(f"{self._name}: {reason}")
        self.kill()

    async def post(self, path: str, limit_s: float) -> None:
        """Send a POST request without a body.

        Raises ConfigError if the answer is not 200, or does not come within the limit.
        """
        try:
            answer = await self._upstream.ask("POST", path, limit_s=limit_s)
        except UpstreamError as error:
            raise ConfigError(f"{path}: {error}") from error
        if answer.status != 200:
            text = answer.body[:200].decode(errors="replace")
            raise ConfigError(f"{path} answers with status {answer.status}: {text}")

    @property
    def pid(self) -> int | None:
        """The id of the process group while the server runs, else None."""
        return self._process.pid if self._process is not None and self._process.running else None

    def log_tail(self) -> str:
        """Return the last lines of the server's output."""
        return self._process.log_tail() if self._process is not None else ""

    def _how_it_ended(self) -> str:
        """Return a text with the server's exit status, or with the signal that has killed the server.

        The guard process that leads the group exits with the server's status.
        """
        assert self._process is not None
        status = self._process.returncode or 0
        with suppress(ValueError):
            return f"exit status {status}, killed by {signal.Signals(status - 128).name}"
        return describe_exit(status)

    async def _become_ready(self, deadline_s: float) -> None:
        process = self._process
        assert process is not None
        reason = "it has not answered yet"

        async def poll() -> bool | None:
            nonlocal reason
            await self._upstream.check_health()
            if self._upstream.state != "up":
                reason = self._upstream.reason
                return None
            reason = "it did not answer the readiness request"
            with suppress(UpstreamError):
                await self._probe(deadline_s)
                return process.running or None  # another program may answer at the port
            return None

        def failure(limit_s: float | None) -> ConfigError:
            if limit_s is None:
                return ConfigError(f"{self._name} ended while starting ({self._how_it_ended()}):\n{self.log_tail()}")
            limit = f"{self._start_s:g} s (timeouts.start_s)"
            return ConfigError(
                f"{self._name} was not ready within {limit}: {reason}; its last output:\n{self.log_tail()}"
            )

        await process.wait_for_async(poll, deadline_s - time.monotonic(), failure)

    async def _probe(self, deadline_s: float) -> None:
        """Send one small request to the server and wait for the answer.

        Raises ConfigError if the server refuses the request, and UpstreamError if it does not answer.
        """
        path = next((path for path in _PROBES if path in self._config.upstream_paths), None)
        if path is None:
            return  # audio or embeddings: there is no request that every such server answers
        body = msgspec.json.encode({"model": self._model, **_PROBES[path]})
        limit_s = max(0.1, deadline_s - time.monotonic())
        answer = await self._upstream.ask("POST", path, body, limit_s=limit_s)
        if answer.status != 200:
            text = answer.body[:300].decode(errors="replace")
            raise ConfigError(
                f"{self._name} answered the readiness request on {path} with status {answer.status}: {text}"
            )
