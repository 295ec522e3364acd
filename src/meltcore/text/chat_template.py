"""Renders a checkpoint's chat template in Jinja's sandbox, where it can do nothing but compute text."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ContextReference, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meltcore.errors import ConfigError, RequestError
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.json_file import read_json

MAX_RENDERED_CHARS = 64 * 2**20  # a template may multiply its input

Message = dict[str, Any]
_NO_TEMPLATE = "this model has no chat template, so it takes prompts at /v1/completions but no chats"
# Variables that the server sets; a request's chat_template_kwargs cannot replace them.
_RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token", "eos_token"}
)


class ChatTemplate:
    """Converts messages into the prompt text that a model was trained on."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, defaults: dict[str, Any] | None = None
    ) -> None:
        """Compile the template. Raises ConfigError for a syntax error.

        `special_tokens` are variables such as bos_token and eos_token. `defaults` are variables that a request may
        change.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._variables = {**(special_tokens or {}), **(defaults or {})}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, defaults: dict[str, Any] | None = None) -> ChatTemplate | None:
        """Load the chat template of a checkpoint; that of --tokenizer comes first. None where there is neither."""
        folders = [checkpoint.tokenizer_folder] if checkpoint.gguf else [checkpoint.tokenizer_folder, checkpoint.folder]
        templates = (cls.from_folder(folder, defaults) for folder in folders if folder is not None)
        template = next((each for each in templates if each is not None), None)
        if template is None and checkpoint.gguf is not None:
            from meltcore.text.gguf_tokenizer import special_tokens, template_source

            source = template_source(checkpoint.gguf)
            template = None if source is None else cls(source, special_tokens(checkpoint.gguf), defaults)
        return template

    @classmethod
    def from_folder(cls, folder: Path, defaults: dict[str, Any] | None = None) -> ChatTemplate | None:
        """Read chat_template.jinja, else `chat_template` of tokenizer_config.json; None where there is neither.

        Raises ConfigError, which names the file that cannot be read.
        """
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        source = find_source(folder, config)
        return None if source is None else cls(source, special_token_texts(config), defaults)

    def render(self, messages: list[Message], kwargs: dict[str, Any] | None = None) -> str:
        """Return the prompt for `messages`, which ends where the assistant's answer begins.

        Raises RequestError (400) with the template's own message where the template rejects the messages or fails on
        them.
        """
        kwargs = kwargs or {}
        for name in sorted(_RESERVED_VARIABLES & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        variables = {**self._variables, **kwargs, "messages": messages, "add_generation_prompt": True}
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise RequestError(f"the chat template made more than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the chat template failed: {error}", param="messages") from error
        except RecursionError as error:
            raise RequestError("the chat template failed: nested too deeply", param="messages") from error
        return "".join(parts)


def render_chat(template: ChatTemplate | None, messages: list[Message], kwargs: dict[str, Any] | None = None) -> str:
    """Return the prompt for `messages`. Raises RequestError (400) for a model that has no template."""
    if template is None:
        raise RequestError(_NO_TEMPLATE, param="messages")
    return template.render(messages, kwargs)


class _GenerationBlock(Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks training spans and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain class attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_same_text", [ContextReference()])
        return CallBlock(call, [], [], body).set_lineno(line)

    def _same_text(self, _context: Any, caller: Any) -> str:
        return str(caller())


def find_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the source of a folder's chat template, None if it has none. config: its tokenizer_config.json.

    Raises ConfigError for a template that cannot be read.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        templates_by_name = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: chat_template is neither text nor a list of named templates") from error
    if "default" not in templates_by_name:
        raise ConfigError(f"{folder}: of the chat templates {sorted(templates_by_name)} none is named 'default'")
    return str(templates_by_name["default"])


def special_token_texts(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the other special tokens of tokenizer_config.json, by name.

    The file has a plain text or an added-token object for each.
    """
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token_text = config.get(name)
        if isinstance(token_text, dict):
            token_text = token_text.get("content")
        if isinstance(token_text, str):
            tokens[name] = token_text
    return tokens


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return `value` as plain JSON. Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
