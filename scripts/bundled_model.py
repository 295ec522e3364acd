"""The bundled model's shape, its packed attention for training, and how it is written to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bundled_data import Packed
from bundled_tokenizer import CONTEXT_TOKENS, END_OF_TEXT, TURN_END
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json, in the form Qwen3's own checkpoints have: 2 million parameters in 4 layers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": CONTEXT_TOKENS,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 100000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def new_model(config: dict[str, Any], device: torch.device) -> Qwen3ForCausalLM:
    """A fresh fp32 model whose attention keeps packed sequences apart."""
    AttentionInterface.register("packed", _packed_attention)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config), attn_implementation="packed", dtype=torch.float32)
    return model.to(device)


def answer_logits(model: Qwen3ForCausalLM, batch: Packed) -> torch.Tensor:
    """Logits [answers, vocabulary] at the positions that predict answer tokens."""
    hidden = model.model(
        input_ids=batch.ids[None],
        position_ids=batch.positions[None],
        attention_mask={"full_attention": None},
        use_cache=False,
        starts=batch.starts,
        longest=batch.longest,
    ).last_hidden_state
    return model.lm_head(hidden[0, batch.sources])


def write_model(model: Qwen3ForCausalLM, config: dict[str, Any], folder: Path) -> None:
    """config.json, generation_config.json and bf16 model.safetensors (tied: no lm_head)."""
    generation = {
        "do_sample": False,
        "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
        "pad_token_id": config["pad_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        name: value.to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    starts: torch.Tensor,
    longest: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of the row. query: [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if query.is_cuda:
        q, k, v = (each[0].transpose(0, 1).to(torch.bfloat16) for each in (query, key, value))
        causal = (-1, 0)
        return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=causal)[None], None
    apart = zip(
        *(each.split(starts.diff().tolist(), dim=2) for each in (query, key, value.to(query.dtype))), strict=True
    )
    mixed = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in apart]
    return torch.cat(mixed, dim=2).transpose(1, 2), None
