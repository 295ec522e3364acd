"""Files as they are found: joined, without a length, with gaps or tags, cut off, or made to harm."""

from __future__ import annotations

import io
import re
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="the extra av has PyAV")
pytest.importorskip("soxr", reason="the extra audio has soxr")

import av
import soundfile
from test_audio_decode import LIMITS, decoded, encoded, samples_of, tone
from test_ffmpeg_formats import Recorder, recorded

from meltcore.audio import checks
from meltcore.audio.decode import decode, open_audio
from meltcore.audio.mpeg import frame_bytes
from meltcore.common.errors import RequestError

WAV = encoded(tone(1.5), 16_000)
DATA = WAV.index(b"data")
ID3V1 = b"TAG" + b"title".ljust(125, b"\0")
APE = b"APETAGEX" + struct.pack("<IIII", 2000, 47, 1, 0x80000000) + bytes(8)
APE = (
    b"APETAGEX"
    + struct.pack("<IIII", 2000, 47, 1, 0xA0000000)
    + bytes(8)
    + struct.pack("<II", 2, 0)
    + b"Title\0me"
    + APE
)


def id3v2(size: int, flags: int = 0) -> bytes:
    footer = b"3DI\4\0\x10" + bytes([0, 0, size >> 7, size & 127]) if flags else b""
    return b"ID3\4\0" + bytes([flags, 0, 0, size >> 7, size & 127]) + bytes(size) + footer


MAKERS: dict[str, Callable[[float, int], bytes]] = {
    name: lru_cache(8)(make)
    for name, make in {
        "wav": lambda seconds, rate: encoded(tone(seconds, rate), rate),
        "flac": lambda seconds, rate: encoded(tone(seconds, rate), rate, "FLAC"),
        "vorbis": lambda seconds, rate: encoded(tone(seconds, rate), rate, "OGG", "VORBIS"),
        "opus": lambda seconds, rate: encoded(tone(seconds, rate), rate, "OGG", "OPUS"),
        "mp3": lambda seconds, rate: encoded(tone(seconds, rate), rate, "MP3"),
        "mp2": lambda seconds, rate: recorded(tone(seconds, rate), "mp2", "mp2", rate),
        "aiff": lambda seconds, rate: encoded(tone(seconds, rate), rate, "AIFF"),
        "au": lambda seconds, rate: encoded(tone(seconds, rate), rate, "AU"),
        "caf": lambda seconds, rate: encoded(tone(seconds, rate), rate, "CAF"),
        "w64": lambda seconds, rate: encoded(tone(seconds, rate), rate, "W64"),
        "aac": lambda seconds, rate: recorded(tone(seconds, rate), "adts", "aac", rate),
        "m4a": lambda seconds, rate: recorded(tone(seconds, rate), "ipod", "aac", rate),
        "webm": lambda seconds, rate: recorded(tone(seconds, rate), "webm", "libopus", rate),
        "live webm": lambda seconds, rate: recorded(tone(seconds, rate), "webm", "libopus", rate, is_live=True),
        "fragments": lambda seconds, rate: recorded(
            tone(seconds, rate), "mp4", "aac", rate, is_live=True, movflags="frag_keyframe+empty_moov"
        ),
    }.items()
}


@lru_cache(2)
def heard(data: bytes) -> tuple[np.ndarray, float]:
    """The samples of a minute, and the duration in seconds."""
    clips, seconds = decoded(data)
    samples = np.zeros(60 * 16_000, np.int16)
    for clip in clips:
        part = np.frombuffer(clip.samples, np.int16)
        samples[clip.start : clip.start + len(part)] = part
    return samples, seconds


def duration_s(data: bytes) -> float:
    return heard(data)[1]


def is_loud(data: bytes, start_s: float, end_s: float) -> bool:
    part = heard(data)[0][round(start_s * 16_000) : round(end_s * 16_000)].astype(float)
    return float(np.sqrt((part**2).mean())) > 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_joined_files_are_read_to_the_end_of_the_last_one(name: str) -> None:
    make = MAKERS[name]
    data = make(1.0, 16_000) + make(1.5, 48_000 if name != "w64" else 16_000) + make(0.5, 16_000)
    assert duration_s(data) == pytest.approx(3.0, abs=0.3)
    assert is_loud(data, 2.6, 2.95)


def test_joined_files_of_other_codecs_and_channels() -> None:
    stereo = encoded(np.stack([tone(1.0), tone(1.0)], axis=1), 16_000, "OGG", "VORBIS")
    assert duration_s(MAKERS["opus"](1.0, 48_000) + stereo) == pytest.approx(2.0, abs=0.05)
    stereo_mp3 = encoded(np.stack([tone(1.0, 44_100)] * 2, axis=1), 44_100, "MP3")
    data = id3v2(300) + MAKERS["mp3"](1.0, 16_000) + ID3V1 + id3v2(100) + stereo_mp3 + APE + ID3V1
    assert duration_s(data) == pytest.approx(2.0, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["wav", "flac", "vorbis", "opus", "mp3", "aiff", "w64", "caf", "m4a", "webm"])
