"""Log-probabilities in both forms: token texts and bytes join to the text, and no token hides another."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from meltcore.protocol.generation import SequenceOutput, TokenLogprobs, pack_token_ids
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.serve.requests.protocol import StreamOptions
from meltcore.serve.tasks.generation.generation_ticket import Choice, Echo, GenerationTicket
from meltcore.serve.tasks.generation.responses import ChatResponseWriter, CompletionResponseWriter
from meltcore.text.tokenizer import Tokenizer

WORDS = ["▁cat", "cat", "▁", "▁▁", "s", "A", "日", "▁日", ".", "\n"]


def build(raw: tokenizers.Tokenizer) -> Tokenizer:
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(raw)


def vocabulary() -> dict[str, int]:
    return {word: at for at, word in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS])}


@cache
def llama2() -> Tokenizer:
    """Byte tokens, a space before every text, and a decoder that drops it."""
    raw = tokenizers.Tokenizer(models.BPE(vocabulary(), [], byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return build(raw)


@cache
def gemma() -> Tokenizer:
    """Byte tokens, and a decoder that drops nothing."""
    raw = tokenizers.Tokenizer(models.BPE(vocabulary(), [], byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return build(raw)


@cache
def metaspace() -> Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE(vocabulary(), [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return build(raw)


@cache
def byte_level() -> Tokenizer:
    return build(Tokenizer.synthetic_bytes(300)._backend)


ALL: list[Callable[[], Tokenizer]] = [llama2, gemma, metaspace, byte_level]
WITH_BYTES: list[Callable[[], Tokenizer]] = [llama2, gemma, byte_level]


def answer(
    tokenizer: Tokenizer,
    ids: list[int],
    tops: list[int],
    *,
    n: int = 0,
    chat: bool = False,
    prompt: list[int] | None = None,
    streamed: bool = False,
) -> dict[str, Any]:
    """The log-probabilities of an answer of `ids`, `tops` the most probable at each position. prompt: is echoed."""
    top = TokenLogprobs(-7.5, tops, [-1.0 - at for at in range(len(tops))])
    lists = [
        TokenLogprobs(top.top_logprobs[tops.index(each)], tops, top.top_logprobs) if each in tops else top
        for each in ids
    ]
    ticket = GenerationTicket(arrived_s=0.0, streaming=streamed)
    echo = None if prompt is None else Echo(tokenizer.decode(prompt), pack_token_ids(prompt), echo_only=False)
    params = SamplingParams(logprobs=n, prompt_logprobs=n)
    Choice(ticket, prompt or [1], params, tokenizer, None, echo, continues_prompt=not chat)
    of_prompt = None if prompt is None else [top] * (len(prompt) - 1)
    choice = ticket.choices[0]
    choice.accept(SequenceOutput("id", ids, "length", logprobs=lists, prompt_logprobs=of_prompt))
    writer = (ChatResponseWriter if chat else CompletionResponseWriter)(ticket, "m", StreamOptions())
    data = writer.event(choice).removeprefix(b"data: ") if streamed else writer.body(ticket)
    found: dict[str, Any] = json.loads(data)["choices"][0]["logprobs"]
    return found


def as_bytes(token: str) -> bytes:
    """The bytes that a token of the legacy form stands for."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(byte, 16) for byte in token.removeprefix("bytes:").split(r"\x")[1:])


