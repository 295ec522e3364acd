"""The layer for multi-token prediction of Qwen3.5 against plain torch: full causal attention, no cache, no chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from few_layers import open_few_layers
from mtp_tools import (
    EPS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    SIZES,
    THETA,
    TOP_K,
    VOCAB,
    build,
    metadata_of,
    open_small,
)
from safetensors.torch import save_file
from torch.nn.functional import silu
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.decoders.qwen3_5 import MultiTokenPrediction, Qwen3_5
from meltcore.models.loader import build_model, load_weights, parameter_bytes

TOKENS = 72
TOLERANCE = 1e-4  # of float32 against float64
Tensors = dict[str, torch.Tensor]


class Made(NamedTuple):
    """A checkpoint, its tensors, and a text: [TOKENS] ids of next tokens and [TOKENS, HIDDEN] states of the target."""

    folder: Path
    tensors: Tensors
    next_ids: torch.Tensor
    hidden: torch.Tensor

    def load(self, group: TensorParallelGroup | None = None) -> Qwen3_5:
        model = build(self.folder, group)
        load_weights(model, open_small(self.folder, "all"), lambda stage, fraction: None)
        model.prepare(256)
        return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(3)

    def draw(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)

    tensors = {name: draw(target.shape) for name, target in build(folder).checkpoint_tensors().items()}
    for name in ("q_norm", "k_norm"):
        tensors[f"mtp.layers.0.self_attn.{name}.weight"] += 1.0  # attention that peaks, so that each key counts
    save_file(tensors, folder / "model.safetensors")
    next_ids = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return Made(folder, tensors, next_ids, torch.randn(TOKENS, HIDDEN, generator=generator))


@pytest.fixture(scope="module")
def model(made: Made) -> Qwen3_5:
    return made.load()


def expected_hidden(tensors: Tensors, next_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The layer by its published formula, for a text from position 0 on: [tokens, HIDDEN] float64."""
    own = {name.removeprefix("mtp.").removeprefix("layers.0."): each.double() for name, each in tensors.items()}
    own |= {name: own[f"{name}.weight"] for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}

    def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + weight)

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(heads))[:, None] * THETA ** -(torch.arange(0, ROTARY_DIM, 2).double() / ROTARY_DIM)
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., : ROTARY_DIM // 2], heads[..., ROTARY_DIM // 2 : ROTARY_DIM]
        turned = first * cosines - second * sines, second * cosines + first * sines
        return torch.cat([*turned, heads[..., ROTARY_DIM:]], -1)

    def expert(values: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (own[f"mlp.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(values @ gate.T) * (values @ up.T)) @ down.T

    embedded = norm(own["model.embed_tokens.weight"][next_ids], own["pre_fc_norm_embedding"])
    stream = torch.cat([embedded, norm(hidden.double(), own["pre_fc_norm_hidden"])], -1) @ own["fc"].T

    inputs = norm(stream, own["input_layernorm.weight"])
    queries, keys, values = (inputs @ own[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    queries, gates = queries.view(-1, HEADS, 2, HEAD_DIM).unbind(2)
    queries = rotate(norm(queries, own["self_attn.q_norm.weight"]))
    keys = rotate(norm(keys.view(-1, KV_HEADS, HEAD_DIM), own["self_attn.k_norm.weight"]))
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values.view_as(keys)))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values) * gates.sigmoid()
    stream = stream + attended.flatten(1) @ own["self_attn.o_proj.weight"].T

    inputs = norm(stream, own["post_attention_layernorm.weight"])
    weights, chosen = (inputs @ own["mlp.gate.weight"].T).softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    outputs = torch.stack([expert(inputs, f"experts.{index}") for index in range(EXPERTS)], 1)
    routed = (outputs.gather(1, chosen[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)
    shared = (inputs @ own["mlp.shared_expert_gate.weight"].T).sigmoid() * expert(inputs, "shared_expert")
    return norm(stream + routed + shared, own["norm.weight"])


@pytest.fixture(scope="module")
def expected(made: Made) -> torch.Tensor:
    return expected_hidden(made.tensors, made.next_ids, made.hidden)


class Sequence:
    """A sequence's cache of the layer, in two pages that are no neighbors. What was never written is random."""

    def __init__(self, model: Qwen3_5) -> None:
        self._model = model
        spec = model.kv_cache_specs()[-1]
        shape = 5, PAGE, spec.kv_heads, spec.head_dim  # type: ignore[union-attr]
        self._cache = torch.randn(shape), torch.randn(shape)
        self._pages = torch.tensor([[0, 0], [4, 2]])

    @torch.inference_mode()
    def run(self, start: int, next_ids: torch.Tensor, hidden: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """Run the layer on tokens from position `start` on. shift: of the positions, which a mutation gets wrong."""
        positions = torch.arange(start, start + len(next_ids))
        metadata = metadata_of(start, len(next_ids), self._pages)
        return self._model.draft_hidden(next_ids, hidden, positions + shift, self._cache, metadata)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest error, of the largest value."""
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs).abs().max() / theirs.abs().max())


def run_chunks(sequence: Sequence, made: Made, sizes: list[int], shift: int = 0) -> torch.Tensor:
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        outputs.append(sequence.run(start, made.next_ids[part], made.hidden[part], shift))
        start += size
    return torch.cat(outputs)


@pytest.mark.parametrize("sizes", [[TOKENS], [1, 30, 33, 8], [64, 1, 1, 6]], ids=str)
def test_prompt_equals_plain_torch_in_any_chunks(
    made: Made, model: Qwen3_5, expected: torch.Tensor, sizes: list[int]
) -> None:
    ours = run_chunks(Sequence(model), made, sizes)
    assert error(ours, expected) <= TOLERANCE


def test_rejected_drafts_leave_nothing(made: Made, model: Qwen3_5, expected: torch.Tensor) -> None:
    """Windows of up to 4 tokens of which some are accepted: the next window overwrites the others, across two pages."""
    sequence, start = Sequence(model), 58
    run_chunks(sequence, made, [start])
    generator = torch.Generator().manual_seed(7)
    for size, accepted in ((4, 1), (4, 3), (4, 1), (1, 1), (4, 4), (2, 1)):
        next_ids = made.next_ids[start : start + size].clone()
        hidden = made.hidden[start : start + size].clone()
        next_ids[accepted:] = torch.randint(VOCAB, (size - accepted,), generator=generator)
        hidden[accepted:] = torch.randn(size - accepted, HIDDEN, generator=generator)
        ours = sequence.run(start, next_ids, hidden)[:accepted]
        assert error(ours, expected[start : start + accepted]) <= TOLERANCE, start
        start += accepted
    assert start > PAGE


def test_three_drafts_come_from_the_layer_own_states(made: Made, model: Qwen3_5, expected: torch.Tensor) -> None:
    sequence, length = Sequence(model), PAGE - 1
    text = made.next_ids[:length], made.hidden[:length]
    ours = sequence.run(0, *text)[-1:]
    next_ids, hidden = text
    head = made.tensors["lm_head.weight"].double()
    drafts = []
    for position in range(length, length + 3):
        theirs = expected_hidden(made.tensors, next_ids, hidden)[-1:]
        logits = theirs @ head.T
        assert error(ours, theirs) <= TOLERANCE
        assert error(model.logits(ours), logits) <= TOLERANCE
        drafts.append(int(logits.argmax()))
        token = torch.tensor(drafts[-1:])
        next_ids, hidden = torch.cat([next_ids, token]), torch.cat([hidden, theirs])
        ours = sequence.run(position, token, ours)
    assert len(set(drafts)) > 1
    # The target then has its own states at these positions, and its own tokens.
    rest = slice(length, TOKENS)
    ours = sequence.run(length, made.next_ids[rest], made.hidden[rest])
    assert error(ours, expected[rest]) <= TOLERANCE


class ThreadGroup(TensorParallelGroup):
    """A rank that is a thread. All ranks share `partial_sums` and `barrier`."""

    def __init__(self, rank: int, partial_sums: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(partial_sums))
        self._partial_sums, self._barrier = partial_sums, barrier

    def all_reduce(self, partial_sum: torch.Tensor) -> torch.Tensor:
        self._partial_sums[self.rank] = partial_sum
        self._barrier.wait()
        total = torch.stack(self._partial_sums).sum(0)
        self._barrier.wait()
        return partial_sum.copy_(total)

    def all_reduce_add_rms_norm(
        self, residual: torch.Tensor | None, partial_sum: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, _ = super().all_reduce_add_rms_norm(residual, partial_sum, None)
        return total, total if norm is None else rms_norm(total, *norm)


def test_two_ranks_compute_one_layer(made: Made, expected: torch.Tensor) -> None:
    partial_sums, barrier = [torch.empty(0)] * 2, threading.Barrier(2, timeout=WAIT_S)
    shares = [made.load(ThreadGroup(rank, partial_sums, barrier)) for rank in range(2)]

    def run(share: Qwen3_5) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = run_chunks(Sequence(share), made, [65, 1, 6])
        return hidden, share.logits(hidden)

    with ThreadPoolExecutor(2) as pool:
        hidden, logits = zip(*pool.map(run, shares), strict=True)
    assert all(error(each, expected) <= TOLERANCE for each in hidden)
    assert error(torch.cat(logits, 1), expected @ made.tensors["lm_head.weight"].double().T) <= TOLERANCE
    whole, *parts = (sum(each.numel() for each in mtp_of(each).block.parameters()) for each in (made.load(), *shares))
    assert sum(parts) < 1.12 * whole


def mtp_of(model: Qwen3_5) -> MultiTokenPrediction:
    assert model.mtp is not None
    return model.mtp


def _swap_halves(mtp: MultiTokenPrediction) -> None:
    [weight] = mtp.fc.parameters()
    weight.copy_(weight.roll(HIDDEN, 1))


def _without_one(*path: str) -> Callable[[MultiTokenPrediction], None]:
    def change(mtp: MultiTokenPrediction) -> None:
        mtp.get_submodule(".".join(path)).weight.sub_(1.0)  # type: ignore[operator, union-attr]

    return change


NORMS = [
    ("embedding_norm",),
    ("hidden_norm",),
    ("norm",),
    ("block", "attention", "norm"),
    ("block", "attention", "q_norm"),
    ("block", "attention", "k_norm"),
    ("block", "mlp", "norm"),
]


@pytest.fixture
def mutable(model: Qwen3_5) -> Iterator[Qwen3_5]:
    """The model, whose weights are as before after the test."""
    before = [each.clone() for each in mtp_of(model).parameters()]
    yield model
    for parameter, values in zip(mtp_of(model).parameters(), before, strict=True):
        parameter.copy_(values)


@pytest.mark.parametrize("change", [_swap_halves, *(_without_one(*path) for path in NORMS)])
def test_changed_network_is_found(
    made: Made, mutable: Qwen3_5, expected: torch.Tensor, change: Callable[[MultiTokenPrediction], None]
) -> None:
    change(mtp_of(mutable))
    ours = run_chunks(Sequence(mutable), made, [TOKENS])
    assert error(ours, expected) > 100 * TOLERANCE


def test_wrong_tokens_and_positions_are_found(made: Made, model: Qwen3_5, expected: torch.Tensor) -> None:
    same_token = made._replace(next_ids=made.next_ids.roll(1))
    assert error(run_chunks(Sequence(model), same_token, [TOKENS]), expected) > 100 * TOLERANCE
    # Rotary embeddings know distances alone: positions are wrong where one of two runs has wrong ones.
    sequence = Sequence(model)
    run_chunks(sequence, made, [40])
    rest = slice(40, TOKENS)
    ours = sequence.run(40, made.next_ids[rest], made.hidden[rest], shift=1)
    assert error(ours, expected[rest]) > 100 * TOLERANCE


@pytest.mark.parametrize("group", [None, TensorParallelGroup(1, 2)])
def test_published_fp8_layer_is_quantized_but_for_the_projection(group: TensorParallelGroup | None) -> None:
    """Each matrix of attention, of the experts and of the shared expert has scales."""
    checkpoint, meta = open_few_layers("Qwen/Qwen3.5-35B-A3B-FP8"), torch.device("meta")
    checkpoint.config["text_config"]["num_experts"] = 8
    models = [build_model(checkpoint, torch.bfloat16, meta, group=group, has_mtp=has_mtp) for has_mtp in (False, True)]
    names = [name for name in models[1].checkpoint_tensors() if name.startswith("mtp.")]
    scaled = [name for name in names if name.endswith(".weight_scale_inv")]
    assert (len(names), len(scaled)) == (17 + 3 * 8 + len(scaled), 4 + 3 * 8 + 3)
    mtp = mtp_of(models[1])
    assert {weight.dtype for weight in mtp.fc.parameters()} == {torch.bfloat16}
    shapes = {"qkv": (2 * 4096 + 2 * 512, 2048), "o": (2048, 4096), "experts": (9 * 3 * 512, 2048)}
    rest = 2 * 9 * 2048 + 4 * (2 * 2048 + 2 * 256)  # the router in 16 bits, and norms in float32
    values = sum(rows * columns for rows, columns in shapes.values()) // (group.size if group else 1)
    assert sum(each.nbytes for each in mtp.block.parameters()) == pytest.approx(values + rest, rel=2e-3)  # scales
    own = sum(each.nbytes for each in mtp.parameters())
    assert parameter_bytes(models[1]) - parameter_bytes(models[0]) == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers must be 1 for multi-token prediction .*; got 0"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 1 for multi-token prediction .*; got 2"),
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers must be 1 for multi-token prediction .*; got null"),
        ({"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers must be a whole number from 0"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings to true"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "layer_types": None, "rope_parameters": None, "rope_theta": 1e4},
            "Qwen3MoeForCausalLM has no layer for multi-token prediction",
        ),
    ],
)
def test_model_without_such_a_layer_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
    without_mtp = build_model(open_small(tmp_path, **changes), torch.float32, torch.device("meta"))
    assert len(without_mtp.kv_cache_specs()) == SIZES["num_hidden_layers"]
