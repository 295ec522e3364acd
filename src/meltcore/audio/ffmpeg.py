"""Reads a few audio formats with FFmpeg (PyAV), and places samples at the times of their packets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from meltcore.audio.checks import refusal
from meltcore.audio.containers import (
    AAC,
    AIFF,
    CAF,
    FLAC,
    FLV,
    MATROSKA,
    MP3,
    MP4,
    MPEG_TS,
    OGG,
    WAV,
    WAVPACK,
    Container,
)
from meltcore.audio.media_files import amr_frames, first_packets, has_fragments
from meltcore.audio.mpeg import announced_samples, frame_bytes

_BLOCK_S = 10.0  # of samples, which are yielded together
# A container may announce a little more than its codec gives: encoders delay their signal and fill up frames. MP4
# counts them (a delay of AAC has up to 2,112 samples). Programs that mend WebM write the time that a clock measured.
_MISSING_FRAMES, _LEAST_FRAME = 2, 1024
_MATROSKA_MISSING_S, _MATROSKA_FRAME = 0.5, 4096  # a last frame of ALAC counts in full
_MP3_PADDING = 3 * 1152  # samples at the end that the header counts and FFmpeg leaves out
# Packet times are rounded, and the clocks of recorders jitter. ffmpeg's resampler fills gaps from this length on, too.
_GAP_S = 0.1
_JUMP_S = 1.0  # back in time: joined transport streams begin anew
# A gap may have been made by one damaged bit of a time. A long one needs packets on both sides that agree with it.
_LONG_GAP_S, _AGREEING_PACKETS = 10.0, 3
_NEXT_PACKETS = 10  # whose times tell a short gap from jitter
_TS_PACKETS = 200  # of which several have their time from one field, and behind which another stream may begin
_MAX_PROBE_BYTES = 2**20  # of a file's beginning, in which FFmpeg looks for its streams
# These tell of a stream by its first packet alone, which may come after seconds of video.
_PACKET_FOUND_FORMATS = (FLV, MPEG_TS)
_AMR_CODECS, _AMR_FRAMES_PER_S = ("amrnb", "amrwb"), 50
_SKIP_MANUAL = 1 << 29  # FFmpeg's flag (flags2) of a decoder that leaves no samples out by itself
_PCM_PACKET_BYTES = 2**16  # of WAV: FFmpeg's own packets of 4096 bytes take twice the time
_MATROSKA_DURATION, _MAX_HEADER_BYTES = b"\x44\x89", 4096

Floats = npt.NDArray[np.float32]


def open_with_ffmpeg(data: bytes, container: Container | None, max_audio_s: float) -> FFmpegFile | None:
    """Open a file. Returns None for data that is neither MP3 nor AAC and has no container.

    Raises RequestError for a damaged file.
    """
    probe = (_MAX_PROBE_BYTES, 0)
    file = _open_file(data, container, *probe)
    if file is None:
        return None
    if container is None:
        container = AAC if file.format.name == "aac" else MP3
    stream = _audio_stream(file)
    if stream is None and container in _PACKET_FOUND_FORMATS:
        file.close()
        probe = (len(data), round(max_audio_s * 1e6))
        file = _open_file(data, container, *probe)
        stream = _audio_stream(file)
    if stream is None:
        file.close()
        raise refusal(f"is {container.shown_name} without audio that can be decoded")
    return FFmpegFile(data, container, file, stream, max_audio_s, probe)


def _open_file(data: bytes, container: Container | None, probe_bytes: int, probe_us: int = 0) -> Any:
    """Return a file that FFmpeg has opened. Returns None for data without a container that FFmpeg does not recognize.

    Raises RequestError for a damaged file. The result is Any, because PyAV's types distinguish neither readers from
    writers nor the arrays of frames.
    """
    import av

    options = {"probesize": str(probe_bytes), "analyzeduration": str(probe_us)}  # 0: FFmpeg's default
    if container is None:  # FFmpeg guesses between two formats, so that its many others cannot be reached
        options["format_whitelist"] = "mp3,aac"
    if container is WAV:
        options["max_size"] = str(_PCM_PACKET_BYTES)
    name = container and container.ffmpeg_name
    try:
        return av.open(io.BytesIO(data), format=name, container_options=options, metadata_errors="ignore")
    except av.FFmpegError as error:
        if container is None:
            return None
        raise _damage_error(container, error) from error


def _damage_error(container: Container, error: Any) -> Exception:
    return refusal(f"is {container.shown_name} that is truncated or damaged: {error.strerror}")


def _audio_stream(file: Any) -> Any:
    """Return the first audio stream that can be decoded, or None if there is none."""
    return next((each for each in file.streams.audio if each.codec_context is not None and each.rate), None)


class FFmpegFile:
    """A file that FFmpeg reads: its first audio stream that can be decoded."""

    def __init__(
        self, data: bytes, container: Container, file: Any, stream: Any, max_audio_s: float, probe: tuple[int, int]
    ) -> None:
        """Store a file and its stream.

        `probe` holds the bytes and microseconds within which FFmpeg found the stream.
        """
        stream.codec_context.thread_count = 1  # CPU time and memory are limited, and files are decoded concurrently
        if container is CAF and stream.codec_context.name == "alac":
            # FFmpeg takes what a short last frame lacks for padding, and cuts as much off the frame again.
            stream.codec_context.flags2 |= _SKIP_MANUAL
        self._container, self._file, self._stream = container, file, stream
        self._max_audio_s = max_audio_s
        self._data, self._probe = data, probe
        self.sample_rate, self.num_channels = int(stream.rate), int(stream.channels)
        self.num_frames = round(self._announced_end_s(data) * self.sample_rate) or None
        self._last_s = self._announced_length_s(data)
        self._num_read = 0  # samples of each channel, with the silence in gaps
        self._num_packets = 0  # that were read
        self._first_time_s = 0.0
        self._start_s = self._file_start_s()
        self._first_s = self._ogg_audio_start_s(data) if container is OGG and self._start_s is not None else 0.0

    def _file_start_s(self) -> float | None:
        """Return the time at which the file begins, or None if it begins with its first sample."""
        if self._container.has_zero:
            return 0.0
        starts = [
            float(each.start_time * each.time_base) for each in self._file.streams.video if each.start_time is not None
        ]
        return min(starts, default=None)

    def _ogg_audio_start_s(self, data: bytes) -> float:
        """Return the time at which the audio of a video begins.

        FFmpeg returns 0 for FLAC, and if all packets are on one page.
        """
        import av

        end, num_packets = first_packets(data, self._stream.index)
        with _open_file(data, OGG, _MAX_PROBE_BYTES) as file:
            packets = file.demux(file.streams[self._stream.index])
            try:
                lengths = [packet.duration or 0 for packet in islice(packets, num_packets)]
            except av.FFmpegError as error:
                raise _damage_error(OGG, error) from error
        # FFmpeg lets the last packet of a file go to its end, which is the error in question.
        *earlier, last = lengths or [end]
        return float((end - sum(earlier) - min(last, max(earlier, default=end))) * self._stream.time_base)

    def _announced_end_s(self, data: bytes) -> float:
        """Return the time at which the audio ends by the header, or 0 if the header does not say.

        FFmpeg's own value may be an estimate.
        """
        if self._container is MATROSKA:
            # It has the duration of all streams together, a recording that was not closed has none.
            is_written = _MATROSKA_DURATION in data[:_MAX_HEADER_BYTES] and len(self._file.streams) == 1
            return (self._file.duration or 0) / 1e6 if is_written else 0.0
        is_alac = self._stream.codec_context.name == "alac"
        if self._container not in (FLAC, MP3, MP4, WAVPACK) and not (
            self._container is CAF and is_alac
        ):  # the size of the others is checked before
            return 0.0
        start_s, end_s = (
            float((time or 0) * self._stream.time_base) for time in (self._stream.start_time, self._stream.duration)
        )
        if self._container in (FLAC, MP3):
            # FFmpeg leaves out the encoder's delay of MP3. FLAC that was cut keeps the original's total and times.
            total_s = announced_samples(data) / self.sample_rate if self._container is MP3 else end_s
            return max(total_s - start_s, 0.0)
        # FFmpeg counts the duration of MP4 from the first packet, with fragments from zero.
        is_from_first = self._container is MP4 and not has_fragments(data)
        return end_s + (max(start_s, 0.0) if is_from_first else 0.0)

    def _announced_length_s(self, data: bytes) -> float | None:
        """Return the file's length by its header, or None if the header gives none. Any later time is damaged."""
        if self._container is MATROSKA and _MATROSKA_DURATION in data[:_MAX_HEADER_BYTES]:
            return (self._file.duration or 0) / 1e6 or None
        has_frame_count = self._container is MP4 and self.num_frames is not None and not has_fragments(data)
        return (self.num_frames or 0) / self.sample_rate if has_frame_count else None

    def blocks(self) -> Iterator[Floats | int]:
        """Yield samples. A silent gap is yielded as its length.

        Raises RequestError for damaged data and missing samples.
        """
        import av

        pending, num_pending = list[Floats](), 0
        try:
            for samples in self._samples():
                is_other = isinstance(samples, int) or (pending and samples.shape[1] != pending[0].shape[1])
                if pending and (is_other or num_pending >= _BLOCK_S * self.sample_rate):
                    yield np.concatenate(pending)
                    pending, num_pending = [], 0
                if isinstance(samples, int):
                    yield samples
                    continue
                pending.append(samples)
                num_pending += len(samples)
        except (av.FFmpegError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise refusal(f"cannot be decoded after {self._num_read / self.sample_rate:.1f} s: {reason}") from error
        if pending:
            yield np.concatenate(pending)
        self._check_end()

    def _check_end(self) -> None:
        """Raise RequestError if the file contained less audio than its header announced."""
        announced = self.num_frames or 0
        allowed_missing = 0.0
        if self._container is MP3:
            allowed_missing = _MP3_PADDING
        elif self._container is MATROSKA:
            allowed_missing = _MATROSKA_MISSING_S * self.sample_rate + _MATROSKA_FRAME
        elif self._container is MP4:  # its times may be ahead by less than a gap
            frame = max(self._stream.codec_context.frame_size, _LEAST_FRAME)
            allowed_missing = _MISSING_FRAMES * frame + _GAP_S * self.sample_rate
        if self._num_read < announced - allowed_missing:
            found_s, announced_s = self._num_read / self.sample_rate, announced / self.sample_rate
            raise refusal(f"is truncated: {announced_s:.1f} s are announced, {found_s:.1f} s are there")

    def _samples(self) -> Iterator[Floats | int]:
        """Yield the samples of each frame at the file's first rate, and the length of each gap in their times."""
        import av

        frame_format, converter = None, None
        for frame in self._frames():
            yield from self._silence_before(frame)
            # Joined files may differ in all of these.
            if frame_format != (frame_format := (frame.format.name, frame.layout.name, frame.sample_rate)):
                if converter is not None:
                    yield from self._convert_frame(converter, None)
                converter = av.AudioResampler(format="flt", layout=frame.layout, rate=self.sample_rate)
            yield from self._convert_frame(converter, frame)
        if converter is not None:
            yield from self._convert_frame(converter, None)

    def _convert_frame(self, converter: Any, frame: Any) -> Iterator[Floats]:
        for converted in converter.resample(frame):
            self._num_read += converted.samples
            yield converted.to_ndarray().reshape(converted.samples, -1)

    def _frames(self) -> Iterator[Any]:
        """Yield decoded frames. Tags of MP3 and AAC, and a padding byte after an odd size, are not decoded."""
        import av

        has_frames, is_amr = self._container in (MP3, AAC), self._stream.codec_context.name in _AMR_CODECS
        is_padded = self._container in (WAV, AIFF) and not is_amr
        is_amr &= self._container is not WAV  # whose NMS ADPCM FFmpeg takes for AMR: its decoder refuses that
        for packet in _packets(self._file, self._stream):
            self._num_packets += packet.size > 0
            try:
                frames = self._amr_frames(packet) if is_amr and packet.size else packet.decode()
            except av.InvalidDataError:
                if (has_frames and frame_bytes(_packet_head(packet)) == 0) or (is_padded and packet.size == 1):
                    continue
                if has_frames and packet.size < frame_bytes(_packet_head(packet)):
                    raise self._truncation_error(packet) from None
                raise
            if has_frames and 0 < packet.size < frame_bytes(_packet_head(packet)):
                raise self._truncation_error(packet)
            yield from frames

    def _amr_frames(self, packet: Any) -> Iterator[Any]:
        """Yield the frames of a packet of AMR, with silent frames for its pauses, which FFmpeg does not decode."""
        import av

        codec, pts = self._stream.codec_context, packet.pts
        silence = np.zeros((1, self.sample_rate // _AMR_FRAMES_PER_S), np.float32)
        for data, is_pause in amr_frames(bytes(packet), codec.name == "amrwb"):
            silent = [av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")] if is_pause else []
            for frame in silent or codec.decode(av.Packet(data)):
                frame.sample_rate, frame.time_base, frame.pts = self.sample_rate, packet.time_base, pts
                pts = None  # of the first frame alone
                yield frame

    def _truncation_error(self, packet: Any) -> Exception:
        announced, at_s = frame_bytes(_packet_head(packet)), self._num_read / self.sample_rate
        return refusal(f"is truncated: at {at_s:.1f} s a frame of {announced} bytes has {packet.size}")

    def _silence_before(self, frame: Any) -> Iterator[int]:
        """Yield the length of the silence between the samples read so far and the time of a frame.

        Raises RequestError if the silence exceeds the limit, or if the time is damaged.
        """
        at_s = self._first_s if self._num_read == 0 else 0.0
        if not self._container.is_timed or (frame.pts is None and not at_s):
            return
        time_s = max(at_s, float((frame.pts or 0) * frame.time_base))
        self._first_time_s = time_s if self._num_read == 0 else self._first_time_s
        is_first = self._num_read == 0 and not self._container.has_zero
        if self._start_s is None or (is_first and time_s < self._start_s):
            self._start_s = time_s
        end_s = self._num_read / self.sample_rate
        gap_s = time_s - self._start_s - end_s
        gap = f"has a gap of {gap_s:,.1f} s in its packet times at {end_s:,.1f} s"
        # Ogg's first time is counted back from the end of a page, and its packets may have none.
        if gap_s >= _GAP_S and not at_s and (reason := self._damage_reason(time_s, gap_s)):
            raise refusal(f"{gap}, which is damage: {reason}")
        if self._is_restart(time_s, gap_s):
            self._start_s = time_s - end_s
            return
        if gap_s < _GAP_S or self._is_jitter(time_s, gap_s):
            return
        if end_s + gap_s > self._max_audio_s:
            raise refusal(f"{gap}, and is longer than {self._max_audio_s:,.0f} s, the limit")
        missing = round(gap_s * self.sample_rate)
        self._num_read += missing
        yield missing

    def _is_restart(self, time_s: float, gap_s: float) -> bool:
        """Return whether times count from a new origin from this time on.

        The times of joined transport streams start again. In files whose times do not count from zero, the times of the
        first packets may be damaged, or may not belong to the recording.
        """
        is_early = self._num_read > 0 and self._num_packets <= _AGREEING_PACKETS
        if self._container.has_zero or not (is_early or self._container is MPEG_TS):
            return False
        return (is_early and gap_s >= _LONG_GAP_S) or (gap_s < -_JUMP_S and not self._is_passing_jump(time_s, gap_s))

    def _is_jitter(self, time_s: float, gap_s: float) -> bool:
        """Return whether the times after a short gap fall back to values before the gap's end."""
        following = self._packet_times[self._num_packets : self._num_packets + _NEXT_PACKETS]
        return gap_s < _JUMP_S and bool(following.min(initial=np.inf) < time_s - gap_s / 2)

    def _damage_reason(self, time_s: float, gap_s: float) -> str:
        """Return why a gap does not belong to the recording, or "" if later times and the header agree with the gap."""
        later = self._suffix_min_times_s[self._num_packets :]
        if self._last_s is not None and time_s - self._first_time_s > self._last_s + _JUMP_S:
            return f"it ends at {time_s:,.1f} s, and the header announces {self._last_s:,.1f} s"
        if gap_s >= _LONG_GAP_S and len(later) + 1 < _AGREEING_PACKETS:
            return f"{len(later) + 1} packets follow it, and beyond {_LONG_GAP_S:g} s {_AGREEING_PACKETS} must"
        if gap_s >= _JUMP_S and len(later):
            back_s = time_s - float(later[0])
            times_return = self._is_passing_jump(time_s, gap_s) if self._container is MPEG_TS else back_s > gap_s / 2
            if times_return:
                return f"a later time is {back_s:,.1f} s before the gap's end; at most half of the gap is accepted"
        return ""

    def _is_passing_jump(self, time_s: float, gap_s: float) -> bool:
        """Return whether a jump in a transport stream's times is followed by packets with times as before the jump."""
        following = self._packet_times[self._num_packets : self._num_packets + _TS_PACKETS]
        expected = time_s - gap_s + self._packet_length_s * np.arange(1, len(following) + 1)
        return bool((np.abs(following - expected) < min(abs(gap_s), _JUMP_S) / 2).any())

    @cached_property
    def _packet_times(self) -> npt.NDArray[np.float64]:
        """The times of all packets in seconds. They are read from the file once, when it has a gap."""
        import av

        times = list[float]()
        with _open_file(self._data, self._container, *self._probe) as file, suppress(av.FFmpegError):
            stream = file.streams[self._stream.index]
            for packet in _packets(file, stream):
                if packet.size:
                    time = packet.dts if packet.pts is None else packet.pts
                    times.append(np.inf if time is None else float(time * stream.time_base))
        return np.array(times)

    @cached_property
    def _suffix_min_times_s(self) -> npt.NDArray[np.float64]:
        """For each packet, the smallest time in seconds among this packet and all later packets."""
        return np.minimum.accumulate(self._packet_times[::-1])[::-1]

    @cached_property
    def _packet_length_s(self) -> float:
        """The length of a packet in seconds: the median difference between the times of neighbors."""
        times = self._packet_times
        return float(np.median(np.diff(times[np.isfinite(times)]))) if len(times) > 1 else 0.0

    def close(self) -> None:
        """Release the decoder."""
        self._file.close()


def _packet_head(packet: Any) -> bytes:
    return bytes(memoryview(packet)[:6])


def _packets(file: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream, and an empty packet at its end.

    PyAV fails at each packet of a stream that begins later. These packets are left out.
    """
    while True:
        try:
            for packet in file.demux(stream):
                yield packet
                if packet.size == 0 and packet.dts is None:
                    return
        except IndexError:
            continue
        return
