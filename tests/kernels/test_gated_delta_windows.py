"""Windows of draft tokens against decoding token by token, with every number of accepted drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cuda_emulation import COMPILER, emulate_launches
from gated_delta_tools import SMALL, Slots, distance, make_metadata, make_params
from kernel_tools import in_reference, in_triton

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta import window
from meltcore.kernels.gated_delta.common import GatedDeltaParams, GatedDeltaShape
from meltcore.kernels.gated_delta.layer import gated_delta_net
from meltcore.kernels.gated_delta.window import count_replays, gated_delta_windows
from meltcore.kernels.nvrtc import compile_source

TINY = GatedDeltaShape(key_heads=1, heads=2, key_dim=16, value_dim=16, kernel=4)
WINDOW = 4  # 3 drafts
EXACT, WRONG = 1e-5, 1e-3  # relative distance of two float32 computations in another order, and of what is noticed
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")
Net = Callable[..., torch.Tensor]


class Window(NamedTuple):
    """A window in the life of a sequence: its tokens, the drafts of it that are accepted, and the tokens to replay."""

    size: int
    accepted: int
    position: int
    replay_len: int


def windows_of(plan: Sequence[tuple[int, int]], position: int) -> list[Window]:
    """The windows of a sequence that begins to decode at `position`. plan: (size, accepted drafts) of each."""
    windows, replay_len = [], 0
    for size, accepted in plan:
        windows.append(Window(size, accepted, position, replay_len))
        position, replay_len = position + 1 + accepted, accepted
    return windows


def every_outcome(seed: int) -> list[tuple[int, int]]:
    """Every size of a window with every number of accepted drafts, in any order, and the longest twice in a row."""
    outcomes = [(size, accepted) for size in range(1, WINDOW + 1) for accepted in range(size)]
    random.Random(seed).shuffle(outcomes)
    return [*outcomes, (WINDOW, WINDOW - 1), (WINDOW, WINDOW - 1), (1, 0)]


def unchanged(window: Window) -> int:
    return window.replay_len


def decoded(params: GatedDeltaParams, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs of a sequence token by token, and the state after each token."""
    device = tokens.device
    slots, outs, states = Slots.make(1, TINY if params.key_heads == 1 else SMALL, tokens.dtype, device), [], []
    for position, token in enumerate(tokens):
        metadata = make_metadata([1], [position], [0], device)
        outs.append(in_reference(gated_delta_net)(token[None], slots.of(params), metadata))
        states.append(slots.states[0].clone())
    return torch.cat(outs), states


def largest_error(
    net: Net,
    shape: GatedDeltaShape,
    seeds: Sequence[int],
    replay: Callable[[Window], int] = unchanged,
    before_step: Callable[[Slots], None] = lambda _: None,
    entries: int = TINY.kernel + 2 * (WINDOW - 1),
    device: torch.device = CPU,
) -> float:
    """Run sequences through their windows beside padding, and return the largest error of outputs and stored states.

    The first sequence begins to decode at position 0, and each further one after a longer prompt. Rejected drafts have
    random inputs.
    """
    torch.manual_seed(len(seeds))
    params = make_params(shape, torch.float32, device)
    slots = Slots.make(len(seeds) + 1, shape, torch.float32, device, WINDOW)
    slots = slots._replace(conv_states=slots.conv_states[:, :entries].contiguous())
    lives = [windows_of(every_outcome(seed), 3 * index) for index, seed in enumerate(seeds)]
    known = [torch.randn(life[-1].position + 1, shape.width, device=device) for life in lives]
    expected = [decoded(params, tokens) for tokens in known]
    for index, life in enumerate(lives):
        if start := life[0].position:
            metadata = make_metadata([start], [0], [index + 1], device)
            in_reference(gated_delta_net)(known[index][:start], slots.of(params), metadata)
    errors = []
    for step in zip(*lives, strict=True):
        order = sorted(range(len(step)), key=lambda index: step[index].size > 1)
        parts = []
        for index in order:
            window = step[index]
            inputs = torch.randn(window.size, shape.width, device=device)
            inputs[: 1 + window.accepted] = known[index][window.position :][: 1 + window.accepted]
            parts.append(inputs)
        padding = torch.full((2, shape.width), float("nan"), device=device)
        metadata = make_metadata(
            [*(step[index].size for index in order), 2],
            [*(step[index].position for index in order), -1],
            [*(index + 1 for index in order), 0],
            device,
            [*(replay(step[index]) for index in order), -1],
        )
        before_step(slots)
        out = net(torch.cat([*parts, padding]), slots.of(params), metadata)
        assert out[-2:].eq(0).all()
        for index, result in zip(order, out[:-2].split([len(part) for part in parts]), strict=True):
            window, (outs, states) = step[index], expected[index]
            kept = slice(window.position, window.position + 1 + window.accepted)
            errors += map(distance, result[: 1 + window.accepted], outs[kept])
            errors.append(distance(slots.states[index + 1], states[window.position]))
    return float("inf") if any(error != error for error in errors) else max(errors)


