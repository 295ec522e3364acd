"""Converts the fields of a request about the form of its answer to a grammar, and checks that the grammar compiles."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher, StructTag

from meltcore.common.errors import ConfigError, RequestError
from meltcore.protocol.sampling_params import Grammar
from meltcore.serve.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from meltcore.serve.requests.stats import ModelStats
from meltcore.text.answer_format import AnswerFormat
from meltcore.text.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, literal, shorten

MAX_CHOICES = 10_000
MAX_MESSAGE_CHARS = 16 * 2**20  # of the grammar of a request, which is sent with each of its prompts
MAX_COMPILING = 32  # of a pool and a model; the limits of `text/grammar.py` bound the time of each to seconds
COMPILE_LIMIT_S = 20.0
_MAX_KEPT = 256
# Large grammars take up to seconds. They have a thread of their own, so that small ones do not wait for them.
_LARGE_BYTES = 16_384
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="grammar")
_LARGE_THREADS = ThreadPoolExecutor(1, thread_name_prefix="large_grammar")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A blank, or a line and its indentation. Unbounded whitespace is where small models end that do not know how to go on.
_WHITESPACE = {"whitespace_pattern": r"\n[ ]{0,32}|[ ]"}
# Without any, a schema is enforced or refused. The next ones accept some invalid answers, of which llguidance warns.
_STRICT = _WHITESPACE | {"coerce_one_of": False, "lenient": False}
_WEAKER = (_WHITESPACE | {"coerce_one_of": True}, _WHITESPACE | {"coerce_one_of": True, "lenient": True})


class RequestedGrammar(NamedTuple):
    """The grammars that a request accepts, the most exact first, and the field that asks for them.

    `weakened` lists the parts of the schemas of tools that none of them enforces. `parts` has the grammars in Lark that
    the candidates contain, each after the field that holds it.
    """

    param: str
    candidates: tuple[str, ...]
    weakened: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()


class CheckedGrammar(NamedTuple):
    """A grammar that compiles. `weakened` lists the parts of its schema that it does not enforce."""

    text: str
    weakened: tuple[str, ...]


class _Compilation:
    """The compilation of one grammar in a thread, for which all requests with an equal grammar wait."""

    def __init__(self, pool: ThreadPoolExecutor, compiler: GrammarCompiler, requested: RequestedGrammar) -> None:
        self.pool, self.num_waiting, self.seconds = pool, 0, 0.0
        self.in_thread: Future[CheckedGrammar] = pool.submit(self._run, compiler, requested)
        self.checked = asyncio.wrap_future(self.in_thread)

    def _run(self, compiler: GrammarCompiler, requested: RequestedGrammar) -> CheckedGrammar:
        start_s = time.monotonic()
        try:
            return first_valid(compiler, requested)
        finally:
            self.seconds = time.monotonic() - start_s


class GrammarChecks:
    """Checks the grammars of requests for one model in a few threads. The results of recent grammars are kept."""

    def __init__(self, compiler: GrammarCompiler | ConfigError) -> None:
        """Create the checks. A ConfigError says why the tokenizer allows no structured output."""
        self._compiler = compiler
        self._kept: OrderedDict[RequestedGrammar, CheckedGrammar] = OrderedDict()
        self._compiling: dict[RequestedGrammar, _Compilation] = {}

    async def check(self, requested: RequestedGrammar, stats: ModelStats) -> CheckedGrammar:
        """Return the first candidate of a requested grammar that compiles.

        Raises RequestError (400, 503), which is counted as a refusal.
        """
        kept = self._kept.get(requested)
        if kept is not None:
            self._kept.move_to_end(requested)
            return kept
        try:
            return await self._compile(requested, stats)
        except RequestError:
            stats.add("grammars_refused")
            raise

    async def _compile(self, requested: RequestedGrammar, stats: ModelStats) -> CheckedGrammar:
        compiler, param = self._compiler, requested.param
        if isinstance(compiler, ConfigError):
            raise RequestError(f"{param}: {compiler}", param=param)
        size = max(len(text.encode(errors="replace")) for text in requested.candidates)
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(f"{param} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}", param=param)
        compilation = self._compiling.get(requested)
        if compilation is None:
            pool = _THREADS if size <= _LARGE_BYTES else _LARGE_THREADS
            if sum(each.pool is pool for each in self._compiling.values()) >= MAX_COMPILING:
                raise RequestError(
                    f"{MAX_COMPILING} other grammars are being compiled; try again", status=503, code="overloaded",
                    param=param, retry_after_s=1.0,
                )  # fmt: skip
            compilation = self._compiling[requested] = _Compilation(pool, compiler, requested)
            compilation.checked.add_done_callback(partial(self._end, requested, compilation, stats))
        compilation.num_waiting += 1
        try:
            async with asyncio.timeout(COMPILE_LIMIT_S):
                return await asyncio.shield(compilation.checked)
        except TimeoutError as error:
            raise RequestError(
                f"{param} was not compiled within {COMPILE_LIMIT_S:g} s; simplify it, or try again", param=param,
                status=503, code="overloaded", retry_after_s=1.0,
            ) from error  # fmt: skip
        finally:
            compilation.num_waiting -= 1
            # One that a thread has begun goes on, and an equal grammar of a later request gets its result.
            if not compilation.num_waiting and compilation.in_thread.cancel():
                del self._compiling[requested]

    def _end(
        self,
        requested: RequestedGrammar,
        compilation: _Compilation,
        stats: ModelStats,
        ended: asyncio.Future[CheckedGrammar],
    ) -> None:
        """Count a compilation, and keep its result, whether requests still wait for it or not."""
        if ended.cancelled():
            return
        del self._compiling[requested]
        stats.add("grammar_compile_s", compilation.seconds)
        if ended.exception() is not None:
            return
        checked = ended.result()
        stats.add("grammars_compiled")
        stats.add("grammars_weakened", bool(checked.weakened))
        self._kept[requested] = checked
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)


def requested_grammar(request: ChatRequest | CompletionRequest) -> RequestedGrammar | None:
    """Return the grammars that a request accepts, or None if its answer may have any form.

    Raises RequestError (400) for an invalid format, and for fields that exclude each other.
    """
    response_format, outputs = request.response_format, request.structured_outputs
    is_limited = isinstance(response_format, JsonObjectFormat | JsonSchemaFormat)
    if is_limited and outputs is not None:
        raise RequestError(
            "response_format and structured_outputs both limit the answer; give one", param="structured_outputs"
        )
    if outputs is not None:
        return _from_structured_outputs(outputs)
    if isinstance(response_format, JsonSchemaFormat):
        given = response_format.json_schema
        if _NAME.fullmatch(given.name) is None:
            raise RequestError(
                f"response_format.json_schema.name must be 1 to 64 letters, digits, _ and -; got {given.name[:80]!r}",
                param="response_format.json_schema.name",
            )
        return grammar_of_schema(given.schema, "response_format.json_schema.schema", is_strict=bool(given.strict))
    if isinstance(response_format, JsonObjectFormat):
        return grammar_of_schema({"type": "object"}, "response_format", is_strict=True)
    return None


def check_beside_grammar(request: ChatRequest | CompletionRequest, param: str) -> None:
    """Raise RequestError (400) for a field that a grammar, which the field `param` asks for, would ignore."""
    for name in ("min_tokens", "ignore_eos", "continue_final_message"):
        if getattr(request, name, None):
            raise RequestError(
                f"{name} is not possible beside {param}, whose grammar says how the answer begins and ends; "
                "leave out one of both",
                param=name,
            )


def grammar_of_answer(text: str, answer_format: AnswerFormat | None, prompt: Sequence[int]) -> Grammar:
    """Return a grammar for the answer to a prompt. It applies after the reasoning, where the model may reason."""
    reasoning_ids = None if answer_format is None else answer_format.reasoning_ids
    if answer_format is None or reasoning_ids is None:
        return Grammar(text)
    if answer_format.starts_in_reasoning(prompt):
        return Grammar(text, reasoning_ids, starts_in_reasoning=True)
    return Grammar(text, None if answer_format.has_ended_reasoning(prompt) else reasoning_ids)


def _from_structured_outputs(outputs: StructuredOutputs) -> RequestedGrammar:
    given = {
        name: value for name in outputs.__struct_fields__ if (value := getattr(outputs, name)) not in (None, False)
    }
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs needs exactly one of {', '.join(outputs.__struct_fields__)}; "
            f"got {', '.join(given) or 'none'}",
            param="structured_outputs",
        )
    [(name, value)] = given.items()
    param = f"structured_outputs.{name}"
    if name == "json":
        return grammar_of_schema(_as_object(value, param), param, is_strict=False)
    if name == "json_object":
        return grammar_of_schema({"type": "object"}, param, is_strict=True)
    if name == "choice":
        if not 1 <= len(value) <= MAX_CHOICES:
            raise RequestError(f"{param} must have 1 to {MAX_CHOICES} texts; got {len(value)}", param=param)
        return RequestedGrammar(param, ("start: CHOICE\nCHOICE: " + " | ".join(map(literal, value)),))
    if name == "regex":
        return RequestedGrammar(param, (LLMatcher.grammar_from_regex(value),))
    if name == "grammar":
        return RequestedGrammar(param, (LLMatcher.grammar_from_lark(value),))
    return RequestedGrammar(param, (_from_structural_tag(_as_object(value, param), param),))


def grammar_of_schema(schema: dict[str, Any], param: str, *, is_strict: bool) -> RequestedGrammar:
    """Return the grammars of a JSON Schema, of which one that is strict has only one. Raises RequestError."""
    levels = (_STRICT,) if is_strict else (_STRICT, *_WEAKER)
    try:
        texts = (msgspec.json.encode(_with_options(schema, options)).decode() for options in levels)
        return RequestedGrammar(param, tuple(map(LLMatcher.grammar_from_json_schema, texts)))
    except (ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{param} cannot be read: {error}", param=param) from error


def _with_options(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with options of llguidance. They replace the client's, which could allow what is no JSON."""
    return {**schema, "x-guidance": options}


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    """vLLM's structural tags: free text, in which each trigger begins one of the structures that begin with it."""

    structures: list[_Structure]
    triggers: list[str]


