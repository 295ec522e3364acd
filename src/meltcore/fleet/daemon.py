"""Keeps records of servers, so that other commands find them by port: servers of `serve --daemon`, and all fleets.

Each server has a record (`COMMAND-PORT.json`) and a log in the state folder, `$XDG_STATE_HOME/meltcore` or
`~/.local/state/meltcore`. `python -m meltcore.fleet.daemon` runs the server. It reads the server's configuration as
JSON from standard input, so that an API key never shows in the list of processes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import msgspec

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.process import LoggedProcess, loading_modules, start_ticks
from meltcore.common.process_output import log_tail
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.run.logs import LOG_LIMIT_BYTES, log_folder
from meltcore.protocol.sockets import ADMIN_SOCKET

if TYPE_CHECKING:
    from meltcore.fleet.plan.planned import FleetPlanner
    from meltcore.fleet.supervisor import FleetOptions
    from meltcore.settings.fleet_spec import FleetSpec

POLL_S = 0.1
_LOG_STARTS = (b"meltcore", b"time=", b'{"time"')  # the first bytes of a server's log


class DaemonRecord(msgspec.Struct, frozen=True):
    """The record of a running server.

    The operating system reuses process ids. The start time tells whether the process is still the same.
    """

    pid: int
    start_ticks: int  # of the process, in clock ticks since boot
    port: int
    url: str
    model: str
    log: str  # "": the terminal
    admin: str = ""  # the path of its admin socket

    @property
    def alive(self) -> bool:
        """Whether the process of the record still runs."""
        return start_ticks(self.pid) == self.start_ticks


class OneModel(msgspec.Struct, frozen=True, tag="serve"):
    """Describes a server of one model, which `meltcore serve` starts without a plan."""

    command: ClassVar[str] = "serve"
    file: ClassVar[str | None] = None

    def options(self, _log: Path) -> FleetOptions:
        """Return the options of the server. Its log has no size limit."""
        with loading_modules():
            from meltcore.fleet.supervisor import SERVE
        return SERVE


class PlannedFleet(msgspec.Struct, frozen=True, tag="up"):
    """Describes the server of a planned fleet: its fleet.yaml, and the machine or cluster for which it is planned."""

    file: str
    planned: msgspec.Raw
    command: ClassVar[str] = "up"

    @classmethod
    def of(cls, planner: FleetPlanner) -> Self:
        """Return the description of the fleet that `planner` plans."""
        return cls(str(planner.path), msgspec.Raw(msgspec.json.encode(planner.planned_from)))

    def options(self, log: Path) -> FleetOptions:
        """Return the options of the server, whose output goes to the file `log`.

        Raises ConfigError for an invalid fleet.yaml.
        """
        with loading_modules():
            from meltcore.fleet.plan.planned import FleetPlanner, PlannerSource
        planner = FleetPlanner.of(msgspec.json.decode(self.planned, type=PlannerSource))
        return dataclasses.replace(fleet_options(planner), server_log=log)


class _Served(msgspec.Struct, frozen=True):
    """The configuration that a server in the background reads from standard input."""

    fleet: PlacedFleet
    source: OneModel | PlannedFleet


def state_dir() -> Path:
    """Return the folder of records and logs.

    It is created if it is missing. Raises ConfigError if it cannot be used.
    """
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


def start(
    fleet: PlacedFleet,
    source: OneModel | PlannedFleet,
    *,
    log: Path | str | None = None,
    limit_s: float | None = None,
) -> int:
    """Start a server that outlives this process, wait until the server is ready, and print its address.

    The server is ready once each model is ready, has failed, or is pending. Returns 1 if a model has failed or is
    pending, else 0. Raises ConfigError with the cause if the port is in use, or if the server is not ready within
    `limit_s`. Ctrl-C stops a server that is still starting.

    Args:
        fleet: the models, with the outcome of their plan.
        source: one model, or a planned fleet, for the process that serves it.
        log: file for the server's output. None creates a file in the state folder.
        limit_s: seconds until the server must be ready. None waits without a limit.
    """
    _check_port_free(fleet.spec.server.port)
    log = Path(log or state_dir() / f"{source.command}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log").absolute()
    _check_log(log, fleet.spec, source)
    process = LoggedProcess(
        [sys.executable, "-m", "meltcore.fleet.daemon", str(log)],
        log,
        name="the server",
        report=lambda _line: None,
        # With a buffer, a line reaches the log in one write, so that lines of several processes do not mix.
        environment={"PYTHONUNBUFFERED": ""} | os.environ,
        stdin=subprocess.PIPE,
    )
    try:
        process.start()
    except OSError as error:
        raise ConfigError(f"--log {log} cannot be written: {error.strerror}") from error
    try:
        process.send(msgspec.json.encode(_Served(fleet, source))).close()
        record, rows = _wait_ready(process, log, math.inf if limit_s is None else limit_s)
    except BaseException:
        process.stop(0.0)
        raise
    print(f"meltcore: listening on {record.url} (pid {record.pid}, log {record.log})")
    failed = [row for row in rows if row["status"] == "failed"]
    for row in failed:
        # An engine that never started, as of a checkpoint that is not there, has no log.
        log_note = f"; its log: {row['log']}" if row["log"] and Path(row["log"]).exists() else ""
        print(f"meltcore: {row['reason']}{log_note}", file=sys.stderr)
    pending = _pending(rows)
    for reason in pending.values():
        print(f"meltcore: {reason}", file=sys.stderr)
    if pending:
        print(
            f"meltcore: the fleet goes on in the background, and tries to start {' and '.join(pending)} again and "
            "again; `meltcore ps` shows them, `meltcore down` ends the fleet",
            file=sys.stderr,
        )
    return 1 if failed or pending else 0


def _check_port_free(port: int) -> None:
    """Raise ConfigError if a recorded server has this port, at whatever address.

    A second server on the port would replace the record and the logs of the first.
    """
    for record in running():
        if record.port == port:
            log = record.log or "the terminal"
            raise ConfigError(
                f"{record.url} serves {record.model} already (pid {record.pid}, log {log}); commands find a server by "
                "its port: choose another with server.port or --port"
            )


def _check_log(log: Path, spec: FleetSpec, source: OneModel | PlannedFleet) -> None:
    """Raise ConfigError if a new log would replace a file that is no log, or that a running server writes."""
    server = spec.server
    read = [source.file, server.api_key_file, server.ssl_certfile, server.ssl_keyfile, *(key.file for key in spec.keys)]
    for model in spec.models.values():
        read += [model.checkpoint, model.tokenizer, model.chat_template]
    if log.resolve() in {Path(path).expanduser().resolve() for path in read if path}:
        raise ConfigError(f"--log {log}: the server reads this file; name another one")
    for record in running():
        if log.resolve() == Path(record.log).resolve() or log.parent == log_folder(state_dir(), record.port):
            raise ConfigError(f"--log {log}: the server at {record.url} writes to this file; name another one")
    if log.is_file():
        with log.open("rb") as file:
            beginning = file.read(16)
        if beginning and not beginning.startswith(_LOG_STARTS):
            raise ConfigError(f"--log {log}: this file is no log of a server; name another one, or remove it")


def running(command: str = "*") -> list[DaemonRecord]:
    """Return the records of running servers by port: of all servers, or of one command.

    Removes the records of servers that no longer run.
    """
    records = []
    for path in state_dir().glob(f"{command}-*.json"):
        record = _read(path)
        if record is not None and record.alive:
            records.append(record)
        else:
            path.unlink(missing_ok=True)
    return sorted(records, key=lambda record: record.port)


def stop(records: list[DaemonRecord], timeout_s: float) -> int:
    """Let each server drain and end. Return 0 if all servers end within `timeout_s`, or else 1."""
    for record in records:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(record.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    num_still_running = 0
    for record in records:
        while record.alive and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if record.alive:
            num_still_running += 1
            print(f"meltcore: {record.url} (pid {record.pid}) has not ended after {timeout_s:g} s")
        else:
            print(f"meltcore: stopped {record.url} ({record.model})")
    return 1 if num_still_running else 0


def _wait_ready(process: LoggedProcess, log: Path, limit_s: float) -> tuple[DaemonRecord, list[dict[str, Any]]]:
    """Wait until the server is ready. Return the server's record, and its rows of `meltcore ps`."""

    def poll() -> tuple[DaemonRecord, list[dict[str, Any]]] | None:
        record = next((record for record in running() if record.pid == process.pid), None)
        return (record, rows) if record is not None and _has_answered(rows := engine_rows(record)) else None

    def failure(limit_s: float | None) -> ConfigError:
        if limit_s is None and process.returncode == 0:
            return ConfigError(f"the server was ended before it was ready; its log: {log}")
        if limit_s is None:
            fault = _log_fault(log)
            ended = f"the server ended with exit status {process.returncode}{'' if fault else f'; see {log}'}"
            return ConfigError(f"{_last_line(log) or ended}{fault}")
        last = f"its last line: {_last_line(log)}{_log_fault(log)}"
        return ConfigError(f"the server was not ready within {limit_s:g} s; {last}")

    return process.wait_for(poll, limit_s, failure)


