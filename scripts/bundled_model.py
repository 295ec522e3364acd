"""The bundled models: shapes, packed attention for training, and the checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bundled_data import Packed
from bundled_hybrid import Chunks, RouterLogits, make_trainable
from bundled_tokenizer import CONTEXT_TOKENS, END_OF_TEXT, TURN_END
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Weight of the load-balancing loss of the experts (router_aux_loss_coef).
_BALANCE = 0.01
# Gemma's norms after layers give outputs of the size 1 + weight, beside embeddings of 0.28: smaller ones keep a token
# visible in what the first layers read.
_NORMS_AFTER_LAYERS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
_FIRST_NORM_WEIGHT = -0.8


def model_config(architecture: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json as the checkpoints of the family have it: "qwen3", "qwen3_5" or "gemma3"."""
    return {"qwen3": _qwen3, "qwen3_5": _qwen3_5, "gemma3": _gemma3}[architecture](tokenizer)


def _qwen3(tokenizer: Tokenizer) -> dict[str, Any]:
    """2 million parameters in 4 layers."""
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


def _qwen3_5(tokenizer: Tokenizer) -> dict[str, Any]:
    """3 million parameters in 4 layers, every other one Gated DeltaNet; the text part of a vision model."""
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "full_attention_interval": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT_TOKENS,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 96,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 100000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": _BALANCE,
        "shared_expert_intermediate_size": 96,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def _gemma3(tokenizer: Tokenizer) -> dict[str, Any]:
    """2 million parameters in 4 layers, every other one with a sliding window.

    The window is shorter than most questions, and the two kinds of layers differ in base and scaling of their rotary
    embedding, so that a wrong window or table turns answers wrong.
    """
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "final_logit_softcapping": None,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": CONTEXT_TOKENS,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "query_pre_attn_scalar": 48,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 1000,
        "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
        "rope_theta": 100000,
        "sliding_window": 96,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }


class Trainee:
    """A new fp32 model and its forward of a packed row, which keeps sequences separate."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        AttentionInterface.register("packed", _packed_attention)
        text = config.get("text_config", config)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**text), attn_implementation="packed", dtype=torch.float32
        ).to(device)
        for name, weight in self.model.named_parameters():
            if name.endswith(_NORMS_AFTER_LAYERS) and config["model_type"] == "gemma3_text":
                torch.nn.init.constant_(weight, _FIRST_NORM_WEIGHT)
        self._hybrid = "text_config" in config
        if self._hybrid:
            make_trainable(self.model)
            self._routers = RouterLogits(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def answer_logits(self, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [answers, vocabulary] at the positions that predict answer tokens, and the auxiliary loss."""
        own = (
            {"chunks": Chunks.of(batch.lengths, self.device), "own_positions": batch.positions} if self._hybrid else {}
        )
        hidden = self.model.model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            attention_mask=dict.fromkeys(("full_attention", "linear_attention", "sliding_attention")),
            use_cache=False,
            starts=batch.starts,
            longest=max(batch.lengths),
            **own,
        ).last_hidden_state
        logits = self.model.lm_head(hidden[0, batch.sources])
        if not self._hybrid:
            return logits, logits.new_zeros(())
        config = self.model.config
        return logits, _BALANCE * self._routers.take_loss(config.num_experts, config.num_experts_per_tok)

    def write(self, config: dict[str, Any], folder: Path) -> None:
        """Write config.json, generation_config.json and bf16 model.safetensors with the published tensor names."""
        text = config.get("text_config", config)
        generation = {
            "do_sample": False,
            "eos_token_id": [text["eos_token_id"], text["pad_token_id"]],
            "pad_token_id": text["pad_token_id"],
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        prefix = "model.language_model." if self._hybrid else "model."
        weights = {
            name.replace("model.", prefix, 1): value.to("cpu", torch.bfloat16).contiguous()
            for name, value in self.model.state_dict().items()
            if not (text["tie_word_embeddings"] and name == "lm_head.weight")
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _packed_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers passes it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers passes it
    *,
    scaling: float,
    starts: torch.Tensor,
    longest: int,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of the row. query: [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    sliding_window: the last keys that a query sees, its own among them; None: all.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if query.is_cuda:
        q, k, v = (each[0].transpose(0, 1).to(torch.bfloat16) for each in (query, key, value))
        window = (sliding_window - 1 if sliding_window else -1, 0)
        return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window)[None], None
    apart = zip(
        *(each.split(starts.diff().tolist(), dim=2) for each in (query, key, value.to(query.dtype))), strict=True
    )
    mixed = [
        scaled_dot_product_attention(q, k, v, attn_mask=_mask(q.shape[2], sliding_window), scale=scaling)
        for q, k, v in apart
    ]
    return torch.cat(mixed, dim=2).transpose(1, 2), None


def _mask(tokens: int, sliding_window: int | None) -> torch.Tensor:
    """Return which keys each query sees: [tokens, tokens]."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return causal.triu(1 - sliding_window) if sliding_window else causal
