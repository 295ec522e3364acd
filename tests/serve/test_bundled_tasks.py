"""The bundled models of translation and transcription, planned and served in turns beside a language model."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from server_harness import fleet_command, running
from waiting import WAIT_S, wait_until

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
for package in ("python_multipart", "sentencepiece", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

from meltcore.cli.main import main  # noqa: E402
from meltcore.common.process import free_port  # noqa: E402
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND  # noqa: E402 - after the checks for extras
from meltcore.fleet.run.restart_policy import RestartAfterPause  # noqa: E402
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases  # noqa: E402
from meltcore.measure.problems.tones import render, tone_clip  # noqa: E402

POLICY = RestartAfterPause()


def written_fleet(folder: Path) -> Path:
    """The tiny fleet as `meltcore fleet init` writes it, where all but the language model take turns."""
    path = folder / "fleet.yaml"
    assert main(["fleet", "init", "--tiny", str(path)]) == 0
    fleet = yaml.safe_load(path.read_text())
    del fleet["models"]["voice"], fleet["languages"]["synthesis"]
    for name in ("phrases", "tones"):
        fleet["models"][name]["residency"] = "sleepable"
    fleet["models"]["far"] = {"url": "http://127.0.0.1:1", "task": "synthesis"}
    fleet["server"] |= {"port": 0, "api_server_count": 1, "admin_port": free_port()}
    fleet["residency"] = {"minimum_s": 0.0, "turn_s": 1.0, "swaps_per_minute": 600, "keep": "disk"}
    path.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return path


@pytest.mark.slow
def test_planned_fleet_of_bundled_models_answers_right_before_and_after_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models translate and transcribe in turns, and read their weights again for each; a third stays awake."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = written_fleet(tmp_path)
    assert main(["plan", str(path)]) == 0
    phrase = next(each for each in generate_phrases("heldout", num_phrases=100, seed=9) if ":" in each.source)
    clip = tone_clip(random.Random("heldout"), "heldout", 4.0)
    wav = io.BytesIO()
    soundfile.write(wav, render(clip, 16_000), 16_000, format="WAV")
    with running(fleet_command(path, POLICY, engine=ENGINE_COMMAND), tmp_path / "stderr") as server:
        server.wait_healthy(WAIT_S, besides="far")
        body = {"sentences": [phrase.source], "src_lang": SOURCE_LANGUAGE, "tgt_lang": TARGET_LANGUAGE}
        wait_until(lambda: len(server.request("GET", "/health").json.get("sleeping", [])) == 1, "turns")
        pids = server.engine_pids()
        assert len(pids) == 3
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
            for language in ("en", "hi"):
                assert server.post("/v1/translate", body).json["translations"] == [phrase.target]
                assert server.request("GET", "/health").json["sleeping"] == ["tones"]
                found = client.audio.transcriptions.create(
                    model="tones", file=("clip.wav", wav.getvalue()), language=language
                )
                assert found.text == clip.text(language)
                assert server.request("GET", "/health").json["sleeping"] == ["phrases"]
                assert client.completions.create(model="sums", prompt="1 + 1 =", max_tokens=4).choices[0].text
        assert server.metrics()["wakes_total"] >= 3
        # The task of each model, as the API servers know it and as the supervisor does.
        admin = f"http://127.0.0.1:{yaml.safe_load(path.read_text())['server']['admin_port']}"
        tasks = {"sums": "generation", "phrases": "translation", "tones": "transcription", "far": "synthesis"}
        for url in (server.url, admin):
            text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
            found = re.findall(r'queue_requests\{model_name="(\w+)",priority_class="batch",task="(\w+)"\}', text)
            assert dict(found) == tasks
        assert sorted(server.engine_pids()) == sorted(pids), "none was started again"
        server.check_no_leak()