@pytest.mark.parametrize("second", ["wav", "flac", "vorbis", "aiff", "m4a", "webm", "mp3"])
def test_files_of_different_containers_that_are_joined(first: str, second: str) -> None:
    tag = id3v2(20) if second == "mp3" else b""
    data = MAKERS[first](0.6, 48_000) + tag + MAKERS[second](1.0, 48_000)
    assert duration_s(data) == pytest.approx(1.6, abs=0.1)


def test_containers_that_change_without_end_are_refused() -> None:
    with pytest.raises(RequestError, match="different formats more than 16 times"):
        duration_s((MAKERS["vorbis"](0.1, 48_000) + MAKERS["wav"](0.1, 48_000)) * 12)


@pytest.mark.parametrize("seconds", [2.0, 5.0])
def test_variable_bit_rate_without_a_count_of_frames(seconds: float) -> None:
    """The first frames are silent, so that a length guessed from them is wrong."""
    quiet = np.zeros(16_000, np.float32)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, round((seconds - 1) * 16_000)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(
        file, np.concatenate([quiet, noise]), 16_000, format="MP3", bitrate_mode="VARIABLE", compression_level=0.2
    )
    data = file.getvalue()
    assert b"Xing" in data[:200]
    assert duration_s(data[frame_bytes(data[:6]) :]) == pytest.approx(seconds, abs=0.15)


UNKNOWN = (0, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFF000, 0x7FFFFFDB, 0x77359400, 0xFFFFFFDB)


@pytest.mark.parametrize("size", UNKNOWN)
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_U8", "FLOAT", "DOUBLE"])
def test_wav_of_programs_that_did_not_know_its_size(size: int, subtype: str) -> None:
    wav = encoded(np.stack([tone(1.5)] * 2, axis=1), 16_000, "WAVEX" if subtype == "PCM_24" else "WAV", subtype)
    at = wav.index(b"data")
    listed = b"LIST" + struct.pack("<I", 5) + b"INFOx\0"  # of an odd size, with the byte that makes it even
    data = wav[:4] + struct.pack("<I", (size + 36) % 2**32) + wav[8:at] + listed + b"data" + struct.pack("<I", size)
    assert duration_s(data + wav[at + 8 :]) == 1.5


@pytest.mark.parametrize("long_size", [0, 2**64 - 1, 48_000])
def test_rf64_with_and_without_a_size(long_size: int) -> None:
    ds64 = b"ds64" + struct.pack("<IQQQI", 28, long_size and 2**64 - 1, long_size, 0, 0)
    data = b"RF64\xff\xff\xff\xffWAVE" + ds64 + WAV[12:DATA] + b"data\xff\xff\xff\xff" + WAV[DATA + 8 :]
    assert duration_s(data) == 1.5
    if long_size == 48_000:
        with pytest.raises(RequestError, match="is truncated: 48000 bytes of samples are announced, 47000 are there"):
            duration_s(data[:-1000])


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_aiff_and_au_without_a_size(size: int) -> None:
    aiff, au, number = (
        bytearray(MAKERS["aiff"](1.5, 16_000)),
        bytearray(MAKERS["au"](1.5, 16_000)),
        struct.pack(">I", size),
    )
    for place in (4, aiff.index(b"COMM") + 10, aiff.index(b"SSND") + 4):
        aiff[place : place + 4] = number
    au[8:12] = number
    assert duration_s(bytes(aiff)) == duration_s(bytes(au)) == 1.5


def without_length(flac: bytes) -> bytes:
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


