"""POST /v1/speech_to_speech over three real models of one server: tones, sums and a small random synthesizer."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server_harness import Answer, RunningServer, configure, running, serve_command
from waiting import wait_until

from meltcore.common.options import Size

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
for package in ("python_multipart", "sentencepiece", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

from f5_tools import SMALL, random_tensors, write_checkpoint  # noqa: E402 - on the path added above

from meltcore.fleet.processes.engine_process import ENGINE_COMMAND  # noqa: E402
from meltcore.measure.problems.tones import ToneClip, render, tone_clip  # noqa: E402
from meltcore.models.checkpoints.checkpoint import BUNDLED_TRANSCRIBER  # noqa: E402
from meltcore.settings.fleet_spec import ModelSection  # noqa: E402
from meltcore.settings.routes_section import ChatRoute, RoutesSection  # noqa: E402

pytestmark = pytest.mark.slow  # the server starts with three seconds of imports and loading
PATH = "/v1/speech_to_speech"
VALUES = {**SMALL, "mel_spec": {**SMALL["mel_spec"], "n_fft": 4096, "hop_length": 1024, "win_length": 4096}}
FAST = {"num_steps": "8", "response_format": "pcm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("synthesizer")
    write_checkpoint(folder, VALUES, random_tensors(VALUES, seed=4))
    (folder / "prompts").mkdir()
    reference = io.BytesIO()
    times = np.arange(36_000) / 24_000
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(times))
    soundfile.write(reference, 0.05 * np.sin(2000 * times) + noise, 24_000, format="WAV")
    (folder / "prompts" / "a.wav").write_bytes(reference.getvalue())
    (folder / "prompts" / "a.txt").write_text("namaste kagaa nama")
    models = {
        served: ModelSection(checkpoint=name, device="cpu", memory=Size(2**28))
        for name, served in ((BUNDLED_TRANSCRIBER, "ears"), ("meltcore/sums", "gemma3"), (str(folder), "mouth"))
    }
    routes = RoutesSection(chat=ChatRoute(prompt=""))
    config = configure(models=models, port=0, api_server_count=1, routes=routes)
    with running(serve_command(config, engine=ENGINE_COMMAND), folder / "stderr") as server:
        server.wait_healthy(120)
        yield server
        server.check_no_leak()


@pytest.fixture(scope="module")
def clip() -> ToneClip:
    return tone_clip(random.Random("heldout"), "heldout", 4.0)


def ask(server: RunningServer, audio: bytes, query: str = "", **fields: str) -> Answer:
    parts = [f'form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'form-data; name="file"; filename="question"\r\n\r\n' + audio)
    body = b"".join(b"--x\r\ncontent-disposition: " + part + b"\r\n" for part in parts) + b"--x--\r\n"
    return server.request("POST", PATH + query, body, {"content-type": "multipart/form-data; boundary=x"})


def recording(clip: ToneClip, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, render(clip, 16_000), 16_000, format=format)
    return file.getvalue()


def test_a_question_is_heard_answered_and_spoken(server: RunningServer, clip: ToneClip) -> None:
    heard = clip.text("hi")
    reply = server.post("/v1/chat_direct", {"prompt": heard}).json["response"]
    speech = {"input": reply, "model": "mouth", "num_steps": 8, "response_format": "pcm"}
    expected = np.frombuffer(server.post("/v1/audio/speech", speech).body, "<i2").astype(int)
    assert len(expected) > 1000

    def is_expected(pcm: bytes) -> bool:
        found = np.frombuffer(pcm, "<i2")
        return len(found) == len(expected) and int(np.abs(found - expected).max()) <= 2

    streamed = ask(server, recording(clip), "?language=hindi&num_steps=8&response_format=pcm")
    assert streamed.headers["content-disposition"] == 'inline; filename="speech.pcm"'
    assert is_expected(streamed.body)
    whole = ask(server, recording(clip), "?format=json", language="hi", **FAST).json
    assert set(whole) == {"transcription", "llm_response", "audio_base64"}
    assert (whole["transcription"], whole["llm_response"]) == (heard, reply)
    assert is_expected(base64.b64decode(whole["audio_base64"]))
    lines = ask(server, recording(clip), language="hi", stream_format="sse", **FAST).body.decode().split("\n\n")
    first, second, *deltas, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert first == {"type": "transcript.text.done", "text": heard}
    assert second == {"type": "response.output_text.done", "text": reply}
    assert last == {"type": "speech.audio.done"}
    assert is_expected(b"".join(base64.b64decode(event["audio"]) for event in deltas))


def test_recordings_of_browsers_are_heard(server: RunningServer, clip: ToneClip) -> None:
    """WebM with Opus, as MediaRecorder makes it."""
    av: Any = pytest.importorskip("av", reason="the extra av has it")
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono", bit_rate=96_000)
        samples = np.rint(render(clip, 48_000) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 48_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    answer = ask(server, file.getvalue(), language="hi", format="json", **FAST)
    assert answer.json["transcription"] == clip.text("hi")


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({}, 400, "language is required"),
        ({"language": "German"}, 400, "'German' is not one of the model's"),
        ({"language": "en"}, 400, "'en' is not one of the model's: as, bn"),  # it can be heard, not spoken
        ({"language": "hi", "target_language": "tlh"}, 400, "'tlh' is not one of the model's"),
        ({"language": "hi", "model": "ears"}, 400, "ears cannot chat"),
        ({"language": "hi", "model": "x"}, 404, "there is no model 'x'"),
        ({"language": "hi", "mode": "agent"}, 501, "mode agent is not supported"),
        ({"language": "hi", "format": "docx"}, 400, "known are audio, json"),
        ({"language": "hi", "wings": "2"}, 400, "wings"),
        ({"language": "hi", "voice": "b"}, 400, "voice 'b' is not one of the model's"),
    ],
)
def test_bad_request_is_named(
    server: RunningServer, clip: ToneClip, fields: dict[str, str], status: int, message: str
) -> None:
    answer = ask(server, recording(clip), **{**FAST, **fields})
    assert (answer.status, message in answer.json["detail"]) == (status, True), answer.body


def test_bad_audio_is_named(server: RunningServer) -> None:
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(16_000), 16_000, format="WAV")
    for audio, message in [(b"hello", "is not audio"), (silence.getvalue(), "silent"), (b"", "empty")]:
        answer = ask(server, audio, language="hi")
        assert (answer.status, message in answer.json["detail"]) == (400, True), answer.body
    headers = {"content-type": "multipart/form-data; boundary=x", "x-session-id": "a" * 129}
    answer = server.request("POST", PATH, b"", headers)
    assert "X-Session-ID has 129 characters; the limit is 128" in answer.json["detail"]
    assert "must be multipart/form-data" in server.post(PATH, {}).json["detail"]
    wait_until(lambda: server.metrics()["requests_in_flight"] == 0, "nothing in flight")
