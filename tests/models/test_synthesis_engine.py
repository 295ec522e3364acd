"""The synthesis engine: texts in, speech out in parts, the same alone as in company; refusals; its process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_client import EngineClient
from f5_tools import SMALL, random_tensors, reference_sample, reference_vocoder, write_checkpoint
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.synthesis.engine import SynthesisTask
from meltcore.engine.synthesis.memory import plan_synthesis
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.models.checkpoints.checkpoint import find_task
from meltcore.models.configs.task_configs import IndicF5Config
from meltcore.offline.synthesizer import Synthesizer
from meltcore.protocol.shell import AbortRequests, Shutdown
from meltcore.protocol.synthesis import FromEngine, SynthesisReady, Synthesize, Synthesized
from meltcore.settings.config import EngineConfig

soundfile = pytest.importorskip("soundfile")
pytestmark = pytest.mark.usefixtures("one_thread")

RATE = 24_000
# A frame is a hundredth of a second, as published, at a tenth of the rate's cost.
VALUES = {**SMALL, "mel_spec": {**SMALL["mel_spec"], "n_fft": 1024, "hop_length": 256, "win_length": 1024}}
WORDS = "namaste kagaa nama"
TEXTS = ["mat sant.", "kasa nana te. gata! masa, " * 3, "नमस्ते। खग", "sat " * 12]


def tone(seconds: float, seed: int = 0, level: float = 0.05) -> np.ndarray[Any, np.dtype[np.float32]]:
    chance = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    return (level * (np.sin(2000 * times * (1 + seed)) + 0.3 * chance.standard_normal(len(times)))).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, VALUES, random_tensors(VALUES, seed=4))
    (path / "prompts").mkdir()
    for seed, name in enumerate(("KAN_F_HAPPY_00001", "b")):
        soundfile.write(path / "prompts" / f"{name}.wav", tone(1.5, seed), RATE)
        (path / "prompts" / f"{name}.txt").write_text(WORDS)
    return path


@pytest.fixture(scope="module")
def task(folder: Path) -> SynthesisTask:
    task = SynthesisTask(EngineConfig(model=str(folder), device="cpu", memory_bytes=2**28))
    task._max_speech_s = 3.0  # chunks of few frames: these tests need several
    return task


def request(name: str, text: str, **changes: Any) -> Synthesize:
    return Synthesize(**{"request_id": name, "text": text, "voice": "b", "num_steps": 8, **changes})


def run(engine: BatchEngine[Synthesize, Synthesized]) -> list[Synthesized]:
    results: list[Synthesized] = []
    while engine.has_work:
        results += engine.step().outputs  # type: ignore[arg-type]
    return results


def samples_of(results: list[Synthesized], name: str) -> Any:
    parts = [np.frombuffer(each.samples, np.float32) for each in results if each.request_id == name]
    return np.concatenate(parts)


def speak(task: SynthesisTask, *requests: Synthesize) -> list[Synthesized]:
    engine = BatchEngine(task)
    for each in requests:
        engine.add(each)
    return run(engine)


def test_one_chunk_is_the_published_computation(task: SynthesisTask) -> None:
    """From the prepared reference to the samples, by formulas written anew: durations, frames, level."""
    (result,) = speak(task, request("r", "mat sant.", seed=3))
    speaker = task._voices["b"]
    reference = torch.from_numpy(speaker.samples)
    rms = float(reference.square().mean().sqrt())
    assert rms == pytest.approx(0.1, rel=1e-4)
    text = f"{WORDS}.  "
    hop_frames = len(reference) // 256
    frames = hop_frames + int(hop_frames / len(text) * len("mat sant."))
    ids = torch.tensor(task._vocabulary.encode(text + "mat sant."))
    noise = torch.randn(frames, 12, generator=torch.Generator().manual_seed(3))
    mel = task.model.mel_spectrogram(reference)
    tensors = random_tensors(VALUES, seed=4)
    spoken = reference_sample(tensors, VALUES, noise, mel, ids, 8)[hop_frames:]
    expected = reference_vocoder(tensors, VALUES, spoken).numpy()
    expected = np.clip(expected * min(10.0, 0.1 / np.sqrt(np.square(expected).mean())), -1, 1)
    np.testing.assert_allclose(np.frombuffer(result.samples, np.float32), expected, atol=1e-4)
    assert (result.chunk, result.chunks, result.finish_reason) == (1, 1, "stop")


@pytest.mark.slow
def test_company_never_changes_speech_under_random_arrivals(task: SynthesisTask) -> None:
    requests = [
        request(f"r{i}", TEXTS[i % 4], seed=i, speed=1 + i % 3 / 4, voice=("b", "kan_f (happy)")[i % 2], priority=i % 2)
        for i in range(6)
    ]
    engine, chance, results = BatchEngine(task), random.Random(2), []
    for each in requests:
        engine.add(each)
        while chance.random() < 0.7:
            results += engine.step().outputs
    results += run(engine)
    for each in requests:
        alone = samples_of(speak(task, each), each.request_id)
        np.testing.assert_allclose(samples_of(results, each.request_id), alone, atol=1e-5)
    finals = [result for result in results if result.finish_reason is not None]
    assert len(finals) == 6
    assert all(result.finish_reason == "stop" and result.times is not None for result in finals)


def test_parts_arrive_in_order_and_join_with_a_cross_fade(task: SynthesisTask, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    on_samples = task._on_samples
    monkeypatch.setattr(task, "_on_samples", lambda speech, part: (decoded.append(part), on_samples(speech, part))[1])
    results = speak(task, request("r", TEXTS[1]))
    assert len(results) > 1
    assert [(each.chunk, each.chunks) for each in results] == [(i + 1, len(results)) for i in range(len(results))]
    assert [each.finish_reason for each in results] == [None] * (len(results) - 1) + ["stop"]
    gain = min(10.0, 0.1 / np.sqrt(np.square(decoded[0]).mean()))
    expected = np.clip(decoded[0] * gain, -1, 1)
    for chunk in decoded[1:]:
        size = min(int(0.15 * RATE), len(expected), len(chunk))
        fade = np.linspace(0, 1, size)
        after = np.clip(chunk * gain, -1, 1)
        mixed = expected[len(expected) - size :] * (1 - fade) + after[:size] * fade
        expected = np.concatenate([expected[: len(expected) - size], mixed, after[size:]])
    np.testing.assert_allclose(samples_of(results, "r"), expected, atol=1e-6)


def test_seed_speed_and_steps_have_an_effect(task: SynthesisTask) -> None:
    results = speak(
        task, request("a", TEXTS[0]), request("same", TEXTS[0]), request("b", TEXTS[0], seed=1),
        request("c", TEXTS[0], speed=2.0), request("d", TEXTS[0], num_steps=16),
    )  # fmt: skip
    speech = {name: samples_of(results, name) for name in ("a", "same", "b", "c", "d")}
    np.testing.assert_allclose(speech["a"], speech["same"], atol=1e-5)
    assert np.abs(speech["a"] - speech["b"]).max() > 1e-2
    assert np.abs(speech["a"] - speech["d"]).max() > 1e-3
    assert len(speech["c"]) == pytest.approx(len(speech["a"]) / 2, abs=2 * 256)


def test_uploaded_reference_speaks_like_the_voice_of_its_samples(task: SynthesisTask, folder: Path) -> None:
    samples, _ = soundfile.read(folder / "prompts" / "b.wav", dtype="float32")
    padded = np.concatenate([np.zeros(RATE // 2, np.float32), samples, np.zeros(RATE // 3, np.float32)])
    uploaded = request("up", TEXTS[0], voice="", reference=padded.tobytes(), reference_text=WORDS)
    results = speak(task, uploaded, request("r", TEXTS[0]))
    np.testing.assert_allclose(samples_of(results, "up"), samples_of(results, "r"), atol=1e-5)


def test_aborted_requests_stop_within_a_step(task: SynthesisTask) -> None:
    engine = BatchEngine(task)
    for i in range(3):
        engine.add(request(f"r{i}", TEXTS[1]))
    engine.step()
    engine.abort(["r0", "r2", "unknown"])
    ended = engine.step().outputs
    assert {each.request_id: each.finish_reason for each in ended} == {"r0": "abort", "r2": "abort"}
    results = run(engine)
    assert {each.request_id for each in results} == {"r1"}
    assert (task._running, task._plans, task._sampler.is_idle) == ({}, {}, True)


@pytest.mark.slow
def test_first_chunks_come_before_the_later_chunks_of_others(task: SynthesisTask) -> None:
    engine = BatchEngine(task)
    engine.add(request("long", TEXTS[1] * 3, voice="kan_f_happy_00001"))
    results: list[Any] = []
    while not results:
        results += engine.step().outputs
    engine.add(request("new", TEXTS[0]))
    results += run(engine)
    order = [each.request_id for each in results]
    assert order.index("new") <= 2 < len(order) - 2


NAN = np.full(RATE, np.nan, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text": " \n "}, "the text is empty"),
    "100,000 characters": ({"text": "a" * 100_000}, "100,000 characters; the limit is 10,000"),
    "Chinese": ({"text": "你好"}, "Chinese characters are not supported"),
    "missing voice": ({"voice": "TAM_F"}, "voice 'TAM_F' is not one of the model's: KAN_F_HAPPY_00001, b"),
    "no voice": ({"voice": ""}, "give a voice .* or a reference"),
    "both": ({"reference": tone(1).tobytes()}, "either a voice or a reference"),
    "slow": ({"speed": 0.1}, "speed must be 0.25 to 4; got 0.1"),
    "speed is NaN": ({"speed": float("nan")}, "speed must be 0.25 to 4; got nan"),
    "steps": ({"num_steps": 7}, "num_steps must be one of 32, 16, 8; got 7"),
    "seed": ({"seed": -1}, "seed must be from 0"),
    "half a character": ({"text": "a\ud800"}, "half of a surrogate pair"),
    "half a word": ({"voice": "", "reference": tone(1).tobytes(), "reference_text": "\ud800 a"}, "half of a surrogate"),
    "half a sample": ({"voice": "", "reference": b"\0\0\0"}, "has 3 bytes; it must have float32 samples"),
    "two minutes": ({"voice": "", "reference": bytes(8 * 60 * RATE)}, "at most 60 s"),
    "NaN": ({"voice": "", "reference": NAN.tobytes(), "reference_text": WORDS}, "not numbers"),
    "silence": ({"voice": "", "reference": bytes(4 * RATE), "reference_text": WORDS}, "is silent"),
    "loud": ({"voice": "", "reference": (tone(1) * 99).tobytes(), "reference_text": WORDS}, "from -1 to 1"),
    "short": ({"voice": "", "reference": tone(0.2).tobytes(), "reference_text": WORDS}, "has 0.2 s"),
    "long": ({"voice": "", "reference": tone(16).tobytes(), "reference_text": WORDS}, "0.5 to 15.0 s"),
    "no words": ({"voice": "", "reference": tone(1).tobytes()}, "reference_text must have 1 to 1000"),
    "few words": ({"voice": "", "reference": tone(9).tobytes(), "reference_text": "a"}, "4 characters for 9.1 s"),
    "many words": ({"voice": "", "reference": tone(1).tobytes(), "reference_text": "a" * 200}, "203 characters for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_leaves_nothing(task: SynthesisTask, case: str) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(RequestError, match=reason):
        BatchEngine(task).add(request("x", **{"text": "mat sant.", **changes}))
    assert task._plans == {}


def test_settings_and_voices_that_cannot_work_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2: speech synthesis does not support it"):
        SynthesisTask(EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"16 MiB must hold the weights and 25 s of speech"):
        SynthesisTask(EngineConfig(model=str(folder), device="cpu", memory_bytes=2**24))
    write_checkpoint(tmp_path, VALUES, random_tensors(VALUES, seed=4))
    soundfile.write(tmp_path / "silent.wav", np.zeros(RATE), RATE)
    (tmp_path / "voices.json").write_text(json.dumps({"A (b)": {"audio": "silent.wav", "text": WORDS}}))
    with pytest.raises(ConfigError, match=r"voice A \(b\): the reference is silent"):
        SynthesisTask(EngineConfig(model=str(tmp_path), device="cpu"))
    (tmp_path / "voices.json").write_text(json.dumps({"A": {"audio": "missing.wav", "text": WORDS}}))
    with pytest.raises(ConfigError, match=r"missing\.wav cannot be read"):
        SynthesisTask(EngineConfig(model=str(tmp_path), device="cpu"))
    (tmp_path / "voices.json").write_text('{"A": "a.wav"}')
    with pytest.raises(ConfigError, match=r'A must be an object with audio and text; it is "a\.wav"'):
        SynthesisTask(EngineConfig(model=str(tmp_path), device="cpu"))


def test_memory_plan_counts_weights_activations_and_requests() -> None:
    config = IndicF5Config(2545)
    sizes: dict[str, Any] = {"weight_bytes": 700 * 2**20, "element_size": 2, "max_shape": 2560}
    batch, cost, rows = plan_synthesis(config, memory_bytes=4 * 2**30, limits=(16_384, 262_144), **sizes)
    assert batch == 16_384
    assert sum(row.size_bytes for row in rows) <= 0.9 * 4 * 2**30
    *_, rows = plan_synthesis(config, memory_bytes=4 * 2**30, limits=(16_384, 262_144), has_graphs=True, **sizes)
    assert sum(row.size_bytes for row in rows) <= 0.9 * 4 * 2**30
    less, fewer, rows = plan_synthesis(config, memory_bytes=5 * 2**28, limits=(16_384, 262_144), **sizes)
    assert 2560 <= less < batch
    assert less <= fewer < cost
    assert sum(row.size_bytes for row in rows) <= 0.9 * 5 * 2**28


def test_ready_message_has_the_limits(task: SynthesisTask, tmp_path: Path) -> None:
    ready = task.ready()
    assert (ready.voices, ready.sample_rate, ready.max_text) == (["KAN_F_HAPPY_00001", "b"], RATE, 10_000)
    assert (ready.steps, ready.max_reference_s, ready.tokens, ready.weights) == ([32, 16, 8], 15.0, "real", "real")
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    dummy = SynthesisTask(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy"))
    assert (dummy.ready().weights, dummy.ready().tokens) == ("dummy", "synthetic")
    assert dummy.ready().voices[0] == "KAN_F (Happy)"
    assert len(speak(dummy, request("d", "ನಮಸ್ಕಾರ", voice="KAN_F_HAPPY_00001"))[0].samples) > 0


def test_synthesis_checkpoints_are_told_from_others(folder: Path, tmp_path: Path) -> None:
    assert find_task(str(folder)).name == "synthesis"
    assert find_task("ai4bharat/IndicF5", dummy=True).name == "synthesis"
    for model in ("meltcore/sums", str(tmp_path), "missing.gguf", str(tmp_path / "missing")):
        assert find_task(model).name == "generation"


def test_engine_speaks_alike_after_its_weights_were_dropped(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", memory_bytes=2**28, enable_sleep_mode=True)
    task = SynthesisTask(config)
    before = samples_of(speak(task, request("r", "mat", seed=7)), "r")
    freed_bytes, resident_bytes = task.sleep("disk")
    assert not max(task.model.parameters(), key=torch.numel).flatten()[1024:-1024].any()
    assert resident_bytes == 0
    assert task.wake() > freed_bytes > 0
    np.testing.assert_array_equal(samples_of(speak(task, request("r", "mat", seed=7)), "r"), before)


@pytest.mark.slow
def test_process_speaks_refuses_and_aborts(folder: Path, tmp_path: Path, task: SynthesisTask) -> None:
    config = EngineConfig(model=str(folder), device="cpu", memory_bytes=2**28)
    client = EngineClient(tmp_path, config, from_engine=FromEngine)
    try:
        ready: Any = client.ready(SynthesisReady)
        assert ready.voices == task.ready().voices
        good = request("good", TEXTS[0], seed=7)
        client.send(good, request("bad", "", voice="b"), AbortRequests(["unknown"]))
        found: Any = client.outputs(2)
        assert found["bad"][-1].error == "the text is empty: it has no visible character"
        alone = samples_of(speak(task, good), "good")
        np.testing.assert_allclose(samples_of(found["good"], "good"), alone, atol=1e-5)
        client.send(Shutdown())
        assert client.process.wait(WAIT_S) == 0
    finally:
        client.close()


# --- offline --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_synthesizer_speaks_one_text_several_and_streams(folder: Path, tmp_path: Path) -> None:
    synthesizer = Synthesizer(str(folder), device="cpu", memory_bytes=2**28)
    synthesizer._engine.task._max_speech_s = 3.0  # type: ignore[attr-defined] # chunks of few frames
    assert (synthesizer.voices[1], synthesizer.sample_rate) == ("b", RATE)
    one = synthesizer.synthesize(TEXTS[1], "b", num_steps=8, seed=2)
    several = synthesizer.synthesize([TEXTS[0], TEXTS[1]], "b", num_steps=8, seed=2)
    parts = list(synthesizer.stream(TEXTS[1], "b", num_steps=8, seed=2))
    assert len(parts) > 1
    np.testing.assert_allclose(several[1], one, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(parts), one, atol=1e-5)
    cut = synthesizer.stream(TEXTS[1], "b", num_steps=8)
    next(cut)
    cut.close()
    from_file = synthesizer.synthesize(
        TEXTS[0], reference=folder / "prompts" / "b.wav", reference_text=WORDS, num_steps=8, seed=2
    )
    assert np.abs(from_file - several[0]).mean() < 0.05 * np.abs(several[0]).mean(), "16-bit samples are rounded twice"
    default = synthesizer.synthesize(TEXTS[0], num_steps=8)
    assert np.abs(default[: len(from_file)] - from_file).max() > 0.01
    for reference, error in (
        (tmp_path / "missing.wav", ConfigError),
        (b"no audio", RequestError),
        (np.zeros(9), RequestError),
    ):
        with pytest.raises(error):
            synthesizer.synthesize(TEXTS[0], reference=reference, reference_text=WORDS)
    with pytest.raises(RequestError, match="the text is empty"):
        synthesizer.synthesize(["good", ""], "b", num_steps=8)
    assert not synthesizer._engine.has_work
