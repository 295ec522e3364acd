"""Vocos: mel spectrograms to samples by an inverse Fourier transform, and the spectrograms that it was trained on.

ConvNeXt blocks predict the magnitude and phase of each frame. Every operation that mixes frames is masked, so that a
row's samples do not depend on the rows beside it. Modules have the names in the published checkpoint, "backbone" and
"head". Paper: https://arxiv.org/abs/2306.00814.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.task_configs import MelConfig, VocosConfig
from meltcore.models.tasks.log_mel import triangles

_KERNEL = 7
_NORM_EPS = 1e-6
_MAX_MAGNITUDE = 100.0
_MEL_FLOOR = 1e-5
_ENVELOPE_FLOOR = 1e-11
# HTK's mel scale
_HTK_MELS, _HTK_HZ = 2595.0, 700.0


class MelSpectrogram(nn.Module):
    """Turns samples into logarithms of mel-filtered magnitudes, in float32."""

    def __init__(self, config: MelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        window = torch.hann_window(config.n_fft, dtype=torch.float32, device=device)
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", htk_filters(config).to(device), persistent=False)
        self.window: torch.Tensor
        self.filters: torch.Tensor

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Convert samples [samples] float32 to a spectrogram [frames, num_mels].

        There must be more than n_fft / 2 samples.
        """
        config = self.config
        spectrum = torch.stft(
            samples, config.n_fft, config.hop, window=self.window, center=True, pad_mode="reflect", return_complex=True
        )
        return (self.filters @ spectrum.abs()).clamp(min=_MEL_FLOOR).log().transpose(0, 1)


def htk_filters(config: MelConfig) -> torch.Tensor:
    """Return triangular filters of height 1 on HTK's mel scale, [num_mels, n_fft / 2 + 1] float32."""
    top_hz = config.sample_rate / 2
    top_mel = _HTK_MELS * torch.log10(torch.tensor(1.0 + top_hz / _HTK_HZ, dtype=torch.float64))
    mels = torch.linspace(0, float(top_mel), config.num_mels + 2, dtype=torch.float64)
    bins_hz = torch.linspace(0, top_hz, config.n_fft // 2 + 1, dtype=torch.float64)
    return triangles(bins_hz, _HTK_HZ * (10.0 ** (mels / _HTK_MELS) - 1.0)).float()


class ConvNeXtLayer(nn.Module):
    """A depthwise convolution over frames, a norm, two linear layers, and a learned scale per channel."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.dwconv = nn.Conv1d(size, size, _KERNEL, padding=_KERNEL // 2, groups=size)
        self.norm = nn.LayerNorm(size, eps=_NORM_EPS)
        self.pwconv1 = nn.Linear(size, config.intermediate_size)
        self.pwconv2 = nn.Linear(config.intermediate_size, size)
        self.gamma = nn.Parameter(torch.empty(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [rows, frames, size], which the caller adds to `hidden`."""
        mixed = self.norm(self.dwconv(hidden.transpose(1, 2)).transpose(1, 2))
        added: torch.Tensor = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(mixed)))
        return added


class Vocos(nn.Module):
    """The whole vocoder, in float32: it is small, and phases need the precision."""

    def __init__(self, config: VocosConfig, mel: MelConfig) -> None:
        super().__init__()
        self.mel = mel
        size = config.hidden_size
        self.embed = nn.Conv1d(mel.num_mels, size, _KERNEL, padding=_KERNEL // 2)
        self.norm = nn.LayerNorm(size, eps=_NORM_EPS)
        self.layers = nn.ModuleList(ConvNeXtLayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(size, eps=_NORM_EPS)
        self.out = nn.Linear(size, mel.n_fft + 2)

    def prepare(self) -> None:
        """Build computed tensors."""
        window = torch.hann_window(self.mel.n_fft, dtype=torch.float32, device=self.out.weight.device)
        self.register_buffer("window", window, persistent=False)
        self.window: torch.Tensor

    def forward(self, mels: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Return samples [rows, (frames - 1) * hop] float32. A row has as many valid samples as its own frames yield.

        Args:
            mels: [rows, frames, num_mels] float32, with any value after a row's end.
            frames: [rows] int64, the number of frames of each row.
        """
        is_padding = (torch.arange(mels.shape[1], device=mels.device) >= frames[:, None])[:, :, None]
        hidden = self.embed(mels.masked_fill(is_padding, 0.0).transpose(1, 2)).transpose(1, 2)
        hidden = self.norm(hidden)
        for layer in self.layers:
            hidden = hidden + layer(hidden.masked_fill(is_padding, 0.0))
        magnitude, phase = self.out(self.final_norm(hidden)).transpose(1, 2).chunk(2, dim=1)
        magnitude = magnitude.exp().clamp(max=_MAX_MAGNITUDE)
        return self._overlap_add(torch.polar(magnitude, phase), is_padding)

    def _overlap_add(self, spectrum: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Return the samples of a spectrum [rows, bins, frames]. The sum of windows ends at the end of each row."""
        n_fft, hop = self.mel.n_fft, self.mel.hop
        is_frame = (~is_padding).transpose(1, 2).float()
        parts = torch.fft.irfft(spectrum, n_fft, dim=1) * self.window[:, None] * is_frame
        envelopes = self.window.square()[:, None] * is_frame
        size = (spectrum.shape[2] - 1) * hop + n_fft

        def add(columns: torch.Tensor) -> torch.Tensor:
            return functional.fold(columns, (1, size), (1, n_fft), stride=(1, hop))[:, 0, 0, n_fft // 2 : -n_fft // 2]

        return add(parts) / add(envelopes).clamp(min=_ENVELOPE_FLOOR)

    def tensors(self, prefix: str) -> dict[str, WeightLoader]:
        """Return the weight loaders by the tensors' published names."""
        named = {"backbone.embed": self.embed, "backbone.norm": self.norm, "backbone.final_layer_norm": self.final_norm}
        loaders = module_tensors({prefix + name: module for name, module in {**named, "head.out": self.out}.items()})
        for i, layer in enumerate(self.layers):
            loaders |= module_tensors({f"{prefix}backbone.convnext.{i}": layer})
        return loaders


def module_tensors(modules: dict[str, nn.Module]) -> dict[str, WeightLoader]:
    """Return the weight loaders of modules whose tensors have the published names, by the modules' names."""
    return {
        f"{name}.{tensor_name}": values.data
        for name, module in modules.items()
        for tensor_name, values in module.named_parameters()
    }
