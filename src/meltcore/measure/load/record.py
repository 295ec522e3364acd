"""Defines the record of one request, and the file to which records are appended during a run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from meltcore.common.errors import ConfigError

if TYPE_CHECKING:  # functions import it: `meltcore load --help` reads this file
    import numpy as np

RESERVE_BYTES = 8 * 2**20  # result.json with GPU timelines and the report take 0.1 to 5 MB


class TaskWork(msgspec.Struct, array_like=True, frozen=True):
    """The work of a request for translation, transcription or synthesis. Fields that belong to other tasks are 0."""

    sentences: int = 0
    source_chars: int = 0
    audio_s: float = 0.0  # of the clip that was sent, or of the speech that came
    target_tokens: int = 0  # of all translations, if the server reports them


class RequestRecord(msgspec.Struct, array_like=True):
    """Describes one request as the client saw it.

    Times are `time.monotonic()` seconds of this machine; the time of an event that did not happen is 0. `event_times`
    holds the arrival times of the events with text (float64, raw bytes). `event_tokens` holds the server's count of
    output tokens up to each of these events (uint32, raw bytes). It is empty if any event came without a count.

    With `work` the request belongs to a task other than generation. Then `first_text_s` is the arrival of the first
    audio for synthesis, and the end of an answer with text for the other tasks.
    """

    index: int
    intended_s: float
    sent_s: float = 0.0
    first_text_s: float = 0.0
    ended_s: float = 0.0  # the response was complete, or failed
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None  # None: the answer is complete
    saw_done: bool = True  # the stream ended with [DONE]
    saw_usage: bool = True  # else `output_tokens` was counted by a tokenizer, or as events
    detail: str | None = None
    correct: bool | None = None  # None: the workload has no expected answer
    text: str | None = None  # reasoning and content; kept only for answers that are to be counted
    reasoning_chars: int = 0  # length of the reasoning in `text`
    event_times: bytes = b""
    event_tokens: bytes = b""
    work: TaskWork | None = None
    refusals: int = 0  # answers 429 or 503 with Retry-After before this one, each obeyed
    reconnected: bool = False  # sent again: the server had closed the connection after the answer before

    @property
    def content(self) -> str:
        """Return the answer without reasoning.

        Only this text is graded, because a number in the reasoning is no answer.
        """
        return (self.text or "")[self.reasoning_chars :]

    @property
    def times_s(self) -> np.ndarray:
        """Return the arrival times of the events: [events] float64."""
        import numpy as np

        return np.frombuffer(self.event_times, dtype=np.float64)

    @property
    def cumulative_tokens(self) -> np.ndarray | None:
        """Return the number of output tokens up to each event, [events] uint32.

        Returns None if the server did not report the numbers.
        """
        import numpy as np

        return np.frombuffer(self.event_tokens, dtype=np.uint32) if self.event_tokens else None


class RecordFile:
    """Appends records to `requests.jsonl` during the run. With a path of None, nothing is written.

    Times in the file are seconds since the release of the record's level. Event times are most of the bytes, and the
    report does not read them. They are written only with `with_event_times`.

    If the disk becomes full, the file ends but the run continues, and `problem` says which requests are missing. During
    the run an unlinked file in the same folder reserves RESERVE_BYTES. `close` frees these bytes for the result and the
    report.
    """

    def __init__(self, path: Path | None, *, with_event_times: bool = False) -> None:
        """Open the file. Raises ConfigError if it cannot be opened, or RESERVE_BYTES cannot be reserved."""
        self._file: BinaryIO | None = None
        self._reserve_file: BinaryIO | None = None
        self._with_event_times = with_event_times
        self._encoder = msgspec.json.Encoder()
        self._num_written = self._num_lost = 0
        self._error: OSError | None = None
        if path is None:
            return
        try:
            self._reserve_file = TemporaryFile(dir=path.parent, buffering=0)  # noqa: SIM115 - `close` closes it
            _reserve_space(self._reserve_file, path.parent)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise

    @property
    def problem(self) -> str | None:
        """Return a text that says which requests are missing from the file and why, or None if the file is complete."""
        if self._error is None:
            return None
        return (
            f"requests.jsonl is incomplete: {self._error.strerror}; it holds {self._num_written:,} requests and lacks "
            f"{self._num_lost:,}. The result was computed from all of them"
        )

    def write(self, level: str, released_s: float, records: list[RequestRecord]) -> None:
        """Append `records` and flush them to the operating system, so that they survive if the run is killed."""
        if self._file is None or not records:
            return
        if self._error is None:
            lines = self._encoder.encode_lines([self._to_line(level, released_s, record) for record in records])
            try:
                self._append(lines)
                self._num_written += len(records)
                return
            except OSError as error:
                self._error = error
        self._num_lost += len(records)

    def close(self) -> None:
        """Close the file and free the reserved bytes."""
        if self._file is not None:
            self._file.close()
        if self._reserve_file is not None:
            self._reserve_file.close()

    def _append(self, lines: bytes) -> None:
        """Write all `lines`.

        If that fails, remove the written part and raise OSError, so that every line is complete.
        """
        assert self._file is not None
        end_offset = self._file.seek(0, os.SEEK_END)
        remaining_bytes = memoryview(lines)
        try:
            while remaining_bytes:
                remaining_bytes = remaining_bytes[self._file.write(remaining_bytes) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end_offset)
            raise

    def _to_line(self, level: str, released_s: float, record: RequestRecord) -> dict[str, Any]:
        def seconds_since_release(time_s: float) -> float | None:
            return round(time_s - released_s, 6) if time_s else None

        line: dict[str, Any] = {
            "level": level,
            "index": record.index,
            "intended_s": seconds_since_release(record.intended_s),
            "sent_s": seconds_since_release(record.sent_s),
            "first_text_s": seconds_since_release(record.first_text_s),
            "ended_s": seconds_since_release(record.ended_s),
            "status": record.status,
            "prompt_tokens": record.prompt_tokens if record.saw_usage else None,
            "output_tokens": record.output_tokens if record.saw_usage else None,
            "cached_tokens": record.cached_tokens,
            "events": len(record.event_times) // 8,
            "finish_reason": record.finish_reason,
            "failure": record.failure,
            "detail": record.detail,
            "correct": record.correct,
        }
        if record.refusals:
            line["refusals"] = record.refusals
        if record.reconnected:
            line["reconnected"] = True
        if record.work is not None:
            line |= msgspec.structs.asdict(record.work)
        if self._with_event_times:
            import numpy as np

            line["event_us"] = np.diff(record.times_s * 1e6).astype(int).tolist()
        return line


def _reserve_space(file: BinaryIO, folder: Path) -> None:
    """Allocate RESERVE_BYTES for `file`, which lies in `folder`. Raises ConfigError if that fails."""
    disk_stats = os.statvfs(folder)  # before the attempt, which may have taken the rest
    try:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot reserve the space for result.json and report.html ({error.strerror}): "
            f"{RESERVE_BYTES:,} bytes are needed, {disk_stats.f_bavail * disk_stats.f_frsize:,} are free"
        ) from error