@pytest.mark.parametrize("kind", [llama2, gemma])
@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("▁cat", " cat"),
        ("cat", "cat"),
        ("▁", " "),
        ("▁▁", "  "),
        ("▁日", " 日"),
        ("\n", "\n"),
        ("<0x0A>", "\n"),
        ("<0x20>", " "),
        ("<0xE6>", r"bytes:\xe6"),
        ("<0x97>", r"bytes:\x97"),
        ("</s>", "</s>"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_token_has_its_spaces_and_bytes(
    kind: Callable[[], Tokenizer], token: str, text: str, *, streamed: bool
) -> None:
    token_id, letter = kind().token_id(token), kind().token_id("A")
    assert token_id is not None
    assert letter is not None
    found = answer(kind(), [token_id], [token_id], n=1, streamed=streamed)
    assert found["tokens"] == [text]
    assert found["top_logprobs"] == [{text: -1.0}]
    chat = answer(kind(), [letter, token_id], [token_id], n=1, chat=True, streamed=streamed)["content"][1]
    assert bytes(chat["bytes"]) == as_bytes(text)
    assert chat["token"] == as_bytes(text).decode(errors="replace")
    assert chat["top_logprobs"] == [{name: chat[name] for name in ("token", "logprob", "bytes")}]


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(WITH_BYTES), text=st.text(st.sampled_from("cat sA日é\n.😀"), min_size=1, max_size=12))
def test_tokens_join_to_the_text(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text, add_special_tokens=False)
    after_a_word = tokenizer.encode("A" + text, add_special_tokens=False)[-len(ids) :] if kind is not llama2 else ids
    expected = " " + text if kind is llama2 else text
    tokens = answer(tokenizer, after_a_word, [1], n=1)["tokens"]
    assert b"".join(map(as_bytes, tokens)).decode() == expected
    content = answer(tokenizer, after_a_word, [1], chat=True)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == tokenizer.decode(after_a_word) == text


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(WITH_BYTES), text=st.text(st.sampled_from("cat sA日é\n."), min_size=1, max_size=12))
def test_tokens_of_an_echoed_prompt_join_to_the_prompt(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    start = tokenizer.token_id("<s>")
    assert start is not None
    ids = [start, *tokenizer.encode(text, add_special_tokens=False)]
    found = answer(tokenizer, [66], [1], n=1, prompt=ids)
    tokens = found["tokens"][:-1]
    assert tokens[0] == "<s>"
    assert b"".join(map(as_bytes, tokens[1:])).decode() == text
    assert all(token in tops for token, tops in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(ALL),
    sampled=st.integers(0, 266),
    tops=st.lists(st.integers(0, 266), min_size=5, max_size=5, unique=True),
    n=st.integers(0, 5),
)
def test_sampled_token_is_listed_beside_n_others_and_none_is_lost(
    kind: Callable[[], Tokenizer], sampled: int, tops: list[int], n: int
) -> None:
    found = answer(kind(), [sampled], tops, n=n)
    (listed,), (token,), (logprob,) = found["top_logprobs"], found["tokens"], found["token_logprobs"]
    assert listed[token] == logprob
    assert len(listed) == n + (sampled not in tops[:n])
    chat = answer(kind(), [sampled], tops, n=n, chat=True)["content"][0]
    assert len(chat["top_logprobs"]) == n


def test_same_text_of_two_tokens_keeps_the_value_of_the_sampled_one() -> None:
    letter, byte = llama2().token_id("A"), llama2().token_id("<0x41>")
    assert letter is not None
    assert byte is not None
    assert answer(llama2(), [byte], [letter, byte], n=2)["top_logprobs"] == [{r"bytes:\x41": -1.0, "A": -2.0}]
    assert answer(llama2(), [letter], [byte, letter], n=2)["top_logprobs"] == [{r"bytes:\x41": -1.0, "A": -2.0}]
    assert answer(llama2(), [5], [letter, byte], n=2)["top_logprobs"][0] == {
        "A": -1.0,
        r"bytes:\x41": -2.0,
        "\x04": -7.5,
    }


@pytest.mark.parametrize("kind", [llama2, metaspace])
@pytest.mark.parametrize("echoed", [False, True])
def test_offsets_count_the_space_between_prompt_and_completion(kind: Callable[[], Tokenizer], echoed: bool) -> None:
    tokenizer = kind()
    cat = tokenizer.token_id("▁cat")
    assert cat is not None
    prompt, ids = [cat], [cat, cat]
    ticket = GenerationTicket(arrived_s=0.0, streaming=False)
    echo = Echo(tokenizer.decode(prompt), pack_token_ids(prompt), echo_only=False) if echoed else None
    params = SamplingParams(logprobs=0, prompt_logprobs=0)
    Choice(ticket, prompt, params, tokenizer, None, echo, continues_prompt=True)
    top = TokenLogprobs(-1.0, [], [])
    output = SequenceOutput("id", ids, "length", logprobs=[top, top], prompt_logprobs=[] if echoed else None)
    ticket.choices[0].accept(output)
    choice = json.loads(CompletionResponseWriter(ticket, "m", StreamOptions()).body(ticket))["choices"][0]
    assert choice["text"] == ("cat cat cat" if echoed else " cat cat")
    assert choice["logprobs"]["text_offset"] == ([0, 3, 7] if echoed else [0, 4])


@pytest.mark.parametrize("kind", [llama2, metaspace, gemma])
@pytest.mark.parametrize("words", [["▁cat", "▁cat"], ["cat", "▁cat"], ["</s>", "▁cat", "s"], ["▁", "▁cat"]])
@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", "</s>"], ["<s>", "A"]])
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_join_to_the_text_after_a_prompt_without_text(
    kind: Callable[[], Tokenizer], words: list[str], prompt: list[str], *, streamed: bool
) -> None:
    """Decoders of SentencePiece drop the first space of a text; each token comes in an event of its own if streamed."""
    tokenizer = kind()
    ids = [tokenizer.token_id(word) for word in words]
    ticket = GenerationTicket(arrived_s=0.0, streaming=streamed)
    prompt_ids = [tokenizer.token_id(word) for word in prompt]
    assert None not in [*ids, *prompt_ids]
    params = SamplingParams(logprobs=1)
    Choice(ticket, prompt_ids, params, tokenizer, None, None, continues_prompt=True)
    choice = ticket.choices[0]
    writer, found = CompletionResponseWriter(ticket, "m", StreamOptions()), []
    for part in [[each] for each in ids] if streamed else [ids]:
        reason = "length" if part[-1] is ids[-1] else None
        logprobs = [TokenLogprobs(-1.0, [each], [-1.0]) for each in part]
        choice.accept(SequenceOutput("id", part, reason, logprobs=logprobs))
        data = writer.event(choice).removeprefix(b"data: ") if streamed else writer.body(ticket)
        found.append(json.loads(data)["choices"][0])
    shown = [token for each in found for token in each["logprobs"]["tokens"] if token != "</s>"]
    assert "".join(shown) == "".join(each["text"] for each in found)
    tops = [top for each in found for top in each["logprobs"]["top_logprobs"]]
    assert [list(top) for top in tops] == [[token] for each in found for token in each["logprobs"]["tokens"]]


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("broken", [b"\xf0", b"\xf0\x9f", b"\xe0\xa4", b"\xff\xff", b"\xf0\x9f\x99\x82\xc3"])
def test_offset_of_a_token_is_past_the_broken_character_before_it(kind: Callable[[], Tokenizer], broken: bytes) -> None:
    tokenizer = kind()
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}  # words last
    ids = [id_of[b"A"], *(id_of[bytes([byte])] for byte in broken), id_of[b"."], id_of[b"s"]]
    offsets = answer(tokenizer, ids, [0])["text_offset"]
    text = tokenizer.decode(ids)
    assert (offsets[0], offsets[-2], offsets[-1]) == (0, text.index("."), text.index("s"))
