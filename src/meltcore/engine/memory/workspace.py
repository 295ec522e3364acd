"""Computes the memory that a generation engine on a GPU needs beside weights and caches.

An engine with a budget in bytes uses this instead of a fraction of its memory. A fraction would starve small budgets
and waste large ones. This module does not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

from meltcore.engine.memory.graph_sizes import (
    MAX_GRAPH_TOKENS,
    bucket_shapes,
    capture_sizes,
    decode_samples,
    max_prefills,
    sampled_tokens,
    window_shapes,
)
from meltcore.models.quantized.step_sizes import FUSED_ROWS, StepBytes

# Per slot and token of the vocabulary: a count in int32, and whether the prompt holds it.
PENALTY_BYTES = 5
LOGIT_BYTES = 4  # float32, as a head computes them
# Logits that are sampled in a block: those of its rows, of rows with log-probabilities again, and these.
SAMPLED_LOGIT_BYTES = 3 * LOGIT_BYTES
MAX_LOGIT_ROWS = 64  # more are sampled in several blocks
_HISTORY_BYTES = 4  # per token of the longest context, to look up n-grams
# cuBLAS keeps a workspace of 32 MiB for each stream, on GPUs of capability 9.0: of steps and of captures.
LIBRARY_BYTES = 2 * 32 * 2**20 + 8 * 2**20
# What a graph takes of the device outside of torch's allocator, per layer: 167 KiB measured (Qwen3-0.6B, 18 graphs,
# H200, 2026-11-24).
GRAPH_LAYER_BYTES = 176 * 2**10
# Segments of the allocator are rounded up, and steps of other sizes leave gaps: 130 MiB with graphs where 255 MiB were
# counted (Qwen3-0.6B, H200, 2026-11-24).
_GAPS = 0.1
_LEAST_GAP_BYTES = 160 * 2**20
# The gaps in an exact plan of a batch engine: a fraction of what lives for one step, and at least this much.
BATCH_GAPS, LEAST_BATCH_GAP_BYTES = 0.1, 32 * 2**20


def sleep_rounding_bytes(weight_bytes: int) -> int:
    """Return the bytes that an engine with a sleep mode loses to rounding: torch rounds large tensors up to 2 MiB.

    477 MiB of 16.04 GiB were lost (Gemma-3-27B in Q4_0, H200, 2026-11-24).
    """
    return weight_bytes // 25 + 2**26


def graph_node_bytes(num_graphs: int, layers: int) -> int:
    """Return the device memory that CUDA graphs of a model of `layers` layers take outside of torch's allocator."""
    return num_graphs * layers * GRAPH_LAYER_BYTES


class Workspace(NamedTuple):
    """The parts of an engine's workspace in bytes.

    Args:
        step: activations of a step that is launched kernel by kernel.
        graphs: activations of CUDA graphs, which have separate memory.
        nodes: memory of CUDA graphs outside of torch's allocator.
        sampling: logits and penalties.
        libraries: memory of cuBLAS, tables of positions, and gaps of the allocator.
    """

    step: int
    graphs: int
    nodes: int
    sampling: int
    libraries: int

    @property
    def total_bytes(self) -> int:
        """The sum of the bytes of all parts."""
        return sum(self)


def plan_workspace(
    step: StepBytes,
    *,
    vocab_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    penalty_slots: int,
    logit_rows: int,
    has_graphs: bool,
    window: int = 1,
) -> Workspace:
    """Return the workspace of an engine with these limits. A decoding sequence has `window` tokens in a step."""

    def activations(tokens: int, rows: int) -> int:
        """Return the bytes of a step of `tokens` tokens that computes `rows` rows of logits."""
        scratch_bytes = step.scratch_bytes
        if rows > FUSED_ROWS:
            scratch_bytes = max(scratch_bytes, step.head_scratch_bytes)
        if tokens >= step.expert_tokens:
            scratch_bytes = max(scratch_bytes, step.scratch_bytes + step.expert_bytes)
        return tokens * step.token_bytes + step.fixed_bytes + scratch_bytes + rows * vocab_size * LOGIT_BYTES

    eager = activations(max_num_batched_tokens, sampled_tokens(max_num_seqs, window))
    graphs = nodes = 0
    if has_graphs:
        max_tokens = min(MAX_GRAPH_TOKENS, max_num_batched_tokens)
        shapes, windows = bucket_shapes(max_num_seqs, max_tokens), window_shapes(max_num_seqs, max_tokens, window)
        sizes, window_tokens = capture_sizes(max_num_seqs), [tokens for _, tokens in windows]  # all have logits
        tokens = max([max_num_seqs, *map(sum, shapes), *window_tokens])
        samples = [decode_samples(decodes, max_num_seqs, window) + max_prefills(prompts) for decodes, prompts in shapes]
        rows = max([max_num_seqs, *samples, *window_tokens])
        # The logits of decode graphs are one tensor; those of a bucket live in the graphs' memory.
        graphs = activations(tokens, rows) + max_num_seqs * vocab_size * LOGIT_BYTES
        nodes = graph_node_bytes(len(shapes) + len(windows) + len(sizes), step.layers)
        # Drafting has a graph for each number of windows, which runs the layer once for each draft.
        nodes += graph_node_bytes(len(windows), step.mtp_layers * (window - 1))
    sampling = logit_rows * vocab_size * SAMPLED_LOGIT_BYTES + penalty_slots * vocab_size * PENALTY_BYTES
    tables = max_model_len * step.position_bytes
    if window > 1:
        tables += (max_num_seqs + 1) * (max_model_len + 1) * _HISTORY_BYTES
    gaps = max(_LEAST_GAP_BYTES, int((eager + graphs) * _GAPS))
    return Workspace(eager, graphs, nodes, sampling, LIBRARY_BYTES + tables + gaps)