@pytest.mark.parametrize("shape", [TINY, SMALL], ids=["2 heads", "4 heads"])
def test_windows_equal_decoding_token_by_token(shape: GatedDeltaShape) -> None:
    assert largest_error(in_reference(gated_delta_net), shape, [1, 2, 3, 4]) < EXACT


@pytest.mark.slow
def test_kernel_equals_decoding_token_by_token(device: torch.device) -> None:
    assert largest_error(in_triton(gated_delta_net), TINY, [1], device=device) < EXACT


@pytest.mark.slow
def test_ring_with_an_entry_less_is_noticed(device: torch.device) -> None:
    """The interpreter runs one head after another. The second one reads what the first one has overwritten."""
    if device.type == "cuda":
        pytest.skip("heads run at the same time on a GPU, so the second one may still read what it should")
    entries = TINY.kernel + 2 * (WINDOW - 1)
    assert largest_error(in_triton(gated_delta_net), TINY, [1], entries=entries - 1) > WRONG


def one_more(window: Window) -> int:
    return min(window.replay_len + 1, window.position, 2 * WINDOW - 1 - window.size)


def make_finite(slots: Slots) -> None:
    """Whatever is read by mistake is a number, so that NaN does not show every mistake."""
    slots.conv_states.nan_to_num_()


def shift_ring(slots: Slots) -> None:
    make_finite(slots)
    slots.conv_states.copy_(slots.conv_states.roll(1, dims=1))


def without_rollback(projected: torch.Tensor, params: GatedDeltaParams, metadata: AttentionMetadata) -> torch.Tensor:
    """As of prompts, states hold all drafts of a window."""
    out = in_reference(gated_delta_net)(projected, params, metadata._replace(num_windows=0, num_decodes=0))
    out[-2:] = 0  # padding
    return out


@pytest.mark.parametrize(
    ("net", "replay", "before_step"),
    [
        (without_rollback, unchanged, make_finite),
        (None, lambda window: 0, make_finite),
        (None, lambda window: max(0, window.replay_len - 1), make_finite),
        (None, one_more, make_finite),
        (None, unchanged, shift_ring),
    ],
    ids=["no rollback", "no replay", "one too few", "one too many", "convolution one off"],
)
def test_wrong_rollbacks_are_noticed(
    net: Net | None, replay: Callable[[Window], int], before_step: Callable[[Slots], None]
) -> None:
    assert largest_error(net or in_reference(gated_delta_net), TINY, [1, 2], replay, before_step) > WRONG