@pytest.mark.parametrize(("whole", "size"), [(2**64 - 1, 2**63 - 1), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_w64_without_a_size(whole: int, size: int) -> None:
    data = MAKERS["w64"](1.5, 16_000)
    at = data.index(b"data\xf3\xac") + 16
    data = data[:16] + struct.pack("<Q", whole) + data[24:at] + struct.pack("<Q", size) + data[at + 8 :]
    assert duration_s(data) == 1.5


def test_flac_without_a_length() -> None:
    assert duration_s(without_length(MAKERS["flac"](1.5, 16_000))) == 1.5
    assert duration_s(without_length(MAKERS["flac"](2.5, 96_000))) == 2.5


def test_wav_whose_header_is_older_than_its_samples_is_refused() -> None:
    stale = WAV[: DATA + 4] + struct.pack("<I", 8000) + WAV[DATA + 8 :]
    with pytest.raises(RequestError, match="has 40000 bytes after the samples that its header announces"):
        duration_s(stale)
    assert duration_s(WAV + b"LIST\4\0\0\0INFO" + ID3V1) == 1.5
    with pytest.raises(RequestError, match="holds no samples"):
        duration_s(WAV[: DATA + 4] + bytes(4) + b"LIST\4\0\0\0INFO")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mp3", "flac", "vorbis", "wav", "aac", "m4a", "webm", "aiff", "au"])
def test_bytes_before_the_first_frame_and_tags_after_the_last(name: str) -> None:
    data = MAKERS[name](1.5, 48_000)
    whole = duration_s(data)
    for lead in (bytes(100), bytes(1), id3v2(500), id3v2(130, 0x10) + id3v2(0), bytes(3) + id3v2(64) + bytes(7)):
        assert duration_s(lead + data) == whole
    if name != "au":
        for lead in (b"\xef\xbb\xbf", b"\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"\x99" * 700):
            assert duration_s(lead + data) == pytest.approx(whole, abs=0.08)
    for tail in (ID3V1, APE, APE + ID3V1, bytes(1000)):
        assert duration_s(data + tail) == pytest.approx(whole, abs=0.03)


COVERS = {
    "avif": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf",
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "wav": WAV[:DATA],
    "aiff": b"FORM\0\0\x40\0AIFFCOMM\0\0\0\x12",
    "flac": encoded(tone(0.1), format="FLAC")[:42],
    "ogg": encoded(tone(0.1), format="OGG", subtype="VORBIS")[:58],
}


def covers(image: bytes) -> dict[str, bytes]:
    """A picture, or what else programs keep, in a tag of each kind, and in a block of FLAC's metadata."""
    image += bytes(range(90)) * 20
    size, items = len(image), struct.pack("<II", len(image), 2) + b"Cover Art (Back)\0" + image
    head, end = (
        b"APETAGEX" + struct.pack("<IIII", 2000, len(items) + 32, 1, flags) + bytes(8) for flags in (0xA << 28, 8 << 28)
    )
    return {
        "id3": b"ID3\3\0\0" + bytes([0, size >> 14, size >> 7 & 127, size & 127]) + image,
        "ape": head + items + end,
        "old ape": items + end[:8] + struct.pack("<I", 1000) + end[12:20] + bytes(12),
        "flac": b"\2" + struct.pack(">I", size)[1:] + image,
    }


@pytest.mark.parametrize("cover", COVERS)
@pytest.mark.parametrize("name", ["mp3", "aac", "flac", "wavpack"])
def test_marks_of_other_formats_in_tags_are_none(name: str, cover: str) -> None:
    tags = covers(COVERS[cover])
    data = recorded(tone(1.0), "wv", "wavpack", 16_000) if name == "wavpack" else MAKERS[name](1.0, 16_000)
    for tag in (tags["ape"], tags["old ape"], tags["ape"] + tags["id3"] + ID3V1):
        assert duration_s(data + tag) == pytest.approx(1.0, abs=0.1)
    joined = data + tags["id3"] + data + MAKERS["wav"](0.5, 16_000) + tags["id3"]
    assert duration_s(joined) == pytest.approx(2.5, abs=0.2)


@pytest.mark.parametrize("image", [*COVERS.values(), encoded(tone(0.5), format="MP3")], ids=[*COVERS, "mp3"])
def test_marks_of_other_formats_in_metadata_of_flac_are_none(image: bytes) -> None:
    flac, block = MAKERS["flac"](1.0, 16_000), covers(image)["flac"]
    data = flac[:42] + block * 2 + flac[42:]
    assert duration_s(data) == 1.0
    assert duration_s(data + data + MAKERS["mp3"](0.5, 16_000)) == pytest.approx(2.5, abs=0.05)
    with pytest.raises(RequestError, match=r"is truncated|truncated or damaged"):
        decoded(data[:3000])


def timed(container: str, codec: str, starts_s: list[float]) -> bytes:
    """A second of tone at each of these times, of a stream whose packets have them."""
    file: Any = io.BytesIO() if container == "mp4" else Recorder()
    options = {"page_duration": "20000"} if container == "ogg" else {}  # each packet in a page with its own time
    with av.open(file, "w", format=container, container_options=options) as output:
        stream: Any = output.add_stream(codec, rate=48_000, layout="mono")
        size = stream.codec_context.frame_size or 960
        for start_s in starts_s:
            samples = tone(1.0, 48_000)[None]
            for first in range(0, 48_000 - size + 1, size):
                part = samples[:, first : first + size].copy()
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.sample_rate, frame.time_base = 48_000, Fraction(1, 48_000)
                frame.pts = round(start_s * 48_000) + first
                converter = av.AudioResampler(stream.codec_context.format, "mono", 48_000)
                for converted in converter.resample(frame):
                    output.mux(stream.encode(converted))
        output.mux(stream.encode(None))
    return file.getvalue() if container == "mp4" else file.data


TIMED = [("webm", "libopus"), ("matroska", "pcm_s16le"), ("mp4", "aac")]


@pytest.mark.slow
@pytest.mark.parametrize(("container", "codec"), [*TIMED, ("ogg", "libopus")])
def test_gaps_in_packet_times_are_silence(container: str, codec: str) -> None:
    data = timed(container, codec, [0.0, 4.0, 6.5])
    assert duration_s(data) == pytest.approx(7.5, abs=0.15)
    assert is_loud(data, 0.2, 0.9)
    assert not is_loud(data, 1.2, 3.8)
    assert is_loud(data, 4.2, 4.9)
    assert is_loud(data, 6.7, 7.4)


@pytest.mark.parametrize(("container", "codec"), TIMED)
@pytest.mark.parametrize("start_s", [0.5, 3.0])
def test_audio_that_begins_late_has_silence_before_it(container: str, codec: str, start_s: float) -> None:
    data = timed(container, codec, [start_s])
    assert duration_s(data) == pytest.approx(start_s + 1, abs=0.15)
    assert not is_loud(data, 0.0, start_s - 0.1)
    assert is_loud(data, start_s + 0.1, start_s + 0.9)


FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "500000"}


@pytest.mark.parametrize(("rate", "first", "last"), [(16_000, 2, 3), (44_100, 1, 99), (48_000, 3, 99)])
def test_late_fragments_have_silence_before_them(rate: int, first: int, last: int) -> None:
    """A player's first part and some later ones, as HLS and DASH have them."""
    data = recorded(tone(2.5, rate), "mp4", "aac", rate, is_live=True, **FRAGMENTS)
    start, *fragments = re.split(rb"(?=....moof)", data[: data.rindex(b"mfra") - 4], flags=re.DOTALL)
    late = start + b"".join(fragments[first:last])
    end_s = 0.5 * min(last, 5)
    assert duration_s(late) == pytest.approx(end_s, abs=0.15)
    assert not is_loud(late, 0.0, 0.5 * first - 0.15)
    assert is_loud(late, 0.5 * first + 0.1, end_s - 0.1)
    assert duration_s(start + fragments[0] + late) == pytest.approx(0.5 + end_s, abs=0.2)
    with pytest.raises(RequestError, match="is truncated"):
        decoded(late[:-20])


@pytest.mark.parametrize(("container", "codec"), TIMED)
@pytest.mark.parametrize("hours", [1, 10])
def test_gap_beyond_the_limit_is_refused_by_name(container: str, codec: str, hours: int) -> None:
    with pytest.raises(
        RequestError, match=r"has a gap of .* s in its packet times at 1\.0 s|is longer than 60 s"
    ) as caught:
        decoded(timed(container, codec, [0.0, hours * 3600.0]))
    assert "limit" in caught.value.message


@pytest.mark.parametrize(("container", "codec"), [*TIMED, ("flv", "aac")])
def test_long_gap_is_a_length_without_samples(container: str, codec: str) -> None:
    data = timed(container, codec, [0.0, 3600.0])
    blocks = list(open_audio(data, 4000.0).blocks())
    assert sum(block for block in blocks if isinstance(block, int)) == pytest.approx(3599 * 48_000, abs=5000)
    assert sum(len(block) for block in blocks if not isinstance(block, int)) == pytest.approx(2 * 48_000, abs=5000)
    clips, found_s = decoded(data, LIMITS._replace(max_audio_s=4000.0))
    assert found_s == pytest.approx(3601, abs=0.1)
    assert [clip.start / 16_000 for clip in clips] == pytest.approx([0.0, 3599.9], abs=0.1)


def flipped(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def flv_tags(data: bytes) -> list[int]:
    """Where the packets of audio begin. The time is in bytes 4 to 7 of each, its highest byte last."""
    position, places = 13, list[int]()
    while position < len(data):
        size = int.from_bytes(data[position + 1 : position + 4], "big")
        if data[position] == 8 and data[position + 12] == 1:  # 0 is the codec's configuration
            places.append(position)
        position += size + 15
    return places


def flv(starts_s: list[float]) -> bytes:
    return timed("flv", "aac", starts_s)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(0, ""), (9, "a later time is"), (40, "a later time is"), (-2, "2 packets follow"), (-1, "1 pac")],
)
def test_damaged_time_of_flv_is_no_gap(number: int, reason: str) -> None:
    """The highest bit of 24 makes 2.3 hours."""
    data = flv([0.0, 1.0])
    damaged = flipped(data, flv_tags(data)[number] + 4, 0x80)
    if not reason:  # the times begin with the second packet
        assert duration_s(damaged) == pytest.approx(duration_s(data), abs=0.03)
        return
    with pytest.raises(RequestError, match=rf"has a gap of 8,388\.\d s in its packet times at .*damage: {reason}"):
        decoded(damaged, LIMITS._replace(max_audio_s=14_400.0))


@pytest.mark.parametrize("name", ["webm", "live webm"])
def test_damaged_times_of_blocks_and_clusters_are_no_gaps(name: str) -> None:
    """A block has its time in its cluster, in two bytes, and a cluster of five seconds has its own."""
    data = MAKERS[name](11.0, 48_000)
    with av.open(io.BytesIO(data)) as file:
        payload = bytes(next(packet for number, packet in enumerate(file.demux(audio=0)) if number == 60))
    block, cluster = data.index(payload) - 3, data.index(b"\xe7\x82") + 2
    for position, bit in ((block, 0x40), (block, 0x10), (cluster, 0x40)):
        with pytest.raises(RequestError, match=r"has a gap of .* s in its packet times at .*, which is damage: "):
            decoded(flipped(data, position, bit))


@pytest.mark.parametrize("number", [3, 6])
def test_damaged_times_of_transport_streams_are_no_gaps(number: int) -> None:
    data = recorded(tone(6.0, 44_100), "mpegts", "aac", 44_100)
    places = [match.start() + 9 for match in re.finditer(rb"\x00\x00\x01\xc0..[\x80-\xbf]\x80", data, re.DOTALL)]
    with pytest.raises(RequestError, match="which is damage: a later time is"):
        decoded(flipped(data, places[number], 0x02), LIMITS._replace(max_audio_s=14_400.0))
    earlier = flipped(data, places[number] + 3, 0x02)  # 128 of 2**15 ticks
    assert duration_s(earlier) == pytest.approx(duration_s(data), abs=0.05)


@pytest.mark.parametrize("bit", [0x80, 0x08])
def test_index_of_mp4_whose_times_exceed_its_duration_is_damaged(bit: int) -> None:
    """The index has one duration for all packets, 1,024."""
    data = MAKERS["m4a"](2.0, 48_000).replace(b"edts", b"free")  # which would leave out what is beyond the end
    with pytest.raises(RequestError, match=r"which is damage: it ends at .* s, and the header announces 2\.0 s"):
        decoded(flipped(data, data.index(b"stts") + 18, bit))


@pytest.mark.parametrize("start_s", [0.0, 8400.0])
def test_gaps_count_from_times_that_packets_agree_on(start_s: float) -> None:
    """The first time is damaged to a later or an earlier one. A short gap that the next packet lacks is none."""
    data = flv([start_s, start_s + 4.0])
    tags = flv_tags(data)
    for position, bit in ((tags[0] + 4, 0x80), (tags[20] + 5, 0x02)):
        damaged = flipped(data, position, bit)
        assert duration_s(damaged) == pytest.approx(5.0, abs=0.1)
        assert not is_loud(damaged, 1.2, 3.8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAKERS])
