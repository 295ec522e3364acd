"""Defines the messages between an API server and an audio worker: msgpack with a length, over the worker's pipes."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 2**31


class Decode(msgspec.Struct, tag="decode", array_like=True, frozen=True):
    """Asks for the clips of one file. The `num_bytes` bytes of the file follow the message.

    AudioLimits explains the limits. A worker that takes more than `cpu_s` seconds of CPU time is killed.
    """

    num_bytes: int
    sample_rate: int
    max_clip_s: float
    max_audio_s: float
    cpu_s: int


class DecodedClip(msgspec.Struct, tag="clip", array_like=True, frozen=True):
    """Holds one clip: its int16 samples, and the index of the first of them in the file."""

    start: int
    samples: bytes


class Decoded(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """Follows the last clip of a file, and holds the file's duration in seconds."""

    duration_s: float


class NotDecoded(msgspec.Struct, tag="error", array_like=True, frozen=True):
    """Says why a file cannot be decoded. Clips of the same file may have been sent before."""

    message: str


class Encode(msgspec.Struct, tag="encode", array_like=True, frozen=True):
    """Asks for the next encoded bytes of the file `file_id`. The first message with a new `file_id` begins the file.

    Args:
        file_id: Identifies the file among all open files of the worker.
        format_name: One of the formats of `encode.make_encoder`.
        sample_rate: Sample rate in Hz.
        is_whole: True if the file is sent as a whole. All bytes are then returned after the last samples, so that the
            header has all sizes.
        samples: float32 in this machine's byte order, mono, from -1 to 1.
        is_last: True for the last samples of the file. The worker completes the file and closes it.
        cpu_s: CPU time after which the worker is killed.
    """

    file_id: int
    format_name: str
    sample_rate: int
    is_whole: bool
    samples: bytes
    is_last: bool
    cpu_s: int


class DropFile(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """Drops a file before its last samples were sent. The worker sends no answer."""

    file_id: int


class Encoded(msgspec.Struct, tag="encoded", array_like=True, frozen=True):
    """Holds the next bytes of a file."""

    data: bytes


ToWorker = Decode | Encode | DropFile
FromWorker = DecodedClip | Decoded | NotDecoded | Encoded


def write(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Write a message with its length, and flush."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    stream.flush()
