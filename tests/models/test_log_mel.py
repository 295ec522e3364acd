"""Log-mel features: parity with transformers' extractor and with NeMo 1's steps; a clip's features stand alone."""

from __future__ import annotations

import pytest
import torch
from parakeet_tools import FEATURES, feature_extractor, pad, speech

from meltcore.models.configs.task_configs import LogMelConfig
from meltcore.models.tasks import log_mel
from meltcore.models.tasks.log_mel import LogMel, mel_filters

CLIPS = speech(1.0, 0.337, 2.1)


def error_against_transformers(factor: float = FEATURES.preemphasis) -> float:
    theirs = feature_extractor()([clip.numpy() for clip in CLIPS], sampling_rate=16_000, return_tensors="pt")
    config = LogMelConfig(preemphasis=factor, center_padding="constant", drops_last_frame=True)
    features, frames = LogMel(config)(*pad(CLIPS))
    assert frames.tolist() == theirs["attention_mask"].sum(1).tolist()
    assert frames.tolist() == [config.frames(len(clip)) for clip in CLIPS]
    return float((theirs["input_features"][:, : features.shape[1]] - features).abs().max())


def test_same_features_as_transformers() -> None:
    assert error_against_transformers() < 1e-4


def test_parity_notices_a_missing_pre_emphasis() -> None:
    assert error_against_transformers(factor=0.0) > 0.1


def test_filters_have_slaney_area() -> None:
    """Each filter's integral over frequency is 1 up to the width of a bin, wherever it has several bins."""
    filters = mel_filters(LogMelConfig(n_fft=8192))
    areas = filters.sum(1) * 8000 / 4096
    torch.testing.assert_close(areas, torch.ones(80), atol=2e-3, rtol=0)


def nemo_one(clip: torch.Tensor) -> torch.Tensor:
    """NeMo 1's steps on a single clip, with torch's own reflection: [frames, num_mels]."""
    config = LogMelConfig()
    emphasized = torch.cat([clip[:1], clip[1:] - config.preemphasis * clip[:-1]])
    window = torch.hann_window(config.window, periodic=False)
    spectrum = torch.stft(emphasized, config.n_fft, config.hop, config.window, window, return_complex=True)
    logs = torch.log(mel_filters(config) @ spectrum.abs().square() + log_mel.LOG_OFFSET)
    return ((logs - logs.mean(1, keepdim=True)) / (logs.std(1, keepdim=True) + log_mel.STD_OFFSET)).T


def error_against_nemo_one(*, samples_after_the_end: float = 0.0) -> float:
    features, frames = LogMel(LogMelConfig())(*pad(CLIPS, samples_after_the_end))
    return max(
        float((features[i, : frames[i]] - nemo_one(clip)).abs().max()) if frames[i] == len(nemo_one(clip)) else 1.0
        for i, clip in enumerate(CLIPS)
    )


def test_batch_has_the_features_of_each_clip_alone() -> None:
    """Reflected at each clip's own end, whatever follows it in the batch."""
    assert error_against_nemo_one() < 1e-4
    assert error_against_nemo_one(samples_after_the_end=0.7) < 1e-4
    features, frames = LogMel(LogMelConfig())(*pad(CLIPS, 0.7))
    assert all(bool((features[i, count:] == 0).all()) for i, count in enumerate(frames))


@pytest.mark.parametrize("mutation", ["reflect at the batch's end", "normalize over the batch's length"])
def test_lone_clip_parity_notices(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation.startswith("reflect"):
        own = log_mel.pad_centered
        monkeypatch.setattr(log_mel, "pad_centered", lambda x, n, *rest: own(x, torch.full_like(n, x.shape[1]), *rest))
    else:
        own_normalize = log_mel.normalize
        monkeypatch.setattr(log_mel, "normalize", lambda x, n: own_normalize(x, torch.full_like(n, x.shape[1])))
    assert error_against_nemo_one() > 1e-2


def test_shortest_clip_is_finite() -> None:
    for config in (FEATURES, LogMelConfig()):
        clip = speech(1.0)[0][: config.min_samples]
        features, frames = LogMel(config)(clip[None], torch.tensor([len(clip)]))
        assert int(frames) >= 2
        assert bool(features.isfinite().all())


def test_silence_is_finite() -> None:
    features, _ = LogMel(LogMelConfig())(torch.zeros(1, 8000), torch.tensor([8000]))
    assert bool(features.isfinite().all())
