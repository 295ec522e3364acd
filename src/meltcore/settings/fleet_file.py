"""Reads fleet.yaml into a FleetSpec. An error names the file, the path of the key, the value, and the valid values.

msgspec alone names no key of a mapping ("$.models[...].port"), so the values are converted field by field.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from meltcore.common.errors import ConfigError
from meltcore.common.options import Size, is_utf8, shown_url, size_bytes
from meltcore.settings.fleet_checks import FleetError, check_fleet
from meltcore.settings.fleet_spec import MAX_SIZE_BYTES, FleetSpec

MAX_FILE_BYTES = 2**20
_MAX_VALUE_CHARS = 80
# YAML also reads 1_000, +5, 010 (8), 0x10 and 1:30 (90) as numbers, which a file of settings hardly means.
_PLAIN_NUMBER = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+][0-9]+)?|[-+]?\.(?:inf|nan)", re.IGNORECASE
)
_MAX_NODES = 100_000  # with every alias as what it stands for: a few nested ones can stand for billions


def load_fleet(path: str | Path) -> FleetSpec:
    """Return the checked contents of a fleet.yaml. Raises ConfigError that names file, key, value and limit."""
    file = Path(path)
    try:
        if not file.exists():
            raise ConfigError(f"{file}: no such file; `meltcore fleet init {file}` writes one")
        if not file.is_file():
            kind = "a folder" if file.is_dir() else "a named pipe" if file.is_fifo() else "a device or a socket"
            raise ConfigError(f"{file}: is {kind}; name a file, such as fleet.yaml")
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: {size:,} bytes; a fleet file has at most {MAX_FILE_BYTES:,}")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"{file}: is empty; `meltcore fleet init` writes a file to begin with")
    return parse_fleet(text, str(file))


def parse_fleet(text: str, name: str = "fleet.yaml") -> FleetSpec:
    """Parse the text of a fleet.yaml and return its checked contents.

    Raises ConfigError, which calls the file `name`, for the first fault.
    """
    try:
        spec: FleetSpec = _convert_struct(_read_yaml(text), FleetSpec, "")
        check_fleet(spec)
    except FleetError as error:
        raise ConfigError(f"{name}: {error}") from error
    return spec


_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Reads only plain YAML values, and refuses a key that occurs twice.

    YAML itself would silently keep the last one.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_nodes(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise FleetError("", f"line {line}: a key must be plain text")
            if key_node.value in keys:
                raise FleetError("", f"line {line}: {key_node.value!r} stands twice in the same mapping")
            keys.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _plain_number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Return a number that is written in decimal digits. Raises FleetError for other notations that YAML accepts."""
    if _PLAIN_NUMBER.fullmatch(node.value) is None:
        shown = _shown(node.value)
        raise FleetError(
            "", f"line {node.start_mark.line + 1}: got {shown}; write a number in plain digits, text in quotes"
        )
    is_int = node.tag == _INT_TAG
    value: int | float = loader.construct_yaml_int(node) if is_int else loader.construct_yaml_float(node)
    return value


