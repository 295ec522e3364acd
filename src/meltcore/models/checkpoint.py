"""Where a model comes from: a local folder, a bundled one, or a hub id. No torch here, the front reads it too.

Layout: the published Hugging Face one (config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, *.safetensors with an optional model.safetensors.index.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meltcore.errors import ConfigError

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
        return {**self.config, **(self.config.get("text_config") or {})}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End ids: generation_config's (one or several) first, else the model config's."""
        found = self.generation_config.get("eos_token_id", self.text_config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    @property
    def weight_files(self) -> list[Path]:
        """Every safetensors shard, in name order. Raises ConfigError where the index names a file that is not there."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        names = sorted(set(read_json(index)["weight_map"].values()))
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise ConfigError(f"{self.folder}: the index names {len(names)} shards, missing: {', '.join(missing)}")
        return [self.folder / name for name in names]


def open_checkpoint(model: str, *, files: Files) -> Checkpoint:
    """Find `model` and read its configuration.

    A hub id is downloaded first, with what `files` asks for: "all", "text" (everything but the weights), or "config",
    which takes the published configuration we carry where there is one.

    Raises ConfigError where there is no such folder, hub repository or config.json.
    """
    folder = _find(model, files)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ConfigError(f"{folder} has no config.json, so it is no checkpoint folder")
    generation_path = folder / "generation_config.json"
    return Checkpoint(
        name=model,
        folder=folder,
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path.exists() else {},
    )


def read_json(path: Path) -> Any:
    """Parse one JSON file; a broken one is a ConfigError naming it."""
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


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
