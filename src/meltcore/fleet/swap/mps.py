"""Runs NVIDIA's Multi-Process Service for the engines of a server, so that their kernels run on a GPU concurrently.

Without MPS the driver gives the whole GPU to one process after another, for about 2 ms each. This holds even if the
kernels of a process fill only a small part of the GPU. The MPS daemon runs as the user of the server with folders of
its own, and ends with the server, even if that is killed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from meltcore.common.die_with_parent import GuardedProcess
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import gpu_environment
from meltcore.common.process import ProcessError, run
from meltcore.settings.config import PriorityClass

_PROGRAM = "nvidia-cuda-mps-control"
_FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")  # also where PATH lacks them
_START_LIMIT_S, _END_LIMIT_S = 10.0, 10.0
_LOG_TAIL = 400  # characters


class MpsDaemon:
    """Runs an MPS control daemon, which starts a server process for its clients."""

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

    def start(self) -> None:
        """Start the daemon and wait for its socket. Raises ConfigError if the daemon ends or is not ready in time."""
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
            self.stop()
            raise

    def client_environment(self, priority_class: PriorityClass, sm_percent: int) -> dict[str, str]:
        """Return the environment variables for an engine. If the daemon has ended, start it again.

        An engine below the class `interactive` may use `sm_percent` of the GPU's SMs. Raises ConfigError if the daemon
        does not start.
        """
        if not self.is_running:
            self.stop()
            self.start()
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
        done = self._command(b"get_server_list\n")
        return [int(word) for word in done.split() if word.isdigit()]

    def stop(self) -> None:
        """End the daemon and its servers. Their clients should have ended."""
        if self._process is None:
            return
        if self.is_running:
            with suppress(ProcessError):
                self._command(b"quit -t 5\n")
        self._process.stop()
        self._process = None

    def _command(self, line: bytes) -> bytes:
        return run([self._control], stdin=line, limit_s=_END_LIMIT_S, environment=os.environ | self.environment).stdout

    def _start_error(self, limit_s: float | None) -> ConfigError:
        log = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() if self._log.exists() else "it left no log"
        if limit_s is not None:
            return ConfigError(f"{_PROGRAM} was not ready within {limit_s:g} s: {log}")
        assert self._process is not None
        return ConfigError(f"{_PROGRAM} ended with code {self._process.returncode}: {log}")
