"""Separates the reasoning, the tool calls and the text of an answer while its tokens arrive.

One machine reads all families of models. It takes characters, and the ids of marks, and passes on what is certain. Text
that may still become a mark is held back. A call is certain when it is complete; the beginning of its arguments is
passed on before, since arguments may be long. If a call then breaks, it is marked as broken, and all its characters are
text again, except in a stream that has sent them. If the answer ends within the arguments, the call stays a call and is
marked as cut. No answer is an error.

The work is linear. The machine consumes what it reads, and text that is given back is read once more at most, from the
last mark within.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from meltcore.text.answer_format import AnswerFormat, CallFormat
from meltcore.text.call_scanners import (
    SCALAR,
    CallDelta,
    CharacterReader,
    JsonScanner,
    Piece,
    PythonScanner,
    Steps,
    ToolSet,
    divide_pieces,
    find_marks,
    is_encodable,
    python_to_json,
    to_json,
    typed_json,
    whole_call,
)

_BLANKS, _NAME, _WORD = re.compile(r"[ \t\r\n]+"), re.compile(r"[\w.:/-]+"), re.compile(r"\w+")
_XML_NAME, _XML_PARTS = re.compile(r"[^\s<>]+"), ("</function>", "<parameter=")
# An object up to its arguments, as nearly all models write it. What is written otherwise is read as a whole.
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"(?:name|type|function|arguments|parameters|id)"\s*:')
# How reading a call ended: with a call, with something that is given back as text, or with text that was passed on.
_CALL, _BROKEN, _TEXT = "call", "broken", "text"


@lru_cache(maxsize=16)
def _between(separators: str) -> re.Pattern[str]:
    return re.compile(f"[ \\t\\r\\n{re.escape(separators)}]+")


class AnswerParser(CharacterReader):
    """Reads one answer. The joined results of `feed`, `mark` and `end` are its text.

    Reasoning and calls wait for `take`. Whitespace between reasoning and the text is dropped, as is whitespace beside
    calls at both ends of the text.
    """

    def __init__(self, form: AnswerFormat, tools: ToolSet | None = None, prompt: Sequence[int] = ()) -> None:
        """Begin an answer to a prompt. Without `tools` all calls are text."""
        super().__init__()
        self._pieces: list[Piece] = []
        self.mark_ids: Mapping[int, str] = {}
        self._reasoning_ids: tuple[int, ...] = form.reasoning_ids or ()
        self._tools = tools or ToolSet({})
        self._types: dict[tuple[str, str], tuple[str, ...]] = {}  # of parameters: a schema may be large
        self._format = form.calls if tools is not None else None
        if self._tools.max_calls == 0 and self._format and not self._format.has_marks:
            self._format = None  # nothing tells a call from text
        self._in_reasoning = form.starts_in_reasoning(prompt)
        self._skips_space = False
        self._answer: list[str] = []  # new text
        self._num_chars = 0  # of the text so far
        self._space: list[str] = []  # whitespace that is dropped if only a call follows
        self._has_text = False
        self._raw_head = 0  # characters of it that have led to the call
        self._num_passed = 0  # pieces of `_raw` that were passed on as a part of a call
        self._num_opened = self._num_calls = 0
        self._is_open = self._is_over = False
        self._steps: Steps | None = None
        if self._format is not None:
            self.mark_ids = form.mark_ids
            self._steps = self._run(self._format)
        self.hidden_ids = frozenset((*self._reasoning_ids, *self.mark_ids))  # of the tokens that `mark` reads

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the model is reasoning now."""
        return self._in_reasoning

    @property
    def is_in_call(self) -> bool:
        """Whether text that may be a call, or the markup around it, is held back."""
        return bool(self._raw)

    @property
    def has_calls(self) -> bool:
        """Whether a call has been passed on that is complete, or that broke in a stream."""
        return self._num_calls > 0 and self._tools.max_calls != 0

    def take(self) -> tuple[list[str], list[CallDelta]]:
        """Return the reasoning and the parts of calls that have come since it was called last."""
        return divide_pieces(self.take_pieces())

    def take_pieces(self) -> list[Piece]:
        """Return both in their order, each with the number of characters of the text before it."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed(self, text: str) -> str:
        """Read the text of ordinary tokens. Return the new text of the answer."""
        if self._steps is None:
            self._write(text)
        elif text:
            self._buffer, self._at = self._buffer[self._at :] + text, 0
            next(self._steps)
        return self._new_text()

    def mark(self, token_id: int) -> str:
        """Read a token of `hidden_ids`. Return the new text of the answer."""
        if token_id in self._reasoning_ids:
            if self._is_open and not self._in_reasoning:  # within an argument
                return self.feed("<think>" if token_id == self._reasoning_ids[0] else "</think>")
            self._settle()
            self._in_reasoning = token_id == self._reasoning_ids[0]
            self._skips_space = not self._in_reasoning
        return self.feed(self.mark_ids.get(token_id, ""))

    def end(self) -> str:
        """Return the rest of the text, after the last token."""
        self._is_over = True
        self._settle()
        if self._space and not self._num_calls:
            self._pass_on(*self._space)
        self._space = []
        return self._new_text()

    def _settle(self) -> None:
        """Decide about all that was held back, as if the answer ended here."""
        if self._steps is not None and self._format is not None:
            self._has_ended = True
            for _ in self._steps:
                pass
            self._has_ended = False
            self._buffer, self._at = "", 0
            self._steps = self._run(self._format)

    def _new_text(self) -> str:
        answer, self._answer = self._answer, []
        return "".join(answer)

    def _write(self, text: str) -> None:
        """Pass on text as reasoning or as a part of the answer."""
        if self._in_reasoning:
            if text:
                self._pieces.append((self._num_chars, text))
            return
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if self._steps is None or not text:
            self._pass_on(text)
            return
        body = text.rstrip()
        if body:
            self._pass_on(*self._space, body)
            self._space, self._has_text = [], True
        self._space.append(text[len(body) :])

    def _pass_on(self, *texts: str) -> None:
        self._answer += texts
        self._num_chars += sum(map(len, texts))

    # --- text and blocks of calls

    def _run(self, form: CallFormat) -> Steps:
        marks = find_marks(form.opens)
        bodies: Mapping[str, Callable[[CallFormat], Steps]] = {
            "json": self._json_call, "named": self._named_call, "xml": self._xml_call, "python": self._python_call,
        }  # fmt: skip
        while not self._has_ended or self._at < len(self._buffer):
            self._raw = []
            if self._in_reasoning and not form.has_marks:
                self._write(self._take(len(self._buffer)))
                yield
                continue
            text, mark = yield from self._piece(marks)
            self._write(text)
            if mark is not None:
                yield from self._block(form, mark, bodies[form.body])

    def _block(self, form: CallFormat, mark: str, body: Callable[[CallFormat], Steps]) -> Steps:
        """Read the calls after a mark."""
        self._raw, self._raw_head = [mark], len(mark)
        if mark in ("{", "<function="):  # a part of the call
            self._at -= len(mark)
            self._raw, self._raw_head = [], 0
        while True:
            outcome = yield from body(form)
            if outcome == _BROKEN:
                self._give_back(form)
            if outcome != _CALL:
                return
            self._end_call()
            yield from self._run_of(_between(form.separators))
            closing = yield from self._peek(*form.closes or ("\0",))
            rest = self._buffer[self._at :]
            if not closing and self._has_ended and rest and any(each.startswith(rest) for each in form.closes):
                closing = rest  # the answer ends within the mark
            if closing:
                self._take(self._at + len(closing))
                self._raw = []
                return
            if not (yield from self._begins_call(form)):
                self._write("".join(self._raw))
                self._raw = []
                return

    def _begins_call(self, form: CallFormat) -> Steps:
        if form.body == "python":
            has_more = yield from self._some()
            return has_more and ("," in "".join(self._raw)) and self._buffer[self._at].isidentifier()
        return bool((yield from self._peek("<function=" if form.body == "xml" else "{")))

    def _give_back(self, form: CallFormat) -> None:
        """Make text of what was no call. Reading continues at the last mark within. A call that is cut stays one."""
        raw, rest, is_open = "".join(self._raw), self._buffer[self._at :], self._is_open
        sent_chars = sum(map(len, self._raw[: self._num_passed]))
        self._raw, self._is_open = [], False
        marks = (mark if len(mark) > 1 else f"\n{mark}" for mark in form.opens)
        at = max(raw.rfind(mark, self._raw_head) for mark in marks)
        if at < 0 and not self._has_ended and (held := find_marks(form.opens).held(raw, self._raw_head)):
            at = len(raw) - held  # a mark begins there
        is_cut = is_open and self._is_over and at < 0 and any(each.startswith(rest) for each in _XML_PARTS)
        end: Literal["cut", "broken"] = "cut" if is_cut else "broken"
        is_sent = is_open and self._add(CallDelta(self._num_opened - 1, end=end))
        if is_sent and is_cut:
            self._at, self._space = len(self._buffer), []
            return
        if at >= 0:
            self._buffer, self._at = raw[at:] + rest, 0
            raw = raw[:at]
        if is_sent and self._tools.is_streamed:
            self._num_calls += 1
            raw = raw[sent_chars:]
        if self._tools.max_calls != 0:
            self._write(raw)
        elif self._has_ended and at < 0:
            self._at = len(self._buffer)  # a part of the same call

    # --- calls

    def _add(self, delta: CallDelta) -> bool:
        is_wanted = self._tools.max_calls is None or self._num_calls < self._tools.max_calls
        self._pieces += [(self._num_chars, delta)] * is_wanted
        return is_wanted

    def _open_call(self, form: CallFormat, name: str) -> bool:
        """Pass on the name of a call. Return False if only a known tool makes a call here, and the name is another."""
        if (self._in_reasoning or not form.has_marks or not is_encodable(name)) and name not in self._tools.schemas:
            return False
        self._is_open, self._num_passed = True, len(self._raw)
        self._add(CallDelta(self._num_opened, name))
        self._num_opened += 1
        return True

    def _arguments(self, text: str) -> None:
        self._num_passed = len(self._raw)
        self._add(CallDelta(self._num_opened - 1, arguments=text))

    def _end_call(self) -> None:
        self._add(CallDelta(self._num_opened - 1, end="complete"))
        self._is_open, self._in_reasoning = False, False
        self._num_calls += 1
        self._raw, self._raw_head = [], 0
        if not self._has_text:
            self._space, self._skips_space = [], True

    def _json_call(self, form: CallFormat) -> Steps:
        """Read {"name": ..., "arguments": {...}}. Arguments are passed on early if their object follows the name."""
        yield from self._run_of(_BLANKS)
        head = len(self._raw)
        scanner = JsonScanner()
        is_first, in_arguments = True, False
        while not scanner.is_done:
            if not (yield from self._some()):
                return _BROKEN
            piece = self._take(scanner.scan(self._buffer, self._at))
            if in_arguments and piece:
                self._arguments(piece)
            if scanner.is_broken:
                return _BROKEN
            if in_arguments:
                in_arguments = scanner.stop != "}"
            elif scanner.stop and is_first:
                is_first = False
                if not form.has_marks and not _FIRST_KEY.match("".join(self._raw[head:])):
                    return (yield from self._other_object(form, scanner))
            elif scanner.stop == "{" and not self._is_open:
                header = _HEADER.fullmatch("".join(self._raw[head:]))
                if header and not self._open_call(form, json.loads(header[1])):
                    return (yield from self._other_object(form, scanner))
                if header:
                    in_arguments = True
                    self._arguments("{")
        if not self._is_open:
            name, arguments = whole_call("".join(self._raw[head:]))
            if name is None or not self._open_call(form, name):
                return (yield from self._other_object(form, scanner))
            self._arguments(arguments)
        return _CALL

    def _other_object(self, form: CallFormat, scanner: JsonScanner) -> Steps:
        """Pass on an object that is no call as text, with all calls that it seems to contain."""
        if form.has_marks:
            return _BROKEN
        self._write("".join(self._raw))
        while not (scanner.is_done or scanner.is_broken) and (yield from self._some()):
            self._raw = []
            self._write(self._take(scanner.scan(self._buffer, self._at)))
        self._raw = []
        return _TEXT

    def _named_call(self, form: CallFormat) -> Steps:
        """Read a name and the object of its arguments, or the list of objects that older Mistral models write."""
        yield from self._run_of(_BLANKS)
        if not form.prefix and (yield from self._peek("[", "{")):
            yield from self._accept("[")
            return (yield from self._json_call(form))
        if form.prefix and not (yield from self._accept(form.prefix)):
            return _BROKEN
        name = yield from self._run_of(_NAME)
        while mark := (yield from self._peek(*form.name_ends or ("\0",))):
            self._take(self._at + len(mark))
            if mark != "[ARGS]":
                yield from self._run_of(_NAME)  # the model's own id of the call
        yield from self._run_of(_BLANKS)
        if not name or not (yield from self._peek("{")) or not self._open_call(form, name):
            return _BROKEN
        if form.quote != '"':
            return (yield from self._quoted_object(form, name))
        scanner = JsonScanner()
        while not scanner.is_done:
            if not (yield from self._some()):
                return _BROKEN
            piece = self._take(scanner.scan(self._buffer, self._at))
            if piece:
                self._arguments(piece)
            if scanner.is_broken:
                return _BROKEN
        return _CALL

    def _quoted_object(self, form: CallFormat, name: str) -> Steps:
        """Read an object with bare names and quotes of its own, as {place:<escape>Bonn<escape>,days:3}."""
        scanner = JsonScanner()
        bare, key = "", ""
        in_string = False
        while not scanner.is_done:
            text, mark = yield from self._piece(find_marks((form.quote,) if in_string else (*"{}[],:", form.quote)))
            if not text and mark is None:
                return _BROKEN
            if in_string:
                fragment = to_json(text)[1:-1] + ('"' if mark else "")
                in_string = mark is None
            else:
                bare += text
                if mark is None:
                    continue
                word, bare = bare.strip(), ""
                fragment = '"' if mark == form.quote else mark
                in_string = mark == form.quote
                if word and mark == ":":
                    key = word if scanner.depth == 1 else key
                    fragment = to_json(word) + fragment
                elif word:
                    is_text = scanner.depth == 1 and self._tools.types(name, key) == ("string",)
                    fragment = (word if SCALAR.fullmatch(word) and not is_text else to_json(word)) + fragment
            if not scanner.accepts(fragment):
                return _BROKEN
            self._arguments(fragment)
        return _CALL

    def _xml_call(self, form: CallFormat) -> Steps:
        """Read <function=NAME> and its parameters. What a parameter is, its tool's schema says."""
        yield from self._run_of(_BLANKS)
        if not (yield from self._accept("<function=")):
            return _BROKEN
        self._raw_head = sum(map(len, self._raw))
        name, mark = yield from self._until(">")
        name = name.strip()
        if mark is None or not _XML_NAME.fullmatch(name) or not self._open_call(form, name):
            return _BROKEN
        keys: set[str] = set()
        while True:
            yield from self._run_of(_BLANKS)
            mark = yield from self._peek("<parameter=", "</function>", *form.closes)
            if mark != "<parameter=":
                break
            self._take(self._at + len(mark))
            key, end = yield from self._until(">")
            key = key.strip()
            if end is None or not key or "\n" in key or not (yield from self._parameter(form, name, key, keys)):
                return _BROKEN
            keys.add(key)
        if not mark:
            return _BROKEN
        if mark == "</function>":
            self._take(self._at + len(mark))
        self._arguments("}" if keys else "{}")
        return _CALL

    def _parameter(self, form: CallFormat, tool: str, key: str, earlier: set[str]) -> Steps:
        """Read the value of a parameter up to its end, without a newline on each side. Return whether it has an end.

        Text is passed on as it comes. Of a parameter that is repeated the first value counts.
        """
        types = self._types.get((tool, key))
        if types is None:
            types = self._types[tool, key] = self._tools.types(tool, key)
        is_text = types in ((), ("string",))
        is_kept, head = key not in earlier, len(self._raw)
        begin = f"{', ' if earlier else '{'}{to_json(key)}: "
        parts: list[str] = []
        held = ""  # a newline that may be the last character
        yield from self._accept("\n")
        if is_text and is_kept:
            self._arguments(begin + '"')
        while True:
            text, mark = yield from self._piece(find_marks(("</parameter>", "\n<parameter=", "\n</function>")))
            if not text and mark is None:
                return False
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
            if is_text and is_kept:
                self._arguments(to_json(text)[1:-1])
            elif is_kept:
                parts.append(text)
            if mark is not None:
                break
        if mark != "</parameter>":  # which is missing
            self._at -= len(mark)
            self._raw.pop()
            if any(each in "".join(self._raw[head:]) for each in form.opens):  # the next call has begun
                return False
        if is_kept:
            self._arguments('"' if is_text else begin + typed_json("".join(parts), types))
        return True

    def _python_call(self, form: CallFormat) -> Steps:
        """Read name(key=literal, ...)."""
        yield from self._run_of(_BLANKS)
        name = yield from self._run_of(_NAME)
        yield from self._run_of(_BLANKS)
        if name not in self._tools.schemas or not (yield from self._accept("(")):
            return _BROKEN
        num_keys = 0
        while True:
            yield from self._run_of(_BLANKS)
            if (yield from self._accept(")")):
                break
            key = yield from self._run_of(_WORD)
            yield from self._run_of(_BLANKS)
            if not key or not (yield from self._accept("=")):
                return _BROKEN
            value = yield from self._python_value()
            if value is None:
                return _BROKEN
            if not self._is_open:
                self._open_call(form, name)
            self._arguments(f"{', ' if num_keys else '{'}{to_json(key)}: {value}")
            num_keys += 1
            yield from self._accept(",")
        if not self._is_open:
            self._open_call(form, name)
        self._arguments("}" if num_keys else "{}")
        return _CALL

    def _python_value(self) -> Steps:
        """Return a literal as JSON, or None if it is none."""
        scanner = PythonScanner()
        parts: list[str] = []
        while not scanner.is_done:
            if scanner.is_broken or not (yield from self._some()):
                return None
            parts.append(self._take(scanner.scan(self._buffer, self._at)))
        return python_to_json("".join(parts))
