"""Finds a checkpoint by a local folder, a GGUF file, the name of a bundled model, or a hub id.

This module does not import torch, since API servers use it too.

A checkpoint has the published Hugging Face layout (config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, chat_template.jinja, *.safetensors with an optional model.safetensors.index.json). Or it is a
GGUF file that has all of it in one file or in several parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.common.files import is_gguf
from meltcore.common.tasks import DEFAULT, Task, recognized_task, task_of_architectures, tasks
from meltcore.models.checkpoints.fairseq_config import TOKENIZER_FOLDER
from meltcore.models.checkpoints.fairseq_config import find_checkpoint as find_fairseq
from meltcore.models.checkpoints.fairseq_config import read_config as read_fairseq_config
from meltcore.models.checkpoints.hub import (
    HubId,
    download_checkpoint,
    download_folder,
    download_gguf,
    no_hub_weights_reason,
)
from meltcore.models.checkpoints.weight_files import (
    INDEX,
    TORCH_FILE,
    files_without_index,
    has_weights,
    indexed_files,
    no_weights_reason,
    uses_index,
)
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.json_file import read_json

if TYPE_CHECKING:
    from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel

# Told while loading or converting: what is done now, and which part of it has ended.
Progress = Callable[[str, float], None]
BUNDLED_MODEL = "meltcore/sums"
BUNDLED_HYBRID = "meltcore/sums-hybrid"
BUNDLED_GEMMA = "meltcore/sums-gemma"
BUNDLED_TRANSLATION = "meltcore/phrases"
BUNDLED_TRANSCRIBER = "meltcore/tones"
BUNDLED_VOICE = "meltcore/voice"
_BUNDLED_FOLDERS = {
    name: Path(__file__).parents[2] / "bundled" / name.removeprefix("meltcore/")
    for name in (
        BUNDLED_MODEL,
        BUNDLED_HYBRID,
        BUNDLED_GEMMA,
        BUNDLED_TRANSLATION,
        BUNDLED_TRANSCRIBER,
        BUNDLED_VOICE,
    )
}
# Bundled configurations of published models, so that random weights of these shapes need no download.
PUBLISHED_CONFIG_FOLDERS = {
    "allenai/OLMo-2-0425-1B-Instruct": Path(__file__).parents[1] / "published" / "olmo-2-0425-1b-instruct",
    "google/gemma-3-1b-it": Path(__file__).parents[1] / "published" / "gemma-3-1b-it",
    "google/gemma-3-4b-it": Path(__file__).parents[1] / "published" / "gemma-3-4b-it",
    "google/gemma-3-27b-it": Path(__file__).parents[1] / "published" / "gemma-3-27b-it",
    "HuggingFaceTB/SmolLM2-135M-Instruct": Path(__file__).parents[1] / "published" / "smollm2-135m-instruct",
    "HuggingFaceTB/SmolLM3-3B": Path(__file__).parents[1] / "published" / "smollm3-3b",
    "ibm-granite/granite-3.3-2b-instruct": Path(__file__).parents[1] / "published" / "granite-3.3-2b-instruct",
    "meta-llama/Llama-3.1-8B-Instruct": Path(__file__).parents[1] / "published" / "llama-3.1-8b-instruct",
    "meta-llama/Llama-3.2-1B-Instruct": Path(__file__).parents[1] / "published" / "llama-3.2-1b-instruct",
    "microsoft/Phi-3-mini-4k-instruct": Path(__file__).parents[1] / "published" / "phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct": Path(__file__).parents[1] / "published" / "phi-4-mini-instruct",
    "microsoft/phi-4": Path(__file__).parents[1] / "published" / "phi-4",
    "mistralai/Mistral-7B-Instruct-v0.1": Path(__file__).parents[1] / "published" / "mistral-7b-instruct-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.3": Path(__file__).parents[1] / "published" / "mistral-7b-instruct-v0.3",
    "mistralai/Mistral-Small-24B-Instruct-2501": Path(__file__).parents[1]
    / "published"
    / "mistral-small-24b-instruct-2501",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Path(__file__).parents[1]
    / "published"
    / "mistral-small-3.1-24b-instruct-2503",
    "Qwen/Qwen2.5-1.5B-Instruct": Path(__file__).parents[1] / "published" / "qwen2.5-1.5b-instruct",
    "Qwen/Qwen3-0.6B": Path(__file__).parents[1] / "published" / "qwen3-0.6b",
    "Qwen/Qwen3-8B-AWQ": Path(__file__).parents[1] / "published" / "qwen3-8b-awq",
    "Qwen/Qwen3-30B-A3B": Path(__file__).parents[1] / "published" / "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-FP8": Path(__file__).parents[1] / "published" / "qwen3-30b-a3b-fp8",
    "Qwen/Qwen3.5-35B-A3B": Path(__file__).parents[1] / "published" / "qwen3.5-35b-a3b",
    "Qwen/Qwen3.5-35B-A3B-FP8": Path(__file__).parents[1] / "published" / "qwen3.5-35b-a3b-fp8",
}

TRANSLATION_ARCHITECTURE = "IndicTransForConditionalGeneration"
# Likewise of models of other tasks.
PUBLISHED_TASK_FOLDERS = {
    **{
        f"ai4bharat/{name}": Path(__file__).parents[1] / "published" / name
        for name in (
            "indictrans2-en-indic-1B",
            "indictrans2-indic-en-1B",
            "indictrans2-indic-indic-1B",
            "indictrans2-en-indic-dist-200M",
            "indictrans2-indic-en-dist-200M",
        )
    },
    "ai4bharat/IndicF5": Path(__file__).parents[1] / "published" / "indicf5",
}

# Published transcription models, with a model_config.yaml for random weights of their shapes.
PUBLISHED_TRANSCRIBERS = {
    "ai4bharat/indic-conformer-600m-multilingual": Path(__file__).parents[1] / "published" / "indic-conformer-600m",
}

CheckpointFiles = Literal["config", "text", "all"]
ASSETS_FOLDER = "assets"  # of ONNX and TorchScript files
_TRANSCRIBER_PATTERNS = ["config.json", f"{ASSETS_FOLDER}/*"]
# model.SRC, model.TGT: SentencePiece models of IndicTrans2; vocab.txt, prompts: of IndicF5; the last pattern is of the
# modules of sentence-transformers, such as 1_Pooling.
_TEXT_PATTERNS = [
    *("*.json", "*.jinja", "model.SRC", "model.TGT", "vocab.txt", "checkpoints/vocab.txt", "prompts/*"),
    "[0-9]_*/config.json",
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and its parsed JSON files. `name` is the text by which the user selected it.

    Args:
        gguf: headers of a GGUF checkpoint, whose metadata `config` comes from.
        tokenizer_folder: the folder of --tokenizer.
        fairseq: the file of a checkpoint in fairseq's layout, from which `config` is made.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    gguf: GGUFModel | None = None
    tokenizer_folder: Path | None = None
    fairseq: Path | None = None

    @property
    def text_folder(self) -> Path | None:
        """The folder with tokenizer.json and tokenizer_config.json, or None if a GGUF file is their only source."""
        if self.tokenizer_folder is not None or self.gguf is not None:
            return self.tokenizer_folder
        return self.folder

    @property
    def task(self) -> Task:
        """The task of the model, by its architecture and the files of its folder."""
        if self.gguf is not None:
            return DEFAULT
        return task_of_architectures(self.config.get("architectures") or [], self.folder)

    @property
    def has_sentencepiece(self) -> bool:
        """Whether the folder has a tokenizer of IndicTrans2, in either of its layouts."""
        return any((self.folder / name).exists() for name in ("model.SRC", f"{TOKENIZER_FOLDER}/model.SRC"))

    @property
    def text_config(self) -> dict[str, Any]:
        """The fields of the language model in config.json. A multimodal model nests them in `text_config`."""
        text_fields = self.config.get("text_config") or {}
        return {**self.config, **{name: value for name, value in text_fields.items() if value is not None}}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of end-of-sequence tokens. Some of the ids may be beyond the model's vocabulary.

        They come from generation_config.json, or else from config.json. The id of the tokenizer's end token is added:
        chats end with it, and a published config.json may name only the end token of plain text. Raises ConfigError for
        an invalid id.
        """
        config = Fields(self.config)
        sources = (
            Fields(self.generation_config, "generation_config.json"),
            config.nested_fields("text_config"),
            config,
        )
        eos_fields = [source.optional("eos_token_id", []) for source in sources]
        ids = next((eos_ids if isinstance(eos_ids, list) else [eos_ids] for eos_ids in eos_fields if eos_ids != []), [])
        tokenizer_eos_id = self._tokenizer_eos_id()
        return tuple(dict.fromkeys([*ids, *([] if tokenizer_eos_id is None else [tokenizer_eos_id])]))

    def _tokenizer_eos_id(self) -> int | None:
        """Return the id of the tokenizer's eos_token.

        Returns None if the tokenizer's files do not give an id for this token. The eos_token of special_tokens_map.json
        is used too if tokenizer_config.json has no `added_tokens_decoder`.
        """
        folder = self.text_folder
        if folder is None:
            return None
        config = _read_fields(folder / "tokenizer_config.json")
        token, decoder_tokens = config.optional("eos_token"), config.optional("added_tokens_decoder")
        if decoder_tokens is None:
            token = _read_fields(folder / "special_tokens_map.json").optional("eos_token", token)
        if token is None:
            return None
        token_text = token if isinstance(token, str) else token["content"]
        for token_id, added_token in (decoder_tokens or {}).items():
            if added_token["content"] == token_text:
                return int(token_id)
        added_tokens = _read_fields(folder / "tokenizer.json").optional("added_tokens", [])
        ids = read_json(path) if (path := folder / "added_tokens.json").exists() else {}  # of a tokenizer of Python
        ids |= {added_token["content"]: added_token["id"] for added_token in added_tokens}
        token_id = ids.get(token_text)
        return token_id if isinstance(token_id, int) else None

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files of the model itself in name order, or else a pytorch_model.bin. There may be none.

        A pytorch_model.bin of a model for generation is not read.

        Raises ConfigError when the index names a missing file or no file, and when a numbered shard is missing.
        """
        present = [path.name for path in self.folder.iterdir()]
        if not uses_index(present):
            names = files_without_index(present, str(self.folder))
            if not names and TORCH_FILE in present and self.task is not DEFAULT:
                names = [TORCH_FILE]
            return [self.folder / name for name in names]
        names = indexed_files(read_json(self.folder / INDEX))
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise ConfigError(f"{self.folder}: the index names {len(names)} shards, missing: {', '.join(missing)}")
        return [self.folder / name for name in names]

    @property
    def no_weights_reason(self) -> str:
        """The reason why no file of the folder holds the weights of a model."""
        return no_weights_reason([path.name for path in self.folder.iterdir()])


def open_checkpoint(model: str, *, files: CheckpointFiles, tokenizer: str | None = None) -> Checkpoint:
    """Find the checkpoint `model` and read its configuration.

    A hub id is downloaded first; "owner/name:Q8_0" or "owner/name:FILE.gguf" chooses a repository's GGUF file.

    Args:
        model: a folder, a GGUF file, the name of a bundled model, or a hub id.
        files: what is downloaded. "all" includes the weights, and "text" is everything but the weights. "config" means
            the same as "text", but a bundled configuration makes the download unnecessary. A GGUF file is always
            downloaded as a whole.
        tokenizer: another folder or hub id, whose tokenizer and chat template replace the checkpoint's.

    Raises ConfigError if there is no such folder, GGUF file, hub repository or config.json, or if a JSON or GGUF file
    is invalid. Raises UnservableModelError for a GGUF file that cannot be served.
    """
    tokenizer_folder = None if tokenizer is None else find_folder(tokenizer, "text")
    gguf_path = find_gguf(model, files)
    if gguf_path is not None:
        return _open_gguf(model, gguf_path, tokenizer_folder)
    folder = find_folder(model, files)
    fairseq = find_fairseq(folder)
    if fairseq is not None:
        config = {"architectures": [TRANSLATION_ARCHITECTURE], **read_fairseq_config(fairseq)}
        return Checkpoint(model, folder, config, {}, fairseq=fairseq)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ConfigError(f"{folder} has no config.json, so it is not a checkpoint folder")
    generation_path = folder / "generation_config.json"
    checkpoint = Checkpoint(
        name=model,
        folder=folder,
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path.exists() else {},
        tokenizer_folder=tokenizer_folder,
    )
    # Read now, so that an invalid one is reported before minutes of loading weights.
    Fields(checkpoint.config).optional("architectures")
    _ = checkpoint.eos_token_ids
    return checkpoint


def _read_fields(path: Path) -> Fields:
    """Return the fields of a JSON file, or no fields without the file. Raises ConfigError if it cannot be read."""
    return Fields(read_json(path) if path.exists() else {}, path.name)


def folder_reasons(checkpoint: Checkpoint, *, is_dummy: bool, has_overrides: bool = False) -> list[str]:
    """Return all reasons why a folder of a language model cannot be served, as its files show them.

    The reasons concern the architecture, the configuration, the quantization and the weights.

    Args:
        checkpoint: the folder.
        is_dummy: whether the weights will be random, so that config.json is enough.
        has_overrides: whether fields of the configuration will be replaced, so that they are not checked.
    """
    from meltcore.models.configs.quantization_config import read_quantization_config
    from meltcore.models.decoders.decoder_families import DECODER_CONFIGS

    reasons = []
    names = Fields(checkpoint.config).optional("architectures", [])
    architecture = next((name for name in names if name in DECODER_CONFIGS), None)
    if architecture is None:
        known = [*DECODER_CONFIGS, *sorted(name for task in tasks().values() for name in task.architectures)]
        reasons.append(f"config.json names {', '.join(names) or 'nothing'}; we have {', '.join(known)}")

    def check_weights() -> None:
        reason = (
            no_hub_weights_reason(checkpoint.name)
            if is_on_hub(checkpoint.name)
            else None
            if checkpoint.weight_files
            else checkpoint.no_weights_reason
        )
        if reason is not None:
            raise ConfigError(reason)

    checks: list[Callable[[], object]] = [lambda: read_quantization_config(checkpoint.config)]
    if architecture is not None and not has_overrides:
        checks.insert(0, lambda: DECODER_CONFIGS[architecture](checkpoint.config))
    if not is_dummy:
        checks.append(check_weights)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            reasons.append(str(error))
    return reasons


def check_shards(model: str) -> None:
    """Raise ConfigError if a local folder lacks safetensors files that its index or its numbered shards name."""
    if (folder := Path(model).expanduser()).is_dir():
        _ = Checkpoint(model, folder, {}, {}).weight_files


def open_task_checkpoint(name: str, task: Task, *, is_dummy: bool) -> Checkpoint:
    """Find a checkpoint of one of the architectures of `task`.

    With `is_dummy` the weights will be random, and the configuration is enough. Raises ConfigError as `open_checkpoint`
    does, and for an architecture of another task.
    """
    checkpoint = open_checkpoint(name, files="config" if is_dummy else "all")
    if checkpoint.task is not task:
        names = checkpoint.config.get("architectures") or []
        marked = (f"{each} with {task.marker}" for each in sorted(task.marked_architectures))
        supported = ", ".join([*sorted(task.architectures), *marked])
        raise ConfigError(f"{name}: config.json names {', '.join(names) or 'nothing'}; {task.title} runs {supported}")
    return checkpoint


def is_transcription_model(model: str, *, dummy: bool = False) -> bool:
    """Return whether `model` transcribes speech, without a download. Raises ConfigError as `find_transcriber` does."""
    is_published = model in PUBLISHED_TRANSCRIBERS and not Path(model).expanduser().is_dir()
    return is_published or find_transcriber(model, dummy=dummy) is not None


def find_transcriber(model: str, *, dummy: bool = False) -> Path | None:
    """Return the path of the transcription model `model`. Returns None for a model of another task.

    The path is a NeMo archive, a folder into which an archive was unpacked, or a folder with the published assets. The
    hub id of a published transcriber is downloaded, unless `dummy` says that its configuration is enough. Raises
    ConfigError for a missing archive, a failed download, or a folder with several archives.
    """
    path = _BUNDLED_FOLDERS.get(model, Path(model).expanduser())
    if model in PUBLISHED_TRANSCRIBERS and not path.is_dir():
        return PUBLISHED_TRANSCRIBERS[model] if dummy else download_folder(model, _TRANSCRIBER_PATTERNS)
    if model.endswith(".nemo") and not path.is_dir():
        if not path.exists():
            raise ConfigError(f"{model}: no such file")
        return path
    if not path.is_dir():
        return None
    if (path / "model_config.yaml").exists() or has_assets(path):
        return path
    archives = sorted(path.glob("*.nemo"))
    if len(archives) > 1:
        names = ", ".join(archive.name for archive in archives)
        raise ConfigError(f"{model} has {len(archives)} NeMo archives, so name one of them: {names}")
    return archives[0] if archives else None


def has_assets(path: Path) -> bool:
    """Return whether a transcriber's folder has the published assets, and no NeMo archive."""
    return (path / ASSETS_FOLDER / "encoder.onnx").exists() and not any(path.glob("*.nemo"))


