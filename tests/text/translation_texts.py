"""Random sentences in all languages, with what the text steps look for: marks, digits, entities. Small tokenizers."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

from meltcore.text.languages import Language
from meltcore.text.translation.languages import TAGS

_BLOCKS = {
    "Devanagari": 0x900, "Bengali": 0x980, "Gurmukhi": 0xA00, "Gujarati": 0xA80, "Oriya": 0xB00, "Tamil": 0xB80,
    "Telugu": 0xC00, "Kannada": 0xC80, "Malayalam": 0xD00,
}  # fmt: skip
_RANGES = {
    **{script: range(block, block + 0x80) for script, block in _BLOCKS.items()},
    "Arabic": [*range(0x600, 0x700), *range(0xFB50, 0xFBC0), *range(0xFE80, 0xFEFD)],
    "Latin": [*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)],
    "Ol_Chiki": range(0x1C50, 0x1C80),
    "Meetei_Mayek": range(0xABC0, 0xAC00),
}
_MARKS = [
    ".", ",", "!", "?", ":", ";", "'", '"', "`", "´", "‘", "’", "“", "”", "„", "«", "»", "–", "—", "…", "...", "(", ")",
    "[", "]", "{", "}", "<", ">", "/", "\\", "-", "+", "*", "=", "~", "|", "#", "@", "&", "%", " %", "^", "_", "।", "॥",
    "۔", "؟", "،", "᱾", "꯫", "\t", "\r", "\xa0", "\u200b", "\u200c", "\u200d", "\ufeff", "\u00ad", "  ",
    "nº\xa0", "\xa0ºC", ",\xa0", "\xa0!", "''", "@RA", "@LA ", " ् ", "K", "ſ",
]  # fmt: skip
_ENTITIES = [
    "a.b-c@mail.example.org", "x@y.co|m", "https://www.example.org/a/b?c=1&d=2#e", "www.example.com", "a.b.", "x..y.z",
    "example.org/path/", "ftp://f.g/h", "e.g.", "12.5%", "10 - 20%", "~5%", "50 60%", "12/05/2023", "1,000,000",
    "10:30", "5:30", "3-4", "2023-24", "98765 43210", "+91-98765", "#tag", "user@handle", "|x", "5'10", "1.2.3%",
    "12.%", "1..2%", "A:b", "7 : 8", "USD:5", "1,5", "don't", "o'clock", "Rs. 500", "U.S.A.", "Mr.", "3.14159", "100",
    "1000", "12 34 56", "1 , 2 , 3", "12.05.2023", "1+2", "1/2/3+4.5", "10:30:45.5",
]  # fmt: skip


def random_sentence(language: Language, chance: random.Random, num_parts: int = 12) -> str:
    """Return a sentence of about `num_parts` words of random letters, with marks and entities between and in them."""
    letters = [chr(code) for code in _RANGES[language.script] if unicodedata.category(chr(code)) != "Cn"]
    latin = [chr(code) for code in _RANGES["Latin"]]

    def word() -> str:
        alphabet = latin if chance.random() < 0.1 else letters
        return "".join(chance.choices(alphabet, k=chance.randint(1, 8)))

    parts = []
    for _ in range(chance.randint(1, num_parts)):
        kind = chance.random()
        part = word() if kind < 0.6 else chance.choice(_MARKS) if kind < 0.85 else chance.choice(_ENTITIES)
        if kind < 0.1:
            part += chance.choice(_MARKS)
        parts += [part, " " if chance.random() < 0.85 else ""]
    return "".join(parts)


def write_tokenizer(folder: Path, texts: list[str]) -> dict[str, int]:
    """Train a small tokenizer in the published layout. Its ids are in another order than those of SentencePiece."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    (folder / "corpus.txt").write_text("\n".join(texts))
    for side in ("SRC", "TGT"):
        SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"), model_prefix=str(folder / side), vocab_size=400, minloglevel=2,
            hard_vocab_limit=False,
        )  # fmt: skip
        (folder / f"{side}.model").rename(folder / f"model.{side}")
        model = SentencePieceProcessor(model_file=str(folder / f"model.{side}"))
        pieces = sorted({model.id_to_piece(i) for i in range(model.vocab_size())} - {"<s>", "</s>", "<unk>"})
        words = ["<s>", "<pad>", "</s>", "<unk>", *sorted(TAGS), *pieces]
        (folder / f"dict.{side}.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    dictionary: dict[str, int] = json.loads((folder / "dict.SRC.json").read_text())
    return dictionary
