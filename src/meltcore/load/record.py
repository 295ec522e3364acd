"""What is kept of one request, and how it reaches the disk while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np


class Record(msgspec.Struct, array_like=True):
    """One request as the client saw it. Times are `time.monotonic()` seconds of this machine; 0 means: did not happen.

    `chunk_times` are the arrivals of the chunks that carried text (float64, raw); `chunk_tokens` the server's own count
    of output tokens up to each of them (uint32, raw), empty unless every such chunk had one.
    """

    index: int
    intended_s: float
    sent_s: float = 0.0
    first_text_s: float = 0.0
    ended_s: float = 0.0  # the response was whole, or failed
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None  # None: the whole answer came
    detail: str | None = None
    correct: bool | None = None  # None: the workload has no answer for it
    text: str | None = None  # only of the sample to be re-counted: the thoughts told apart from the answer, and it
    thought_chars: int = 0  # how much of `text` is thoughts
    chunk_times: bytes = b""
    chunk_tokens: bytes = b""

    @property
    def answer(self) -> str:
        """The text without thoughts, which is what may be marked: a number in them is no answer."""
        return (self.text or "")[self.thought_chars :]

    @property
    def times_s(self) -> np.ndarray:
        """[chunks] float64"""
        return np.frombuffer(self.chunk_times, dtype=np.float64)

    @property
    def tokens_so_far(self) -> np.ndarray | None:
        """[chunks] uint32, or None where the server did not report them."""
        return np.frombuffer(self.chunk_tokens, dtype=np.uint32) if self.chunk_tokens else None


class RecordFile:
    """Appends records to `requests.jsonl` while the run goes on; a path of None keeps nothing.

    Times in the file are seconds since the release of the record's level. Chunk times stay out unless `with_chunks`:
    they are most of the bytes, and the report needs only what is computed from them.
    """

    def __init__(self, path: Path | None, *, with_chunks: bool = False) -> None:
        self._file = None if path is None else path.open("ab")
        self._with_chunks = with_chunks
        self._encoder = msgspec.json.Encoder()

    def write(self, level: str, released_s: float, records: list[Record]) -> None:
        """Append `records` and push them to the system: a killed run keeps what was written."""
        if self._file is None or not records:
            return
        self._file.write(self._encoder.encode_lines([self._line(level, released_s, record) for record in records]))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, level: str, released_s: float, record: Record) -> dict[str, Any]:
        def since_release(moment_s: float) -> float | None:
            return round(moment_s - released_s, 6) if moment_s else None

        line: dict[str, Any] = {
            "level": level,
            "index": record.index,
            "intended_s": since_release(record.intended_s),
            "sent_s": since_release(record.sent_s),
            "first_text_s": since_release(record.first_text_s),
            "ended_s": since_release(record.ended_s),
            "status": record.status,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "chunks": len(record.chunk_times) // 8,
            "finish_reason": record.finish_reason,
            "failure": record.failure,
            "detail": record.detail,
            "correct": record.correct,
        }
        if self._with_chunks:
            line["chunk_us"] = np.diff(record.times_s * 1e6).astype(int).tolist()
        return line
