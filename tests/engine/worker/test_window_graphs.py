"""Steps with drafts, padded to the windows of a graph: their inputs, and the results of the plain step.

Nothing is captured here: the padded step itself runs, in torch, as attention's kernels divide it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_tools as tools
import numpy as np
import pytest
import torch
from graph_tools import Uncaptured, padded
from speculation_tools import NGRAM, ForcedDrafts
from test_mtp_drafts import ATTENTION_ONLY, HYBRID, MTP, write
from test_prefill_graphs import chunk
from triton import knobs

from meltcore.engine.core.batch import Batch, MtpInputs, NewPages, build_batch
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.memory.graph_sizes import MAX_WINDOWS, sampled_tokens, window_shapes
from meltcore.engine.memory.workspace import graph_node_bytes, plan_workspace
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.mtp_drafter import MtpDrafter
from meltcore.engine.worker.prefill_graphs import EMPTY_BATCH, ON_DEVICE, GraphBucket, graph_buckets
from meltcore.engine.worker.warm_up import StepLimits, rehearse, warm_up
from meltcore.kernels.attention import paged as paged_attention
from meltcore.kernels.gated_delta.common import CHUNK
from meltcore.models.quantized.step_sizes import StepBytes

PROMPTS = {f"r{index}": tools.random_prompt(3 + 61 * index, index) for index in range(3)}
MTP_SETTINGS: list[dict[str, object]] = [{}, {"temperature": 1.0, "seed": 3}, {}, {"speculative_decoding": False}]
SMALL = GraphBucket(0, 16, 4, 16)


def window(row: int, start: int, size: int) -> Chunk:
    made = chunk(row, start, 1, known=size > 1)._replace(size=size, drafts=tuple(range(7, 6 + size)))
    made.request.recurrent_slot = 10 * row
    return made


def batch_of(*chunks: Chunk, has_recurrent: bool = True) -> Batch:
    return build_batch(list(chunks), has_recurrent=has_recurrent)[1]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("most_seqs", [1, 5, 8, 64, 100, 300, 1024])
def test_buckets_hold_every_step_with_drafts(most_seqs: int, size: int) -> None:
    """Of up to MAX_WINDOWS sequences, and with less than twice the tokens of that many whole windows."""
    draw, buckets = random.Random(size), graph_buckets(most_seqs, 2048, size)
    assert [bucket.size for bucket in buckets] == sorted(bucket.size for bucket in buckets)
    assert len([bucket for bucket in buckets if not bucket.prompts]) <= 8
    for count in (*range(1, 20), 64, 65, 127, 128, 129, 300):
        if count <= most_seqs:
            spare_tokens, sizes = sampled_tokens(most_seqs, size) - count, []
            for _ in range(count):
                sizes.append(1 + min(spare_tokens, draw.choice([0, 1, size - 1])))
                spare_tokens -= sizes[-1] - 1
            batch = batch_of(*(window(row, 9, tokens) for row, tokens in enumerate(sizes, 1)))
            held = [bucket for bucket in buckets if bucket.holds(batch)]
            if count > min(most_seqs, MAX_WINDOWS):
                assert all(bucket.prompts for bucket in held)
            else:
                smallest = next(bucket for bucket in held if not bucket.prompts)
                assert smallest.tokens < 2 * count * size
                assert smallest.windows < 2 * count


def test_no_buckets_of_windows_without_drafts() -> None:
    assert window_shapes(64, 2048, 1) == window_shapes(0, 2048, 4) == []
    assert graph_buckets(64, 2048, 1) == graph_buckets(64, 2048)
    assert window_shapes(64, 5, 4) == [(1, 4), (2, 5), (4, 5), (5, 5)]


def test_memory_plan_counts_the_graphs_of_windows() -> None:
    step = StepBytes(token_bytes=1, fixed_bytes=0, layers=10, position_bytes=0)
    sizes = {"vocab_size": 1000, "max_num_batched_tokens": 512, "max_model_len": 64, "penalty_slots": 1}
    plain, windows = (
        plan_workspace(step, max_num_seqs=24, logit_rows=1, has_graphs=True, window=size, **sizes) for size in (1, 4)
    )
    assert windows.nodes - plain.nodes == graph_node_bytes(6, 10)  # 1, 2, 4, 8, 16 and 24 windows
    with_mtp = plan_workspace(
        step._replace(mtp_layers=1), max_num_seqs=24, logit_rows=1, has_graphs=True, window=4, **sizes
    )
    assert with_mtp.nodes - windows.nodes == graph_node_bytes(6, 3), "drafting runs the layer for each of 3 drafts"
    assert plain.graphs == 24 + 512 + (24 + 8) * 4000 + 24 * 4000
    assert windows.graphs - plain.graphs == (4 * 24 - 24) * 4000


def test_largest_buckets_of_decodes_have_no_windows() -> None:
    """Their logits would take gigabytes."""
    for bucket in graph_buckets(512, 2048, 8):
        if bucket.num_decodes:
            assert bucket.windows == (bucket.num_decodes if bucket.num_decodes <= MAX_WINDOWS else 0)
            assert bucket.samples - bucket.prompts == max(bucket.num_decodes, min(8 * bucket.windows, 512))


def test_prompts_do_not_run_as_windows() -> None:
    """The state after a prompt is that after its last token, and its decodes have a faster kernel."""
    assert SMALL.holds(batch_of(window(1, 5, 1), window(2, 5, 4)))
    for prompt in (chunk(3, 0, 2), chunk(3, 5, 1, samples=False), chunk(3, 0, 11)):
        assert not SMALL.holds(batch_of(window(1, 5, 1), window(2, 5, 4), prompt))
    assert not SMALL.holds(batch_of(*(window(row, 5, 1) for row in range(1, 6)))), "too many windows"
    assert not SMALL.holds(batch_of(*(window(row, 5, 6) for row in range(1, 4)))), "too many tokens"


@pytest.mark.parametrize("seed", range(10))
def test_padded_inputs_equal_those_of_the_plain_step(seed: int) -> None:
    draw = random.Random(seed)
    windows = [window(row, draw.randint(1, 200), draw.randint(1, 4)) for row in range(1, 1 + draw.randint(1, 4))]
    batch = batch_of(*windows)
    inputs, count, sequences = padded(batch, SMALL), len(batch.token_ids), len(windows)
    assert inputs.token_ids[:count].tolist() == [
        ON_DEVICE if index in batch.device_tokens else token for index, token in enumerate(batch.token_ids)
    ]
    for given, sent in ((batch.positions, inputs.positions), (batch.token_rows, inputs.token_rows)):
        assert sent[:count].tolist() == given.tolist()
        assert not sent[count:].any()
    assert inputs.last_tokens[:count].tolist() == list(range(count)) == batch.last_tokens
    assert inputs.sample_rows.tolist() == batch.token_rows.tolist() + [PADDING_ROW] * (SMALL.tokens - count)

    tiles = inputs.tiles.view(torch.int32).view(-1, 4).numpy()
    covered = np.concatenate([np.arange(first, first + size) for _, first, size, _ in tiles])
    assert sorted(covered) == list(range(SMALL.tokens))
    for row, first, size, position in tiles[tiles[:, 0] != PADDING_ROW].tolist():
        assert set(batch.token_rows[first : first + size]) == {row}
        assert batch.positions[first : first + size].tolist() == list(range(position, position + size))
    keys = tiles[: len(windows), 2] + tiles[: len(windows), 3]
    assert keys.tolist() == sorted(keys, reverse=True)

    # Recurrent layers compute each sequence, and the padding, as a window.
    assert SMALL.num_windows == len(inputs.state_slots) == len(inputs.first_tokens) - 1
    assert inputs.state_slots.tolist()[:sequences] == [10 * row for row in batch.rows]
    assert not inputs.state_slots[sequences:].any()
    assert inputs.context_lens.tolist()[:sequences] == batch.context_lens
    assert set(inputs.context_lens.tolist()[sequences:]) == {PADDING_POSITION}
    sizes = inputs.first_tokens.diff().tolist()
    assert sizes[:sequences] == np.bincount(batch.token_rows)[batch.rows].tolist()
    assert sum(sizes) == SMALL.tokens


@pytest.mark.parametrize("seed", range(10))
def test_windows_beside_prompts_are_told_from_them(seed: int) -> None:
    """As recurrent layers read them: decodes, windows and prompts, padded each."""
    draw = random.Random(seed)
    decodes = [window(row, draw.randint(1, 200), 1) for row in range(1, 1 + draw.randint(0, 6))]
    most = 6 - len(decodes)
    windows = [window(row, draw.randint(1, 200), draw.randint(2, 4)) for row in range(11, 11 + draw.randint(0, most))]
    prompts = [chunk(row, 0, draw.randint(2, 25)) for row in range(21, 21 + draw.randint(0, 4))]
    for each in prompts:
        each.request.recurrent_slot = 10 * each.request.row
    bucket = next(bucket for bucket in graph_buckets(6, 128, 4) if bucket.num_decodes == 6)
    batch = batch_of(*decodes, *windows, *prompts) if decodes + windows + prompts else EMPTY_BATCH
    inputs = padded(batch, bucket)
    assert bucket.holds(batch)
    assert bucket.num_windows == 12
    first_tokens, sizes = inputs.first_tokens.tolist(), inputs.first_tokens.diff().tolist()
    assert (first_tokens[0], first_tokens[-1]) == (0, bucket.size)
    assert min(sizes) >= 0
    for begin, end, chunks in ((0, 6, decodes), (6, 12, windows), (12, bucket.sequences, prompts)):
        rows = [each.request.row for each in chunks]
        assert sorted(inputs.rows[begin:end].tolist()) == [PADDING_ROW] * (end - begin - len(rows)) + rows
        for each in chunks:
            [sequence] = (inputs.rows == each.request.row).nonzero()[:, 0].tolist()
            tokens = slice(first_tokens[sequence], first_tokens[sequence] + each.size)
            assert (sizes[sequence], inputs.context_lens[sequence]) == (each.size, each.start)
            assert inputs.state_slots[sequence] == 10 * each.request.row
            assert set(inputs.token_rows[tokens].tolist()) == {each.request.row}
        padding = inputs.rows[begin:end] == PADDING_ROW
        assert set(inputs.context_lens[begin:end][padding].tolist()) <= {0 if begin == 12 else PADDING_POSITION}
        assert not inputs.state_slots[begin:end][padding].any()
    covered = list(range(first_tokens[12]))
    for sequence, number in inputs.chunks.view(torch.int32).view(-1, 2).tolist():
        assert sequence >= 12
        start = first_tokens[sequence] + number * CHUNK
        covered += range(start, min(start + CHUNK, first_tokens[sequence + 1]))
    assert sorted(covered) == list(range(bucket.size))


def test_buckets_limit_windows_and_prompts_apart() -> None:
    bucket = GraphBucket(4, 256, 2, 8)
    windows, prompts = [window(row, 9, 3) for row in range(1, 4)], [chunk(row, 0, 3) for row in range(11, 16)]
    held = [[bucket.holds(batch_of(*windows[:a], *prompts[:b])) for b in range(6)] for a in (1, 2, 3)]
    assert held == [[True] * 5 + [False]] * 2 + [[False] * 6]
    assert bucket.samples == 12
    assert bucket.holds(batch_of(*windows, *prompts[:3], has_recurrent=False)), "attention computes both alike"
    assert not bucket.holds(batch_of(*windows, *prompts[:4], has_recurrent=False)), "too many samples"


def test_padding_alone_is_no_sequence() -> None:
    """As a graph is captured."""
    inputs = padded(EMPTY_BATCH, SMALL)
    assert set(inputs.context_lens.tolist()) == {PADDING_POSITION}
    assert inputs.first_tokens.tolist() == [0] * (SMALL.sequences - 1) + [SMALL.tokens] * 2
    assert not inputs.rows.any()


class _Checked(Uncaptured):
    """Padded steps. Each token of padding, too, must have finite hidden states, whatever the null slot holds."""

    def __init__(self, runner: ModelRunner, max_tokens: int) -> None:
        super().__init__(runner, graph_buckets(8, max_tokens, 4))
        self.window_sizes: list[set[int]] = []
        self.num_mixed = 0  # steps of windows beside prompts
        self.drafted: set[tuple[int, int]] = set()
        self.max_tokens = max(bucket.size for bucket in self._sizes)

    def replay(
        self, batch: Batch, size: GraphBucket, new_pages: NewPages, mtp: MtpInputs | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.window_sizes.append(set(np.unique(batch.token_rows, return_counts=True)[1].tolist()))
        self.num_mixed += size.prompts > 0 and len(set(batch.sample_rows)) < len(batch.sample_rows)
        return super().replay(batch, size, new_pages, mtp)

    def replay_drafting(self, size: GraphBucket, num_windows: int, token_ids: torch.Tensor) -> torch.Tensor:
        self.drafted.add((num_windows, size.windows))
        return super().replay_drafting(size, num_windows, token_ids)

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = self._runner
        model, states = runner.model, runner.recurrent_states
        forward = model.forward

        def checked(*arguments: object, **keywords: object) -> torch.Tensor:
            if states is not None:
                states.conv[0], states.states[0] = float("nan"), float("nan")
            hidden: torch.Tensor = forward(*arguments, **keywords)
            assert hidden.isfinite().all()
            return hidden

        monkeypatch.setattr(model, "forward", checked)


def _kept(seen: tools.SeenEngine) -> list[torch.Tensor]:
    """All that a step writes, but for the null page, the null slot and the drafter's row of padding."""
    runner = seen.engine.runner
    tensors = [tensor[1:] for tensor in runner.cache_tensors]
    if isinstance(runner.drafter, MtpDrafter):
        tensors += [table[1:] for table in runner.drafter._tables[1:]]
    return tensors if runner.recurrent_states is None else [*tensors, runner.recurrent_states.folded[1:]]


