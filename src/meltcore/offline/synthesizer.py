"""Provides the offline API of speech synthesis: a checkpoint in this process, for scripts and tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meltcore.audio.decode import AudioLimits, Clip, decode
from meltcore.common.errors import RequestError
from meltcore.common.files import file_errors
from meltcore.engine.synthesis.engine import SynthesisTask
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.protocol.synthesis import Synthesize, Synthesized
from meltcore.settings.config import DType, EngineConfig, LoadFormat

Samples = npt.NDArray[np.float32]
# A file's path, its content, or mono float32 samples at the model's rate
Reference = str | Path | bytes | Samples

# Offline, no request of higher priority waits for the end of a batch: batches are as large as memory allows.
_MAX_START_S = 3600.0
# Of a file with silence around its speech.
_MAX_FILE_S = 60.0


class Synthesizer:
    """Speaks texts offline: `Synthesizer("ai4bharat/IndicF5").synthesize("नमस्ते।", "PAN_F (Happy)")`."""

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
        """Load a checkpoint of IndicF5 from a local folder or a hub id.

        Raises ConfigError for a setting that cannot work.

        The other parameters are fields of EngineConfig. The default dtype is bfloat16 on a GPU and float32 on a CPU.
        `seed` makes dummy weights.
        """
        config = EngineConfig(
            model=model, device=device, dtype=dtype, load_format=load_format, memory_bytes=memory_bytes, seed=seed
        )
        task = SynthesisTask(config)
        ready = task.ready()
        self._engine: BatchEngine[Synthesize, Synthesized] = BatchEngine(task, max_start_s=_MAX_START_S)
        self._ids = count()
        self.voices: list[str] = ready.voices
        self.sample_rate: int = ready.sample_rate

    def synthesize(
        self,
        texts: str | Sequence[str],
        voice: str = "",
        *,
        reference: Reference | None = None,
        reference_text: str = "",
        speed: float = 1.0,
        seed: int = 0,
        num_steps: int = 0,
    ) -> Samples | list[Samples]:
        """Return the speech of each text in order, as float32 mono samples at `sample_rate`.

        A single text returns a single array of samples.

        All texts share batches, and a text's speech does not depend on the other texts. `voice` is one of `voices`, by
        default the first. `reference` replaces `voice`: audio in which `reference_text` is spoken. A `speed` of 2 is
        twice as fast, and another `seed` gives another rendering. `num_steps` is 32, 16 or 8; 0 means 32. Raises
        RequestError for a text, voice, reference or setting that cannot be served, and ConfigError for a file that
        cannot be opened.
        """
        text_list = [texts] if isinstance(texts, str) else list(texts)
        requests = [self._request(text, voice, reference, reference_text, speed, seed, num_steps) for text in text_list]
        parts: dict[str, list[Samples]] = {request.request_id: [] for request in requests}
        for request_id, samples in self._run(requests):
            parts[request_id].append(samples)
        speech = [np.concatenate(parts[request.request_id]) for request in requests]
        return speech[0] if isinstance(texts, str) else speech

    def stream(
        self,
        text: str,
        voice: str = "",
        *,
        reference: Reference | None = None,
        reference_text: str = "",
        speed: float = 1.0,
        seed: int = 0,
        num_steps: int = 0,
    ) -> Generator[Samples, None, None]:
        """Yield the speech of a text chunk by chunk, as soon as a chunk is spoken.

        The joined chunks equal the speech that `synthesize` returns.
        """
        request = self._request(text, voice, reference, reference_text, speed, seed, num_steps)
        for _, samples in self._run([request]):
            yield samples

    def _request(
        self, text: str, voice: str, reference: Reference | None, words: str, speed: float, seed: int, num_steps: int
    ) -> Synthesize:
        if not isinstance(text, str):
            raise RequestError(f"a text must be a string; got {type(text).__name__}", param="texts")
        if reference is None and not voice and self.voices:
            voice = self.voices[0]
        return Synthesize(
            request_id=str(next(self._ids)),
            text=text,
            voice=voice,
            reference=b"" if reference is None else self._reference_bytes(reference),
            reference_text=words,
            speed=speed,
            seed=seed,
            num_steps=num_steps,
        )

    def _run(self, requests: list[Synthesize]) -> Iterator[tuple[str, Samples]]:
        """Yield the request id and the samples of each chunk when it is complete.

        All requests are ended when the iteration ends, also after an error.
        """
        open_ids: set[str] = set()
        try:
            for request in requests:
                self._engine.add(request)
                open_ids.add(request.request_id)
            while self._engine.has_work:
                for result in self._engine.step().outputs:
                    assert isinstance(result, Synthesized)
                    if result.finish_reason not in (None, "stop"):
                        raise RequestError(result.error or "the engine ended the request", status=500)
                    if result.finish_reason is not None:
                        open_ids.discard(result.request_id)
                    yield result.request_id, np.frombuffer(result.samples, np.float32)
        finally:
            self._engine.abort(open_ids)
            while open_ids and self._engine.has_work:
                self._engine.step()

    def _reference_bytes(self, reference: Reference) -> bytes:
        """Return the samples of a reference as the bytes that a request for speech carries.

        Raises ConfigError if the file cannot be opened, and RequestError if the audio cannot be used.
        """
        if isinstance(reference, np.ndarray):
            if reference.dtype != np.float32 or reference.ndim != 1:
                raise RequestError(
                    f"reference samples must be [samples] of float32; got {reference.dtype} of shape "
                    f"{list(reference.shape)}",
                    param="reference",
                )
            return reference.tobytes()
        if isinstance(reference, (str, Path)):
            with file_errors("read", reference):
                content = Path(reference).read_bytes()
        else:
            content = reference
        limits = AudioLimits(self.sample_rate, max_clip_s=_MAX_FILE_S, max_audio_s=_MAX_FILE_S)
        clips = [part.samples for part in decode(content, limits) if isinstance(part, Clip)]
        samples = np.frombuffer(b"".join(clips), np.int16)
        return (samples.astype(np.float32) / np.iinfo(np.int16).max).tobytes()
