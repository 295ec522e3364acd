"""Defines the Jinja environment of chat templates. It has the functions of transformers, in a sandbox with limits.

A template comes with a checkpoint, so it can be broken or hostile. It can do nothing but compute text, for at most
MAX_CPU_S of CPU time, and no text in it can become longer than MAX_CHARS.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import Undefined, nodes, pass_context, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import soft_str

MAX_CHARS = 64 * 2**20  # a template may multiply its input
MAX_CPU_S = 2.0  # a prompt of a million characters takes 0.1 s
_MAX_NUMBER = 10**6  # as an argument or exponent: a width, a count
_STEPS_PER_CHECK = 64  # loop iterations and calls between two looks at the clock
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{7}|\*)|\{[^}]*\d{7}")  # "%9999999d", "%*d", "{:9999999}"
_WRITING_FILTERS = frozenset({"join", "string", "tojson", "format", "pprint", "list", "escape", "e", "urlencode"})
_SIZE_FILTERS = frozenset(
    {
        *("center", "ljust", "rjust", "zfill", "indent", "wordwrap", "expandtabs", "batch", "slice", "tojson"),
        *("format", "format_map", "to_bytes"),
    }
)
_TEXTS_OF_REPLACE = 3

_deadline: ContextVar[float] = ContextVar("deadline")


class TemplateLimitError(Exception):
    """Reports that a template computes for too long, or makes a text that is too long."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. `limit_cpu_time` must surround each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Without the optimizer and with a `finalize` that needs a context, nothing is computed while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,
            finalize=_finalize,
        )
        filters = self.filters | {"tojson": _tojson}
        self.filters = {name: _with_checked_arguments(name, each) for name, each in filters.items()}
        self.filters |= {"_items": _items, "_join": _join}
        del self.globals["lipsum"]  # writes as many words as it is told
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._steps = itertools.count(1)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _LimitingTransformer().visit(super()._parse(source, name, filename))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - a keyword of the template may have any name
        """Call a macro, a method or a global. Raises TemplateLimitError if an argument would make it take too long."""
        __self.check_time()
        args = _with_lists(args) if getattr(__obj, "__name__", "") == "join" else args
        _check_arguments(getattr(__obj, "__name__", ""), (getattr(__obj, "__self__", None), *args), kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandboxed method for `str.format`. Returns None for other values.

        The method rejects formats with a width of millions.
        """
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TemplateLimitError("formats a text of a million characters or more")
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be longer than its operands."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(times, int):
                    _check_length(len(items) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateLimitError("formats a text of a million characters or more")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def check_time(self) -> None:
        """Raise TemplateLimitError after the time of `limit_cpu_time`. Only some of the calls read the clock."""
        if next(self._steps) % _STEPS_PER_CHECK == 0 and time.thread_time() > _deadline.get():
            raise TemplateLimitError(f"it computes for more than {MAX_CPU_S:g} s")


@contextmanager
def limit_cpu_time() -> Iterator[None]:
    """Limit the CPU time of one rendering of a template."""
    token = _deadline.set(time.thread_time() + MAX_CPU_S)
    try:
        yield
    finally:
        _deadline.reset(token)


class _LimitingTransformer(NodeTransformer):
    """Rewrites a template so that each loop counts its iterations, and each `~` the characters of its result."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja finds it by this name
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join")


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks training spans and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_same_text", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _same_text(self, _context: Any, caller: Any) -> str:
        return str(caller())


@pass_environment
def _items(environment: TemplateEnvironment, items: Iterable[Any]) -> Iterable[Any]:
    """Return the items over which a loop iterates, and count each of them."""
    if isinstance(items, Undefined):
        return items  # whose error names the variable

    def count_items() -> Iterator[Any]:
        for item in items:
            environment.check_time()
            yield item

    iter(items)  # raises TypeError here, at the loop's line
    return count_items()


def _join(parts: list[Any]) -> str:
    """Return the text that `~` makes from its operands."""
    for part in parts:
        _check_size(part)
    texts = list(map(soft_str, parts))
    _check_length(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _finalize(_context: Context, value: Any) -> Any:
    _check_size(value)
    return value


def _with_checked_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        args = _with_lists(args) if name == "join" else args
        _check_arguments(name, args, kwargs.values())
        return function(*args, **kwargs)

    return check_and_call


def _with_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ranges and generators converted to lists, whose length can be checked."""
    return tuple(list(each) if isinstance(each, range | Iterator) else each for each in args)


def _check_arguments(name: str, args: Sequence[Any], named: Iterable[Any]) -> None:
    """Raise TemplateLimitError if a method or filter would make a text or list of millions of elements."""
    values = [*args, *named]
    if name in _SIZE_FILTERS:
        for value in values[1:]:
            if isinstance(value, int):
                _check_number(value)
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) == _TEXTS_OF_REPLACE:
        _check_length(texts[0].count(texts[1]) * len(texts[2]))
    elif name in _WRITING_FILTERS:
        for value in values:
            _check_size(value)
        if name == "join":
            lists = [value for value in values if isinstance(value, list | tuple)]
            _check_length(sum(map(len, lists)) * max(map(len, texts), default=0))


def _check_size(value: Any) -> None:
    """Raise TemplateLimitError if a nested value has too many parts or characters.

    A part counts each time it occurs.
    """
    if isinstance(value, str):
        _check_length(len(value))
        return
    waiting: list[Collection[Any]] = [(value,)]
    parts = characters = 0
    while waiting:
        items = waiting.pop()
        parts += len(items)
        if parts > _MAX_NUMBER:
            raise TemplateLimitError(f"it writes a value of more than {_MAX_NUMBER:,} parts")
        for each in items:
            if isinstance(each, str):
                characters += len(each)
            elif isinstance(each, dict):
                waiting += (each.keys(), each.values())
            elif isinstance(each, list | tuple | set | frozenset):
                waiting.append(each)
            elif not isinstance(each, int | float | None) and isinstance(each, Mapping):  # such as a template's context
                waiting += (each.keys(), each.values())
        _check_length(characters)


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise TemplateLimitError(f"it makes more than {MAX_CHARS:,} characters")


def _check_number(number: int) -> None:
    if number > _MAX_NUMBER:
        raise TemplateLimitError(f"it computes with {number:.0e}; the limit is {_MAX_NUMBER:,}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as plain JSON. Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
