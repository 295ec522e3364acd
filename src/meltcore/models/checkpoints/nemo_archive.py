"""Reads NeMo checkpoints of transcription models: a .nemo archive, or the folder into which one is unpacked.

An archive is a tar file, compressed or not: model_config.yaml, model_weights.ckpt (torch's zip of tensors) and the
files that the configuration names, such as a SentencePiece model per language. Nothing is written to disk, and no code
of a checkpoint runs.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.configs.nemo_config import CONFIG_FILE, MAX_FILE_BYTES, parse_yaml, read_config
from meltcore.models.configs.task_configs import IndicConformerConfig

WEIGHTS_FILE = "model_weights.ckpt"
# A tar file, and what gzip, bzip2 and xz raise. ValueError: a number in a header of tar.
_DAMAGED = (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error)


class NemoArchive:
    """An archive or an unpacked folder: its configuration, and its other files by name."""

    has_batch_norm = True

    def __init__(self, path: Path) -> None:
        """Open the archive or folder and read the configuration. Raises ConfigError if it cannot be read."""
        self.path = path
        try:
            self._tar = None if path.is_dir() else tarfile.open(path)  # noqa: SIM115 - open while it is read from
        except (*_DAMAGED, MemoryError) as error:
            raise ConfigError(f"{path} cannot be read as a NeMo archive, a tar file: {error}") from error
        with self.open(CONFIG_FILE) as file:
            try:
                self.config = parse_yaml(file.read(MAX_FILE_BYTES + 1), path)
            except _DAMAGED as error:
                raise ConfigError(f"{path}: {CONFIG_FILE} cannot be read: {error}") from error

    @property
    def model_config(self) -> IndicConformerConfig:
        """The model sizes in the configuration. Raises ConfigError as `read_config` does."""
        return read_config(self.config)

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises ConfigError when no file has that name."""
        try:
            if self._tar is None:
                return (self.path / Path(name).name).open("rb")
            members = {member.name.removeprefix("./"): member for member in self._tar.getmembers() if member.isfile()}
            if name in members and (file := self._tar.extractfile(members[name])) is not None:
                return file
        except _DAMAGED as error:
            raise ConfigError(f"{self.path}: {name} cannot be read: {error}") from error
        raise ConfigError(f"{self.path} has no {name}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the weights into host memory. Raises ConfigError for a file that holds anything but tensors."""
        with self.open(WEIGHTS_FILE) as file:
            # torch reads the end of its file first, which a compressed archive would decompress again each time.
            is_compressed = self._tar is not None and not isinstance(self._tar.fileobj, io.BufferedReader)
            try:
                source = io.BytesIO(file.read()) if is_compressed else file
                tensors = torch.load(source, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many types for a damaged file
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ConfigError(f"{self.path}: {WEIGHTS_FILE} cannot be read: {reason}") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(values, torch.Tensor) for values in tensors.values()):
            raise ConfigError(f"{self.path}: {WEIGHTS_FILE} must hold tensors by name")
        return dict(tensors)

    def token_texts(self, config: IndicConformerConfig) -> dict[str, list[str]]:
        """Return the text of every token, by language. U+2581 at the beginning of a text stands for a space.

        Raises ConfigError if a SentencePiece model is missing, or if its size differs from the configuration.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                "reading a transcription model's tokens needs the package sentencepiece: meltcore[audio]"
            ) from error
        tokenizers = (self.config.get("tokenizer") or {}).get("langs") or {}
        texts = {}
        for language in config.languages:
            tokenizer = tokenizers.get(language)
            name = tokenizer.get("model_path") if isinstance(tokenizer, dict) else None
            if not isinstance(name, str):
                raise ConfigError(f"{self.path}: {CONFIG_FILE} has no tokenizer.langs.{language}.model_path")
            with self.open(name.removeprefix("nemo:")) as file:
                try:
                    processor = SentencePieceProcessor(model_proto=file.read())
                    tokens = [processor.IdToPiece(token) for token in range(processor.vocab_size())]
                except (*_DAMAGED, RuntimeError) as error:  # ValueError: a token that is no UTF-8 text
                    raise ConfigError(f"{self.path}: {name} is not a SentencePiece model: {error}") from error
            size = len(tokens)
            if size != config.tokens_per_language:
                raise ConfigError(
                    f"{self.path}: the tokenizer of {language} has {size} tokens; "
                    f"the model has {config.tokens_per_language} per language"
                )
            texts[language] = tokens
        return texts

    def close(self) -> None:
        """Close the archive."""
        if self._tar is not None:
            self._tar.close()
