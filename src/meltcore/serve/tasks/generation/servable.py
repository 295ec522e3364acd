"""Finds all reasons why a model cannot be served, before a server starts anything."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.common.host_memory import trim_memory
from meltcore.common.tasks import DEFAULT, Task
from meltcore.models.checkpoints import checkpoint as checkpoints
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, Checkpoint, check_shards, find_folder, folder_reasons
from meltcore.serve.tasks.generation.text_model import find_checkpoint, find_task
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.tokenizer import Tokenizer


def check_servable(config: ModelSection) -> Task:
    """Return the task of a model. Raises ConfigError with all reasons why the model cannot be served.

    The files of the model, its tokenizer and its chat template are checked. For a model on the Hub, all files except
    safetensors files are downloaded for this, as a server would do next.
    """
    tokenizer = _reason_of_tokenizer(config.tokenizer)
    if tokenizer is not None:
        config = _with_good_tokenizer(config)
    source, of_files = _reasons_of_files(config)
    trim_memory()  # a tokenizer of 150,000 tokens left 100 MB to the process that goes on as the supervisor
    named = [tokenizer, _reason_of_template(config.chat_template)]
    reasons = [*of_files, *(reason for reason in named if reason is not None)]
    if len(reasons) == 1 and (source is None or not of_files):  # it says what it is about
        raise ConfigError(reasons[0])
    if reasons:
        raise UnservableModelError(source or config.model, reasons)
    return checkpoints.find_task(config.model, dummy=config.load_format == "dummy")


def _reasons_of_files(config: ModelSection) -> tuple[str | None, list[str]]:
    """Return the file or folder of a model, and all reasons in its files why the model cannot be served.

    The path is None if the reasons already name it.
    """
    try:
        if find_task(config) is not DEFAULT:
            if config.load_format != "dummy":
                check_shards(config.model)
            return None, []
        checkpoint = find_checkpoint(config)
    except UnservableModelError as error:
        broken = _reasons_of_gguf_tokenizer(Path(error.source)) if config.tokenizer is None else []
        return error.source, [*error.reasons, *broken]
    except ConfigError as error:
        if config.tokenizer is not None:
            return None, [str(error)]
        source, others = _reasons_of_files(_with_good_tokenizer(config))
        return source, list(dict.fromkeys([str(error), *others]))
    if checkpoint.gguf is not None:
        broken = _reasons_of_gguf_tokenizer(checkpoint.gguf.path) if checkpoint.text_folder is None else []
        return str(checkpoint.gguf.path), broken
    return str(checkpoint.folder), _reasons_of_folder(checkpoint, config)


def _with_good_tokenizer(config: ModelSection) -> ModelSection:
    """Return the settings with a valid tokenizer in place of a faulty one.

    With it, the faults of the model's other files can be found.
    """
    return msgspec.structs.replace(config, tokenizer=BUNDLED_MODEL)


def _reasons_of_folder(checkpoint: Checkpoint, config: ModelSection) -> list[str]:
    is_dummy, folder = config.load_format == "dummy", checkpoint.text_folder
    reasons = folder_reasons(checkpoint, is_dummy=is_dummy, has_overrides=bool(config.hf_overrides))
    assert folder is not None, "a folder has its own tokenizer, or that of --tokenizer"
    if config.tokenizer is None and (not is_dummy or (folder / "tokenizer.json").exists()):
        try:
            Tokenizer.from_folder(folder)
        except ConfigError as error:
            reasons.append(str(error))
    return reasons


def _reasons_of_gguf_tokenizer(path: Path) -> list[str]:
    """Return why the tokenizer of a GGUF file is broken, although its type is supported."""
    from meltcore.text.gguf_tokenizer import broken_reasons  # imports gguf and numpy, which others do not need

    return broken_reasons(path)


def _reason_of_tokenizer(name: str | None) -> str | None:
    """Return why the tokenizer of --tokenizer cannot be used, or None if it can be used."""
    if name is None:
        return None
    try:
        folder = find_folder(name, "text")
        Tokenizer.from_folder(folder)
        _ = Checkpoint(name, folder, {}, {}).eos_token_ids  # reads the other files
    except ConfigError as error:
        reason = str(error)
        return f"--tokenizer {reason}" if reason.startswith(name) else f"--tokenizer {name}: {reason}"
    return None


def _reason_of_template(path: str | None) -> str | None:
    """Return why the template of --chat-template cannot be used, or None if it can be used."""
    try:
        if path is not None:
            ChatTemplate.from_file(Path(path))
    except ConfigError as error:
        return str(error)
    return None
