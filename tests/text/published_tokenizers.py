"""Tokenizers of the published layouts, with small vocabularies that are trained on the texts of this file.

Each layout has the normalizer, pre-tokenizer, decoder, post-processor and added tokens of its family.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Settings = dict[str, Any]
SAMPLE = """
the that with it's DON'T we'll Hello hello world number 7 42 1234 3.14 def return x=1 {} [] // # ... ?!
Grüße naïve café cafe\u0301 नमस्ते दुनिया ಕನ್ನಡ தமிழ் 你好 世界 日本語 한국어 مرحبا שלום Ελληνικά привет
👩\u200d👩\u200d👧 🏳️\u200d🌈 😀 \u200b \ufeff \x07 \u0378 ▁ ▁▁ İ ﬁ Ⅷ ½
"""
WORDS = SAMPLE.split()
GAPS = [" ", " ", " ", "  ", "", "\n", "\t", "\r\n", " \n\n "]
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CASED += r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"


def texts(count: int, specials: list[str]) -> list[str]:
    """Random texts of many scripts, some of them with special tokens."""
    chance = random.Random(43)
    found = ["", " ", "\n", "Hello world", " Hello", "Hello ", "a  b   c"]
    while len(found) < count:
        pieces = [chance.choice(WORDS) + chance.choice(GAPS) for _ in range(chance.randrange(1, 12))]
        if specials and chance.random() < 0.3:
            pieces.insert(chance.randrange(len(pieces) + 1), chance.choice(specials))
        found.append(chance.choice(["", " "]) + "".join(pieces))
    return found


class Layout(NamedTuple):
    """A published layout: how its backend is made, its config.json's model_type, and its tokenizer_config.json."""

    model_type: str
    backend: Tokenizer
    settings: Settings

    def write(self, folder: Path, settings: Settings | None = None) -> Path:
        self.backend.save(str(folder / "tokenizer.json"))
        settings = self.settings | (settings or {})
        settings = {name: value for name, value in settings.items() if value != "absent"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type, "vocab_size": 4096}))
        return folder


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS: dict[str, Any] = {
    "llama3": lambda: [_split(APOSTROPHES + LETTERS + r"\p{N}{1,3}" + REST), BYTES],
    "qwen2": lambda: [_split(APOSTROPHES + LETTERS + r"\p{N}" + REST), BYTES],
    "tekken": lambda: [_split(CASED + r"|\p{N}" + REST.replace("[\\r\\n]*|", "[\\r\\n/]*|", 1)), BYTES],
    "digits": lambda: [pre_tokenizers.Digits(individual_digits=True), GPT2],
}


def _byte_level(
    pre_tokenizer: str, specials: list[str], *, normalizer: Any = None, first: bool = False, **model: Any
) -> Tokenizer:
    """Return a byte-level tokenizer. first: its special tokens are the first ids, else they follow the vocabulary."""
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre_tokenizer]())
    backend.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=specials if first else []
    )
    backend.train_from_iterator(texts(200, []), trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return backend


@cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The merges of a vocabulary of SentencePiece, and its pieces by rank."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(
        texts(200, []), trainers.BpeTrainer(vocab_size=450, show_progress=False, limit_alphabet=120)
    )
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _sentencepiece(specials: list[str], unk: str, added: list[AddedToken]) -> Tokenizer:
    """Return a tokenizer without normalizer and pre-tokenizer. specials: the first ids."""
    pieces, merges = _pieces()
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(pieces, key=lambda piece: pieces[piece])]
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    for token in added:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return backend


def _with_bos(backend: Tokenizer, bos: str) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def _llama2(added: list[AddedToken], *, prefix: str) -> Tokenizer:
    """Return Llama 2's layout. prefix: "prepend" as published first, "metaspace" as Mistral's later versions."""
    backend = _sentencepiece(["<unk>", "<s>", "</s>"], "<unk>", added)
    if prefix == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return _with_bos(backend, "<s>")


