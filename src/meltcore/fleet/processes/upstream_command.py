"""Makes the command lines of upstream servers in a fleet, from a template or from the user's own command."""

from __future__ import annotations

from typing import NamedTuple

from meltcore.settings.fleet_spec import ModelSection
from meltcore.settings.server_templates import (
    TEMPLATES,
    UPSTREAM_TEMPLATES,
    fill_command,
    find_program,
    server_environment,
)

# With it vLLM has the routes /sleep and /wake_up.
_SLEEP_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}


class UpstreamCommand(NamedTuple):
    """The command that starts one replica. `environment` has all variables of the process."""

    arguments: list[str]
    environment: dict[str, str]


def upstream_command(name: str, config: ModelSection, replica: int, port: int) -> UpstreamCommand:
    """Return the command line that starts a replica. Values with blanks do not split an argument.

    Raises ConfigError for an unknown name in braces, for a missing setting that the command needs, and for a missing
    program.
    """
    assert config.command is not None
    command = config.command
    if command in UPSTREAM_TEMPLATES:
        template = TEMPLATES[command]
        command = template.command
        if config.max_model_len is not None:
            command += f" {template.flags['max_model_len']}"
        # llama.cpp divides its context among as many slots as it chooses, unless their number is given.
        if config.max_num_seqs is not None or (config.max_model_len is not None and "{context_of_all}" in command):
            command += f" {template.flags['max_num_seqs']}"
        if config.tensor_parallel_size > 1:
            command += f" {template.flags['tensor_parallel_size']}"
        if config.sleep_mode == "vllm":
            command += f" {template.flags.get('sleep_mode', '')}"
    gpus = tuple(map(str, config.replica_gpus[replica]))
    arguments = fill_command(command, _values(name, config, gpus, port), name)
    added = (_SLEEP_ENVIRONMENT if config.sleep_mode == "vllm" else {}) | config.environment
    environment = server_environment(config.python, None if config.device == "auto" else gpus, added)
    return UpstreamCommand(find_program(arguments, environment, config.python, name), environment)


def _values(name: str, config: ModelSection, gpus: tuple[str, ...], port: int) -> dict[str, str | None]:
    length, num_seqs = config.max_model_len, config.max_num_seqs
    if length is not None and config.command == "llama.cpp":
        num_seqs = num_seqs or 1
    numbers = {
        "port": port,
        "memory_bytes": config.memory,
        "max_model_len": length,
        "max_num_seqs": num_seqs,
        "context_of_all": None if length is None else length * (num_seqs or 1),
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    return {
        "checkpoint": config.checkpoint,
        "name": config.upstream_model or name,
        "gpu": gpus[0] if gpus else None,
        "gpus": ",".join(gpus) if gpus else None,
        **{name: None if value is None else str(value) for name, value in numbers.items()},
    }
