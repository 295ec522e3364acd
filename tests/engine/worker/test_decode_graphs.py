"""Decode graphs without a GPU: the batch sizes, the warm-up of their launches, and what their sampling does."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import numpy as np
import pytest
import torch

from meltcore.engine.core.batch import NewPages, Step
from meltcore.engine.core.constraint import Constraint
from meltcore.engine.core.request import Request
from meltcore.engine.memory.graph_sizes import capture_sizes
from meltcore.engine.worker import cuda_graphs as graphs_file
from meltcore.engine.worker import transfer as transfer_file
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW, DecodeGraphs, DecodeOutput
from meltcore.engine.worker.sampler import Sampler
from meltcore.kernels.sampling.resample import StepTokens
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import Grammar, SamplingParams


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000, 1024, 5000])
def test_capture_sizes_cover_every_batch_with_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(4, count // 2)


class AbsentEvent:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


def test_warm_up_does_not_feed_sampled_tokens_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With skipped kernels the sampled value may be no token id, and the next step would look it up."""
    for module in (graphs_file, transfer_file):
        monkeypatch.setattr(module, "pinned_zeros", lambda *shape: torch.zeros(shape, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "Event", AbsentEvent)
    last_tokens, page_table = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int64)
    seen = []

    def step(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert set(rows.tolist()) == {PADDING_ROW}
        assert set(positions.tolist()) == {PADDING_POSITION}
        seen.append((len(rows), last_tokens[rows].tolist()))
        return torch.empty(len(rows), 2), torch.full_like(rows, 10**9)

    DecodeGraphs(step, capture_sizes(8), last_tokens, page_table).warm_up_steps([1, 2, 8])
    assert seen == [(1, [0]), (2, [0] * 2), (8, [0] * 8)]
    assert not last_tokens.any()
    assert not page_table.any()


def test_drawn_tokens_use_the_logits_of_the_graph(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own rows; to compute them again would take as long as a tenth of a step of a small model."""
    runner = tools.open_engine(checkpoint).engine.runner
    logits = torch.randn(4, tools.VOCAB).bfloat16()
    decoded = DecodeOutput(logits[:3], torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int64))
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    monkeypatch.setattr(graphs, "replay", lambda rows, positions, new_pages: decoded, raising=False)
    monkeypatch.setattr(runner, "_decode_graphs", graphs)
    monkeypatch.setattr(type(runner.model), "logits", None, raising=False)
    token_ids, logits_at = runner._compute(Step(NewPages([], [], []), [1, 2, 3], [9, 9, 9], None))
    assert token_ids.tolist() == [5, 6, 7]
    assert torch.equal(logits_at(torch.tensor([2, 0])), logits[[2, 0]])


def decoding(arrival: int, **sampling: object) -> Request:
    """A request in the row of its arrival that has generated 3 tokens, the third of which is in flight."""
    message = AddRequest(f"{arrival}", [5] * arrival, SamplingParams(**({"seed": arrival} | sampling)))  # type: ignore[arg-type]
    request = Request(message, arrival, frozenset({1}), None)
    if request.sampling.grammar is not None:
        request.constraint = Constraint(None, request.sampling.grammar, arrival)  # type: ignore[arg-type]
    request.token_ids.extend([7, 8])
    request.in_flight, request.row = 1, arrival
    return request


def test_graph_samples_as_the_sampler_does() -> None:
    """Greedy, drawn, and under grammars, of which the second is late."""
    grammar, vocab, width = Grammar("start: /a/"), 96, 6
    sampler = Sampler(vocab, torch.device("cpu"), seed=0)
    sampler.prepare_graphs(width)
    requests = [
        *(decoding(1), decoding(2, temperature=0.7), decoding(3, grammar=grammar)),
        *(decoding(4, grammar=grammar, temperature=1.5), decoding(5, grammar=grammar, temperature=1.0)),
    ]
    table = sampler.allocate_masks(width + 1, vocab)
    table.masks[:] = np.random.default_rng(0).integers(-(2**31), 2**31, table.masks.shape, dtype=np.int32)
    for request in (requests[2], requests[4]):
        assert request.constraint is not None
        table.filled[request.row] = request.constraint.ticket(3)
    sampler.mask_limits_s = 0.0, 0.0
    logits = torch.randn(len(requests) + 1, vocab)
    expected = sampler.sample(logits[:-1].clone(), requests).token_ids
    outcomes = table.outcomes.copy()
    table.outcomes[:] = 0

    assert sampler.send_settings(requests)
    rows, positions = (torch.tensor(values) for values in ([1, 2, 3, 4, 5, 0], [3, 4, 5, 6, 7, -1]))
    last_tokens, ring = torch.zeros(width + 1, dtype=torch.int64), torch.zeros(4, width, dtype=torch.int64)
    token_ids = torch.cat([logits[:-1].argmax(-1), torch.tensor([-9])])
    sampler.resample(logits, StepTokens(token_ids, rows, positions, last_tokens, torch.tensor([1]), ring))
    assert token_ids.tolist() == [*expected.tolist(), -9]
    assert last_tokens[2:6].tolist() == ring[0, 1:5].tolist() == expected[1:].tolist()
    assert (outcomes == table.outcomes).all()
    assert outcomes[1, 3:6].tolist() == [3 << 32 | 3, -(4 << 32 | 3), 5 << 32 | 3]


def test_graphs_sample_what_needs_masks_and_temperatures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are sent once for the same requests. With other settings, or if the host waits, no graph samples."""
    sampler = Sampler(8, torch.device("cpu"), seed=0)
    sampler.prepare_graphs(4)
    sent = []
    monkeypatch.setattr(sampler._graph_settings, "send", lambda requests, *_: sent.append(list(requests)))
    one, other = decoding(1, temperature=1.0), decoding(2)
    for requests in ([one, other], [one, other], [other, one], [one], [one]):
        assert sampler.send_settings(requests)
    assert sent == [[one, other], [other, one], [one]]
    refused: list[dict[str, object]] = [
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "min_p": 0.1},
        {"logprobs": 1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 3, "max_tokens": 9},
    ]
    for sampling in refused:
        assert not sampler.send_settings([one, decoding(3, **sampling)])
    constrained = decoding(4, grammar=Grammar("start: /a/"))
    assert not sampler.send_settings([one, constrained])  # the host waits
    sampler.mask_limits_s = 0.0, 0.001
    assert sampler.send_settings([one, constrained])
    assert sent[3:] == [[one, constrained]]