def _run_together(
    plain: tools.SeenEngine, seen: tools.SeenEngine, graphs: _Checked, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[int]]:
    """Compare two engines after each step. The second runs padded steps. Returns the answers."""
    answers: dict[str, list[int]] = {}
    while plain.engine.has_work:
        with monkeypatch.context() as patch:
            tokens = [(each.request_id, each.token_ids) for each in plain.engine.step().outputs]
            # Kernel by kernel as on CUDA, each by its torch body.
            patch.setattr(paged_attention, "use_triton", lambda _tensor: True)
            graphs.check(patch)
            assert [(each.request_id, each.token_ids) for each in seen.engine.step().outputs] == tokens
        for request_id, token_ids in tokens:
            answers.setdefault(request_id, []).extend(token_ids)
        drafts = [{each.id: each.drafts for each in one.engine.scheduler.running} for one in (plain, seen)]
        assert drafts[0] == drafts[1]
        for expected, found in zip(_kept(plain), _kept(seen), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)
    assert not seen.engine.has_work
    for name, rows in plain.logits.items():
        assert tools.relative_error(torch.stack(seen.logits[name]), torch.stack(rows)) <= 1e-5, name
    return answers


@pytest.fixture
def windows_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = Scheduler._usable_drafts

    def cut(scheduler: Scheduler, request: Request, *limits: int) -> tuple[int, ...]:
        drawn = random.Random(100 * request.row + request.length).randrange(4)
        return usable(scheduler, request, *limits)[:drawn]

    monkeypatch.setattr(Scheduler, "_usable_drafts", cut)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("windows_of_all_sizes", "nan_in_new_memory")
