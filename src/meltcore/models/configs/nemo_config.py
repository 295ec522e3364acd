"""Reads the sizes of a transcription model from NeMo's configuration, model_config.yaml.

This module does not import torch, since plans of memory read configurations too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.task_configs import ConformerConfig, IndicConformerConfig, LogMelConfig

CONFIG_FILE = "model_config.yaml"
MAX_FILE_BYTES = 2**17  # YAML takes 20 microseconds per byte; published files have up to 40,000
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


def parse_yaml(content: bytes, source: object) -> dict[str, Any]:
    """Return the values of a model_config.yaml. Raises ConfigError, which names `source`, unless it holds an object."""
    import yaml

    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{source}: {CONFIG_FILE} has more than {MAX_FILE_BYTES:,} bytes, the limit")
    try:
        config = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date, or a number of 5,000 digits
        raise ConfigError(f"{source}: {CONFIG_FILE} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: {CONFIG_FILE} must hold an object")
    return config


def read_config(values: Mapping[str, Any]) -> IndicConformerConfig:
    """Return the model sizes in a NeMo configuration.

    Raises ConfigError for fields that are missing, invalid or unsupported.
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
