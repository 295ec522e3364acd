"""Servers in the background: started with `serve --daemon`, found by port, ended with `stop`.

Each has a record (`PORT.json`) and a log in the state folder, `$XDG_STATE_HOME/meltcore` or `~/.local/state/meltcore`.
`python -m meltcore.fleet.daemon` is the server itself. Its ServerConfig comes as JSON on standard input, so that an API
key never shows in the list of processes.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec

from meltcore.config import ServerConfig
from meltcore.errors import ConfigError, MeltcoreError
from meltcore.process import log_tail, start_ticks
from meltcore.process import start as start_process

POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0


class DaemonRecord(msgspec.Struct, frozen=True):
    """A running server. Process ids are reused; the start time tells whether it is still the same process."""

    pid: int
    start_ticks: int  # of the process, in clock ticks since boot
    port: int
    url: str
    model: str
    log: str

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return start_ticks(self.pid) == self.start_ticks


def state_dir() -> Path:
    """Return the folder of records and logs, made where it is missing. Raises ConfigError where it cannot be used."""
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state_home) / "meltcore"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(_unusable(folder, error.strerror)) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(_unusable(folder, "Permission denied"))
    return folder


def _unusable(folder: Path, reason: str | None) -> str:
    return f"the folder of server records and logs, {folder}, cannot be used: {reason} (XDG_STATE_HOME says where)"


def start(config: ServerConfig, *, log: Path | str | None = None, limit_s: float | None = None) -> int:
    """Start a server, wait until it is ready, print its address. It outlives this process.

    `log`: file for the server's output; None creates one in the state folder. Raises ConfigError where the port is in
    use, or where the server is not ready within `limit_s` (None: no limit); the message gives the cause. Ctrl-C stops
    a server that is still starting.
    """
    for record in running():
        if record.port == config.port:
            raise ConfigError(f"{record.url} serves {record.model} already (pid {record.pid}, log {record.log})")
    log = Path(log or state_dir() / f"serve-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log").absolute()
    with _open_log(log) as output:
        command = (sys.executable, "-m", "meltcore.fleet.daemon", str(log))
        process = start_process(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
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


def running() -> list[DaemonRecord]:
    """Return the servers that are up, by port. Removes the records of servers that have exited."""
    records = []
    for path in state_dir().glob("*.json"):
        record = _read(path)
        if record is not None and record.alive:
            records.append(record)
        else:
            path.unlink(missing_ok=True)
    return sorted(records, key=lambda record: record.port)


def stop(records: list[DaemonRecord], timeout_s: float) -> int:
    """Ask each server to drain and leave; 0 where all have left within `timeout_s`."""
    for record in records:
        os.kill(record.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    num_still_running = 0
    for record in records:
        while record.alive and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if record.alive:
            num_still_running += 1
            print(f"meltcore: {record.url} (pid {record.pid}) is still draining after {timeout_s:g} s")
        else:
            print(f"meltcore: stopped {record.url} ({record.model})")
    return 1 if num_still_running else 0


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"--log {path} cannot be written: {error.strerror}") from error


def _wait_ready(process: subprocess.Popen[bytes], log: Path, limit_s: float | None) -> DaemonRecord:
    record: DaemonRecord | None = None
    started_s = time.monotonic()
    while True:
        if process.poll() is not None:
            raise ConfigError(_last_line(log) or f"the server ended with exit status {process.returncode}; see {log}")
        if limit_s is not None and time.monotonic() - started_s > limit_s:
            raise ConfigError(f"the server was not ready within {limit_s:g} s; its last line: {_last_line(log)}")
        if record is None:
            record = next((record for record in running() if record.pid == process.pid), None)
        elif _is_ready(record):
            return record
        time.sleep(POLL_S)


def _is_ready(record: DaemonRecord) -> bool:
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
    return log_tail(log, 1).removeprefix("meltcore serve: ")


def _read(path: Path) -> DaemonRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=DaemonRecord)
    except (OSError, msgspec.DecodeError):
        return None  # gone meanwhile, or cut short by a crash


def _connect_url(host: str, port: int) -> str:
    """Return where a client on this machine reaches a server bound to `host`."""
    with suppress(ValueError):  # a name
        if ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> int:
    """Serve the ServerConfig read as JSON from stdin; `running()` lists it while it is up. argv[1] is the log path."""
    from meltcore.fleet.supervisor import serve

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    paths: list[Path] = []

    def record(port: int) -> None:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        url = _connect_url(config.host, port)
        path = state_dir() / f"{port}.json"
        models = ", ".join(
            [*(model.engine.model for model in config.models), *(model.names[0] for model in config.foreign)]
        )
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.encode(DaemonRecord(os.getpid(), ticks, port, url, models, sys.argv[1])))
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
