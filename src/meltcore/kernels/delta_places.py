"""How Gated DeltaNet cuts prompts into chunks, and where a chunk lies in the tensors that its kernels hand on.

Those tensors have a place for each chunk, [places, ...], CHUNK tokens long even where the chunk is not: a kernel then
reads whole tiles side by side, without a condition or an address of its own for each row.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meltcore.kernels.delta import CHUNK
from meltcore.kernels.jit import tl, triton


def delta_chunks(sizes: Sequence[int], decodes: int) -> np.ndarray:
    """How segments of `sizes` tokens, the first `decodes` of which are single, are cut: [chunks, 2] int32.

    A row is a segment and which of its chunks of CHUNK tokens, counted from the segment's first token.
    """
    counts = -(-np.asarray(sizes[decodes:], dtype=np.int32) // CHUNK)
    segments = np.arange(decodes, len(sizes), dtype=np.int32).repeat(counts)
    within = np.arange(len(segments), dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)
    return np.stack([segments, within.astype(np.int32)], 1)


def chunk_places(tokens: int, segments: int) -> int:
    """Places enough for the chunks of so many segments of so many tokens together."""
    return tokens // CHUNK + segments


@triton.jit
def chunk_place(first_tokens, segment, number, decodes, CHUNK: tl.constexpr):
    """The place of a segment's chunk of this number. No two chunks share one: n tokens from t on are at most
    (t + n) // CHUNK - t // CHUNK + 1 chunks.
    """
    return tl.load(first_tokens + segment) // CHUNK + segment - decodes + number
