"""Computes log-mel features of speech as NeMo does, for a batch of clips. A clip's features do not depend on the batch.

Steps: pre-emphasis, windowed Fourier transform, power, mel filters with Slaney's scale and norm, logarithm, and a
normalization over time per clip and mel bin. NeMo adds dither in training only.

NeMo 2 differs from NeMo 1 at the edges of a clip: it pads with zeros instead of a reflection, and drops the last frame.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from meltcore.models.configs.task_configs import LogMelConfig

# Slaney's mel scale: linear below 1,000 Hz, then 27 mels per factor of 6.4.
_LINEAR_HZ_PER_MEL = 200 / 3
_LOG_FROM_HZ = 1000.0
_LOG_FROM_MEL = _LOG_FROM_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27
LOG_OFFSET = 2**-24
STD_OFFSET = 1e-5


class LogMel(nn.Module):
    """Turns samples into log-mel features, in float32."""

    def __init__(self, config: LogMelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        window = torch.hann_window(config.window, periodic=False, dtype=torch.float32, device=device)
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", mel_filters(config).to(device), persistent=False)
        self.window: torch.Tensor
        self.filters: torch.Tensor

    def forward(self, samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [clips, frames, num_mels] float32, zero after a clip's end, and the clips' frame counts [clips] int64.

        samples: [clips, samples] float32, with any value after a clip's end; lengths: [clips] int64, samples per clip,
        each at least `min_samples`.
        """
        config = self.config
        emphasized = pre_emphasize(samples, lengths, config.preemphasis)
        padded = pad_centered(emphasized, lengths, config.n_fft // 2, config.center_padding)
        # In windows of n_fft samples: the shorter window lies in the middle of each.
        spectrum = torch.stft(
            padded,
            config.n_fft,
            hop_length=config.hop,
            win_length=config.window,
            window=self.window,
            center=False,
            return_complex=True,
        )
        power = spectrum.real.square() + spectrum.imag.square()
        logs = torch.log(self.filters @ power + LOG_OFFSET).transpose(1, 2)
        frames = torch.div(lengths, config.hop, rounding_mode="floor") + (0 if config.drops_last_frame else 1)
        num_frames = config.frames(samples.shape[1])
        return normalize(logs[:, :num_frames], frames), frames


def pre_emphasize(samples: torch.Tensor, lengths: torch.Tensor, factor: float) -> torch.Tensor:
    """Subtract from each sample `factor` times the previous sample, and set samples after a clip's end to zero."""
    emphasized = torch.cat([samples[:, :1], samples[:, 1:] - factor * samples[:, :-1]], dim=1)
    return emphasized.masked_fill(_is_after_end(samples.shape[1], lengths), 0.0)


def pad_centered(samples: torch.Tensor, lengths: torch.Tensor, padding: int, mode: str) -> torch.Tensor:
    """Pad each clip by `padding` samples at its beginning and at its own end. samples: [clips, samples]."""
    if mode == "constant":
        return nn.functional.pad(samples, (padding, padding))
    size = samples.shape[1]
    positions = torch.arange(-padding, size + padding, device=samples.device).abs()
    last = (lengths - 1)[:, None]
    reflected = torch.where(positions > last, 2 * last - positions, positions)
    # Beyond the reflection of a shorter clip lies nothing that a frame of that clip reads.
    return samples.gather(1, reflected.clamp(0, size - 1))


def normalize(features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Give each mel bin mean 0 and standard deviation 1 over a clip's frames. Frames after the clip become zero."""
    after_end = _is_after_end(features.shape[1], frames)[:, :, None]
    counts = frames[:, None, None]
    mean = features.masked_fill(after_end, 0.0).sum(1, keepdim=True) / counts
    centered = (features - mean).masked_fill(after_end, 0.0)
    std = (centered.square().sum(1, keepdim=True) / (counts - 1)).sqrt()
    return centered / (std + STD_OFFSET)


def _is_after_end(size: int, lengths: torch.Tensor) -> torch.Tensor:
    """Return [clips, size] bool, which is True for a position after the end of its clip."""
    return torch.arange(size, device=lengths.device) >= lengths[:, None]


def mel_filters(config: LogMelConfig) -> torch.Tensor:
    """Return triangular filters of equal area (Slaney's norm), from 0 Hz to half the sample rate.

    [num_mels, n_fft / 2 + 1] float32, computed in float64.
    """
    top_hz = config.sample_rate / 2
    bins_hz = torch.linspace(0, top_hz, config.n_fft // 2 + 1, dtype=torch.float64)
    top_mel = _LOG_FROM_MEL + math.log(top_hz / _LOG_FROM_HZ) / _LOG_STEP if top_hz > _LOG_FROM_HZ else None
    mels = torch.linspace(0, top_mel or top_hz / _LINEAR_HZ_PER_MEL, config.num_mels + 2, dtype=torch.float64)
    corners_hz = torch.where(
        mels < _LOG_FROM_MEL,
        mels * _LINEAR_HZ_PER_MEL,
        _LOG_FROM_HZ * torch.exp(_LOG_STEP * (mels - _LOG_FROM_MEL)),
    )
    lower, upper = corners_hz[:-2, None], corners_hz[2:, None]
    return (triangles(bins_hz, corners_hz) * (2 / (upper - lower))).float()


def triangles(bins_hz: torch.Tensor, corners_hz: torch.Tensor) -> torch.Tensor:
    """Return filters of height 1 that rise from one corner to the next, and fall to the corner after that.

    bins_hz: [bins]; corners_hz: [filters + 2], increasing. Returns [filters, bins].
    """
    lower, center, upper = corners_hz[:-2, None], corners_hz[1:-1, None], corners_hz[2:, None]
    rising = (bins_hz - lower) / (center - lower)
    falling = (upper - bins_hz) / (upper - center)
    return torch.minimum(rising, falling).clamp(min=0)
