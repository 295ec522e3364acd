"""Random text encoders in the published layout, and transformers' model with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{each}" for each in "abcdefghij")]
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 66, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# Larger weights than trained ones give attention peaks: a wrong mask, type or position changes results.
_WEIGHT_STD = 0.3


def write_encoder(
    folder: Path, architecture: str, *, pooling: str = "mean", normalize: bool = True, seed: int = 3
) -> Any:
    """Write a random checkpoint with a tokenizer of letters, and return transformers' model of it."""
    import transformers

    model_class = getattr(transformers, architecture)
    labels = {"num_labels": 1} if architecture.endswith("Classification") else {}
    is_xlm = architecture.startswith("XLM")
    types = {"type_vocab_size": 1, "pad_token_id": 1} if is_xlm else {"type_vocab_size": 2, "pad_token_id": 0}
    model = model_class(model_class.config_class(**_SIZES, **types, **labels)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        is_norm = "LayerNorm.weight" in name
        weight.data.normal_(1.0 if is_norm else 0.0, 0.1 if weight.dim() == 1 else _WEIGHT_STD, generator=generator)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if not labels:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{each}": each.startswith(pooling) for each in ("cls_token", "mean_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer whose pairs have token types, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
