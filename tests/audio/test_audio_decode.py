"""Decoding of uploads: formats, resampling, cuts at silence, and every bad input by name; in the worker process."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from waiting import WAIT_S

from meltcore.audio.decode import AudioLimits, Clip, decode
from meltcore.audio.messages import Decoded, DecodedClip
from meltcore.audio.pool import AudioWorkers
from meltcore.common.errors import RequestError

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
pytest.importorskip("soxr", reason="the extra audio has soxr")

LIMITS = AudioLimits(sample_rate=16_000, max_clip_s=5.0, max_audio_s=60.0)


def tone(seconds: float, rate: int = 16_000, hz: float = 440.0) -> npt.NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encoded(samples: npt.NDArray[Any], rate: int = 16_000, format: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def decoded(data: bytes, limits: AudioLimits = LIMITS) -> tuple[list[Clip], float]:
    *clips, duration_s = decode(data, limits)
    assert isinstance(duration_s, float)
    return [clip for clip in clips if isinstance(clip, Clip)], duration_s


def samples_of(clips: list[Clip]) -> npt.NDArray[np.int16]:
    return np.concatenate([np.frombuffer(clip.samples, np.int16) for clip in clips])


@pytest.mark.parametrize(
    ("format", "subtype", "error"),
    [
        ("WAV", "PCM_16", 2),
        ("WAV", "PCM_U8", 300),
        ("WAV", "FLOAT", 2),
        ("WAV", "ULAW", 1200),
        ("FLAC", "PCM_16", 2),
        ("OGG", "VORBIS", 2000),
        ("OGG", "OPUS", 2000),
        ("MP3", None, 2000),
        ("AIFF", None, 2),
    ],
)
def test_formats_are_decoded(format: str, subtype: str | None, error: int) -> None:
    clips, duration_s = decoded(encoded(tone(2.0), format=format, subtype=subtype))
    assert duration_s == pytest.approx(2.0, abs=0.1)
    found, expected = samples_of(clips)[8000:24_000].astype(int), (tone(2.0) * 32767)[8000:24_000]
    shifts = range(-1200, 1200, 1) if error == 2000 else (0,)  # encoders delay their signal
    assert min(np.abs(np.roll(found, shift) - expected)[1200:-1200].max() for shift in shifts) <= error


@pytest.mark.parametrize(
    ("rate", "channels"), [(8000, 2), (22_050, 2), (44_100, 2), (48_000, 6), (96_000, 2), (192_000, 8)]
)
def test_channels_of_any_rate_become_mono_at_the_models_rate(rate: int, channels: int) -> None:
    levels = 0.5 ** np.arange(channels)
    clips, duration_s = decoded(encoded(tone(3.0, rate)[:, None] * levels, rate))
    assert duration_s == pytest.approx(3.0, abs=0.001)
    expected = levels.mean() * tone(3.0) * 32767
    assert np.abs(samples_of(clips)[1000:-1000] - expected[1000:-1000]).max() < 150


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    """Ten tones of 1.7 s with pauses of 0.3 s: every cut lies in a pause, no sample is lost, none comes twice."""
    piece = np.concatenate([tone(1.7), np.zeros(4800, np.float32) + 0.001])
    audio = np.tile(piece, 10)
    clips, duration_s = decoded(encoded(audio))
    assert duration_s == 20.0
    assert len(clips) >= 4
    assert all(len(clip.samples) <= 5 * 32_000 for clip in clips)
    np.testing.assert_allclose(samples_of(clips), audio * 32767, atol=2)
    assert [clip.start for clip in clips] == [
        sum(len(earlier.samples) // 2 for earlier in clips[:i]) for i in range(len(clips))
    ]
    for clip in clips[1:]:
        assert clip.start % 32_000 > 1.7 * 16_000


def test_silent_parts_of_long_audio_are_left_out() -> None:
    audio = np.concatenate([tone(1.0), np.zeros(16_000 * 20, np.float32), tone(1.0)])
    clips, duration_s = decoded(encoded(audio))
    assert duration_s == 22.0
    assert len(clips) < 4
    assert clips[-1].start > 15 * 16_000


def bad_inputs() -> dict[str, tuple[bytes, str]]:
    wav, flac = encoded(tone(2.0)), encoded(tone(2.0), format="FLAC")
    mp3 = encoded(tone(2.0), format="MP3", subtype="MPEG_LAYER_III")
    with_nan = tone(1.0)
    with_nan[500] = np.nan
    return {
        "empty": (b"", "the audio is empty"),
        "no samples": (encoded(tone(0.0)), "holds no samples"),
        "silent": (encoded(np.zeros(16_000)), "is silent: its loudest sample is 0 of 32767"),
        "truncated wav": (wav[:1000], "is truncated: 64000 bytes of samples are announced, 956 are there"),
        "truncated flac": (flac[: len(flac) // 2], "is truncated|cannot be decoded"),
        "truncated mp3": (mp3[: len(mp3) // 2], "is truncated: at 0.8 s a frame of 36 bytes has 18"),
        "text": (b"hello" * 100, "is not audio in a format that is read here"),
        "zip": (b"PK\x03\x04" + bytes(1000), "is not audio"),
        "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not audio"),
        "zeros": (bytes(10_000), "is not audio"),
        "9 channels": (encoded(np.tile(tone(0.5)[:, None], 9)), "has 9 channels; the limit is 8"),
        "384 kHz": (encoded(tone(0.1, 384_000), 384_000), "has 384000 Hz; 8000 to 192000 are accepted"),
        "NaN": (encoded(with_nan, subtype="FLOAT"), "not numbers"),
        "too long": (encoded(tone(61.0)), "is longer than 60 s, the limit"),
        "bomb": (encoded(np.zeros(16_000 * 600, np.int16), format="FLAC"), "is longer than 60 s"),
    }


BAD = [
    "empty",
    "no samples",
    "silent",
    "truncated wav",
    "truncated flac",
    "truncated mp3",
    "text",
    "zip",
    "png",
    "zeros",
]
BAD += ["zeros", "9 channels", "384 kHz", "NaN", "too long", "bomb"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    data, message = bad_inputs()[name]
    assert len(data) < 3_000_000
    with pytest.raises(RequestError, match=message) as caught:
        list(decode(data, LIMITS))
    assert (caught.value.status, caught.value.param) == (400, "file")


def test_flac_that_lies_about_its_length_is_limited() -> None:
    """The header of a stream announces 0 samples: only decoding shows the length."""
    flac = bytearray(encoded(np.zeros(16_000 * 100, np.int16) + 9, format="FLAC"))
    flac[18 + 3] &= 0xF0
    flac[18 + 4 : 18 + 8] = bytes(4)
    with pytest.raises(RequestError, match="is longer than 60 s"):
        list(decode(bytes(flac), LIMITS))


@pytest.fixture
def temporary_files() -> Iterator[None]:
    folder = Path(tempfile.gettempdir())
    before = set(folder.iterdir())
    yield
    assert not [path for path in set(folder.iterdir()) - before if "audio" in path.name or "sound" in path.name]


async def clips_of(workers: AudioWorkers, data: bytes) -> list[DecodedClip | Decoded]:
    return [part async for part in workers.decode(data, sample_rate=16_000, max_clip_s=5.0, max_audio_s=60.0)]


# threat: an audio file: it costs a worker's memory and time, and the server goes on
@pytest.mark.slow
def test_workers_decode_refuse_and_survive(tmp_path: Path, temporary_files: None) -> None:
    async def scenario() -> None:
        workers = AudioWorkers(2)
        good = encoded(tone(2.0))
        parts = await asyncio.gather(*(clips_of(workers, good) for _ in range(5)))
        for clip, end in parts:
            assert isinstance(clip, DecodedClip)
            assert end == Decoded(2.0)
        assert len(workers._all) == 2
        pids = {worker.pid for worker in workers._all}
        for name in ("text", "silent", "bomb", "NaN"):
            with pytest.raises(RequestError, match="the audio"):
                await clips_of(workers, bad_inputs()[name][0])
        assert {worker.pid for worker in workers._all} == pids  # a bad file costs no worker
        stream = workers.decode(encoded(tone(50.0)), sample_rate=16_000, max_clip_s=5.0, max_audio_s=60.0)
        async for _ in stream:
            break
        await stream.aclose()  # the client has gone: the worker ends, and another takes its place
        assert len(await clips_of(workers, good)) == 2
        await workers.close()
        assert not workers._all

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


# threat: an audio file: a worker that computes too long is killed
@pytest.mark.slow
def test_worker_that_takes_too_much_cpu_time_is_killed() -> None:
    async def scenario() -> None:
        workers = AudioWorkers(1, cpu_limit_s=0)
        hour = encoded(np.zeros(8000 * 14_000, np.int16) + 9, 8000, format="FLAC")
        with pytest.raises(RequestError, match="within 0 s of CPU time"):
            async for _ in workers.decode(hour, sample_rate=16_000, max_clip_s=5.0, max_audio_s=20_000):
                pass
        assert not workers._all
        assert len(await clips_of(workers, encoded(tone(1.0)))) == 2
        await workers.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
