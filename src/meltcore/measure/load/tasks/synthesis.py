"""Describes the task synthesis to measurements: the texts to speak, and the speech that the server returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.definitions import Definition
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.load.config import LoadConfig, workload_fields
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.tasks.task import (
    END_TO_END,
    Latency,
    MeasuredTask,
    Metric,
    Problem,
    ReadBack,
    ServedModel,
    Sizes,
    ThroughputUnit,
    percentile,
    task_load,
    work,
)
from meltcore.measure.load.tasks.transcription import DEMO_LANGUAGE
from meltcore.measure.load.tasks.transcription import PATH as READER_PATH
from meltcore.measure.load.wire.response import COMPLETE, BaseResponse, Failure
from meltcore.measure.load.workloads.sentences import TEXT_OPTIONS, text_workload
from meltcore.measure.load.workloads.wav import WavReader
from meltcore.measure.load.workloads.workload import Clip, Prompt, Workload

PATH = "/v1/audio/speech"
# OpenAI's `pcm` has no header: 16-bit mono at 24 kHz.
PCM_RATE, PCM_BYTES_PER_S = 24_000, 48_000
_SMALL_WORDS, _WORDS = "2-4", "8-16"
_NUM_DEMO_TEXTS = 8  # the slowest work of all on a CPU

SpeechFormat = Literal["wav", "pcm"]


class SpeechResponse(BaseResponse):
    """Reads the answer of POST /v1/audio/speech and measures the length of its audio. The audio is not stored."""

    __slots__ = ("_first_audio_s", "_pcm_bytes", "_wav")

    CONTENT_TYPES = ("audio/", "application/octet-stream")
    WRONG_TYPE_FAILURE = "not audio"

    def __init__(
        self,
        record: RequestRecord,
        on_done: Callable[[Any], None],
        *,
        speech_format: SpeechFormat = "wav",
        keep_text: bool = False,
        max_output_tokens: int | None = None,
    ) -> None:
        """Store the record that the answer fills. `keep_text` and `max_output_tokens` have no effect on speech."""
        del keep_text, max_output_tokens
        super().__init__(record, on_done)
        self._wav = WavReader() if speech_format == "wav" else None
        self._pcm_bytes = 0
        self._first_audio_s = 0.0

    @property
    def audio_s(self) -> float:
        """Return how many seconds of audio have arrived."""
        return self._pcm_bytes / PCM_BYTES_PER_S if self._wav is None else self._wav.seconds

    def on_body(self, data: bytes) -> None:
        """Measure the audio in `data`, or collect the body of an error response."""
        if self.record.status != 200:
            super().on_body(data)
            return
        if self._wav is None:
            self._pcm_bytes += len(data)
        else:
            self._wav.feed(data)
        if not self._first_audio_s and self.audio_s:
            self._first_audio_s = self.now_s

    def _find_failure(self) -> Failure:
        wav = self._wav
        if wav is not None and wav.problem is not None:
            return "bad audio", wav.problem
        if not self.audio_s:
            return "empty answer", "no audio"
        if wav is not None and wav.missing_bytes:
            return "truncated audio", f"{wav.missing_bytes:,} bytes that the WAV header promises are missing"
        return COMPLETE

    def _complete_record(self) -> None:
        self.record.first_text_s = self._first_audio_s
        self.record.work = TaskWork(audio_s=self.audio_s)


def _open(config: LoadConfig, _num_requests: int, _clips: Sequence[Clip]) -> Workload:
    spec = config.workload
    names = ("voice", "language", "format")
    fields = workload_fields(spec, (*names, *TEXT_OPTIONS))
    speech_format = fields.get("format", "wav")
    if speech_format not in get_args(SpeechFormat):
        raise ConfigError(
            f"workload {spec}: format {speech_format} is not one of {', '.join(get_args(SpeechFormat))}, "
            f"whose length is known without decoding"
        )
    reader = partial(SpeechResponse, speech_format=cast(SpeechFormat, speech_format))
    voice = {"voice": fields["voice"]} if "voice" in fields else {}
    common = {**voice, "response_format": speech_format}

    def request(text: str) -> Prompt:
        return Prompt(PATH, {**common, "input": text}, None, TaskWork(source_chars=len(text)))

    return text_workload(config, request, reader, names=names, language=fields.get("language", ""))


def _default_workload(model: ServedModel, _sizes: Sizes) -> str:
    if model.is_small:
        return f"speak:words={_SMALL_WORDS}"
    spoken = "language=kan_Knda," if "kn" in (model.card.get("languages") or []) else ""
    return f"speak:{spoken}words={_WORDS}"


def _details(records: Sequence[RequestRecord], _duration_s: float) -> dict[str, Any]:
    from meltcore.measure.documents.values.percentiles import distribution

    return {
        "first_audio_ms": distribution([(record.first_text_s - record.intended_s) * 1000 for record in records]),
        "real_time_factor": distribution(
            [(record.ended_s - record.intended_s) / work(record).audio_s for record in records]
        ),
    }


def _facts(level: LevelResult) -> list[tuple[str, str]]:
    return [("Synthesized", f"{format_number(task_load(level).work)} s of audio")]


def spoken_texts(seed: int) -> list[Problem]:
    """Return texts to speak, made of words that no training text has."""
    from meltcore.measure.problems.tones import random_word

    rng = random.Random(f"demo/texts/{seed}")  # noqa: S311 - must repeat for a seed
    texts = (" ".join(random_word(rng, "heldout") for _ in range(rng.randint(2, 3))) for _ in range(_NUM_DEMO_TEXTS))
    return [Problem(text, text) for text in texts]


def _make_reader_problem(problem: Problem, speech: bytes) -> Problem:
    import numpy as np

    from meltcore.measure.load.workloads.clips import encode_wav
    from meltcore.measure.problems.tones import in_alphabet

    audio = encode_wav(np.frombuffer(speech, dtype="<i2"), PCM_RATE)
    return Problem(f"spoken: {problem.given}", in_alphabet(problem.answer, DEMO_LANGUAGE), audio)


TASK = MeasuredTask(
    word="speak",
    usage=(("speak:voice=NAME,words=8-40", "made texts to speak (language=kan_Knda; format=wav|pcm; file=PATH)"),),
    share=3.0,
    demo_share=0.3,  # on a CPU, speech costs about 400 times as much as a short answer
    open=_open,
    default_workload=_default_workload,
    slo_metrics=("e2e", "first_audio"),
    work_of=lambda record: work(record).audio_s,
    details=_details,
    unit=ThroughputUnit("audio_s_per_s", "Audio seconds per second", "audio s/s", "audio s/s"),
    first_key="first_audio_ms",
    latencies=(
        Latency("first_audio_ms", "Time to first audio", "First audio, ms", ("1st audio\np50 ms", "\np99")),
        Latency("real_time_factor", "Real-time factor", "Real-time factor", ("RTF\np50", "\np99"), "s/s"),
        END_TO_END,
    ),
    distributions=("first_audio_ms", "e2e_ms", "queue_delay_ms", "real_time_factor"),
    metrics=(
        Metric("first audio p50 ms", percentile("first_audio_ms", "p50"), "lower"),
        Metric("first audio p99 ms", percentile("first_audio_ms", "p99"), "lower"),
        Metric("real-time factor p50", percentile("real_time_factor", "p50"), "lower"),
    ),
    definitions=(
        Definition(
            "audio_s_per_s",
            "Audio s/s",
            "s/s",
            "Seconds of audio synthesized by succeeded requests, divided by the seconds of the whole level.",
        ),
        Definition(
            "first_audio_ms",
            "First audio",
            "ms",
            "From the intended start of a request to its first sample: the first byte behind the headers of HTTP and "
            "WAV.",
        ),
        Definition(
            "real_time_factor",
            "Real-time factor",
            "ratio",
            "End to end of one request, divided by the seconds of its audio. Below 1, speech comes faster than it "
            "plays.",
        ),
    ),
    facts=_facts,
    read_back=ReadBack(
        READER_PATH, spoken_texts, lambda text: {"input": text, "response_format": "pcm"}, _make_reader_problem
    ),
)
