"""Reads IndicConformer as it is published on the hub: a folder `assets` of ONNX, TorchScript and JSON files.

The files are encoder.onnx with its external tensors, ctc_decoder, joint_enc, joint_pred, joint_pre_net,
joint_post_net_LANGUAGE, preprocessor.ts, vocab.json and language_masks.json. The prediction network is one file,
rnnt_decoder, or two, rnnt_decoder_embed and rnnt_decoder_rnn.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any, Literal

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import ASSETS_FOLDER
from meltcore.models.checkpoints.exported_part import ExportedPart
from meltcore.models.checkpoints.onnx_encoder import OnnxEncoder
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.json_file import read_json
from meltcore.models.configs.task_configs import IndicConformerConfig, LogMelConfig
from meltcore.models.tasks.log_mel import LOG_OFFSET, mel_filters

_JOINT_PARTS = ("joint_enc", "joint_pred", "joint_pre_net")
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid"}
_TOLERANCE = 1e-5
# Attributes of the preprocessor, and the values that are computed here. One that an export has not kept is not checked.
_FEATURE_VALUES: dict[str, Any] = {
    "mag_power": 2.0,
    "log": True,
    "log_zero_guard_type": "add",
    "log_zero_guard_value": LOG_OFFSET,
    "normalize": "per_feature",
    "frame_splicing": 1,
    "exact_pad": False,
}


class PublishedAssets:
    """The published files: configuration, weights by the names of a NeMo checkpoint, and token texts."""

    def __init__(self, path: Path) -> None:
        """Read the headers of all files. Raises ConfigError if a file is missing, damaged or unsupported."""
        self.path = path
        self._folder = path / ASSETS_FOLDER
        fields = Fields(read_json(path / "config.json") if (path / "config.json").exists() else {})
        features = _read_features(self._part("preprocessor"))
        self._encoder = OnnxEncoder(self._part("encoder"), features.num_mels)
        self.has_batch_norm = self._encoder.has_batch_norm
        languages, tokens = self._read_languages()
        self._ctc, self._joint = self._part("ctc_decoder"), {name: self._part(name) for name in _JOINT_PARTS}
        self._heads = {language: self._part(f"joint_post_net_{language}") for language in languages}
        self._embedding, self._lstm = self._prediction_parts()
        embedding, lstm = self._embedding.embedding(), self._lstm.lstm()
        self._prediction = {"embed.weight": embedding} | {f"dec_rnn.lstm.{name}": lstm[name] for name in lstm}
        self.model_config = IndicConformerConfig(
            languages=languages,
            encoder=self._encoder.config,
            features=features,
            tokens_per_language=tokens,
            prediction_size=embedding.shape[1],
            prediction_layers=sum(name.startswith("weight_ih") for name in lstm),
            joint_size=self._joint["joint_enc"].linear()[0].shape[0],
            joint_activation=_activation(self._joint["joint_pre_net"]),
            max_symbols=fields.optional("RNNT_MAX_SYMBOLS", 10),
        )
        self._check_config(fields)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the weights into host memory, by the names of a NeMo checkpoint.

        Raises ConfigError if a file is invalid.
        """
        tensors = {f"encoder.{name}": values for name, values in self._encoder.tensors().items()}
        tensors |= {f"decoder.prediction.{name}": values for name, values in self._prediction.items()}
        config = self.model_config
        hidden_size, joint_size = config.encoder.hidden_size, config.joint_size
        linears = {
            "ctc_decoder.decoder_layers.0": (self._ctc, (config.vocab_size + 1, hidden_size)),
            "joint.enc": (self._joint["joint_enc"], (joint_size, hidden_size)),
            "joint.pred": (self._joint["joint_pred"], (joint_size, config.prediction_size)),
        }
        for language, part in self._heads.items():
            linears[f"joint.joint_net.2.{language}"] = part, (config.tokens_per_language + 1, joint_size)
        for name, (part, shape) in linears.items():
            weight, bias = part.linear()
            if tuple(weight.shape) != shape:
                raise ConfigError(f"{part.path}: its weight has shape {list(weight.shape)}; it must be {list(shape)}")
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight, bias
        return tensors

    def token_texts(self, config: IndicConformerConfig) -> dict[str, list[str]]:
        """Return the text of every token, by language. U+2581 at the beginning of a text stands for a space.

        Raises ConfigError if a language has another number of texts than the model has tokens.
        """
        path = self._folder / "vocab.json"
        vocabulary, texts = read_json(path), {}
        for language in config.languages:
            tokens = vocabulary.get(language)
            if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
                raise ConfigError(f"{path}: {language} must be a list of texts; it is {str(tokens)[:80]}")
            if len(tokens) not in (config.blank, config.blank + 1):
                raise ConfigError(
                    f"{path}: {language} must have {config.blank} texts, or one more for the blank; has {len(tokens)}"
                )
            texts[language] = tokens[: config.blank]
        return texts

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _part(self, name: str) -> ExportedPart:
        part = ExportedPart.find_part(self._folder, name)
        if part is None or (name == "encoder" and part.graph is None):
            raise ConfigError(f"{self._folder} lacks {name}.onnx" + ("" if name == "encoder" else f" or {name}.ts"))
        return part

    def _prediction_parts(self) -> tuple[ExportedPart, ExportedPart]:
        """Return the part with the embedding and the part with the LSTM. Both may be the same file."""
        decoder_part = ExportedPart.find_part(self._folder, "rnnt_decoder")
        if decoder_part is not None:
            return decoder_part, decoder_part
        names = ("rnnt_decoder_embed", "rnnt_decoder_rnn")
        if not any(ExportedPart.find_part(self._folder, name) for name in names):
            other_decoders = sorted(path.name for path in self._folder.glob("*decoder*") if "ctc" not in path.name)
            raise ConfigError(
                f"{self._folder} has neither rnnt_decoder nor {' and '.join(names)} (.onnx or .ts); it has "
                f"{', '.join(other_decoders) or 'no other decoder'}"
            )
        return self._part(names[0]), self._part(names[1])

    def _read_languages(self) -> tuple[tuple[str, ...], int]:
        """Return the languages in the order of the CTC head's rows, and the number of tokens of each.

        A language's mask is true for its own tokens, which are neighbors, and for the blank, which is the last one.
        """
        path = self._folder / "language_masks.json"
        masks, firsts = read_json(path), {}
        tokens = 0
        for language, mask in masks.items():
            if not isinstance(mask, list) or any(type(value) is not bool for value in mask) or not any(mask[:-1]):
                raise ConfigError(f"{path}: {language} must be a list of true and false; it is {str(mask)[:80]}")
            first, tokens = mask.index(True), sum(mask) - 1
            is_block = mask[-1] and all(mask[first : first + tokens]) and len(mask) == tokens * len(masks) + 1
            if not is_block or first % tokens:
                raise ConfigError(
                    f"{path}: {language} must be true for the blank and one of {len(masks)} equal blocks of tokens; "
                    f"it is true for {tokens + 1} of {len(mask)} from {first} on"
                )
            firsts[language] = first
        if len(set(firsts.values())) != len(firsts) or not firsts:
            raise ConfigError(f"{path}: {len(firsts)} languages share tokens, or there are none")
        return tuple(sorted(firsts, key=lambda language: firsts[language])), tokens

    def _check_config(self, fields: Fields) -> None:
        """Raise ConfigError if config.json contradicts the files."""
        config = self.model_config
        for name, expected in (
            ("BLANK_ID", (config.blank,)),
            ("PRED_RNN_LAYERS", (config.prediction_layers,)),
            ("PRED_RNN_HIDDEN_DIM", (config.prediction_size,)),
            # Both are in use for the published model. Decoding begins with the global blank, which is more accurate.
            ("SOS", (config.blank, config.vocab_size)),
        ):
            value = fields.optional(name)
            if value is not None and value not in expected:
                allowed = " or ".join(map(str, expected))
                raise fields.field_error(name, f"must be {allowed}, as the files in {ASSETS_FOLDER} are; got {value}")


