"""The fixed work of the score. Whoever changes what is asked, in any way, changes its version: only like work ranks.

Version 1: prompts of 128 to 1,024 random tokens, uniform; 128 output tokens, end tokens ignored; greedy; no prefix
cache; closed loop: a finished request is replaced at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Precision(NamedTuple):
    """A class of results. name: of the workload; dtype: as the engine says it; settings: of EngineConfig."""

    name: str
    dtype: str
    settings: dict[str, str]


PRECISIONS = {
    "bf16": Precision("gpu-score/1", "bfloat16", {"dtype": "bfloat16"}),
    "fp8": Precision(
        "gpu-score-fp8/1",
        "bfloat16+fp8-weights+fp8-kv",
        {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
}
MODEL = "Qwen/Qwen3-0.6B"
PARAMETERS = 596_049_920  # of Qwen3-0.6B: a result of another model is not comparable

SHORTEST_PROMPT, LONGEST_PROMPT = 128, 1024
OUTPUT_TOKENS = 128
CONTEXT = LONGEST_PROMPT + OUTPUT_TOKENS
LEVELS = (1, 10, 100, 400, 1_000, 10_000)

# Qwen3's special tokens stand above, bytes and merges of two below. A smaller vocabulary is used whole.
_LOWEST_ID, _HIGHEST_ID = 1_000, 140_000
_SEED = 20_261_121
# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Our own arithmetic
# rather than numpy's generators: it can never change under us, and takes a tenth of the time of seeding one of those.
_GAMMA = 0x9E3779B97F4A7C15
_DRAWS = 1 + LONGEST_PROMPT  # a request's length and tokens
_STEPS = np.arange(1, _DRAWS + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def prompt(number: int, vocab_size: int) -> list[int]:
    """The tokens of request `number`, the same on every machine: its own piece of one stream of random numbers."""
    start = (_SEED + number * _DRAWS * _GAMMA) % 2**64
    draws = _mix(_STEPS + np.uint64(start)) >> np.uint64(32)
    (length,) = _between(draws[:1], SHORTEST_PROMPT, LONGEST_PROMPT + 1)
    low, high = (_LOWEST_ID, _HIGHEST_ID) if vocab_size > _HIGHEST_ID else (0, vocab_size)
    return _between(draws[1 : length + 1], low, high)


def _mix(states: np.ndarray) -> np.ndarray:
    """[n] uint64 to as many random ones."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def _between(draws: np.ndarray, low: int, high: int) -> list[int]:
    """Random numbers of 32 bits to numbers from `low` to `high` - 1, by multiplying and dropping the low half."""
    found: list[int] = (np.uint64(low) + ((draws * np.uint64(high - low)) >> np.uint64(32))).tolist()
    return found
