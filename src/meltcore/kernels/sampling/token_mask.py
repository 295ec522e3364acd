"""Excludes the tokens that a packed mask does not allow, for answers that follow a grammar."""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

WORD_BITS = 32
_BLOCK, _WARPS = 4096, 4


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """Set the logits of excluded tokens to minus infinity, in place.

    The kernel reads the masks where they are, also in pinned host memory, and writes excluded logits only.

    Args:
        logits: [rows, vocab] of any floating type, rows may be strided.
        masks: [mask rows, words] int32, contiguous. Bit b of word w allows the token 32 * w + b. A token without a bit
            is excluded.
        mask_rows: [rows] int64, the row of `masks` for each row of logits. A row of 0 excludes nothing.
    """
    rows, vocab = logits.shape
    if not use_triton(logits):
        _mask_reference(logits, masks, mask_rows)
        return
    if rows:
        _mask_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            *(logits, masks, mask_rows, vocab, masks.shape[1], logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def _mask_reference(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    words = masks[mask_rows.to(masks.device)].to(logits.device)
    bits = torch.arange(WORD_BITS, device=logits.device, dtype=torch.int32)
    is_allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    is_allowed = torch.nn.functional.pad(is_allowed, (0, logits.shape[1] - is_allowed.shape[1]))
    logits.masked_fill_(~is_allowed & (mask_rows > 0)[:, None], float("-inf"))


# The tokenizer says how many words there are, which the warm-up does not know.
@triton.jit(do_not_specialize=["mask_rows_ptr", "words"])
def _mask_kernel(logits_ptr, masks_ptr, mask_rows_ptr, vocab, words, row_stride, BLOCK: tl.constexpr):
    """Each program handles BLOCK tokens of one row. Programs of a row without a mask do nothing."""
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row > 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(masks_ptr + mask_row * words + token // 32, mask=token // 32 < words, other=0)
        is_excluded = ((word >> (token % 32)) & 1) == 0
        tl.store(logits_ptr + row * row_stride + token, float("-inf"), mask=is_excluded & (token < vocab))
