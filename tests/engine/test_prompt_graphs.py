"""Steps padded to the size of a graph: what they are told, and that they compute what the plain step does.

Nothing is captured here: the padded step itself runs, in torch, as attention's kernels divide it.
"""

from __future__ import annotations

import random
from pathlib import Path

import engine_tools as tools
import numpy as np
import pytest
import torch

from meltcore.engine.batch import Batch, NewPages, build_batch
from meltcore.engine.graphs import PADDING_POSITION, PADDING_ROW, Captured
from meltcore.engine.messages import AddRequest
from meltcore.engine.prompt_graphs import (
    ALONE,
    EMPTY,
    LEAST_FREE_BYTES,
    ON_DEVICE,
    PaddedInputs,
    PromptGraphs,
    Size,
    entries_of,
    pad,
    prompt_sizes,
)
from meltcore.engine.request import Request
from meltcore.engine.runner import ModelRunner
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import Chunk
from meltcore.kernels import paged_attention
from meltcore.kernels.delta import CHUNK


def chunk(row: int, start: int, size: int, *, known: bool = True, samples: bool = True) -> Chunk:
    tokens = [1000 * row + index for index in range(start + size if known else start)]
    request = Request(AddRequest(str(row), tokens or [0], SamplingParams()), row, frozenset(), None)
    request.row = row
    return Chunk(request, start, size, samples=samples)


def batch_of(*chunks: Chunk) -> Batch:
    return build_batch(list(chunks), recurrent=False)[1]


def padded(batch: Batch, size: Size) -> PaddedInputs:
    inputs = PaddedInputs.within(torch.full((entries_of(size),), -77), size)
    pad(batch, size, inputs)
    return inputs


@pytest.mark.parametrize("most_seqs", [1, 8, 16, 100, 512, 1024])
@pytest.mark.parametrize("most_tokens", [64, 2048, 8192, 16384])
def test_sizes_ascend_and_keep_to_the_limits(most_seqs: int, most_tokens: int) -> None:
    sizes = prompt_sizes(most_seqs, most_tokens)
    assert len(set(sizes)) == len(sizes)
    assert [sum(size) for size in sizes] == sorted(sum(size) for size in sizes)
    assert max(size.tokens for size in sizes) == most_tokens
    assert max(size.decodes for size in sizes) <= most_seqs
    assert prompt_sizes(most_seqs, 63) == []


@pytest.mark.parametrize("tokens", [1, 64, 65, 500, 1025, 5000, 8192, 8193, 12289, 16384])
def test_prompts_alone_are_padded_by_a_third_at_most(tokens: int) -> None:
    size = next(size for size in prompt_sizes(1024, 16384) if size.decodes == 0 and size.tokens >= tokens)
    assert size.tokens - tokens <= max(63, tokens // 3)
    assert size.tokens in ALONE


def unrecorded_graphs() -> PromptGraphs:
    """What chooses a size, without a GPU to record on."""
    graphs = PromptGraphs.__new__(PromptGraphs)
    graphs._sizes = prompt_sizes(64, 2048)
    graphs._totals = [sum(size) for size in graphs._sizes]
    graphs._captured, graphs._room = {}, True
    graphs._inputs = torch.zeros(1)
    return graphs


def test_nothing_is_recorded_where_too_little_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = unrecorded_graphs()
    graphs._captured[Size(0, 64)] = Captured(None, torch.empty(0), torch.empty(0))  # type: ignore[arg-type]
    free = [LEAST_FREE_BYTES]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**37))
    assert graphs.size_for(batch_of(chunk(1, 0, 65))) == Size(0, 128)
    free[0] -= 1
    assert graphs.size_for(batch_of(chunk(1, 0, 65))) is None
    assert graphs.size_for(batch_of(chunk(1, 0, 64))) == Size(0, 64), "recorded before"
    free[0] = 2**36
    assert graphs.size_for(batch_of(chunk(1, 0, 65))) is None, "freed by a step that will want it again"
    assert capsys.readouterr().err.count("too little GPU memory is left to record graphs") == 1


