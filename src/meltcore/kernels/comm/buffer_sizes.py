"""Sizes of the buffers through which ranks all-reduce. It needs no torch, so the plan of a fleet can count them."""

from __future__ import annotations

CHUNK, CHUNKS = 512, 512  # words of a chunk of a small message, and chunks of a buffer
COUNTER_WORDS = 8  # of the stages of long messages: a counter each, in 16 bytes
MESSAGE_WORDS = 2**23  # 32 MiB, the longest message in stages


def chunk_words(ranks: int) -> int:
    """Return the words of a buffer that small messages use: two slots for each sender and chunk."""
    return CHUNKS * 2 * ranks * CHUNK


def buffer_bytes(ranks: int) -> int:
    """Return the size of one rank's buffer: chunks, then counters, rows and sums of a long message."""
    return (chunk_words(ranks) + COUNTER_WORDS + 2 * MESSAGE_WORDS) * 4
