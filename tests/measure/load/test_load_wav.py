"""The length of a WAV stream, whatever its header says of sizes."""

import struct

import pytest

from meltcore.audio.sample_files import UNKNOWN_SIZE
from meltcore.measure.load.workloads.wav import UNKNOWN_BYTES, WavReader

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


UNKNOWN_AND_KNOWN = [(48_000, 48_000), (0xFFFFFFFF, 0xFFFFFFFF), (0, 48_000), (48_000, 0x7FFFF000), (0, 0)]


@pytest.mark.parametrize(("first", "second"), UNKNOWN_AND_KNOWN)
@pytest.mark.parametrize("part", [1, 7, 4000, 10**6])
def test_all_files_of_an_answer_count(first: int, second: int, part: int) -> None:
    """Some servers send a file for each sentence, whose rates may differ."""
    other = wav(second).replace(struct.pack("<II", 24_000, 48_000), struct.pack("<II", 12_000, 24_000))
    notes = b"LIST\4\0\0\0INFO" if 0 < first < UNKNOWN_BYTES else b""
    reader = read(wav(first) + notes + other + wav(48_000), part)
    assert (reader.problem, reader.seconds, reader.missing_bytes) == (None, 4.0, 0)


def test_what_the_last_of_several_files_lacks_is_missing() -> None:
    reader = read(wav(0) + wav(48_000) + wav(48_000)[:-100])
    assert (reader.seconds, reader.missing_bytes) == (pytest.approx(3.0 - 100 / 48_000), 100)
    odd = read(wav(2_999, samples=b"\1" * 3000) + wav(48_000))  # a byte makes the size even
    assert (odd.seconds, odd.missing_bytes) == (pytest.approx(1 + 2999 / 48_000), 0)
    bad = read(wav(48_000) + wav(48_000)[:36] + b"JUNK" + struct.pack("<I", 2**20) + bytes(70_000))
    assert bad.problem == "no samples within 65,536 bytes"
