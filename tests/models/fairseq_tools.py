"""Writes IndicTrans2 checkpoints in fairseq's layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch


def fairseq_arguments(values: dict[str, Any]) -> argparse.Namespace:
    """The arguments of training that make a model of config.json's `values`."""
    fields = {
        f"{side}_{theirs}": values[f"{side}_{own}"]
        for side in ("encoder", "decoder")
        for own, theirs in (
            ("layers", "layers"), ("embed_dim", "embed_dim"), ("ffn_dim", "ffn_embed_dim"),
            ("attention_heads", "attention_heads"), ("normalize_before", "normalize_before"),
        )
    }  # fmt: skip
    return argparse.Namespace(
        arch="transformer_18_18", _name="transformer_18_18", user_dir=Path("model_configs"), dropout=0.2,
        activation_fn=values["activation_function"], layernorm_embedding=values["layernorm_embedding"],
        no_scale_embedding=not values["scale_embedding"], encoder_learned_pos=False, adaptive_softmax_cutoff=None,
        share_decoder_input_output_embed=values["share_decoder_input_output_embed"], share_all_embeddings=False,
        max_source_positions=values["max_source_positions"], max_target_positions=values["max_target_positions"],
        **fields,
    )  # fmt: skip


def fairseq_tensors(reference: Any) -> dict[str, torch.Tensor]:
    """transformers' weights by fairseq's names, with the tables that fairseq keeps beside them."""
    tensors = {
        "encoder.version": torch.tensor([3.0]),
        "decoder.version": torch.tensor([3.0]),
        "encoder.embed_positions._float_tensor": torch.zeros(1),
        "decoder.embed_positions._float_tensor": torch.zeros(1),
    }
    for name, values in reference.state_dict().items():
        if name == "lm_head.weight":
            tensors["decoder.output_projection.weight"] = values
        elif "shared" not in name and "embed_positions" not in name:
            tensors[name.removeprefix("model.")] = values
    return tensors


def write_fairseq(
    folder: Path,
    values: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    tokenizer: Path | None = None,
    newer: bool = False,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint. newer: the arguments are in `cfg`; changes: of the arguments; tokenizer: a folder to copy."""
    arguments = fairseq_arguments(values)
    for name, value in (changes or {}).items():
        setattr(arguments, name, value)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    state = {
        "args": None if newer else arguments,
        "cfg": {"_name": None, "model": arguments} if newer else None,
        "model": tensors,
        "optimizer_history": [{"num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 3}, "val_loss": torch.tensor(2.5, dtype=torch.float64).numpy()},
        "last_optimizer_state": {0: {"exp_avg": torch.zeros(8)[::2]}},
    }
    torch.save(state, folder / "model" / "checkpoint_best.pt")
    if tokenizer is not None:
        for name in ("vocab", "final_bin"):
            (folder / name).mkdir()
        for side in ("SRC", "TGT"):
            (folder / "vocab" / f"model.{side}").write_bytes((tokenizer / f"model.{side}").read_bytes())
            ids = json.loads((tokenizer / f"dict.{side}.json").read_text())
            lines = [f"{token} {1000 - i}\n" for token, i in sorted(ids.items(), key=lambda item: item[1]) if i > 3]
            (folder / "final_bin" / f"dict.{side}.txt").write_text("".join(lines))
    return folder
