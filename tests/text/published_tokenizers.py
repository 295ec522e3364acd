"""Tokenizers of the layouts in published_tokenizers.json, with small vocabularies trained on the texts of this file.

A layout is what the published tokenizer.json has beside its vocabulary, and tokenizer_config.json without the chat
template. Of the added tokens, the layout has the named ones and the first four of each kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

Settings = dict[str, Any]
PUBLISHED: dict[str, Settings] = json.loads(Path(__file__).with_suffix(".json").read_text())
FIRST_IDS = range(1000)  # of the added tokens that are the first of a vocabulary; the others are its last
SAMPLE = """
the that with it's DON'T we'll Hello hello world number 7 42 1234 3.14 def return x=1 {} [] // # ... ?!
Grüße naïve café cafe\u0301 नमस्ते दुनिया ಕನ್ನಡ தமிழ் 你好 世界 日本語 한국어 مرحبا שלום Ελληνικά привет
👩\u200d👩\u200d👧 🏳️\u200d🌈 😀 \u200b \ufeff \x07 \u0378 ▁ ▁▁ İ ﬁ Ⅷ ½
"""
WORDS = SAMPLE.split()
GAPS = [" ", " ", " ", "  ", "", "\n", "\t", "\r\n", " \n\n "]


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
    """A published layout with a small vocabulary: tokenizer.json, tokenizer_config.json, config.json's model_type."""

    model_type: str
    tokenizer: Settings
    settings: Settings

    @property
    def backend(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self.tokenizer))

    def write(self, folder: Path, settings: Settings | None = None) -> Path:
        """Write the files, with other settings in tokenizer_config.json; "absent" removes one."""
        settings = self.settings | (settings or {})
        settings = {name: value for name, value in settings.items() if value != "absent"}
        (folder / "tokenizer.json").write_text(json.dumps(self.tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type, "vocab_size": 4096}))
        return folder


@cache
def _pieces() -> Settings:
    """The model of a vocabulary of SentencePiece."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=450, show_progress=False, limit_alphabet=120)
    backend.train_from_iterator(texts(200, []), trainer)
    model: Settings = json.loads(backend.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {"vocab": [*byte_tokens, *sorted(model["vocab"], key=model["vocab"].get)], "merges": model["merges"]}


def _byte_level(published: Settings) -> Settings:
    """The model of a vocabulary of bytes, trained with the layout's own steps."""
    bare = {"added_tokens": [], "post_processor": None, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    backend = Tokenizer.from_str(json.dumps(published | bare))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts(200, []), trainer)
    model: Settings = json.loads(backend.to_str())["model"]
    return {"vocab": sorted(model["vocab"], key=model["vocab"].get), "merges": model["merges"]}


def templates(node: Any) -> Iterator[Settings]:
    """Each template of a post-processor."""
    if node is not None:
        for each in node.get("processors", [node]):
            if each["type"] == "TemplateProcessing":
                yield each


def layout(name: str) -> Layout:
    """A published layout, with the ids of its added tokens around a small vocabulary."""
    entry = json.loads(json.dumps(PUBLISHED[name]))
    published, settings = entry["tokenizer"], entry["tokenizer_config"]
    trained = _pieces() if published["model"].get("byte_fallback") else _byte_level(published)
    added = [token["content"] for token in published["added_tokens"] if token["id"] not in FIRST_IDS]
    first = [token["content"] for token in published["added_tokens"] if token["id"] in FIRST_IDS]
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys([*first, *trained["vocab"]]))}
    ids = {token: token_id for token_id, token in enumerate(dict.fromkeys([*vocab, *added]))}
    published["model"] |= {"vocab": vocab, "merges": trained["merges"]}
    for token in published["added_tokens"]:
        token["id"] = ids[token["content"]]
    for template in templates(published["post_processor"]):
        for token in template["special_tokens"].values():
            token["ids"] = [ids[text] for text in token["tokens"]]
    if "added_tokens_decoder" in settings:
        listed = settings["added_tokens_decoder"].values()
        settings["added_tokens_decoder"] = {str(ids[token["content"]]): token for token in listed}
    return Layout(entry["model_type"], published, settings)


@cache
def layouts() -> dict[str, Layout]:
    """The layouts by the name of their family."""
    return {name: layout(name) for name in PUBLISHED}