@pytest.mark.slow
@pytest.mark.parametrize("num_right", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text", "qwen3_moe", "qwen3_5_moe_text"])
def test_padded_steps_change_what_plain_steps_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_right: int
) -> None:
    """Step by step: tokens, logits, and all pages and slots except the padding's."""
    tools.make_reference(family=family).save_pretrained(tmp_path)
    sizes = {"max_num_batched_tokens": 48}
    plain, seen = (tools.open_engine(tmp_path, speculative_config=NGRAM, **sizes) for _ in range(2))
    truth = tools.open_engine(tmp_path, **sizes)
    for engine in (truth, plain, seen):
        for index, (request_id, prompt) in enumerate(PROMPTS.items()):
            engine.add(
                request_id,
                prompt,
                max_tokens=20 + 12 * index,
                **({"temperature": 1.0, "seed": 3} if index == 2 else {}),
            )
    answers = truth.run()
    graphs = _Checked(seen.engine.runner, 128)
    seen.engine.runner._prefill_graphs = graphs  # type: ignore[assignment]
    ForcedDrafts(monkeypatch, answers, num_right)
    assert _run_together(plain, seen, graphs, monkeypatch) == answers
    assert {bucket.windows for bucket in graphs.used if not bucket.prompts} >= {2, 4}
    assert set().union(*graphs.window_sizes) >= {1, 2, 3, 4}
    assert graphs.num_mixed > 0
    assert sum(len(sizes) > 1 for sizes in graphs.window_sizes) > 5


