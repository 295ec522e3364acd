"""Transcriber: files in, transcripts out, in order; bad input is named. Subtitles and languages of transcripts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentencepiece", reason="the extra audio has it")
pytest.importorskip("soxr", reason="the extra audio has it")
pytest.importorskip("soundfile", reason="the extra audio has it")

import soundfile
from nemo_tools import write_archive
from parakeet_tools import CONFIG, nemo_names, reference_ctc, reference_rnnt, speech

from meltcore import Transcriber
from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.transcription.engine import TranscriptionTask
from meltcore.protocol.transcription import Decoder, Transcribe, Transcript
from meltcore.settings.config import EngineConfig
from meltcore.text.transcripts import SpokenWord, Transcription, model_language

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    rnnts = [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    return str(write_archive(tmp_path_factory.mktemp("nemo") / "small.nemo", nemo_names(reference_ctc(), rnnts)))


@pytest.fixture(scope="module")
def transcriber(archive: str) -> Transcriber:
    return Transcriber(archive, device="cpu", memory_bytes=2**28)


def clip(seconds: float, seed: int = 1) -> np.ndarray:
    return speech(seconds, seed=seed)[0].numpy()


def encoded(samples: np.ndarray, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=format)
    return file.getvalue()


def alone(archive: str, samples: np.ndarray, decoder: Decoder = "rnnt") -> Transcript:
    """What the engine makes of one clip."""
    engine = BatchEngine(TranscriptionTask(EngineConfig(model=archive, device="cpu", memory_bytes=2**28)))
    pcm = np.rint(np.clip(samples, -1, 1) * 32767).astype(np.int16)
    engine.add(Transcribe(request_id="a", samples=pcm.tobytes(), language="kn", decoder=decoder))
    (transcript,) = engine.step().outputs
    return transcript


@pytest.mark.slow
def test_every_form_of_audio_is_transcribed_in_order(archive: str, transcriber: Transcriber, tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(encoded(clip(2.0), "FLAC"))
    stereo = np.stack([clip(3.0, 2)] * 2, axis=1)
    files = [tmp_path / "a.flac", encoded(clip(1.0, 3), "FLAC"), (stereo, 16_000), str(tmp_path / "a.flac")]
    results = transcriber.transcribe(files, "Kannada")
    assert isinstance(results, list)
    expected = [alone(archive, clip(2.0)), alone(archive, clip(1.0, 3)), alone(archive, clip(3.0, 2))]
    assert [result.text for result in results[:3]] == [transcript.text for transcript in expected]
    assert len({result.text for result in results}) == 3
    assert (results[3], results[2].duration_s, results[0].language) == (results[0], 3.0, "kn")
    single = transcriber.transcribe(files[0], "kan_Knda", decoder="ctc")
    assert isinstance(single, Transcription)
    assert single.text == alone(archive, clip(2.0), "ctc").text != results[0].text


@pytest.mark.slow
def test_long_audio_is_transcribed_while_it_is_read(transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 s are cut to clips, of which no more wait than a batch holds. Words are in order and reach to the end."""
    most = 0
    add = BatchEngine.add

    def watch(engine: BatchEngine[Transcribe, Transcript], message: Transcribe) -> None:
        nonlocal most
        add(engine, message)
        most = max(most, engine.stats().waiting_cost)

    monkeypatch.setattr(transcriber._engine.task, "max_cost", 1200)
    monkeypatch.setattr(BatchEngine, "add", watch)
    result = transcriber.transcribe(encoded(clip(200.0), "FLAC"), "kn", decoder="ctc")
    assert isinstance(result, Transcription)
    starts = [word.start_s for word in result.words]
    assert (result.duration_s, starts) == (200.0, sorted(starts))
    assert starts[0] < 10
    assert 190 < result.words[-1].end_s <= 200.1
    assert most < 2 * 1200


def test_bad_input_is_named_and_leaves_no_work(transcriber: Transcriber, tmp_path: Path) -> None:
    good = encoded(clip(1.0))
    with pytest.raises(RequestError, match="audio 1: the audio is silent"):
        transcriber.transcribe([good, encoded(np.zeros(16_000))], "kn")
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(RequestError, match=r"b\.wav: the audio is not audio"):
        transcriber.transcribe([good, tmp_path / "b.wav"], "kn")
    with pytest.raises(ConfigError, match=r"cannot read missing\.wav: No such file"):
        transcriber.transcribe("missing.wav", "kn")
    with pytest.raises(RequestError, match=r"must be \[frames\] or \[frames, channels\] .* got int64 of shape \[9\]"):
        transcriber.transcribe((np.arange(9), 16_000), "kn")
    with pytest.raises(RequestError, match="'tlh' is not one of the model's: hi, kn, ta"):
        transcriber.transcribe(good, "tlh")
    with pytest.raises(RequestError, match="decoder must be ctc or rnnt; got 'beam'"):
        transcriber.transcribe(good, "kn", decoder="beam")  # type: ignore[arg-type]
    assert not transcriber._engine.has_work
    assert transcriber.transcribe([], "kn") == []
    assert transcriber.transcribe(good, "kn") == transcriber.transcribe([good], "kn")[0]


def test_segments_end_at_pauses_and_before_they_are_long() -> None:
    words = [SpokenWord(str(i), i * 0.5, i * 0.5 + 0.4) for i in range(20)]
    words += [SpokenWord("late", 3661.0, 3661.5)]
    transcription = Transcription(words, 3662.0, "kn")
    segments = transcription.segments()
    assert [word for segment in segments for word in segment] == words
    assert all(segment[-1].end_s - segment[0].start_s <= 6.0 for segment in segments)
    assert segments[-1] == words[-1:]
    assert len(segments) == 3
    assert transcription.subtitles("srt").endswith("3\n01:01:01,000 --> 01:01:01,500\nlate\n")
    assert transcription.subtitles("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:05.900\n0 1 2")


def test_language_names_of_the_published_model() -> None:
    codes = ["as", "brx", "kok", "ks", "mni", "ne", "or", "sat"]
    names = {"Konkani": "kok", "gom_Deva": "kok", "Kashmiri": "ks", "Manipuri": "mni", "odia": "or"}
    assert {name: model_language(name, codes) for name in names} == names
    with pytest.raises(RequestError, match="'English' is not one of"):
        model_language("English", codes)
