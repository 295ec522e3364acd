"""Makes command-line options from fields, which define name, type, default, limits and help once.

A dataclass declares its fields with `option`, a msgspec struct with `setting`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class ServeConfig:
    ...     port: int = option(8000, "TCP port.", group="HTTP server", limits={"minimum": 0, "maximum": 65_535})
    >>> parser = argparse.ArgumentParser(prog="serve")
    >>> add_options(parser, ServeConfig)  # --port N  TCP port (default: 8000).
    >>> from_options(ServeConfig, parser.parse_args(["--port", "0"]))
    ServeConfig(port=0)

The field's annotation decides how a value is read:

    bool                    a flag: --name, or --no-name if the default is True
    bool | None             two flags: --name and --no-name, the same for a bool field with action=BooleanOptionalAction
    Literal[...]            one of its values
    int, float, str         one value; a size such as 40GiB for an int whose name ends in _bytes
    tuple[int, ...]         comma-separated numbers, as for tuple[float, ...]
    tuple[str, ...]         the option may be given several times, as for tuple[Literal[...], ...]

A flag is the field's name without a unit (_s, _ms, _bytes) at its end. The `Meta` of a struct's field has the limits of
its values: ge, gt and le. If the `extra` of a type's `Meta` has a `reader`, this function converts the option's text to
a value.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, NewType, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from meltcore.common.errors import ConfigError

# Of a web page, as browsers send it: a scheme and a host in lower case, and a port that is not the scheme's own.
ORIGIN_PATTERN = r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z*]+"
ORIGIN_FORM = "a scheme and a host in lower case without a path, such as https://app.example, or '*' for all"
ADDRESS_PATTERN = r"^https?://[^/\s]+"
ADDRESS_FORM = "an address such as http://127.0.0.1:8001"
_Config = TypeVar("_Config")
_METADATA = "option"
_UNIT_SUFFIX = re.compile(r"_(s|ms|bytes)$")
_SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE | re.ASCII)
# Python also reads 1_000, +5, and the digits of all scripts, which no other program reads as it does.
_INTEGER_PATTERN = re.compile(r"-?[0-9]+")
_DECIMAL_PATTERN = re.compile(r"-?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|inf(?:inity)?|nan)", re.IGNORECASE)
_Number = TypeVar("_Number", int, float)
_NUMBER_LIMITS = {"ge": "minimum", "gt": "exclusive_minimum", "le": "maximum"}  # keys of `Meta`, arguments of `number`
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ActOption(argparse.Action):
    """Stores the value of an option. Its `const`, a function, becomes `args.act`, which the command calls.

    Without such an option, `args.act` is `run` of the command's module.
    """

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        """Store the value and the function."""
        setattr(namespace, self.dest, values)
        namespace.act = self.const


Size = NewType("Size", int)  # a number of bytes, which a user may write as 40GiB, 512MiB or 1000000


def setting(
    description: str, *, group: str = "", help: str = "", flag: str = "", short: str = "", **keywords: Any
) -> Meta:
    """Declare that a field of a struct is a key of a file, and also a command-line option.

    The result is the last item of the field's `Annotated`.

    Args:
        description: The meaning of the key, for reference pages and the JSON schema.
        help: Plain text for `--help`, if it must differ from `description`.
        group: The heading in `--help`, as in `option`.
        flag: The flag, if it is not the field's name.
        short: A second, short flag.
        keywords: Arguments of `add_argument`, which win over the annotation.
    """
    declared = {"help": help or description, "group": group, "flag": flag, "short": short, "keywords": keywords}
    return Meta(description=description, extra={_METADATA: declared})


def option(
    default: Any,
    help: str,
    *,
    group: str = "",
    flag: str = "",
    short: str = "",
    limits: Mapping[str, float] | None = None,
    **keywords: Any,
) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Args:
        default: Default of the field and of the option. The help shows it unless it is empty or the help names one.
        help: Plain text; "%" needs no escape.
        group: The heading in `--help` under which the option stands.
        flag: The flag, if it is not the field's name.
        short: A second, short flag.
        limits: Limits of each number: `minimum`, `exclusive_minimum` and `maximum` of `number`.
        keywords: Arguments of `add_argument` (metavar, type, nargs, action, ...), which win over the annotation.
    """
    metadata = {
        _METADATA: {
            "default": default,
            "help": help,
            "group": group,
            "flag": flag,
            "short": short,
            "limits": limits or {},
            "keywords": keywords,
        }
    }
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def add_options(
    parser: argparse.ArgumentParser,
    config: type,
    *names: str,
    group: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add options to `parser` for the fields of `config`, a dataclass or a struct: for all fields, or only for `names`.

    `group` replaces the headings of the fields, and `defaults` replaces their defaults. Options with the same heading
    stand together in the help, even if they come from several classes.
    """
    hints = get_type_hints(config)
    declared = _declared(config)
    groups = {entry.title: entry for entry in parser._action_groups}
    for name in names or declared:
        settings = declared[name]
        title = settings["group"] if group is None else group
        if title and title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = (defaults or {}).get(name, settings["default"])
        _add_option(groups[title] if title else parser, name, hints[name], default, settings)


def from_options(config: type[_Config], args: argparse.Namespace, **overrides: Any) -> _Config:
    """Create a `config` from the parsed arguments that have the names of its fields. `overrides` replace arguments.

    Fields of a struct that are not options are set by `overrides` alone.
    """
    field_names = {entry.name for entry in fields(config)} if is_dataclass(config) else set(_declared(config))
    parsed = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    return config(**{name: value for name, value in parsed.items() if name in field_names} | overrides)


def check_unused(args: argparse.Namespace, config: type, reason: str, *allowed: str) -> None:
    """Raise ConfigError for the first option of `config` that is set but has no effect.

    An option is set if its value is not the default. `reason` says why it has no effect. `allowed` are fields that have
    an effect.
    """
    for name, settings in _declared(config).items():
        value = getattr(args, name, None)
        if name in allowed or value is None:
            continue
        if (tuple(value) if isinstance(value, list) else value) != settings["default"]:
            raise ConfigError(f"{flag_of(config, name)} {reason}")


def flag_of(config: type, name: str) -> str:
    """Return the flag of a field of `config` that is an option."""
    return str(_declared(config)[name]["flag"] or "--" + _UNIT_SUFFIX.sub("", name).replace("_", "-"))


def fields_by_flag(config: type) -> dict[str, str]:
    """Return the fields of `config` that are options, by flag."""
    return {flag_of(config, name): name for name in _declared(config)}


def number(
    number_type: type[int] | type[float],
    *,
    minimum: float = -math.inf,
    exclusive_minimum: float = -math.inf,
    maximum: float = math.inf,
) -> Callable[[str], Any]:
    """Return an argparse reader for one finite number within the limits. `exclusive_minimum` itself is not allowed.

    The reader raises ArgumentTypeError for any other text.
    """
    limits = {"at least": minimum, "more than": exclusive_minimum, "at most": maximum}
    limits_text = " and ".join(
        f"{description} {limit if isinstance(limit, int) else f'{limit:g}'}"
        for description, limit in limits.items()
        if math.isfinite(limit)
    )
    expected = ("a whole number" if number_type is int else "a number") + (limits_text and f" of {limits_text}")

    def parse(text: str) -> Any:
        try:
            value = read_number(text, number_type)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and exclusive_minimum < value and minimum <= value <= maximum:
            return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse


def is_number(text: str) -> bool:
    """Return whether a text consists only of digits from 0 to 9, at least one."""
    return text.isascii() and text.isdigit()


def read_number(text: str, number_type: type[_Number]) -> _Number:
    """Return the number that a user wrote in digits from 0 to 9. Only spaces around the number are allowed.

    Raises ValueError for any other text, also for texts that Python would accept: 1_000, +5, and digits of other
    scripts.
    """
    pattern, stripped_text = _INTEGER_PATTERN if number_type is int else _DECIMAL_PATTERN, text.strip(" \t\r\n")
    if pattern.fullmatch(stripped_text) is None:
        raise ValueError(f"{text!r} is not a number in digits from 0 to 9")
    return number_type(stripped_text)


def size_bytes(text: str) -> int:
    """Return the number of bytes that a text such as 40GiB, 512M or 1000000 means. Units are powers of 1024.

    Raises ArgumentTypeError for any other text.
    """
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 40GiB, 512MiB or 1000000")
    return int(float(match[1]) * _SIZE_UNITS[(match[2] or "").upper()])


def not_empty(text: str) -> str:
    """Return `text`. Raises ArgumentTypeError if it is empty, as an unset shell variable is, or not UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty")
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8 text")
    return text


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8. Bytes of an argument that are not UTF-8 become surrogates."""
    return not re.search("[\ud800-\udfff]", text)


def origin(text: str) -> str:
    """Return `text` if it is a web origin. Raises ArgumentTypeError if no browser would send it as an origin."""
    if not re.fullmatch(ORIGIN_PATTERN, text):
        raise argparse.ArgumentTypeError(f"must be {ORIGIN_FORM}; got {text!r}")
    return text


def address(text: str) -> str:
    """Return `text` if it is a URL. Otherwise raise ArgumentTypeError, which does not show the URL's password."""
    if not re.match(ADDRESS_PATTERN, text):
        raise argparse.ArgumentTypeError(f"must be {ADDRESS_FORM}; got {shown_url(text)!r}")
    return text


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text contains. Raises ArgumentTypeError for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _declared(config: type) -> dict[str, dict[str, Any]]:
    """Return the declaration (`option` or `setting`) of each field that is an option, by field name."""
    if is_dataclass(config):
        return {entry.name: entry.metadata[_METADATA] for entry in fields(config) if _METADATA in entry.metadata}
    declared = {}
    for entry in msgspec.structs.fields(config):
        metas = _metas(entry.type)
        extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
        if _METADATA in extra:
            limits = {
                name: limit
                for meta in metas
                for key, name in _NUMBER_LIMITS.items()
                if (limit := getattr(meta, key)) is not None
            }
            default = entry.default if entry.default_factory is msgspec.NODEFAULT else entry.default_factory()
            declared[entry.name] = extra[_METADATA] | {"default": default, "limits": limits}
            if "reader" in extra:
                declared[entry.name]["keywords"] = {"type": extra["reader"]} | extra[_METADATA]["keywords"]
    return declared


def _metas(hint: Any) -> list[Meta]:
    """Return the metadata of a type's `Annotated` at any depth. The metadata of inner types comes first."""
    return [hint] if isinstance(hint, Meta) else [meta for part in get_args(hint) for meta in _metas(part)]


def _add_option(
    container: argparse._ActionsContainer, name: str, hint: Any, default: Any, settings: Mapping[str, Any]
) -> None:
    has_both_flags = hint == (bool | None) or settings["keywords"].get("action") is argparse.BooleanOptionalAction
    [hint] = (
        [type_arg for type_arg in get_args(hint) if type_arg is not NoneType] if NoneType in get_args(hint) else [hint]
    )
    is_negated = hint is bool and default is True and not has_both_flags
    flag = settings["flag"] or ("--no-" if is_negated else "--") + _UNIT_SUFFIX.sub("", name).replace("_", "-")
    keywords: dict[str, Any] = {"dest": name, "help": _help_text(settings["help"], hint, default)}
    if has_both_flags:
        keywords["action"] = argparse.BooleanOptionalAction
    elif hint is bool:
        keywords["action"] = "store_false" if is_negated else "store_true"
    else:
        keywords |= _parse_keywords(name, hint, settings["limits"])
    keywords |= settings["keywords"]
    flags = (settings["short"], flag) if settings["short"] else (flag,)
    container.add_argument(
        *flags, default=list(default) if keywords.get("action") in ("append", "extend") else default, **keywords
    )


def _parse_keywords(name: str, hint: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option that reads values of type `hint`."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is Size or (hint is int and name.endswith("_bytes")):
        return {"type": size_bytes, "metavar": "SIZE"}
    if hint in (int, float):
        return {"type": number(hint, **limits), "metavar": "S" if name.endswith("_s") else "N"}
    if get_origin(hint) is tuple:
        element_type = get_args(hint)[0]
        if element_type in (int, float):
            parse_number = number(element_type, **limits)
            return {
                "type": lambda text: tuple(parse_number(number_text) for number_text in text.split(",")),
                "metavar": "N,...",
            }
        return {"action": "append", **_parse_keywords(name, element_type, limits)}
    return {"type": hint if isinstance(hint, type) else str}


def _help_text(text: str, hint: Any, default: Any) -> str:
    text = text.replace("%", "%%")
    if hint is bool or default in (None, "", (), {}) or "default" in text:
        return text
    values = default if isinstance(default, tuple) else (default,)
    default_text = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text.removesuffix('.')} (default: {default_text})."


def braces_fault(text: str, names: Sequence[str]) -> str:
    """Return a text that says which names in braces are wrong. Returns "" if all of them are in `names`."""
    try:
        text.format(**dict.fromkeys(names, ""))
    except (LookupError, ValueError, AttributeError):
        known = " and ".join(f"{{{each}}}" for each in names)
        return f"got {text!r}; may hold {known} in braces, no others; write other braces twice"
    return ""


def shown_url(url: str) -> str:
    """Return a URL in a form for errors and logs: `***` replaces user, password, query and fragment."""
    address = re.sub(r"[?#].*", "?***", url, flags=re.DOTALL)
    scheme, separator, rest = address.rpartition("://")
    host, slash, path = rest.partition("/")
    if "@" in rest and "@" not in host:  # a password with a slash
        host, slash, path = rest, "", ""
    return f"{scheme}{separator}{re.sub('^.*@', '***@', host, flags=re.DOTALL)}{slash}{path}"


def server_url_fault(url: str) -> str:
    """Return why a text is no valid base URL of another server, or "" if it is valid. Passwords are not shown."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_address = False
    if not is_address:
        return f"must be an address such as http://127.0.0.1:8001; got {shown_url(url)!r}"
    if "@" in url or "?" in url or "#" in url:
        return (
            f"must have no user, password, query or fragment; got {shown_url(url)!r}; "
            "upstream_key_env names the variable with a key"
        )
    return ""
