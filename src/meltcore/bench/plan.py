"""Who gets how much of the time, and with which settings an engine runs on a GPU of so much memory."""

from __future__ import annotations

from typing import Any

from meltcore.bench import workload

DEFAULT_S = 300.0
SHORTEST_S = 10.0
# Shares of --duration. What is left, 5 %, is for starting: two processes, and CUDA graphs.
LEVEL_SHARES = {1: 0.04, 10: 0.04, 100: 0.06, 400: 0.06, 1_000: 0.08, 10_000: 0.12}
SUSTAINED_SHARE = 0.55
# The sustained run takes the lowest level within 1 % of the best: more requests in flight would only wait longer.
NEARLY_BEST = 0.99

# A CPU gets the bundled model and a ladder it can climb; such a result compares with nothing.
CPU_MODEL = "meltcore/sums"
CPU_LEVELS = (1, 10, 100)
_CPU_SEQS = 64

_GIB = 2**30
_USABLE_SHARE = 0.92  # the engine keeps 8 % back
_MODEL_AND_CONTEXT = 2.25 * _GIB  # 1.1 of weights, the rest for CUDA, activations and graphs
# Qwen3-0.6B, a request halfway through its answer: 28 layers x 2 x 8 heads x 128 x 2 bytes a token, 640 tokens.
_REQUEST_BYTES = 114_688 * 640
_ROOMY = 16 * _GIB  # below, the activations of a step of 8,192 tokens would be memory that requests need
_MOST_SEQS, _FEWEST_SEQS = 1024, 16


def sequences_at_once(memory_bytes: int) -> int:
    """How many requests of the workload fit in a GPU's memory together, at most the engine's usual 1,024.

    Each costs activations and graph memory too, which a GPU of 6 GB does not have for a thousand.
    """
    fitting = int((memory_bytes * _USABLE_SHARE - _MODEL_AND_CONTEXT) // _REQUEST_BYTES)
    if fitting > 64:
        fitting -= fitting % 64
    return max(_FEWEST_SEQS, min(_MOST_SEQS, fitting))


def gpu_settings(
    model: str | None, memory_bytes: int, precision: str = "bf16", *, in_use_bytes: int = 0
) -> dict[str, Any]:
    """EngineConfig's fields for a GPU, of whose memory others use `in_use_bytes`.

    Real weights where a model is named, else random ones of Qwen3-0.6B's shapes.
    """
    return {
        "model": model or workload.MODEL,
        "load_format": "auto" if model else "dummy",
        **workload.PRECISIONS[precision].settings,
        "device": "cuda",
        "max_model_len": workload.CONTEXT,
        "max_num_seqs": sequences_at_once(memory_bytes - in_use_bytes),
        "max_num_batched_tokens": 8192 if memory_bytes >= _ROOMY else 2048,
        "debug": ["no-prefix-cache"],
    }


def cpu_settings(model: str | None) -> dict[str, Any]:
    return {
        "model": model or CPU_MODEL,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": workload.CONTEXT,
        "max_num_seqs": _CPU_SEQS,
        "memory_bytes": 2 * _GIB,
        "debug": ["no-prefix-cache"],
    }