def _activation(part: ExportedPart) -> str:
    """Return the activation function of the joint network, between its projections and the languages' heads."""
    if part.graph is None:
        activations = [name for name in _ACTIVATIONS.values() if re.search(rf"\b{name}_?\(", part.code)]
    else:
        ignored_ops = ("Identity", "Dropout", "Constant")
        activations = [_ACTIVATIONS.get(node.op, node.op) for node in part.graph.nodes if node.op not in ignored_ops]
    if len(activations) != 1 or activations[0] not in _ACTIVATIONS.values():
        supported = ", ".join(_ACTIVATIONS.values())
        raise ConfigError(
            f"{part.path} must compute one of {supported}; it computes {', '.join(activations) or 'nothing'}"
        )
    return activations[0]


def _read_features(part: ExportedPart) -> LogMelConfig:
    """Return the settings of the preprocessor. Raises ConfigError if it computes other features than LogMel does."""
    if part.graph is not None:
        raise ConfigError(f"{part.path} must be preprocessor.ts, a TorchScript archive")
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    if "window" not in names or "fb" not in names or len(part.shapes[names["fb"]]) not in (2, 3):
        raise ConfigError(f"{part.path} must have the tensors window and fb; it has {', '.join(names) or 'none'}")
    if min(part.shapes[names["fb"]][-2:]) < 2:
        raise ConfigError(f"{part.path}: {names['fb']} has shape {list(part.shapes[names['fb']])}")
    window, filters = part.read(names["window"]).float(), part.read(names["fb"]).float()
    num_mels, bins = filters.shape[-2:]
    padding = _edge_padding(part, n_fft=2 * (bins - 1))
    config = LogMelConfig(
        n_fft=2 * (bins - 1),
        window=window.numel(),
        num_mels=num_mels,
        center_padding=padding,
        drops_last_frame=padding == "constant",  # NeMo 2 pads with zeros, and drops the last frame
    )
    # A traced call has the numbers that are attributes in a scripted one.
    numbers = re.findall(r"\bstft\(\w+, (\d+), (\d+), (\d+),", part.code)
    traced = dict(zip(("n_fft", "hop_length", "win_length"), map(int, numbers[0]), strict=True)) if numbers else {}
    attributes = (
        traced | _final_values(part.code) | {name.rpartition(".")[2]: value for name, value in part.fields.items()}
    )
    sizes = {"hop_length": config.hop, "win_length": config.window, "n_fft": config.n_fft, "nfilt": num_mels}
    for name, expected in (_FEATURE_VALUES | sizes | {"preemph": config.preemphasis}).items():
        value = attributes.get(name, expected)
        is_number = isinstance(value, (int, float)) and type(value) is not bool and type(expected) in (int, float)
        if not (math.isclose(value, expected, rel_tol=1e-6) if is_number else value == expected):
            raise ConfigError(f"{part.path} sets {name} to {value!r}; the features computed here have {expected!r}")
    for name, stored, computed in (
        ("window", window.flatten(), torch.hann_window(config.window, periodic=False)),
        ("fb", filters.reshape(num_mels, bins), mel_filters(config)),
    ):
        error = float((stored - computed).abs().max())
        if not error <= _TOLERANCE:
            raise ConfigError(f"{part.path}: {names[name]} differs by {error:.2g} from the features computed here")
    return config


