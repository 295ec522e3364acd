"""The bundled models of translation and recognition, served by name beside each other."""

from __future__ import annotations

import io
import random
from pathlib import Path

import openai
import pytest
from server_harness import running, serve_command

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
for package in ("python_multipart", "sentencepiece", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

from meltcore.backends.engine_process import ENGINE_COMMAND  # noqa: E402 - after the checks for extras
from meltcore.config import EngineConfig, ModelConfig, ServerConfig  # noqa: E402
from meltcore.models.checkpoint import BUNDLED_RECOGNIZER, BUNDLED_TRANSLATION  # noqa: E402
from meltcore.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases  # noqa: E402
from meltcore.problems.tones import render, tone_clip  # noqa: E402

START_S = 120.0


def test_served_checkpoints_translate_times_and_transcribe_wav_files(tmp_path: Path) -> None:
    models = tuple(
        ModelConfig(engine=EngineConfig(model=name, device="cpu", memory_bytes=2**28))
        for name in (BUNDLED_TRANSLATION, BUNDLED_RECOGNIZER)
    )
    phrase = next(each for each in generate_phrases("heldout", num_phrases=100, seed=9) if ":" in each.source)
    clip = tone_clip(random.Random("heldout"), "heldout", 4.0)
    wav = io.BytesIO()
    soundfile.write(wav, render(clip, 16_000), 16_000, format="WAV")
    command = serve_command(ServerConfig(models=models, port=0), engine=ENGINE_COMMAND)
    with running(command, tmp_path / "stderr") as server:
        server.wait_healthy(START_S)
        body = {"sentences": [phrase.source], "src_lang": SOURCE_LANGUAGE, "tgt_lang": TARGET_LANGUAGE}
        assert server.post("/v1/translate", body).json["translations"] == [phrase.target]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            for language in ("en", "hi"):
                found = client.audio.transcriptions.create(
                    model=BUNDLED_RECOGNIZER, file=("clip.wav", wav.getvalue()), language=language
                )
                assert found.text == clip.text(language)
