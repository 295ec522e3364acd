"""Clips of tones as padded tensors, and their samples, computed on the device of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from bundled_run import Tensors
from torch.nn.utils.rnn import pad_sequence

from meltcore.measure.problems.tones import ToneClip, tones


@dataclass
class Sounds(Tensors):
    """The slots of clips, padded: starts_s [clips, slots + 1], the others [clips, slots]; noise: [clips]."""

    starts_s: torch.Tensor
    low_hz: torch.Tensor
    high_hz: torch.Tensor
    amplitudes: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def of(cls, clips: list[ToneClip]) -> Sounds:
        def padded(name: str, value: float = 0.0) -> torch.Tensor:
            rows = [torch.from_numpy(getattr(clip, name)) for clip in clips]
            return pad_sequence(rows, batch_first=True, padding_value=value)

        # The slot after a clip's end has no tones and lasts forever.
        return cls(
            padded("starts_s", math.inf),
            padded("low_hz"),
            padded("high_hz"),
            padded("amplitudes"),
            torch.tensor([clip.noise for clip in clips]),
        )

    def rendered(self, size: int, rate: int) -> torch.Tensor:
        """Return samples [clips, size] with noise, which goes on after a clip's end."""
        times = (torch.arange(size, device=self.noise.device) / rate).expand(len(self.noise), -1).contiguous()
        slots = (torch.searchsorted(self.starts_s, times, right=True) - 1).clip(0, self.low_hz.shape[1] - 1)
        begins, ends = self.starts_s.gather(1, slots), self.starts_s.gather(1, slots + 1)
        low, high = self.low_hz.gather(1, slots), self.high_hz.gather(1, slots)
        samples = tones(times - begins, ends - times, low, high, torch.sin) * self.amplitudes.gather(1, slots)
        return samples + torch.randn_like(samples) * self.noise[:, None]
