"""Small checkpoints of Qwen3.5 with a layer for multi-token prediction, and the metadata of one sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata, PaddedGroup, make_query_tiles
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.qwen3_5 import Qwen3_5
from meltcore.models.loader import build_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, TOP_K, VOCAB = 32, 4, 2, 16, 4, 2, 320
EXPERTS, WIDTH, THETA, EPS = 6, 24, 10_000_000.0, 1e-6
SIZES: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PAGE = 64


def open_small(folder: Path, files: Any = "config", **changes: Any) -> Any:
    published = open_checkpoint("Qwen/Qwen3.5-35B-A3B", files="config").config["text_config"]
    (folder / "config.json").write_text(json.dumps(published | SIZES | changes))
    return open_checkpoint(str(folder), files=files)


def build(folder: Path, group: TensorParallelGroup | None = None, **changes: Any) -> Qwen3_5:
    model = build_model(open_small(folder, **changes), torch.float32, torch.device("cpu"), group=group, has_mtp=True)
    assert isinstance(model, Qwen3_5)
    return model


def metadata_of(start: int, size: int, page_table: torch.Tensor) -> AttentionMetadata:
    """The metadata of a step with tokens of one sequence from position `start` on, whose pages are in row 1."""
    positions, none = torch.arange(start, start + size), torch.empty(0, dtype=torch.int64)
    return AttentionMetadata(
        page_table=page_table,
        rows=torch.tensor([1]),
        context_lens=torch.tensor([start]),
        slot_mapping=page_table[1, positions // PAGE] * PAGE + positions % PAGE,
        num_decodes=int(size == 1),
        query_tiles=torch.from_numpy(make_query_tiles([] if size == 1 else [(1, 0, size, start)])),
        padded_index=torch.arange(size),
        padded_groups=[PaddedGroup(0, 1, 0, size, size, -(-(start + size) // PAGE))],
        state_slots=none,
        query_start_loc=none,
        chunk_indices=none,
        shared={},
    )
