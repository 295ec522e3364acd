"""The files of docker/ name what exists: extras, copied files, and a command line that `meltcore` takes."""

import http.server
import importlib
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT
from test_tls import make
from waiting import WAIT_S

from meltcore.cli.main import Command, command_parser
from meltcore.settings.fleet_file import load_fleet

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def parsed(arguments: list[str]) -> Any:
    name, *rest = arguments
    return command_parser(name, importlib.import_module(Command.module(name))).parse_args(rest)


def test_image_installs_what_the_package_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    kept = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in kept
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= set(copied)
    [command] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert parsed(json.loads(command)).host == "0.0.0.0"
    assert re.search(r"^RUN useradd .*--uid 1000 meltcore", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^USER 1000$", DOCKERFILE, re.MULTILINE), "by number, as Kubernetes' runAsNonRoot needs it"


class Health(http.server.BaseHTTPRequestHandler):
    """Answers with the status that its server has."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.parametrize(("has_tls", "status"), [(False, 200), (True, 200), (False, 503), (True, 503)])
def test_health_check_follows_the_server_with_and_without_tls(tmp_path: Path, has_tls: bool, status: int) -> None:
    if has_tls and shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is missing")
    [command] = re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        server.status = status  # type: ignore[attr-defined]
        if has_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*make(tmp_path))
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = json.loads(command)[2].replace(":8000/", f":{server.server_port}/")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=WAIT_S)
        server.shutdown()
    assert (done.returncode == 0) is (status == 200), done.stderr


def test_compose_starts_a_server_that_only_this_machine_reaches() -> None:
    service = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]["meltcore"]
    assert "profiles" not in service
    args = parsed(service["command"])
    [port] = service["ports"]
    assert port == f"127.0.0.1:{args.port}:{args.port}"
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert int(service["stop_grace_period"].removesuffix("s")) > args.drain_s
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_compose_starts_a_fleet_of_a_mounted_file() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    service = services["fleet"]
    assert service["profiles"] == ["fleet"], "`up` without a name starts the other service alone: they share a port"
    args = parsed(service["command"])
    [mount] = [each for each in service["volumes"] if each.endswith(":ro")]
    [(default, target)] = re.findall(r"^\$\{FLEET:-(.*)\}:(.*):ro$", mount)
    assert args.file == target
    fleet = load_fleet(ROOT / "docker" / default)
    assert fleet.server.host == "0.0.0.0"
    [port] = service["ports"]
    assert port == f"127.0.0.1:{fleet.server.port}:{fleet.server.port}"
    assert int(service["stop_grace_period"].removesuffix("s")) > fleet.timeouts.drain_s
    for key in ("build", "image", "environment", "deploy", "init"):
        assert service[key] == services["meltcore"][key], key
