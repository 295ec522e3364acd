"""Downloads checkpoints from the Hugging Face hub.

From a repository with GGUF files, only the chosen one is downloaded. This module does not import torch, since API
servers use it too.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.common.process import call_with_timeout
from meltcore.models.checkpoints.weight_files import (
    INDEX,
    TORCH_FILE,
    files_without_index,
    has_weights,
    indexed_files,
    no_weights_reason,
    uses_index,
)
from meltcore.models.configs.json_file import read_json

_MAX_NAMES_SHOWN = 30
_SILENCE_LIMIT_S = 60.0  # of the hub while it answers a request
_XET_RETRIES = 2  # of a request of hf_xet; its own values would wait for 720 s in all


class HubId(NamedTuple):
    """The name of a model on the hub: a repository, "owner/name", and the GGUF file after a colon, if any."""

    repository: str
    choice: str | None

    @classmethod
    def parse(cls, model: str) -> HubId | None:
        """Return the parts of "owner/name" or "owner/name:CHOICE".

        Returns None for other texts, such as a local path.
        """
        repository, colon, choice = model.partition(":")
        is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", repository) is not None
        if not is_id or repository.lower().endswith(".gguf") or (colon and not choice):
            return None
        return cls(repository, choice if colon else None)


def download_folder(model: str, patterns: list[str]) -> Path:
    """Download the files of a repository that match `patterns`. Returns their folder.

    Raises ConfigError with the hub client's reason.
    """
    # Imported here: it costs 0.2 s and a local folder does not need it.
    from huggingface_hub import snapshot_download

    repository = model.partition(":")[0]
    _limit_silence()
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types; each means that the download failed
        raise ConfigError(
            f"{model}: not a local folder, and its download from the hub failed: {_reason(error)}"
        ) from error


def download_checkpoint(model: str, text_patterns: Sequence[str], *, with_weights: bool) -> Path:
    """Download a repository's configuration and tokenizer, and the model's weights if `with_weights`.

    Other files of the repository are not downloaded: adapters, the same weights in another layout, files of subfolders.
    Returns the folder. Raises ConfigError with the hub client's reason.
    """
    hub_id = HubId(model.partition(":")[0], None)
    names = _list_files(hub_id)
    if not names:  # not to be listed: the cache has it, or the download says why not
        return download_folder(model, [*text_patterns, *(("*.safetensors", INDEX) if with_weights else ())])
    chosen = [name for name in names if _is_text(name, text_patterns)]
    if not with_weights:
        return download_folder(model, _exact_patterns(chosen))
    if not uses_index(names):
        weights = files_without_index(names, model) or [name for name in names if name == TORCH_FILE]
        return download_folder(model, _exact_patterns([*chosen, *weights]))
    folder = download_folder(model, _exact_patterns([*chosen, INDEX]))
    shards = indexed_files(read_json(folder / INDEX))
    return download_folder(model, _exact_patterns([*chosen, INDEX, *shards]))


def _is_text(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file is one of the text files to download.

    Such a file matches a pattern of the same folder depth, and is no weight index.
    """
    same_depth = (pattern for pattern in patterns if pattern.count("/") == name.count("/"))
    return not name.endswith(".index.json") and any(fnmatchcase(name, pattern) for pattern in same_depth)


