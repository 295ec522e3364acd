"""AVI, WMA, FLV, MPEG-TS, WavPack, AMR and 3GP: read, joined, cut off, late, and made to harm."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="the extra av has PyAV")
pytest.importorskip("soxr", reason="the extra audio has soxr")

import av
from test_audio_decode import decoded, encoded, tone
from test_ffmpeg_formats import Recorder, recorded
from test_odd_files import APE, ID3V1, MAKERS, duration_s, id3v2, is_loud

from meltcore.common.errors import RequestError

FORMATS: dict[str, tuple[str, str, int]] = {
    "avi": ("avi", "pcm_s16le", 48_000),
    "avi mp3": ("avi", "mp3", 48_000),
    "wma": ("asf", "wmav2", 44_100),
    "flv": ("flv", "aac", 44_100),
    "flv mp3": ("flv", "mp3", 44_100),
    "ts": ("mpegts", "aac", 48_000),
    "ts mp2": ("mpegts", "mp2", 48_000),
    "wavpack": ("wv", "wavpack", 48_000),
    "amr": ("amr", "libopencore_amrnb", 8000),
    "3gp": ("3gp", "aac", 48_000),
}


@lru_cache(40)
def made(name: str, seconds: float = 2.0, *, is_live: bool = False) -> bytes:
    """A tone in this format. Skips where PyAV was built without its encoder."""
    container, codec, rate = FORMATS[name]
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {codec}")
    return recorded(tone(seconds, rate), container, codec, rate, is_live=is_live)


def m2ts(data: bytes) -> bytes:
    """A transport stream as cameras write it, with four bytes before each packet."""
    return b"".join(struct.pack(">I", at) + data[at : at + 188] for at in range(0, len(data), 188))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_to_the_end(name: str) -> None:
    data = made(name)
    for whole in (data, data + ID3V1, bytes(5) + data, id3v2(40) + data):
        assert duration_s(whole) == pytest.approx(2.0, abs=0.15)
    assert is_loud(data, 0.1, 1.9)


@pytest.mark.parametrize("name", ["avi", "wma", "flv", "ts", "wavpack"])
def test_recordings_that_were_not_closed_are_read_to_the_end(name: str) -> None:
    data = made(name, is_live=True)
    assert duration_s(data) == pytest.approx(2.0, abs=0.15)
    if name != "wavpack":
        assert duration_s(data + made(name, 1.0, is_live=True)) == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize("name", FORMATS)
def test_joined_files_are_all_read(name: str) -> None:
    data = made(name, 1.0) + made(name, 1.5) + made(name, 0.5)
    assert duration_s(data) == pytest.approx(3.0, abs=0.4)
    assert is_loud(data, 2.7, 2.9)


@pytest.mark.slow
@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", ["wav", "mp3", "m4a", "flac", "wma", "avi", "wavpack", "amr", "flv", "ts"])
def test_files_of_other_containers_behind_them(first: str, second: str) -> None:
    if first.startswith(second):
        pytest.skip("the same container")
    other = made(second, 1.2) if second in FORMATS else MAKERS[second](1.2, 48_000)
    assert duration_s(made(first, 0.8) + other) == pytest.approx(2.0, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["flac", "mp3", "wav", "aac"])
@pytest.mark.parametrize("second", ["wma", "avi", "wavpack", "amr", "flv", "ts", "caf", "au", "w64", "mp3", "aac"])
def test_files_behind_frames_whose_lengths_are_not_known(first: str, second: str) -> None:
    rate = 16_000 if second == "w64" else 48_000
    other = made(second, 1.2) if second in FORMATS else MAKERS[second](1.2, rate)
    assert duration_s(MAKERS[first](0.8, 48_000) + other) == pytest.approx(2.0, abs=0.25)


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("channels", [1, 2])
def test_mp3_without_a_tag_behind_flac(rate: int, channels: int) -> None:
    sound = np.stack([tone(2.0, rate)] * channels, axis=1)
    flac = encoded(np.stack([tone(1.0, rate)] * 2, axis=1), rate, "FLAC")
    data = flac + encoded(sound, rate, "MP3") + flac
    assert duration_s(data) == pytest.approx(4.0, abs=0.15)
    assert is_loud(data, 1.2, 2.8)


@pytest.mark.parametrize("tag", [b"", id3v2(30), ID3V1, APE])
@pytest.mark.parametrize("first", ["flac", "wav", "m4a", "vorbis", "aiff"])
def test_short_mp3_behind_a_tag_behind_another_file(first: str, tag: bytes) -> None:
    data = MAKERS[first](1.0, 48_000) + tag + MAKERS["mp3"](0.5, 22_050)
    assert duration_s(data) == pytest.approx(1.5, abs=0.1)
    assert is_loud(data, 1.15, 1.4)


def unsized(name: str, seconds: float) -> bytes:
    """A file whose program did not know its length."""
    data = bytearray(MAKERS[name](seconds, 16_000))
    for mark, offset, size in {
        "wav": [(b"data", 4, 4)],
        "aiff": [(b"FORM", 4, 4), (b"COMM", 10, 4), (b"SSND", 4, 4)],
        "au": [(b".snd", 8, 4)],
        "caf": [(b"data", 4, 8)],
        "w64": [(b"data\xf3\xac", 16, 8)],
    }[name]:
        at = data.index(mark) + offset
        data[at : at + size] = b"\xff" * size
    return bytes(data)


@pytest.mark.parametrize("name", ["wav", "aiff", "au", "caf", "w64"])
def test_joined_files_without_sizes(name: str) -> None:
    data = unsized(name, 1.0) + unsized(name, 1.5) + MAKERS[name](0.5, 16_000)
    assert duration_s(data) == pytest.approx(3.0, abs=0.01)
    assert is_loud(data, 2.6, 2.9)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", [0.4, 0.83])
def test_files_that_end_early_are_refused(name: str, part: float) -> None:
    data = made(name, 4.0)
    with pytest.raises(RequestError, match=r"truncated|cannot be decoded after"):
        decoded(data[: round(len(data) * part) | 1])


def test_transport_streams_of_cameras() -> None:
    data = made("ts", 2.0)
    assert duration_s(m2ts(data)) == duration_s(data)
    assert duration_s(m2ts(data) + m2ts(data)) == pytest.approx(4.0, abs=0.2)


def amr_wb(frames: int) -> bytes:
    rng = np.random.default_rng(0)
    return b"#!AMR-WB\n" + b"".join(b"\x04" + rng.bytes(17) + b"\x14" + rng.bytes(32) for _ in range(frames // 2))


def test_amr_wb_is_read_and_joined() -> None:
    assert duration_s(amr_wb(100)) == pytest.approx(2.0, abs=0.05)
    assert duration_s(amr_wb(100) + amr_wb(50)) == pytest.approx(3.0, abs=0.05)
    with pytest.raises(RequestError, match="a part of it has 33 bytes, of which 26 are there"):
        duration_s(amr_wb(100)[:-7])
    with pytest.raises(RequestError, match="has 3001 bytes behind its last frame that are neither a frame nor a tag"):
        duration_s(amr_wb(20) + b"\xff" * 3001)


SPEECH_BYTES = {b"#!AMR\n": 32, b"#!AMR-WB\n": 61}  # of a frame at the highest bit rate


def speech(mark: bytes, frames: int) -> list[bytes]:
    rng, size = np.random.default_rng(0), SPEECH_BYTES[mark]
    head = b"\x3c" if mark == b"#!AMR\n" else b"\x44"
    return [head + rng.bytes(size - 1) for _ in range(frames)]


def as_3gp(amr: bytes, frames: list[bytes], in_packet: int) -> bytes:
    """A file of frames, of which each packet has several."""
    file = io.BytesIO()
    with av.open(io.BytesIO(amr)) as source, av.open(file, "w", format="3gp") as output:
        stream = output.add_stream_from_template(source.streams.audio[0])
        for first in range(0, len(frames), in_packet):
            packet: Any = av.Packet(b"".join(frames[first : first + in_packet]))
            packet.pts = packet.dts = first * 20
            packet.time_base, packet.stream = Fraction(1, 1000), stream
            output.mux(packet)
    return file.getvalue()


PAUSES = [(b"#!AMR\n", kind) for kind in range(8, 16)] + [(b"#!AMR-WB\n", kind) for kind in (9, 14, 15)]


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "kind"), PAUSES)
def test_pauses_of_amr_are_silence(mark: bytes, kind: int) -> None:
    """Noise is described (SID) in some of their frames; others have no data, or were lost."""
    pause = bytes([kind << 3 | 4]) + bytes(5 if (mark, kind) in (PAUSES[0], PAUSES[8]) else 0)
    sound = speech(mark, 50)
    for frames, first_s in ((sound + [pause] * 75 + sound, 0.0), ([pause] * 30 + sound + [pause], 0.6)):
        amr = mark + b"".join(frames)
        files = [amr, amr + ID3V1]
        if mark == b"#!AMR-WB\n":  # FFmpeg writes neither several frames of AMR-NB in a packet, nor all their types
            files += [as_3gp(amr, frames, 1), as_3gp(amr, frames, 5)]
        elif kind in (8, 15):
            files += [as_3gp(amr, frames, 1)]
        for data in files:
            assert duration_s(data) == pytest.approx(len(frames) / 50, abs=0.001)
            assert is_loud(data, first_s + 0.2, first_s + 1.0)
            if not first_s:
                assert not is_loud(data, 1.1, 2.4)
                assert is_loud(data, 2.6, 3.4)
        with pytest.raises(RequestError, match="is truncated"):
            decoded((amr + sound[0])[:-3])


@pytest.mark.parametrize("head", [b"\xff", b"\x7f", b"\x45"])
def test_damaged_packets_of_amr_are_no_pauses(head: bytes) -> None:
    frames = speech(b"#!AMR\n", 50)
    whole = as_3gp(b"#!AMR\n" + b"".join(frames), frames, 1)
    with pytest.raises(RequestError, match=r"cannot be decoded after 0\.4 s"):
        decoded(whole.replace(frames[20], head + frames[20][1:]))


def with_video(container: str, audio_codec: str, video_codec: str, start_s: float, *, size: int = 32) -> bytes:
    """Six seconds of noise to see, and a second of tone from `start_s` on."""
    if not {audio_codec, video_codec} <= av.codecs_available:
        pytest.skip(f"this PyAV lacks an encoder: {audio_codec} or {video_codec}")
    file: Any = io.BytesIO() if container in ("mp4", "avi") else Recorder()
    rng = np.random.default_rng(0)
    with av.open(file, "w", format=container) as output:
        video: Any = output.add_stream(video_codec, rate=10)
        video.width = video.height = size
        video.pix_fmt = "yuv420p"
        audio: Any = output.add_stream(audio_codec, rate=48_000, layout="mono")
        audio.bit_rate = 96_000
        packets: list[Any] = []
        for number in range(60):
            picture = av.VideoFrame.from_ndarray(
                rng.integers(0, 255, (size * 3 // 2, size), np.uint8), format="yuv420p"
            )
            picture.pts, picture.time_base = number, Fraction(1, 10)
            packets += video.encode(picture)
        packets += video.encode(None)
        samples, step = tone(1.0, 48_000)[None], audio.codec_context.frame_size or 960
        converter = av.AudioResampler(audio.codec_context.format, "mono", 48_000)
        for first in range(0, 48_000 - step + 1, step):
            frame = av.AudioFrame.from_ndarray(samples[:, first : first + step].copy(), format="fltp", layout="mono")
            frame.sample_rate, frame.time_base = 48_000, Fraction(1, 48_000)
            frame.pts = round(start_s * 48_000) + first
            for converted in converter.resample(frame):
                packets += audio.encode(converted)
        packets += audio.encode(None)
        output.mux(sorted(packets, key=lambda packet: packet.dts * packet.time_base))
    return file.getvalue() if isinstance(file, io.BytesIO) else file.data


WITH_VIDEO = [
    ("ogg", "libopus", "libvpx"),
    ("flv", "aac", "flv"),
    ("mpegts", "aac", "mpeg2video"),
    ("asf", "wmav2", "msmpeg4"),
    ("webm", "libopus", "libvpx"),
    ("mp4", "aac", "mpeg4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("container", "audio", "video"), WITH_VIDEO)
@pytest.mark.parametrize("start_s", [0.0, 1.5, 4.0])
def test_late_audio_of_a_video_has_silence_before_it(container: str, audio: str, video: str, start_s: float) -> None:
    data = with_video(container, audio, video, start_s)
    assert duration_s(data) == pytest.approx(start_s + 1, abs=0.2)
    assert is_loud(data, start_s + 0.2, start_s + 0.8)
    if start_s:
        assert not is_loud(data, 0.0, start_s - 0.2)


def remuxed(audio: bytes, start_s: float, page_us: str) -> bytes:
    """A file of sound behind `start_s` of a video in Ogg, with pages of this length."""
    file = io.BytesIO()
    options = {"page_duration": page_us}
    with av.open(io.BytesIO(audio)) as source, av.open(file, "w", format="ogg", container_options=options) as output:
        video: Any = output.add_stream("libvpx", rate=10)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        stream = output.add_stream_from_template(source.streams.audio[0])
        packets: list[Any] = []
        for number in range(60):
            picture = av.VideoFrame(32, 32, "yuv420p")
            picture.pts, picture.time_base = number, Fraction(1, 10)
            packets += video.encode(picture)
        packets += video.encode(None)
        for packet in source.demux():
            if packet.dts is not None and packet.pts is not None:
                late = round(start_s / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts + late, packet.dts + late, stream
                packets.append(packet)
        output.mux(sorted(packets, key=lambda packet: packet.dts * packet.time_base))
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("format", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", "PCM_16")])
@pytest.mark.parametrize("page_us", ["200000", "5000000"])
@pytest.mark.parametrize(("start_s", "seconds"), [(0.0, 1.0), (1.5, 1.0), (4.0, 3.0)])
def test_late_audio_in_ogg_of_every_codec(
    format: str, subtype: str, page_us: str, start_s: float, seconds: float
) -> None:
    """FFmpeg knows no first time of FLAC, nor where a single page has all packets."""
    data = remuxed(encoded(tone(seconds, 48_000), 48_000, format, subtype), start_s, page_us)
    assert duration_s(data) == pytest.approx(start_s + seconds, abs=0.05)
    assert is_loud(data, start_s + 0.1, start_s + seconds - 0.1)
    if start_s:
        assert not is_loud(data, 0.0, start_s - 0.1)


def test_audio_behind_megabytes_of_video_is_found() -> None:
    data = with_video("mpegts", "aac", "mpeg2video", 5.0, size=480)
    assert len(data) > 2**21
    assert duration_s(data) == pytest.approx(6.0, abs=0.2)
    assert is_loud(data, 5.2, 5.8)


@pytest.mark.parametrize("seconds", [15.0, 20.0])
def test_stream_that_begins_behind_megabytes_of_audio_is_left_out(seconds: float) -> None:
    packet = b"\x09" + struct.pack(">I", 20)[1:] + struct.pack(">I", 1000)[1:] + bytes(4) + b"\x12" + bytes(19)
    sound = recorded(tone(seconds, 44_100), "flv", "pcm_s16le", 44_100)
    assert duration_s(sound + (packet + struct.pack(">I", 31)) * 3) == pytest.approx(seconds, abs=0.1)


def number_at(data: bytes, mark: bytes, offset: int, value: bytes) -> bytes:
    at = data.index(mark) + offset
    return data[:at] + value + data[at + len(value) :]


HARMFUL: dict[str, Callable[[], bytes]] = {
    "avi of 2 GB": lambda: number_at(made("avi"), b"RIFF", 4, struct.pack("<I", 1_900_000_000)),
    "avi chunk": lambda: number_at(made("avi"), b"hdrl", 8, b"\xff\xff\xff\x7f"),
    "asf head": lambda: number_at(made("wma"), b"\x30\x26\xb2\x75", 16, b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "flv head": lambda: number_at(made("flv"), b"FLV", 5, b"\x7f\xff\xff\xff"),
    "flv tag": lambda: number_at(made("flv"), b"FLV", 14, b"\xff\xff\xff"),
    "wavpack block": lambda: number_at(made("wavpack"), b"wvpk", 4, b"\xff\xff\xff\xff"),
    "wavpack of years": lambda: number_at(made("wavpack"), b"wvpk", 12, b"\xff\xff\xff\x7f"),
    "ts without packets": lambda: (b"G\x40\x00\x10" + b"\xff" * 184) * 5000,
    "amr of nothing": lambda: b"#!AMR\n" + b"\x7c" * 200,
    "asf objects": lambda: b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c" * 20_000,
    "flv tags": lambda: b"FLV\x01\x04\0\0\0\x09\0\0\0\0" + b"\x12\0\0\0\0\0\0\0\0\0\0\0\0\0\0" * 50_000,
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_files_are_refused_by_name(name: str) -> None:
    before_s = time.process_time()
    with pytest.raises(RequestError, match="the audio "):
        decoded(HARMFUL[name]())
    assert time.process_time() - before_s < 5


@pytest.mark.parametrize("name", ["avi", "wma", "flv", "ts", "wavpack", "amr"])
def test_without_pyav_these_formats_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(name)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(RequestError, match=r"is \S+( or \S+)?, which this server cannot read: it lacks PyAV"):
        decoded(data)
