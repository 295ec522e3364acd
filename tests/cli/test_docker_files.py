"""The files of docker/ name what exists: extras, copied files, and a command line that `meltcore` takes."""

import importlib
import json
import re
import tomllib
from typing import Any

import yaml
from places import ROOT

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
    assert "USER meltcore" in DOCKERFILE


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
