"""Selects the device of an engine process and the bytes of memory that the engine may take, and ends the process."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

import torch

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import visible_gpus
from meltcore.common.host_memory import host_available_bytes, host_total_bytes
from meltcore.common.sizes import size_text
from meltcore.engine.memory.workspace import sleep_rounding_bytes
from meltcore.settings.config import EngineConfig

# On a CPU the caches share memory with everything else, so by default an engine takes this fraction of what is free.
_HOST_FRACTION = 0.25
# Tokens per step. A longer step delays every next token, so a server takes fewer than offline use, where latency does
# not matter. 400 requests of 128 to 1,024 tokens: 33,400 output tokens/s offline against 31,600 (H200, 2026-11-21).
_MIN_BATCHED_TOKENS, _GPU_BATCHED_TOKENS, _OFFLINE_BATCHED_TOKENS = 2048, 8192, 16_384
# GPUs with less memory take fewer: the activations of such a step must fit in the reserve, a fraction of the memory
# (memory_plan.py). An 8B model's take about 0.8 GiB for 8,192 tokens. By arithmetic: none was measured.
_GPU_BYTES, _OFFLINE_BYTES = 16 * 2**30, 32 * 2**30


def choose_device(name: str, *, num_ranks: int = 1, rank: int = 0) -> torch.device:
    """Return the device of `rank`. Ranks have neighboring GPUs.

    The name "auto" selects the first GPU, or the CPU on a machine without a GPU. Raises ConfigError if the device does
    not exist, or if the machine has GPUs that torch cannot use.
    """
    try:
        device = torch.device(_auto_device() if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    first_gpu, num_gpus = device.index or 0, torch.cuda.device_count()
    if first_gpu >= num_gpus:
        raise ConfigError(f"--device {name}: torch sees {num_gpus} CUDA devices")
    if first_gpu + num_ranks > num_gpus:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks} needs {num_ranks} GPUs from cuda:{first_gpu} on; "
            f"torch sees {num_gpus} CUDA devices"
        )
    return torch.device("cuda", first_gpu + rank) if num_ranks > 1 else device


def _auto_device() -> str:
    """Return "cuda" if torch sees a GPU, else "cpu".

    Raises ConfigError if the machine has a GPU that torch cannot use.
    """
    if torch.cuda.is_available():
        return "cuda"
    gpus = visible_gpus()
    if not gpus:
        return "cpu"
    try:
        torch.cuda.init()
        problem = "it sees none"
    except (RuntimeError, AssertionError) as error:  # as torch raises without a driver, and without CUDA in its build
        problem = str(error).splitlines()[0].rstrip(".")
    raise ConfigError(
        f"--device auto: there is GPU {', '.join(gpus)}, and torch {torch.__version__} cannot use it: {problem}; "
        "--device cpu runs on the CPU"
    )


def has_mps(device: torch.device) -> bool:
    """Return whether contexts on this GPU are clients of an MPS daemon, which may belong to another program."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if device.type != "cuda" or attribute is None:
        return False
    error, value = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    # An older driver does not know the attribute.
    return error == driver.CUresult.CUDA_SUCCESS and bool(value)


def default_batched_tokens(device: torch.device, *, is_offline: bool = False) -> int:
    """Return the default number of tokens per step, by the type of device and the memory of a GPU."""
    if device.type == "cpu":
        return _MIN_BATCHED_TOKENS
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if total_bytes < _GPU_BYTES:
        return _MIN_BATCHED_TOKENS
    return _OFFLINE_BATCHED_TOKENS if is_offline and total_bytes >= _OFFLINE_BYTES else _GPU_BATCHED_TOKENS


def describe_device(device: torch.device, num_ranks: int) -> str:
    """Return the name of the device, followed by the number of ranks if there are several."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{num_ranks} x {name}" if num_ranks > 1 else name


def describe_precision(dtype: torch.dtype, config: EngineConfig) -> str:
    """Return the data types of the computation, as names of results contain them."""
    names = [dtype_name(dtype)]
    if config.quantization != "none":
        names.append(f"{config.quantization}-weights")
    if config.kv_cache_dtype != "auto":
        names.append(f"{config.kv_cache_dtype}-kv")
    return "+".join(names)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type without the module's."""
    return str(dtype).removeprefix("torch.")


def has_budget(config: EngineConfig, device: torch.device) -> bool:
    """Return whether an engine on a shared GPU has a budget in bytes. The memory plan of such an engine is exact."""
    return config.memory_bytes is not None and device.type == "cuda"


def byte_budget(config: EngineConfig, device: torch.device, allocated_bytes: int) -> int:
    """Return the bytes of device memory that an engine, or one rank, may take: --memory, or else the free memory.

    `allocated_bytes` are the bytes of weights that are allocated already. Ranks on a CPU share the free memory. Raises
    ConfigError if --memory is more than the GPU or the host has.
    """
    if config.memory_bytes is not None:
        is_cuda = device.type == "cuda"
        total_bytes = torch.cuda.get_device_properties(device).total_memory if is_cuda else host_total_bytes()
        if config.memory_bytes > total_bytes:
            name = torch.cuda.get_device_name(device) if is_cuda else "the host"
            raise ConfigError(
                f"--memory {size_text(config.memory_bytes)} is more than {name} has: {size_text(total_bytes)}"
            )
        lost_bytes = sleep_rounding_bytes(allocated_bytes) if is_cuda and config.enable_sleep_mode else 0
        return config.memory_bytes - lost_bytes
    if device.type == "cuda":
        return allocated_bytes + torch.cuda.mem_get_info(device)[0]
    free_bytes = int(host_available_bytes() * _HOST_FRACTION)
    return (
        free_bytes // config.tensor_parallel_size if config.tensor_parallel_size > 1 else allocated_bytes + free_bytes
    )


def exit_process(status: int) -> NoReturn:
    """End this process without destroying its modules, because torch would take 0.4 s of CPU time for it (2026-11-27).

    A process that has used a GPU ends as usual: profilers such as Nsight Systems write their files then.
    """
    if torch.cuda.is_initialized():
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
