"""The text-related parts of a checkpoint: tokenizer, chat template, reasoning parser and sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.models.checkpoints import checkpoint as checkpoints
from meltcore.models.checkpoints.checkpoint import (
    TRANSLATION_ARCHITECTURE,
    Checkpoint,
    CheckpointFiles,
    is_synthesis_model,
    open_checkpoint,
)
from meltcore.serve.tasks.generation.sampling import checkpoint_defaults
from meltcore.settings.config import ModelConfig
from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.reasoning import ReasoningParser, reasoning_parser, template_defaults
from meltcore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from meltcore.serve.tasks.translation.translations import TranslationText


@dataclass(frozen=True)
class TextModel:
    """The tokenizer, chat template, reasoning parser and sampling defaults of a checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate | MissingTemplate
    reasoning_parser: ReasoningParser | None  # of a model that may reason before it answers a chat
    sampling_defaults: dict[str, Any]

    @property
    def is_synthetic(self) -> bool:
        """Whether the tokenizer is a substitute, for dummy weights."""
        return self.tokenizer.is_synthetic


def find_checkpoint(config: ModelConfig) -> Checkpoint:
    """Return the checkpoint's folder and configuration, downloaded if it is a hub's.

    Raises UnservableModelError with all reasons why a GGUF file cannot be served, and ConfigError.
    """
    engine = config.engine
    files: CheckpointFiles = "config" if engine.load_format == "dummy" else "text"
    try:
        checkpoint = open_checkpoint(engine.model, files=files, tokenizer=engine.tokenizer)
    except UnservableModelError as error:
        if engine.tokenizer is not None:
            raise
        raise UnservableModelError(error.source, (*error.reasons, *_tokenizer_reasons(Path(error.source)))) from error
    if checkpoint.gguf is not None and checkpoint.text_folder is None:
        reasons = _tokenizer_reasons(checkpoint.gguf.path)
        if reasons:
            raise UnservableModelError(str(checkpoint.gguf.path), reasons)
    return checkpoint


def _tokenizer_reasons(path: Path) -> list[str]:
    """Return the reasons why the tokenizer of a GGUF file is not supported."""
    from meltcore.text.gguf_tokenizer import tokenizer_reasons  # imports gguf and numpy, which others do not need

    return tokenizer_reasons(path)


def is_transcription_model(config: ModelConfig) -> bool:
    """Return whether the model transcribes speech: it has no text model. Raises ConfigError."""
    return checkpoints.is_transcription_model(config.engine.model, dummy=config.engine.load_format == "dummy")


def find_task(config: ModelConfig) -> str:
    """Return what kind of backend a model needs, once its configuration is on this machine. Raises ConfigError."""
    if is_transcription_model(config):
        task = "transcription"
    elif is_synthesis_model(config.engine.model, dummy=config.engine.load_format == "dummy"):
        task = "synthesis"
    else:
        task = "translation" if _is_translation(find_checkpoint(config)) else "generation"
    if config.normalizer != "itt" and task != "translation":
        raise ConfigError(f"--normalizer {config.normalizer}: {config.engine.model} is not a translation checkpoint")
    return task


def _is_translation(checkpoint: Checkpoint) -> bool:
    return TRANSLATION_ARCHITECTURE in (checkpoint.config.get("architectures") or [])


def load_text(config: ModelConfig) -> TextModel | TranslationText:
    """Load what the text side of a model needs. Takes up to seconds. Raises ConfigError."""
    checkpoint = find_checkpoint(config)
    if _is_translation(checkpoint):
        from meltcore.serve.tasks.translation.translations import load_translation_text  # needs meltcore[translate]

        return load_translation_text(config, checkpoint)
    return load_text_model(config)


def load_text_model(config: ModelConfig) -> TextModel:
    """Load tokenizer, chat template and sampling defaults. Takes up to seconds. Raises ConfigError."""
    checkpoint = find_checkpoint(config)
    greedy, generation_path = config.generation_config == "greedy", checkpoint.folder / "generation_config.json"
    tokenizer = Tokenizer.from_checkpoint(checkpoint, allow_missing=config.engine.load_format == "dummy")
    # Looked up now, the bytes of all tokens (20 MB for 150,000) are allocated together, not scattered while serving.
    for token_id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(token_id)
    defaults = template_defaults(checkpoint.config)
    template = ChatTemplate.from_checkpoint(checkpoint, defaults, config.engine.chat_template)
    return TextModel(
        tokenizer=tokenizer,
        template=template,
        reasoning_parser=reasoning_parser(tokenizer, checkpoint.config, template),
        sampling_defaults={} if greedy else checkpoint_defaults(checkpoint.generation_config, str(generation_path)),
    )
