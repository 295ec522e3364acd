"""A `meltcore serve` of our own, on a port that the system picks; its banner says which."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from meltcore.evals.server_process import ServerProcess

OWN_PROGRAM = (sys.executable, "-m", "meltcore.cli.main")
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 180.0


class OwnServer(ServerProcess):
    """A context manager: the server runs inside the `with`, and is gone after it whatever happened."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        *,
        say: Callable[[str], None],
        program: Sequence[str] = OWN_PROGRAM,
    ) -> None:
        super().__init__([*program, "serve", *arguments, "--port", "0"], log_path, say=say)

    def wait_ready(self, *, listen_limit_s: float = LISTEN_LIMIT_S, ready_limit_s: float = READY_LIMIT_S) -> str:
        """The server's address, once /health answers 200. Raises ServerError past the limits or where it ends first."""
        address = self.wait_for(self._banner, listen_limit_s, "print its address")
        self.wait_healthy(address, ready_limit_s)
        return address

    def _banner(self) -> str | None:
        match = _BANNER.search(self.log)
        return match[1] if match else None
