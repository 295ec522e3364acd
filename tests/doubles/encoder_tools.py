"""Random models of embeddings and scores in the published layout, and transformers' model with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meltcore.text.tokenizer import byte_alphabet

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
        write_modules(folder, pooling, normalize=normalize)
    return model


def write_modules(folder: Path, pooling: str, *, normalize: bool = True) -> None:
    """Write the files of sentence-transformers for an embedding model."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{each}": each.startswith(pooling) for each in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def write_decoder(folder: Path, *, is_reranker: bool) -> Any:
    """Write a random model in the layout of Qwen3-Embedding or Qwen3-Reranker, and return transformers' model of it."""
    import transformers

    write_byte_tokenizer(folder, "$A" if is_reranker else "$A <|endoftext|>")
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1600,
    }  # fmt: skip
    model_class = transformers.Qwen3ForCausalLM if is_reranker else transformers.Qwen3Model
    model = model_class(transformers.Qwen3Config(**sizes, tie_word_embeddings=False)).eval()
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        is_norm = weight.dim() == 1
        weight.data.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.2, generator=generator)
    model.save_pretrained(folder)
    # Published files of both kinds name the architecture of generation, and tensors of embedding models no prefix.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    if not is_reranker:
        write_modules(folder, "lasttoken")
        return model
    kinds = [("", "base.modules.transformer.Transformer"), ("1_Logit", "cross_encoder.modules.logit_score.LogitScore")]
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Logit").mkdir()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    answers = {"true_token_id": ids("yes"), "false_token_id": ids("no")}
    (folder / "1_Logit" / "config.json").write_text(json.dumps(answers))
    return model


def write_byte_tokenizer(folder: Path, single: str) -> None:
    """Write a byte-level tokenizer with the words "yes" and "no" and the control tokens of Qwen3.

    `single` is the template by which the post-processor adds special tokens to a text.
    """
    texts = [*byte_alphabet(), "ye", "yes", "no"]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(text, tokenizer.token_to_id(text)) for text in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_unigram_tokenizer(folder: Path) -> None:
    """Write a tokenizer of SentencePiece's kind, as XLM-RoBERTa, bge-m3 and multilingual-e5 have it."""
    texts = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁cat", "ing"]
    tokenizer = Tokenizer(models.Unigram([(text, -float(i)) for i, text in enumerate(texts)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer whose pairs have token types, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
