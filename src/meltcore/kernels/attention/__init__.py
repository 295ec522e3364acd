"""Attention over a paged KV cache: decode (one new token of each sequence) and prefill (chunks of prompts)."""
