"""Steps padded to the size of a graph: their inputs, and results equal to those of the plain step.

Nothing is captured here: the padded step itself runs, in torch, as attention's kernels divide it.
"""

from __future__ import annotations

import random
from pathlib import Path

import engine_tools as tools
import numpy as np
import pytest
import torch
from graph_tools import Uncaptured, padded

from meltcore.engine.core.batch import Batch, build_batch
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request
from meltcore.engine.distributed.group_runner import GroupRunner
from meltcore.engine.memory.graph_sizes import PREFILL_ONLY
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW, CapturedGraph
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.prefill_graphs import (
    EMPTY_BATCH,
    MIN_FREE_BYTES,
    ON_DEVICE,
    GraphBucket,
    PrefillGraphs,
    graph_buckets,
)
from meltcore.kernels.attention import paged as paged_attention
from meltcore.kernels.gated_delta.common import CHUNK
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams


def chunk(row: int, start: int, size: int, *, known: bool = True, samples: bool = True) -> Chunk:
    tokens = [1000 * row + index for index in range(start + size if known else start)]
    request = Request(AddRequest(str(row), tokens or [0], SamplingParams()), row, frozenset(), None)
    request.row = row
    return Chunk(request, start, size, samples=samples)


def batch_of(*chunks: Chunk) -> Batch:
    return build_batch(list(chunks), has_recurrent=False)[1]


@pytest.mark.parametrize("most_seqs", [1, 8, 16, 100, 512, 1024])
@pytest.mark.parametrize("most_tokens", [64, 2048, 8192, 16384])
def test_buckets_ascend_within_the_limits(most_seqs: int, most_tokens: int) -> None:
    sizes = graph_buckets(most_seqs, most_tokens)
    assert len(set(sizes)) == len(sizes)
    assert [sum(size) for size in sizes] == sorted(sum(size) for size in sizes)
    assert max(size.tokens for size in sizes) == most_tokens
    assert max(size.num_decodes for size in sizes) <= most_seqs
    assert graph_buckets(most_seqs, 63) == []


@pytest.mark.parametrize("tokens", [1, 64, 65, 500, 1025, 5000, 8192, 8193, 12289, 16384])
def test_prefill_only_steps_are_padded_by_a_third_at_most(tokens: int) -> None:
    size = next(size for size in graph_buckets(1024, 16384) if size.num_decodes == 0 and size.tokens >= tokens)
    assert size.tokens - tokens <= max(63, tokens // 3)
    assert size.tokens in PREFILL_ONLY


def unrecorded_graphs() -> PrefillGraphs:
    """The choice of a bucket, without a GPU for captures."""
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs._buckets = graph_buckets(64, 2048)
    graphs._bucket_sizes = [sum(size) for size in graphs._buckets]
    graphs._captured, graphs._memory_left = {}, True
    graphs._inputs = torch.zeros(1)
    graphs._logit_bytes, graphs.on_all_ranks = 2**20, bool
    return graphs


def test_no_graph_is_captured_with_too_little_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = unrecorded_graphs()
    graphs._captured[GraphBucket(0, 64)] = CapturedGraph(None, torch.empty(0), torch.empty(0))  # type: ignore[arg-type]
    free = [MIN_FREE_BYTES]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**37))
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) == GraphBucket(0, 128)
    free[0] -= 1
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) is None
    assert graphs.bucket_for(batch_of(chunk(1, 0, 64))) == GraphBucket(0, 64), "recorded before"
    free[0] = 2**36
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) is None, "freed by a step that will want it again"
    assert capsys.readouterr().err.count("too little GPU memory is left for CUDA graphs") == 1


