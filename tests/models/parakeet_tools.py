"""Random Parakeet models of transformers, the reference of the Conformer, and their weights under NeMo's names."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn
from transformers import ParakeetCTCConfig, ParakeetEncoderConfig, ParakeetRNNTConfig
from transformers.audio_utils import mel_filter_bank
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor
from transformers.models.parakeet.modeling_parakeet import ParakeetForCTC, ParakeetForRNNT

from meltcore.models.configs.task_configs import ConformerConfig, IndicConformerConfig, LogMelConfig
from meltcore.models.tasks.indicconformer import IndicConformer

# As NeMo 2 and transformers have the edges of a clip.
FEATURES = LogMelConfig(center_padding="constant", drops_last_frame=True)
ENCODER = ConformerConfig(
    num_layers=3, hidden_size=64, num_heads=4, feed_forward_size=128, conv_kernel=9, subsampling_channels=16
)
CONFIG = IndicConformerConfig(
    languages=("hi", "kn", "ta"),
    encoder=ENCODER,
    features=FEATURES,
    tokens_per_language=12,
    prediction_size=24,
    prediction_layers=2,
    joint_size=24,
)


def speech(*seconds: float, seed: int = 0) -> list[torch.Tensor]:
    """Clips with the spectrum of noise and of sliding tones, from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    clips = []
    for duration in seconds:
        time_s = torch.arange(round(duration * 16_000)) / 16_000
        pitch = 200 + 3000 * torch.rand(1, generator=generator)
        tone = torch.sin(2 * torch.pi * pitch * time_s * (1 + 0.3 * time_s))
        clips.append(0.3 * tone + 0.1 * torch.randn(len(time_s), generator=generator))
    return clips


