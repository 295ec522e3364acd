"""Where a model comes from: a local folder, a bundled one, or a hub id. No torch here, the front reads it too.

Layout: the published Hugging Face one (config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, *.safetensors with an optional model.safetensors.index.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from meltcore.errors import ConfigError
from meltcore.models.config_fields import Fields

BUNDLED_MODEL = "meltcore/sums"
BUNDLED_HYBRID = "meltcore/sums-hybrid"
_BUNDLED = {
    BUNDLED_MODEL: Path(__file__).parent.parent / "bundled" / "sums",
    BUNDLED_HYBRID: Path(__file__).parent.parent / "bundled" / "sums-hybrid",
}
# Published configurations that travel with us, so that random weights of these shapes need no download.
_PUBLISHED = {
    "Qwen/Qwen2.5-1.5B-Instruct": Path(__file__).parent / "published" / "qwen2.5-1.5b-instruct",
    "Qwen/Qwen3-0.6B": Path(__file__).parent / "published" / "qwen3-0.6b",
    "Qwen/Qwen3-30B-A3B": Path(__file__).parent / "published" / "qwen3-30b-a3b",
    "Qwen/Qwen3.5-35B-A3B": Path(__file__).parent / "published" / "qwen3.5-35b-a3b",
}

Files = Literal["config", "text", "all"]
_TEXT_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and its parsed JSON files. `name` is what the user asked for."""

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def text_config(self) -> dict[str, Any]:
        """What config.json says of the language model: in one that sees as well, it stands in a part of its own."""
        text = self.config.get("text_config") or {}
        return {**self.config, **{name: value for name, value in text.items() if value is not None}}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End ids, some of which may be of a larger vocabulary than the model's: generation_config's, one or several,
        or else the model config's; and that of the tokenizer's end token, with which chats end, since a published
        config.json may name only the one with which texts do. Raises ConfigError where one is no token id."""
        config = Fields(self.config)
        places = (Fields(self.generation_config, "generation_config.json"), config.part("text_config"), config)
        named = [place.optional("eos_token_id", []) for place in places]
        ids = next((found if isinstance(found, list) else [found] for found in named if found != []), [])
        own = self._end_id_of_tokenizer()
        return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))

    def _end_id_of_tokenizer(self) -> int | None:
        """The id of tokenizer_config.json's eos_token, where it is one of the tokens that are listed with their ids."""
        path = self.folder / "tokenizer_config.json"
        if not path.exists():
            return None
        settings = Fields(read_json(path), path.name)
        token = settings.optional("eos_token")
        if token is None:
            return None
        text = token if isinstance(token, str) else token["content"]
        for token_id, added in settings.optional("added_tokens_decoder", {}).items():
            if added["content"] == text:
                return int(token_id)
        path = self.folder / "tokenizer.json"
        listed = Fields(read_json(path), path.name).optional("added_tokens", []) if path.exists() else []
        return next((added["id"] for added in listed if added["content"] == text), None)

    @property
    def weight_files(self) -> list[Path]:
        """Every safetensors shard, in name order. Raises ConfigError where the index names a file that is not there,
        or none at all."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        names = sorted(set(Fields(read_json(index), index.name).required("weight_map")["weight_map"].values()))
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise ConfigError(f"{self.folder}: the index names {len(names)} shards, missing: {', '.join(missing)}")
        return [self.folder / name for name in names]


def open_checkpoint(model: str, *, files: Files) -> Checkpoint:
    """Find `model` and read its configuration.

    A hub id is downloaded first, with what `files` asks for: "all", "text" (everything but the weights), or "config",
    which takes the published configuration we carry where there is one.

    Raises ConfigError where there is no such folder, hub repository or config.json, or what its JSON files say cannot
    be.
    """
    folder = _find(model, files)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ConfigError(f"{folder} has no config.json, so it is no checkpoint folder")
    generation_path = folder / "generation_config.json"
    checkpoint = Checkpoint(
        name=model,
        folder=folder,
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path.exists() else {},
    )
    # What is wrong is said now, not after minutes of loading weights, when these are first asked for.
    Fields(checkpoint.config).optional("architectures")
    _ = checkpoint.eos_token_ids
    return checkpoint


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a broken one, or one that holds something else, is a ConfigError naming it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number of 5,000 digits
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object; it begins with {json.dumps(content)[:40]}")
    return content


def _find(model: str, files: Files) -> Path:
    if model in _BUNDLED:
        return _BUNDLED[model]
    if files == "config" and model in _PUBLISHED:
        return _PUBLISHED[model]
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") != 1
    if looks_local:
        raise ConfigError(
            f"{model}: no such folder (a hub id has the form owner/name; bundled are {' and '.join(_BUNDLED)})"
        )
    # Imported here: it costs 0.2 s and a local folder does not need it.
    from huggingface_hub import snapshot_download

    patterns = _TEXT_FILES + _WEIGHT_FILES if files == "all" else _TEXT_FILES
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types; each means "not to be had"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{model}: not a local folder, and the hub did not give it: {reason}") from error