SHAPES = [
    (GatedDeltaShape(key_heads=1, heads=3, key_dim=16, value_dim=32, kernel=4), torch.bfloat16),
    (GatedDeltaShape(key_heads=2, heads=2, key_dim=64, value_dim=32, kernel=3), torch.float16),
    # An eighth of Qwen3.5-35B-A3B.
    (GatedDeltaShape(key_heads=2, heads=4, key_dim=128, value_dim=128, kernel=4), torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_kernel_agrees_with_its_reference(shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device) -> None:
    """Windows at position 0, in their first tokens and further on, padding between them, and a prompt after them."""
    torch.manual_seed(shape.key_dim)
    params = make_params(shape, dtype, device)
    poisoned = Slots.make(6, shape, dtype, device, WINDOW)
    expected = Slots(*(torch.randn(part.shape).to(part) for part in poisoned))
    expected.states[3] = expected.conv_states[3] = float("nan")  # of the window at position 0
    result = expected.clone()
    sizes, replay_lens = [1, 4, 2, 4, 3], [1, 7, 5, 3, 0]
    metadata = make_metadata([*sizes, 3], [2, 0, -1, 1000, 1, 9], [5, 3, 0, 4, 1, 2], device, replay_lens)
    projected = torch.randn(sum(sizes) + 3, shape.width).to(device, dtype)
    outs = torch.full((2, len(projected), shape.heads * shape.value_dim), float("nan"), dtype=dtype, device=device)
    in_reference(gated_delta_windows)(projected, expected.of(params), metadata, shape, outs[0])
    in_triton(gated_delta_windows)(projected, result.of(params), metadata, shape, outs[1])
    assert outs[:, -3:].isnan().all()
    assert distance(outs[1, :-3], outs[0, :-3]) <= TOLERANCE[dtype]
    assert outs[1, 5:7].eq(0).all()
    assert distance(result.states, expected.states) <= TOLERANCE[dtype]
    torch.testing.assert_close(result.conv_states, expected.conv_states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("sequences", "num_windows"), [(1, 1), (5, 3), (6, 0), (300, 270), (300, 300)])
def test_counts_of_replays_equal_their_reference(sequences: int, num_windows: int, device: torch.device) -> None:
    """Also of padding, whose slot 0 several windows share."""
    torch.manual_seed(sequences)
    folded = torch.randint(1, 1000, (sequences + 3,)).to(device)
    slots = torch.randperm(sequences + 2)[:sequences].to(device) + 1
    context_lens = folded[slots] + torch.randint(0, 4, (sequences,)).to(device)
    first_tokens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(1, 9, (sequences,)).cumsum(0)])
    if sequences > 4:
        slots[2:4], context_lens[2:4] = 0, -1
    results = []
    for counted in (in_reference(count_replays), in_triton(count_replays)):
        table = folded.clone()
        replay_lens = counted(table, slots, context_lens, first_tokens.to(device), num_windows)
        assert len(replay_lens) == num_windows
        results.append((replay_lens[slots[:num_windows] > 0], table[1:]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], folded[1:])


@pytest.mark.parametrize("implementation", [in_reference, in_triton])
def test_padding_may_be_empty_or_longer_than_the_ring(
    implementation: Callable[[Net], Net], device: torch.device
) -> None:
    """Its output is zeros, also of NaN, and no slot but those of windows changes."""
    torch.manual_seed(4)
    params = make_params(TINY, torch.float32, device)
    slots = Slots(*(torch.randn(part.shape).to(part) for part in Slots.make(3, TINY, torch.float32, device, WINDOW)))
    slots.states[0] = slots.conv_states[0] = float("nan")
    sizes, positions = [0, 0, 2, 3, 40], [-1, -1, 50, 7, -1]
    projected = torch.randn(45, TINY.width, device=device)
    projected[5:] = float("nan")
    metadata = make_metadata(sizes, positions, [0, 0, 1, 2, 0], device, [-51, -9, 1, 0, 3])
    expected, alone = slots.clone(), make_metadata([2, 3], [50, 7], [1, 2], device, [1, 0])
    expected_out = in_reference(gated_delta_net)(projected[:5], expected.of(params), alone)
    out = implementation(gated_delta_net)(projected, slots.of(params), metadata)
    assert out[5:].eq(0).all()
    assert distance(out[:5], expected_out) < EXACT
    for found, part in zip(slots, expected, strict=True):
        assert distance(found[1:], part[1:]) < EXACT
        assert found[0].isnan().all()