def test_logits_beyond_those_of_captured_graphs_are_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs share their memory, so only what one has more than all others is taken."""
    graphs, batch, large = unrecorded_graphs(), batch_of(chunk(1, 0, 65)), GraphBucket(0, 128)
    graphs._captured[GraphBucket(0, 64)] = CapturedGraph(None, torch.empty(0), torch.empty(0))  # type: ignore[arg-type]
    graphs._buckets = [GraphBucket(0, 64), large._replace(decode_samples=10)]
    graphs._bucket_sizes = [64, 128]
    needed_bytes = MIN_FREE_BYTES + 10 * 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed_bytes - 1, 2**37))
    assert graphs.bucket_for(batch) is None
    graphs._memory_left = True
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed_bytes, 2**37))
    assert graphs.bucket_for(batch) == graphs._buckets[1]


def test_no_rank_captures_a_graph_for_which_another_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a graph has padding, and so other all-reduces than one that is launched kernel by kernel."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    asked: list[torch.Tensor] = []

    class OtherRankLacksMemory:
        def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
            asked.append(values.clone())
            return values.fill_(1)

    runner = GroupRunner.__new__(GroupRunner)
    runner.device, runner._group = torch.device("cpu"), OtherRankLacksMemory()  # type: ignore[assignment]
    runner._prefill_graphs = graphs = unrecorded_graphs()
    monkeypatch.setattr(ModelRunner, "_capture_prefill_graphs", lambda *_arguments: None)
    runner._capture_prefill_graphs(lambda *_progress: None, False)
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) is None
    assert [each.tolist() for each in asked] == [[0]], "this rank has memory"
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) is None
    assert len(asked) == 1, "all ranks have stopped"


def test_smallest_bucket_that_holds_a_batch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    graphs = unrecorded_graphs()
    assert graphs.bucket_for(batch_of(chunk(1, 0, 64))) == GraphBucket(0, 64)
    assert graphs.bucket_for(batch_of(chunk(1, 0, 65))) == GraphBucket(0, 128)
    assert graphs.bucket_for(batch_of(chunk(1, 0, 64), chunk(2, 5, 1))) == GraphBucket(16, 128)
    assert graphs.bucket_for(batch_of(*(chunk(row, 5, 1) for row in range(1, 18)), chunk(18, 0, 9))) == GraphBucket(
        64, 128
    )
    # Five prompts of two tokens are more than four; the next sizes hold no more, up to 384 tokens.
    assert graphs.bucket_for(batch_of(*(chunk(row, 0, 2) for row in range(1, 6)))) == GraphBucket(0, 384)
    assert graphs.bucket_for(batch_of(chunk(1, 0, 2049))) is None
    assert graphs.bucket_for(batch_of(*(chunk(row, 5, 1) for row in range(1, 66)), chunk(66, 0, 9))) is None


def test_padded_inputs_equal_those_of_the_plain_step() -> None:
    chunks = [chunk(3, 40, 1, known=False), chunk(7, 9, 1), chunk(2, 64, 70, samples=False), chunk(5, 0, 130)]
    batch, size = batch_of(*chunks), GraphBucket(16, 256)
    inputs = padded(batch, size)
    num_decodes, rest = slice(0, 2), slice(16, 16 + 200)
    for given, sent in (
        (batch.positions, inputs.positions),
        (batch.token_rows, inputs.token_rows),
        (np.where(batch.token_rows == 3, ON_DEVICE, batch.token_ids), inputs.token_ids),
    ):
        assert np.concatenate([sent[num_decodes], sent[rest]]).tolist() == given.tolist()
    assert inputs.positions[2:16].tolist() == [PADDING_POSITION] * 14
    assert not inputs.positions[216:].any()
    assert set(inputs.token_rows[2:16].tolist()) | set(inputs.token_rows[216:].tolist()) == {PADDING_ROW}
    tiles = inputs.tiles.view(torch.int32).view(-1, 4).numpy()
    real = len(batch.tiles)
    assert tiles[:real].tolist() == batch.tiles.tolist()
    assert tiles[real:].tolist() == [[PADDING_ROW, 200, 56, 0]] + [[0, 0, 0, 0]] * (size.tiles - real - 1)
    samples = len(batch.last_tokens)
    assert inputs.sample_rows.tolist() == batch.sample_rows + [PADDING_ROW] * (size.samples - samples)
    for token, row in zip(inputs.last_tokens[:samples].tolist(), batch.sample_rows, strict=True):
        assert inputs.token_rows[token] == row
        assert token + 1 == len(inputs.token_rows) or inputs.token_rows[token + 1] != row


@pytest.mark.parametrize("seed", range(20))
def test_bucket_fits_tiles_and_samples_of_every_batch_it_holds(seed: int) -> None:
    draw = random.Random(seed)
    chunks = [chunk(row, 10, 1) for row in range(1, 1 + draw.randrange(17))]
    chunks += [chunk(100 + row, 0, draw.randint(2, 200)) for row in range(1, 1 + draw.randrange(1, 5))]
    batch = batch_of(*chunks)
    for size in graph_buckets(64, 1024):
        if size.holds(batch):
            inputs = padded(batch, size)
            tiles = inputs.tiles.view(torch.int32).view(-1, 4).numpy()
            covered = np.concatenate([np.arange(first, first + count) for _, first, count, _ in tiles])
            assert sorted(covered) == list(range(size.tokens))
            assert len(batch.last_tokens) <= size.samples


@pytest.mark.parametrize("size", [GraphBucket(0, 64), GraphBucket(16, 256), GraphBucket(0, 1024)], ids=str)
@pytest.mark.parametrize("lengths", [[], [1, 1, 7], [2, 30, 31], [1, 250], [200]], ids=str)
def test_recurrent_chunks_cover_every_token_once(size: GraphBucket, lengths: list[int]) -> None:
    batch = EMPTY_BATCH
    if lengths:
        chunks = [chunk(row, 0, tokens) for row, tokens in enumerate(lengths, start=1)]
        for each in chunks:
            each.request.recurrent_slot = 10 * each.request.row
        batch = build_batch(chunks, has_recurrent=True)[1]
    if not size.holds(batch):
        pytest.skip("does not fit")
    inputs = padded(batch, size)
    first_tokens, slots = inputs.first_tokens.tolist(), inputs.state_slots.tolist()
    assert first_tokens == sorted(first_tokens)
    assert (first_tokens[0], first_tokens[-1], len(slots)) == (0, size.num_decodes + size.tokens, size.sequences)
    for row, tokens in enumerate(lengths, start=1):
        segment = slots.index(10 * row)
        assert first_tokens[segment + 1] - first_tokens[segment] == tokens
        assert inputs.rows[segment] == row
    covered: list[int] = []
    for segment, number in inputs.chunks.view(torch.int32).view(-1, 2).tolist():
        begin = first_tokens[segment] + number * CHUNK
        covered += range(begin, min(begin + CHUNK, first_tokens[segment + 1]))
    assert sorted(covered) == list(range(size.num_decodes, size.num_decodes + size.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
# test_sliding_steps.py has the families with sliding windows.
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_moe"])
def test_padded_steps_give_the_logits_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overlap: bool
) -> None:
    """Chunked prompts beside decoding sequences, with a cached prefix, and one sequence with sampling."""
    tools.make_reference(family=family).save_pretrained(tmp_path)
    beginning = tools.random_prompt(70, 5)

    def answer(*, as_graphs: bool) -> tuple[dict[str, list[int]], dict[str, torch.Tensor], list[GraphBucket]]:
        seen = tools.open_engine(tmp_path, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=96)
        graphs = Uncaptured(seen.engine.runner, graph_buckets(8, 128))
        if as_graphs:
            # Kernel by kernel as on CUDA, each by its torch body.
            monkeypatch.setattr(paged_attention, "use_triton", lambda tensor: True)
            seen.engine.runner._prefill_graphs = graphs  # type: ignore[assignment]
        tokens = {}
        for wave in range(2):
            for index in range(4):
                drawn = {"temperature": 1.0, "seed": 3} if index == 3 else {}
                prompt = beginning[: 70 * wave] + tools.random_prompt(3 + 31 * index, index)
                seen.add(f"{wave}.{index}", prompt, max_tokens=3 + index, **drawn)
            tokens |= seen.run()
        monkeypatch.undo()
        return tokens, {name: torch.stack(rows) for name, rows in seen.logits.items()}, graphs.used

    tokens, logits, used = answer(as_graphs=True)
    expected_tokens, expected, unused = answer(as_graphs=False)
    assert {bool(size.num_decodes) for size in used} == {True, False}
    assert unused == []
    assert tokens == expected_tokens
    for name, rows in expected.items():
        assert tools.relative_error(logits[name], rows) <= 1e-5, name
