"""Templates of commands that start any server: ours, vLLM's, llama.cpp's.

    # comments and line breaks are allowed
    CUDA_VISIBLE_DEVICES=0 meltcore serve meltcore/sums --port {port} {args}

`{port}` is replaced by a free port, `{args}` by the settings that `meltcore tune` tries; without `{args}` they are
appended. Leading NAME=value assignments are environment variables. No shell reads the line: no globs, pipes, variables.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.fingerprint import clean_arguments

PORT, ARGS = "{port}", "{args}"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ServerCommand:
    """A command template: arguments with placeholders, and environment variables that are added to ours.

    Without `inherits`, `environment` is the whole environment, and results do not show its names.
    """

    template: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    inherits: bool = True

    def argv(self, port: int, args: Sequence[str] = ()) -> list[str]:
        """Return the arguments to start, with `port` and `args` in place of the placeholders."""
        argv: list[str] = []
        for argument in self.template:
            argv += args if argument == ARGS else [argument.replace(PORT, str(port))]
        return argv if ARGS in self.template else [*argv, *args]

    @property
    def variables(self) -> dict[str, str]:
        """The whole environment of the server."""
        return {**(os.environ if self.inherits else {}), **self.environment}

    @property
    def redacted(self) -> str:
        """The template as results store it: without secrets, folders and values of environment variables."""
        parts = [
            shlex.quote(argument) if PORT not in argument and argument != ARGS else argument
            for argument in clean_arguments(self.template)
        ]
        return " ".join([*(f"{name}=..." for name in self.environment if self.inherits), *parts])


def parse_command(text: str, source: str = "the command") -> ServerCommand:
    """Parse a template. Error messages name its `source`.

    Raises ConfigError if the text is empty, cannot be split or has no {port}.
    """
    try:
        parts = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{source} cannot be parsed: {error}") from error
    environment: dict[str, str] = {}
    while parts and (assignment := _ASSIGNMENT.fullmatch(parts[0])):
        environment[assignment[1]] = assignment[2]
        parts = parts[1:]
    if not parts:
        raise ConfigError(f"{source} is empty: it names no program to start")
    if not any(PORT in part for part in parts):
        raise ConfigError(f"{source} has no {PORT}: write it where the port goes, as in `--port {PORT}`")
    return ServerCommand(tuple(parts), environment)


def read_command(path: Path | str) -> ServerCommand:
    """Parse the template in a file. Raises ConfigError as `parse_command`, and for a file that cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the command file {path}: {error}") from error
    return parse_command(text.replace("\\\n", " "), str(path))