for _tag in (_INT_TAG, _FLOAT_TAG):
    _Loader.add_constructor(_tag, _plain_number)


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes of the tree at `node`, with aliases expanded. Raises FleetError past a limit.

    `known` maps the id of a node to its number of nodes. The number is 0 while the node is being counted.
    """
    if (count := known.get(id(node))) is None:
        known[id(node)] = 0
        entries = [] if isinstance(node, yaml.ScalarNode) else node.value
        children = [child for entry in entries for child in (entry if isinstance(entry, tuple) else (entry,))]
        count = known[id(node)] = 1 + sum(_count_nodes(child, known) for child in children)
    line = f"line {node.start_mark.line + 1}"
    if count == 0:
        raise FleetError("", f"{line}: an alias stands for a value that holds it")
    if count > _MAX_NODES:
        raise FleetError("", f"{line}: aliases make more than {_MAX_NODES:,} values; write a smaller file")
    return count


def _read_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506, a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise FleetError("", f"{line}not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FleetError("", f"not YAML: {str(error).splitlines()[0]}") from error


def _convert_struct(value: Any, struct: type[Any], path: str) -> Any:
    """Return the mapping `value` as a `struct`. Raises FleetError if a key is unknown or missing."""
    if not isinstance(value, dict):
        raise FleetError(
            path, f"got {_shown(value)}; must be a mapping with keys of {_names(struct.__struct_fields__)}"
        )
    hints = get_type_hints(struct, include_extras=True)
    for key in value:
        if key not in hints:
            known = _names(struct.__struct_fields__)
            raise FleetError(join(path, key), f"unknown key{_hint(key, struct.__struct_fields__)}; known: {known}")
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in value:
            raise FleetError(join(path, field.name), "missing")
    return struct(**{key: _convert(entry, hints[key], join(path, key)) for key, entry in value.items()})


def _convert(value: Any, hint: Any, path: str) -> Any:
    """Return `value` as the type `hint`. Raises FleetError with the path of the value."""
    base, meta = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    if get_origin(base) in (Union, UnionType):
        if value is None and NoneType in get_args(base):
            return None
        arms = [arm for arm in get_args(base) if arm is not NoneType]
        is_list = isinstance(value, list)
        arm = next((arm for arm in arms if (get_origin(_bare(arm)) is tuple) == is_list), arms[0])
        return _convert(value, arm, path)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        return _convert_struct(value, base, path)
    if base is Size:
        return _convert_size(value, path)
    if get_origin(base) is dict:
        most = next((each.max_length for each in meta if each.max_length), None)
        return _convert_dict(value, base, path, most)
    if get_origin(base) is tuple:
        return _convert_list(value, base, path, meta)
    return _convert_leaf(value, hint, base, meta, path)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _convert_dict(value: Any, hint: Any, path: str, most: int | None) -> dict[str, Any]:
    if isinstance(value, dict) and most is not None and len(value) > most:
        raise FleetError(path, f"has {len(value):,} entries; must have at most {most:,}")
    if not isinstance(value, dict):
        raise FleetError(path, f"got {_shown(value)}; must be a mapping")
    key_hint, value_hint = get_args(hint)
    return {
        _convert(key, key_hint, join(path, key)): _convert(entry, value_hint, join(path, key))
        for key, entry in value.items()
    }


def _convert_list(value: Any, hint: Any, path: str, meta: tuple[Any, ...]) -> tuple[Any, ...]:
    least = max((each.min_length or 0 for each in meta), default=0)
    most = min((each.max_length for each in meta if each.max_length is not None), default=None)
    length = f" of {least}" if least == most else f" of at least {least}" if least else ""
    length += f" of at most {most}" if most not in (None, least) else ""
    if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
        raise FleetError(path, f"got {_shown(value)}; must be a list{length}")
    return tuple(_convert(entry, get_args(hint)[0], f"{path}[{index}]") for index, entry in enumerate(value))


def _convert_size(value: Any, path: str) -> Size:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    try:
        size = value if is_number else size_bytes(value if isinstance(value, str) else "")
    except (argparse.ArgumentTypeError, ValueError, OverflowError) as error:
        raise FleetError(path, f"got {_shown(value)}; must be a size such as 40GiB, 512MiB or 1000000") from error
    if size > MAX_SIZE_BYTES:
        raise FleetError(path, f"got {_shown(value)}; must be at most {MAX_SIZE_BYTES // 2**40:,} TiB")
    return Size(size)


def _convert_leaf(value: Any, hint: Any, base: Any, meta: tuple[Any, ...], path: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise FleetError(path, f"got {value}; must be a finite number")
    if isinstance(value, str) and "\0" in value:  # which no path, command or address can hold
        raise FleetError(path, "has a NUL character; remove it")
    if isinstance(value, str) and not is_utf8(value):
        raise FleetError(path, f"got {_shown(value)}; has half of a character, which is no UTF-8 text")
    extra = {key: entry for each in meta for key, entry in (each.extra or {}).items()}
    allowed = tuple(extra["choices"]()) if "choices" in extra else get_args(base) if get_origin(base) is Literal else ()
    try:
        if "choices" in extra and value not in allowed:
            raise msgspec.ValidationError
        if "file_pattern" in extra and isinstance(value, str) and not re.search(extra["file_pattern"], value):
            raise msgspec.ValidationError
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        expected = extra.get("expected") or str(error).removeprefix("Expected ").partition(", got")[0].replace("`", "")
        quotes = "; put it in quotes" if base is str and isinstance(value, int | float) else ""
        named = (*allowed, extra["other_form"]) if "other_form" in extra else allowed
        needed = f"{_names(named, 'or')}{_hint(value, allowed)}" if allowed else f"{expected}{quotes}"
        raise FleetError(path, f"got {_shown_setting(value, extra)}; must be {needed}") from error


def _shown_setting(value: Any, extra: dict[str, Any]) -> str:
    """Return a value for an error. Keys are not shown, and addresses are shown without passwords."""
    if extra.get("is_secret"):
        return "a value that is not shown"
    return _shown(shown_url(value) if extra.get("is_address") and isinstance(value, str) else value)


def join(path: str, key: Any) -> str:
    """Return the path of a key below `path`."""
    return f"{path}.{key}" if path else str(key)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        text = "a value that is too long to show"
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _names(names: Iterable[Any], conjunction: str = "and") -> str:
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {conjunction} {texts[-1]}"


def _hint(value: Any, names: Iterable[Any]) -> str:
    close = difflib.get_close_matches(str(value), [str(name) for name in names], n=1)
    return f" (did you mean {close[0]}?)" if close else ""