def test_the_smallest_size_that_holds_a_batch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    graphs = unrecorded_graphs()
    assert graphs.size_for(batch_of(chunk(1, 0, 64))) == Size(0, 64)
    assert graphs.size_for(batch_of(chunk(1, 0, 65))) == Size(0, 128)
    assert graphs.size_for(batch_of(chunk(1, 0, 64), chunk(2, 5, 1))) == Size(16, 128)
    assert graphs.size_for(batch_of(*(chunk(row, 5, 1) for row in range(1, 18)), chunk(18, 0, 9))) == Size(64, 128)
    # Five prompts of two tokens are more than four; the next sizes have places for no more, up to 384 tokens.
    assert graphs.size_for(batch_of(*(chunk(row, 0, 2) for row in range(1, 6)))) == Size(0, 384)
    assert graphs.size_for(batch_of(chunk(1, 0, 2049))) is None
    assert graphs.size_for(batch_of(*(chunk(row, 5, 1) for row in range(1, 66)), chunk(66, 0, 9))) is None


def test_a_padded_step_is_told_the_same_as_the_plain_one() -> None:
    chunks = [chunk(3, 40, 1, known=False), chunk(7, 9, 1), chunk(2, 64, 70, samples=False), chunk(5, 0, 130)]
    batch, size = batch_of(*chunks), Size(16, 256)
    inputs = padded(batch, size)
    decodes, rest = slice(0, 2), slice(16, 16 + 200)
    for given, sent in (
        (batch.positions, inputs.positions),
        (batch.token_rows, inputs.token_rows),
        (np.where(batch.token_rows == 3, ON_DEVICE, batch.token_ids), inputs.token_ids),
    ):
        assert np.concatenate([sent[decodes], sent[rest]]).tolist() == given.tolist()
    assert inputs.positions[2:16].tolist() == [PADDING_POSITION] * 14
    assert not inputs.positions[216:].any()
    assert set(inputs.token_rows[2:16].tolist()) | set(inputs.token_rows[216:].tolist()) == {PADDING_ROW}
    tiles = inputs.tiles.view(torch.int32).view(-1, 4).numpy()
    real = len(batch.tiles)
    assert tiles[:real].tolist() == batch.tiles.tolist()
    assert tiles[real:].tolist() == [[PADDING_ROW, 200, 56, 0]] + [[0, 0, 0, 0]] * (size.tiles - real - 1)
    samples = len(batch.last_tokens)
    assert inputs.sample_rows.tolist() == batch.sample_rows + [PADDING_ROW] * (size.sampled - samples)
    for token, row in zip(inputs.last_tokens[:samples].tolist(), batch.sample_rows, strict=True):
        assert inputs.token_rows[token] == row
        assert token + 1 == len(inputs.token_rows) or inputs.token_rows[token + 1] != row


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_that_a_size_holds_has_places_for_its_tiles_and_choices(seed: int) -> None:
    draw = random.Random(seed)
    chunks = [chunk(row, 10, 1) for row in range(1, 1 + draw.randrange(17))]
    chunks += [chunk(100 + row, 0, draw.randint(2, 200)) for row in range(1, 1 + draw.randrange(1, 5))]
    batch = batch_of(*chunks)
    for size in prompt_sizes(64, 1024):
        if size.holds(batch):
            inputs = padded(batch, size)
            tiles = inputs.tiles.view(torch.int32).view(-1, 4).numpy()
            covered = np.concatenate([np.arange(first, first + count) for _, first, count, _ in tiles])
            assert sorted(covered) == list(range(size.tokens))
            assert len(batch.last_tokens) <= size.sampled


