"""Batches of an embedding engine: launched ahead, padded to CUDA graphs on a GPU, and never mixed up."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_tools import VOCAB, write_encoder

from meltcore.engine.embedding.engine import EmbeddingTask, load_pooling_model
from meltcore.engine.embedding.memory import token_slots
from meltcore.engine.memory.graph_sizes import MIN_ROW_TOKENS, packed_sizes
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.tasks.encoder import TextEncoder
from meltcore.protocol.embedding import Embed, EmbeddingResult
from meltcore.settings.config import EngineConfig

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """Several threads only wait for each other at these sizes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder, "BertModel")
    return folder


def encoder(folder: Path, dtype: torch.dtype) -> TextEncoder:
    model = load_pooling_model(open_checkpoint(str(folder), files="all"), dtype, torch.device("cpu"))
    assert isinstance(model, TextEncoder)
    return model


def random_requests(count: int, *, longest: int = 40, seed: int = 1) -> list[Embed]:
    """Texts and pairs of 1 to `longest` tokens."""
    rng = random.Random(seed)
    rows = [[rng.randrange(4, len(VOCAB)) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [
        Embed(
            request_id=str(index),
            token_ids=np.array(row, np.int32).tobytes(),
            second_start=rng.choice([0, min(len(row), 3)]),
        )
        for index, row in enumerate(rows)
    ]


def computed(model: TextEncoder, request: Embed) -> torch.Tensor:
    """What the model computes for one input alone."""
    ids = torch.frombuffer(bytearray(request.token_ids), dtype=torch.int32).long()
    start, length = request.second_start or len(ids), len(ids)
    with torch.inference_mode():
        return model(ids, torch.tensor([length]), torch.tensor([start]), [length])[0]


def values(result: EmbeddingResult) -> torch.Tensor:
    return torch.frombuffer(bytearray(result.values), dtype=torch.float32)


@pytest.mark.parametrize("batch_tokens", [30, 64, 500, 5321, 16_384, 40_000])
def test_every_batch_has_a_graph(batch_tokens: int) -> None:
    sizes = packed_sizes(batch_tokens)
    assert batch_tokens <= sizes[-1] < batch_tokens + 64
    assert all(smaller < larger and smaller % 64 == 0 for smaller, larger in pairwise(sizes))
    assert len(sizes) <= 20


def test_short_rows_take_the_tokens_that_a_graph_has_for_them(folder: Path) -> None:
    config = encoder(folder, torch.float32).config
    assert [token_slots(config, tokens) for tokens in (1, 8, 9)] == [MIN_ROW_TOKENS, 8, 9]


def small_task(folder: Path, batch_tokens: int) -> EmbeddingTask:
    """A task that launches up to three passes of a few tokens ahead, as on a GPU."""
    task = EmbeddingTask(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
    task._batch_tokens, task._max_launched, task.max_cost = batch_tokens, 3, 4 * batch_tokens
    return task


def test_passes_are_full_and_their_results_belong_to_their_requests(folder: Path) -> None:
    task = small_task(folder, 72)
    engine, requests, model = BatchEngine(task), random_requests(16), encoder(folder, torch.float32)
    sizes: list[int] = []
    launch = task._launch
    task._launch = lambda batch: sizes.append(len(batch)) or launch(batch)  # type: ignore[method-assign, assignment, func-returns-value]
    for request in requests:
        engine.add(request)
    results: dict[str, EmbeddingResult] = {}
    while engine.has_work:
        results |= {each.request_id: each for each in engine.step().outputs}
    assert set(results) == {each.request_id for each in requests}
    assert sum(sizes) == len(requests)
    assert max(sizes) > 2
    for request in requests:
        torch.testing.assert_close(values(results[request.request_id]), computed(model, request), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("steps", [0, 1])
def test_aborted_requests_have_no_result_whether_launched_or_begun(folder: Path, steps: int) -> None:
    task = small_task(folder, 72)
    requests = random_requests(12, longest=30, seed=steps)
    task.start(requests, 0)
    first = [each.request_id for _ in range(steps) for each in task.step()]
    assert bool(task._launched) == bool(steps)
    dropped = {str(index) for index in range(12)} - {*first, "7", "11"}
    task.abort([*dropped])
    rest = [each.request_id for _ in range(12) for each in task.step()]
    assert sorted(rest) == sorted({"7", "11"} - {*first})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_graphs_on_a_gpu_compute_what_a_cpu_computes(folder: Path, dtype: str) -> None:
    task = EmbeddingTask(EngineConfig(model=str(folder), device="cuda", dtype=dtype))  # type: ignore[arg-type]
    assert task._graphs is not None
    engine, model = BatchEngine(task), encoder(folder, torch.float32)
    requests = random_requests(2000, longest=66)
    for request in requests:
        engine.add(request)
    results = {each.request_id: each for each in engine.step().outputs}
    engine.abort([str(index) for index in range(0, 2000, 3)])  # some are launched
    while engine.has_work:
        results |= {each.request_id: each for each in engine.step().outputs}
    assert set(results) == {each.request_id for each in requests}
    for index in range(1, 2000, 101):
        result = results[str(index)]
        if result.finish_reason == "abort":
            continue
        expected = computed(model, requests[index])
        assert torch.cosine_similarity(values(result), expected, dim=0) > 0.9999
        engine.add(requests[index])
        alone = [each for _ in range(4) for each in engine.step().outputs]
        assert torch.cosine_similarity(values(alone[0]), values(result), dim=0) > 0.99995