def test_windows_and_prompts_of_a_step_use_their_own_slots() -> None:
    """A slot that windows have used gets a prompt of another sequence, beside windows, and then windows of it."""
    torch.manual_seed(3)
    net, params = in_reference(gated_delta_net), make_params(TINY, torch.float32, CPU)
    first, second = torch.randn(21, TINY.width).split([12, 9])
    (first_outs, _), (second_outs, _) = decoded(params, first), decoded(params, second)
    of = Slots.make(3, TINY, torch.float32, CPU, WINDOW).of(params)
    net(torch.randn(9, TINY.width), of, make_metadata([2, 7], [0, 0], [2, 1], CPU))
    net(torch.randn(4, TINY.width), of, make_metadata([4], [7], [1], CPU, [0]))
    out = net(torch.cat([first[:1], second[:5]]), of, make_metadata([1, 5], [0, 0], [2, 1], CPU, [9]))
    assert distance(out, torch.cat([first_outs[:1], second_outs[:5]])) < EXACT
    out = net(torch.cat([second[5:7], first[1:4]]), of, make_metadata([2, 3], [5, 1], [1, 2], CPU, [0, 0]))
    assert distance(out, torch.cat([second_outs[5:7], first_outs[1:4]])) < EXACT
    out = net(torch.cat([second[6:9], first[4:8]]), of, make_metadata([3, 4], [6, 4], [1, 2], CPU, [0, 2]))
    assert distance(out, torch.cat([second_outs[6:9], first_outs[4:8]])) < EXACT


def test_windows_that_do_not_fit_are_refused() -> None:
    params = make_params(TINY, torch.float32, CPU)
    of = Slots.make(2, TINY, torch.float32, CPU, WINDOW).of(params)
    net = in_reference(gated_delta_net)
    with pytest.raises(ValueError, match=r"windows of \[5\] tokens after \[3\] tokens .* ring of 10 entries"):
        net(torch.randn(5, TINY.width), of, make_metadata([5], [9], [1], CPU, [3]))
    with pytest.raises(ValueError, match=r"after \[-1\] tokens"):
        net(torch.randn(1, TINY.width), of, make_metadata([1], [9], [1], CPU, [-1]))
    with pytest.raises(ValueError, match="1 decodes and 0 windows"):
        net(torch.randn(1, TINY.width), of, make_metadata([1], [9], [1], CPU))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_cuda_kernel_computes_the_reference_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows follow each other: each launch replays what the one before has put into the ring."""
    launches = emulate_launches(window.KERNEL, Path(window.__file__).with_suffix(".cu"), tmp_path, monkeypatch)
    monkeypatch.setattr(window, "_supports_cuda", lambda *_: True)
    torch.manual_seed(5)
    shape = GatedDeltaShape(key_heads=1, heads=2, key_dim=128, value_dim=128, kernel=4)
    params = make_params(shape, torch.bfloat16, CPU)
    expected = Slots.make(6, shape, torch.bfloat16, CPU, WINDOW)
    expected = Slots(*(torch.randn(part.shape).to(part) for part in expected))
    expected.states[3] = expected.conv_states[3] = float("nan")  # of the window at position 0
    result = expected.clone()
    steps = [
        ([1, 4, 9, 4, 3], [2, 0, -1, 1000, 1], [1, 7, 5, 3, 0]),
        ([1, 4, 2, 4, 3], [3, 4, -1, 1001, 3], [0, 3, 0, 0, 1]),
    ]
    for sizes, positions, replay_lens in steps:
        metadata = make_metadata(sizes, positions, [5, 3, 0, 4, 1], CPU, replay_lens)
        projected = torch.randn(sum(sizes), shape.width).bfloat16()
        outs = torch.full((2, len(projected), shape.heads * shape.value_dim), float("nan"), dtype=torch.bfloat16)
        in_reference(gated_delta_windows)(projected, expected.of(params), metadata, shape, outs[0])
        in_triton(gated_delta_windows)(projected, result.of(params), metadata, shape, outs[1])
        assert distance(outs[1], outs[0]) < TOLERANCE[torch.bfloat16]
        assert distance(result.states[1:], expected.states[1:]) < 1e-4
        assert torch.equal(result.conv_states[1:].view(torch.int16), expected.conv_states[1:].view(torch.int16))
    assert len(launches) == len(steps)


def test_cuda_kernel_compiles() -> None:
    macros = {"KEY_HEADS": 16, "HEADS": 32, "DRAFTS": 3, "TAPS": 4}
    assert compile_source(window.KERNEL.source(), window.KERNEL.name, macros, 90)
