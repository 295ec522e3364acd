"""Text of synthesis: characters as F5-TTS cuts them, chunks at marks, voices by their names, broken vocabularies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.text.synthesis.chunks import ReferenceText, plan_chunks, split_text
from meltcore.text.synthesis.vocabulary import Vocabulary, characters, load_vocabulary
from meltcore.text.synthesis.voices import PUBLISHED_VOICES, find_voice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("नमस्ते hello", "नमस्ते hello"),
        ("कhello,world", "क hello, world"),
        ("it's “a” 'b';c", "it's \"a\" 'b',c"),
        ("10,000 3.5% v1.2.3", "10, 000 3.5% v1.2.3"),
        ("a-bc--d", "a- bc --d"),
        ("", ""),
    ],
)
def test_words_of_ascii_get_a_space(text: str, expected: str) -> None:
    assert "".join(characters(text)) == expected


def test_characters_are_those_of_the_published_segmentation() -> None:
    """With jieba, which IndicF5 uses; it is large, so it is installed by hand (docs/synthesis.md)."""
    jieba = pytest.importorskip("jieba")
    chance = random.Random(1)
    alphabet = [*"abZ12.-%+#&_,!'\":; éकಕ", "ि", "“", "।"]
    for _ in range(3000):
        text = "".join(chance.choices(alphabet, k=chance.randint(1, 12)))
        expected: list[str] = []
        for segment in jieba.cut(text.translate(str.maketrans({";": ",", "“": '"'}))):
            if segment.isascii() and len(segment) > 1 and expected and expected[-1] not in " :'\"":
                expected.append(" ")
            expected += segment
        assert characters(text) == expected, text


def test_chunks_end_at_marks_and_words() -> None:
    assert split_text("one. two, three! four", 11) == ["one. two,", "three! four"]
    assert split_text("नमस्ते। नमस्ते।", 24) == ["नमस्ते।", "नमस्ते।"]
    assert split_text("aaa bbb ccc ddd", 7) == ["aaa bbb", "ccc ddd"]
    assert split_text("abcdefgh", 3) == ["abc", "def", "gh"]
    assert split_text("कखग", 1) == ["क", "ख", "ग"]
    assert split_text("3.5 and e.g.this", 100) == ["3.5 and e.g.this"]


def test_no_letter_is_lost_and_no_chunk_is_too_long() -> None:
    chance = random.Random(2)
    for _ in range(300):
        text = "".join(chance.choices("abcकखग।.,!? ", k=chance.randint(1, 80)))
        chunks = split_text(text, 12)
        assert "".join("".join(chunks).split()) == "".join(text.split())
        assert all(0 < len(chunk.encode()) <= 12 for chunk in chunks), (text, chunks)


def test_duration_is_that_of_the_published_rule() -> None:
    vocabulary = Vocabulary(None, 100)
    reference = ReferenceText.read("नमस्ते दुनिया।", vocabulary, frames=281, seconds=3.0)
    assert reference.text == "नमस्ते दुनिया।.  "
    size = len(reference.text.encode())
    (chunk,) = plan_chunks("आज मौसम अच्छा है।", reference, vocabulary, speed=1.5)
    assert chunk.frames == 281 + int(281 / size * len("आज मौसम अच्छा है।".encode()) / 1.5)
    assert chunk.token_ids == vocabulary.encode("नमस्ते दुनिया।.  आज मौसम अच्छा है।")
    # So fast that the characters would not fit: one frame each
    (fast,) = plan_chunks("a" * 100, reference._replace(frames=30), vocabulary, speed=4.0)
    assert fast.frames == len(fast.token_ids) + 1 == len(reference.token_ids) + 101
    longest = max(chunk.frames for chunk in plan_chunks("शब्द है। " * 300, reference, vocabulary, speed=1.0))
    assert 0.8 * 25 * 281 / 3 < longest <= 25 * 281 / 3


@pytest.mark.parametrize("name", ["KAN_F (Happy)", "kan_f_happy_00001", "KAN_F_HAPPY", "kan f happy", "Kan_F(Happy)"])
def test_voice_is_found_by_any_of_its_names(name: str) -> None:
    assert find_voice(name, PUBLISHED_VOICES) == "KAN_F (Happy)"


def test_voices_with_numbers_are_told_apart_and_unknown_ones_refused() -> None:
    assert find_voice("Voice 2", ["voice1", "voice2"]) == "voice2"
    assert find_voice("A b", ["a-b", "A b"]) == "A b"
    with pytest.raises(RequestError, match=r"voice 'a_b' is not one of the model's: a-b, A b"):
        find_voice("a_b", ["a-b", "A b"])
    with pytest.raises(RequestError, match="give a reference"):
        find_voice("x", [])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "has no vocabulary"), (b"a\n \n", "must be a space"), (b" \na\na\n", "3 lines, of which 1 repeat"),
     (b"\xff", "cannot be read")],
)  # fmt: skip
def test_broken_vocabulary_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        load_vocabulary(Checkpoint("x", tmp_path, {}, {}), is_dummy=False)


def test_vocabulary_has_ids_by_line_and_spaces_for_unknown_characters(tmp_path: Path) -> None:
    (tmp_path / "named.txt").write_text(" \na\nक\n")
    vocabulary = load_vocabulary(Checkpoint("x", tmp_path, {"vocab_path": "named.txt"}, {}), is_dummy=False)
    assert (vocabulary.size, vocabulary.encode("aक b")) == (3, [2, 3, 1, 1])
