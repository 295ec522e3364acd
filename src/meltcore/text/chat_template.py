"""Finds and renders a checkpoint's chat template."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.json_file import read_json
from meltcore.text.template_sandbox import MAX_CHARS, TemplateEnvironment, TemplateLimitError, limit_cpu_time

Message = dict[str, Any]
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Variables that the server sets; a request's chat_template_kwargs cannot replace them.
_RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token", "eos_token"}
)
# Published templates have up to some 30,000. Jinja takes 12 microseconds per character of expressions.
_MAX_SOURCE_CHARS = 2**17
# Methods of texts, and filters, whose first argument is looked for in the text.
_SEEKING_METHODS = frozenset(
    {
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex"),
        *("count", "replace", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "trim"),
    }
)


class ChatTemplate:
    """Converts messages into the prompt text that a model was trained on."""

    is_usable = True

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, defaults: dict[str, Any] | None = None
    ) -> None:
        """Compile the template. Raises ConfigError for a syntax error and above _MAX_SOURCE_CHARS.

        `special_tokens` are variables such as bos_token and eos_token. `defaults` are variables that a request may
        change.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are compiled"
            )
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        except Exception as error:  # of Jinja's code generator, and of the code that it makes
            raise ConfigError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
        self.source = source
        self.constants = _constants(tree)  # in its expressions
        self.sought = _sought_strings(tree)
        data = frozenset(node.data for node in tree.find_all(nodes.TemplateData))
        self.written = self.constants | data | frozenset((special_tokens or {}).values())
        # transformers gives tools and documents to every template.
        self._variables = {"tools": None, "documents": None, **(special_tokens or {}), **(defaults or {})}

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, defaults: dict[str, Any] | None = None, path: str | None = None
    ) -> ChatTemplate | MissingTemplate:
        """Load the template in the file `path`, else the template of --tokenizer, else the checkpoint's.

        If the checkpoint's template is absent or broken, returns a MissingTemplate with the reason, since the model can
        still complete texts. Raises ConfigError if the file `path` cannot be used.
        """
        try:
            tokens = _special_tokens(checkpoint)
            if path is not None:
                return cls.from_file(Path(path), tokens, defaults)
            source = _checkpoint_source(checkpoint)
            return MissingTemplate() if source is None else cls(source, tokens, defaults)
        except ConfigError as error:
            if path is not None:
                raise
            return MissingTemplate(str(error))

    @classmethod
    def from_file(
        cls, path: Path, tokens: dict[str, str] | None = None, defaults: dict[str, Any] | None = None
    ) -> ChatTemplate:
        """Load the template of --chat-template. Raises ConfigError that names the file."""
        try:
            return cls(_read_text(path.expanduser()), tokens, defaults)
        except ConfigError as error:
            raise ConfigError(f"--chat-template {path}: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, defaults: dict[str, Any] | None = None) -> ChatTemplate | None:
        """Return the template that `find_source` finds in a folder. Returns None if there is none.

        Raises ConfigError, which names the file that cannot be read.
        """
        source = find_source(folder, tokenizer_config(folder))
        return None if source is None else cls(source, special_token_texts(folder), defaults)

    @cached_property
    def expects_text_arguments(self) -> bool:
        """Whether the template writes the arguments of a call only if they are text. Most take an object.

        It is tried: DeepSeek's templates join the arguments with texts, which fails for an object.
        """
        return self.takes_text_arguments and not self._shows_arguments({"needle": "x"})

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the template writes arguments that are text. Templates that name each parameter do not."""
        return self._shows_arguments('{"needle": "x"}')

    def _shows_arguments(self, arguments: Any) -> bool:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "call_0000", "type": "function", "function": function}
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return "needle" in self.render([user, answer]).replace("{'needle'", "")  # Python's form is no JSON
        except RequestError:
            return False

    def render(
        self, messages: list[Message], kwargs: dict[str, Any] | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt for `messages`, which ends where the assistant's answer begins.

        Without `add_generation_prompt` it ends after the last message.
        A value of None in `kwargs` leaves a variable at its default. Raises RequestError (400) with the template's own
        message if the template rejects the messages or fails on them.
        """
        kwargs = kwargs or {}
        for name in sorted(_RESERVED_VARIABLES & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        stated = {name: value for name, value in kwargs.items() if value is not None or name not in self._variables}
        variables = {**self._variables, **stated, "messages": messages}
        variables["add_generation_prompt"] = add_generation_prompt
        parts: list[str] = []
        length = 0
        try:
            with limit_cpu_time():
                for part in self._template.generate(variables):
                    length += len(part)
                    if length > MAX_CHARS:
                        raise RequestError(f"the chat template made more than {MAX_CHARS} characters", param="messages")
                    parts.append(part)
        except TemplateLimitError as error:
            raise RequestError(f"the chat template was stopped: {error}", param="messages") from error
        except RequestError:
            raise
        except (RecursionError, MemoryError) as error:
            raise RequestError("the chat template failed: nested too deeply", param="messages") from error
        except Exception as error:  # the template's code, such as NameError for 1e999, which Jinja writes as `inf`
            raise RequestError(f"the chat template failed: {error}", param="messages") from error
        return "".join(parts)


def _constants(node: nodes.Node) -> frozenset[str]:
    """Return the strings of a node and of all nodes within it."""
    found = (each for each in (node, *node.find_all(nodes.Const)) if isinstance(each, nodes.Const))
    return frozenset(each.value for each in found if isinstance(each.value, str))


def _sought_strings(tree: nodes.Template) -> frozenset[str]:
    """Return the strings that a template compares with, or passes to a method that searches a text for them."""
    where: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        where += [compare.expr, *(operand.expr for operand in compare.ops)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEEKING_METHODS:
            where += call.args[:1]
    for each in tree.find_all(nodes.Filter):
        if each.name in _SEEKING_METHODS:
            where += each.args[:1]
    return frozenset().union(*map(_constants, where))


class MissingTemplate:
    """Stands for the chat template of a model that has no template, or has one that cannot be used."""

    is_usable = False
    expects_text_arguments = takes_text_arguments = False
    source = ""

    def __init__(self, reason: str | None = None) -> None:
        """Store why the template cannot be used. None means that there is no template."""
        self.reason = reason

    def render(self, messages: list[Message], kwargs: dict[str, Any] | None = None, **_: bool) -> str:  # noqa: ARG002
        """Raise RequestError (400), because the model cannot answer chats."""
        fault = (
            "this model has no chat template" if self.reason is None else f"this model takes no chats: {self.reason}"
        )
        raise RequestError(
            f"{fault}; it completes prompts at /v1/completions, and --chat-template FILE gives it a template",
            param="messages",
        )


def _checkpoint_source(checkpoint: Checkpoint) -> str | None:
    """Return the source of the template of --tokenizer, else of the checkpoint. Returns None without a template.

    Raises ConfigError if a file cannot be read.
    """
    folders = [checkpoint.tokenizer_folder] if checkpoint.gguf else [checkpoint.tokenizer_folder, checkpoint.folder]
    for folder in folders:
        source = None if folder is None else find_source(folder, tokenizer_config(folder))
        if source is not None:
            return source
    if checkpoint.gguf is None:
        return None
    from meltcore.text.gguf_tokenizer import template_source

    return template_source(checkpoint.gguf)


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the texts of special tokens by name, as the tokenizer in use names them.

    Raises ConfigError if a file cannot be read.
    """
    if checkpoint.text_folder is not None:
        return special_token_texts(checkpoint.text_folder)
    from meltcore.text.gguf_tokenizer import special_tokens

    assert checkpoint.gguf is not None
    return special_tokens(checkpoint.gguf)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json of a folder, or an empty dict without the file.

    Raises ConfigError if the file cannot be read.
    """
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def find_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the source of a folder's chat template, or None without a template.

    The source is chat_template.jinja, else `chat_template` of tokenizer_config.json or of chat_template.json. `config`
    is the folder's tokenizer_config.json. Raises ConfigError if the template cannot be read.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    template = config.get("chat_template")
    if template is None and (folder / "chat_template.json").exists():  # of the processor of a model with vision
        template = read_json(folder / "chat_template.json").get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        templates_by_name = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: chat_template is neither text nor a list of named templates") from error
    if "default" not in templates_by_name:
        raise ConfigError(
            f"{folder}: of the chat templates {sorted(map(str, templates_by_name))} none is named 'default'"
        )
    source = templates_by_name["default"]
    if not isinstance(source, str):
        raise ConfigError(f"{folder}: the chat template named 'default' is {source!r}; it must be a text")
    return source


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def special_token_texts(folder: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the other named special tokens of a folder, as transformers does.

    Each field whose name ends in `_token` names a special token, as a plain text or an added-token object. Raises
    ConfigError if a file cannot be read.
    """
    config = _special_settings(folder)
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):  # names of the model's own, or a list
        named = config.get(key)
        found |= named if isinstance(named, dict) else {}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


def named_special_tokens(folder: Path) -> list[str | dict[str, Any]]:
    """Return all special tokens that a folder names, each a text or an added-token object.

    Raises ConfigError for a file that cannot be read.
    """
    config = _special_settings(folder)
    found = [config.get(name) for name in SPECIAL_NAMES]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        listed = config.get(key)
        found += listed if isinstance(listed, list) else []
    return [
        value
        for value in found
        if isinstance(value.get("content") if isinstance(value, dict) else value, str) and value
    ]


def _special_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with its fields replaced by the fields of special_tokens_map.json.

    special_tokens_map.json is not read if tokenizer_config.json has `added_tokens_decoder`.
    """
    config = tokenizer_config(folder)
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and path.exists():
        config |= read_json(path)
    return config
