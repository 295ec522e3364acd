"""Starts the fleet of the demo with `meltcore up`, from the file that `meltcore fleet init --tiny` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from meltcore.common.errors import MeltcoreError
from meltcore.common.process import ProcessError, run
from meltcore.measure.experiments.demo.config import CHAT, TASKS
from meltcore.measure.experiments.servers.api import Api, ApiError
from meltcore.measure.experiments.servers.process import COMMAND, MeltcoreServer

FILE_NAME, LOG_NAME = "fleet.yaml", "server.log"
INIT_LIMIT_S = 60.0
# A context of 2,048 tokens holds the longest of the demo's conversations.
_CHAT_MODEL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 2048, "memory": "2GiB", "device": "cpu"}


def chat_model_name(chat_model: str) -> str:
    """Return the name under which the demo serves the language model at this path."""
    return Path(chat_model).stem.lower()


def write_fleet(path: Path, tasks: Collection[str], chat_model: str | None = None) -> None:
    """Write a fleet.yaml with the bundled models of `tasks` and with `chat_model`, on a port that the system chooses.

    Raises ProcessError if `meltcore fleet init` fails.
    """
    done = run([*COMMAND, "fleet", "init", "--tiny", str(path)], limit_s=INIT_LIMIT_S)
    if done.returncode != 0:
        raise ProcessError(f"meltcore fleet init ended with {done.returncode}: {done.stderr.decode().strip()}")
    fleet = yaml.safe_load(path.read_text(encoding="utf-8"))
    fleet["server"]["port"] = 0
    models = fleet["models"]
    fleet["models"] = {name: each for name, each in models.items() if each.get("task", CHAT) in tasks}
    if chat_model is not None:
        fleet["models"][chat_model_name(chat_model)] = _CHAT_MODEL | {"checkpoint": str(Path(chat_model).resolve())}
    languages = fleet["languages"]  # some by task, for models that may be left out
    fleet["languages"] = {name: languages[name] for name in languages if name in tasks or name not in TASKS}
    path.write_text(yaml.safe_dump(fleet, sort_keys=False, allow_unicode=True), encoding="utf-8")


def fleet_server(fleet: Path, log_path: Path, *, report: Callable[[str], None]) -> MeltcoreServer:
    """Return a `meltcore up` for a fleet.yaml. It is ready once all models are ready, and fails if a model fails."""
    return MeltcoreServer(["up", str(fleet)], log_path, report=report, is_ready=_all_ready)


def models_by_task(api: Api) -> dict[str, str]:
    """Return the name of the first model of each task. Raises ApiError."""
    found: dict[str, str] = {}
    for card in api.get("/v1/models").json()["data"]:
        found.setdefault(card.get("task") or CHAT, card["id"])
    return found


def _all_ready(address: str) -> bool:
    """Return whether all models are ready. Raises MeltcoreError if one has failed."""
    api = Api(address)
    try:
        models: list[Mapping[str, Any]] = api.get("/v1/status").json()["models"]
    except ApiError:
        return False  # the caller looks at the process
    failed = [model["name"] for model in models if model["status"] == "failed"]
    if failed:
        reasons = api.get("/health").body.decode(errors="replace")
        raise MeltcoreError(f"{', '.join(failed)} did not start: {json.dumps(reasons)}")
    return all(model["status"] == "ready" for model in models)
