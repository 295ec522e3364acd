"""What a kernel does, told by its name: names are all that a trace has, so a kernel of an unknown name is "other"."""

from __future__ import annotations

from functools import cache

from meltcore.results.gaps import COLLECTIVES, COPIES

OTHER = "other kernels"

# The first group with a word in the name, in lower case, has it: names such as topkGatingSoftmax or _best_chunk_kernel
# hold words of several. Ours, vLLM's, and those of cuBLAS, CUTLASS, FlashAttention and torch's compiler.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COPIES, ("memcpy", "memset")),
    (COLLECTIVES, ("nccl", "all_reduce", "allreduce", "all_gather", "reduce_scatter", "peer_sum")),
    ("experts", ("moe", "expert", "route", "gating", "add_choices")),
    (
        "sampling",
        ("sampl", "argmax", "_maximum_", "draw", "likeliest", "last_kept", "penal", "best_chunk", "topk", "top_k",
         "_largest_", "_pack_", "logprob"),
    ),
    # Our decode kernels of attention and of Gated DeltaNet have one name, so recurrent states stand with attention.
    (
        "attention and states",
        ("attention", "attn", "flash", "fmha", "paged", "_decode_", "_lanes_", "_prefill_", "delta", "gdn", "mamba",
         "conv1d", "convolve", "_chunk_", "_scan_"),
    ),
    ("quantisation", ("quant",)),
    (
        "products",
        ("gemm", "gemv", "cublas", "cutlass", "nvjet", "xmma", "splitk", "matmul", "linear", "product", "_one_token_",
         "_tiles_", "_few_tokens_"),
    ),
    ("norms and activations", ("norm", "rsqrt", "silu", "swiglu", "gelu", "act_and_mul", "_gate_", "rotary", "rope")),
    ("cache and embedding", ("cache", "store_kv", "embedding", "rows_or_zeros", "gather", "indexselect")),
)  # fmt: skip


@cache
def group_of(name: str) -> str:
    """The group of a kernel, copy or collective."""
    lower = name.lower()
    return next((group for group, words in _WORDS if any(word in lower for word in words)), OTHER)