@pytest.mark.usefixtures("windows_of_all_sizes", "nan_in_new_memory")
@pytest.mark.slow
@pytest.mark.parametrize("layer_types", [HYBRID, ATTENTION_ONLY], ids=["hybrid", "attention"])
def test_drafts_by_mtp_follow_padded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_types: list[str]
) -> None:
    """The layer gets the hidden states of windows, and of prompts in chunks, and writes the cache as plain steps do.

    After windows alone it drafts as in a graph: for sampled tokens, for windows of padding, beside sequences that take
    no drafts, and where rows still have pages of earlier sequences.
    """
    write(tmp_path, 0.2, layer_types=layer_types)
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    plain, seen = (tools.open_engine(tmp_path, speculative_config=MTP, **sizes) for _ in range(2))
    graphs, drafter = _Checked(seen.engine.runner, 128), seen.engine.runner.drafter
    assert isinstance(drafter, MtpDrafter)
    drafter.keep_hidden_states(graphs.max_tokens)
    seen.engine.runner._prefill_graphs = graphs  # type: ignore[assignment]
    for wave in range(2):
        for engine in (plain, seen):
            for index, sampling in enumerate(MTP_SETTINGS):
                length = 140 - 9 * index if wave == 0 else 3 + 29 * index
                prompt = tools.random_prompt(length, 10 * wave + index)
                engine.add(f"{wave}.{index}", prompt, max_tokens=6 if wave == 0 else 25 + 9 * index, **sampling)
        _run_together(plain, seen, graphs, monkeypatch)
    assert plain.engine.runner.caches[-1][0][1:].any(), "the layer's keys"
    assert {bool(bucket.prompts) for bucket in graphs.used} == {True, False}
    assert graphs.num_mixed > 0
    assert set().union(*graphs.window_sizes) >= {1, 2, 3, 4}
    assert graphs.drafted >= {(1, 1), (2, 2), (3, 4), (4, 4)}, "windows, and those of the graph"
    padding = [tables[0].tolist() for tables in drafter._tables[1:4]]
    assert padding == [0, [-1] * 3, 0]


