"""A fleet of all tasks with random weights, as on a machine without checkpoints, and the load on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from server_harness import running, serve_command

for package in ("python_multipart", "sentencepiece", "soundfile", "soxr"):
    pytest.importorskip(package, reason="the extras audio and translate have it")

import meltcore  # noqa: E402
from meltcore.cli.main import main  # noqa: E402
from meltcore.fleet.plan.placement import PlacedFleet  # noqa: E402
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND  # noqa: E402 - after the checks for extras
from meltcore.settings.fleet_file import load_fleet  # noqa: E402

BUNDLED = Path(meltcore.__file__).parent / "bundled"
MODELS = {
    "sums": ("config.json", {"task": "generation"}),
    "phrases": ("config.json", {"task": "translation"}),
    "tones": ("model_config.yaml", {"task": "transcription"}),
    "voice": ("config.json", {"task": "synthesis"}),
}


@pytest.mark.slow
def test_fleet_of_configurations_alone_serves_every_task_under_load(tmp_path: Path) -> None:
    models: dict[str, Any] = {}
    for name, (file, fields) in MODELS.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(BUNDLED / name / file, folder)
        models[name] = {"checkpoint": f"missing/{name}", "shapes": str(folder), "load_format": "dummy", **fields}
        models[name] |= {"device": "cpu", "memory": "1GiB"}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"server": {"port": 0, "api_server_count": 1}, "models": models}))
    command = serve_command(PlacedFleet(load_fleet(tmp_path / "fleet.yaml")), engine=ENGINE_COMMAND)
    with running(command, tmp_path / "stderr") as server:
        server.wait_healthy(200.0)
        cards = server.request("GET", "/v1/models").json["data"]
        assert {card["id"]: card["task"] for card in cards} == {
            "sums": "generation",
            "phrases": "translation",
            "tones": "transcription",
            "voice": "synthesis",
        }
        assert {(card["weights"], card["tokenizer"]) for card in cards} == {("dummy", "synthetic")}
        options = ["--parts", "mixed", "--levels", "4", "--level-duration", "1", "--out", str(tmp_path / "runs")]
        assert main(["load", server.url, "--fleet", *options]) == 0
    [folder] = (tmp_path / "runs").iterdir()
    [level] = json.loads((folder / "result.json").read_text())["levels"]
    assert {stream["name"] for stream in level["streams"]} == set(MODELS)
    assert all(stream["level"]["succeeded"] >= 1 for stream in level["streams"])
