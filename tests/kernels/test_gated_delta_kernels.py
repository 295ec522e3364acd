"""Gated DeltaNet's kernels against their references: decode, prompts in chunks, and one after the other."""

from __future__ import annotations

import pytest
import torch
from gated_delta_tools import SMALL, Slots, distance, make_metadata, make_params
from kernel_tools import in_reference, in_triton

from meltcore.kernels.gated_delta import state_scan
from meltcore.kernels.gated_delta.common import GatedDeltaShape
from meltcore.kernels.gated_delta.decode import gated_delta_decode
from meltcore.kernels.gated_delta.layer import gated_delta_net
from meltcore.kernels.gated_delta.prefill import gated_delta_prefill
from meltcore.kernels.gated_delta.state_scan import ScanLaunch

# ||out - torch|| / ||torch||, by type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
POISON = float("nan")


def used_slots(count: int, shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device, window: int = 1) -> Slots:
    unused = Slots.make(count, shape, dtype, device, window)
    return Slots(*(torch.randn(part.shape).to(part) for part in unused))


DECODE_SHAPES = [
    (SMALL, torch.float32),
    (GatedDeltaShape(key_heads=1, heads=3, key_dim=16, value_dim=32, kernel=4), torch.bfloat16),
    (GatedDeltaShape(key_heads=2, heads=2, key_dim=64, value_dim=32, kernel=3), torch.float16),
    (GatedDeltaShape(key_heads=1, heads=2, key_dim=128, value_dim=128, kernel=4), torch.bfloat16),
]


@pytest.mark.parametrize(("shape", "dtype"), DECODE_SHAPES)
def test_decode_agrees_with_its_reference(shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device) -> None:
    """Sequences at position 0, in their first tokens and further on, and padding between them."""
    torch.manual_seed(shape.key_dim)
    params = make_params(shape, dtype, device)
    expected = used_slots(9, shape, dtype, device)
    positions = torch.tensor([5, 0, -1, 1, 2, 1000, -1], device=device)
    slots = torch.tensor([3, 8, 0, 1, 7, 4, 0], device=device)
    result = expected.clone()
    result.states[0] = result.conv_states[0] = float("nan")  # the kernel does without the null slot
    projected = torch.randn(7, shape.width).to(device, dtype)
    outs = torch.full((2, 7, shape.heads * shape.value_dim), POISON, dtype=dtype, device=device)
    in_reference(gated_delta_decode)(projected, expected.of(params), positions, slots, shape, outs[0])
    in_triton(gated_delta_decode)(projected, result.of(params), positions, slots, shape, outs[1])
    assert distance(outs[1], outs[0]) <= TOLERANCE[dtype]
    assert outs[1][positions < 0].eq(0).all()
    assert distance(result.states[1:], expected.states[1:]) <= TOLERANCE[dtype]
    assert torch.equal(result.conv_states[1:], expected.conv_states[1:])
    assert torch.equal(result.states[[2, 5, 6]], expected.states[[2, 5, 6]])


