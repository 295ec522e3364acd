"""The length of a WAV stream, whatever its header says of sizes."""

import struct

import pytest

from meltcore.audio.sample_files import UNKNOWN_SIZE
from meltcore.load.wav import UNKNOWN_BYTES, WavReader

SAMPLES = b"\1\0" * 24_000  # a second


def wav(size: int, *, magic: bytes = b"RIFF", before: bytes = b"", samples: bytes = SAMPLES) -> bytes:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 24_000, 48_000, 2, 16)
    riff = struct.pack("<4sI4s", magic, min(size + 36, 0xFFFFFFFF), b"WAVE")
    return riff + before + form + struct.pack("<4sI", b"data", size) + samples


def read(data: bytes, size: int = 4000) -> WavReader:
    reader = WavReader()
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    return reader


@pytest.mark.parametrize(
    "size",
    [0, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFDB, 0xFFFFFF00, 0x80000000, 0x7FFFFFFF, 0x7FFFFFDB, 0x7FFFF000, 2_000_000_000],
)
@pytest.mark.parametrize("part", [1, 43, 10**6])
def test_sizes_of_programs_that_do_not_know_the_length_are_read_to_the_end(size: int, part: int) -> None:
    reader = read(wav(size), part)
    assert (reader.problem, reader.seconds, reader.missing_bytes) == (None, 1.0, 0)


def test_true_sizes_show_what_is_missing_and_what_is_no_sample() -> None:
    assert read(wav(48_000) + b"LIST\4\0\0\0INFO").seconds == 1.0
    short = read(wav(48_002))
    assert (short.seconds, short.missing_bytes) == (1.0, 2)
    assert read(wav(900_000_000)).missing_bytes == 899_952_000
    assert read(wav(1_500_000_000)).missing_bytes == 1_499_952_000


def test_server_and_load_generator_believe_the_same_sizes() -> None:
    assert UNKNOWN_BYTES == UNKNOWN_SIZE


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
def test_forms_for_large_files_are_read(magic: bytes) -> None:
    sizes = struct.pack("<4sIQQQI", b"ds64", 28, 48_072, 48_000, 24_000, 0)
    assert read(wav(0xFFFFFFFF, magic=magic, before=sizes)).seconds == 1.0
    assert (read(wav(48_000, magic=b"RIFX")).problem or "").startswith("not a WAV file: it begins with b'RIFX")