def _gemma3() -> Tokenizer:
    added = [AddedToken(text, normalized=False, special=True) for text in ("<start_of_turn>", "<end_of_turn>")]
    added.append(AddedToken("\n\n", normalized=False, special=False))
    backend = _sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], "<unk>", added)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_bos(backend, "<bos>")


def _phi3() -> Tokenizer:
    ends = [AddedToken(text, rstrip=True, normalized=False, special=True) for text in PHI3]
    return _llama2(ends, prefix="prepend")


LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
PHI4 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"]
MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
GRANITE = ["<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>"]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
GPT = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}


def _instructed() -> list[AddedToken]:
    return [AddedToken(text, normalized=False, special=True) for text in ("[INST]", "[/INST]")]


@cache
def layouts() -> dict[str, Layout]:
    """The layouts by the name of their family."""
    nfc = normalizers.NFC()
    llama3 = _with_bos(_byte_level("llama3", LLAMA3, ignore_merges=True), LLAMA3[0])
    tekken = _with_bos(_byte_level("tekken", MISTRAL, first=True, ignore_merges=True), "<s>")
    phi4 = _byte_level("llama3", PHI4)
    llama_class, bos = {"tokenizer_class": "LlamaTokenizer"}, {"add_bos_token": True, "add_eos_token": False}
    return {
        "Llama 2": Layout("llama", _llama2([], prefix="prepend"), LLAMA | llama_class | bos | {"legacy": False}),
        "Mistral v0.1": Layout("mistral", _llama2([], prefix="prepend"), LLAMA | llama_class | {"legacy": True}),
        "Mistral v0.3": Layout(
            "mistral", _llama2(_instructed(), prefix="metaspace"), LLAMA | llama_class | bos | {"legacy": False}
        ),
        "Mistral Tekken": Layout("mistral", tekken, FAST | LLAMA | {"tokenizer_class": "GPT2Tokenizer"}),
        "Llama 3": Layout("llama", llama3, FAST | {"bos_token": LLAMA3[0], "eos_token": LLAMA3[4]}),
        "Qwen 2.5": Layout(
            "qwen2",
            _byte_level("qwen2", QWEN, normalizer=nfc),
            {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None, "eos_token": QWEN[2]}
            | {"pad_token": QWEN[0], "unk_token": None, "errors": "replace", "split_special_tokens": False},
        ),
        "Qwen 3": Layout(
            "qwen3",
            _byte_level("qwen2", QWEN, normalizer=nfc),
            {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "eos_token": QWEN[2], "pad_token": QWEN[0]},
        ),
        "Gemma 3": Layout(
            "gemma3_text",
            _gemma3(),
            {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
            | {"unk_token": "<unk>", "spaces_between_special_tokens": False}
            | bos,
        ),
        "Phi-3": Layout(
            "phi3", _phi3(), LLAMA | llama_class | {"add_bos_token": False, "eos_token": "<|end|>", "legacy": False}
        ),
        "Phi-4": Layout("phi3", phi4, GPT | dict.fromkeys(("bos_token", "eos_token", "pad_token"), PHI4[0])),
        "SmolLM2": Layout(
            "llama",
            _byte_level("digits", QWEN, first=True),
            GPT | {"bos_token": QWEN[1], "eos_token": QWEN[2], "unk_token": QWEN[0]},
        ),
        "SmolLM3": Layout(
            "smollm3", _byte_level("llama3", QWEN, ignore_merges=True), FAST | {"bos_token": None, "eos_token": QWEN[2]}
        ),
        "Granite 3": Layout(
            "granite",
            _byte_level("digits", GRANITE, first=True),
            GPT | {"add_bos_token": False, "bos_token": GRANITE[0], "eos_token": GRANITE[0], "unk_token": GRANITE[0]},
        ),
        "OLMo 2": Layout(
            "olmo2", _byte_level("llama3", PHI4, first=False), GPT | {"bos_token": PHI4[0], "eos_token": PHI4[0]}
        ),
    }
