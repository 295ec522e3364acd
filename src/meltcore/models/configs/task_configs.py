"""The sizes of models of tasks other than generation: translation, transcription and speech synthesis.

This module does not import torch, since plans of memory read configurations too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields

TRANSLATION_ACTIVATIONS = ("gelu", "relu")
_INDICTRANS2, _INDICF5 = "IndicTrans2", "IndicF5"
# Beams and new tokens per sentence of a translation.
NUM_BEAMS, MAX_NEW_TOKENS = 5, 256
# Elements of one layer of a transcriber's subsampling: what is larger is computed in parts. 256 MiB in 16 bits.
MAX_SUBSAMPLING_ELEMENTS = 2**27
POSITION_GROUPS = 16  # of the convolution over positions of IndicF5


@dataclass(frozen=True)
class StackConfig:
    """Holds the sizes of one stack of layers, the encoder or the decoder."""

    vocab_size: int
    num_layers: int
    num_heads: int
    ffn_size: int


@dataclass(frozen=True)
class IndicTrans2Config:
    """Holds the sizes and variants of a checkpoint."""

    hidden_size: int
    encoder: StackConfig
    decoder: StackConfig
    max_source_positions: int
    max_target_positions: int
    activation: str
    scale_embedding: bool
    layernorm_embedding: bool
    tie_head: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> IndicTrans2Config:
        """Read config.json. Raises ConfigError for missing fields and unsupported values."""
        config = Fields(values)
        stack_sizes = {}
        for stack in ("encoder", "decoder"):
            names = ("vocab_size", "layers", "attention_heads", "ffn_dim", "embed_dim")
            fields = config.required(*(f"{stack}_{name}" for name in names))
            stack_sizes[stack] = [fields[f"{stack}_{name}"] for name in names]
            if not config.optional(f"{stack}_normalize_before", False):
                raise config.unsupported_field(f"{stack}_normalize_before", _INDICTRANS2)
            if stack_sizes[stack][4] % (2 * stack_sizes[stack][2]):
                raise config.field_error(f"{stack}_embed_dim", f"must be a multiple of twice {stack}_attention_heads")
        if stack_sizes["encoder"][4] != stack_sizes["decoder"][4]:
            raise config.unsupported_field("decoder_embed_dim", _INDICTRANS2)
        activation = config.required("activation_function")["activation_function"]
        if activation not in TRANSLATION_ACTIVATIONS:
            raise config.unsupported_field("activation_function", _INDICTRANS2)
        return cls(
            hidden_size=stack_sizes["encoder"][4],
            encoder=StackConfig(*stack_sizes["encoder"][:4]),
            decoder=StackConfig(*stack_sizes["decoder"][:4]),
            **config.required("max_source_positions", "max_target_positions"),
            activation=activation,
            scale_embedding=config.optional("scale_embedding", False),
            layernorm_embedding=config.optional("layernorm_embedding", False),
            tie_head=config.optional("share_decoder_input_output_embed", False),
        )

    def sentence_limits(self, max_model_len: int | None = None) -> tuple[int, int]:
        """Return the tokens of the longest source and of the longest translation, each at most `max_model_len`.

        Raises ConfigError if `max_model_len` is more than the number of the model's positions.
        """
        limits = self.max_source_positions, min(MAX_NEW_TOKENS, self.max_target_positions)
        if max_model_len is None:
            return limits
        if not 2 <= max_model_len <= max(limits):
            raise ConfigError(f"--max-model-len must be from 2 to the model's {max(limits)}; got {max_model_len}")
        return min(max_model_len, limits[0]), min(max_model_len, limits[1])

    def slot_bytes(self, element_size: int, *, num_beams: int, max_new_tokens: int, max_source: int) -> int:
        """Return the bytes of one sentence of a beam search: keys and values, and the logits of a step."""
        positions = max_source + num_beams * max_new_tokens
        kv_bytes = 2 * self.decoder.num_layers * self.hidden_size * element_size * positions
        return kv_bytes + num_beams * self.decoder.vocab_size * (element_size + 4)


@dataclass(frozen=True)
class MelConfig:
    """Holds the settings of the spectrograms. Lengths are in samples.

    The window is as long as the Fourier transform.
    """

    sample_rate: int = 24_000
    n_fft: int = 1024
    hop: int = 256
    num_mels: int = 100

    def frames(self, samples: int) -> int:
        """Return the number of frames of `samples` samples."""
        return samples // self.hop + 1


@dataclass(frozen=True)
class VocosConfig:
    """Holds the sizes of the vocoder. The defaults belong to the published vocoder for mel spectrograms of 24 kHz."""

    hidden_size: int = 512
    intermediate_size: int = 1536
    num_layers: int = 8


@dataclass(frozen=True)
class IndicF5Config:
    """Holds the sizes of the model. The defaults belong to the published model, whose config.json lacks them."""

    vocab_size: int
    hidden_size: int = 1024
    num_layers: int = 22
    num_heads: int = 16
    head_size: int = 64
    feed_forward_size: int = 2048
    text_size: int = 512
    text_feed_forward_size: int = 1024
    num_text_layers: int = 4
    max_frames: int = 4096
    mel: MelConfig = field(default_factory=MelConfig)
    vocoder: VocosConfig = field(default_factory=VocosConfig)

    @classmethod
    def read(cls, values: Mapping[str, Any], vocab_size: int) -> IndicF5Config:
        """Read config.json. Its objects `arch` and `mel_spec` are as in F5-TTS, and its object `vocoder` is optional.

        `arch.max_frames` is a field of Meltcore: a model that was trained on short texts gets short chunks. vocab.txt
        has `vocab_size` characters. Raises ConfigError for an unsupported configuration.
        """
        config = Fields(values)
        arch, mel, vocoder = (config.nested_fields(name) for name in ("arch", "mel_spec", "vocoder"))
        size, heads = arch.optional("dim", cls.hidden_size), arch.optional("heads", cls.num_heads)
        for name, accepted in (("pe_attn_head", 1), ("text_mask_padding", False), ("qk_norm", None)):
            if arch.optional(name, accepted) != accepted:
                raise arch.unsupported_field(name, _INDICF5)
        if size % POSITION_GROUPS:
            raise arch.field_error("dim", f"must be a multiple of {POSITION_GROUPS}")
        mels = MelConfig(
            mel.optional("target_sample_rate", MelConfig.sample_rate),
            mel.optional("n_fft", MelConfig.n_fft),
            mel.optional("hop_length", MelConfig.hop),
            mel.optional("n_mel_channels", MelConfig.num_mels),
        )
        if mel.optional("win_length", mels.n_fft) != mels.n_fft or mels.n_fft % (2 * mels.hop):
            raise mel.unsupported_field("win_length", _INDICF5)
        text_size = arch.optional("text_dim", cls.text_size)
        return cls(
            vocab_size=vocab_size,
            hidden_size=size,
            num_layers=arch.optional("depth", cls.num_layers),
            num_heads=heads,
            head_size=arch.optional("dim_head", cls.head_size),
            feed_forward_size=size * arch.optional("ff_mult", 2),
            text_size=text_size,
            text_feed_forward_size=2 * text_size,
            num_text_layers=arch.optional("conv_layers", cls.num_text_layers),
            max_frames=arch.optional("max_frames", cls.max_frames),
            mel=mels,
            vocoder=VocosConfig(
                vocoder.optional("dim", VocosConfig.hidden_size),
                vocoder.optional("intermediate_dim", VocosConfig.intermediate_size),
                vocoder.optional("num_layers", VocosConfig.num_layers),
            ),
        )


@dataclass(frozen=True)
class LogMelConfig:
    """Holds the settings of the features. Lengths are in samples; NeMo's config.yaml has them in seconds."""

    sample_rate: int = 16_000
    n_fft: int = 512
    window: int = 400
    hop: int = 160
    num_mels: int = 80
    preemphasis: float = 0.97
    center_padding: Literal["reflect", "constant"] = "reflect"
    drops_last_frame: bool = False

    @property
    def min_samples(self) -> int:
        """The samples of the shortest clip.

        Padding by reflection needs half a transform, and the standard deviation needs two frames.
        """
        return max(self.n_fft // 2 + 1, 2 * self.hop)

    def frames(self, samples: int) -> int:
        """Return the number of frames of a clip of `samples` samples."""
        return samples // self.hop + (0 if self.drops_last_frame else 1)


@dataclass(frozen=True)
class ConformerConfig:
    """Holds the sizes of the encoder. The defaults belong to the published model with 600M parameters."""

    num_mels: int = 80
    num_layers: int = 24
    hidden_size: int = 1024
    num_heads: int = 8
    feed_forward_size: int = 4096
    conv_kernel: int = 9
    subsampling: Literal["dw_striding", "striding"] = "dw_striding"
    subsampling_factor: int = 8
    subsampling_channels: int = 256
    scales_input: bool = True

    def encoded_frames(self, frames: int) -> int:
        """Return the number of encoder frames of `frames` feature frames."""
        return -(-frames // self.subsampling_factor)


@dataclass(frozen=True)
class IndicConformerConfig:
    """Holds the sizes of the model. The defaults belong to the published model with 600M parameters."""

    languages: tuple[str, ...]
    encoder: ConformerConfig = field(default_factory=ConformerConfig)
    features: LogMelConfig = field(default_factory=LogMelConfig)
    tokens_per_language: int = 256
    prediction_size: int = 640
    prediction_layers: int = 2
    joint_size: int = 640
    joint_activation: str = "relu"
    max_symbols: int = 10  # per frame of the RNN-T

    @property
    def blank(self) -> int:
        """The id of the blank among the tokens of a language."""
        return self.tokens_per_language

    @property
    def vocab_size(self) -> int:
        """The number of tokens of all languages, which is the global id of the blank."""
        return self.tokens_per_language * len(self.languages)

    @property
    def frame_s(self) -> float:
        """The duration of an encoder frame in seconds."""
        return self.features.hop * self.encoder.subsampling_factor / self.features.sample_rate


def graph_rows(slots: int) -> list[int]:
    """Return the batch sizes to which steps are padded, ascending up to `slots`, with four sizes per factor of two."""
    sizes = {1, 2, *(math.ceil(2 ** (exponent / 4)) for exponent in range(8, 4 * slots.bit_length()))}
    rounded = {size if size <= 8 else -(-size // 8) * 8 for size in sizes}
    return [*sorted(size for size in rounded if size < slots), slots]
