"""Audio of browsers and phones (M4A, WebM, AAC), which FFmpeg decodes, in limits; in the worker process too."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Any

import numpy as np
import pytest
from waiting import WAIT_S

pytest.importorskip("av", reason="the extra av has PyAV")
pytest.importorskip("soxr", reason="the extra audio has soxr")

import av
from test_audio_decode import LIMITS, clips_of, decoded, samples_of, tone

from meltcore.audio.decode import decode
from meltcore.audio.messages import Decoded
from meltcore.audio.pool import AudioWorkers
from meltcore.common.errors import RequestError


class Recorder:
    """A file that cannot seek, as a browser's recording: its duration is never written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int:
        self.data += bytes(data)
        return len(data)


def recorded(
    samples: np.ndarray, container: str, codec: str, rate: int = 48_000, *, is_live: bool = False, **options: str
) -> bytes:
    """`samples` [frames] or [channels, frames] as a file of FFmpeg."""
    file: Any = Recorder() if is_live else io.BytesIO()
    channels = np.atleast_2d(samples).astype(np.float32)
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    with av.open(file, "w", format=container, container_options=options) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        if codec == "wmav2":  # it has no bit rate of its own
            stream.bit_rate = 96_000
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
        frame.sample_rate = rate
        converter = av.AudioResampler(stream.codec_context.format, layout, rate)
        for converted in (*converter.resample(frame), *converter.resample(None)):
            output.mux(stream.encode(converted))
        output.mux(stream.encode(None))
    return file.data if is_live else file.getvalue()


FORMATS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "m4a": ("ipod", "aac", {}),
    "m4a lossless": ("ipod", "alac", {}),
    "fragments": ("mp4", "aac", {"is_live": True, "movflags": "frag_keyframe+empty_moov"}),
    "webm": ("webm", "libopus", {}),
    "browser": ("webm", "libopus", {"is_live": True}),
    "matroska": ("matroska", "pcm_s16le", {}),
    "adts": ("adts", "aac", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_formats_are_decoded(name: str, rate: int) -> None:
    container, codec, options = FORMATS[name]
    clips, duration_s = decoded(recorded(tone(4.0, rate), container, codec, rate, **options))
    assert duration_s == pytest.approx(4.0, abs=0.15)
    found, expected = samples_of(clips)[8000:40_000].astype(float), (tone(4.0) * 32767)[8000:40_000]
    spectrum = np.abs(np.fft.rfft(found * np.hanning(len(found))))
    assert spectrum.argmax() == 880  # 440 Hz in 2 s
    assert np.sqrt((found**2).mean()) == pytest.approx(np.sqrt((expected**2).mean()), rel=0.05)


def test_six_channels_become_mono() -> None:
    clips, duration_s = decoded(recorded(np.stack([tone(2.0, 48_000)] * 6), "ipod", "alac"))
    assert duration_s == 2.0
    np.testing.assert_allclose(samples_of(clips)[1000:-1000], tone(2.0)[1000:-1000] * 32767, atol=200)


def bad_inputs() -> dict[str, tuple[bytes, str]]:
    m4a, webm = recorded(tone(4.0, 48_000), "ipod", "aac"), recorded(tone(4.0, 48_000), "webm", "libopus")
    indexed = recorded(tone(8.0, 48_000), "ipod", "aac", moov_size="20000")
    damaged = bytearray(indexed)
    damaged[len(indexed) // 2 : len(indexed) // 2 + 2000] = bytes(range(250)) * 8
    video = io.BytesIO()
    with av.open(video, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        output.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        output.mux(stream.encode(None))
    silence = np.zeros(48_000 * 90, np.float32)
    return {
        "no index": (m4a[: len(m4a) // 2], "is truncated: a part of it has .* bytes, of which"),
        "truncated": (indexed[: len(indexed) // 2], "is truncated: a part of it has .* bytes, of which"),
        "truncated webm": (webm[: len(webm) // 2], "is truncated: a part of it has .* bytes, of which"),
        "damaged": (bytes(damaged), "cannot be decoded after"),
        "head alone": (m4a[:12], "is MP4 or M4A that is truncated or damaged"),
        "matroska junk": (b"\x1a\x45\xdf\xa3" + b"hello" * 99, "is WebM or Matroska that is truncated or damaged"),
        "aac junk": (b"\xff\xf1" + bytes(999), "is AAC without audio that can be decoded"),
        "video": (video.getvalue(), "without audio that can be decoded"),
        "silent": (recorded(silence[: 48_000 * 2], "ipod", "aac"), "is silent"),
        "long m4a": (recorded(silence, "ipod", "aac"), "is longer than 60 s"),
        "long recording": (recorded(silence, "webm", "libopus", is_live=True), "is longer than 60 s"),
    }


@pytest.fixture(scope="module")
def bad() -> dict[str, tuple[bytes, str]]:
    return bad_inputs()


NAMES = ["no index", "truncated", "truncated webm", "damaged", "head alone", "matroska junk", "aac junk", "video"]
NAMES += ["silent", "long m4a", "long recording"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_named(name: str, bad: dict[str, tuple[bytes, str]]) -> None:
    data, message = bad[name]
    assert set(bad) == set(NAMES)
    with pytest.raises(RequestError, match=message) as caught:
        list(decode(data, LIMITS))
    assert (caught.value.status, caught.value.param) == (400, "file")


@pytest.mark.slow
def test_workers_read_these_formats_within_their_limits(bad: dict[str, tuple[bytes, str]]) -> None:
    async def scenario() -> None:
        workers = AudioWorkers(1)
        m4a = recorded(tone(2.0, 48_000), "ipod", "aac")
        assert isinstance((await clips_of(workers, m4a))[-1], Decoded)
        for name in ("damaged", "video", "long recording"):
            with pytest.raises(RequestError, match="the audio"):
                await clips_of(workers, bad[name][0])
        assert len(workers._all) == 1  # a bad file costs no worker
        await workers.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_server_without_pyav_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"is MP4 or M4A, which this server cannot read: .* \(meltcore\[av\]\)"):
        list(decode(b"\x00\x00\x00\x1cftypM4A \x00\x00", LIMITS))
