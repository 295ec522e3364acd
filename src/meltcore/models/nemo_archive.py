"""Reads NeMo checkpoints of speech recognizers: a .nemo archive, or the folder that one is unpacked into.

An archive is a tar file, compressed or not: model_config.yaml, model_weights.ckpt (torch's zip of tensors) and the
files that the configuration names, such as a SentencePiece model per language. Nothing is written to disk, and no code
of a checkpoint runs.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from meltcore.errors import ConfigError
from meltcore.models.config_fields import Fields
from meltcore.models.conformer import ConformerConfig
from meltcore.models.indicconformer import IndicConformerConfig
from meltcore.models.log_mel import LogMelConfig

CONFIG_FILE, WEIGHTS_FILE = "model_config.yaml", "model_weights.ckpt"
_FAMILY = "IndicConformer here"
# What is not computed here, by section: fields that must be absent or have one of these values.
_REQUIRED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "preprocessor": {
        "window": ("hann",),
        "normalize": ("per_feature",),
        "frame_splicing": (1,),
        "log": (True,),
        "log_zero_guard_type": ("add",),
        "log_zero_guard_value": (2**-24,),
        "lowfreq": (0,),
        "highfreq": (),
        "mag_power": (2.0,),
        "mel_norm": ("slaney",),
        "exact_pad": (False,),
    },
    "encoder": {
        "self_attention_model": ("rel_pos",),
        "att_context_size": ([-1, -1],),
        "att_context_style": ("regular",),
        "conv_norm_type": ("batch_norm",),
        "conv_context_size": (),
        "causal_downsampling": (False,),
        "feat_out": (-1,),
        "reduction": (),
        "use_bias": (True,),
    },
    "decoder": {"normalization_mode": (), "blank_as_pad": (True,)},
    "joint": {"multilingual": (True,)},
}


class NemoArchive:
    """An archive or an unpacked folder: its configuration, and its other files by name."""

    has_batch_norm = True

    def __init__(self, path: Path) -> None:
        """Open it and read the configuration. Raises ConfigError when that fails."""
        self.path = path
        try:
            self._tar = None if path.is_dir() else tarfile.open(path)  # noqa: SIM115 - open while it is read from
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(f"{path} cannot be read as a NeMo archive, a tar file: {error}") from error
        self.config = self._read_config()

    @property
    def model_config(self) -> IndicConformerConfig:
        """The sizes that the configuration asks for. Raises ConfigError as `read_config` does."""
        return read_config(self.config)

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises ConfigError when there is none of that name."""
        try:
            if self._tar is None:
                return (self.path / Path(name).name).open("rb")
            members = {member.name.removeprefix("./"): member for member in self._tar.getmembers() if member.isfile()}
            if name in members and (file := self._tar.extractfile(members[name])) is not None:
                return file
        except (OSError, EOFError, tarfile.TarError) as error:
            raise ConfigError(f"{self.path}: {name} cannot be read: {error}") from error
        raise ConfigError(f"{self.path} has no {name}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the weights into host memory. Raises ConfigError for a file that holds anything but tensors."""
        with self.open(WEIGHTS_FILE) as file:
            # torch reads the end of its file first, which a compressed archive would decompress again each time.
            is_compressed = self._tar is not None and not isinstance(self._tar.fileobj, io.BufferedReader)
            try:
                source = io.BytesIO(file.read()) if is_compressed else file
                tensors = torch.load(source, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many types for a damaged file
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ConfigError(f"{self.path}: {WEIGHTS_FILE} cannot be read: {reason}") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(values, torch.Tensor) for values in tensors.values()):
            raise ConfigError(f"{self.path}: {WEIGHTS_FILE} must hold tensors by name")
        return dict(tensors)

    def token_texts(self, config: IndicConformerConfig) -> dict[str, list[str]]:
        """Return the text of every token, by language. U+2581 at its beginning stands for a space.

        Raises ConfigError for a missing SentencePiece model, and for one whose size is not the model's.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                "reading a speech recognizer's tokens needs the package sentencepiece: meltcore[audio]"
            ) from error
        tokenizers = (self.config.get("tokenizer") or {}).get("langs") or {}
        texts = {}
        for language in config.languages:
            tokenizer = tokenizers.get(language)
            name = tokenizer.get("model_path") if isinstance(tokenizer, dict) else None
            if not isinstance(name, str):
                raise ConfigError(f"{self.path}: {CONFIG_FILE} has no tokenizer.langs.{language}.model_path")
            with self.open(name.removeprefix("nemo:")) as file:
                processor = SentencePieceProcessor(model_proto=file.read())
            size = processor.vocab_size()
            if size != config.tokens_per_language:
                raise ConfigError(
                    f"{self.path}: the tokenizer of {language} has {size} tokens; "
                    f"the model has {config.tokens_per_language} per language"
                )
            texts[language] = [processor.IdToPiece(token) for token in range(size)]
        return texts

    def close(self) -> None:
        """Close the archive."""
        if self._tar is not None:
            self._tar.close()

    def _read_config(self) -> dict[str, Any]:
        import yaml

        with self.open(CONFIG_FILE) as file:
            try:
                config = yaml.safe_load(file.read())
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.path}: {CONFIG_FILE} is not valid YAML: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{self.path}: {CONFIG_FILE} must hold an object")
        return config


def read_config(values: Mapping[str, Any]) -> IndicConformerConfig:
    """Return the sizes that a NeMo configuration asks for.

    Raises ConfigError for fields that are missing, invalid, or not computed here.
    """
    root = Fields(values, CONFIG_FILE)
    sections = {name: root.nested_fields(name) for name in (*_REQUIRED_VALUES, "tokenizer", "decoding")}
    for section, rules in _REQUIRED_VALUES.items():
        for name, allowed in rules.items():
            value = (values.get(section) or {}).get(name)
            if value is not None and value not in allowed:
                raise sections[section].unsupported_field(name, _FAMILY)
    joint = sections["joint"]
    languages = tuple(joint.required("language_keys")["language_keys"])
    # The tokenizers' order is that of the CTC head's rows; joint_net names its heads.
    tokenizers = tuple(sections["tokenizer"].optional("langs", {}))
    if tokenizers and sorted(tokenizers) != sorted(languages):
        raise joint.field_error("language_keys", f"must be those of tokenizer.langs, {', '.join(tokenizers)}")
    languages = tokenizers or languages
    vocab_size = joint.required("num_classes")["num_classes"]
    if not languages or vocab_size % len(languages):
        raise joint.field_error(
            "num_classes", f"must be a multiple of the {len(languages)} languages; got {vocab_size}"
        )
    prediction = sections["decoder"].nested_fields("prednet").required("pred_hidden", "pred_rnn_layers")
    joint_net = joint.nested_fields("jointnet")
    activation = joint_net.optional("activation", "relu")
    if activation not in ("relu", "tanh", "sigmoid"):
        raise joint_net.unsupported_field("activation", _FAMILY)
    greedy = sections["decoding"].nested_fields("greedy")
    return IndicConformerConfig(
        languages=languages,
        encoder=_encoder_config(sections["encoder"]),
        features=_feature_config(sections["preprocessor"], root.optional("nemo_version", "1")),
        tokens_per_language=vocab_size // len(languages),
        prediction_size=prediction["pred_hidden"],
        prediction_layers=prediction["pred_rnn_layers"],
        joint_size=joint_net.required("joint_hidden")["joint_hidden"],
        joint_activation=activation,
        max_symbols=greedy.optional("max_symbols", 10),
    )


def _encoder_config(encoder: Fields) -> ConformerConfig:
    sizes = encoder.required("feat_in", "n_layers", "d_model", "n_heads", "subsampling", "subsampling_factor")
    hidden_size, factor = sizes["d_model"], sizes["subsampling_factor"]
    if sizes["subsampling"] not in ("dw_striding", "striding"):
        raise encoder.unsupported_field("subsampling", _FAMILY)
    if factor & (factor - 1):
        raise encoder.field_error("subsampling_factor", f"must be a power of 2; got {factor}")
    if hidden_size % sizes["n_heads"]:
        raise encoder.field_error("n_heads", f"must divide d_model, {hidden_size}; got {sizes['n_heads']}")
    kernel = encoder.optional("conv_kernel_size", 31)
    if kernel % 2 == 0:
        raise encoder.field_error("conv_kernel_size", f"must be odd; got {kernel}")
    channels = encoder.optional("subsampling_conv_channels", -1)
    return ConformerConfig(
        num_mels=sizes["feat_in"],
        num_layers=sizes["n_layers"],
        hidden_size=hidden_size,
        num_heads=sizes["n_heads"],
        feed_forward_size=hidden_size * encoder.optional("ff_expansion_factor", 4),
        conv_kernel=kernel,
        subsampling=sizes["subsampling"],
        subsampling_factor=factor,
        subsampling_channels=hidden_size if channels == -1 else channels,
        scales_input=encoder.optional("xscaling", True),
    )


def _feature_config(preprocessor: Fields, nemo_version: str) -> LogMelConfig:
    rate = preprocessor.optional("sample_rate", 16_000)
    window = round(preprocessor.optional("window_size", 0.02) * rate)
    n_fft = preprocessor.optional("n_fft") or 2 ** (window - 1).bit_length()
    if n_fft < window:
        raise preprocessor.field_error("n_fft", f"must be at least the window of {window} samples; got {n_fft}")
    is_nemo_one = nemo_version.startswith(("0.", "1"))
    return LogMelConfig(
        sample_rate=rate,
        n_fft=n_fft,
        window=window,
        hop=round(preprocessor.optional("window_stride", 0.01) * rate),
        num_mels=preprocessor.optional("features", 64),
        preemphasis=preprocessor.optional("preemph", 0.97),
        center_padding="reflect" if is_nemo_one else "constant",
        drops_last_frame=not is_nemo_one,
    )
