"""Incremental text equals the whole text, however it comes; stop strings end it wherever they fall."""

from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from places import SHARED
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.detokenizer import Detokenizer, text_to_continue
from meltcore.text.tokenizer import Tokenizer

QWEN = SHARED / "data" / "qwen3-tokenizer"
SPECIAL = 300  # <|end|>
THINK = 301  # <think>, added but not special
VOCAB = 302


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.synthetic_bytes(300)
    tokenizer._backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer._backend.add_tokens([AddedToken("<think> a", special=False)])
    return Tokenizer(tokenizer._backend)


@cache
def sentencepiece() -> Tokenizer:
    """The kind with a word mark and byte tokens, whose first space is dropped: text depends on the neighbors."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "s", "▁héllo", "☃", "."]
    raw = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw)


def pieces(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> list[str]:
    detokenizer = Detokenizer(tokenizer, params)
    return [*(detokenizer.add([token_id])[0] for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, VOCAB + 5)), st.booleans())
def test_byte_level_pieces_join_to_the_whole_text(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    assert tokenizer.is_byte_level
    found = pieces(tokenizer, ids, SamplingParams(skip_special_tokens=skip))
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
@given(st.text(), st.lists(st.integers(1, 6)))
def test_no_piece_of_good_text_holds_half_a_character(text: str, sizes: list[int]) -> None:
    ids = byte_level().encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(byte_level(), SamplingParams())
    shown = []
    while ids:
        size = sizes.pop() if sizes else 1
        shown.append(detokenizer.add(ids[:size])[0])
        ids = ids[size:]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)
    assert "".join(shown) == text


@given(st.lists(st.sampled_from(["▁the", "▁a", "s", "▁héllo", "☃", ".", "▁"])), st.booleans())
def test_sentencepiece_pieces_join_to_the_whole_text(words: list[str], as_bytes: bool) -> None:
    tokenizer = sentencepiece()
    assert not tokenizer.is_byte_level
    ids: list[int] = []
    for word in words:
        if as_bytes and not word.isascii() and "▁" not in word:
            ids += [1 + byte for byte in word.encode()]
        else:
            ids.append(tokenizer._backend.token_to_id(word))
    found = pieces(tokenizer, ids, SamplingParams())
    assert "".join(found) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in found)


@cache
def metaspace() -> Tokenizer:
    """Mistral's newer kind, whose decoder drops the first space itself; with a special token."""
    words = ["?", "▁", "▁the", "▁cat", "s", "."]
    raw = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.add_special_tokens([AddedToken("<s>")])
    return Tokenizer(raw)


