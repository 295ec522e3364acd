"""Input and output of a replayed decode step: kernels and references against plain definitions."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.step_io import apply_updates, finish_step


def on_host(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory() if device.type == "cuda" else values


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("entries", "new_pages"), [(2, 1), (16, 0), (2048, 7), (4, 1500)])
def test_updates_reach_inputs_and_page_table(entries: int, new_pages: int, device: torch.device) -> None:
    torch.manual_seed(entries)
    rows, columns = 40, 64
    sent = torch.randint(-1, 1000, (entries,))
    entries_at = torch.randperm(rows * columns)[:new_pages]
    numbers = torch.randint(1, 10_000, (new_pages,))
    table = torch.randint(0, 100, (rows, columns))
    expected = table.clone()
    expected[entries_at // columns, entries_at % columns] = numbers
    updates = on_host(torch.cat([sent, entries_at // columns, entries_at % columns, numbers]), device)
    inputs, on_device = torch.zeros(entries, dtype=torch.int64, device=device), table.to(device)
    apply_updates(updates, inputs, on_device, new_pages)
    assert torch.equal(inputs.cpu(), sent)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("sequences", [1, 12, 1024, 1500])
def test_tokens_reach_their_rows_and_the_host(sequences: int, device: torch.device) -> None:
    """Three steps; one sequence in four is padding, all on row 0."""
    torch.manual_seed(sequences)
    width, slots, before = sequences + 3, 4, 6
    padding = torch.arange(sequences) % 4 == 3
    rows = torch.where(padding, 0, torch.randperm(sequences) + 1)
    positions = torch.where(padding, -1, torch.randint(0, 500, (sequences,)))
    last_tokens = torch.randint(0, 1000, (sequences + 1,))
    ring = on_host(torch.full((slots, width), -7), device)
    state = [tensor.clone().to(device) for tensor in (positions, last_tokens, torch.tensor([before]))]
    for step in range(3):
        tokens = torch.randint(0, 100_000, (sequences,))
        old_ring = ring.clone()
        finish_step(tokens.to(device), rows.to(device), *state, ring)
        if device.type == "cuda":
            torch.cuda.synchronize()
        expected_ring = old_ring.clone()
        expected_ring[(before + step) % slots, :sequences] = tokens
        assert torch.equal(ring, expected_ring)
        now_at, now_last, steps = (tensor.cpu() for tensor in state)
        assert torch.equal(now_at, torch.where(padding, -1, positions + step + 1))
        assert torch.equal(now_last[rows[~padding]], tokens[~padding])
        untouched = torch.ones_like(last_tokens, dtype=torch.bool).index_fill_(0, rows, False)
        assert torch.equal(now_last[untouched], last_tokens[untouched])
        assert int(steps) == before + step + 1