def _final_values(code: str) -> dict[str, Any]:
    """Return the constants in TorchScript code, from lines such as `n_fft : Final[int] = 512`."""
    constants = re.findall(r"^ +(\w+) : Final\[\w+\] = ([-+.\w\"]{1,40})$", code, re.MULTILINE)
    values = {}
    for name, text in constants:
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue
    return values


def _edge_padding(part: ExportedPart, n_fft: int) -> Literal["reflect", "constant"]:
    """Return how the code pads a clip before its Fourier transform.

    Scripted code calls stft with the mode. Traced code calls pad with half a transform at both ends. Raises ConfigError
    if the code has neither call.
    """
    calls = re.findall(r"\bstft\([^\n]*?\"(reflect|constant)\"", part.code)
    pads = re.findall(rf"\bpad\(\w+, \[{n_fft // 2}, {n_fft // 2}\](?:, \"(reflect|constant)\")?", part.code)
    calls += [mode or "constant" for mode in pads]  # torch.pad's default
    modes = set(calls)
    if modes == {"reflect"}:
        return "reflect"
    if modes == {"constant"}:
        return "constant"
    modes_text = " and ".join(sorted(modes)) or "no known padding"
    raise ConfigError(
        f"{part.path} must pad clips by reflection, or with zeros, before torch.stft; its code has {modes_text}"
    )