def test_decode_takes_strided_slots(device: torch.device) -> None:
    """All layers of a slot may be neighbors, so that a snapshot is one copy."""
    torch.manual_seed(3)
    params = make_params(SMALL, torch.float32, device)
    layers = [used_slots(4, SMALL, torch.float32, device) for _ in range(3)]
    apart = Slots(*(torch.stack(parts, 1) for parts in zip(*layers, strict=True)))
    projected = torch.randn(2, SMALL.width, device=device)
    positions, slots = torch.tensor([4, 9], device=device), torch.tensor([3, 1], device=device)
    outs = torch.empty(2, 2, SMALL.heads * SMALL.value_dim, device=device)
    middle = Slots(apart.conv_states[:, 1], apart.states[:, 1])
    for of_layer, out in ((layers[1], outs[0]), (middle, outs[1])):
        in_triton(gated_delta_decode)(projected, of_layer.of(params), positions, slots, SMALL, out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(apart.states, torch.stack([layer.states for layer in layers], 1))
    assert torch.equal(apart.conv_states, torch.stack([layer.conv_states for layer in layers], 1))


PREFILL_SHAPES = [
    # shape, dtype, tokens and first positions of the sequences, decay, tokens of a window that the slots are for
    (SMALL, torch.float32, [(1, 4), (2, 0), (63, 1), (64, 0), (65, 7), (130, 2)], 1.0, 1),
    (SMALL, torch.float32, [(70, 0), (129, 64)], 16.0, 4),
    (
        GatedDeltaShape(key_heads=1, heads=3, key_dim=32, value_dim=64, kernel=4),
        torch.bfloat16,
        [(100, 3), (66, 0)],
        1.0,
        2,
    ),
    (
        GatedDeltaShape(key_heads=2, heads=2, key_dim=16, value_dim=32, kernel=3),
        torch.float16,
        [(3, 2), (80, 0)],
        16.0,
        8,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "given", "decay", "window", "values"),
    [(*case, None) for case in PREFILL_SHAPES] + [(*case, 16) for case in PREFILL_SHAPES[1:3]],
)
def test_prefill_agrees_with_its_reference(
    shape: GatedDeltaShape,
    dtype: torch.dtype,
    given: list[tuple[int, int]],
    decay: float,
    window: int,
    values: int | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences in one batch, from their first token and from what their slots hold. The rest is poisoned."""
    torch.manual_seed(len(given))
    if values:
        monkeypatch.setattr(state_scan, "scan_launch", lambda *_: ScanLaunch(values, num_stages=2))
    params = make_params(shape, dtype, device, decay)
    sizes, starts = zip(*given, strict=True)
    expected = used_slots(len(given) + 2, shape, dtype, device, window)
    owned = (torch.randperm(len(given)) + 2).tolist()
    for slot, start in zip(owned, starts, strict=True):
        if start == 0:
            expected.states[slot] = expected.conv_states[slot] = float("nan")
    result = expected.clone()
    metadata = make_metadata(sizes, starts, owned, device)
    projected = torch.randn(sum(sizes), shape.width).to(device, dtype)
    outs = torch.full((2, sum(sizes), shape.heads * shape.value_dim), POISON, dtype=dtype, device=device)
    in_reference(gated_delta_prefill)(projected, expected.of(params), metadata, shape, outs[0])
    in_triton(gated_delta_prefill)(projected, result.of(params), metadata, shape, outs[1])
    for sequence, size in enumerate(sizes):
        first = sum(sizes[:sequence])
        ours, theirs = (out[first : first + size] for out in (outs[1], outs[0]))
        if sequence < metadata.num_decodes:
            assert ours.isnan().all()
            continue
        slot = owned[sequence]
        assert distance(ours, theirs) <= TOLERANCE[dtype], f"outputs of {size} tokens"
        assert distance(result.states[slot], expected.states[slot]) <= TOLERANCE[dtype], f"state after {size} tokens"
        torch.testing.assert_close(result.conv_states[slot], expected.conv_states[slot], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.states[:2], expected.states[:2])


@pytest.mark.slow
def test_padding_of_a_step_changes_nothing(device: torch.device) -> None:
    """Sequences without tokens, chunks of them, and unused tokens after the last one."""
    torch.manual_seed(5)
    params = make_params(SMALL, torch.float32, device)
    given = make_metadata([1, 2, 64, 65], [3, 0, 5, 0], [2, 5, 3, 4], device)
    tokens, padding = 132, 60
    projected = torch.randn(tokens + padding, SMALL.width, device=device)
    projected[tokens:] = POISON
    padded = given._replace(
        context_lens=torch.nn.functional.pad(given.context_lens, (0, 3)),
        state_slots=torch.nn.functional.pad(given.state_slots, (0, 3)),
        query_start_loc=torch.nn.functional.pad(given.query_start_loc, (0, 3), value=tokens),
        chunk_indices=torch.cat(
            [given.chunk_indices, torch.tensor([[6, 0], [6, 0]], dtype=torch.int32, device=device)]
        ),
    )
    slots = used_slots(6, SMALL, torch.float32, device)
    results = []
    for count, metadata in ((tokens, given), (tokens + padding, padded)):
        kept, out = slots.clone(), torch.zeros(count, SMALL.heads * SMALL.value_dim, device=device)
        in_triton(gated_delta_prefill)(projected[:count], kept.of(params), metadata, SMALL, out)
        results.append((out, kept))
    (out, kept), (out_padded, kept_padded) = results
    assert torch.equal(out_padded[:tokens], out)
    assert not out_padded[tokens:].any()
    assert torch.equal(kept_padded.states, kept.states)
    assert torch.equal(kept_padded.conv_states, kept.conv_states)


PUBLISHED = GatedDeltaShape(key_heads=16, heads=32, key_dim=128, value_dim=128, kernel=4)  # Qwen3.5-35B-A3B


@pytest.mark.slow
def test_every_chunking_of_a_sequence_leaves_the_same_state(device: torch.device) -> None:
    torch.manual_seed(4)
    shape, dtype = (PUBLISHED, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    params = make_params(shape, dtype, device)
    projected = torch.randn(131, shape.width).to(device, dtype)

    def steps(sizes: list[int]) -> tuple[torch.Tensor, Slots]:
        slots, done, outs = Slots.make(2, shape, dtype, device), 0, []
        for part in projected.split(sizes):
            metadata = make_metadata([len(part)], [done], [1], device)
            outs.append(in_triton(gated_delta_net)(part, slots.of(params), metadata))
            done += len(part)
        return torch.cat(outs), slots

    expected, whole = steps([131])
    for cuts in ([64, 67], [1, 1, 65, 64], [130, 1]):
        result, slots = steps(cuts)
        assert distance(result, expected) <= TOLERANCE[dtype], cuts
        assert distance(slots.states[1], whole.states[1]) <= TOLERANCE[dtype], cuts
        assert torch.equal(slots.conv_states[1], whole.conv_states[1]), cuts


@pytest.mark.gpu
def test_implementations_agree_at_published_sizes() -> None:
    """A step of new tokens and of prompts, some of them from the middle on."""
    torch.manual_seed(5)
    device = torch.device("cuda")
    params = make_params(PUBLISHED, torch.bfloat16, device)
    sizes, starts = [1, 1, 1, 30, 64, 300], [9, 0, 700, 0, 64, 5]
    metadata = make_metadata(sizes, starts, [6, 2, 1, 5, 3, 4], device)
    projected = torch.randn(sum(sizes), PUBLISHED.width).to(device, torch.bfloat16)
    ours = used_slots(7, PUBLISHED, torch.bfloat16, device)
    theirs = ours.clone()
    result = gated_delta_net(projected, ours.of(params), metadata)
    expected = in_reference(gated_delta_net)(projected, theirs.of(params), metadata)
    assert distance(result, expected) <= TOLERANCE[torch.bfloat16]
    assert distance(ours.states, theirs.states) <= TOLERANCE[torch.bfloat16]
    assert torch.equal(ours.conv_states, theirs.conv_states)
