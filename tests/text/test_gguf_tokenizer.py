"""Tokenizers and chat templates of GGUF files: those of the source, refusals by name, and the time of a start."""

from __future__ import annotations

import random
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import TokenType
from gguf_tools import add_tokenizer, export_tokenizer, finish
from places import SHARED
from test_gguf_file import ARRAY, TEXT, file_of
from test_gguf_file import text as packed

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, Checkpoint, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.checkpoints.gguf.gguf_tokens import read_token_ids
from meltcore.text import gguf_tokenizer
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.gguf_tokenizer import broken_reasons, merges_from_scores, special_tokens
from meltcore.text.tokenizer import Tokenizer, byte_alphabet

QWEN = SHARED / "data" / "qwen3-tokenizer"
TEXTS = [
    "",
    "Hello  world,\tit's DON'T \r\n\r\n  123 4567.89\n",
    "def f(x):\n    return x  # nothing\n" * 9,
    "日本語とかなカナ, 한국어, Ελληνικά, עברית, हिन्दी, ಕನ್ನಡ",
    "e\u0301 and \u00e9, \u1e9b\u0323, 👩‍👩‍👧 🏳️‍🌈, \u200b\ufeff\x00\x7f",
    "<|im_start|>user\nWhat is 7 * 8?<|im_end|>\n<think>\n\n</think><|endoftext|> <tool_call>{}</tool_call>",
    "<|im_start|> <|im_end|",
]
NORMAL, CONTROL, UNKNOWN, USER, BYTE = 1, 3, 2, 4, 6
LETTERS = [*byte_alphabet(), "ab"]
BYTES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
MANY = [f"{index:0512d}" for index in range(8200)]


def needed(model: str, without: str = "") -> tuple[list[str], list[int]]:
    """Return tokens that a vocabulary needs, with their types: bytes, and an unknown token beside SentencePiece's."""
    if model == "llama":
        return BYTES, [UNKNOWN, *[BYTE] * 256]
    letters = [each for each in byte_alphabet() if each not in without]
    return letters, [NORMAL] * len(letters)


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(Checkpoint("m", path.parent, {}, {}, GGUFModel(path)))


def check_equal(ours: Tokenizer, source: Tokenizer) -> None:
    generator = random.Random(0)
    drawn = ["".join(map(chr, generator.choices(range(1, 0x3000), k=40))) for _ in range(30)]
    for text in TEXTS + drawn:
        ids = source.encode(text, add_special_tokens=True)
        assert ours.encode(text, add_special_tokens=True) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == source.decode(ids, skip_special_tokens=skip)
    assert (ours.vocab_size, ours.is_byte_level) == (source.vocab_size, True)
    assert [ours.token_bytes(i) for i in range(ours.vocab_size)] == [
        source.token_bytes(i) for i in range(ours.vocab_size)
    ]


def test_bundled_vocabulary_tokenizes_as_its_source(tmp_path: Path) -> None:
    folder = open_checkpoint(BUNDLED_MODEL, files="text").folder
    ours, source = tokenizer_of(export_tokenizer(folder, tmp_path / "m.gguf")), Tokenizer.from_folder(folder)
    check_equal(ours, source)
    assert ours.special_ids == source.special_ids


@pytest.mark.slow
@pytest.mark.skipif(not QWEN.exists(), reason="needs Qwen3's tokenizer beside the repository")
def test_qwen3_vocabulary_tokenizes_as_its_source(tmp_path: Path) -> None:
    """With the 151,936 rows of the published embedding, of which the last 267 are no tokens."""
    ours = tokenizer_of(export_tokenizer(QWEN, tmp_path / "m.gguf", rows=151_936))
    check_equal(ours, Tokenizer.from_folder(QWEN))


def test_llama3_splits_digits_by_three_and_keeps_words_that_are_tokens(tmp_path: Path) -> None:
    """Equal to a tokenizer.json with Llama 3's published settings."""
    folder = open_checkpoint(BUNDLED_MODEL, files="text").folder
    file = export_tokenizer(folder, tmp_path / "m.gguf", pre="llama-bpe")
    backend = tokenizer_of(file)._backend
    assert [text for text, _ in backend.pre_tokenizer.pre_tokenize_str("x12345 6")] == ["x", "123", "45", "Ġ", "6"]
    assert backend.normalizer is None
    assert backend.model.ignore_merges


