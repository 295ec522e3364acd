"""Command lines of foreign servers: built-in templates, and names in braces that are replaced."""

from __future__ import annotations

import os
import shlex
import shutil
import string
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meltcore.config import ForeignConfig
from meltcore.errors import ConfigError


class CommandTemplate(NamedTuple):
    """A command line, and what is added for a setting that is given."""

    command: str
    max_model_len: str
    max_num_seqs: str
    tensor_parallel_size: str = ""


# The flags of vLLM 0.33, SGLang 0.5, llama.cpp of 2026 and TensorRT-LLM 1.2.
TEMPLATES: Mapping[str, CommandTemplate] = {
    "vllm": CommandTemplate(
        "vllm serve {checkpoint} --host 127.0.0.1 --port {port} --served-model-name {name}",
        "--max-model-len {max_model_len}",
        "--max-num-seqs {max_num_seqs}",
        "--tensor-parallel-size {tensor_parallel_size}",
    ),
    "sglang": CommandTemplate(
        "python -m sglang.launch_server --model-path {checkpoint} --host 127.0.0.1 --port {port} "
        "--served-model-name {name}",
        "--context-length {max_model_len}",
        "--max-running-requests {max_num_seqs}",
        "--tp-size {tensor_parallel_size}",
    ),
    # Its context is that of all slots together. Several visible GPUs are used without a flag.
    "llama.cpp": CommandTemplate(
        "llama-server --model {checkpoint} --host 127.0.0.1 --port {port} --alias {name} --n-gpu-layers 999",
        "--ctx-size {context_of_all}",
        "--parallel {max_num_seqs}",
    ),
    "tensorrt-llm": CommandTemplate(
        "trtllm-serve serve {checkpoint} --host 127.0.0.1 --port {port} --backend pytorch",
        "--max_seq_len {max_model_len}",
        "--max_batch_size {max_num_seqs}",
        "--tp_size {tensor_parallel_size}",
    ),
}


class ForeignCommand(NamedTuple):
    """How one replica is started. environment: the whole environment of the process."""

    arguments: list[str]
    environment: dict[str, str]


def foreign_command(config: ForeignConfig, replica: int, port: int) -> ForeignCommand:
    """Return the command of a replica, each argument whole whatever blanks its values have.

    Raises ConfigError for an unknown name in braces, a setting that it needs, and a program that is not there.
    """
    assert config.command is not None
    template = TEMPLATES.get(config.command)
    if template is None:
        command = config.command
    else:
        command = template.command
        if config.max_model_len is not None:
            command += f" {template.max_model_len}"
        # llama.cpp divides its context among as many slots as it chooses, unless their number is given.
        if config.max_num_seqs is not None or (config.max_model_len is not None and "{context_of_all}" in command):
            command += f" {template.max_num_seqs}"
        if config.tensor_parallel_size > 1:
            command += f" {template.tensor_parallel_size}"
    values = _values(config, replica, port)
    arguments = [_replace(word, values, config.names[0]) for word in _split(command, config.names[0])]
    environment = _environment(config, replica)
    program = arguments[0]
    if config.python is not None and program in ("python", "python3"):
        program = config.python
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise ConfigError(
            f"{config.names[0]}: the program {program!r} of its command is not there"
            + (f": looked beside {config.python} and in PATH" if config.python else " (PATH, or `python` of its own)")
        )
    return ForeignCommand([found, *arguments[1:], *config.arguments], environment)


def _values(config: ForeignConfig, replica: int, port: int) -> dict[str, str | None]:
    gpus = config.gpus[replica] if config.gpus else ()
    length, num_seqs = config.max_model_len, config.max_num_seqs
    if length is not None and config.command == "llama.cpp":
        num_seqs = num_seqs or 1
    numbers = {
        "port": port,
        "memory_bytes": config.memory_bytes,
        "max_model_len": length,
        "max_num_seqs": num_seqs,
        "context_of_all": None if length is None else length * (num_seqs or 1),
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    return {
        "checkpoint": config.checkpoint,
        "name": config.upstream_model or config.names[0],
        "gpu": gpus[0] if gpus else None,
        "gpus": ",".join(gpus) if gpus else None,
        **{name: None if value is None else str(value) for name, value in numbers.items()},
    }


def _split(command: str, name: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{name}: command is no command line ({error}): {command!r}") from error
    if not words or not any("{port}" in word for word in words):
        raise ConfigError(f"{name}: command must pass {{port}}, on which the server has to listen; got {command!r}")
    return words


def _replace(word: str, values: Mapping[str, str | None], name: str) -> str:
    try:
        named = [found for _, found, _, _ in string.Formatter().parse(word) if found is not None]
    except ValueError as error:
        raise ConfigError(f"{name}: {word!r} of command: {error}; write a brace that is meant twice") from error
    for each in named:
        if each not in values:
            known = ", ".join(f"{{{key}}}" for key in values)
            raise ConfigError(f"{name}: command has the unknown {{{each}}}; known are {known}")
        if values[each] is None:
            raise ConfigError(f"{name}: command uses {{{each}}}, and the model has no such setting")
    return word.format_map({key: value for key, value in values.items() if value is not None})


def _environment(config: ForeignConfig, replica: int) -> dict[str, str]:
    """Return our environment, with the server's own Python first in PATH and without our modules."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    if config.python is not None:
        folder = Path(config.python).parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
        environment.pop("VIRTUAL_ENV", None)
        if (folder.parent / "pyvenv.cfg").exists():
            environment["VIRTUAL_ENV"] = str(folder.parent)
    if config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus[replica])
    return environment | config.environment
