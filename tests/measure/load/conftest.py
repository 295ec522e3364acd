"""A scripted server in a process of its own, so that its timers do not share the client's event loop."""

import subprocess
from collections.abc import Callable, Iterator

import pytest
from scripted_server import COMMAND
from waiting import WAIT_S


class ServerProcess:
    def __init__(self, *arguments: str) -> None:
        command = [*COMMAND, "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers with command-line options; all are stopped at the test's end."""
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(ServerProcess(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.stop()