@pytest.mark.parametrize("part", [0.4, 0.83])
def test_files_that_end_early_are_refused(name: str, part: float) -> None:
    data = MAKERS[name](2.0, 48_000)
    with pytest.raises(RequestError, match=r"truncated|cannot be decoded after"):
        decoded(data[: round(len(data) * part) | 1])


def test_a_file_is_not_truncated_where_only_its_index_is() -> None:
    webm = MAKERS["webm"](2.0, 48_000)
    cues = webm.rindex(b"\x1c\x53\xbb\x6b")
    assert duration_s(webm[: cues + 6]) == pytest.approx(2.0, abs=0.05)
    with pytest.raises(RequestError, match="is truncated"):
        decoded(webm[: cues - 30])


@pytest.mark.parametrize("seconds", [1.2345, 0.9996, 2.00049])
def test_containers_round_their_duration(seconds: float) -> None:
    file = io.BytesIO()
    flac = encoded(tone(seconds, 44_100), 44_100, "FLAC")
    with av.open(io.BytesIO(flac)) as source, av.open(file, "w", format="matroska") as output:
        stream = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    assert duration_s(file.getvalue()) == pytest.approx(seconds, abs=0.001)


def cut(data: bytes, container: str, first: int, last: int | None = None) -> bytes:
    """The packets from `first` on, before `last`, as `ffmpeg -ss TIME -c copy` writes them."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.audio[0])
        for packet in list(source.demux())[first:last]:
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


CUT = [
    (*each, rate, first)
    for each, first in ((("flac", "flac"), 7), (("mp3", "libmp3lame"), 20))
    for rate in (16_000, 44_100)
]
CUT += [("ogg", "libopus", 48_000, 50), ("adts", "aac", 44_100, 20), ("wv", "wavpack", 44_100, 1)]


@pytest.mark.parametrize(("container", "codec", "rate", "first"), CUT)
def test_files_that_were_cut_at_their_beginning(container: str, codec: str, rate: int, first: int) -> None:
    """FLAC keeps the total of the whole file, and MP3 announces a long delay of its encoder."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {codec}")
    whole = recorded(tone(4.0, rate), container, codec, rate)
    with av.open(io.BytesIO(whole)) as file:
        lengths_s = [float((packet.duration or 0) * packet.time_base) for packet in file.demux()]
    rest_s = sum(lengths_s[first:])
    data = cut(whole, container, first)
    assert duration_s(data) == pytest.approx(rest_s, abs=0.35 if codec == "libmp3lame" else 0.05)
    assert is_loud(data, 0.1, rest_s - 0.4)
    if container == "flac":
        for end in (cut(whole, container, first, -2), cut(whole, container, 0, -2)):
            with pytest.raises(RequestError, match="is truncated"):
                decoded(end)


