"""Provides the offline API of transcription: a checkpoint in this process, for scripts and tests."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from meltcore.audio.decode import AudioLimits, Clip, decode
from meltcore.common.errors import RequestError
from meltcore.common.files import file_errors
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.transcription.engine import TranscriptionTask
from meltcore.protocol.transcription import Decoder, Transcribe, Transcript
from meltcore.settings.config import DType, EngineConfig, LoadFormat
from meltcore.text.transcripts import SpokenWord, Transcription, model_language, place_words

# A file's path, its content, or samples [frames] or [frames, channels] with their rate in Hz
Audio = str | Path | bytes | tuple[npt.NDArray[Any], int]

_SAMPLE_TYPES = ("float32", "float64", "int16", "int32")
# Offline, no request of higher priority waits for the end of a batch: batches are as large as memory allows.
_MAX_START_S = 3600.0


class Transcriber:
    """Transcribes audio offline: `Transcriber("model.nemo").transcribe("speech.mp3", "kannada").text`."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: DType = "auto",
        load_format: LoadFormat = "auto",
        memory_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Load a checkpoint of IndicConformer from a local file or folder, or a hub id.

        The other parameters are fields of EngineConfig. The default dtype is float16 on a GPU and float32 on a CPU.
        Raises ConfigError for a setting that cannot work.
        """
        config = EngineConfig(
            model=model, device=device, dtype=dtype, load_format=load_format, memory_bytes=memory_bytes, seed=seed
        )
        task = TranscriptionTask(config)
        ready = task.ready()
        self._engine: BatchEngine[Transcribe, Transcript] = BatchEngine(task, max_start_s=_MAX_START_S)
        self._limits = AudioLimits(ready.sample_rate, ready.max_samples / ready.sample_rate)
        self._min_bytes = 2 * ready.min_samples
        self.languages: list[str] = ready.languages

    def transcribe(
        self, audio: Audio | Sequence[Audio], language: str, *, decoder: Decoder = "rnnt"
    ) -> Transcription | list[Transcription]:
        """Return one transcript per file, in order. A single file returns a single transcript.

        Clips of all files share batches. Files are decoded one after another while clips are transcribed, so memory
        does not grow with their length. `language` is the model's code, an English name or a FLORES code.

        Raises RequestError for an unknown language and for audio that cannot be read; the error names the file. Raises
        ConfigError for a file that cannot be opened.
        """
        code = model_language(language, self.languages)
        if decoder not in get_args(Decoder):
            raise RequestError(f"decoder must be {' or '.join(get_args(Decoder))}; got {decoder!r}", param="decoder")
        is_single = isinstance(audio, (str, Path, bytes)) or (isinstance(audio, tuple) and isinstance(audio[1], int))
        files: Sequence[Any] = [audio] if is_single else audio  # type: ignore[assignment] # as checked
        work = _Work(self._engine)
        try:
            results = [self._send(work, index, file, code, decoder) for index, file in enumerate(files)]
            work.finish()
        finally:
            work.abort()
        transcripts = [
            Transcription([word for clip in clips for word in work.words[clip]], duration_s, code)
            for clips, duration_s in results
        ]
        return transcripts[0] if is_single else transcripts

    def _send(self, work: _Work, index: int, file: Audio, language: str, decoder: Decoder) -> tuple[list[str], float]:
        """Send the clips of a file to the engine. Returns their ids and the file's duration in seconds."""
        clips: list[str] = []
        duration_s = 0.0
        try:
            for part in decode(_content(file), self._limits):
                if isinstance(part, Clip):
                    # Silence fills up the last clip of a file, which may be too short for the model.
                    samples = part.samples + bytes(max(0, self._min_bytes - len(part.samples)))
                    clips.append(f"{index}-{len(clips)}")
                    request = Transcribe(request_id=clips[-1], samples=samples, language=language, decoder=decoder)
                    work.add(request, part.start / self._limits.sample_rate)
                else:
                    duration_s = part
        except RequestError as error:
            name = file if isinstance(file, (str, Path)) else f"audio {index}"
            raise RequestError(f"{name}: {error.message}", param=error.param, code=error.code) from error
        return clips, duration_s


class _Work:
    """Tracks the clips of one call: waiting, in the engine, and transcribed.

    `words` holds the words of each transcribed clip by the clip's id.
    """

    def __init__(self, engine: BatchEngine[Transcribe, Transcript]) -> None:
        self.words: dict[str, list[SpokenWord]] = {}
        self._engine = engine
        self._starts: dict[str, float] = {}  # of clips without a transcript, in seconds

    def add(self, request: Transcribe, start_s: float) -> None:
        """Queue a clip that begins at `start_s` of its file, and run the engine while a full batch waits."""
        self._engine.add(request)
        self._starts[request.request_id] = start_s
        while self._engine.stats().waiting_cost >= self._engine.task.max_cost:
            self._step()

    def finish(self) -> None:
        """Transcribe the remaining clips."""
        while self._engine.has_work:
            self._step()

    def abort(self) -> None:
        """End the clips that have no transcript after an error."""
        self._engine.abort(self._starts)
        while self._engine.has_work:
            self._engine.step()

    def _step(self) -> None:
        for transcript in self._engine.step().outputs:
            start_s = self._starts.pop(transcript.request_id)
            assert isinstance(transcript, Transcript)
            self.words[transcript.request_id] = place_words(start_s, transcript.words)


def _content(file: Audio) -> bytes:
    """Return the content of an audio file. Samples are converted to a file.

    Raises ConfigError if the file cannot be opened, and RequestError if the samples cannot be used.
    """
    if isinstance(file, bytes):
        return file
    if isinstance(file, (str, Path)):
        with file_errors("read", file):
            return Path(file).read_bytes()
    import soundfile

    samples, rate = np.asarray(file[0]), file[1]
    if samples.dtype.name not in _SAMPLE_TYPES or samples.ndim not in (1, 2):
        raise RequestError(
            f"samples must be [frames] or [frames, channels] of {', '.join(_SAMPLE_TYPES)}; "
            f"got {samples.dtype} of shape {list(samples.shape)}",
            param="audio",
        )
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format="WAV", subtype="FLOAT")
    return written.getvalue()
