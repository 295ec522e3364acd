"""Attention over a paged cache: of one new token of many sequences, and of chunks of prompts."""

from meltcore.kernels.decode_attention import decode_attention
from meltcore.kernels.prefill_attention import BLOCK_QUERIES, prefill_attention, query_tiles

__all__ = ["BLOCK_QUERIES", "decode_attention", "prefill_attention", "query_tiles"]