@pytest.mark.parametrize("kind", [sentencepiece, metaspace])
@given(data=st.data())
def test_completion_goes_on_from_its_prompt_as_the_whole_reads(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    """Whatever the prompt ends with: a space, special tokens alone, nothing visible."""
    tokenizer = kind()
    first = 257 if kind is sentencepiece else 1  # after the bytes, which may be no text
    ids = st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=6)
    prompt, answer, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), prompt=prompt, continues_prompt=True)
    found = "".join([*(detokenizer.add([token_id])[0] for token_id in answer), detokenizer.flush()])
    before, whole = (tokenizer.decode(each, skip_special_tokens=skip) for each in (prompt, prompt + answer))
    assert before + found == whole


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, a byte each."""
    first = 0 if tokenizer.is_byte_level else 1
    return [first + byte for byte in text.encode()]


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@given(
    text=st.text("aé☃日🧊", min_size=1, max_size=5),
    data=st.data(),
    start=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 3)),
)
def test_completion_of_a_prompt_that_ends_within_a_character_has_the_character(
    kind: Callable[[], Tokenizer], text: str, data: st.DataObject, start: int, sizes: list[int]
) -> None:
    """Also where the prompt begins within one. What is echoed and the answer are the whole text together."""
    tokenizer = kind()
    ids = byte_ids(tokenizer, text)
    cut = data.draw(st.integers(0, len(ids)))
    # Byte tokens of SentencePiece are valid together or not at all, so a broken character would take the others along.
    first = min(start, cut, len(text[0].encode()) - 1) if tokenizer.is_byte_level else 0
    prompt, answer = ids[first:cut], ids[cut:]
    finished = text.encode()[first:cut].decode(errors="ignore")
    echo = text_to_continue(tokenizer, prompt, skip_special_tokens=True)
    assert echo.replace("\ufffd", "") == finished
    expected = text.encode()[first:].decode(errors="ignore").removeprefix(finished)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt=prompt, continues_prompt=True)
    found = ""
    while answer:
        size = sizes.pop() if sizes else 1
        found += detokenizer.add(answer[:size])[0]
        answer = answer[size:]
    found += detokenizer.flush()
    assert found.lstrip("\ufffd") == expected
    if first == 0:
        assert found == expected


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@pytest.mark.parametrize(("prompt", "answer", "text"), [("☃🧊", "🧊.", "🧊."), ("é日", "日☃", "日☃")])
@pytest.mark.parametrize("hidden", [False, True])
def test_first_character_of_an_answer_is_found_as_a_stop_string_too(
    kind: Callable[[], Tokenizer], prompt: str, answer: str, text: str, hidden: bool
) -> None:
    """Also with a hidden special token within the character."""
    tokenizer = kind()
    ids, rest = byte_ids(tokenizer, prompt), byte_ids(tokenizer, answer)
    size = len(answer[0].encode())
    special = [SPECIAL] if hidden and tokenizer.is_byte_level else []
    begun = [*ids[:-size], *ids[-size:][:1], *special, *ids[-size:][1:-1]]
    shown = Detokenizer(tokenizer, SamplingParams(), prompt=begun, continues_prompt=True)
    assert shown.add(rest[size - 1 :])[0] + shown.flush() == text
    stopped = Detokenizer(tokenizer, SamplingParams(stop=(text,)), prompt=begun, continues_prompt=True)
    assert stopped.add(rest[size - 1 :]) == ("", text)
    never = Detokenizer(tokenizer, SamplingParams(), prompt=begun, continues_prompt=True)  # it goes on otherwise
    assert (never.add([tokenizer.token_id(".") or 0])[0] + never.flush()).lstrip("\ufffd") == "."


@pytest.mark.parametrize("before", [b"", b"\x98\x83", "é☃".encode()])
def test_bytes_before_an_unfinished_character_do_not_break_it(before: bytes) -> None:
    """A prompt may be cut from a text at both ends."""
    prompt = [1 + byte for byte in before + "🧊".encode()[:2]]
    detokenizer = Detokenizer(sentencepiece(), SamplingParams(), prompt=prompt, continues_prompt=True)
    assert detokenizer.add([1 + byte for byte in "🧊".encode()[2:] + "☃".encode()])[0] == "🧊☃"


def test_space_after_a_prompt_begins_a_stop_string() -> None:
    tokenizer = sentencepiece()
    prompt, answer = [tokenizer.token_id("▁the") or 0], [tokenizer.token_id("▁a") or 0, tokenizer.token_id("s") or 0]
    stopped = Detokenizer(tokenizer, SamplingParams(stop=(" a",)), prompt=prompt, continues_prompt=True)
    assert stopped.add(answer) == ("", " a")
    chat = Detokenizer(tokenizer, SamplingParams(stop=(" a",)), prompt=prompt)  # an answer is a text of its own
    assert (chat.add(answer)[0] + chat.flush(), chat.matched_stop) == ("as", None)


def test_sentencepiece_garbage_is_not_held_for_ever() -> None:
    detokenizer = Detokenizer(sentencepiece(), SamplingParams())
    shown = "".join(detokenizer.add([1 + 0xE2])[0] for _ in range(40))
    assert len(shown) >= 32


def test_hidden_special_tokens_show_nothing_and_others_do() -> None:
    ids = [104, SPECIAL, THINK, 105]
    assert "".join(pieces(byte_level(), ids, SamplingParams())) == "h<think> ai"
    shown = "".join(pieces(byte_level(), ids, SamplingParams(skip_special_tokens=False)))
    assert shown == "h<|end|><think> ai"


def test_stop_string_over_tokens_is_never_shown_in_part() -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop=("\n\nQ:",)))
    shown = [detokenizer.add([token_id]) for token_id in b"ab\n\nQ:more"]
    assert [text for text, _ in shown] == ["a", "b", "", "", "", "", "", "", "", ""]
    assert shown[-1][1] == detokenizer.matched_stop == "\n\nQ:"
    assert detokenizer.token_count == 6
    assert detokenizer.flush() == ""


def test_text_that_only_began_a_stop_string_is_shown_in_the_end() -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop=("stop!",)))
    assert detokenizer.add(b"a sto")[0] == "a "
    assert detokenizer.flush() == "sto"


def test_stop_string_that_ends_within_min_tokens_does_not_count() -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop=("x",), min_tokens=3))
    assert detokenizer.add(b"xxxaxb") == ("xxxa", "x")
    assert detokenizer.token_count == 5
    at_the_limit = Detokenizer(byte_level(), SamplingParams(stop=("bc",), min_tokens=3))
    assert at_the_limit.add(b"abc") == ("abc", None)
    assert at_the_limit.flush() == ""


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown"),
    [
        (b"one\n\nQ: two", "\n\nQ:", 5, "one"),
        (b"ab</s>cd", "</s>", 3, "ab"),
        (b"aaa", "aa", 2, "a"),  # the second match begins within the first, which does not count
        ("né!".encode(), "né", 2, ""),  # the first two tokens end within the character
    ],
)
def test_stop_string_that_begins_within_min_tokens_is_found(
    text: bytes, stop: str, min_tokens: int, shown: str
) -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop=(stop,), min_tokens=min_tokens))
    pieces = [detokenizer.add([token_id]) for token_id in text]
    assert "".join(piece for piece, _ in pieces) == shown
    assert pieces[-1][1] == stop


@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
    st.booleans(),
)
def test_first_stop_string_that_ends_after_min_tokens_ends_the_text(
    text: str, stops: list[str], min_tokens: int, include: bool
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    detokenizer = Detokenizer(byte_level(), params)
    shown = "".join(detokenizer.add([token_id])[0] for token_id in text.encode()) + detokenizer.flush()
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if not ends:
        assert (shown, detokenizer.matched_stop) == (text, None)
        return
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert (detokenizer.matched_stop, detokenizer.token_count) == (stop, ends[0])
    # What was shown before the string could count stays shown.
    assert shown == text[: ends[0] if include else ends[0] - len(stop)]


@pytest.mark.skipif(not QWEN.exists(), reason="needs Qwen3's tokenizer beside the repository")
def test_qwen3_pieces_join_to_the_whole_text() -> None:
    tokenizer = Tokenizer.from_folder(QWEN)

    @given(st.lists(st.integers(0, 151_935), max_size=60), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        found = pieces(tokenizer, ids, SamplingParams(skip_special_tokens=skip))
        assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()
