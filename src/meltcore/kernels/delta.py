"""What Gated DeltaNet of new tokens (decode) and of chunks of prompts (prefill) share (Yang et al. 2024,
arXiv:2412.06464; here as Qwen3-Next and Qwen3.5 have it).

Per value head a state S [key_dim, value_dim] maps keys to values. A token first decays it by exp(g), then moves what S
holds for its key towards its value, and reads S with its query:

    S <- exp(g) S;    S <- S + k (beta (v - k S))^T;    out = q S

Queries, keys and values have passed a causal convolution over their last few inputs, channel by channel, and SiLU.

A sequence owns a slot of two tensors: states [slots, heads, key_dim, value_dim] float32, and conv_states
[slots, kernel, conv_channels], a ring of the convolution's last inputs: that of position p sits in entry p % kernel.
Slots may be any distance apart. A sequence at position 0 begins from nothing, whatever its slot holds.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton

L2_EPS = 1e-6
# Tokens of a prompt whose changes to the state are worked out together.
CHUNK = 64


class DeltaWeights(NamedTuple):
    """What a layer has beside its products. heads: value heads.

    conv: [conv_channels, kernel], the newest input's last; a_log, dt_bias: [heads] float32; norm: [value_dim].
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class DeltaShape(NamedTuple):
    """Sizes of a layer. A row of its fused product: queries | keys | values | output gates z | b | a."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def of(cls, weights: DeltaWeights, states: torch.Tensor, key_heads: int) -> DeltaShape:
        _, heads, key_dim, value_dim = states.shape
        return cls(key_heads, heads, key_dim, value_dim, weights.conv.shape[1])

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def width(self) -> int:
        return self.conv_channels + self.heads * (self.value_dim + 2)

    def constants(self) -> dict[str, int]:
        """As the kernels take them."""
        return {name.upper(): size for name, size in self._asdict().items()}

    def examples(
        self, tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, DeltaWeights, tuple[torch.Tensor, torch.Tensor]]:
        """What the kernels are compiled for: a product, the weights, conv_states and states, on the meta device."""

        def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        per_head = empty(self.heads, dtype=torch.float32)
        conv = empty(self.conv_channels, self.kernel)
        weights = DeltaWeights(conv, per_head, per_head, empty(self.value_dim), 1e-6)
        states = empty(9, self.heads, self.key_dim, self.value_dim, dtype=torch.float32)
        return empty(tokens, self.width), weights, (empty(9, self.kernel, self.conv_channels), states)


def require_layout(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Slots and tokens may be strided; within them, all is contiguous."""
    if projected.shape[1] != shape.width or shape.heads % shape.key_heads:
        raise ValueError(f"a token of {projected.shape[1]} numbers; {shape} has {shape.width}")
    if conv_states.shape[1:] != (shape.kernel, shape.conv_channels):
        raise ValueError(
            f"a slot of conv_states is {list(conv_states.shape[1:])}; "
            f"it must hold {shape.kernel} inputs of {shape.conv_channels} channels"
        )
    if states.dtype != torch.float32 or weights.a_log.dtype != torch.float32 or weights.dt_bias.dtype != torch.float32:
        raise ValueError("states, a_log and dt_bias must be float32")
    if not (conv_states[0].is_contiguous() and states[0].is_contiguous() and weights.conv.is_contiguous()):
        raise ValueError("a slot's states and the convolution's weights must be contiguous")
    if projected.stride(1) != 1:
        raise ValueError("a token's numbers must be contiguous")


def convolve_torch(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inputs: [..., kernel - 1 + tokens, channels] -> [..., tokens, channels], with SiLU, in the type of the inputs."""
    windows = inputs.float().unfold(-2, weight.shape[1], 1)
    return torch.nn.functional.silu((windows * weight.float()).sum(-1)).to(inputs.dtype)


def heads_torch(convolved: torch.Tensor, shape: DeltaShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[tokens, conv_channels] -> queries and keys [tokens, heads, key_dim], values [tokens, heads, value_dim], float32.

    Queries and keys have length 1, queries then 1 / sqrt(key_dim); neighbouring value heads share a key head.
    """
    keys = shape.key_heads * shape.key_dim
    query, key, value = convolved.float().split([keys, keys, shape.heads * shape.value_dim], -1)
    both = torch.stack([query, key]).unflatten(-1, (shape.key_heads, shape.key_dim))
    both = both * torch.rsqrt(both.pow(2).sum(-1, keepdim=True) + L2_EPS)
    query, key = both.repeat_interleave(shape.heads // shape.key_heads, dim=2)
    return query * shape.key_dim**-0.5, key, value.unflatten(-1, (shape.heads, shape.value_dim))


def gates_torch(projected: torch.Tensor, weights: DeltaWeights, shape: DeltaShape) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of an old state stays, as its logarithm g, and beta, how far it moves: [tokens, heads] float32 each."""
    b, a = projected[:, -2 * shape.heads :].float().split(shape.heads, -1)
    return -weights.a_log.exp() * torch.nn.functional.softplus(a + weights.dt_bias), b.sigmoid()


def gated_norm_torch(
    mixed: torch.Tensor, projected: torch.Tensor, weights: DeltaWeights, shape: DeltaShape
) -> torch.Tensor:
    """mixed: [tokens, heads, value_dim] float32 -> [tokens, heads * value_dim] in the type of `projected`."""
    gate = projected[:, shape.conv_channels : -2 * shape.heads].float().unflatten(-1, (shape.heads, shape.value_dim))
    normed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + weights.eps)
    return (normed * weights.norm.float() * torch.nn.functional.silu(gate)).flatten(1).to(projected.dtype)


def delta_step_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: query, key: [..., key_dim]; value: [..., value_dim]; g, beta: [...]; state: [..., key_dim, value_dim].

    Returns what the query reads, [..., value_dim], and the new state.
    """
    state = state * g.exp()[..., None, None]
    change = beta[..., None] * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., :, None] * change[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def quick_silu(x, NATIVE: tl.constexpr):
    """`silu` in 5 instructions for 12: without the care for denormal numbers and for quotients near the largest."""
    if not NATIVE:
        return silu(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;  // 1
        rcp.approx.ftz.f32 t, t;
        mul.f32 $0, $1, t;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def quick_exp2(x, NATIVE: tl.constexpr):
    """2^x in one instruction for 4: denormal results are 0."""
    if not NATIVE:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """g, the logarithm of what stays of a state, and beta; all float32."""
    shifted = a + dt_bias
    softplus = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
    return -tl.exp(a_log) * softplus, 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def unit_rows(heads):
    """[ROWS, DIM] float32, each row scaled to length 1."""
    return heads * tl.rsqrt(tl.sum(heads * heads, 1) + 1e-6)[:, None]  # L2_EPS


@triton.jit
def gated_norm(mixed, gate, weight, eps, VALUE_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """[ROWS, VALUE_DIM] float32 rows scaled to unit mean square, by `weight` [1, VALUE_DIM] and by silu(gate)."""
    scale = tl.rsqrt(tl.sum(mixed * mixed, 1) / VALUE_DIM + eps)[:, None]
    return mixed * scale * weight * quick_silu(gate, NATIVE)
