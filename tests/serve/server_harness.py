"""Runs a real server for tests, over the scripted engine or the real one."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from waiting import WAIT_S, wait_until

from meltcore.common.process import start_ticks
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.settings.config import SharingSection
from meltcore.settings.fleet_spec import (
    FleetSpec,
    KeySection,
    LimitsSection,
    ModelSection,
    ServerSection,
    TimeoutsSection,
)

MODEL = "scripted"
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.content == 'boom' %}{{ raise_exception('no booms') }}{% endif -%}
{{- m.content -}}
{%- endfor -%}
"""
_SERVE = """
import sys, msgspec
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.common.errors import MeltcoreError
from meltcore.common.process import loading_modules
with loading_modules():
    from meltcore.fleet.run.restart_policy import RestartAfterPause
    from meltcore.fleet.supervisor import SERVE, FleetOptions, serve
config = msgspec.json.decode(sys.argv[1], type=PlacedFleet)
policy = msgspec.json.decode(sys.argv[2], type=RestartAfterPause | None)
try:
    options = SERVE if policy is None else FleetOptions(policy=policy)
    sys.exit(serve(config, engine_command=sys.argv[3:], options=options))
except MeltcoreError as error:
    print(f"meltcore serve: {error}", file=sys.stderr)
    sys.exit(2)
"""
_SERVE_FLEET = """
import dataclasses, sys, msgspec
from pathlib import Path
from meltcore.common.errors import MeltcoreError
from meltcore.common.process import loading_modules
with loading_modules():
    from meltcore.fleet.daemon import fleet_options, serve_recorded
    from meltcore.fleet.plan.cluster import cluster_reader
    from meltcore.fleet.plan.planned import FleetPlanner
    from meltcore.fleet.run.restart_policy import RestartAfterPause
path = Path(sys.argv[1])
policy = msgspec.json.decode(sys.argv[2], type=RestartAfterPause)
try:
    planner = FleetPlanner(path, *map(cluster_reader, filter(None, sys.argv[3:4])))
    options = dataclasses.replace(fleet_options(planner), policy=policy)
    sys.exit(serve_recorded(planner.config(), "", options, engine_command=sys.argv[4:]))
except MeltcoreError as error:
    print(f"meltcore up: {error}", file=sys.stderr)
    sys.exit(2)
"""
_ENGINE = str(Path(__file__).parent / "scripted_engine.py")


def make_model(folder: Path, *, template: bool = True, end_id: int = 511) -> Path:
    """A checkpoint folder with a configuration and a chat template that joins the messages' contents."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": end_id}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE} if template else {}))
    return folder


class RunningServer:
    """A server process and plain HTTP to it."""

    def __init__(self, process: subprocess.Popen[str], stderr_path: Path) -> None:
        self.process = process
        self._stderr_path = stderr_path
        assert process.stdout is not None
        line = process.stdout.readline()
        self.url = line.rpartition(" ")[2].strip() if "listening on" in line else ""
        self.port = urlsplit(self.url).port or 0
        self.api_key: str | None = None  # for `metrics`
        self.tls: ssl.SSLContext | None = None  # of a server of https

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def connect(self, timeout_s: float = WAIT_S) -> http.client.HTTPConnection:
        if self.tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout_s, context=self.tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on its own connection; `body` is sent as it is where it is bytes, else as JSON."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def chat(self, content: str = "hello", **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", chat_body(content, **fields))

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a request over a raw socket and leave the answer unread."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        connection.sendall(head.encode() + data)
        return connection

    def metrics(self) -> dict[str, float]:
        """Every sample, by name without the prefix; samples of one name are added up."""
        found: dict[str, float] = {}
        headers = None if self.api_key is None else {"x-api-key": self.api_key}
        for line in self.request("GET", "/metrics", headers=headers).body.decode().splitlines():
            if line and not line.startswith("#") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("meltcore:")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_metric(self, name: str, at_least: float) -> None:
        wait_until(lambda: self.metrics()[name] >= at_least, f"{name} >= {at_least}")

    def wait_healthy(self, timeout_s: float = WAIT_S, besides: str = "") -> None:
        """Wait until a model can serve, and none is loading. besides: a model that may load on."""

        def is_healthy() -> bool:
            assert self.port, f"the server has printed no address: {self.stderr}"
            answer = self.request("GET", "/health")
            reasons = [reason for name, reason in answer.json.get("models", {}).items() if name != besides]
            return answer.status == 200 and not any(reason.startswith("loading") for reason in reasons)

        wait_until(is_healthy, "healthy", timeout_s)

    def check_no_leak(self) -> dict[str, float]:
        """At idle: nothing in flight here or in the engine, and every accepted request accounted for."""
        wait_until(lambda: self.metrics()["requests_in_flight"] == 0, "no request in flight")
        wait_until(lambda: self.metrics()["num_requests_running"] == 0, "no request in the engine")
        found = self.metrics()
        assert found["num_requests_waiting"] == 0
        ended = sum(found[f"requests_{outcome}_total"] for outcome in ("finished", "aborted", "failed"))
        assert found["requests_accepted_total"] == ended
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def engine_pid(self) -> int:
        (engine,) = self.engine_pids()
        return engine

    def engine_pids(self, model: str = "") -> list[int]:
        """In the order they were started, or those of a model, by the last part of its path."""
        pids = [pid for pid, command in self._children() if "engine" in command and "serve.api_server" not in command]
        return [pid for pid in pids if not model or Path(f"/proc/{pid}/comm").read_text().strip() == model[:15]]

    def api_server_pids(self) -> list[int]:
        """The API server processes, in the order they were started."""
        return [pid for pid, command in self._children() if "serve.api_server" in command]

    def _children(self) -> list[tuple[int, str]]:
        """By their start, without those that have just ended, and those that are still a copy of their parent."""
        own = Path(f"/proc/{self.process.pid}")
        command, found = (own / "cmdline").read_bytes(), []
        for pid in (own / "task" / own.name / "children").read_text().split():
            with suppress(OSError):
                found.append((int(pid), Path(f"/proc/{pid}/cmdline").read_bytes()))
        found.sort(key=lambda child: start_ticks(child[0]) or 0)
        return [(pid, theirs.decode()) for pid, theirs in found if theirs not in (b"", command)]


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """The stream's events; the last must be [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat_body(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def read_daemon_url(stdout: str) -> str:
    """The address in what `serve --daemon` prints."""
    (line,) = [line for line in stdout.splitlines() if line.startswith("meltcore: listening on ")]
    return line.split()[3]