def test_tekken_ends_words_before_capitals(tmp_path: Path) -> None:
    """As Mistral's published tokenizer does, and llama.cpp: digits alone, slashes and line ends behind signs."""
    folder = open_checkpoint(BUNDLED_MODEL, files="text").folder
    backend = tokenizer_of(export_tokenizer(folder, tmp_path / "m.gguf", pre="tekken"))._backend
    splits = {
        "helloWorld": ["hello", "World"],
        "HTMLPage": ["HTMLPage"],
        "don't SHOUT": ["don", "'t", "ĠSHOUT"],
        "x12 a//\n/b": ["x", "1", "2", "Ġa", "//Ċ/", "b"],
        "  a\r\n\n b": ["Ġ", "Ġa", "čĊĊ", "Ġb"],
    }
    for text, words in splits.items():
        assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words
    assert backend.normalizer is None
    assert backend.model.ignore_merges


def sentencepiece_vocabulary(num_words: int) -> tuple[list[str], list[int], list[float]]:
    """Return tokens, types and scores: specials, bytes, characters, words of distinct letters in random order."""
    generator = random.Random(1)
    letters = ["▁", *"abcdefghijkl", "é", "日"]
    words = list(letters)
    while len(words) < num_words:
        word = generator.choice(words) + generator.choice(words)
        if len(word) <= 6 and len(set(word)) == len(word) and word not in words:
            words.append(word)
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "\n\n", *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER, USER, *[NORMAL] * len(words)]
    order = list(range(len(words)))
    generator.shuffle(order)
    return tokens, types, [0.0] * 261 + [-float(each) for each in order]


def write_sentencepiece(path: Path, *, prefix: bool, num_words: int = 300, **metadata: Any) -> Path:
    tokens, types, scores = sentencepiece_vocabulary(num_words)
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokens=tokens, types=types, model="llama", pre="default", scores=scores, eos=2)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(prefix)
    for key, value in metadata.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    return finish(writer, path)


def joined_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's rule, one join at a time: the neighbors that give the token of highest score."""
    score_of = dict(zip(tokens, scores, strict=True))
    parts = list(text)
    while True:
        joins = [(score_of[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score_of]
        if not joins:
            break
        first = -max(joins)[1]
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_give_the_tokens_of_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    tokens, _, scores = sentencepiece_vocabulary(300)
    ours = tokenizer_of(write_sentencepiece(tmp_path / "m.gguf", prefix=prefix))
    generator = random.Random(2)
    for _ in range(200):
        text = "a" + "".join(generator.choices("abcdefghijkl é日ß🏳", k=generator.randint(1, 30))).rstrip()
        while "  " in text:
            text = text.replace("  ", " ")
        spaced = (("▁" if prefix else "") + text).replace(" ", "▁")
        expected = joined_by_score(spaced, tokens, scores)
        assert ours.encode(text, add_special_tokens=True) == [1, *expected]  # BOS by default
        assert ours.decode(expected) == text
    assert ours.special_ids == {0, 1, 2}
    assert not ours.is_byte_level


def test_user_defined_tokens_are_matched_whole(tmp_path: Path) -> None:
    ours = tokenizer_of(write_sentencepiece(tmp_path / "m.gguf", prefix=False, add_bos_token=False, add_eos_token=True))
    double_space, newlines = 259, 260
    ids = ours.encode("a  b\n\nc</s>", add_special_tokens=True)
    assert [ours.decode([i], skip_special_tokens=False) for i in ids] == ["a", "  ", "b", "\n\n", "c", "</s>", "</s>"]
    assert (ids[1], ids[3]) == (double_space, newlines)
    assert ours.decode(ids) == "a  b\n\nc"


def test_end_tokens_and_template_come_from_the_metadata(tmp_path: Path) -> None:
    folder = open_checkpoint(BUNDLED_MODEL, files="text").folder
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer_config.json").write_text('{"eos_token": "x", "chat_template": "other"}')
    for name, has_template in (("with", True), ("without", False)):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "qwen3")
        for add, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1), ("head_count", 2)):
            getattr(writer, f"add_{add}")(value)
        writer.add_feed_forward_length(48)
        writer.add_layer_norm_rms_eps(1e-6)
        tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
        add_tokenizer(writer, tokens=tokens, types=[NORMAL, CONTROL, CONTROL, NORMAL, CONTROL], merges=["a a"])
        writer.add_bos_token_id(0)
        writer.add_eot_token_id(4)
        if has_template:
            writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
        writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
        writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, dtype=np.float32))
        checkpoint = open_checkpoint(str(finish(writer, tmp_path / f"{name}.gguf")), files="text")
        # The end token, the end-of-turn token, and others by their texts, of whatever type.
        assert checkpoint.eos_token_ids == (1, 4, 2, 3)
        template = ChatTemplate.from_checkpoint(checkpoint)
        if has_template:
            assert template.render([{"role": "user", "content": "hi"}]) == "ahi</s>"
        else:
            assert not template.is_usable
        named = open_checkpoint(str(tmp_path / f"{name}.gguf"), files="text", tokenizer=str(folder))
        assert named.eos_token_ids == (1, 4, 2, 3)  # the bundled tokenizer's <|im_end|> is 2
        assert Tokenizer.from_checkpoint(named).vocab_size == Tokenizer.from_folder(folder).vocab_size
        theirs, own = ChatTemplate.from_checkpoint(named), ChatTemplate.from_folder(folder)
        assert own is not None
        message = [{"role": "user", "content": "hi"}]
        assert theirs.render(message) == own.render(message)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("wrong", [NORMAL, USER, UNKNOWN, 0, 99, None])