def _exact_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that match these names alone."""
    return [glob.escape(name) for name in names]


def download_gguf(model: str) -> Path | None:
    """Download the GGUF checkpoint that a hub id names, and nothing else of its repository.

    "owner/name" names the only GGUF checkpoint of a repository without safetensors files. "owner/name:CHOICE" names any
    GGUF checkpoint: CHOICE is a file, or the format at the end of a file's name, such as Q8_0.

    Returns the file, or the first part of a split checkpoint. Returns None if the repository has no GGUF checkpoint.
    Raises ConfigError if the choice is missing or wrong; the error lists the files.
    """
    files = _find_gguf(model)
    return None if files is None else download_folder(model, files) / files[0]


def no_hub_weights_reason(model: str) -> str | None:
    """Return why a repository without GGUF files has no weights to download.

    Returns None if it has weights, or if its files cannot be listed.
    """
    names = _list_files(HubId(model.partition(":")[0], None))
    return no_weights_reason(names) if names and not has_weights(names) else None


def hub_problem(model: str) -> str:
    """Return why a hub id cannot be loaded on this machine.

    Returns "" if the hub has the model and permits the download, or if the cache has it. For a repository without GGUF
    files this downloads config.json, which the hub refuses to users to whom it refuses the weights.
    """
    try:
        if _find_gguf(model) is None:
            download_folder(model, ["config.json"])
    except ConfigError as error:
        return str(error)
    return ""


def hub_problems(models: Iterable[str], limit_s: float) -> dict[str, str]:
    """Return `hub_problem` of each hub id. All requests together take at most `limit_s` seconds.

    Ids that the hub has not answered by then are looked up in the cache alone. The hub's client has no time limit of
    its own if packets are dropped.
    """
    asked, answers = list(models), dict[str, str]()

    def ask() -> None:
        for model in asked:
            answers[model] = hub_problem(model)

    try:
        call_with_timeout(limit_s, ask)
    except TimeoutError:
        lacks = f"the hub gave no answer within {limit_s:g} s, and the cache does not have it"
        return {model: "" if _is_cached(model) else lacks for model in asked} | answers.copy()
    return answers


def _is_cached(model: str) -> bool:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model.partition(":")[0], local_files_only=True)
    except Exception:  # as above
        return False
    return True


def _find_gguf(model: str) -> list[str] | None:
    """Return the files of the GGUF checkpoint that a hub id names, the first part first.

    Returns None if the id does not name a GGUF checkpoint. Raises ConfigError if it names none of the repository's
    files, or more than one.
    """
    hub_id = HubId.parse(model)
    if hub_id is None:
        return None
    names = _list_files(hub_id)
    if hub_id.choice is None and has_weights(names):
        return None
    # Imported here: they import gguf, which other checkpoints do not need.
    from meltcore.models.checkpoints.gguf.gguf_file import gguf_checkpoints
    from meltcore.models.checkpoints.gguf.gguf_kinds import kind_by_name

    checkpoints = gguf_checkpoints(name for name in names if name.lower().endswith(".gguf"))
    others = {name: kind for name in checkpoints if (kind := kind_by_name(name)) is not None}
    models = [name for name in checkpoints if name not in others]
    if not models and hub_id.choice is None:
        return None
    if not checkpoints:
        raise ConfigError(f"{model}: {hub_id.repository} has no *.gguf files to choose from")
    chosen = [name for name in models if hub_id.choice is None or _is_named(name, hub_id.choice)]
    if len(chosen) != 1:
        other = next((name for name in others if not chosen and _is_named(name, str(hub_id.choice))), None)
        error = _choice_error(model, hub_id, models, chosen)
        raise ConfigError(error if other is None else f"{model}: {other} is {others[other]}, and no model")
    return [chosen[0], *(part for part in checkpoints[chosen[0]] if part != chosen[0])]


def _list_files(hub_id: HubId) -> list[str]:
    """Return the files of a repository. Without a connection these are the files in the cache."""
    from huggingface_hub import list_repo_files, snapshot_download

    _limit_silence()
    try:
        return list_repo_files(hub_id.repository)
    except Exception as error:
        try:
            folder = Path(snapshot_download(hub_id.repository, local_files_only=True))
        except Exception:
            if hub_id.choice is None:  # the download of the usual files reports it
                return []
            raise ConfigError(f"{hub_id.repository}: its files cannot be listed: {_reason(error)}") from error
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _limit_silence() -> None:
    """Give each request to the hub a time limit between two packets. The hub's client has none for most requests.

    hf_xet, which downloads large files, repeats a silent request, so all its attempts share the limit. It reads the
    variables when it downloads the first file.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]
    if _limit_request not in hooks:
        hooks.append(_limit_request)
    os.environ.setdefault("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", str(_XET_RETRIES))
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{1000 * _SILENCE_LIMIT_S / (1 + _XET_RETRIES):.0f}ms")


def _limit_request(request: Any) -> None:  # of httpx, which the hub's client imports
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {phase: limit or _SILENCE_LIMIT_S for phase, limit in limits.items()}


def _is_named(name: str, choice: str) -> bool:
    """Return whether `choice` names the checkpoint `name`.

    `choice` is the name with or without its folder, or the format at the end of the name.
    """
    if choice.lower().endswith(".gguf"):
        return choice in (name, name.rpartition("/")[2])
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)
    return re.search(rf"(^|[-./]){re.escape(choice)}$", stem, re.IGNORECASE) is not None


def _choice_error(model: str, hub_id: HubId, names: list[str], chosen: list[str]) -> str:
    found = f"{len(chosen)} of its GGUF files match {hub_id.choice!r}" if hub_id.choice else "it has several GGUF files"
    shown = chosen or names
    more = f" and {len(shown) - _MAX_NAMES_SHOWN} more" if len(shown) > _MAX_NAMES_SHOWN else ""
    return (
        f"{model}: {found}; choose one as {hub_id.repository}:FILE or by the end of its name, such as "
        f"{hub_id.repository}:Q8_0: {', '.join(shown[:_MAX_NAMES_SHOWN])}{more}"
    )


def _reason(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            "its files are not in the cache of this machine, and nothing is downloaded while HF_HUB_OFFLINE is set, as "
            "`meltcore plan` does; download them before, by `hf download`, or plan with `shapes:` in the fleet's file"
        )
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