def connections(pid: int, port: int) -> int:
    """How many connections to `port` the process holds."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" and row[9] in inodes for row in rows)


def server_config(
    model: ModelSection,
    *,
    names: Sequence[str] = (MODEL,),
    upstream: Mapping[str, ModelSection] | None = None,
    **settings: Any,
) -> PlacedFleet:
    """One model of ours on a free port; `settings` are fields of ModelSection, or of `configure`."""
    own = set(ModelSection.__struct_fields__) - set(LimitsSection.__struct_fields__)
    changes = {key: value for key, value in settings.items() if key in own}
    of_server = {"port": 0} | {key: value for key, value in settings.items() if key not in own}
    model = msgspec.structs.replace(model, aliases=tuple(names[1:]), **changes)
    return configure({names[0]: model} | dict(upstream or {}), **of_server)


def configure(
    models: Mapping[str, ModelSection] | None = None, *, api_key: str | None = None, **settings: Any
) -> PlacedFleet:
    """The fleet of a server: its sections by name, and their fields by name or by the flag's of `serve`."""
    sections: dict[str, dict[str, Any]] = {"server": {}, "limits": {}, "timeouts": {}}
    kinds = {"server": ServerSection, "limits": LimitsSection, "timeouts": TimeoutsSection}
    names = {"request_timeout_s": "request_s", "drain_timeout_s": "drain_s", "max_body_bytes": "max_body"}
    for name in list(settings):
        field = names.get(name, name)
        for section, kind in kinds.items():
            if field in kind.__struct_fields__:
                sections[section][field] = settings.pop(name)
    if api_key is not None:
        default = KeySection(name="default", sha256=sha256(api_key.encode()).hexdigest())
        settings["keys"] = (default, *settings.get("keys", ()))
    made = {section: kinds[section](**values) for section, values in sections.items() if values}
    settings = {"sharing": SharingSection(means="none")} | settings
    return PlacedFleet(FleetSpec(models=dict(models or {}), **made, **settings))


def serve_command(
    config: PlacedFleet,
    *engine_options: str,
    engine: Sequence[str] = (sys.executable, _ENGINE),
    policy: RestartAfterPause | None = None,
) -> list[str]:
    """Starts a server, over the scripted engine unless `engine` is another command; with `policy` a fleet."""
    serve = [sys.executable, "-c", _SERVE, *(msgspec.json.encode(each).decode() for each in (config, policy))]
    return [*serve, *engine, *engine_options]


def fleet_command(
    path: Path, policy: RestartAfterPause, ray: str = "", engine: Sequence[str] = (sys.executable, _ENGINE)
) -> list[str]:
    """Serves a fleet.yaml over scripted engines, as `meltcore up` does over real ones, on this machine or a cluster."""
    return [
        sys.executable,
        "-c",
        _SERVE_FLEET,
        str(path),
        msgspec.json.encode(policy).decode(),
        ray,
        *engine,
    ]


@contextmanager
def scripted_server(
    *engine_options: str, wait: bool = True, engine: dict[str, Any] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """A server over the scripted engine: fields of ModelSection in `engine`, and of `server_config`."""
    with tempfile.TemporaryDirectory() as folder:
        defaults: dict[str, Any] = {"checkpoint": str(make_model(Path(folder) / "model")), "load_format": "dummy"}
        config = server_config(ModelSection(**(defaults | (engine or {}))), **settings)
        with running(serve_command(config, *engine_options), Path(folder) / "stderr") as server:
            server.api_key = settings.get("api_key")
            if wait:
                server.wait_healthy()
            yield server


@contextmanager
def speech_server(checkpoint: Path, model: str, memory: str, stderr_path: Path) -> Iterator[RunningServer]:
    """A server over the real engine of a speech model on the CPU; it leaves no request and no file of an upload."""
    command = [sys.executable, "-m", "meltcore.cli.main", "serve", str(checkpoint), "--served-model-name", model]
    command += ["--port", "0", "--device", "cpu", "--memory", memory]
    with running(command, stderr_path) as server:
        server.wait_healthy(120)
        before = set(Path(tempfile.gettempdir()).iterdir())
        yield server
        server.check_no_leak()
        assert not [path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if "audio" in path.name]


@contextmanager
def running(command: list[str], stderr_path: Path) -> Iterator[RunningServer]:
    with stderr_path.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield RunningServer(process, stderr_path)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