def test_turn_tokens_of_another_type_are_control_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, wrong: int | None
) -> None:
    """As llama.cpp overrides them. None: the file has no types at all."""
    turns = ["<|im_start|>", "<|im_end|>", "[INST]", "<|user|>", "<|stop|>"]
    words, kinds = needed(model, without="a<>")
    tokens = [*words, "a", "<", ">", *turns, "<b>"]
    types = [*kinds, NORMAL, NORMAL, NORMAL, *[wrong or NORMAL] * len(turns), NORMAL]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    parts = {"merges": ["< >"]} if model == "gpt2" else {"scores": [-float(i) for i in range(len(tokens))]}
    if model == "gpt2":
        tokens.append("<>")
        types.append(NORMAL)
    first = len(words) + 3
    add_tokenizer(writer, tokens=tokens, types=types, model=model, eos=first + 4, **parts)  # <|stop|>, by its id
    if wrong is None:
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    path = finish(writer, tmp_path / "m.gguf")
    ours = tokenizer_of(path)
    text = "".join(f"a{token}" for token in turns)
    ids = [token_id for token_id in ours.encode(text, add_special_tokens=False) if token_id in ours.special_ids]
    assert ids == [first + at for at in range(len(turns))]
    assert first + len(turns) not in ours.special_ids  # <b> is a word like others
    changed = turns[:-1] if wrong == UNKNOWN else turns  # a stated token of type UNKNOWN is special as it is
    assert f"m.gguf: control tokens, though of another type: {', '.join(changed)}\n" in capsys.readouterr().err
    found = read_token_ids(GGUFModel(path), tokens)["eos_token_id"]
    assert found == [first + 4, first + 1]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("has_types", [True, False])
def test_normal_tokens_around_reasoning_are_read_whole(tmp_path: Path, model: str, has_types: bool) -> None:
    words, kinds = needed(model, without="<>/thinka")
    tokens = [*words, *"<>/thinka", "th", "<think>", "</think>"]
    types = [*kinds, *[NORMAL] * (len(tokens) - len(words))]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    parts = {"merges": ["t h"]} if model == "gpt2" else {"scores": [-float(i) for i in range(len(tokens))]}
    add_tokenizer(writer, tokens=tokens, types=types, model=model, **parts)
    if not has_types:
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    ours = tokenizer_of(finish(writer, tmp_path / "m.gguf"))
    marks = [len(tokens) - 2, len(tokens) - 1]
    assert [each for each in ours.encode("a<think>a</think>", add_special_tokens=False) if each in marks] == marks
    assert ours.special_ids.isdisjoint(marks)


