"""What a run ran on and with: hardware, driver, versions, arguments, seed, revision. No host name, path or secret."""

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import meltcore
from meltcore.results.patience import answer_within
from meltcore.results.schema import Fingerprint, Gpu

# Packages whose version can move a number or an answer. Read from their metadata: importing torch takes seconds.
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq",
             "msgspec", "numpy", "nvidia-ml-py")  # fmt: skip
_OPTION = re.compile(r"--?[a-z][\w.-]*", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"--?[\w.-]*(key|token|secret|password)", re.IGNORECASE)
# NAME of a NAME=value; TOKENIZERS_PARALLELISM is what every other command sets.
_SECRET_NAME = re.compile(r"[\w.-]*(key|token(?!iz)|secret|password)[\w.-]*", re.IGNORECASE)
_FOLDERS = re.compile(r"(~[\w.-]*)?/+[^/]")
_URL_LOGIN = re.compile(r"//[^/@]*@")
_SPACE = re.compile(r"\s")
_LATER_OPTION = re.compile(r"\s--?[a-z]", re.IGNORECASE)
# A word of a command line with its quotes, as shlex delimits it; a quote without its partner is a letter.
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|['"\\])+""", re.DOTALL)
_QUOTES = re.compile(r"['\"\\]")
_GIT_TIMEOUT_S = 5.0
_DRIVER_TIMEOUT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode


def take_fingerprint(arguments: Sequence[str] = (), seed: int | None = None) -> Fingerprint:
    """Read this machine. `arguments`: the command line after the program's name; secrets and folders are taken out."""
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
    """Arguments fit to publish: the value of a secret option or of a NAME_OF_KEY=value becomes "***", an absolute path
    its last name. A command line in one argument stays one, its words cleaned in their places.
    """
    cleaned: list[str] = []
    hide_next = False
    for argument in arguments:
        cleaned.append("***" if hide_next else _clean(argument))
        hide_next = not hide_next and bool(_SECRET_OPTION.fullmatch(argument))
    return cleaned


def _clean(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals and _OPTION.fullmatch(name):
        return f"{name}=***" if _SECRET_OPTION.fullmatch(name) else f"{name}={_clean(value)}"
    # A path or a secret may hold spaces itself: what begins with one is a command line only where an option follows.
    if not _LATER_OPTION.search(argument):
        if equals and _SECRET_NAME.fullmatch(name):
            return f"{name}=***"
        argument = f".../{Path(argument).name}" if _FOLDERS.match(argument) else argument
        argument = _URL_LOGIN.sub("//***@", argument)
    return _clean_line(argument) if _SPACE.search(argument) and not _is_json(argument) else argument


def _clean_line(line: str) -> str:
    """What needs no cleaning keeps its quotes and the spaces around it."""
    found = list(_WORD.finditer(line))
    words = [_unquoted(each[0]) for each in found]
    parts, end = [], 0
    for match, word, clean in zip(found, words, clean_arguments(words), strict=True):
        parts += [line[end : match.start()], match[0] if clean == word else _quoted(clean)]
        end = match.end()
    return "".join([*parts, line[end:]])


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:  # a quote without its partner
        return _QUOTES.sub("", word)


def _quoted(word: str) -> str:
    return shlex.quote(word) if _SPACE.search(word) or _QUOTES.search(word) else word


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
    return names[0] if names else f"{platform.machine()} (model not told by the system)"


def _versions() -> dict[str, str]:
    versions = {"meltcore": meltcore.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[list[Gpu], str | None]:
    """GPUs and driver by NVML; none where there is no driver. One that does not answer stands in the driver's place."""
    try:
        return answer_within(_DRIVER_TIMEOUT_S, _ask_driver)
    except TimeoutError as error:
        return [], f"NVML gave {error}"


def _ask_driver() -> tuple[list[Gpu], str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [gpu for gpu in found if gpu is not None], driver
    except pynvml.NVMLError as error:
        return [], f"NVML said: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu | None:
    """None for a GPU that a cgroup keeps from this job, as CUDA leaves it out, and for one that is lost."""
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
            memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        )
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST):
            return None
        raise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _git_revision() -> str | None:
    """The revision of the checkout this file is tracked in; None for an installed package (even inside a checkout)."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    revision = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if changed else revision


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
