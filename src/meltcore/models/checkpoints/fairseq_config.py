"""Reads the configuration and the dictionaries of fairseq's checkpoints of IndicTrans2.

Layout: model/checkpoint_best.pt, final_bin/dict.SRC.txt, final_bin/dict.TGT.txt, vocab/model.SRC, vocab/model.TGT.
This module does not import torch, since API servers use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.torch_archive import PickledObject, StoredTensor, TorchArchive
from meltcore.models.configs.config_fields import RULES

CHECKPOINT_FILES = ("model/checkpoint_best.pt", "checkpoint_best.pt")
DICTIONARY_FOLDER, TOKENIZER_FOLDER = "final_bin", "vocab"
_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
_MAX_DICTIONARY_BYTES = 64 * 2**20
# fairseq's names of the fields that config.json has under other ones.
_NAMES = {
    **{
        f"{side}_{name}": f"{side}_{fairseq_name}"
        for side in ("encoder", "decoder")
        for name, fairseq_name in (
            ("embed_dim", "embed_dim"),
            ("ffn_dim", "ffn_embed_dim"),
            ("layers", "layers"),
            ("attention_heads", "attention_heads"),
            ("normalize_before", "normalize_before"),
        )
    },
    "activation_function": "activation_fn",
    "layernorm_embedding": "layernorm_embedding",
    "max_source_positions": "max_source_positions",
    "max_target_positions": "max_target_positions",
}
# What is not computed, by fairseq's names: fields that must be absent or false.
_UNSUPPORTED = (
    "encoder_learned_pos",
    "decoder_learned_pos",
    "no_token_positional_embeddings",
    "adaptive_softmax_cutoff",
    "adaptive_input",
    "no_cross_attention",
    "cross_self_attention",
)


def find_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint file of a folder in fairseq's layout. Returns None if the folder has another layout.

    Raises ConfigError if the folder has fairseq's dictionaries, but its checkpoint file is not checkpoint_best.pt.
    """
    if (folder / "config.json").exists():
        return None
    checkpoint_path = next((folder / name for name in CHECKPOINT_FILES if (folder / name).is_file()), None)
    if checkpoint_path is None and (folder / DICTIONARY_FOLDER).is_dir():
        raise ConfigError(f"{folder} has fairseq's {DICTIONARY_FOLDER}, and lacks {CHECKPOINT_FILES[0]}")
    return checkpoint_path


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of config.json for a fairseq checkpoint file.

    Vocabulary sizes are the sizes of the embeddings. Raises ConfigError if the file is damaged, or if fields are
    missing, invalid or unsupported.
    """
    archive = TorchArchive(path)
    values, section = _find_arguments(archive)
    for name in _UNSUPPORTED:
        if values.get(name):
            raise ConfigError(f"{path} sets {section}.{name} to {values[name]!r}, which IndicTrans2 does not compute")
    optional = {"layernorm_embedding"}
    missing = [name for field, name in _NAMES.items() if values.get(name) is None and field not in optional]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(f'{section}.{name}' for name in missing)}")
    for name in ("encoder_normalize_before", "decoder_normalize_before"):
        if values[name] is False:
            raise ConfigError(f"{path} sets {section}.{name} to False, which IndicTrans2 does not compute")
    config = {field: values[name] for field, name in _NAMES.items() if values.get(name) is not None}
    for field, value in config.items():
        if not RULES[field].is_valid(value):
            requirement = RULES[field].requirement
            raise ConfigError(f"{path}: {section}.{_NAMES[field]} must be {requirement}; got {value!r}")
    tensors = model_tensors(archive)
    for side in ("encoder", "decoder"):
        name = f"{side}.embed_tokens.weight"
        if name not in tensors or len(tensors[name].shape) != 2:
            raise ConfigError(f"{path} lacks {name}, a matrix")
        config[f"{side}_vocab_size"] = tensors[name].shape[0]
    is_tied = bool(values.get("share_decoder_input_output_embed") or values.get("share_all_embeddings"))
    return {
        **config,
        "scale_embedding": not values.get("no_scale_embedding", False),
        "share_decoder_input_output_embed": is_tied,
    }


def model_tensors(archive: TorchArchive) -> dict[str, StoredTensor]:
    """Return the tensors of the model by fairseq's names. Raises ConfigError if the file has another structure."""
    state = archive.root.get("model") if isinstance(archive.root, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(f"{archive.path} is not a fairseq checkpoint: it has no tensors under 'model'")
    for name, tensor in state.items():
        if not isinstance(tensor, StoredTensor):
            raise ConfigError(f"{archive.path}: {name} must be a contiguous tensor")
    return dict(state)


def _find_arguments(archive: TorchArchive) -> tuple[Mapping[str, Any], str]:
    """Return the model's arguments and the field that holds them: `args` in older files, `cfg` in newer ones."""
    root = archive.root if isinstance(archive.root, Mapping) else {}
    config = root.get("cfg")
    config = config.fields if isinstance(config, PickledObject) else config
    nested = config.get("model") if isinstance(config, Mapping) else None
    for section, values in (("args", root.get("args")), ("cfg.model", nested)):
        arguments = values.fields if isinstance(values, PickledObject) else values
        if isinstance(arguments, Mapping) and arguments:
            return arguments, section
    raise ConfigError(f"{archive.path} is not a fairseq checkpoint: it has neither args nor cfg.model")


def read_dictionary(path: Path) -> dict[str, int]:
    """Return the token ids of a dictionary, by token.

    Each line has a token and its count; four special tokens come first. Raises ConfigError if the file is unreadable,
    if a line has another form, or if a token occurs twice.
    """
    try:
        if path.stat().st_size > _MAX_DICTIONARY_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_DICTIONARY_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    ids = {token: token_id for token_id, token in enumerate(_SPECIAL_TOKENS)}
    for number, line in enumerate(lines[: -1 if lines[-1] == "" else None], start=1):
        token, _, count = line.removesuffix("\r").removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdecimal():
            raise ConfigError(f"{path}: line {number} must be a token and its count; it is {line[:80]!r}")
        if token in ids and not line.endswith("#fairseq:overwrite"):
            raise ConfigError(f"{path}: line {number} has the token {token!r} a second time")
        ids[token] = len(_SPECIAL_TOKENS) + number - 1
    return ids