@pytest.mark.parametrize(("rate", "samples"), [(8000, 4096 * 3 + 2048), (8000, 4096 * 3 + 1), (16_000, 48_000)])
@pytest.mark.parametrize("container", ["CAF", "caf", "ipod", "matroska"])
def test_short_last_frame_of_alac_is_read(container: str, rate: int, samples: int) -> None:
    """A frame has up to 4,096 samples. The last quarter of a second is loud, and libsndfile writes the first one."""
    sound = tone(samples / rate, rate) * np.where(np.arange(samples) < samples - rate // 4, 0.1, 1)
    sound = sound.astype(np.float32)
    data = encoded(sound, rate, "CAF", "ALAC_16") if container == "CAF" else recorded(sound, container, "alac", rate)
    assert duration_s(data) == samples / rate
    assert is_loud(data, samples / rate - 0.24, samples / rate)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "seconds"), [(44_100, 30.0), (16_000, 20.0)])
def test_mp4_without_its_last_half_second_is_truncated(rate: int, seconds: float) -> None:
    """Its header announces all of it; the limit does not grow with the length."""
    data = MAKERS["m4a"](seconds, rate)
    at = data.index(b"stsz") + 12
    count = int.from_bytes(data[at : at + 4], "big")
    assert duration_s(data) == pytest.approx(seconds, abs=0.1)
    less = count - round(0.5 * rate / 1024) - 1
    with pytest.raises(RequestError, match="is truncated: "):
        decoded(data[:at] + struct.pack(">I", less) + data[at + 4 :])


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("first", [0, 30])
def test_mp3_without_its_last_frames_is_truncated(rate: int, first: int) -> None:
    mp3 = recorded(tone(6.0, rate), "mp3", "libmp3lame", rate)
    data = cut(mp3, "mp3", first) if first else mp3
    start = position = data.index(b"\xff", 10 + data[9] if data[:3] == b"ID3" else 0)
    ends = []
    while (size := frame_bytes(data[position : position + 6])) > 1:
        position += size
        ends.append(position)
    assert duration_s(data[start : ends[-1]]) > 4
    with pytest.raises(RequestError, match="is truncated"):
        decoded(data[: ends[-9]])


