"""Loads the parts of a checkpoint for text: tokenizer, chat template, format of answers and sampling defaults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.common.tasks import DEFAULT, Task
from meltcore.models.checkpoints import checkpoint as checkpoints
from meltcore.models.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFiles,
    open_checkpoint,
)
from meltcore.serve.tasks.generation.sampling import checkpoint_defaults
from meltcore.serve.tasks.generation.structured import GrammarChecks
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.answer_format import AnswerFormat, answer_format, note_on_unknown_calls, template_defaults
from meltcore.text.chat_template import ChatTemplate, MissingTemplate, tokenizer_config
from meltcore.text.grammar import GrammarCompiler
from meltcore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """Holds the tokenizer, chat template, format of answers, sampling defaults and grammars of a checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate | MissingTemplate
    answer_format: AnswerFormat  # how the model writes reasoning and tool calls in a chat
    sampling_defaults: dict[str, Any]
    grammars: GrammarChecks

    @property
    def is_synthetic(self) -> bool:
        """Whether a substitute for the tokenizer is used, because the weights are dummy weights."""
        return self.tokenizer.is_synthetic


def find_checkpoint(config: ModelSection) -> Checkpoint:
    """Return the checkpoint's folder and configuration. A checkpoint of the Hub is downloaded.

    Raises UnservableModelError with all reasons why a GGUF file cannot be served. Raises ConfigError for other faults.
    """
    files: CheckpointFiles = "config" if config.load_format == "dummy" else "text"
    try:
        checkpoint = open_checkpoint(config.model, files=files, tokenizer=config.tokenizer)
    except UnservableModelError as error:
        if config.tokenizer is not None:
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


def find_task(config: ModelSection) -> Task:
    """Return the task of a model. Downloads the configuration if necessary.

    Raises ConfigError if the model or its configuration is not found.
    """
    task = checkpoints.find_task(config.model, dummy=config.load_format == "dummy")
    if task is DEFAULT:
        find_checkpoint(config)  # says what is wrong with one that cannot be opened
    return task


def load_text_model(config: ModelSection) -> TextModel:
    """Load the tokenizer, the chat template and the sampling defaults. This may take seconds.

    Raises ConfigError if a file is missing or invalid.
    """
    checkpoint = find_checkpoint(config)
    greedy, generation_path = config.generation_config == "greedy", checkpoint.folder / "generation_config.json"
    tokenizer = Tokenizer.from_checkpoint(checkpoint, allow_missing=config.load_format == "dummy")
    # Looked up now, the bytes of all tokens (20 MB for 150,000) are allocated together, not scattered while serving.
    for token_id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(token_id)
    defaults = template_defaults(checkpoint.config)
    template = ChatTemplate.from_checkpoint(checkpoint, defaults, config.chat_template)
    folder = checkpoint.text_folder
    response_template = None if folder is None else tokenizer_config(folder).get("response_template")
    form = answer_format(
        *(tokenizer, checkpoint.config, template, response_template),
        calls=config.tool_call_parser,
        reasoning=config.reasoning_parser == "auto",
    )
    if config.tool_call_parser == "auto" and (note := note_on_unknown_calls(response_template, form)):
        print(f"meltcore: {folder}: {note}", file=sys.stderr, flush=True)
    return TextModel(
        tokenizer=tokenizer,
        template=template,
        answer_format=form,
        sampling_defaults={} if greedy else checkpoint_defaults(checkpoint.generation_config, str(generation_path)),
        grammars=GrammarChecks(_grammar_compiler(tokenizer, checkpoint)),
    )


def _grammar_compiler(tokenizer: Tokenizer, checkpoint: Checkpoint) -> GrammarCompiler | ConfigError:
    """Return the compiler of grammars, or why there is none: requests without a grammar need none."""
    try:
        return GrammarCompiler(tokenizer, checkpoint.eos_token_ids)
    except ConfigError as error:
        return error