def pad(clips: list[torch.Tensor], filler: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The clips as one batch, and their lengths."""
    lengths = torch.tensor([len(clip) for clip in clips])
    return nn.utils.rnn.pad_sequence(clips, batch_first=True, padding_value=filler), lengths


def feature_extractor() -> Any:
    """The reference's features. librosa, which it takes its filters from, is replaced by transformers' own filters."""

    def mel(sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
        return mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm=norm, mel_scale="slaney").T

    module: Any = sys.modules[ParakeetFeatureExtractor.__module__]
    module.librosa = types.SimpleNamespace(filters=types.SimpleNamespace(mel=mel))
    return ParakeetFeatureExtractor()


def encoder_config() -> ParakeetEncoderConfig:
    return ParakeetEncoderConfig(
        hidden_size=ENCODER.hidden_size,
        num_hidden_layers=ENCODER.num_layers,
        num_attention_heads=ENCODER.num_heads,
        intermediate_size=ENCODER.feed_forward_size,
        conv_kernel_size=ENCODER.conv_kernel,
        subsampling_factor=ENCODER.subsampling_factor,
        subsampling_conv_channels=ENCODER.subsampling_channels,
        num_mel_bins=ENCODER.num_mels,
        scale_input=ENCODER.scales_input,
    )


def randomize(model: nn.Module, seed: int) -> None:
    """Random weights: norms that scale and shift, batch norms that have seen data, and peaked attention."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if not values.is_floating_point() or name.endswith("inv_freq"):
                continue
            if name.endswith("running_var"):
                values.uniform_(0.5, 2.0, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                values.uniform_(0.5, 1.5, generator=generator)
            elif values.dim() > 1:
                values.normal_(0.0, values[0].numel() ** -0.5, generator=generator)
            else:
                values.normal_(0.0, 0.2, generator=generator)
            if any(part in name for part in ("q_proj", "k_proj", "relative_k_proj")):
                values.mul_(3.0)  # scores of several units: a mask or position that is off changes the result
            if "bias_u" in name or "bias_v" in name:
                values.mul_(4.0)


def reference_ctc(seed: int = 1) -> ParakeetForCTC:
    """The reference with a CTC head over all languages and the blank."""
    config = ParakeetCTCConfig(
        vocab_size=CONFIG.vocab_size + 1, pad_token_id=CONFIG.vocab_size, encoder_config=encoder_config().to_dict()
    )
    model = ParakeetForCTC(config).eval()
    randomize(model, seed)
    center(model.ctc_head, model.encoder)
    return model


def reference_rnnt(language: int, seed: int = 1, blank_bias: float = 4.0) -> ParakeetForRNNT:
    """The reference with the tokens of one language: its tokens are those within the language, the blank is the last.

    All languages share encoder, prediction network and projections; `seed` decides the weights.
    """
    tokens = CONFIG.tokens_per_language
    config = ParakeetRNNTConfig(
        vocab_size=tokens + 1,
        blank_token_id=tokens,
        pad_token_id=tokens,
        decoder_hidden_size=CONFIG.prediction_size,
        num_decoder_layers=CONFIG.prediction_layers,
        max_symbols_per_step=CONFIG.max_symbols,
        encoder_config=encoder_config().to_dict(),
    )
    model = ParakeetForRNNT(config).eval()
    randomize(model, seed)
    model.generation_config.decoder_start_token_id = tokens
    center(model.encoder_projector, model.encoder)
    head = model.joint.head
    generator = torch.Generator().manual_seed(100 * seed + language)
    with torch.no_grad():
        # A token changes the next one: the state of the decoder shows in the result.
        model.decoder.embedding.weight.mul_(6.0)
        model.decoder.decoder_projector.weight.mul_(6.0)
        head.weight.normal_(0.0, 0.6, generator=generator)
        head.bias.normal_(0.0, 0.2, generator=generator)
        head.bias[tokens] += blank_bias
    return model


def center(layer: Any, encoder: Any) -> None:
    """Give each output mean 0 and a spread of 2 over the frames of a clip, so that the best token changes with time."""
    features = feature_extractor()([speech(3.0, seed=9)[0].numpy()], sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        layer.bias.zero_()
        outputs = layer(encoder(features["input_features"], features["attention_mask"]).last_hidden_state)[0, :-1]
        factor = 2.0 / outputs.std(0)
        layer.weight.mul_(factor.view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias.copy_(-outputs.mean(0) * factor)


def nemo_names(ctc: ParakeetForCTC, rnnts: list[ParakeetForRNNT]) -> dict[str, torch.Tensor]:
    """Weights of the references under the names of a NeMo checkpoint. rnnts: one per language, equal but for heads."""
    tensors: dict[str, torch.Tensor] = {}
    for name, values in rnnts[0].encoder.state_dict().items():
        tensors["encoder." + encoder_name(name)] = values
    tensors["ctc_decoder.decoder_layers.0.weight"] = ctc.ctc_head.weight
    tensors["ctc_decoder.decoder_layers.0.bias"] = ctc.ctc_head.bias
    first = rnnts[0]
    rows = torch.randn(CONFIG.vocab_size + 1, CONFIG.prediction_size, generator=torch.Generator().manual_seed(5))
    rows[: CONFIG.tokens_per_language] = first.decoder.embedding.weight[:-1]
    rows[-1] = first.decoder.embedding.weight[-1]  # the global blank begins every clip
    tensors["decoder.prediction.embed.weight"] = rows
    for name, values in first.decoder.lstm.state_dict().items():
        tensors[f"decoder.prediction.dec_rnn.lstm.{name}"] = values
    for kind in ("weight", "bias"):
        tensors[f"joint.pred.{kind}"] = getattr(first.decoder.decoder_projector, kind)
        tensors[f"joint.enc.{kind}"] = getattr(first.encoder_projector, kind)
        for language, rnnt in zip(CONFIG.languages, rnnts, strict=True):
            tensors[f"joint.joint_net.2.{language}.{kind}"] = getattr(rnnt.joint.head, kind)
    tensors["preprocessor.featurizer.fb"] = torch.zeros(1)
    return {name: values.detach().clone() for name, values in tensors.items()}


def encoder_name(name: str) -> str:
    """NeMo's name of a tensor of transformers' encoder."""
    for theirs, nemo in (
        ("subsampling.layers.", "pre_encode.conv."),
        ("subsampling.linear.", "pre_encode.out."),
        ("relative_k_proj", "linear_pos"),
        ("q_proj", "linear_q"),
        ("k_proj", "linear_k"),
        ("v_proj", "linear_v"),
        ("o_proj", "linear_out"),
        ("self_attn.bias_", "self_attn.pos_bias_"),
        ("conv.norm.", "conv.batch_norm."),
    ):
        name = name.replace(theirs, nemo)
    return name


def build(tensors: dict[str, torch.Tensor], max_seconds: float = 20.0) -> IndicConformer:
    """Our model with these weights."""
    model = IndicConformer(CONFIG)
    model.load(tensors, "test")
    model.prepare(model.encoded_frames(round(max_seconds * 16_000)))
    return model
