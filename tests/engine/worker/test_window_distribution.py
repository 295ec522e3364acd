"""Tokens of windows have the distribution of sampling one token after another: chi-square over 40,000 windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meltcore.engine.core.request import Request
from meltcore.engine.worker import sampler as sampler_module
from meltcore.engine.worker.sampler import Sampler
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
VOCAB, WINDOWS, BLOCK = 24, 40_000, 10_000
PROMPT = [3, 4]
SAMPLING = {
    "cold": {"temperature": 0.6},
    "filters": {"temperature": 1.4, "top_k": 16, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
}


def expected(logits: np.ndarray, sampling: SamplingParams, output: list[int]) -> np.ndarray:
    """The distribution of the next token after `output`, in float64, after penalties and then filters."""
    logits = logits.astype(np.float64)
    for token in set(PROMPT + output):
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    shares = weights[order] / weights.sum()
    weights[order[np.cumsum(shares) - shares >= sampling.top_p]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def chi_square_excess(sampling: dict[str, float]) -> float:
    """Standard deviations by which chi-square exceeds its mean, over the first token and the one after the draft."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2, VOCAB, generator=generator)
    draft = int(logits[0].argmax())
    params = SamplingParams(max_tokens=8, **sampling)
    sampler = Sampler(VOCAB, torch.device("cpu"), 0, BLOCK)
    sampler._penalties._output_counts.zero_()
    sampler._penalties._in_prompt.zero_()
    sampler._penalties._in_prompt[:, PROMPT] = True
    counts = np.zeros((2, VOCAB))
    for first in range(0, WINDOWS, BLOCK):
        requests = [Request(AddRequest(str(at), PROMPT, params), first + at, frozenset(), None) for at in range(BLOCK)]
        for slot, request in enumerate(requests):
            request.in_flight, request.penalty_slot, request.is_counted = 1, slot, True
        rows = [request for request in requests for _ in range(2)]
        found = sampler.sample(logits.repeat(BLOCK, 1), rows, [(), (draft,)] * BLOCK).token_ids.view(BLOCK, 2).numpy()
        counts[0] += np.bincount(found[:, 0], minlength=VOCAB)
        counts[1] += np.bincount(found[found[:, 0] == draft, 1], minlength=VOCAB)
    chi_square, cells = 0.0, 0
    for index, output in enumerate(([], [draft])):
        means = expected(logits[index].numpy(), params, output) * counts[index].sum()
        assert not counts[index][means == 0].any(), "a token that filters exclude"
        chi_square += ((counts[index] - means)[means > 0] ** 2 / means[means > 0]).sum()
        cells += (means > 0).sum() - 1
    return float((chi_square - cells) / np.sqrt(2 * cells))


@pytest.mark.parametrize("kind", SAMPLING)
def test_windows_have_the_distribution_of_single_tokens(kind: str) -> None:
    assert chi_square_excess(SAMPLING[kind]) < 5


def test_noise_of_another_position_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise that chose the draft also chooses the token after it."""
    monkeypatch.setattr(sampler_module, "positions_of", lambda requests, _drafts: [each.length for each in requests])
    assert chi_square_excess(SAMPLING["cold"]) > 5
