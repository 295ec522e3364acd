"""Random IndicTrans2 checkpoints in the published layout, and transformers' M2M100 with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.loader import load_weights
from meltcore.models.tasks.indictrans2 import IndicTrans2

SMALL: dict[str, Any] = {
    "architectures": ["IndicTransForConditionalGeneration"],
    "model_type": "IndicTrans",
    "encoder_vocab_size": 61, "decoder_vocab_size": 47, "encoder_embed_dim": 32, "decoder_embed_dim": 32,
    "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "encoder_normalize_before": True, "decoder_normalize_before": True,
    "activation_function": "gelu", "scale_embedding": True, "layernorm_embedding": False,
    "share_decoder_input_output_embed": False, "max_source_positions": 64, "max_target_positions": 48,
    "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
DISTILLED = {**SMALL, "layernorm_embedding": True, "share_decoder_input_output_embed": True}
# Queries and keys are larger than trained ones, so that attention has peaks: a wrong mask or position changes results.
_WEIGHT_STD, _PEAK = 0.2, 3.0


def reference_model(values: dict[str, Any], seed: int) -> Any:
    """transformers' M2M100 with the pieces that IndicTrans2 has otherwise, and random weights."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100ScaledWordEmbedding

    size = values["encoder_embed_dim"]
    same = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{name}": values[f"{side}_{name}"] for side in ("encoder", "decoder") for name in same}
    config = M2M100Config(
        vocab_size=values["decoder_vocab_size"], d_model=size, scale_embedding=values["scale_embedding"],
        activation_function=values["activation_function"], max_position_embeddings=values["max_source_positions"],
        dropout=0.0, tie_word_embeddings=False, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        **sizes,
    )  # fmt: skip
    model = M2M100ForConditionalGeneration(config).eval()
    scale = size**0.5 if values["scale_embedding"] else 1.0
    for side, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        stack.embed_tokens = M2M100ScaledWordEmbedding(values[f"{side}_vocab_size"], size, 1, embed_scale=scale)
        if values["layernorm_embedding"]:
            stack.layernorm_embedding = torch.nn.LayerNorm(size)
            stack.layers[0].register_forward_pre_hook(norm_first_input(stack.layernorm_embedding), with_kwargs=True)
    model.lm_head = torch.nn.Linear(size, values["decoder_vocab_size"], bias=False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        # A wide model amplifies no more than a small one: else the scores of float32 are 1e-3 from those of float64.
        scale = (SMALL["encoder_embed_dim"] / size) ** 0.5 if weight.dim() > 1 else 1.0
        weight.data.normal_(1.0 if is_norm else 0.0, _WEIGHT_STD * scale, generator=generator)
        if "q_proj" in name or "k_proj" in name:
            weight.data *= _PEAK
    if values["share_decoder_input_output_embed"]:
        model.lm_head.weight = model.model.decoder.embed_tokens.weight
    model.generation_config.update(forced_eos_token_id=None, max_length=None)
    return model


def norm_first_input(norm: torch.nn.Module) -> Any:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (norm(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": norm(kwargs["hidden_states"])}

    return hook


def write_checkpoint(folder: Path, values: dict[str, Any], reference: Any) -> None:
    tensors = {name: tensor.clone().contiguous() for name, tensor in reference.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "model.shared" not in name}
    if values["share_decoder_input_output_embed"]:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> IndicTrans2:
    checkpoint = open_checkpoint(str(folder), files="all")
    model = IndicTrans2(checkpoint.config).to(dtype)
    load_weights(model, checkpoint, lambda *_: None)
    model.prepare()
    return model


def random_sources(count: int, seed: int, longest: int = 20, vocab_size: int = 61) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [[*torch.randint(4, vocab_size, (length - 1,), generator=generator).tolist(), 2] for length in lengths]
