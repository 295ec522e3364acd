"""A server's command line as a template, so that any server can be started: ours, vLLM's, llama.cpp's.

    # comments and line breaks are free
    CUDA_VISIBLE_DEVICES=0 meltcore serve meltcore/sums --port {port} {args}

`{port}` is where a free port goes. `{args}` is where `meltcore tune` puts the setting it tries; without it the setting
goes to the end. Leading NAME=value words are environment. No shell reads the line: no globs, pipes or variables.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.results.fingerprint import clean_arguments

PORT, ARGS = "{port}", "{args}"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ServerCommand:
    """`words` still hold their placeholders; `environment` is added to ours."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def filled(self, port: int, args: Sequence[str] = ()) -> list[str]:
        """The words to start, with the port and the extra arguments in their places."""
        filled: list[str] = []
        for word in self.words:
            filled += args if word == ARGS else [word.replace(PORT, str(port))]
        return filled if ARGS in self.words else [*filled, *args]

    @property
    def published(self) -> str:
        """Fit to be kept: secrets and folders taken out, of the environment the names alone."""
        words = [
            shlex.quote(word) if PORT not in word and word != ARGS else word for word in clean_arguments(self.words)
        ]
        return " ".join([*(f"{name}=..." for name in self.environment), *words])


def parse_command(text: str, where: str = "the command") -> ServerCommand:
    """Raises ConfigError where the text is empty, cannot be split, or does not say where the port goes."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    environment: dict[str, str] = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        environment[found[1]] = found[2]
        words = words[1:]
    if not words:
        raise ConfigError(f"{where} starts nothing: it holds no command")
    if not any(PORT in word for word in words):
        raise ConfigError(f"{where} does not say where the port goes: write {PORT} there, as in `--port {PORT}`")
    return ServerCommand(tuple(words), environment)


def read_command(path: Path | str) -> ServerCommand:
    """The command in a file. Raises ConfigError as `parse_command`, and for a file that cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the command file {path}: {error}") from error
    return parse_command(text.replace("\\\n", " "), str(path))


def free_port() -> int:
    """A port that nobody listens on now. The system hands out others first, so it stays free for the moment needed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
