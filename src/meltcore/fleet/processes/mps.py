"""Runs NVIDIA's Multi-Process Service for the engines of a server, so that their kernels run on a GPU concurrently.

Without MPS the driver gives the whole GPU to one process after another, for about 2 ms each. This holds even if the
kernels of a process fill only a small part of the GPU. The MPS daemon runs as the user of the server with folders of
its own, and ends with the server, even if that is killed.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from meltcore.common.die_with_parent import GuardedProcess
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import gpu_environment
from meltcore.common.process import ProcessError, describe_exit, group_members, run
from meltcore.settings.config import PriorityClass

_PROGRAM = "nvidia-cuda-mps-control"
_FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")  # also where PATH lacks them
_START_LIMIT_S, _END_LIMIT_S, _ANSWER_LIMIT_S = 10.0, 10.0, 5.0
_LOG_TAIL = 400  # characters


class MpsDaemon:
    """Runs an MPS control daemon, which starts a server process for its clients.

    Its methods wait for processes, so an event loop calls them on a thread.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare the daemon. Raises ConfigError if the control program is not installed.

        The daemon's sockets and logs are in the private `folder`. The path of a socket may have at most 107 bytes.
        """
        control = shutil.which(_PROGRAM, path=os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS]))
        if control is None:
            raise ConfigError(f"sharing.means: mps needs {_PROGRAM}, which comes with NVIDIA's driver; it is not there")
        self._control = control
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        self._pipe, self._log = folder / "pipe", folder / "log" / "control.log"
        self._process: GuardedProcess | None = None
        self._lock = threading.Lock()  # the engines of a daemon that has ended all start it again

    def start(self) -> None:
        """Start the daemon if it does not run, and wait for its socket.

        Raises ConfigError if the daemon ends or is not ready in time.
        """
        with self._lock:
            if not self.is_running:
                self._end()
                self._start()

    def _start(self) -> None:
        for path in self.environment.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        (self._pipe / "control").unlink(missing_ok=True)  # of a daemon that was killed
        # The daemon would number the GPUs of CUDA_VISIBLE_DEVICES anew, and its clients name them as the driver does.
        environment = os.environ | gpu_environment([])
        del environment["CUDA_VISIBLE_DEVICES"]
        self._process = GuardedProcess(
            [self._control, "-f"],
            Path(os.devnull),  # it writes a log of its own
            name=_PROGRAM,
            report=lambda _line: None,
            environment=environment | self.environment,
            stop_limit_s=_END_LIMIT_S,
        ).start()
        try:
            self._process.wait_for(lambda: (self._pipe / "control").exists() or None, _START_LIMIT_S, self._start_error)
        except ConfigError:
            self._end()
            raise

    def client_environment(self, priority_class: PriorityClass, sm_percent: int) -> dict[str, str]:
        """Return the environment variables for an engine.

        An engine below the class `interactive` may use `sm_percent` of the GPU's SMs.
        """
        if priority_class == "interactive":
            return self.environment
        return self.environment | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(sm_percent)}

    @property
    def is_running(self) -> bool:
        """Whether the daemon was started and has not ended."""
        return self._process is not None and self._process.running

    def servers(self) -> list[int]:
        """Return the process ids of the server processes, one per GPU and user.

        Raises ProcessError if the daemon does not answer.
        """
        return self._ask("get_server_list")

    def client_problem(self, group_id: int, num_ranks: int) -> str:
        """Return why the kernels of an engine do not run concurrently with those of other engines, or "" if they do.

        A process that misses the daemon's socket falls back to time-slicing without an error. So each of the
        `num_ranks` processes of the engine, which are in the process group `group_id`, has to be in the daemon's list.
        """
        try:
            clients = {client for server in self.servers() for client in self._ask(f"get_client_list {server}")}
        except ProcessError as error:
            return f"it is not known whether its kernels run concurrently with others: {error}"
        num_clients = len(clients.intersection(group_members(group_id)))
        if num_clients >= num_ranks:
            return ""
        others = ", ".join(map(str, sorted(clients))) or "none"
        return (
            f"its kernels take turns with those of other engines: of its {num_ranks} processes (group {group_id}), MPS "
            f"lists {num_clients} as clients (all clients: {others}); see {self._log}, and restart the model"
        )

    def stop(self) -> None:
        """End the daemon and its servers. Their clients should have ended."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        if self.is_running:
            with suppress(ProcessError):
                self._command("quit -t 5", _END_LIMIT_S)
        self._process.stop()
        self._process = None

    def _ask(self, line: str) -> list[int]:
        """Return the process ids that answer a command."""
        return [int(word) for word in self._command(line, _ANSWER_LIMIT_S).split() if word.isdigit()]

    def _command(self, line: str, limit_s: float) -> bytes:
        """Return the answer to a command. Raises ProcessError if there is none within `limit_s`, or if it fails."""
        environment = os.environ | self.environment
        done = run([self._control], stdin=f"{line}\n".encode(), limit_s=limit_s, environment=environment)
        if done.returncode is None:
            raise ProcessError(f"{_PROGRAM} did not answer {line} within {limit_s:g} s")
        if done.returncode:
            text = (done.stdout + done.stderr).decode(errors="replace")[-_LOG_TAIL:].strip()
            raise ProcessError(f"{_PROGRAM} answered {line} with {describe_exit(done.returncode)}: {text}")
        return done.stdout

    def _start_error(self, limit_s: float | None) -> ConfigError:
        log = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() if self._log.exists() else "it left no log"
        if limit_s is not None:
            return ConfigError(f"{_PROGRAM} was not ready within {limit_s:g} s: {log}")
        assert self._process is not None
        return ConfigError(f"{_PROGRAM} ended with code {self._process.returncode}: {log}")
