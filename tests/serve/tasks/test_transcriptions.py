"""POST /v1/audio/transcriptions over a real server, a small transcriber and the openai client."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.audio import TranscriptionSegment
from server_harness import RunningServer, speech_server
from waiting import WAIT_S, wait_until

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
for package in ("python_multipart", "sentencepiece", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

from nemo_tools import write_archive  # noqa: E402 - on the path added above
from parakeet_tools import CONFIG, nemo_names, reference_ctc, reference_rnnt, speech  # noqa: E402

from meltcore.engine.tasks.batch_engine import BatchEngine  # noqa: E402
from meltcore.engine.transcription.engine import TranscriptionTask  # noqa: E402
from meltcore.measure.load.config import LoadConfig  # noqa: E402
from meltcore.measure.load.run.runner import run_levels  # noqa: E402
from meltcore.protocol.transcription import Transcribe, Transcript  # noqa: E402
from meltcore.settings.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.slow  # the server starts with three seconds of imports and loading
MODEL = "small"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rnnts = [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    return write_archive(tmp_path_factory.mktemp("nemo") / "small.nemo", nemo_names(reference_ctc(), rnnts))


@pytest.fixture(scope="module")
def server(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with speech_server(archive, MODEL, "1GiB", tmp_path_factory.mktemp("serve") / "stderr") as server:
        yield server


def wav(seconds: float = 2.0, seed: int = 1, rate: int = 16_000, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, speech(seconds, seed=seed)[0].numpy(), rate, format=format)
    return file.getvalue()


@pytest.fixture(scope="module")
def expected(archive: Path) -> Transcript:
    """The transcript of `wav()` by the engine alone."""
    engine = BatchEngine(TranscriptionTask(EngineConfig(model=str(archive), device="cpu", memory_bytes=2**30)))
    samples = soundfile.read(io.BytesIO(wav()), dtype="float32")[0]
    pcm = np.rint(np.clip(samples, -1, 1) * 32767).astype(np.int16)
    engine.add(Transcribe(request_id="a", samples=pcm.tobytes(), language="kn"))
    (transcript,) = engine.step().outputs
    assert isinstance(transcript, Transcript)
    assert len(transcript.words) > 3
    return transcript


def test_openai_client_gets_the_engines_transcript(client: openai.OpenAI, expected: Transcript) -> None:
    for language in ("kn", "Kannada", "kan_Knda", "KN"):
        answer = client.audio.transcriptions.create(model=MODEL, file=("a.wav", wav()), language=language)
        assert answer.text == expected.text
    flac = client.audio.transcriptions.create(model=MODEL, file=("a.flac", wav(format="FLAC")), language="kn")
    assert flac.text == expected.text
    card = client.models.list().data[0]
    assert (card.id, card.task, card.languages) == (MODEL, "transcription", ["hi", "kn", "ta"])  # type: ignore[attr-defined]


def test_load_generator_measures_transcription(server: RunningServer) -> None:
    workload = "transcribe:language=kn,seconds=1-2,clips=3,decoder=ctc"
    config = LoadConfig(url=server.url, workload=workload, concurrency=(3,), num_prompts=(6,), num_warmups=0)
    [level] = run_levels(config)
    assert level.failures == {}
    assert level.task is not None
    assert level.task.work == pytest.approx(6 * 1.5)


def test_every_response_format(client: openai.OpenAI, expected: Transcript) -> None:
    def create(**fields: Any) -> Any:
        return client.audio.transcriptions.create(model=MODEL, file=("a.wav", wav()), language="kn", **fields)

    assert str(create(response_format="text")).strip() == expected.text
    verbose = create(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert (verbose.text, verbose.duration, verbose.language) == (expected.text, 2.0, "kn")
    assert [(word.word, word.start, word.end) for word in verbose.words] == [
        (word.text, word.start_s, word.end_s) for word in expected.words
    ]
    assert " ".join(segment.text for segment in verbose.segments) == expected.text
    assert [token for each in verbose.segments for token in each.tokens] == [
        token for word in expected.words for token in word.token_ids
    ]
    assert sum(len(each.tokens) for each in verbose.segments) <= expected.tokens
    assert verbose.usage.seconds == 2.0
    first = verbose.segments[0].to_dict()
    assert (first["id"], first["seek"], first["temperature"]) == (0, round(first["start"] * 100), 0.0)
    for segment in verbose.segments:
        assert TranscriptionSegment.model_validate(segment.to_dict(), strict=True) == segment
        assert segment.avg_logprob < 0 < segment.compression_ratio
        assert 0 <= segment.no_speech_prob < 1
    logprob = sum(word.logprob for word in expected.words)
    assert sum(each.avg_logprob * len(each.tokens) for each in verbose.segments) == pytest.approx(logprob, abs=0.01)
    srt, vtt = str(create(response_format="srt")), str(create(response_format="vtt"))
    assert srt.startswith("1\n00:00:0")
    assert " --> 00:00:0" in srt
    assert srt.splitlines()[1].count(",") == 2
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    other = create(extra_body={"decoder": "ctc"}).text
    assert other
    assert other != expected.text


def test_text_is_streamed_as_clips_are_done(client: openai.OpenAI) -> None:
    file = ("a.flac", wav(100.0, format="FLAC"))
    fields: dict[str, Any] = {"model": MODEL, "file": file, "language": "kn", "extra_body": {"decoder": "ctc"}}
    *deltas, done = client.audio.transcriptions.create(stream=True, **fields)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) == 3  # clips
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text == client.audio.transcriptions.create(**fields).text
    for changes, message in [({"language": "tlh"}, "is not one of"), ({"response_format": "srt"}, "stream needs")]:
        with pytest.raises(openai.BadRequestError, match=message):
            client.audio.transcriptions.create(stream=True, **fields | changes)


def test_dwanis_form_and_client(server: RunningServer, expected: Transcript, tmp_path: Path) -> None:
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    body = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + wav() + b"\r\n--x--\r\n"
    for path in ("/v1/transcribe/?language=Kannada", "/v1/transcribe?language=kn", "/transcribe/?language=kannada"):
        assert server.request("POST", path, body, multipart).json == {"text": expected.text}
    for query, message in [
        ("", "language is required"),
        ("?language=german", "is not one"),
        ("?a=1", "field 'a'"),
    ]:
        answer = server.request("POST", f"/v1/transcribe/{query}", body, multipart)
        assert (answer.status, message in answer.error["message"]) == (400, True)
    assert server.request("GET", "/v1/health").json == {"status": "healthy", "model": MODEL}

    other = wav(1.0, 5)
    for name in ("files", "files[]"):
        batch = files_form(name, wav(), other, wav())
        answer = server.request("POST", "/transcribe_batch/?language=kannada", batch, multipart).json
        assert answer["transcriptions"][::2] == [expected.text] * 2
        assert answer["transcriptions"][1] not in ("", expected.text)
    for path, batch, message in [
        ("/transcribe_batch/?language=kannada", files_form("files", wav(), b"hello"), "files[1]: the audio"),
        ("/transcribe_batch/?language=kannada", files_form("file", wav()), "a file goes into the field files"),
        ("/transcribe_batch/?language=kannada", files_form("files"), "the field files is missing"),
        ("/transcribe_batch", files_form("files", wav()), "language is required"),
        ("/transcribe_batch?wings=2", files_form("files", wav()), "unknown field 'wings'"),
    ]:
        answer = server.request("POST", path, batch, multipart)
        assert (answer.status, message in answer.json["detail"]) == (400, True), answer.body

    dwani = pytest.importorskip("dwani", reason="the test group has dwani")
    (tmp_path / "a.wav").write_bytes(wav())
    client = dwani.DwaniClient("none", server.url)
    assert client.transcribe(str(tmp_path / "a.wav"), "Kannada") == {"text": expected.text}
    with pytest.raises(dwani.DwaniAPIError, match="is not one of the model's"):
        client.transcribe(str(tmp_path / "a.wav"), "German")


def files_form(name: str, *files: bytes) -> bytes:
    """A multipart body of several files in one field."""
    parts = [b'form-data; name="%s"; filename="a"\r\n\r\n%s' % (name.encode(), data) for data in files]
    return b"".join(b"--x\r\ncontent-disposition: " + part + b"\r\n" for part in parts) + b"--x--\r\n"


def test_concurrent_requests_have_their_own_transcripts(client: openai.OpenAI, server: RunningServer) -> None:
    def text(seed: int) -> str:
        file = ("a.wav", wav(0.5 + seed % 3, seed))
        return client.audio.transcriptions.create(model=MODEL, file=file, language="ta").text

    alone = [text(seed) for seed in range(6)]
    assert len(set(alone)) == 6
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, [seed % 6 for seed in range(24)])) == [alone[seed % 6] for seed in range(24)]
    assert server.check_no_leak()["requests_finished_total"] >= 30


def test_long_audio_is_rejoined_with_its_times(client: openai.OpenAI) -> None:
    """100 s: three clips. Words are in order, and reach to the end."""
    verbose: Any = client.audio.transcriptions.create(
        model=MODEL,
        file=("a.flac", wav(100.0, format="FLAC")),
        language="kn",
        response_format="verbose_json",
        timestamp_granularities=["word"],
        extra_body={"decoder": "ctc"},
    )
    starts = [word.start for word in verbose.words]
    assert verbose.duration == 100.0
    assert starts == sorted(starts)
    assert starts[0] < 10
    assert 90 < verbose.words[-1].end <= 100.1


BAD: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "empty": (b"", {}, "the audio is empty"),
    "text": (b"hello" * 99, {}, "is not audio in a format"),
    "truncated": (b"RIFF\xff\xff\x00\x00WAVEdata\x00\x10\x00\x00" + bytes(9), {}, "is truncated"),
    "no language": (b"", {"language": None}, "language is required: the model does not detect it; it has hi, kn, ta"),
    "unknown language": (b"", {"language": "tlh"}, "language 'tlh' is not one of the model's: hi, kn, ta"),
    "language of another model": (b"", {"language": "Bodo"}, "language 'Bodo' is not one of the model's"),
    "format": (b"", {"response_format": "docx"}, "response_format must be one of json, text, srt, vtt, verbose_json"),
    "prompt": (b"", {"prompt": "names"}, "prompt is not supported"),
    "temperature": (b"", {"temperature": 0.7}, "temperature is not supported"),
    "unknown field": (b"", {"extra_body": {"wings": 2}}, "unknown field 'wings'"),
    "granularity": (b"", {"timestamp_granularities": ["word"]}, "needs response_format verbose_json"),
    "decoder": (b"", {"extra_body": {"decoder": "beam"}}, "decoder must be one of rnnt, ctc"),
    "model": (b"", {"model": "other"}, "there is no model 'other' here"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, client: openai.OpenAI) -> None:
    data, changes, message = BAD[name]
    fields = {"model": MODEL, "file": ("a.wav", data), "language": "kn", **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(**{key: value for key, value in fields.items() if value is not None})
    assert caught.value.status_code in (400, 404)
    assert message in caught.value.message


def test_wrong_bodies_and_routes_are_named(server: RunningServer) -> None:
    path, multipart = "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=x"}
    for body, headers, message in [
        (b"{}", {"content-type": "application/json"}, "must be multipart/form-data"),
        (b"junk", multipart, "is not valid multipart/form-data"),
        (
            b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsmall\r\n--x--\r\n',
            multipart,
            "file is missing",
        ),
    ]:
        answer = server.request("POST", path, body, headers)
        assert (answer.status, message in answer.body.decode()) == (400, True), answer.body
    assert server.request("POST", path, bytes(26 * 2**20), multipart).status == 413
    chat = server.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    assert chat.status == 400
    assert b"POST /v1/audio/transcriptions" in chat.body


def test_client_that_leaves_ends_its_work(server: RunningServer) -> None:
    audio = wav(120.0, format="FLAC")
    form = (
        b'--x\r\ncontent-disposition: form-data; name="language"\r\n\r\nkn\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.flac"\r\n\r\n' + audio + b"\r\n--x--\r\n"
    )
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(form)}\r\n"
    head += "content-type: multipart/form-data; boundary=x\r\n\r\n"
    before = server.metrics()["requests_aborted_total"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + form)
        wait_until(lambda: server.metrics()["requests_in_flight"] >= 1, "the request in flight")
    wait_until(lambda: server.metrics()["requests_aborted_total"] == before + 1, "the request aborted")
    server.check_no_leak()