@pytest.mark.parametrize(("format", "blocks"), [("WAV", 13), ("WAV", 7), ("AIFF", 21), ("AIFF", 65)])
def test_byte_behind_an_odd_number_of_blocks_is_none(format: str, blocks: int) -> None:
    """Blocks of GSM 6.10 have 65 or 33 bytes. Some programs count the byte that makes the size even."""
    seconds = blocks * (320 if format == "WAV" else 160) / 8000
    data = encoded(tone(seconds, 8000), 8000, format, "GSM610")
    if format == "WAV":
        assert data[-1:] == b"\0"
        data = claiming(data, b"data", 4, struct.pack("<I", 65 * blocks + 1))
    assert duration_s(data) == pytest.approx(seconds)
    with pytest.raises(RequestError, match="is truncated"):
        decoded(data[:-34])


def test_byte_behind_samples_of_two_bytes_is_none() -> None:
    """It is a packet of its own where those before it are full."""
    samples = 2**15
    data = claiming(encoded(tone(samples / 8000, 8000), 8000), b"data", 4, struct.pack("<I", 2 * samples + 1))
    assert duration_s(data + b"\0") == samples / 8000


def test_adpcm_that_ffmpeg_takes_for_amr_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be decoded after"):
        decoded(encoded(tone(2.62, 8000), 8000, "WAV", "NMS_ADPCM_16"))


