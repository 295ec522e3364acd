"""The fixed work of the score. Whoever changes what is asked, in any way, changes NAME: unlike work never compares.

gpu-score/1: prompts of 128 to 1,024 random tokens, uniform; 128 output tokens, end tokens ignored; greedy; no prefix
cache; closed loop: a finished request is replaced at once.
"""

from __future__ import annotations

import numpy as np

NAME = "gpu-score/1"
MODEL = "Qwen/Qwen3-0.6B"
PARAMETERS = 596_049_920  # of Qwen3-0.6B: a result of another model is not comparable
DTYPE = "bfloat16"

SHORTEST_PROMPT, LONGEST_PROMPT = 128, 1024
OUTPUT_TOKENS = 128
CONTEXT = LONGEST_PROMPT + OUTPUT_TOKENS
LEVELS = (1, 10, 100, 400, 1_000, 10_000)

# Qwen3's special tokens stand above, bytes and merges of two below. A smaller vocabulary is used whole.
_LOWEST_ID, _HIGHEST_ID = 1_000, 140_000
_SEED = 20_261_121


def prompt(number: int, vocab_size: int) -> list[int]:
    """The tokens of request `number`, the same on every machine.

    From numpy's RandomState, whose streams are frozen for all future versions (NEP 19).
    """
    draw = np.random.RandomState([_SEED, number])
    length = int(draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT + 1))
    low, high = (_LOWEST_ID, _HIGHEST_ID) if vocab_size > _HIGHEST_ID else (0, vocab_size)
    tokens: list[int] = draw.randint(low, high, length).tolist()
    return tokens
