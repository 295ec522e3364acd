"""Applies penalties to the logits of tokens that a sequence contains already."""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

_BLOCK, _WARPS = 2048, 4


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Apply presence, frequency and repetition penalties to logits, in place.

    OpenAI's presence and frequency penalties count generated tokens. The repetition penalty (Keskar et al. 2019,
    arXiv:1909.05858) counts prompt and generated tokens.

    Args:
        logits: [rows, vocab] float32.
        rows: [penalized] int64, the rows with penalties.
        slots: [penalized] int64, the slots of these rows in the tables of counts.
        output_counts: [slots, vocab] int32.
        in_prompt: [slots, vocab] bool.
        presence: [penalized] float32.
        frequency: [penalized] float32.
        repetition: [penalized] float32.
    """
    if not use_triton(logits):
        values, counts = logits[rows], output_counts[slots]
        is_generated, factor = counts > 0, repetition[:, None]
        penalized_values = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(is_generated | in_prompt[slots], penalized_values, values)
        logits[rows] = values - frequency[:, None] * counts - presence[:, None] * is_generated
        return
    penalized, vocab = rows.shape[0], logits.shape[1]
    if penalized:
        _penalties_kernel[(penalized, triton.cdiv(vocab, _BLOCK))](
            *(logits, rows, slots, output_counts, in_prompt, presence, frequency, repetition, vocab, logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


# Settings start anywhere: without this, each new alignment would be compiled for anew.
@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr"])
def _penalties_kernel(
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
    """Each program penalizes BLOCK tokens of one penalized row."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    offset = tl.load(slots_ptr + index) * vocab + token
    counts = tl.load(output_counts_ptr + offset, mask=mask, other=0)
    is_in_prompt = tl.load(in_prompt_ptr + offset, mask=mask, other=0) != 0
    logit_ptrs = logits_ptr + tl.load(rows_ptr + index) * row_stride + token
    values = tl.load(logit_ptrs, mask=mask, other=0.0)
    factor = tl.load(repetition_ptr + index)
    is_generated = counts > 0
    penalized_values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
    values = tl.where(is_generated | is_in_prompt, penalized_values, values)
    values -= tl.load(frequency_ptr + index) * counts.to(tl.float32)
    values -= tl.where(is_generated, tl.load(presence_ptr + index), 0.0)
    tl.store(logit_ptrs, values, mask=mask)