def test_video_with_late_audio_keeps_its_times() -> None:
    file = Recorder()
    with av.open(file, "w", format="matroska") as output:
        video, audio = output.add_stream("mpeg4", rate=5), output.add_stream("pcm_s16le", rate=16_000, layout="mono")
        video.width = video.height = 32
        for number in range(15):
            picture = av.VideoFrame(32, 32, "yuv420p")
            picture.pts = number
            output.mux(video.encode(picture))
        frame = av.AudioFrame.from_ndarray((tone(1.0)[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16_000, 16_000, Fraction(1, 16_000)
        output.mux([*audio.encode(frame), *audio.encode(None), *video.encode(None)])
    assert duration_s(file.data) == pytest.approx(2.0, abs=0.01)
    assert not is_loud(file.data, 0.0, 0.95)
    assert is_loud(file.data, 1.05, 1.95)


def fragment_with(count: int) -> bytes:
    data = bytearray(MAKERS["fragments"](1.0, 48_000))
    at = data.index(b"trun")
    data[at + 8 : at + 12] = struct.pack(">I", count)
    return bytes(data)


def index_with(size: int, count: int) -> bytes:
    data = bytearray(MAKERS["m4a"](1.0, 48_000))
    at = data.index(b"stsz")
    data[at + 8 : at + 16] = struct.pack(">II", size, count)
    return bytes(data)


def claiming(data: bytes, mark: bytes, offset: int, value: bytes) -> bytes:
    at = data.index(mark) + offset
    return data[:at] + value + data[at + len(value) :]


HARMFUL: dict[str, tuple[Callable[[], bytes], str]] = {
    "fragment": (lambda: fragment_with(70_000_000), "announces 70,000,000 packets in"),
    "index": (lambda: index_with(0, 2**31), "announces 2,147,483,648 packets in"),
    "sizes": (lambda: index_with(1, 2**31), "announces 134,217,728 packets in"),
    "boxes": (lambda: b"\0\0\0\x08ftyp" + b"\0\0\0\x08free" * 2400, "has more than 2,000 parts"),
    "nested": (lambda: b"".join(struct.pack(">I", 8 * (900 - n)) + b"moov" for n in range(900)), "MP4 or M4A that is"),
    "compressed index": (lambda: b"\0\0\0\x18moov\0\0\0\x10cmov" + bytes(8), "has a compressed index"),
    "elements": (lambda: b"\x1a\x45\xdf\xa3\x80" + b"\xec\x80" * 2400, "has more than 2,000 parts"),
    "pages": (lambda: (b"OggS\0\2" + bytes(16) + b"\x42\xd7\x65\x7d" + b"\0") * 2400, "has more than 2,000 parts"),
    "chunks": (lambda: WAV[:12] + b"JUNK\0\0\0\0" * 2400, "has more than 2,000 parts"),
    "tags": (lambda: id3v2(0) * 2400, "has more than 2,000 parts"),
    "endless tag": (lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(50), "is truncated: its tag"),
    "many files": (lambda: encoded(tone(0.001)) * 520, "is joined from more than 500 files"),
    "flac of a day": (
        lambda: claiming(MAKERS["flac"](0.5, 16_000), b"fLaC", 22, b"\xff\xff\xff\xff"),
        "is longer than 60 s",
    ),
    "mp3 of a day": (
        lambda: claiming(MAKERS["mp3"](0.5, 16_000), b"Xing", 8, b"\x0f\xff\xff\xff"),
        "is longer than 60 s",
    ),
    "webm of years": (
        lambda: claiming(MAKERS["webm"](0.5, 48_000), b"\x44\x89\x88", 3, struct.pack(">d", 1e12)),
        "is longer than 60 s",
    ),
    "packets of a caf": (
        lambda: b"caff\0\1\0\0desc" + struct.pack(">QdIIIIII", 32, 48_000, 0x61616320, 0, 0, 1024, 1, 0)
        + b"pakt" + struct.pack(">QQQII", 24, 2**31 - 16, 0, 0, 0) + b"data" + struct.pack(">Q", 104) + bytes(104),
        "CAF that is truncated or damaged|without audio",
    ),
}  # fmt: skip


# threat: an audio file: files made to harm are refused by name
@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_files_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MAX_ELEMENTS", 2000)
    make, message = HARMFUL[name]
    with pytest.raises(RequestError, match=message):
        decoded(make())


@pytest.mark.parametrize("format", ["MAT4", "HTK", "VOC", "NIST", "MAT5", "SVX", "WVE", "PVF"])
def test_old_formats_of_libsndfile_are_read(format: str) -> None:
    """Some begin with zeros, which are no filler there."""
    rate = 8000 if format == "WVE" else 16_000
    assert duration_s(encoded(tone(1.5, rate), rate, format)) == pytest.approx(1.5)


@pytest.mark.parametrize("text", ["The wide river was free. ", "ftyp moov RIFF WAVE ", "fLaC is a format. "])
def test_text_is_no_audio(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not audio in a format|is FLAC that is truncated or damaged"):
        decoded(text.encode() * 50)


@pytest.fixture
def without_av(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)


@pytest.mark.parametrize("name", ["wav", "flac", "vorbis", "opus", "mp3", "aiff", "au", "caf", "w64"])
def test_without_pyav_a_file_is_read_to_its_end_or_refused(without_av: None, name: str) -> None:
    data = MAKERS[name](2.0, 16_000)
    assert duration_s(data) == pytest.approx(2.0, abs=0.01)
    assert duration_s(id3v2(30) + data + ID3V1) == pytest.approx(2.0, abs=0.01)
    with pytest.raises(RequestError, match=r"truncated|cannot be decoded"):
        decoded(data[: len(data) * 2 // 3])
    if name == "mp3":
        with pytest.raises(RequestError, match=r"bytes after 2\.0 s, the guessed end; this server lacks PyAV \(melt"):
            decoded(data + data)
    else:
        assert duration_s(data + data) == pytest.approx(4.0, abs=0.01)


def test_without_pyav_files_that_need_it_name_it(without_av: None) -> None:
    mp3 = MAKERS["mp3"](2.0, 16_000)
    gap = encoded(tone(1.0), 16_000, "MP3")
    for data in (
        without_length(MAKERS["flac"](1.0, 16_000)),
        WAV[: DATA + 4] + bytes(4) + WAV[DATA + 8 :],
        MAKERS["aac"](1.0, 16_000),
        mp3[500:],
        gap[frame_bytes(gap[:6]) :] + mp3,
    ):
        with pytest.raises(RequestError, match=r"lacks.*PyAV|PyAV .*lacks"):
            decoded(data)


def mixed_to(channels: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return samples_of(decoded(encoded(np.stack(channels, axis=1), 16_000, subtype="FLOAT"))[0]).astype(float)


@pytest.mark.parametrize("second", [-1.0, -0.97, -0.8, -1.2])
def test_channels_that_cancel_each_other_give_the_louder_one(second: float) -> None:
    voice = tone(1.5)
    found = mixed_to([voice, second * voice])
    expected = max(1.0, abs(second)) * voice * 32767
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=3)


def test_surround_sound_that_cancels_gives_its_loudest_channel() -> None:
    voice = tone(1.5)
    noise = 0.01 * np.random.default_rng(1).standard_normal(len(voice)).astype(np.float32)
    found = mixed_to([voice, -voice, 0.2 * voice, noise, 0.5 * voice, -0.7 * voice])
    assert np.sqrt((found**2).mean()) == pytest.approx(0.5 / np.sqrt(2) * 32767, rel=0.01)


def test_channels_that_cancel_for_a_while_only() -> None:
    voice = tone(2.0)
    other = np.concatenate([voice[:16_000], -voice[16_000:]])
    found = mixed_to([voice, other])
    np.testing.assert_allclose(np.abs(found), np.abs(voice) * 32767, atol=3)


def hum(hz: float, level: float) -> np.ndarray[Any, Any]:
    return level * np.sin(2 * np.pi * hz * np.arange(24_000) / 16_000)


COMMON = {
    "offset": np.full(24_000, 0.1),
    "50 Hz": hum(50, 0.07),
    "60 Hz": hum(60, 0.06) + hum(120, 0.01),
    "20 Hz": hum(20, 0.2),
}


@pytest.mark.parametrize("common", COMMON.values(), ids=COMMON)
@pytest.mark.parametrize("second", [-1.0, -0.8])
def test_what_all_channels_have_does_not_hide_that_they_cancel(common: np.ndarray[Any, Any], second: float) -> None:
    voice = 0.3 * tone(1.5) * (0.7 + 0.3 * np.sin(np.arange(24_000) / 3000))
    for channels in ([voice, second * voice], [second * voice, voice, 0.5 * voice, -0.5 * voice]):
        found = mixed_to([channel + common for channel in channels]) / 32767 - common
        assert abs(np.corrcoef(found, voice)[0, 1]) > 0.99
        assert np.abs(found).max() == pytest.approx(np.abs(voice).max(), rel=0.01)
    unlike = mixed_to([voice + common, hum(631, 0.2) + common])
    np.testing.assert_allclose(unlike, (common + (voice + hum(631, 0.2)) / 2) * 32767, atol=3)


def test_channels_that_do_not_cancel_are_averaged() -> None:
    left, right = tone(1.5, hz=440), tone(1.5, hz=631)
    np.testing.assert_allclose(mixed_to([left, right]), (left + right) / 2 * 32767, atol=3)
    np.testing.assert_allclose(mixed_to([left, 0 * right]), left / 2 * 32767, atol=3)
    np.testing.assert_allclose(mixed_to([left, *[0 * left] * 5]), left / 6 * 32767, atol=3)


def test_damage_within_a_file_is_named() -> None:
    mp3 = bytearray(recorded(tone(3.0, 48_000), "adts", "aac"))
    mp3[len(mp3) // 2 : len(mp3) // 2 + 900] = bytes(range(1, 226)) * 4
    with pytest.raises(RequestError, match=r"cannot be decoded after|is truncated"):
        list(decode(bytes(mp3), LIMITS))


@pytest.mark.parametrize("name", ["vorbis", "opus"])
def test_a_page_of_ogg_with_another_checksum_is_damage(name: str) -> None:
    ogg = MAKERS[name](2.0, 48_000)
    pages = [match.start() for match in re.finditer(b"OggS", ogg)]
    for page, last in ((0, pages[1] - 1), (pages[-1], len(ogg) - 1)):  # the head, and audio
        for at in (page + 22, last):  # the checksum itself, and what it covers
            damaged = ogg[:at] + bytes([ogg[at] ^ 0x10]) + ogg[at + 1 :]
            with pytest.raises(RequestError, match=rf"is damaged: its page at byte {page} has another checksum"):
                decoded(damaged)


def test_matroska_that_ends_in_the_head_of_a_cluster_is_truncated() -> None:
    """Without a duration in its header, only its elements tell that something is missing."""
    webm = recorded(tone(7.0, 48_000), "webm", "libopus", 48_000).replace(b"\x44\x89\x88", b"\x44\x88\x88", 1)
    assert duration_s(webm) == pytest.approx(7.0, abs=0.05)
    cluster = [match.start() for match in re.finditer(b"\x1f\x43\xb6\x75", webm)][1]
    size = webm.index(b"\x18\x53\x80\x67") + 5
    live = webm[:size] + b"\xff" * 7 + webm[size + 7 :]
    for cut in (1, 4, 6):
        for file in (webm, live):
            with pytest.raises(RequestError, match="is truncated: a part of it has"):
                decoded(file[: cluster + cut])
    with pytest.raises(
        RequestError, match=f"is damaged: {len(webm):,} bytes are announced, and nothing begins at byte"
    ):
        decoded(webm[:cluster] + bytes(len(webm) - cluster))
    assert duration_s(live[:cluster]) == pytest.approx(5.0, abs=0.5)  # a live recording may end there
