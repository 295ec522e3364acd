"""Servers that run on their own: started with `serve --daemon`, found again by port, ended with `stop`.

Each has a record (`PORT.json`) and a log in the state folder, `$XDG_STATE_HOME/meltcore` or `~/.local/state/meltcore`.
`python -m meltcore.server.daemon` is the server itself; its ServerConfig comes as JSON on standard input, so that an
API key never shows in the list of processes.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec

from meltcore.config import ServerConfig
from meltcore.errors import ConfigError, MeltcoreError

POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0


class Record(msgspec.Struct, frozen=True):
    """A running server. A process id can be used again, so the start time says whether it is still the same one."""

    pid: int
    start_ticks: int  # of the process, in clock ticks since boot
    port: int
    url: str
    model: str
    log: str

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def state_dir() -> Path:
    """The folder of records and logs, made where it is missing."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(base) / "meltcore"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def start(config: ServerConfig, *, log: Path | str | None = None, limit_s: float | None = None) -> int:
    """Start a server, wait until it is ready, print its address. It outlives us.

    `log` takes its output; None: a new file among the records. Raises ConfigError with what is on the port already, or
    with the server's own reason where it does not come up within `limit_s` (None: however long it takes). Ctrl-C ends
    the half-started one.
    """
    for record in running():
        if record.port == config.port:
            raise ConfigError(f"{record.url} serves {record.model} already (pid {record.pid}, log {record.log})")
    log = Path(log or state_dir() / f"serve-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log").absolute()
    with _open_log(log) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "meltcore.server.daemon", str(log)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        record = _wait_ready(process, log, limit_s)
    except BaseException:
        process.kill()
        process.wait()
        raise
    print(f"meltcore: listening on {record.url} (pid {record.pid}, log {record.log})")
    return 0


def running() -> list[Record]:
    """The servers that are up, by port. Records of dead ones are removed."""
    found = []
    for path in state_dir().glob("*.json"):
        record = _read(path)
        if record is not None and record.alive:
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.port)


def stop(records: list[Record], timeout_s: float) -> int:
    """Ask each server to drain and leave; 0 where all have left within `timeout_s`."""
    for record in records:
        os.kill(record.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    late = 0
    for record in records:
        while record.alive and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if record.alive:
            late += 1
            print(f"meltcore: {record.url} (pid {record.pid}) is still draining after {timeout_s:g} s")
        else:
            print(f"meltcore: stopped {record.url} ({record.model})")
    return 1 if late else 0


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"--log {path} cannot be written: {error.strerror}") from error


def _wait_ready(process: subprocess.Popen[bytes], log: Path, limit_s: float | None) -> Record:
    record: Record | None = None
    started_s = time.monotonic()
    while True:
        if process.poll() is not None:
            raise ConfigError(_last_line(log) or f"the server ended with exit status {process.returncode}; see {log}")
        if limit_s is not None and time.monotonic() - started_s > limit_s:
            raise ConfigError(f"the server was not ready within {limit_s:g} s; its last line: {_last_line(log)}")
        if record is None:
            record = next((found for found in running() if found.pid == process.pid), None)
        elif _is_ready(record):
            return record
        time.sleep(POLL_S)


def _is_ready(record: Record) -> bool:
    parts = urlsplit(record.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False  # not up yet, or just gone: the caller looks at the process
    finally:
        connection.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("meltcore serve: ") if lines else ""


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None  # gone meanwhile, or cut short by a crash: either way nobody's record


def _start_ticks(pid: int) -> int | None:
    """When process `pid` started; None where it is gone (a zombie is)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, second, is in parentheses and may hold anything; state is the 1st field after it, start time the 20th.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _connect_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server bound to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> int:
    """Run the server described on standard input, with a record while it is up. The log's path is the argument."""
    from meltcore.server.run import serve

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    paths: list[Path] = []

    def record(port: int) -> None:
        ticks = _start_ticks(os.getpid())
        assert ticks is not None
        url = _connect_url(config.host, port)
        path = state_dir() / f"{port}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(
            msgspec.json.encode(Record(os.getpid(), ticks, port, url, config.engine.model, sys.argv[1]))
        )
        unfinished.rename(path)
        paths.append(path)

    try:
        return serve(config, on_bound=record)
    except MeltcoreError as error:
        print(f"meltcore serve: {error}", file=sys.stderr)
        return 2
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
