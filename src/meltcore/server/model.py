"""What a front knows of the model it serves: its words, and the limits that the engine tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from meltcore.config import ServerConfig
from meltcore.engine.messages import EngineReady
from meltcore.errors import ConfigError
from meltcore.models.checkpoint import Checkpoint, open_checkpoint
from meltcore.server.sampling import checkpoint_defaults
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.thinking import ThoughtMarks, template_defaults
from meltcore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSide:
    """All of a checkpoint that has to do with text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    thought_marks: ThoughtMarks | None  # of a model that may think before it answers a chat
    sampling_defaults: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """What is served, once it is loaded."""

    names: tuple[str, ...]  # every one is accepted, the first is answered with
    text: TextSide
    engine: EngineReady
    created: int  # Unix seconds


def common_limits(engines: Sequence[EngineReady]) -> EngineReady:
    """What every replica can do; the first one's memory table and times stand for all."""
    return msgspec.structs.replace(
        engines[0],
        max_model_len=min(engine.max_model_len for engine in engines),
        max_num_seqs=min(engine.max_num_seqs for engine in engines),
        pages_total=min(engine.pages_total for engine in engines),
        load_s=max(engine.load_s for engine in engines),
    )


def find_checkpoint(config: ServerConfig) -> Checkpoint:
    """The checkpoint's folder and configuration, fetched where it is a hub's. Raises ConfigError."""
    dummy = config.engine.load_format == "dummy"
    return open_checkpoint(config.engine.model, files="config" if dummy else "text")


def load_text(config: ServerConfig, checkpoint: Checkpoint) -> TextSide:
    """Tokenizer, chat template and sampling defaults. Takes up to seconds. Raises ConfigError."""
    greedy, generation_path = config.generation_config == "greedy", checkpoint.folder / "generation_config.json"
    tokenizer = _load_tokenizer(checkpoint, may_be_missing=config.engine.load_format == "dummy")
    # Looked up now, all tokens' texts take their room (20 MB for 150,000) at once, not bit by bit while serving.
    for token_id in range(tokenizer.vocab_size):
        tokenizer.piece(token_id)
    return TextSide(
        tokenizer=tokenizer,
        template=ChatTemplate.from_folder(checkpoint.folder, template_defaults(checkpoint.config)),
        thought_marks=ThoughtMarks.of(tokenizer, checkpoint.config),
        sampling_defaults={} if greedy else checkpoint_defaults(checkpoint.generation_config, str(generation_path)),
    )


def _load_tokenizer(checkpoint: Checkpoint, *, may_be_missing: bool) -> Tokenizer:
    folder = checkpoint.folder
    if not may_be_missing or (folder / "tokenizer.json").exists():
        return Tokenizer.from_folder(folder)
    vocab_size = checkpoint.text_config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder}/config.json has no vocab_size to make a synthetic tokenizer for")
    return Tokenizer.synthetic_bytes(vocab_size)