def find_task(model: str, *, dummy: bool = False) -> Task:
    """Return the task of a model.

    A model that cannot be opened has the default task, whose engine reports the reason. With `dummy` a published
    configuration is enough. Raises ConfigError as `recognized_task` does.
    """
    task = recognized_task(model, dummy=dummy)
    if task is not None or is_gguf(model):
        return task or DEFAULT
    try:
        checkpoint = open_checkpoint(model, files="config" if dummy else "text")
    except ConfigError:
        return DEFAULT
    return checkpoint.task


def is_on_hub(model: str) -> bool:
    """Return whether a checkpoint is downloaded from the hub, since it is neither local nor bundled."""
    is_bundled = model in _BUNDLED_FOLDERS
    return not is_bundled and HubId.parse(model) is not None and not Path(model).expanduser().exists()


def find_gguf(model: str, files: CheckpointFiles) -> Path | None:
    """Return the GGUF file that `model` names, locally or on the hub, or the only model among a folder's GGUF files.

    Returns None if `model` is not a GGUF checkpoint. Raises ConfigError if the file is missing, if there are several
    models to choose from, or if a folder has only GGUF files that are not models.
    """
    path = Path(model).expanduser()
    is_here = files == "config" and model in PUBLISHED_CONFIG_FOLDERS
    if is_on_hub(model) and not is_here:
        return download_gguf(model)
    if not path.is_dir():
        if not is_gguf(path):
            return None
        if not path.exists():
            raise ConfigError(f"{model}: no such file")
        return path
    if has_weights(file.name for file in path.iterdir()):
        return None
    gguf_names = [file.name for file in path.iterdir() if not file.is_dir() and is_gguf(file)]
    # Other names may be of downloads that did not end.
    suffixed_names = [name for name in gguf_names if name.lower().endswith(".gguf")]
    return _only_gguf_model(model, path, suffixed_names or gguf_names) if gguf_names else None


