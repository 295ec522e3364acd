"""Prepares the samples of references, and joins the samples of chunks.

References are trimmed and raised to a level. Chunks are leveled and cross-faded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meltcore.common.errors import RequestError

# RMS of full scale: references below it are raised to it, speech is brought to it. It is -20 dBFS.
TARGET_RMS = 0.1
CROSS_FADE_S = 0.15
# Edges of a reference below this are cut off, in windows; then follows silence.
_SILENCE_RMS = 10 ** (-42 / 20)
_WINDOW_S = 0.01
_END_SILENCE_S = 0.05
MIN_REFERENCE_S = 0.5
_MAX_PEAK = 1.5  # of decoded audio, which may overshoot
_MAX_GAIN = 10.0

Samples = npt.NDArray[np.float32]


class Reference(NamedTuple):
    """A prepared reference: float32 samples that end with silence, and their duration."""

    samples: Samples
    seconds: float


def prepare_reference(samples: Samples, sample_rate: int, max_s: float) -> Reference:
    """Trim silence at both ends, append a short silence, and raise the level. `samples` are mono, from -1 to 1.

    Raises RequestError if the samples are not finite, silent, too short, too long, or out of range.
    """
    if not np.isfinite(samples).all():
        raise _refusal("holds samples that are not numbers (NaN or infinity)")
    peak = float(np.abs(samples).max(initial=0.0))
    if peak > _MAX_PEAK:
        raise _refusal(f"has samples of up to {peak:.3g}; they must be from -1 to 1")
    window = round(_WINDOW_S * sample_rate)
    levels = np.sqrt(np.square(samples[: len(samples) // window * window].reshape(-1, window)).mean(axis=1))
    (loud,) = np.nonzero(levels > _SILENCE_RMS)
    if not len(loud):
        raise _refusal(f"is silent: no {_WINDOW_S * 1000:.0f} ms of it are louder than -42 dBFS")
    speech = samples[loud[0] * window : (loud[-1] + 1) * window]
    seconds = len(speech) / sample_rate
    if not MIN_REFERENCE_S <= seconds <= max_s:
        raise _refusal(
            f"has {seconds:.1f} s without the silence at its ends; it must have {MIN_REFERENCE_S} to {max_s:.1f} s"
        )
    padded = np.concatenate([speech, np.zeros(round(_END_SILENCE_S * sample_rate), np.float32)])
    rms = float(np.sqrt(np.square(padded).mean()))
    if rms < TARGET_RMS:
        padded = padded * np.float32(TARGET_RMS / rms)
    return Reference(padded, len(padded) / sample_rate)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the reference {reason}", param="reference", code="invalid_audio")


class SpeechJoiner:
    """Joins the chunks of one text. The end of each chunk is held back and cross-faded into the next chunk.

    The gain that brings the first chunk to the target level is used for all chunks.
    """

    def __init__(self, sample_rate: int) -> None:
        self._overlap = int(CROSS_FADE_S * sample_rate)
        self._gain: float | None = None
        self._tail: Samples = np.zeros(0, np.float32)

    def add(self, samples: Samples, *, is_last: bool) -> Samples:
        """Add the samples of a chunk. Return the samples that no later chunk changes."""
        if self._gain is None:
            rms = float(np.sqrt(np.square(samples).mean())) if len(samples) else 0.0
            self._gain = min(TARGET_RMS / rms, _MAX_GAIN) if rms > 0 else 1.0
        chunk: Samples = np.clip(samples * np.float32(self._gain), -1.0, 1.0)
        size = min(len(self._tail), len(chunk), self._overlap)
        fade = np.linspace(0, 1, size, dtype=np.float32)
        split = len(self._tail) - size
        faded = self._tail[split:] * (1 - fade) + chunk[:size] * fade
        joined = np.concatenate([self._tail[:split], faded, chunk[size:]])
        end = len(joined) if is_last else max(0, len(joined) - self._overlap)
        self._tail = joined[end:]
        return joined[:end]
