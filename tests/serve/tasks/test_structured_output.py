"""What a request says about the form of its answer, and the grammar that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from waiting import WAIT_S, until

from meltcore.common.errors import ConfigError, RequestError
from meltcore.serve.requests.protocol import ChatRequest, decode_request
from meltcore.serve.tasks.generation import structured
from meltcore.serve.tasks.generation.structured import (
    CheckedGrammar,
    GrammarChecks,
    RequestedGrammar,
    requested_grammar,
)
from meltcore.text.grammar import GrammarCompiler
from meltcore.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


class Counts(dict[str, float]):
    """Stands for the statistics of a model."""

    def add(self, name: str, value: float = 1) -> None:
        self[name] = self.get(name, 0) + value


def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.synthetic_bytes(300), [1])


def asked(**fields: Any) -> RequestedGrammar | None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields})
    return requested_grammar(decode_request(body, ChatRequest))


def schema_format(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def check(requested: RequestedGrammar | None) -> CheckedGrammar:
    assert requested is not None
    return asyncio.run(GrammarChecks(compiler()).check(requested, Counts()))  # type: ignore[arg-type]


def accepts(grammar: CheckedGrammar, text: str) -> bool:
    """Whether a whole text follows a grammar. Tokens are bytes."""
    matcher = compiler().matcher(grammar.text)
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "valid", "invalid"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"response_format": schema_format({"type": "integer"}, strict=True)}, "-12", "1.5"),
        ({"structured_outputs": {"json": {"type": "array", "items": {"enum": ["x"]}}}}, '["x", "x"]', '["y"]'),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true", "1"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": r"[a-c]+/\d{2}"}}, "abc/12", "abc/1"),
        ({"structured_outputs": {"choice": ['say "hi"\n', "no", "grün"]}}, 'say "hi"\n', "say"),
        ({"structured_outputs": {"choice": ["yes", "no", "grün"]}}, "grün", "yesno"),
        ({"structured_outputs": {"choice": ["a", "ab", "", "\x7f"]}}, "\x7f", "b"),
        ({"structured_outputs": {"choice": [f"choice {n}" for n in range(10_000)]}}, "choice 9999", "choice 10000"),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "ab"'}}, "aabb", "aab"),
    ],
)
def test_answer_follows_what_the_request_says(fields: dict[str, Any], valid: str, invalid: str) -> None:
    grammar = check(asked(**fields))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)
    assert grammar.weakened == ()


def test_structural_tags_constrain_what_follows_their_triggers() -> None:
    structures = [{"begin": f"<f={name}>", "schema": {"type": "object"}, "end": "</f>"} for name in ("one", "two")]
    tags = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    grammar = check(asked(structured_outputs={"structural_tag": tags}))
    assert accepts(grammar, "Free text < 3.")
    assert accepts(grammar, 'First <f=one>{"a": 1}</f> then <f=two>{}</f>.')
    assert not accepts(grammar, "First <f=three>{}</f>")
    assert not accepts(grammar, "First <f=one>5</f>")


def test_free_answer_has_no_grammar() -> None:
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
        ({"type": "string", "format": "color"}, "color"),
    ],
)
def test_schema_is_weakened_with_notice_unless_it_is_strict(schema: dict[str, Any], keyword: str) -> None:
    counts = Counts()
    checks = GrammarChecks(compiler())
    for fields in ({"response_format": schema_format(schema)}, {"structured_outputs": {"json": schema}}):
        grammar = asyncio.run(checks.check(asked(**fields), counts))  # type: ignore[arg-type]
        assert keyword in "".join(grammar.weakened)
    assert counts["grammars_weakened"] == 2
    with pytest.raises(RequestError, match=keyword) as error:
        asyncio.run(checks.check(asked(response_format=schema_format(schema, strict=True)), counts))  # type: ignore[arg-type]
    assert error.value.status == 400
    assert error.value.param == "response_format.json_schema.schema"
    assert counts["grammars_refused"] == 1
    # A client cannot turn a strict schema into a weak one.
    hidden = schema | {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    with pytest.raises(RequestError, match=keyword):
        asyncio.run(checks.check(asked(response_format=schema_format(hidden, strict=True)), counts))  # type: ignore[arg-type]


def test_parts_of_tools_that_no_grammar_enforces_are_listed() -> None:
    grammar = check(RequestedGrammar("tools", ("start: missing", "start: /x/"), ("minItems", "pattern")))
    assert grammar == CheckedGrammar("start: /x/", ("not enforced of tools: minItems, pattern",))


def fields_with_schema(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Each way in which a request can have a schema. What a structural tag begins is "<t>", and its end is empty."""
    structure = {"begin": "<t>", "schema": schema, "end": ""}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<t>"]}
    return [
        {"response_format": schema_format(schema)},
        {"response_format": schema_format(schema, strict=True)},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"structural_tag": tag}},
    ]


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, *fields_with_schema({})])
def test_whitespace_is_bounded(fields: dict[str, Any]) -> None:
    """A model that does not know how to go on would write blanks up to its limit of tokens."""
    grammar, begin = check(asked(**fields)), "<t>" if "structural_tag" in str(fields) else ""
    assert accepts(grammar, begin + '{\n    "a": 1\n}')
    assert accepts(grammar, begin + '{"a":1,"b":[]}')
    for text in ('{  "a": 1}', '{"a":\n\n1}', '{"a":\t1}', f'{{\n{" " * 33}"a": 1}}'):
        assert not accepts(grammar, begin + text)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"item_separator": "; "}, '{"a":1; "b":2}'),
        ({"key_separator": "=>"}, '{"a"=>1}'),
        ({"whitespace_pattern": "x"}, '{x"a":1}'),
    ],
)
def test_schema_cannot_ask_for_what_is_no_json(option: dict[str, Any], text: str) -> None:
    """llguidance reads options from a schema, which the schemas of clients may have."""
    for fields in fields_with_schema({"type": "object", "x-guidance": option}):
        grammar, begin = check(asked(**fields)), "<t>" if "structural_tag" in str(fields) else ""
        assert accepts(grammar, begin + '{"a":1, "b":2}')
        assert not accepts(grammar, begin + text)