def _from_structural_tag(value: dict[str, Any], param: str) -> str:
    try:
        given = msgspec.convert(value, _StructuralTag)
    except msgspec.ValidationError as error:
        raise RequestError(f"{param}: {error}; known are type, structures and triggers", param=param) from error
    tags = []
    for structure in given.structures:
        trigger = next((each for each in given.triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise RequestError(f"{param}: no trigger begins {structure.begin[:80]!r}", param=param)
        schema = _with_options(structure.schema, _STRICT)
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    if not tags:
        raise RequestError(f"{param} has no structures", param=param)
    return StructTag.to_grammar(tags, assume_special=False)


def _as_object(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Return a JSON object. The value may be the object, or a text that contains it."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise RequestError(f"{param} is no JSON object: {error}", param=param) from error


def first_valid(compiler: GrammarCompiler, requested: RequestedGrammar) -> CheckedGrammar:
    """Return the first grammar that compiles. Raises RequestError, which names the first part that does not compile."""
    reason, parts = "", requested.weakened
    skipped = (shorten(f"not enforced of tools: {', '.join(parts)}"),) if parts else ()
    for text in requested.candidates:
        try:
            return CheckedGrammar(text, (*skipped, *compiler.check(text)))
        except ValueError as error:
            reason = str(error)
            if "too big" in reason or "too complex" in reason or "limit" in reason:
                break  # a weaker grammar is as large
    for param, text in requested.parts:
        first_valid(compiler, RequestedGrammar(param, (LLMatcher.grammar_from_lark(text),)))
    raise RequestError(f"{requested.param} is not supported: {reason}", param=requested.param)
