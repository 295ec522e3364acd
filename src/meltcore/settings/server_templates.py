"""Has the command lines of servers as templates: Meltcore, vLLM, SGLang, llama.cpp and TensorRT-LLM.

Names in braces stand for values. A fleet starts upstream servers from the templates, and `meltcore compare-backends`
starts all servers from them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import gpu_environment

# What a `command` may name in braces, and what replaces it.
PLACEHOLDERS = {
    "port": "the port that the server must listen on, on 127.0.0.1",
    "gpu": "the first of its GPUs, as in CUDA_VISIBLE_DEVICES",
    "gpus": "all of its GPUs, with commas between",
    "checkpoint": "`checkpoint`",
    "name": "the name of the model in this file",
    "memory_bytes": "`memory` in bytes",
    "max_model_len": "`max_model_len`",
    "max_num_seqs": "`max_num_seqs`",
    "tensor_parallel_size": "`tensor_parallel_size`",
}


class ServerTemplate(NamedTuple):
    """A command line, and the flags of each setting. The flags are added if the setting has a value.

    If the flags are an empty text, the server needs no flag for the setting. If `flags` has no entry for a setting, the
    server lacks this setting.
    """

    command: str
    flags: Mapping[str, str]


# The flags of vLLM 0.33, SGLang 0.5, llama.cpp of 2026 and TensorRT-LLM 1.2.
TEMPLATES: Mapping[str, ServerTemplate] = {
    "meltcore": ServerTemplate(
        "python -m meltcore.cli.main serve {checkpoint} --host 127.0.0.1 --port {port} --served-model-name {name}",
        {
            "max_model_len": "--max-model-len {max_model_len}",
            "max_num_seqs": "--max-num-seqs {max_num_seqs}",
            "max_num_batched_tokens": "--max-num-batched-tokens {max_num_batched_tokens}",
            "api_server_count": "--api-server-count {api_server_count}",
            "load_format": "--load-format {load_format}",
            "no_prefix_cache": "--no-enable-prefix-caching",
            "tensor_parallel_size": "--tensor-parallel-size {tensor_parallel_size}",
            "data_parallel_size": "--data-parallel-size {data_parallel_size}",
            "memory_bytes": "--memory {memory_bytes}",
        },
    ),
    "vllm": ServerTemplate(
        "vllm serve {checkpoint} --host 127.0.0.1 --port {port} --served-model-name {name}",
        {
            "max_model_len": "--max-model-len {max_model_len}",
            "max_num_seqs": "--max-num-seqs {max_num_seqs}",
            "max_num_batched_tokens": "--max-num-batched-tokens {max_num_batched_tokens}",
            "api_server_count": "--api-server-count {api_server_count}",
            "load_format": "--load-format {load_format}",
            "no_prefix_cache": "--no-enable-prefix-caching",
            "tensor_parallel_size": "--tensor-parallel-size {tensor_parallel_size}",
            "data_parallel_size": "--data-parallel-size {data_parallel_size}",
            "memory_fraction": "--gpu-memory-utilization {memory_fraction}",
            "sleep_mode": "--enable-sleep-mode",
        },
    ),
    "sglang": ServerTemplate(
        "python -m sglang.launch_server --model-path {checkpoint} --host 127.0.0.1 --port {port} "
        "--served-model-name {name}",
        {
            "max_model_len": "--context-length {max_model_len}",
            "max_num_seqs": "--max-running-requests {max_num_seqs}",
            "max_num_batched_tokens": "--chunked-prefill-size {max_num_batched_tokens}",
            "api_server_count": "--tokenizer-worker-num {api_server_count}",
            "load_format": "--load-format {load_format}",
            "no_prefix_cache": "--disable-radix-cache",
            "tensor_parallel_size": "--tp-size {tensor_parallel_size}",
            "data_parallel_size": "--dp-size {data_parallel_size}",
            "memory_fraction": "--mem-fraction-static {memory_fraction}",
        },
    ),
    # Its context is that of all slots together. Layers are split over the visible GPUs without a flag, and memory
    # beyond weights and context is not reserved.
    "llama.cpp": ServerTemplate(
        "llama-server --model {checkpoint} --host 127.0.0.1 --port {port} --alias {name} --n-gpu-layers 999",
        {
            "max_model_len": "--ctx-size {context_of_all}",
            "max_num_seqs": "--parallel {max_num_seqs}",
            "max_num_batched_tokens": "--batch-size {max_num_batched_tokens}",
            "no_prefix_cache": "--no-cache-prompt --cache-ram 0",
            "tensor_parallel_size": "",
            "memory_fraction": "",
        },
    ),
    "tensorrt-llm": ServerTemplate(
        "trtllm-serve serve {checkpoint} --host 127.0.0.1 --port {port} --backend pytorch",
        {
            "max_model_len": "--max_seq_len {max_model_len}",
            "max_num_seqs": "--max_batch_size {max_num_seqs}",
            "max_num_batched_tokens": "--max_num_tokens {max_num_batched_tokens}",
            "tensor_parallel_size": "--tp_size {tensor_parallel_size}",
            "memory_fraction": "--kv_cache_free_gpu_memory_fraction {memory_fraction}",
        },
    ),
}
UPSTREAM_TEMPLATES = tuple(name for name in TEMPLATES if name != "meltcore")  # what `command` may name


def fill_command(command: str, values: Mapping[str, str | None], name: str) -> list[str]:
    """Return the words of a command line in which `values` replace names in braces. A word with a blank stays one word.

    `name` begins every error. Raises ConfigError if the text is no command line or has no {port}. Raises ConfigError
    also if a name in braces is unknown or has the value None.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{name}: command is no command line ({error}): {command!r}") from error
    if not words or not any("{port}" in word for word in words):
        raise ConfigError(f"{name}: command must pass {{port}}, on which the server has to listen; got {command!r}")
    return [_fill_word(word, values, name) for word in words]


def find_program(arguments: Sequence[str], environment: Mapping[str, str], python: str | None, name: str) -> list[str]:
    """Return the arguments with the full path of the program. If the program is "python", `python` replaces it.

    Raises ConfigError if the program does not exist.
    """
    program = arguments[0]
    if python is not None and program in ("python", "python3"):
        program = python
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise ConfigError(
            f"{name}: the program {program!r} of its command is not there"
            + (f": looked beside {python} and in PATH" if python else " (PATH, or `python` of its own)")
        )
    return [found, *arguments[1:]]


def server_environment(python: str | None, gpus: Sequence[str] | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a server. It is this process's environment without its module path.

    `variables` are added. The server's own Python is first in PATH. The server may see only `gpus`, named as in
    CUDA_VISIBLE_DEVICES. None lets it see the GPUs of this process.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    if python is not None:
        folder = Path(python).parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
        environment.pop("VIRTUAL_ENV", None)
        if (folder.parent / "pyvenv.cfg").exists():
            environment["VIRTUAL_ENV"] = str(folder.parent)
    if gpus is not None:
        environment |= gpu_environment(gpus)
    return environment | dict(variables)


def _fill_word(word: str, values: Mapping[str, str | None], name: str) -> str:
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