@pytest.mark.parametrize("size", [Size(0, 64), Size(16, 256), Size(0, 1024)], ids=str)
@pytest.mark.parametrize("lengths", [[], [1, 1, 7], [2, 30, 31], [1, 250], [200]], ids=str)
def test_pieces_of_recurrent_layers_cover_every_token_once(size: Size, lengths: list[int]) -> None:
    batch = EMPTY
    if lengths:
        chunks = [chunk(row, 0, tokens) for row, tokens in enumerate(lengths, start=1)]
        for each in chunks:
            each.request.state_slot = 10 * each.request.row
        batch = build_batch(chunks, recurrent=True)[1]
    if not size.holds(batch):
        pytest.skip("does not fit")
    inputs = padded(batch, size)
    firsts, slots = inputs.first_tokens.tolist(), inputs.state_slots.tolist()
    assert firsts == sorted(firsts)
    assert (firsts[0], firsts[-1], len(slots)) == (0, size.decodes + size.tokens, size.segments)
    for row, tokens in enumerate(lengths, start=1):
        segment = slots.index(10 * row)
        assert firsts[segment + 1] - firsts[segment] == tokens
        assert inputs.rows[segment] == row
    covered: list[int] = []
    for segment, number in inputs.pieces.view(torch.int32).view(-1, 2).tolist():
        begin = firsts[segment] + number * CHUNK
        covered += range(begin, min(begin + CHUNK, firsts[segment + 1]))
    assert sorted(covered) == list(range(size.decodes, size.decodes + size.tokens))


class Uncaptured:
    """Padded steps as a graph would compute them, one after the other."""

    def __init__(self, runner: ModelRunner, sizes: list[Size]) -> None:
        self._runner, self._sizes = runner, sizes
        self.used: list[Size] = []

    def size_for(self, batch: Batch) -> Size | None:
        return next((size for size in self._sizes if size.holds(batch)), None)

    def replay(self, batch: Batch, size: Size, new_pages: NewPages) -> tuple[torch.Tensor, torch.Tensor]:
        if new_pages.rows:
            self._runner._write_pages(new_pages)
        self.used.append(size)
        hidden, token_ids = self._runner._padded_step(padded(batch, size), size)
        count = len(batch.last_tokens)
        return hidden[:count], token_ids[:count]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", sorted(tools.FAMILIES))
def test_padded_steps_compute_what_plain_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overlap: bool
) -> None:
    """Prompts in pieces beside sequences that decode, with a prefix in the cache, and one that draws its tokens."""
    tools.make_reference(family=family).save_pretrained(tmp_path)
    beginning = tools.random_prompt(70, 5)

    def answer(*, as_graphs: bool) -> tuple[dict[str, list[int]], dict[str, torch.Tensor], list[Size]]:
        seen = tools.open_engine(tmp_path, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=96)
        graphs = Uncaptured(seen.engine.runner, prompt_sizes(8, 128))
        if as_graphs:
            # Kernel by kernel as on CUDA, each by its torch body.
            monkeypatch.setattr(paged_attention, "use_triton", lambda tensor: True)
            seen.engine.runner._prompt_graphs = graphs  # type: ignore[assignment]
        tokens = {}
        for wave in range(2):
            for index in range(5):
                drawn = {"temperature": 1.0, "seed": 3} if index == 4 else {}
                prompt = beginning[: 70 * wave] + tools.random_prompt(3 + 31 * index, index)
                seen.add(f"{wave}.{index}", prompt, max_tokens=5 + index, **drawn)
            tokens |= seen.run()
        monkeypatch.undo()
        return tokens, {name: torch.stack(rows) for name, rows in seen.logits.items()}, graphs.used

    tokens, logits, used = answer(as_graphs=True)
    expected_tokens, expected, unused = answer(as_graphs=False)
    assert {bool(size.decodes) for size in used} == {True, False}
    assert unused == []
    assert tokens == expected_tokens
    for name, rows in expected.items():
        assert tools.relative_error(logits[name], rows) <= 1e-5, name
