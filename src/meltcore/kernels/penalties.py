"""Penalties on tokens that a sequence holds already."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

_BLOCK, _WARPS = 2048, 4


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """OpenAI's presence and frequency penalties on generated tokens, and the repetition penalty (Keskar et al. 2019,
    arXiv:1909.05858) on prompt and generated tokens; in place.

    logits: [rows, vocab] float32; rows, slots: [penalised] int64, which rows are meant and where in the tables their
    counts are; output_counts: [slots, vocab] int32; in_prompt: [slots, vocab] bool; the penalties: [penalised] float32.
    """
    body = _penalise_triton if use_triton(logits) else _penalise_torch
    body(logits, rows, slots, output_counts, in_prompt, presence, frequency, repetition)


def _penalise_torch(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    values, counts = logits[rows], output_counts[slots]
    generated = counts > 0
    factor = repetition[:, None]
    repeated = torch.where(values > 0, values / factor, values * factor)
    values = torch.where(generated | in_prompt[slots], repeated, values)
    logits[rows] = values - frequency[:, None] * counts - presence[:, None] * generated


# Settings start anywhere: without this, each new alignment would be compiled for anew.
@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr"])
def _penalise_kernel(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK tokens of one penalised row."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    place = tl.load(slots_ptr + index) * vocab + token
    counts = tl.load(output_counts_ptr + place, mask=inside, other=0)
    prompted = tl.load(in_prompt_ptr + place, mask=inside, other=0) != 0
    target = logits_ptr + tl.load(rows_ptr + index) * row_stride + token
    values = tl.load(target, mask=inside, other=0.0)
    factor = tl.load(repetition_ptr + index)
    generated = counts > 0
    repeated = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
    values = tl.where(generated | prompted, repeated, values)
    values -= tl.load(frequency_ptr + index) * counts.to(tl.float32)
    values -= tl.where(generated, tl.load(presence_ptr + index), 0.0)
    tl.store(target, values, mask=inside)


def _penalise_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    penalised, vocab = rows.shape[0], logits.shape[1]
    if penalised:
        _penalise_kernel[(penalised, triton.cdiv(vocab, _BLOCK))](
            logits,
            rows,
            slots,
            output_counts,
            in_prompt,
            presence,
            frequency,
            repetition,
            vocab,
            logits.stride(0),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    logits = torch.empty(64, 151936, device="meta")
    indices = torch.empty(64, dtype=torch.int64, device="meta")
    counts = torch.empty(64, 151936, dtype=torch.int32, device="meta")
    in_prompt = torch.empty(64, 151936, dtype=torch.bool, device="meta")
    penalties = torch.empty(64, device="meta")
    return [
        lambda: _penalise_triton(logits, indices, indices, counts, in_prompt, penalties, penalties, penalties),
    ]