def _only_gguf_model(model: str, folder: Path, names: list[str]) -> Path | None:
    """Return the only model among the GGUF files of a folder.

    Returns None if none of the files is a model but the folder has a config.json.
    """
    # Imported here: they take 0.2 s, which other checkpoints do not need.
    from meltcore.models.checkpoints.gguf.gguf_file import gguf_checkpoints
    from meltcore.models.checkpoints.gguf.gguf_kinds import kind_by_name, other_kinds

    checkpoints, has_config = gguf_checkpoints(names), (folder / "config.json").exists()
    if len(checkpoints) == 1 and not has_config:  # which is read once, when it is opened
        return folder / next(iter(checkpoints))
    other_files = other_kinds(folder, checkpoints)
    models = [name for name in checkpoints if name not in other_files]
    models = [name for name in models if kind_by_name(name) is None] or models
    if len(models) > 1:
        raise ConfigError(f"{model} has {len(models)} GGUF checkpoints, so name one of them: {', '.join(models)}")
    if models:
        return folder / models[0]
    if has_config:
        return None
    kinds_text = "; ".join(f"{name} is {kind}" for name, kind in other_files.items())
    raise ConfigError(f"{model} has no GGUF file of a model: {kinds_text}")


def _open_gguf(name: str, path: Path, tokenizer_folder: Path | None) -> Checkpoint:
    # Imported here: they take 0.2 s, which other checkpoints do not need.
    from meltcore.models.checkpoints.gguf.gguf_config import read_servable_config
    from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
    from meltcore.models.checkpoints.gguf.gguf_kinds import other_kind

    gguf = GGUFModel(path)
    kind = other_kind(gguf)
    if kind is not None:
        raise UnservableModelError(str(path), [f"it is {kind}, and no model"])
    config = read_servable_config(gguf, has_tokenizer=tokenizer_folder is not None)
    checkpoint = Checkpoint(name, path.parent, config, {}, gguf, tokenizer_folder)
    _ = checkpoint.eos_token_ids
    return checkpoint


def find_tokenizer(name: str) -> str:
    """Return the path of a tokenizer: an existing path as it is, or the folder of a bundled model or a hub id.

    Raises ConfigError if there is none of that name, or if its download fails.
    """
    return name if Path(name).expanduser().exists() else str(find_folder(name, "text"))


def find_folder(model: str, files: CheckpointFiles) -> Path:
    """Return the folder that `model` names, downloaded if it is a hub id. Raises ConfigError if it does not exist."""
    if model in _BUNDLED_FOLDERS:
        return _BUNDLED_FOLDERS[model]
    published_folders = PUBLISHED_CONFIG_FOLDERS | PUBLISHED_TASK_FOLDERS
    if files == "config" and model in published_folders:
        return published_folders[model]
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{model} is a file, and not in GGUF; name the folder of a checkpoint")
    is_local_path = model.startswith(("/", "./", "../", "~")) or model.count("/") != 1
    if is_local_path:
        raise ConfigError(
            f"{model}: no such folder (a hub id has the form owner/name; bundled are {', '.join(_BUNDLED_FOLDERS)})"
        )
    return download_checkpoint(model, _TEXT_PATTERNS, with_weights=files == "all")
