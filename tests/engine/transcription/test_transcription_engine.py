"""The transcription engine: clips in, transcripts out, the same alone as in company; refusals; its process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_client import EngineClient
from nemo_tools import write_archive
from parakeet_tools import CONFIG, nemo_names, reference_ctc, reference_rnnt, speech
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.transcription.ctc import Emissions
from meltcore.engine.transcription.engine import TranscriptionTask, join_tokens
from meltcore.engine.transcription.memory import plan_transcription
from meltcore.protocol.shell import AbortRequests, Shutdown
from meltcore.protocol.step_sums import sums_by_kind, total_steps
from meltcore.protocol.transcription import FromEngine, Transcribe, Transcript, TranscriptionReady, Word
from meltcore.settings.config import EngineConfig

pytest.importorskip("sentencepiece", reason="the extra audio has sentencepiece")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rnnts = [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    return write_archive(tmp_path_factory.mktemp("nemo") / "small.nemo", nemo_names(reference_ctc(), rnnts))


@pytest.fixture(scope="module")
def task(archive: Path) -> TranscriptionTask:
    return TranscriptionTask(EngineConfig(model=str(archive), device="cpu", memory_bytes=2**30))


def pcm(clip: torch.Tensor) -> bytes:
    return (clip.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes()


def requests_of(count: int, seed: int = 0) -> list[Transcribe]:
    rng = random.Random(seed)
    return [
        Transcribe(
            request_id=f"r{i}",
            samples=pcm(speech(rng.uniform(0.1, 2.5), seed=i)[0]),
            language=rng.choice(CONFIG.languages),
            decoder=rng.choice(["ctc", "rnnt"]),
            priority=rng.randint(0, 1),
        )
        for i in range(count)
    ]


def run(engine: BatchEngine[Transcribe, Transcript]) -> list[Transcript]:
    transcripts: list[Transcript] = []
    while engine.has_work:
        transcripts += engine.step().outputs  # type: ignore[arg-type]
    return transcripts


def words(transcript: Transcript) -> tuple[Any, ...]:
    spoken = [(word.text, word.start_s, word.end_s, word.token_ids) for word in transcript.words]
    return transcript.text, spoken, transcript.tokens, transcript.frames, transcript.finish_reason


def test_transcripts_are_the_same_alone_as_in_company(task: TranscriptionTask) -> None:
    """Random arrivals of both decoders and three languages, in batches of several shapes."""
    requests = requests_of(12)
    alone = {}
    for request in requests:
        engine = BatchEngine(task)
        engine.add(request)
        (alone[request.request_id],) = run(engine)
    # Without the latency bound, which would let the speed of the machine decide what runs together.
    rng, engine, found = random.Random(1), BatchEngine(task, max_start_s=1e9), []
    for request in requests:
        engine.add(request)
        if rng.random() < 0.15:
            found += engine.step().outputs
    found += run(engine)
    assert len(found) == len(requests)
    assert {transcript.request_id: words(transcript) for transcript in found} == {
        request_id: words(transcript) for request_id, transcript in alone.items()
    }
    assert all(transcript.times is not None for transcript in found)
    assert sum(bool(transcript.text) for transcript in found) > 6
    stats = engine.stats()
    assert 0 < stats.cost_total < stats.padded_cost_total
    assert total_steps(sums_by_kind(stats.step_sums)).steps < len(requests)


def test_engine_hears_alike_after_its_weights_were_dropped(archive: Path) -> None:
    task = TranscriptionTask(EngineConfig(model=str(archive), device="cpu", memory_bytes=2**30, enable_sleep_mode=True))
    engine, found = BatchEngine(task), []
    for _ in range(2):
        for request in requests_of(1):
            engine.add(request)
        found.append({transcript.request_id: words(transcript) for transcript in run(engine)})
        assert engine.sleep("disk").freed_bytes > 0
        largest = max(task.model.parameters(), key=torch.numel)
        assert not largest.flatten()[1024:-1024].any()
        assert engine.wake() > 0
    assert found[0] == found[1]


def test_words_have_their_times() -> None:
    texts = ["\u2581ka", "la", "\u2581", "\u2581ma"]
    blanks = [-float(2**frame) for frame in range(12)]
    emissions = Emissions([0, 1, 3, 2, 1], [1, 3, 6, 8, 9], [2, 5, 7, 9, 11], [-0.5, -0.25, -1.0, -2.0, -4.0], blanks)
    assert join_tokens(emissions, texts, 0.08) == (
        Word("kala", 0.08, 0.4, (0, 1), -0.75, -30.0),  # frames 1 to 4
        Word("ma", 0.48, 0.56, (3,), -1.0, -64.0),
        Word("la", 0.64, 0.88, (2, 1), -6.0, -1792.0),
    )
    assert join_tokens(Emissions([1], [0], [1], [-1.0], [-3.0]), texts, 0.08) == (
        Word("la", 0.0, 0.08, (1,), -1.0, -3.0),
    )
    assert join_tokens(Emissions([], [], []), texts, 0.08) == ()


def test_wrong_clips_are_refused(task: TranscriptionTask) -> None:
    engine = BatchEngine(task)
    for samples, language, message in [
        (b"", "hi", "257|320 to 720000 samples of 2 bytes; it has 0 bytes"),
        (bytes(1001), "hi", "it has 1001 bytes"),
        (bytes(2 * 720_001), "hi", "320 to 720000 samples of 2 bytes; it has 1440002 bytes"),
        (bytes(2000), "en", "language 'en' is not one of the model's: hi, kn, ta"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.add(Transcribe(request_id="a", samples=samples, language=language))
    engine.add(Transcribe(request_id="silent", samples=bytes(32_000), language="hi"))
    (transcript,) = run(engine)
    assert transcript.finish_reason == "stop"


def test_longest_clip_is_transcribed(task: TranscriptionTask) -> None:
    engine = BatchEngine(task)
    noise = np.random.default_rng(0).integers(-3000, 3000, 720_000, dtype=np.int16)
    engine.add(Transcribe(request_id="long", samples=noise.tobytes(), language="ta", decoder="ctc"))
    (transcript,) = run(engine)
    assert transcript.frames == 563
    assert all(word.end_s <= 45.04 for word in transcript.words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: transcription does not support it"),
        ({"quantization": "fp8"}, "--quantization fp8: transcription does not support it"),
        ({"max_model_len": 100}, "--max-model-len 100"),
        ({"memory_bytes": 2**20}, r"1 MiB must hold the weights and a clip of 45 s"),
    ],
)
def test_options_that_cannot_work_are_refused(archive: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TranscriptionTask(EngineConfig(**{"model": str(archive), "device": "cpu", **changes}))


def test_memory_plan_of_the_published_size() -> None:
    """1.2 GB of weights in float16; a batch of half an hour of audio needs a few gigabytes."""
    config = CONFIG.__class__(tuple("abcdefghijklmnopqrstuv"))
    max_cost, rows = plan_transcription(
        config, weight_bytes=1_230_000_000, element_size=2, memory_bytes=16 * 2**30, max_shape=640, limit=32_768
    )
    assert max_cost > 20_000
    assert sum(row.size_bytes for row in rows) < 16 * 2**30 * 0.92
    assert rows[1].size_bytes < 70 * 2**20


def test_dummy_weights_of_published_form(tmp_path: Path, archive: Path) -> None:
    task = TranscriptionTask(EngineConfig(model=str(archive), device="cpu", load_format="dummy", memory_bytes=2**30))
    assert task.ready().weights == "dummy"
    assert task.ready().tokens == "synthetic"
    assert task.ready().output_lengths == "synthetic"
    engine = BatchEngine(task)
    for request in requests_of(3):
        engine.add(msgspec.structs.replace(request, decoder="rnnt"))
    every = round(0.25 / task.model.config.frame_s)
    for transcript in run(engine):
        assert transcript.finish_reason == "stop"
        # One every 0.25 s, whatever the random heads say
        assert transcript.tokens == -(-transcript.frames // every)


@pytest.fixture
def client(tmp_path: Path, archive: Path) -> Iterator[EngineClient]:
    config = EngineConfig(model=str(archive), device="cpu", memory_bytes=2**30)
    client = EngineClient(tmp_path, config, from_engine=FromEngine)
    yield client
    client.close()


@pytest.mark.slow
def test_process_serves_refuses_and_aborts(client: EngineClient, task: TranscriptionTask) -> None:
    ready: Any = client.ready(TranscriptionReady)
    assert ready.languages == ["hi", "kn", "ta"]
    assert (ready.sample_rate, ready.max_samples) == (16_000, 720_000)
    requests = requests_of(4)
    engine = BatchEngine(task)
    for request in requests:
        engine.add(request)
    expected = {transcript.request_id: words(transcript) for transcript in run(engine)}
    client.send(*requests, Transcribe(request_id="bad", samples=b"", language="hi"), AbortRequests(["unknown"]))
    found = {request_id: results[-1] for request_id, results in client.outputs(5).items()}
    assert found.pop("bad").finish_reason == "error"
    assert {request_id: words(transcript) for request_id, transcript in found.items()} == expected  # type: ignore[arg-type]
    client.send(Shutdown())
    assert client.process.wait(WAIT_S) == 0
