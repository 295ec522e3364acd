"""Sampling a decode step in a graph: both implementations against masks and `gumbel_sample`."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.sampling import resample as resample_file
from meltcore.kernels.sampling.draw import _gumbel_sample_reference
from meltcore.kernels.sampling.resample import RowSettings, StepTokens, resample
from meltcore.kernels.sampling.token_mask import _mask_reference, _wait_reference


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vocab", [2500, 70])
def test_sampled_rows_get_new_tokens_and_others_keep_theirs(
    device: torch.device, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences: greedy, greedy with a mask, drawn, drawn with a mask, without a mask in time, and padding."""
    if device.type == "cpu":
        monkeypatch.setattr(resample_file, "wait_for_masks", _wait_reference)  # the interpreter has no clock
    torch.manual_seed(vocab)
    rows, temperatures = torch.tensor([4, 2, 5, 1, 3, 0]), torch.tensor([-1.0, 0.0, 0.8, 1.3, 0.0, -1.0])
    positions = torch.tensor([8, 11, 30, 6, 9, -1])
    first_tickets = torch.tensor([0, 7 << 32, 0, 8 << 32, 9 << 32, 0])
    masks = torch.randint(-(2**31), 2**31, (7, min(60, -(-vocab // 32))), dtype=torch.int32)
    filled, outcomes = torch.zeros(7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
    filled[2], filled[1], filled[3] = first_tickets[1] + 11, first_tickets[3] + 6, first_tickets[4] + 8
    seeds, logits = torch.randint(2**62, (6,)), torch.randn(6, vocab)
    mask_rows = torch.tensor([0, 2, 0, 1, 0, 0])
    expected_logits = logits.clone()
    _mask_reference(expected_logits, masks, mask_rows)
    expected = _gumbel_sample_reference(expected_logits, temperatures, seeds, positions + 1)[0]
    is_sampled = temperatures >= 0
    old_ids, ring, last_tokens = torch.arange(-6, 0), torch.full((4, 9), -7), torch.full((7,), -8)
    host = [tensor.pin_memory() if device.type == "cuda" else tensor for tensor in (masks, filled, outcomes, ring)]
    address = torch.tensor([host[0].data_ptr(), masks.shape[1]])
    settings = [address, torch.tensor([0, 0]), first_tickets, seeds, temperatures]
    tokens = [old_ids.clone(), rows, positions, last_tokens, torch.tensor([7])]
    on_device = StepTokens(*(tensor.to(device) for tensor in tokens), host[3])
    resample(logits.to(device), RowSettings(*(each.to(device) for each in settings)), on_device, host[1], host[2])
    if device.type == "cuda":
        torch.cuda.synchronize()
    result = torch.where(is_sampled, expected, old_ids)
    assert torch.equal(on_device.token_ids.cpu(), result)
    expected_last = torch.full((7,), -8)
    expected_last[rows[is_sampled]] = expected[is_sampled]
    assert torch.equal(on_device.last_tokens.cpu(), expected_last)
    expected_ring = torch.full((4, 9), -7)
    expected_ring[2, :6][is_sampled] = expected[is_sampled]
    assert torch.equal(host[3], expected_ring)
    late = first_tickets[4] + 9
    assert host[2][1].tolist() == [0, 0, first_tickets[1] + 11, -late, 0, 0, 0]
    assert host[2][0].tolist() == [0, first_tickets[3] + 6, 0, 0, 0, 0, 0]
