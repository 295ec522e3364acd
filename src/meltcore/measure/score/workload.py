"""Defines the fixed workload of the score, the division of its time, and the engine settings for a device.

Any change of the requests needs a new version of the workload, because only results of equal workloads are ranked.
Version 1 has prompts of 128 to 1,024 random tokens, uniform, and 128 output tokens. End tokens are ignored, sampling is
greedy, and there is no prefix cache. The loop is closed, so each finished request is replaced immediately.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meltcore.common.sizes import GIB


class Precision(NamedTuple):
    """One precision: the name of its workload, the dtype that the engine reports, and settings of EngineConfig."""

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
NUM_PARAMETERS = 596_049_920  # of Qwen3-0.6B; results of other models are not comparable

MIN_PROMPT, MAX_PROMPT = 128, 1024
OUTPUT_TOKENS = 128
CONTEXT = MAX_PROMPT + OUTPUT_TOKENS
LEVELS = (1, 10, 100, 400, 1_000, 10_000)

# Fractions of --duration. The remaining 5 % are for starting two processes and capturing CUDA graphs.
LEVEL_FRACTIONS = {1: 0.04, 10: 0.04, 100: 0.06, 400: 0.06, 1_000: 0.08, 10_000: 0.12}
SUSTAINED_FRACTION = 0.55

# A CPU gets the bundled model and a ladder that it can climb; such a result is not comparable.
CPU_MODEL = "meltcore/sums"
CPU_LEVELS = (1, 10, 100)
_CPU_MAX_NUM_SEQS = 64

# Qwen3's special tokens are above, bytes and merges of two below. A smaller vocabulary is used whole.
_LOWEST_ID, _HIGHEST_ID = 1_000, 140_000
_SEED = 20_261_121
# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Own arithmetic instead
# of numpy's generators: it never changes with a version, and takes a tenth of the time of seeding one of those.
_GAMMA = 0x9E3779B97F4A7C15
_NUM_DRAWS = 1 + MAX_PROMPT  # the length and the tokens of a request
_STEPS = np.arange(1, _NUM_DRAWS + 1, dtype=np.uint64) * np.uint64(_GAMMA)

_USABLE_FRACTION = 0.92  # the engine keeps 8 % free
_MODEL_AND_CONTEXT = 2.25 * GIB  # 1.1 GiB of weights; the rest for CUDA, activations and graphs
# Qwen3-0.6B, a request halfway through its answer: 28 layers x 2 x 8 heads x 128 x 2 bytes per token, 640 tokens.
_REQUEST_BYTES = 114_688 * 640
_LARGE_GPU = 16 * GIB  # below it, activations of a step of 8,192 tokens would take memory from requests
_MAX_SEQS, _MIN_SEQS = 1024, 16


def prompt(number: int, vocab_size: int) -> list[int]:
    """Return the tokens of request `number`, from its own part of a random stream that is the same on all machines."""
    start = (_SEED + number * _NUM_DRAWS * _GAMMA) % 2**64
    draws = _mix(_STEPS + np.uint64(start)) >> np.uint64(32)
    (length,) = _scale_to_range(draws[:1], MIN_PROMPT, MAX_PROMPT + 1)
    low, high = (_LOWEST_ID, _HIGHEST_ID) if vocab_size > _HIGHEST_ID else (0, vocab_size)
    return _scale_to_range(draws[1 : length + 1], low, high)


def concurrent_sequences(memory_bytes: int) -> int:
    """Return the number of requests of the workload that fit in a GPU's memory, at most 1,024.

    Each request also needs memory for activations and graphs, so a GPU of 6 GB is too small for 1,000 requests.
    """
    num_sequences = int((memory_bytes * _USABLE_FRACTION - _MODEL_AND_CONTEXT) // _REQUEST_BYTES)
    if num_sequences > 64:
        num_sequences -= num_sequences % 64
    return max(_MIN_SEQS, min(_MAX_SEQS, num_sequences))


def gpu_settings(
    model: str | None, memory_bytes: int, precision: str = "bf16", *, in_use_bytes: int = 0
) -> dict[str, Any]:
    """Return EngineConfig's fields for a GPU of which other programs use `in_use_bytes`.

    A `model` of None means random weights in the shapes of Qwen3-0.6B.
    """
    return {
        "model": model or MODEL,
        "load_format": "auto" if model else "dummy",
        **PRECISIONS[precision].settings,
        "device": "cuda",
        "max_model_len": CONTEXT,
        "max_num_seqs": concurrent_sequences(memory_bytes - in_use_bytes),
        "max_num_batched_tokens": 8192 if memory_bytes >= _LARGE_GPU else 2048,
        "enable_prefix_caching": False,
    }


def cpu_settings(model: str | None) -> dict[str, Any]:
    """Return EngineConfig's fields for a CPU."""
    return {
        "model": model or CPU_MODEL,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": CONTEXT,
        "max_num_seqs": _CPU_MAX_NUM_SEQS,
        "memory_bytes": 2 * GIB,
        "enable_prefix_caching": False,
    }


def _mix(states: np.ndarray) -> np.ndarray:
    """Hash `states`, [n] uint64, to [n] random uint64."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: np.ndarray = states ^ (states >> np.uint64(31))
    return hashes


def _scale_to_range(draws: np.ndarray, low: int, high: int) -> list[int]:
    """Return random numbers of 32 bits mapped to [low, high), by multiplication and a shift by 32 bits."""
    numbers: list[int] = (np.uint64(low) + ((draws * np.uint64(high - low)) >> np.uint64(32))).tolist()
    return numbers
