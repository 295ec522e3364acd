"""Options of the three kinds of tuning. Nothing heavy is imported here: `meltcore tune --help` reads this module."""

from __future__ import annotations

from dataclasses import dataclass

from meltcore.common.options import option
from meltcore.measure.documents.tuning import TuningKind

ANSWER_TOKENS = 16  # of the one request that fills a context
MIN_MODEL_LEN = ANSWER_TOKENS + 1
_AT_LEAST_1 = {"minimum": 1}
_MODEL_LEN = {"minimum": MIN_MODEL_LEN}


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """A sweep over every pair of the two settings. Without `max_num_batched_tokens` the server decides the budget."""

    max_num_seqs: tuple[int, ...] = option(
        (8, 16, 32, 64, 128, 256), "Values of --max-num-seqs to try.", limits=_AT_LEAST_1
    )
    max_num_batched_tokens: tuple[int, ...] = option(
        (), "Values of --max-num-batched-tokens to try (default: the server's own).", limits=_AT_LEAST_1
    )


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Bounds of the two searches: for the longest context, and for the most sequences of `seq_len` tokens.

    `seq_len` counts prompt and answer. If `max_model_len` is None, the server's own limit is the bound.
    """

    min_model_len: int = option(1024, "Shortest context to try.", limits=_MODEL_LEN, metavar="TOKENS")
    max_model_len: int | None = option(
        None, "Longest context to try (default: the server's own).", limits=_MODEL_LEN, metavar="TOKENS"
    )
    model_len_step: int = option(1024, "Resolution of the search.", limits=_AT_LEAST_1, metavar="TOKENS")
    seq_len: int = option(2048, "Length of the sequences to count.", limits={"minimum": 2}, metavar="TOKENS")
    max_num_seqs: int = option(1024, "Most sequences to try.", limits=_AT_LEAST_1)
    config: str | None = option(
        None, "config.json for the calculation (default: that of MODEL, if it is a folder).", metavar="FILE"
    )
    kv_element_size: int = option(
        2, "Bytes per element of the KV cache; 1 for FP8.", flag="--kv-bytes", limits=_AT_LEAST_1
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Data types to try, and the questions that show their effect on answers."""

    dtypes: tuple[str, ...] = option(
        ("float16", "bfloat16"),
        "Values of --dtype to try; '' for none.",
        type=lambda text: tuple(name for name in text.split(",") if name),
        action="store",
        metavar="NAME,...",
    )
    fp8: bool = option(True, "Do not try FP8 weights and FP8 KV caches.")
    questions: int = option(200, "Bundled problems to ask; 0 measures speed only.", limits={"minimum": 0})
    gsm8k: str | None = option(None, "GSM8K items to ask as well, at most 200.", metavar="FILE")


OPTIONS: dict[TuningKind, type[ContextOptions | BatchingOptions | PrecisionOptions]] = {
    "context": ContextOptions,
    "batching": BatchingOptions,
    "precision": PrecisionOptions,
}