# threat: a client: compiling a schema or grammar is bounded, and holds up no other
def test_slow_grammars_hold_up_no_known_one_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads are busy: a known grammar is answered, the event loop runs, and too many are refused."""
    started, release = Event(), Event()
    check_grammar = GrammarCompiler.check

    def slow(compiler: GrammarCompiler, grammar: str) -> list[str]:
        if "slow" in grammar:
            started.set()
            assert release.wait(60)
        return check_grammar(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "check", slow)
    monkeypatch.setattr(structured, "MAX_COMPILING", 4)

    async def scenario() -> None:
        counts, checks = Counts(), GrammarChecks(compiler())
        known = RequestedGrammar("known", ('start: "x"',))
        await checks.check(known, counts)  # type: ignore[arg-type]
        waiting = [
            asyncio.create_task(checks.check(RequestedGrammar("slow", (f'start: "slow{index}"',)), counts))  # type: ignore[arg-type]
            for index in range(4)
        ]
        assert await asyncio.to_thread(started.wait, 60)
        await checks.check(known, counts)  # type: ignore[arg-type]
        assert not any(task.done() for task in waiting)
        with pytest.raises(RequestError, match="4 other grammars") as error:
            await checks.check(RequestedGrammar("next", ('start: "y"',)), counts)  # type: ignore[arg-type]
        assert error.value.status == 503
        release.set()
        assert [(await task).weakened for task in waiting] == [()] * 4
        await checks.check(RequestedGrammar("next", ('start: "y"',)), counts)  # type: ignore[arg-type]
        assert counts["grammars_compiled"] == 6

    asyncio.run(scenario())


class HeldCompiler:
    """Stands for a compiler whose threads wait for `release`. It notes the grammars that it begins."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = Event()

    def check(self, grammar: str) -> list[str]:
        self.begun.append(grammar)
        assert self.release.wait(WAIT_S)
        return []


def small(index: int) -> str:
    return f'start: "{index}"'


def large(index: int) -> str:
    return small(index) + " " * 2**15


