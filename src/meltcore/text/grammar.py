"""Compiles grammars for a vocabulary, with the `llguidance` library.

A grammar is a text that llguidance reads: Lark, or JSON that holds a JSON Schema. Work of the library is bounded by
its limits instead of by time, since a native compilation cannot be cancelled. It never holds the GIL while it compiles.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 2**21
MAX_ERROR_CHARS = 400
_MAX_SYMBOLS = 2**16 - 11  # llguidance counts them in 16 bits, and panics above
# A compilation does not meet the limits of an answer. So a check follows the grammar for this many tokens, which pass
# the head of a tool call. Most masks take 5 to 200 us.
_FOLLOWED_TOKENS = 32
# Compiled grammars that are kept. A copy costs about 20 us, where a compilation takes 1.5 ms to seconds.
_MAX_KEPT = 64
# They bound what a grammar may cost: fuel for the first regular expressions (50,000 units a millisecond), for one mask
# (14,000 units a millisecond), Earley items of one mask, states (1 to 2 KB each) and symbols.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=20_000,  # an object of 2,000 optional properties needs 7,999
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # an error goes to the client, without the state of the parser
)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Its methods may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Iterable[int]) -> None:
        """Read the vocabulary, which holds the GIL for about 10 us per token.

        Raises ConfigError if llguidance cannot read the tokenizer, or if the model has no end token.
        """
        self.num_ids = tokenizer.vocab_size
        ends = sorted(token_id for token_id in end_token_ids if token_id < self.num_ids)
        if not ends:
            raise ConfigError("structured output is not possible: the model names no end token of its vocabulary")
        try:
            self._tokenizer = LLTokenizer(tokenizer.serialize(), n_vocab=self.num_ids, eos_token=ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            raise ConfigError(f"structured output is not possible with this tokenizer: {shorten(error)}") from error
        self._ends = sum(1 << token_id for token_id in ends)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, allow_missing: bool) -> GrammarCompiler:
        """Return the compiler for a checkpoint's tokenizer. Raises ConfigError, also as `Tokenizer` does."""
        return cls(Tokenizer.from_checkpoint(checkpoint, allow_missing=allow_missing), checkpoint.eos_token_ids)

    def check(self, grammar: str) -> list[str]:
        """Return what llguidance warns of: the parts of a JSON Schema that the grammar does not enforce.

        Raises ValueError with the reason if llguidance refuses the grammar, or cannot follow an answer's first tokens.
        """
        matcher = self._compile(grammar)
        for _ in range(_FOLLOWED_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~self._ends
            if not allowed or matcher.is_stopped() or not matcher.consume_token((allowed & -allowed).bit_length() - 1):
                break
        if "NoExtensionBias" in matcher.get_error():
            raise ValueError("the grammar allows no answer")
        if matcher.is_error():
            raise ValueError(
                "the grammar is too complex: it has too many alternatives in one place, or forces a text without an end"
            )
        return [shorten(message) for message in matcher.get_grammar_warnings()]

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of the grammar. Raises RequestError if llguidance refuses the grammar."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
        if kept is None:
            try:
                kept = self._compile(grammar)
            except ValueError as error:
                raise RequestError(f"the grammar is refused: {error}") from error
            with self._lock:
                self._kept[grammar] = kept
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return kept.deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        """Return a new matcher. Raises ValueError with llguidance's reason if it refuses the grammar."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            error = matcher.get_error()
            if "grammar.symbols.len()" in error:
                error = f"the grammar is too big: it has more than {_MAX_SYMBOLS} symbols"
            raise ValueError(shorten(error))
        return matcher


def literal(text: str) -> str:
    """Return a text as a literal of Lark, in which no control character may stand as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def shorten(error: object) -> str:
    """Return a text in one line of bounded length, as errors and headers need it."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