@pytest.mark.parametrize("value", [259, 999_999, 2**32 - 1, -1])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding"])
def test_special_token_beyond_the_vocabulary_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: int
) -> None:
    """As in llama.cpp, with one line. A turn then ends at the tokens that are known by their texts."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    words, kinds = needed("gpt2", without="ab")
    tokens, types = [*words, "a", "b", "ab", "<|im_end|>", "<s>"], [*kinds, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL]
    joined, end, start = len(words) + 2, len(words) + 3, len(words) + 4
    add_tokenizer(writer, tokens=tokens, types=types, merges=["a b"], eos=end)
    writer.add_bos_token_id(start)
    writer.add_add_bos_token(True)
    writer.kv_data[0].pop(f"tokenizer.ggml.{name}_token_id", None)
    writer.add_key_value(f"tokenizer.ggml.{name}_token_id", value, gguf.GGUFValueType.INT64)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    model = GGUFModel(finish(writer, tmp_path / "m.gguf"))
    ours = tokenizer_of(model.path)
    assert ours.encode("ab", add_special_tokens=True) == ([joined] if name == "bos" else [start, joined])
    note = f"special tokens beyond the vocabulary of 259: {name}_token_id {value} (taken: None)"
    assert capsys.readouterr().err == f"meltcore: {model.path}: {note}\n"
    assert read_token_ids(model, model.texts("tokenizer.ggml.tokens"))["eos_token_id"] == [end]
    assert (f"{name}_token" in special_tokens(model)) is False


def test_sentencepiece_has_default_ids_for_those_beyond_its_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = {"bos_token_id": 561, "eos_token_id": 600, "unknown_token_id": 2**31 - 1, "eot_token_id": -1}
    path = write_sentencepiece(tmp_path / "m.gguf", prefix=False, **beyond)
    ours, plain = tokenizer_of(path), tokenizer_of(write_sentencepiece(tmp_path / "n.gguf", prefix=False))
    assert ours.encode("ab é", add_special_tokens=True) == plain.encode("ab é", add_special_tokens=True)
    notes = "bos_token_id 561 (taken: 1), eos_token_id 600 (taken: 2), eot_token_id -1 (taken: None)"
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith(
        f": special tokens beyond the vocabulary of 561: {notes}, unknown_token_id 2147483647 (taken: 0)"
    )
    assert others == []
    texts = special_tokens(GGUFModel(path))
    assert texts == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", [NORMAL, USER, CONTROL])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_empty_tokens_have_ids_that_no_text_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, kind: int, count: int
) -> None:
    sentencepiece = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"[EMPTY]0123456789x"]
    words = [*byte_alphabet()] if model == "gpt2" else sentencepiece
    types = [NORMAL] * 256 if model == "gpt2" else [UNKNOWN, *[BYTE] * 256, *[NORMAL] * 19]
    tokens = [*words, *[""] * count, "</s>"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    tokens += ["[E"] if model == "gpt2" else []
    parts: dict[str, Any] = {"merges": ["[ E"], "pre": "llama-bpe"}  # which looks up whole words
    parts = parts if model == "gpt2" else {"scores": [-float(i) for i in range(len(tokens))]}
    types = [*types, *[kind] * count, CONTROL, *[NORMAL] * (len(tokens) - len(types) - count - 1)]
    add_tokenizer(writer, tokens=tokens, types=types, model=model, eos=len(words) + count, **parts)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    path = finish(writer, tmp_path / "m.gguf")
    ours = tokenizer_of(path)
    ids = list(range(len(words), len(words) + count))
    note = "empty tokens, which no text is encoded to, by id: " + ", ".join(map(str, ids[:5]))
    note += ", and 2 more" if count == 7 else ""
    assert capsys.readouterr().err == f"meltcore: {path}: {note}\n"
    for each in ids:
        text = ours.decode([each], skip_special_tokens=False)
        assert text == f"[EMPTY {each}]"
        for around in (text, f" {text}", f"x{text}</s>", text.replace(" ", "▁"), text.replace(" ", "Ġ")):
            assert set(ids).isdisjoint(ours.encode(around, add_special_tokens=True)), around
    assert broken_reasons(path) == []


def test_named_tokenizer_replaces_that_of_a_folder(tmp_path: Path) -> None:
    bundled = open_checkpoint(BUNDLED_MODEL, files="text").folder
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path), files="text", tokenizer=str(bundled))
    assert Tokenizer.from_checkpoint(checkpoint).vocab_size == Tokenizer.from_folder(bundled).vocab_size
    assert checkpoint.eos_token_ids == (2,)
    assert ChatTemplate.from_checkpoint(checkpoint).is_usable
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.from_checkpoint(open_checkpoint(str(tmp_path), files="text", tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: gpt2, llama .*--tokenizer"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2'; supported: llama-bpe, .*qwen2, .*smollm.*--tokenizer"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab'; a merge is two tokens"),
        ({"merges": ["a zz"]}, "the tokenizer cannot be built: .*zz"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"model": "llama", "scores": None}, "lacks tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [1.0]}, "tokenizer.ggml.scores has 1 values for 258 tokens"),
        # Values of another type, which no truth or number may be made of.
        *(
            ({"model": model, key: value}, f"tokenizer.ggml.{key} must be true or false; got {shown}")
            for model in ("gpt2", "llama")
            for key, value, shown in (
                ("add_bos_token", "false", "'false'"),
                ("add_bos_token", [False], "an array of 1 BOOL"),
                ("add_eos_token", 0, "0"),
                ("add_space_prefix", "false", "'false'"),
            )
            if model == "llama" or key != "add_space_prefix"
        ),
        ({"model": "llama", "scores": [float("nan")] * 258}, "scores must be finite numbers; got nan for token 0"),
        ({"model": "llama", "scores": [0.0] * 257 + [float("inf")]}, "must be finite numbers; got inf for token 257"),
        ({"token_type": [float("nan")] * 257}, "token_type must be whole numbers; got an array of 257 FLOAT32"),
        ({"token_type": [1.0] * 257}, "token_type must be whole numbers; got an array of 257 FLOAT32"),
        ({"token_type": [99] * 257}, "token_type must be from 1 to 6; got 99 for token 0"),
        ({"token_type": [1] * 256 + [0]}, "token_type must be from 1 to 6; got 0 for token 256"),
        ({"tokens": ["a"], "token_type": [1]}, "has 1 tokens and none for 95 of the 96 characters of plain ASCII"),
        ({"tokens": LETTERS[1:], "token_type": [1] * 256}, "has 256 tokens and none for 1 of the 96 .*such as '!'"),
        ({"model": "llama", "tokens": ["<unk>"], "token_type": [2]}, "has 1 tokens and none for 96 of the 96"),
        # What would take minutes.
        ({"tokens": [*LETTERS, "x" * 513], "token_type": [1] * 258}, "a token, id 257, of 513 characters; .* 512$"),
        ({"model": "llama", "tokens": [*BYTES, "x" * 200_000]}, "a token, id 257, of 200000 characters"),
        ({"tokens": [*LETTERS, *MANY], "token_type": [1] * 8457}, "tokens of [0-9]+ characters; the limit is 4194304"),
        (
            {"model": "llama", "tokens": [*BYTES, *MANY], "token_type": [1] * 8457},
            "tokens of [0-9]+ characters; the limit is 4194304",
        ),
        ({"tokens": [*LETTERS, *MANY[:2100]], "token_type": [1] * 257 + [3] * 2100}, "control .* limit is 1048576"),
        ({"model": "llama", "tokens": [*BYTES, *MANY[:2100]], "token_type": [4] * 2357}, "user-defined .* is 1048576"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_built_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"model": "gpt2", "pre": "qwen2", "tokens": LETTERS, "merges": ["a b"]}
    if changes.get("model") == "llama":
        values = {"tokens": [*BYTES, "ab"], "token_type": [UNKNOWN, *[BYTE] * 256, NORMAL], "scores": [0.0] * 258}
    path = write_values(tmp_path / "m.gguf", values | changes)
    with pytest.raises(ConfigError, match=message) as error:
        tokenizer_of(path)
    assert "m.gguf" in str(error.value)
    if "supported: " not in message:  # `serve` refuses it before a process starts
        assert broken_reasons(path) == [str(error.value).removeprefix(f"{path}: ").removeprefix(f"{path} ")]


@pytest.mark.parametrize("model", [None, "gpt2", "llama"])
def test_file_without_tokens_is_refused_by_name(tmp_path: Path, model: str | None) -> None:
    path = write_values(tmp_path / "m.gguf", {"model": model})
    with pytest.raises(ConfigError, match=r"m\.gguf lacks tokenizer\.ggml\.tokens; name a tokenizer with --tokenizer"):
        tokenizer_of(path)
    assert broken_reasons(path) == [], "which the reader of the file reports"


def write_values(path: Path, values: dict[str, Any]) -> Path:
    """Write a file with these values of the tokenizer. None leaves a key out."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in values.items():
        if value is not None:
            kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), dtype=np.float32))
    return finish(writer, path)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_vocabulary_of_no_tokens_is_named(tmp_path: Path, model: str) -> None:
    path = tmp_path / "m.gguf"
    values = [
        packed(f"tokenizer.ggml.{key}") + struct.pack("<I", TEXT) + packed(value)
        for key, value in (("model", model), ("pre", "qwen2"))
    ]
    tokens = packed("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, TEXT, 0)
    path.write_bytes(file_of(*values, tokens, values=3))
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.tokens has 0 tokens and none for 96 of the 96"):
        tokenizer_of(path)


def test_vocabulary_without_bytes_that_texts_rarely_have_is_read(tmp_path: Path) -> None:
    """As SmolLM2's, which lacks 21. The file has neither types nor flags."""
    lacking = (*range(0xF1, 0x100), 0xC0, 0xC1, 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)
    tokens = [*(letter for letter, byte in byte_alphabet().items() if byte not in lacking), "ab"]
    values = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": ["a b"]}
    path = write_values(tmp_path / "m.gguf", values)
    assert broken_reasons(path) == []
    ids = tokenizer_of(path).encode("ab!\n", add_special_tokens=True)
    assert ids == [tokens.index(each) for each in ("ab", "!", "Ċ")]


@pytest.mark.parametrize("letters", ["x", "xyz"])
def test_work_for_merges_of_scores_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: str) -> None:
    """Each token of n equal letters splits into two tokens in n - 1 ways."""
    chains = [letter * count for letter in letters for count in range(1, 65)]
    values = {"model": "llama", "tokens": [*BYTES, *chains], "scores": [0.0] * (257 + len(chains))}
    path = write_values(tmp_path / "m.gguf", values)
    vocab = {token: token_id for token_id, token in enumerate(chains)}
    given = vocab, np.zeros(len(chains)), np.full(len(chains), NORMAL)
    assert len(merges_from_scores(*given)) == len(letters) * sum(range(64))
    assert tokenizer_of(path).encode("x" * 64, add_special_tokens=False)
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 100)
    assert 100 < len(merges_from_scores(*given)) < 100 + 64
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.tokens gives more than 100 merges"):
        tokenizer_of(path)


@pytest.mark.slow
def test_start_with_262144_tokens_takes_seconds_and_not_minutes(tmp_path: Path) -> None:
    """Gemma's size: the header is read, merges follow from scores, and the bytes of all tokens are looked up."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256]
    letters = ["▁", *map(chr, range(ord("a"), ord("z") + 1)), *map(chr, range(0x900, 0x970))]
    words, position = list(letters), 0
    while len(tokens) + len(words) < 262_144:  # each word begins with another one, as in a trained vocabulary
        words += [words[position] + letter for letter in letters[: 3 + position % 5]]
        position += 1
    words = words[: 262_144 - len(tokens)]
    tokens, types = tokens + words, types + [NORMAL] * len(words)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    scores = [-float(i) for i in range(len(tokens))]
    add_tokenizer(writer, tokens=tokens, types=types, model="llama", pre="default", scores=scores)
    writer.add_add_space_prefix(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    file = finish(writer, tmp_path / "m.gguf")
    started = time.process_time()
    tokenizer = tokenizer_of(file)
    for token_id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(token_id)
    assert tokenizer.vocab_size == 262_144
    assert time.process_time() - started < 20.0  # 3 to 6 s of CPU time, the more the busier the other core is
    assert TokenType.BYTE == BYTE
