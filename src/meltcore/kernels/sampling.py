"""Choosing tokens from logits: penalties, filters and counter-based noise, all row by row and without the host.

Logits are [rows, vocab] float32; per-row settings are [rows] tensors. Nothing here depends on which other rows share
the batch, so a seeded request draws the same tokens alone and in company.
"""

import torch


def penalise(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """OpenAI's presence and frequency penalties on generated tokens, and the repetition penalty (Keskar et al. 2019,
    arXiv:1909.05858) on prompt and generated tokens.

    output_counts: [rows, vocab] int32; in_prompt: [rows, vocab] bool; the penalties: [rows] float32.
    """
    generated = output_counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(generated | in_prompt, repeated, logits)
    return logits - frequency[:, None] * output_counts - presence[:, None] * generated


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, top-p (nucleus) and min-p leave out, in that order, each on what the last one kept.

    top_k: [rows] int64, 0 for off; top_p, min_p: [rows] float32, 1 and 0 for off. Logits are scaled by temperature
    already. The likeliest token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    drop = ranks >= limit[:, None]
    probabilities = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    # The mass before a token decides: the token that crosses top_p is kept.
    before = probabilities.cumsum(-1) - probabilities
    drop |= before >= top_p[:, None]
    # Against the likeliest of what is left, whose share of the whole does not matter to the ratio.
    drop |= probabilities < min_p[:, None] * probabilities[:, :1]
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(drop, float("-inf")))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise from a counter: one value for each (seed, position, token id), in any batch, on any device.

    seeds, positions: [rows] int64. Returns [rows, vocab_size] float32. Adding it to log-probabilities and taking the
    argmax draws from their softmax (Maddison et al. 2014, arXiv:1411.0030).
    """
    rows = _mix(_mix(seeds) + positions)
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(rows[:, None] ^ _mix(tokens)[None, :])
    # The 24 high bits make a float32 in (0, 1): half a step off zero, so that both logarithms stay finite.
    uniform = (((bits >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function (Steele, Lea and Flood 2014) on int64 with wrap-around."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's >> on int64 copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