@pytest.mark.parametrize(("grammar", "num_threads"), [(small, 2), (large, 1)])
@pytest.mark.parametrize("leaves", ["disconnect", "timeout"])
def test_grammars_of_requests_that_left_are_not_begun(
    grammar: Callable[[int], str], num_threads: int, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has begun goes on. MAX_COMPILING other requests that follow are served after it."""
    held, counts, limits = HeldCompiler(), Counts(), list[asyncio.Timeout]()
    start_timeout = asyncio.timeout
    monkeypatch.setattr(structured, "MAX_COMPILING", 6)
    monkeypatch.setattr(asyncio, "timeout", lambda limit_s: limits.append(start_timeout(limit_s)) or limits[-1])

    async def scenario() -> None:
        checks = GrammarChecks(held)  # type: ignore[arg-type]

        def begin(index: int) -> asyncio.Task[CheckedGrammar]:
            requested = RequestedGrammar("a", (grammar(index),))
            return asyncio.create_task(checks.check(requested, counts))  # type: ignore[arg-type]

        gone = [begin(index) for index in range(6)]
        await until(lambda: len(held.begun) == num_threads, "the threads to begin")
        for task, limit in zip(gone, limits, strict=True):
            if leaves == "disconnect":
                task.cancel()
            else:
                limit.reschedule(0.0)
        ends = await asyncio.gather(*gone, return_exceptions=True)
        kind = asyncio.CancelledError if leaves == "disconnect" else RequestError
        assert [type(end) for end in ends] == [kind] * 6
        after = [begin(index) for index in range(10, 10 + 6 - num_threads)]
        await asyncio.sleep(0)
        held.release.set()
        assert len(await asyncio.gather(*after)) == 6 - num_threads
        await until(lambda: counts.get("grammars_compiled") == 6, "the end of those that were begun")

    try:
        asyncio.run(scenario())
    finally:
        held.release.set()
    assert held.begun[num_threads:] != []
    assert {*held.begun[num_threads:]} == {grammar(index) for index in range(10, 10 + 6 - num_threads)}


@pytest.mark.parametrize("num_gone", [0, 1, 5])
def test_equal_grammars_are_compiled_once(num_gone: int) -> None:
    """Clients that leave end the compilation neither for the others nor for one that comes later."""
    held, counts = HeldCompiler(), Counts()

    async def scenario() -> None:
        checks = GrammarChecks(held)  # type: ignore[arg-type]

        def begin() -> asyncio.Task[CheckedGrammar]:
            requested = RequestedGrammar("a", (small(1),))
            return asyncio.create_task(checks.check(requested, counts))  # type: ignore[arg-type]

        tasks = [begin() for _ in range(5)]
        await until(lambda: held.begun != [], "a thread to begin")
        for task in tasks[:num_gone]:
            task.cancel()
        await asyncio.gather(*tasks[:num_gone], return_exceptions=True)
        sixth = begin()
        await asyncio.sleep(0)
        held.release.set()
        assert {*await asyncio.gather(*tasks[num_gone:], sixth)} == {(small(1), ())}

    try:
        asyncio.run(scenario())
    finally:
        held.release.set()
    assert held.begun == [small(1)]
    assert counts["grammars_compiled"] == 1


def test_small_grammars_do_not_wait_for_large_ones_and_only_threads_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many large ones as may wait do so. A clock advances one second with each reading."""
    held, counts, clock = HeldCompiler(), Counts(), count()
    monkeypatch.setattr(structured, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(structured, "MAX_COMPILING", 3)

    async def scenario() -> None:
        checks = GrammarChecks(held)  # type: ignore[arg-type]
        tasks = [
            asyncio.create_task(checks.check(RequestedGrammar("a", (text,)), counts))  # type: ignore[arg-type]
            for text in (*map(large, range(3)), small(3))
        ]
        await until(lambda: len(held.begun) == 2, "the first large one and the small one to begin")
        assert {*held.begun} == {large(0), small(3)}
        held.release.set()
        await asyncio.gather(*tasks)

    try:
        asyncio.run(scenario())
    finally:
        held.release.set()
    assert counts["grammars_compiled"] == 4
    assert 4 <= counts["grammar_compile_s"] <= 10  # the most if one takes as long as three; 16 with the waiting


def test_request_whose_grammar_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Event()

    def blocked(_compiler: GrammarCompiler, _grammar: str) -> list[str]:
        assert release.wait(60)
        return []

    monkeypatch.setattr(GrammarCompiler, "check", blocked)
    monkeypatch.setattr(structured, "COMPILE_LIMIT_S", 0.01)
    try:
        with pytest.raises(RequestError, match=r"not compiled within 0\.01 s") as error:
            check(RequestedGrammar("slow", ('start: "x"',)))
        assert error.value.status == 503
    finally:
        release.set()


def test_tokenizer_that_llguidance_cannot_read_is_named() -> None:
    checks = GrammarChecks(ConfigError("structured output is not possible with this tokenizer: no bytes"))
    with pytest.raises(RequestError, match="no bytes"):
        asyncio.run(checks.check(RequestedGrammar("regex", ('start: "x"',)), Counts()))  # type: ignore[arg-type]