def engine_rows(record: DaemonRecord) -> list[dict[str, Any]]:
    """Return the server's rows of `meltcore ps`. The list is empty while the server does not answer."""
    from meltcore.fleet.admin.admin import call_admin

    with suppress(ConfigError):  # not up yet, or just gone: the caller looks at the process
        rows: list[dict[str, Any]] = call_admin(record.admin, "GET", "/ps")
        return rows
    return []


def _pending(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the models without an engine that wait for memory on a node. Each has the reason."""
    states: dict[str, set[str]] = {}
    for row in rows:
        states.setdefault(row["model"], set()).add(row["state"])
    pending = {name for name, found in states.items() if "pending" in found and found <= {"pending", "failed"}}
    return {row["model"]: row["reason"] for row in rows if row["model"] in pending}


def _has_answered(rows: list[dict[str, Any]]) -> bool:
    """Return whether each model serves, has failed, or is pending.

    There is no limit to the time that it may be pending.
    """
    pending = _pending(rows)
    return bool(rows) and all(
        row["status"] in ("ready", "sleeping", "failed") or row["model"] in pending for row in rows
    )


def _log_fault(log: Path) -> str:
    """Return a text that says why a log cannot be written, as on a full disk, or ""."""
    try:
        with log.open("ab") as file:
            file.write(b"\n")
    except OSError as error:
        return f"; its log {log} cannot be written: {error.strerror}"
    return ""


def _last_line(log: Path) -> str:
    return log_tail(log, 1).removeprefix("meltcore serve: ").removeprefix("meltcore up: ")


def _read(path: Path) -> DaemonRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=DaemonRecord)
    except (OSError, msgspec.DecodeError):
        return None  # gone meanwhile, or cut short by a crash


def _connect_host(host: str) -> str:
    """Return the host at which a client on this machine reaches a server that is bound to `host`."""
    with suppress(ValueError):  # a name
        if ip_address(host).is_unspecified:
            return "::1" if ":" in host else "127.0.0.1"
    return host


def serve_recorded(fleet: PlacedFleet, log: str, options: FleetOptions, **settings: Any) -> int:
    """Run a server, and keep its record while it runs. Return the exit status.

    Output goes to the file `log`, or to the terminal if `log` is "". `settings` are further arguments of
    `supervisor.serve`. Raises ConfigError if the server cannot start, or if a recorded server has the port at another
    address.
    """
    with loading_modules():
        from meltcore.fleet.supervisor import serve

    _check_port_free(fleet.spec.server.port)
    paths: set[Path] = set()

    def record(spec: FleetSpec, port: int, sockets: Path) -> None:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        path = state_dir() / f"{options.command}-{port}.json"
        written = DaemonRecord(
            pid=os.getpid(),
            start_ticks=ticks,
            port=port,
            url=spec.server.url(port, _connect_host(spec.server.host)),
            model=", ".join(spec.models),
            log=log,
            admin=str(sockets / ADMIN_SOCKET),
        )
        unfinished = path.with_suffix(".tmp")
        try:
            unfinished.write_bytes(msgspec.json.encode(written))
            unfinished.rename(path)
        except OSError as error:  # a full disk
            unfinished.unlink(missing_ok=True)
            raise ConfigError(_unusable(state_dir(), error.strerror)) from error
        paths.add(path)

    try:
        return serve(fleet, record=record, options=options, **settings)
    finally:
        for path in paths:
            found = _read(path)
            if found is None or found.pid == os.getpid():  # else another server has it, which started at the same time
                path.unlink(missing_ok=True)


def fleet_options(planner: FleetPlanner) -> FleetOptions:
    """Return the options for the server of a planned fleet. Raises ConfigError for an invalid fleet.yaml."""
    with loading_modules():
        from meltcore.fleet.run.engines import LocalLauncher, MakeLauncher, RayLauncher
        from meltcore.fleet.supervisor import FleetOptions

    server, local = planner.spec.server, cast(MakeLauncher, LocalLauncher)
    return FleetOptions(
        log_folder=state_dir(),
        planner=lambda: planner,
        launcher=planner.site.launched_by(local, lambda address: partial(RayLauncher, address, planner)),
        admin_port=server.admin_port,
        log_limit_bytes=int(server.log_limit or LOG_LIMIT_BYTES),
    )


def find_fleet(port: int | None) -> DaemonRecord:
    """Return the record of the fleet on a port. Without a port, return the record of the only fleet.

    Raises ConfigError if no fleet or several fleets match.
    """
    fleets = [record for record in running(PlannedFleet.command) if port in (None, record.port)]
    if not fleets:
        raise ConfigError("no fleet is running" + ("" if port is None else f" on port {port}"))
    if len(fleets) > 1:
        ports = ", ".join(str(record.port) for record in fleets)
        raise ConfigError(f"{len(fleets)} fleets are running, on ports {ports}; choose one with --port")
    return fleets[0]


def main() -> int:
    """Serve the configuration that is read as JSON from standard input. The argument is the path of the log."""
    served = msgspec.json.decode(sys.stdin.buffer.read(), type=_Served)
    try:
        return serve_recorded(served.fleet, sys.argv[1], served.source.options(Path(sys.argv[1])))
    except MeltcoreError as error:
        print(f"meltcore {served.source.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
