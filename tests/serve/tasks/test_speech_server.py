"""POST /v1/audio/speech over a real server and a small synthesizer: OpenAI's and dwani.ai's forms and clients."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from server_harness import RunningServer, speech_server
from waiting import WAIT_S, wait_until

for package in ("python_multipart", "sentencepiece", "soundfile", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

import soundfile  # noqa: E402 - after the check above
from f5_tools import SMALL, random_tensors, write_checkpoint  # noqa: E402 - on the path added above

from meltcore import Synthesizer  # noqa: E402
from meltcore.audio.pool import missing_package  # noqa: E402
from meltcore.measure.documents.schema import TaskLoad  # noqa: E402
from meltcore.measure.load.config import LoadConfig  # noqa: E402
from meltcore.measure.load.run.runner import run_levels  # noqa: E402

pytestmark = pytest.mark.slow  # the server starts with three seconds of imports and loading
MODEL, RATE = "small", 24_000
# A frame is 43 ms: few to compute for as much speech.
VALUES = {**SMALL, "mel_spec": {**SMALL["mel_spec"], "n_fft": 4096, "hop_length": 1024, "win_length": 4096}}
WORDS = "namaste kagaa nama"
SHORT, LONG = "mat sant.", "kasa nana te. gata! masa, sat mat. " * 11
FAST = {"num_steps": 8}


def tone(seconds: float, seed: int = 0) -> np.ndarray:
    chance = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    return (0.05 * (np.sin(2000 * times * (1 + seed)) + 0.3 * chance.standard_normal(len(times)))).astype(np.float32)


def wav(samples: np.ndarray, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=format)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, VALUES, random_tensors(VALUES, seed=4))
    (path / "prompts").mkdir()
    for seed, name in enumerate(("KAN_F_HAPPY_00001", "b")):
        (path / "prompts" / f"{name}.wav").write_bytes(wav(tone(1.5, seed)))
        (path / "prompts" / f"{name}.txt").write_text(WORDS)
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with speech_server(folder, MODEL, "256MiB", tmp_path_factory.mktemp("serve") / "stderr") as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, np.ndarray]:
    """The speech of the offline API, by text."""
    synthesizer = Synthesizer(str(folder), device="cpu", memory_bytes=2**28)
    return {text: synthesizer.synthesize(text, "b", num_steps=8) for text in (SHORT, LONG)}


def speech(server: RunningServer, **fields: Any) -> Any:
    return server.post("/v1/audio/speech", {"model": MODEL, "input": SHORT, "voice": "b", **FAST, **fields})


def form(reference: bytes, **fields: str) -> tuple[bytes, dict[str, str]]:
    """A multipart body with a reference."""
    parts = [f'form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'form-data; name="reference"; filename="r"\r\n\r\n' + reference)
    body = b"".join(b"--x\r\ncontent-disposition: " + part + b"\r\n" for part in parts) + b"--x--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=x"}


def test_load_generator_measures_streamed_speech(server: RunningServer) -> None:
    def load(speech_format: str) -> TaskLoad:
        workload = f"speak:voice=b,words=3,format={speech_format}"
        config = LoadConfig(
            url=server.url, workload=workload, concurrency=(2,), num_prompts=(4,), num_warmups=0, extra_body=FAST
        )
        [level] = run_levels(config)
        assert level.failures == {}
        assert level.task is not None
        return level.task

    wav_load, pcm_load = load("wav"), load("pcm")
    assert wav_load.work == pytest.approx(pcm_load.work), "the header is no audio"
    assert wav_load.work > 4 * 0.5
    assert wav_load.first_audio_ms.n == wav_load.real_time_factor.n == 4


def test_openai_client_gets_the_offline_speech(client: openai.OpenAI, expected: dict[str, np.ndarray]) -> None:
    def create(**fields: Any) -> Any:
        return client.audio.speech.create(**{"model": MODEL, "voice": "b", "extra_body": FAST, **fields})

    whole = create(input=SHORT, response_format="wav")
    samples, rate = soundfile.read(io.BytesIO(whole.content), dtype="float32")
    assert (rate, whole.response.headers["content-type"]) == (RATE, "audio/wav")
    assert int(whole.response.headers["content-length"]) == len(whole.content)
    np.testing.assert_allclose(samples, expected[SHORT], atol=1e-4)
    pcm = create(input=LONG, response_format="pcm").content
    np.testing.assert_allclose(np.frombuffer(pcm, "<i2") / 32767, expected[LONG], atol=1e-4)
    for format_name, magic in [
        ("mp3", rb"\xff[\xf3\xfb]"),
        ("opus", b"OggS"),
        ("flac", b"fLaC"),
        ("aac", rb"\xff\xf1"),
    ]:
        if missing_package(format_name) is None:
            data = create(input=SHORT, response_format=format_name).content
            assert re.match(magic, data), data[:9]
    assert re.match(rb"\xff[\xf3\xfb]", create(input=SHORT).content)  # mp3 is the default
    card = client.models.list().data[0]
    assert (card.task, card.voices) == ("synthesis", ["KAN_F_HAPPY_00001", "b"])  # type: ignore[attr-defined]


def test_chunks_are_streamed_as_they_are_spoken(client: openai.OpenAI, expected: dict[str, np.ndarray]) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "voice": "b", "input": LONG, "response_format": "wav"}
    with client.audio.speech.with_streaming_response.create(**arguments, extra_body=FAST) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        data = b"".join(answer.iter_bytes())
    assert data[40:44] == b"\xff" * 4  # the length was not known when the header was sent
    np.testing.assert_allclose(np.frombuffer(data[44:], "<i2") / 32767, expected[LONG], atol=1e-4)
    arguments |= {"stream_format": "sse", "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(**arguments, extra_body=FAST) as answer:
        lines = [line for line in answer.iter_lines() if line]
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert done == {"type": "speech.audio.done"}
    assert len(deltas) > 1
    pcm = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    np.testing.assert_allclose(np.frombuffer(pcm, "<i2") / 32767, expected[LONG], atol=1e-4)


def test_requests_in_company_have_their_own_speech(server: RunningServer) -> None:
    def pcm(number: int) -> bytes:
        voice = ("b", "KAN_F (Happy)")[number % 2]
        return speech(server, voice=voice, seed=number % 3, response_format="pcm", input=SHORT * (1 + number % 2)).body

    alone = [pcm(number) for number in range(6)]
    assert len(set(alone)) == 6
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(pcm, [number % 6 for number in range(18)]))
    for number, data in enumerate(together):
        found, single = np.frombuffer(data, "<i2").astype(int), np.frombuffer(alone[number % 6], "<i2")
        assert np.abs(found - single).max() <= 2


def test_an_uploaded_reference_is_the_voice(server: RunningServer, expected: dict[str, np.ndarray]) -> None:
    fields = {"model": MODEL, "input": SHORT, "num_steps": "8", "response_format": "wav"}
    body, headers = form(wav(tone(1.5, 1), "FLAC"), reference_text=WORDS, **fields)
    answer = server.request("POST", "/v1/audio/speech", body, headers)
    assert answer.status == 200, answer.body
    samples, _ = soundfile.read(io.BytesIO(answer.body), dtype="float32")
    assert len(samples) == len(expected[SHORT])
    assert np.corrcoef(samples, expected[SHORT])[0, 1] > 0.99  # its samples are rounded to 16 bits
    for reference, changes, message in [
        (wav(tone(0.1)), {}, "the audio has 0.10 s"),
        (wav(tone(90.0)), {}, "reference: the audio is longer than"),
        (wav(np.zeros(RATE, np.float32)), {}, "reference: the audio is silent"),
        (b"hello", {}, "reference: the audio is not audio"),
        (wav(tone(2.0)), {"reference_text": " "}, "reference_text is missing"),
        (wav(tone(2.0)), {"voice": "b"}, "voice and reference exclude each other"),
        (wav(tone(2.0)), {"speed": "fast"}, "speed: Expected `float"),
    ]:
        body, headers = form(reference, **{"reference_text": WORDS, **fields, **changes})
        answer = server.request("POST", "/v1/audio/speech", body, headers)
        assert (answer.status, message in answer.error["message"]) == (400, True), answer.body


def test_dwanis_forms_and_client(server: RunningServer, expected: dict[str, np.ndarray]) -> None:
    worker = server.post("/audio/speech", {"text": SHORT, "ref_audio_name": "B", **FAST})
    samples, _ = soundfile.read(io.BytesIO(worker.body), dtype="float32")
    np.testing.assert_allclose(samples, expected[SHORT], atol=1e-4)
    assert worker.headers["content-disposition"] == 'attachment; filename="speech.wav"'
    query = "/v1/audio/speech?input=mat%20sant.&response_format=wav&language=kannada&voice=b&num_steps=8"
    assert server.request("POST", query).body == worker.body
    unknown = server.request("POST", "/v1/audio/speech?input=mat&language=german")
    assert (unknown.status, "'german' is not one of" in unknown.error["message"]) == (400, True)

    batch = {"input": [SHORT, SHORT], "voice": ["b", "KAN_F (Happy)"], "response_format": "wav", **FAST}
    answer = server.post("/v1/audio/speech_batch", batch)
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.namelist() == ["audio_00.wav", "audio_01.wav"]
        files = [archive.read(name) for name in archive.namelist()]
    assert answer.headers["content-type"] == "application/zip"
    first, second = (soundfile.read(io.BytesIO(data), dtype="float32")[0] for data in files)
    np.testing.assert_allclose(first, expected[SHORT], atol=1e-3)
    assert not np.array_equal(first[:1000], second[:1000])
    for changes, message in [
        ({"voice": ["b"]}, "got 1 for 2 texts"),
        ({"input": []}, "input must have 1 to 64 texts; got 0"),
        ({"input": ["a", " "]}, "input[1] is empty"),
        ({"input": ["\u2060\u200d", "a"]}, "input[0] is empty"),
        ({"input": ["a", "你好"]}, "input[1]: "),
        ({"language": "German"}, "'German' is not one of the model's"),
    ]:
        answer = server.post("/v1/audio/speech_batch", batch | changes)
        assert (answer.status, message in answer.json["detail"]) == (400, True), answer.body

    dwani = pytest.importorskip("dwani", reason="the test group has dwani")
    client = dwani.DwaniClient("none", server.url)
    data = client.speech(SHORT * 20, response_format="wav", language="kannada")
    assert soundfile.info(io.BytesIO(data)).frames > RATE  # a whole file, with its length in its header
    assert re.match(rb"\xff[\xf3\xfb]", client.speech(SHORT, response_format="mp3"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"input": " \n"}, "input is empty"),
    "invisible": ({"input": "\u200b\u00ad\ufeff"}, "input is empty: it must hold the text to speak"),
    "marks alone": ({"input": "\u0901\u0cbe"}, "input is empty"),
    "voice without id": ({"input": "a", "voice": {}}, "voice must be a name, or an object whose id is one"),
    "long": ({"input": "a" * 100_000}, "input has 100,000 characters; the limit is 10,000"),
    "voice": ({"voice": "alloy"}, "voice 'alloy' is not one of the model's: KAN_F_HAPPY_00001, b"),
    "format": ({"response_format": "midi"}, "known are mp3, opus, aac, flac, wav, pcm"),
    "speed": ({"speed": 9}, "speed must be 0.25 to 4; got 9"),
    "steps": ({"num_steps": 7}, "num_steps must be one of"),
    "instructions": ({"instructions": "whisper"}, "instructions is not supported"),
    "unknown field": ({"wings": 2}, "wings"),
    "two names": ({"text": "a"}, "text and input mean the same"),
    "seed": ({"seed": -1}, "seed"),
    "chinese": ({"input": "你好"}, "Chinese characters are not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, server: RunningServer) -> None:
    fields, message = BAD[name]
    answer = speech(server, **fields)
    assert (answer.status, message in answer.error["message"]) == (400, True), answer.body


def test_format_that_is_not_built_in_is_named(server: RunningServer) -> None:
    answer = speech(server, response_format="aac")
    if missing_package("aac") is None:
        assert answer.headers["content-type"] == "audio/aac"
    else:
        assert answer.status == 400
        assert "response_format aac is not built in: this server lacks PyAV" in answer.error["message"]


def test_other_tasks_are_refused_by_name(server: RunningServer) -> None:
    chat = server.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    assert (chat.status, "synthesizes speech: POST /v1/audio/speech" in chat.error["message"]) == (400, True)
    body, headers = form(wav(tone(1.0)))
    heard = server.request("POST", "/v1/audio/transcriptions", body.replace(b'"reference"', b'"file"'), headers)
    assert (heard.status, "small cannot transcribe speech" in heard.error["message"]) == (400, True)


def test_client_that_leaves_ends_its_work(server: RunningServer) -> None:
    """After the first chunk of many. The engine is free immediately: others do not wait for the rest."""
    before = server.metrics()["requests_aborted_total"]
    text = {"model": MODEL, "input": LONG * 20, "voice": "b", "response_format": "pcm", **FAST}
    with server.open("/v1/audio/speech", text) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.metrics()["num_requests_running"] == 1
    wait_until(lambda: server.metrics()["requests_aborted_total"] == before + 1, "the request aborted")
    wait_until(lambda: server.metrics()["num_requests_running"] == 0, "the engine free")
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    server.check_no_leak()
