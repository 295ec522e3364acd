"""Pre-tokenizers of GGUF files: the words that each makes, and llama.cpp's tokens where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import unicodedata
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import tokenizers
from gguf_tools import add_tokenizer, finish
from tokenizers import models, pre_tokenizers, trainers
from waiting import WAIT_S

from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from meltcore.text.tokenizer import Tokenizer, byte_alphabet

TEXT = "It'S x1234 ½Ⅷ  $+ab\n"
CHINESE = "中\u3000文A，b。カ٣"
# Aliases have the words of the name that they stand for.
WORDS = {
    "llama-bpe": ["It", "'S", " x", "123", "4", " ", "½Ⅷ", " ", " $+", "ab", "\n"],
    "qwen2": ["It", "'S", " x", "1", "2", "3", "4", " ", "½", "Ⅷ", " ", " $+", "ab", "\n"],
    "tekken": ["It", "'S", " x", "1", "2", "3", "4", " ", "½", "Ⅷ", " ", " $+", "ab", "\n"],
    "gpt-4o": ["It'S", " x", "123", "4", " ", "½Ⅷ", " ", " $+", "ab", "\n"],
    "smollm": ["It", "'", "S", " x", "1", "2", "3", "4", " ", "½", "Ⅷ", " ", " $+", "ab", "\n"],
    "gpt-2": ["It", "'", "S", " x", "1234", " ½Ⅷ", " ", " $+", "ab", "\n"],
    "falcon": ["It", "'", "S", " x", "123", "4", " ½Ⅷ", "  ", "$+", "ab", "\n"],
    "deepseek-llm": ["It", "'", "S", " x", "1234", " ", "½", "Ⅷ", " ", " $+", "ab", "\n"],
    "deepseek-coder": ["It", "'", "S", " x", "1", "2", "3", "4", " ", "½", "Ⅷ", "  $+", "ab", "\n"],
    "deepseek-v3": ["It", "'S", " x", "123", "4", " ", "½Ⅷ", " ", " $+", "ab", "\n"],
}
CHINESE_WORDS = {
    "deepseek-llm": ["中", "\u3000", "文", "A", "，", "b", "。", "カ", "٣"],
    "deepseek-coder": ["中", "\u3000文", "A", "，", "b", "。", "カ", "٣"],
    "deepseek-v3": ["中", "\u3000", "文", "A", "，", "b", "。", "カ", "٣"],
}
ALIASES = {
    "llama-bpe": ["llama-v3", "llama3", "falcon3", "pixtral"],
    "qwen2": ["deepseek-r1-qwen", "megrez"],
    "gpt-4o": ["llama4"],
    "smollm": ["starcoder", "refact", "command-r"],
    "gpt-2": ["phi-2", "mpt", "olmo"],
}
LIKE_LLAMA3 = ["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"]  # without BOS, and merges are not ignored


def words(name: str, text: str) -> list[str]:
    alphabet = byte_alphabet()
    pieces = PRE_TOKENIZERS[name].splitter().pre_tokenize_str(text)
    return [bytes(alphabet[char] for char in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("name", WORDS)
def test_each_name_has_the_words_of_the_published_tokenizer(name: str) -> None:
    for each in (name, *ALIASES.get(name, [])):
        assert words(each, TEXT) == WORDS[name]
    if name in CHINESE_WORDS:
        assert words(name, CHINESE) == CHINESE_WORDS[name]


def test_gpt4s_words_come_with_other_settings_than_llama_3s() -> None:
    assert {name for names in ALIASES.values() for name in names} | {*WORDS, *LIKE_LLAMA3} == set(PRE_TOKENIZERS)
    for name in LIKE_LLAMA3:
        assert words(name, TEXT) == WORDS["llama-bpe"]
        assert not PRE_TOKENIZERS[name].ignore_merges
        assert not PRE_TOKENIZERS[name].add_bos


def draw_texts() -> list[str]:
    generator = random.Random(0)
    pool = "ab'sStTlLrReEvVmMdD  \n\r\t12345.,!?/-_()[]{}<>=+$^~|`"
    pool += "éÉßñж日本ひカ한ಕ್ನि٣१²½Ⅷ€£¥…“”’\u0301\u0085\u00a0\u3000\u200d👍"
    return ["".join(generator.choices(pool, k=generator.randint(1, 40))) for _ in range(600)]


def is_alike(name: str, text: str) -> bool:
    """Whether llama.cpp is expected to give the published tokenizer's tokens."""
    categories = {unicodedata.category(char) for char in text if ord(char) > 127}
    if name.startswith(("tekken", "gpt-4o")) and categories & {"Lu", "Ll", "Lt", "Mn", "Mc"}:
        return False  # llama.cpp has ASCII letters in their place, and no marks
    if name in ("deepseek-llm", "deepseek-coder") and "\u3000" in text:
        return False  # llama.cpp takes it for a vertical tab in all steps
    return PRE_TOKENIZERS[name].normalizer is None or unicodedata.is_normalized("NFC", text)


def write_model(path: Path, pre: str, texts: list[str]) -> Path:
    """Write a network of one layer. Its merges join characters across words, so that each split is seen in a token."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<s>", "</s>"]
    writer, size = gguf.GGUFWriter(path, "llama"), 32
    add = {"context_length": 256, "embedding_length": size, "block_count": 1, "feed_forward_length": size}
    for key, value in {**add, "head_count": 1, "head_count_kv": 1, "rope_dimension_count": size}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    types = [1] * (len(tokens) - 2) + [3, 3]
    merges = [" ".join(merge) for merge in model["merges"]]
    add_tokenizer(writer, tokens=tokens, types=types, merges=merges, pre=pre, eos=len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(False)
    shapes = {name: (len(tokens), size) for name in ("token_embd", "output")}
    shapes |= {f"blk.0.{name}": (size, size) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}": (size, size) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    norms = dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (size,))
    for name, shape in (shapes | norms).items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.01, dtype=np.float32))
    return finish(writer, path)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None and not os.environ.get("REQUIRE_REAL"),
    reason="llama.cpp's bindings, xllamacpp, are not installed (make test-real)",
)
@pytest.mark.parametrize("name", [*WORDS, "command-r", "chatglm-bpe"])
def test_tokens_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    texts = [text for text in [TEXT, CHINESE, *draw_texts()] if is_alike(name, text)]
    assert len(texts) > 100
    path = write_model(tmp_path / "m.gguf", name, texts)
    ours = Tokenizer.from_checkpoint(Checkpoint("m", path.parent, {}, {}, GGUFModel(path)))
    for text, expected in zip(texts, llama_cpp.tokens(path, texts, WAIT_S), strict=True):
        assert ours.encode(text, add_special_tokens=False) == expected, text
