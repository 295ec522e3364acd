"""Grammars over every kind of tokenizer, and the limits of their compilation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher
from published_tokenizers import PUBLISHED, layout
from test_gguf_tokenizer import tokenizer_of, write_sentencepiece

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import BUNDLED_HYBRID, BUNDLED_MODEL, open_checkpoint
from meltcore.text.grammar import MAX_ERROR_CHARS, GrammarCompiler, literal
from meltcore.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

END = 3
RECORD = LLMatcher.grammar_from_json_schema(
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
)


def tokenizers(folder: Path) -> Iterator[tuple[str, Tokenizer]]:
    for name in PUBLISHED:
        yield name, Tokenizer(layout(name).backend)
    yield "synthetic", Tokenizer.synthetic_bytes(400)
    for model in (BUNDLED_MODEL, BUNDLED_HYBRID):
        yield model, Tokenizer.from_checkpoint(open_checkpoint(model, files="text"))
    gguf = write_sentencepiece(folder / "model.gguf", prefix=True)
    yield "GGUF", tokenizer_of(gguf)


def test_matcher_reads_the_bytes_of_each_tokenizer(tmp_path: Path) -> None:
    """The tokens of a text are accepted one by one, and the bytes of each token are those of the detokenizer."""
    for name, tokenizer in tokenizers(tmp_path):
        end = min(tokenizer.special_ids, default=0)
        compiler = GrammarCompiler(tokenizer, [end])
        for token_id in set(range(tokenizer.vocab_size)) - tokenizer.special_ids - {end}:
            expected = tokenizer.token_bytes(token_id)
            # 0xFF, which no UTF-8 text has, marks special tokens in llguidance.
            assert compiler._tokenizer.decode_bytes([token_id]) == expected.replace(b"\xff", b""), (name, token_id)
        matcher = compiler.matcher(LLMatcher.grammar_from_regex("(.|\n)*"))
        for token_id in tokenizer.encode('{"a": "Grüße, 世界 42"}', add_special_tokens=False):
            assert matcher.consume_token(token_id), (name, token_id)
        assert matcher.consume_token(end)


def test_kept_grammar_gives_matchers_of_their_own() -> None:
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])
    first, second = compiler.matcher(RECORD), compiler.matcher(RECORD)
    assert first.consume_token(ord("{"))
    assert not first.consume_token(ord("x"))
    assert second.consume_token(ord("{"))
    assert not second.is_error()
    assert first.is_error()


@pytest.mark.parametrize("ends", [[], [300, 9999]])
def test_model_without_an_end_token_is_refused(ends: list[int]) -> None:
    with pytest.raises(ConfigError, match="no end token"):
        GrammarCompiler(Tokenizer.synthetic_bytes(300), ends)


def test_large_schemas_compile_and_larger_ones_are_refused_by_limits() -> None:
    """A native compilation cannot be cancelled, so the limits of llguidance end it."""
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])

    def of(schema: dict[str, object]) -> str:
        return LLMatcher.grammar_from_json_schema(schema)

    assert compiler.check(of({"type": "string", "maxLength": 1_000_000})) == []
    with pytest.raises(ValueError, match="too big"):
        compiler.check(of({"enum": [f"value {index}" for index in range(100_000)]}))


def _objects(count: int) -> list[dict[str, object]]:
    return [
        {"type": "object", "properties": {f"k{index}": {"type": "integer"}}, "required": [f"k{index}"]}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}, '{"p1999":"x"}'),
        ({"anyOf": _objects(3000)}, '{"k2999":7}'),
    ],
    ids=["2,000 optional properties", "3,000 alternatives"],
)
def test_large_schemas_have_answers(schema: dict[str, object], answer: str) -> None:
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    assert compiler.check(grammar) == []
    matcher = compiler.matcher(grammar)
    assert matcher.consume_tokens([*answer.encode()]), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (LLMatcher.grammar_from_regex(r"[^\s\S]"), "^the grammar allows no answer$"),
        (LLMatcher.grammar_from_regex("[a&&b]"), "^the grammar allows no answer$"),
        (LLMatcher.grammar_from_json_schema({"$ref": "#"}), "^the grammar allows no answer$"),
        ('start: "a" start', "^the grammar is too complex: .* without an end$"),
        (
            f"start: {' | '.join(literal(f'choice {n}') for n in range(21_000))}",
            "^the grammar is too complex: .* alternatives",
        ),
    ],
)
def test_grammar_without_an_answer_is_refused(grammar: str, reason: str) -> None:
    """llguidance compiles it, and fails at the first mask or token, which would end the request with status 500."""
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])
    with pytest.raises(ValueError, match=reason):
        compiler.check(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: missing", "missing"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
        (LLMatcher.grammar_from_regex("(a"), "unclosed group"),
        (LLMatcher.grammar_from_json_schema({"uniqueItems": True}), "uniqueItems"),
        ('{"grammars": [{"json_schema": ' + '{"items": ' * 3000 + "{}" + "}" * 3000 + "}]}", "recursion limit"),
    ],
)
def test_refused_grammar_says_why_in_a_short_text(grammar: str, reason: str) -> None:
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])
    with pytest.raises(ValueError, match=reason) as error:
        compiler.check(grammar)
    assert len(str(error.value)) <= MAX_ERROR_CHARS + 3
    with pytest.raises(RequestError, match=reason):
        compiler.matcher(grammar)


def test_grammar_of_too_many_symbols_is_refused_before_it_reaches_an_engine() -> None:
    """llguidance's validation counts no symbols. Its compilation panics, which a client must not read."""
    compiler = GrammarCompiler(Tokenizer.synthetic_bytes(300), [END])
    too_big = "the grammar is too big: it has more than 65525 symbols"
    many = f'start: {"x? " * 70_000}\nx: "a"\n'
    with pytest.raises(ValueError, match=f"^{too_big}$"):
        compiler.check(many)
    with pytest.raises(RequestError, match=f"is refused: {too_big}$"):
        compiler.matcher(many)
    assert compiler.check(f'start: {"x " * 22_000}\nx: "a"\n') == []
