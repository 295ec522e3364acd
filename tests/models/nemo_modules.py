"""The networks of a transcriber with the modules, names and forward passes that NeMo's have, to be exported.

Sizes are those of parakeet_tools.CONFIG. The weights of a NeMo checkpoint fit by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from parakeet_tools import CONFIG
from torch import nn

SIZES = CONFIG.encoder


class Subsampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = SIZES.subsampling_channels
        layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU()]
        for _ in range(round(math.log2(SIZES.subsampling_factor)) - 1):
            layers += [nn.Conv2d(channels, channels, 3, 2, 1, groups=channels), nn.Conv2d(channels, channels, 1)]
            layers.append(nn.ReLU())
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * SIZES.num_mels // SIZES.subsampling_factor, SIZES.hidden_size)

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = features.unsqueeze(1)
        for layer in self.conv:
            hidden = layer(hidden)
            if isinstance(layer, nn.Conv2d) and layer.stride[0] == 2:
                lengths = torch.floor((lengths.to(torch.float32) - 1) / 2 + 1).to(torch.int64)
            hidden = hidden * (torch.arange(hidden.shape[2]) < lengths[:, None])[:, None, :, None]
        b, _, t, _ = hidden.size()
        return self.out(hidden.transpose(1, 2).reshape(b, t, -1)), lengths


class Positions(nn.Module):
    """The table of relative positions, and the scale of the input."""

    def __init__(self, max_len: int = 200) -> None:
        super().__init__()
        size = SIZES.hidden_size
        positions = torch.arange(max_len - 1, -max_len, -1, dtype=torch.float32).unsqueeze(1)
        frequencies = torch.exp(torch.arange(0, size, 2, dtype=torch.float32) * -(math.log(10000.0) / size))
        table = torch.zeros(positions.size(0), size)
        table[:, 0::2], table[:, 1::2] = torch.sin(positions * frequencies), torch.cos(positions * frequencies)
        self.register_buffer("pe", table.unsqueeze(0), persistent=False)
        self.pe: torch.Tensor
        self.xscale = math.sqrt(size) if SIZES.scales_input else None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.xscale:
            hidden = hidden * self.xscale
        center, length = self.pe.size(1) // 2 + 1, hidden.size(1)
        return hidden, self.pe[:, center - length : center + length - 1]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(SIZES.hidden_size, SIZES.feed_forward_size)
        self.activation = nn.SiLU()
        self.linear2 = nn.Linear(SIZES.feed_forward_size, SIZES.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.activation(self.linear1(hidden)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size, self.h = SIZES.hidden_size, SIZES.num_heads
        self.d_k = size // self.h
        self.linear_q, self.linear_k = nn.Linear(size, size), nn.Linear(size, size)
        self.linear_v, self.linear_out = nn.Linear(size, size), nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.empty(self.h, self.d_k))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        b = hidden.size(0)
        q, k, v = (
            linear(hidden).view(b, -1, self.h, self.d_k) for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        p = self.linear_pos(positions).view(1, -1, self.h, self.d_k).transpose(1, 2)
        with_u, with_v = (q + self.pos_bias_u).transpose(1, 2), (q + self.pos_bias_v).transpose(1, 2)
        by_position = torch.matmul(with_v, p.transpose(-2, -1))
        rows, columns = by_position.size(2), by_position.size(3)
        padded = nn.functional.pad(by_position, (1, 0)).view(b, self.h, columns + 1, rows)
        by_position = padded[:, :, 1:].view(b, self.h, rows, columns)
        by_key = torch.matmul(with_u, k.transpose(-2, -1))
        scores = (by_key + by_position[:, :, :, : by_key.size(-1)]) / math.sqrt(self.d_k)
        scores = scores.masked_fill(mask.unsqueeze(1), -10000.0)
        weights = torch.softmax(scores, dim=-1).masked_fill(mask.unsqueeze(1), 0.0)
        return self.linear_out(torch.matmul(weights, v).transpose(1, 2).reshape(b, -1, self.h * self.d_k))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size, kernel = SIZES.hidden_size, SIZES.conv_kernel
        self.pointwise_conv1 = nn.Conv1d(size, 2 * size, 1)
        self.depthwise_conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=size)
        self.batch_norm = nn.BatchNorm1d(size)
        self.activation = nn.SiLU()
        self.pointwise_conv2 = nn.Conv1d(size, size, 1)

    def forward(self, hidden: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.glu(self.pointwise_conv1(hidden.transpose(1, 2)), dim=1)
        gated = gated.masked_fill(is_padding.unsqueeze(1), 0.0)
        mixed = self.activation(self.batch_norm(self.depthwise_conv(gated)))
        return self.pointwise_conv2(mixed).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = SIZES.hidden_size
        self.norm_feed_forward1, self.feed_forward1 = nn.LayerNorm(size), FeedForward()
        self.norm_conv, self.conv = nn.LayerNorm(size), Convolution()
        self.norm_self_att, self.self_attn = nn.LayerNorm(size), Attention()
        self.norm_feed_forward2, self.feed_forward2 = nn.LayerNorm(size), FeedForward()
        self.norm_out = nn.LayerNorm(size)

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, is_padding: torch.Tensor
    ) -> torch.Tensor:
        hidden = hidden + self.feed_forward1(self.norm_feed_forward1(hidden)) * 0.5
        hidden = hidden + self.self_attn(self.norm_self_att(hidden), mask, positions)
        hidden = hidden + self.conv(self.norm_conv(hidden), is_padding)
        hidden = hidden + self.feed_forward2(self.norm_feed_forward2(hidden)) * 0.5
        return self.norm_out(hidden)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre_encode = Subsampling()
        self.pos_enc = Positions()
        self.layers = nn.ModuleList(Layer() for _ in range(SIZES.num_layers))

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, lengths = self.pre_encode(audio_signal.transpose(1, 2), length)
        hidden, positions = self.pos_enc(hidden)
        is_frame = torch.arange(hidden.size(1)) < lengths.unsqueeze(-1)
        mask = ~(is_frame.unsqueeze(1) & is_frame.unsqueeze(2))
        for layer in self.layers:
            hidden = layer(hidden, mask, positions, ~is_frame)
        return hidden.transpose(1, 2), lengths


class CTCDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder_layers = nn.Sequential(nn.Conv1d(SIZES.hidden_size, CONFIG.vocab_size + 1, 1))

    def forward(self, encoder_output: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.decoder_layers(encoder_output).transpose(1, 2), dim=-1)


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CONFIG.prediction_size, CONFIG.prediction_size, CONFIG.prediction_layers)

    def forward(self, values: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, (h, c) = self.lstm(values, (h, c))
        return output, h, c


class RNNTDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        embed = nn.Embedding(CONFIG.vocab_size + 1, CONFIG.prediction_size, padding_idx=CONFIG.vocab_size)
        self.prediction = nn.ModuleDict({"embed": embed, "dec_rnn": Rnn()})

    def forward(
        self, targets: torch.Tensor, target_length: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        values = self.prediction["embed"](targets).transpose(0, 1)
        output, h, c = self.prediction["dec_rnn"](values, h, c)
        return output.transpose(0, 1).transpose(1, 2), target_length, h, c


class Features(nn.Module):
    """NeMo 1's features."""

    def __init__(self, fb: torch.Tensor) -> None:
        super().__init__()
        self.win_length, self.hop_length, self.n_fft = 400, 160, 512
        self.preemph, self.dither, self.mag_power = 0.97, 1e-05, 2.0
        self.log, self.log_zero_guard_type, self.normalize = True, "add", "per_feature"
        self.log_zero_guard_value = 2**-24
        self.register_buffer("window", torch.hann_window(400, periodic=False))
        self.register_buffer("fb", fb.unsqueeze(0))
        self.window: torch.Tensor
        self.fb: torch.Tensor

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frames = torch.floor_divide(lengths + self.n_fft // 2 * 2 - self.n_fft, self.hop_length) + 1
        x = torch.cat((x[:, 0].unsqueeze(1), x[:, 1:] - self.preemph * x[:, :-1]), dim=1)
        x = self.spectrum(x).abs()
        x = torch.log(torch.matmul(self.fb, x.pow(self.mag_power)) + self.log_zero_guard_value)
        mean, std = x.mean(dim=2, keepdim=True), x.std(dim=2, keepdim=True) + 1e-5
        return nn.functional.pad((x - mean) / std, (0, 0)), frames  # with pad_to, as in training, it is longer

    def spectrum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stft(
            x, self.n_fft, self.hop_length, self.win_length, self.window, center=True, return_complex=True
        )  # fmt: skip


class ZeroPaddedFeatures(Features):
    """NeMo 2's edges of a clip."""

    def spectrum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stft(
            x, self.n_fft, self.hop_length, self.win_length, self.window, center=True, pad_mode="constant",
            return_complex=True,
        )  # fmt: skip


class Preprocessor(nn.Module):
    def __init__(self, fb: torch.Tensor, constant: bool = False) -> None:
        super().__init__()
        self.featurizer = ZeroPaddedFeatures(fb) if constant else Features(fb)

    def forward(self, input_signal: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.featurizer(input_signal, length)


def load(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    """The module with the tensors whose names begin with `prefix`, ready for an export."""
    wanted = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(wanted, strict=True)
    return module.eval().requires_grad_(False)
