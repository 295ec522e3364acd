"""The translation engine: sentences in, translations out, the same alone as in company; refusals; its process."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_client import EngineClient
from m2m100_tools import SMALL, load_model, random_sources, reference_model, write_checkpoint
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.memory.workspace import LIBRARY_BYTES
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.translation.engine import TranslationTask
from meltcore.engine.translation.memory import plan_slots, translation_workspace
from meltcore.engine.translation.translation import translate_all
from meltcore.models.checkpoints.checkpoint import find_task, open_checkpoint
from meltcore.models.configs.task_configs import NUM_BEAMS, IndicTrans2Config
from meltcore.protocol.shell import AbortRequests, Shutdown
from meltcore.protocol.translation import FromEngine, Translate, Translated, TranslationReady
from meltcore.settings.config import EngineConfig

pytestmark = pytest.mark.usefixtures("one_thread")
VALUES = {**SMALL, "max_target_positions": 16, "max_source_positions": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, VALUES, reference_model(VALUES, seed=4))
    return path


@pytest.fixture(scope="module")
def task(folder: Path) -> TranslationTask:
    task = TranslationTask(EngineConfig(model=str(folder), device="cpu", memory_bytes=2**20))
    assert 3 <= task.slots < 20, "fewer slots than requests in these tests"
    return task


def requests_of(count: int, seed: int) -> list[Translate]:
    return [
        Translate(request_id=f"r{i}", token_ids=source, priority=i % 2)
        for i, source in enumerate(random_sources(count, seed))
    ]


def run(engine: BatchEngine[Translate, Translated]) -> list[Translated]:
    results: list[Translated] = []
    while engine.has_work:
        results += engine.step().outputs  # type: ignore[arg-type]
    return results


@pytest.mark.slow
def test_translations_are_those_of_one_batch_under_random_arrivals(task: TranslationTask, folder: Path) -> None:
    requests = requests_of(40, seed=1)
    expected = translate_all(
        load_model(folder), [request.token_ids for request in requests], task.options, slots=len(requests)
    )
    engine, chance, results = BatchEngine(task), random.Random(2), []
    for request in requests:
        engine.add(request)
        if chance.random() < 0.4:
            results += engine.step().outputs
            assert engine.stats().running <= task.slots
    results += run(engine)
    found = {result.request_id: list(result.token_ids) for result in results}
    assert found == {request.request_id: tokens for request, tokens in zip(requests, expected, strict=True)}
    assert all(result.finish_reason == "stop" and result.times is not None for result in results)


def test_aborted_sentence_frees_its_slot(task: TranslationTask) -> None:
    engine = BatchEngine(task)
    for request in requests_of(task.slots + 1, seed=3):
        engine.add(request)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (task.slots, 1)
    engine.abort(["r0", "unknown"])
    results = engine.step().outputs
    assert [result.finish_reason for result in results if result.request_id == "r0"] == ["abort"]
    assert engine.stats().waiting == 0
    assert len([result for result in run(engine) if result.finish_reason == "stop"]) <= task.slots


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([], "has 0 tokens; it must have 1 to 24"), ([5] * 25, "has 25 tokens"), ([61], "0 to 60"), ([-1], "0 to 60")],
)
def test_sentence_that_the_model_cannot_read_is_refused(
    task: TranslationTask, token_ids: list[int], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        BatchEngine(task).add(Translate(request_id="x", token_ids=token_ids))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_parallel_size", 2),
        ("quantization", "fp8"),
        ("max_num_seqs", 4),
        ("tokenizer", "x"),
        ("hf_overrides", {"a": 1}),
    ],
)
def test_setting_of_text_generation_is_refused_by_name(folder: Path, setting: str, value: Any) -> None:
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} .* translation does not support it"):
        TranslationTask(EngineConfig(model=str(folder), device="cpu", **{setting: value}))


def test_shorter_sentences_take_smaller_slots(folder: Path, task: TranslationTask) -> None:
    short = TranslationTask(EngineConfig(model=str(folder), device="cpu", memory_bytes=2**20, max_model_len=8))
    assert short.slots > task.slots
    assert (short.max_source, short.options.max_new_tokens) == (8, 8)
    with pytest.raises(RequestError, match="has 9 tokens; it must have 1 to 8"):
        BatchEngine(short).add(Translate(request_id="x", token_ids=[5] * 9))
    [translated] = translate_with(short, Translate(request_id="y", token_ids=[5] * 8))
    assert len(translated.token_ids) <= 8
    with pytest.raises(ConfigError, match="--max-model-len must be from 2 to the model's 24; got 25"):
        TranslationTask(EngineConfig(model=str(folder), device="cpu", max_model_len=25))


def translate_with(task: TranslationTask, request: Translate) -> list[Translated]:
    engine = BatchEngine(task)
    engine.add(request)
    return run(engine)


def test_memory_plan_counts_weights_slots_and_reserve() -> None:
    assert plan_slots(1000, 100, 4000, limit=64) == 23
    assert plan_slots(1000, 100, 40_000, limit=64) == 64
    with pytest.raises(ConfigError, match="must hold the weights, a slot for one sentence and a spare one"):
        plan_slots(2**20, 2**20, 2**20, limit=64)


def test_ready_message_has_the_limits(task: TranslationTask, tmp_path: Path) -> None:
    ready = task.ready()
    assert (ready.max_source, ready.vocab_size, ready.num_beams, ready.max_new_tokens) == (24, 61, 5, 16)
    assert (ready.weights, ready.tokens, ready.slots) == ("real", "synthetic", task.slots)
    assert sum(row.size_bytes for row in ready.memory) <= 2**20
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    dummy = TranslationTask(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", memory_bytes=2**20))
    assert (dummy.ready().weights, dummy.ready().output_lengths) == ("dummy", "synthetic")
    assert ready.output_lengths == "model"


@pytest.mark.parametrize("num_beams", [1, 5])
def test_random_weights_end_at_a_length_that_follows_from_the_source(tmp_path: Path, num_beams: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**VALUES, "max_target_positions": 24}))
    dummy = TranslationTask(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", memory_bytes=2**21))
    assert dummy.options.has_synthetic_lengths
    options = replace(dummy.options, num_beams=num_beams)
    sources = [[5] * size for size in (1, 2, 3, 4, 10, 18, 23)]
    outputs = translate_all(dummy.model, sources, options, slots=3)
    assert [len(output) for output in outputs] == [8, 8, 8, 9, 15, 23, 24]


def test_translation_checkpoints_are_told_from_others(folder: Path, tmp_path: Path) -> None:
    assert find_task(str(folder)).name == "translation"
    assert find_task("ai4bharat/indictrans2-en-indic-1B", dummy=True).name == "translation"
    for model in ("meltcore/sums", str(tmp_path), "missing.gguf", str(tmp_path / "missing")):
        assert find_task(model).name == "generation"


def test_engine_translates_alike_after_it_slept(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", memory_bytes=2**20, enable_sleep_mode=True)
    engine = BatchEngine(TranslationTask(config))
    found = []
    for keep in ("host", "disk", "disk"):
        for request in requests_of(5, seed=5):
            engine.add(request)
        found.append({result.request_id: result.token_ids for result in run(engine)})
        assert engine.sleep(keep).freed_bytes > 0  # type: ignore[arg-type]
        assert (engine.wake() > 0) == (keep == "disk")
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_process_translates_refuses_and_aborts(folder: Path, tmp_path: Path, task: TranslationTask) -> None:
    client = EngineClient(
        tmp_path, EngineConfig(model=str(folder), device="cpu", memory_bytes=2**20), from_engine=FromEngine
    )
    try:
        ready: Any = client.ready(TranslationReady)
        assert ready.slots == task.slots
        requests = requests_of(6, seed=5)
        engine = BatchEngine(task)
        for request in requests:
            engine.add(request)
        expected = {result.request_id: result.token_ids for result in run(engine)}
        client.send(*requests, Translate(request_id="bad", token_ids=[]), AbortRequests(["unknown"]))
        found: Any = {request_id: results[-1] for request_id, results in client.outputs(7).items()}
        assert found.pop("bad").error == "a sentence has 0 tokens; it must have 1 to 24"
        assert {request_id: result.token_ids for request_id, result in found.items()} == expected
        client.send(Shutdown())
        assert client.process.wait(WAIT_S) == 0
    finally:
        client.close()


def test_workspace_of_a_small_model_holds_the_segments_of_the_allocator() -> None:
    """A step of the bundled model counts few bytes, but torch takes 20 MiB for a tensor of 1 MiB, for graphs again."""
    config = IndicTrans2Config.read(open_checkpoint("meltcore/phrases", files="config").config)
    for slots in (1, 64, 512):
        tokens_bytes = slots * NUM_BEAMS * config.max_target_positions * 8
        least_bytes = LIBRARY_BYTES + 5 * 20 * 2**20 + 16 * tokens_bytes
        assert translation_workspace(config, 2, slots, num_beams=NUM_BEAMS) >= least_bytes