@pytest.mark.parametrize("launch", [rehearse, warm_up])
def test_warm_up_launches_windows_of_every_bucket(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]
) -> None:
    seen = tools.open_engine(checkpoint, max_model_len=300, speculative_config=NGRAM)
    runner, sizes = seen.engine.runner, []
    compute = runner._compute_batch
    monkeypatch.setattr(
        *(runner, "_compute_batch"),
        lambda batch, *rest: sizes.append((len(batch.rows), len(batch.last_tokens))) or compute(batch, *rest),
    )
    monkeypatch.setattr(runner, "warm_up_decodes", lambda _counts: None)  # these have no torch body
    launch(runner, StepLimits(100, 300, 140))
    assert sizes[-8:] == window_shapes(100, 140, 4)
    assert sizes[-1] == (100, 140)
    assert not runner.proposes_drafts
    assert not runner.caches[0][0][1:].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("windows_of_all_sizes")
@pytest.mark.parametrize("at_first_use", [False, True])
def test_replayed_drafts_are_those_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first_use: bool
) -> None:
    """Of greedy and of sampled tokens, captured at the start or at first use, without loading a kernel in a capture."""
    write(tmp_path, 0.2, layer_types=HYBRID)
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)
    loaded: list[tuple[str, bool]] = []

    def record(_module: object, _function: object, name: str, *_: object) -> None:
        loaded.append((name, torch.cuda.is_current_stream_capturing()))

    sizes = {
        "max_num_batched_tokens": 160,
        "max_num_seqs": 4,
        "device": "cuda",
    }  # 128 tokens beside decodes
    knobs.runtime.kernel_load_start_hook.add(record)
    try:
        plain, seen = (
            tools.open_engine(tmp_path, speculative_config=MTP, enforce_eager=is_eager, **sizes)
            for is_eager in (True, False)
        )
        graphs = seen.engine.runner._prefill_graphs
        assert graphs is not None
        windows = [bucket for bucket in graphs._captured if bucket.draft_windows]
        assert set(graphs._drafting) == set(windows) != set()
        if at_first_use:
            for bucket in windows:
                del graphs._captured[bucket], graphs._drafting[bucket]
            monkeypatch.setattr(graphs, "_has_memory", lambda _bucket: True)
        replayed: list[tuple[int, int]] = []
        replay = graphs.replay_drafting
        monkeypatch.setattr(
            *(graphs, "replay_drafting"),
            lambda bucket, *rest: replayed.append((rest[0], bucket.windows)) or replay(bucket, *rest),
        )
        for engine in (plain, seen):
            for index, sampling in enumerate(MTP_SETTINGS):
                engine.add(
                    f"r{index}", tools.random_prompt(3 + 29 * index, index), max_tokens=40 + 9 * index, **sampling
                )
        while plain.engine.has_work:
            outputs = [
                [(each.request_id, each.token_ids) for each in one.engine.step().outputs] for one in (plain, seen)
            ]
            assert outputs[0] == outputs[1]
            drafts = [{each.id: each.drafts for each in one.engine.scheduler.running} for one in (plain, seen)]
            assert drafts[0] == drafts[1]
            for expected, found in zip(_kept(plain), _kept(seen), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    finally:
        knobs.runtime.kernel_load_start_hook.remove(record)
    assert {(3, 4), (4, 4)} <= set(replayed), "windows, and those of the graph"
    assert [name for name, is_capturing in loaded if is_capturing] == []
