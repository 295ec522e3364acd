"""Runs an audio worker process: `python -m meltcore.audio.worker`. It decodes files and encodes speech.

A damaged or malicious file can cost this process no more than its limits of memory and CPU time. It can write no files.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec
import numpy as np

from meltcore.audio.decode import AudioLimits, Clip, decode
from meltcore.audio.encode import Encoder, make_encoder
from meltcore.audio.messages import (
    LENGTH_BYTES,
    Decoded,
    DecodedClip,
    DropFile,
    Encode,
    Encoded,
    NotDecoded,
    ToWorker,
    write,
)
from meltcore.common.errors import RequestError
from meltcore.common.sizes import size_text

_MEMORY_BYTES = 3 * 2**30  # of address space: libraries take about 1 GiB of it


def main() -> int:
    """Serve until the end of stdin."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the API server ends this process by closing its stdin
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read = msgspec.msgpack.Decoder(ToWorker).decode
    files: dict[int, Encoder] = {}
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while length := stdin.read(LENGTH_BYTES):
        request = read(stdin.read(int.from_bytes(length, "big")))
        if isinstance(request, DropFile):
            files.pop(request.file_id, None)
            continue
        used_s = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used_s.ru_utime + used_s.ru_stime) + 1 + request.cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        if isinstance(request, Encode):
            write(stdout, Encoded(_encode(request, files)))
            continue
        data = stdin.read(request.num_bytes)
        try:
            for part in decode(data, AudioLimits(request.sample_rate, request.max_clip_s, request.max_audio_s)):
                write(stdout, DecodedClip(*part) if isinstance(part, Clip) else Decoded(part))
        except RequestError as error:
            write(stdout, NotDecoded(error.message))
        except MemoryError:
            write(stdout, NotDecoded(f"the audio needs more than {size_text(_MEMORY_BYTES)} of memory to decode"))
        del request, data
    return 0


def _encode(request: Encode, files: dict[int, Encoder]) -> bytes:
    """Return the next bytes of a file. The file is one of `files`, or a new file."""
    file = files.get(request.file_id)
    if file is None:
        file = files[request.file_id] = make_encoder(
            request.format_name, request.sample_rate, is_whole=request.is_whole
        )
    data = file.add(np.frombuffer(request.samples, np.float32), is_last=request.is_last)
    if request.is_last:
        del files[request.file_id]
    return data


if __name__ == "__main__":
    sys.exit(main())
