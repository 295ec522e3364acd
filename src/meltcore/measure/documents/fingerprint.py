"""Records hardware, driver, versions, arguments, seed and revision of a run, but no host name, path or secret."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import meltcore
from meltcore.common.process import call_with_timeout
from meltcore.measure.documents.schema import Fingerprint, Gpu

if TYPE_CHECKING:
    from meltcore.common.gpus.driver import Nvml

# Packages whose version can change a number or an answer. Read from their metadata: importing torch takes seconds.
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq",
             "msgspec", "numpy", "nvidia-ml-py")  # fmt: skip
_OPTION = re.compile(r"--?[a-z][\w.-]*", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"--?[\w.-]*(key|token|secret|password)", re.IGNORECASE)
# NAME of a NAME=value, but not TOKENIZERS_PARALLELISM, which is common and no secret.
_SECRET_NAME = re.compile(r"[\w.-]*(key|token(?!iz)|secret|password)[\w.-]*", re.IGNORECASE)
_ABSOLUTE_PATH = re.compile(r"(~[\w.-]*)?/+[^/]")
_URL_LOGIN = re.compile(r"//[^/@]*@")
_SPACE = re.compile(r"\s")
_LATER_OPTION = re.compile(r"\s--?[a-z]", re.IGNORECASE)
# A word of a command line with its quotes, as shlex delimits it; an unmatched quote is an ordinary character.
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|['"\\])+""", re.DOTALL)
_QUOTES = re.compile(r"['\"\\]")
_GIT_TIMEOUT_S = 5.0
_DRIVER_TIMEOUT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode


def take_fingerprint(arguments: Sequence[str] = (), seed: int | None = None) -> Fingerprint:
    """Return the fingerprint of this machine.

    `arguments` is the command line without the program's name; secrets and folders are removed from it.
    """
    gpus, driver = _gpus()
    return Fingerprint(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        gpu_driver=driver,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=_versions(),
        git_revision=_git_revision(),
        arguments=clean_arguments(arguments),
        seed=seed,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def clean_arguments(arguments: Sequence[str]) -> list[str]:
    """Return arguments without secrets and folders, so that they can be published.

    The value of a secret option or of a NAME_OF_KEY=value becomes "***". An absolute path becomes its last name. If an
    argument is a command line, its words are cleaned.
    """
    cleaned: list[str] = []
    is_next_secret = False
    for argument in arguments:
        cleaned.append("***" if is_next_secret else _clean_argument(argument))
        is_next_secret = not is_next_secret and bool(_SECRET_OPTION.fullmatch(argument))
    return cleaned


def _clean_argument(argument: str) -> str:
    name, separator, value = argument.partition("=")
    if separator and _OPTION.fullmatch(name):
        return f"{name}=***" if _SECRET_OPTION.fullmatch(name) else f"{name}={_clean_argument(value)}"
    # A path or a secret may contain spaces: an argument that starts with one is a command line only with an option.
    if not _LATER_OPTION.search(argument):
        if separator and _SECRET_NAME.fullmatch(name):
            return f"{name}=***"
        argument = f".../{Path(argument).name}" if _ABSOLUTE_PATH.match(argument) else argument
        argument = _URL_LOGIN.sub("//***@", argument)
    return _clean_line(argument) if _SPACE.search(argument) and not _is_json(argument) else argument


def _clean_line(line: str) -> str:
    """Return a command line with each word cleaned. The quotes and spacing of unchanged words are preserved."""
    matches = list(_WORD.finditer(line))
    arguments = [_unquote(word_match[0]) for word_match in matches]
    parts, end = [], 0
    for match, argument, cleaned in zip(matches, arguments, clean_arguments(arguments), strict=True):
        parts += [line[end : match.start()], match[0] if cleaned == argument else _quote(cleaned)]
        end = match.end()
    return "".join([*parts, line[end:]])


def _unquote(argument: str) -> str:
    try:
        return "".join(shlex.split(argument))
    except ValueError:  # an unmatched quote
        return _QUOTES.sub("", argument)


def _quote(argument: str) -> str:
    return shlex.quote(argument) if _SPACE.search(argument) or _QUOTES.search(argument) else argument


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} (model name unavailable)"


def _versions() -> dict[str, str]:
    versions = {"meltcore": meltcore.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[list[Gpu], str | None]:
    """Return the GPUs and the driver version from NVML. Without a driver, return no GPUs and None.

    If the driver does not answer in time, the error message replaces the version.
    """
    try:
        return call_with_timeout(_DRIVER_TIMEOUT_S, _query_driver)
    except TimeoutError as error:
        return [], f"NVML gave {error}"


def _query_driver() -> tuple[list[Gpu], str | None]:
    from pynvml import NVMLError

    from meltcore.common.gpus.driver import DriverStartError, NoDriverError, Nvml

    try:
        nvml = Nvml()
    except NoDriverError:
        return [], None
    except DriverStartError as error:
        return [], f"NVML error: {error.__cause__}"
    with closing(nvml):
        try:
            gpus = [_gpu(nvml, index) for index in range(nvml.count())]
            return [gpu for gpu in gpus if gpu is not None], nvml.driver()
        except NVMLError as error:
            return [], f"NVML error: {error}"


def _gpu(nvml: Nvml, index: int) -> Gpu | None:
    """Return the GPU with this index.

    Returns None if the GPU is lost, or if a cgroup denies access to it. CUDA leaves out such GPUs too.
    """
    import pynvml

    from meltcore.common.gpus.reader import memory_or_host_bytes

    try:
        handle = nvml.device(index)
        name = nvml.name(handle)
        _, total_bytes = memory_or_host_bytes(nvml, handle, name)
        return Gpu(name=name, uuid=nvml.uuid(handle), memory_bytes=total_bytes)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST):
            return None
        raise


def _git_revision() -> str | None:
    """Return the git revision of the checkout that contains this file, or None for an installed package."""
    source_file = Path(__file__)
    if _run_git(source_file.parent, "ls-files", "--error-unmatch", source_file.name) is None:
        return None
    revision = _run_git(source_file.parent, "rev-parse", "HEAD")
    changes = _run_git(source_file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if changes else revision


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", *arguments]  # the one that PATH names
        completed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None
