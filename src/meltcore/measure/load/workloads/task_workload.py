"""Provides the requests of translation, transcription and synthesis, and encodes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import (
    FIRST_AUDIO,
    IntRange,
    LoadConfig,
    parse_fields,
    parse_range,
    published_workload,
)
from meltcore.measure.load.record import TaskWork
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.workloads.clips import DEFAULT_NUM_CLIPS, Clip, make_clips, read_manifest
from meltcore.measure.load.workloads.dispatcher import MakeResponse
from meltcore.measure.load.workloads.sentences import check_script, make_sentence, script_of
from meltcore.measure.load.workloads.task_response import (
    SpeechFormat,
    SpeechResponse,
    TranscriptionResponse,
    TranslationResponse,
)
from meltcore.measure.load.workloads.workload import EncodedRequest, Prompt, Workload

TRANSLATE_PATH = "/v1/translate"
TRANSCRIPTIONS_PATH = "/v1/audio/transcriptions"
SPEECH_PATH = "/v1/audio/speech"

DEFAULT_WORDS, DEFAULT_SECONDS = "8-40", "5-25"
MAX_NUM_CLIPS = 10_000

_BOUNDARY = "meltcore-load-5b8f0c1e7a"


class _Line(NamedTuple):
    """One text of a file, and the right answer where there is one."""

    text: str
    answer: str | None


def is_task(spec: str) -> bool:
    """Return whether `spec` describes a workload of a task other than generation."""
    return spec.partition(":")[0] in _WORKLOADS


def sends_clips(spec: str) -> bool:
    """Return whether the requests of a workload upload audio."""
    return spec.partition(":")[0] == "transcribe"


def load_task_workload(spec: str, *, num_requests: int, seed: int, clips: Sequence[Clip] = ()) -> Workload:
    """Open the workload that `spec` describes: translate:..., transcribe:... or speak:...

    `clips` are those of the run, where they have been made. Raises ConfigError for a malformed `spec` or file.
    """
    kind, _, options_text = spec.partition(":")
    return _WORKLOADS[kind](spec, options_text, num_requests, seed, clips)


def check_task_options(config: LoadConfig, workload: Workload) -> None:
    """Raise ConfigError for an option of `config` that has no meaning for the task of `workload`."""
    task = workload.task
    latencies = ("e2e", FIRST_AUDIO) if task == "synthesis" else ("e2e",)
    unknown = [name for name in config.slo_ms if name not in latencies]
    if unknown:
        raise ConfigError(f"--goodput: {', '.join(unknown)} is not measured of {task}; {', '.join(latencies)} is")
    options = {
        "--max-tokens": config.max_tokens is not None,
        "--tokenizer": config.tokenizer is not None,
        "--no-stream": not config.stream,
        "--record-event-times": config.record_event_times,
    }
    for name, is_given in options.items():
        if is_given:
            raise ConfigError(f"{name} is for generation; the workload {config.workload} is {task}")


def task_response_maker(workload: Workload) -> MakeResponse:
    """Return what makes the readers of the answers of a task."""
    if workload.task == "translation":
        return TranslationResponse
    if workload.task == "transcription":
        return TranscriptionResponse
    return partial(SpeechResponse, speech_format=cast(SpeechFormat, workload.speech_format))


class TaskRequestBuilder:
    """Builds request `i` of a level from prompt `first_prompt_idx + i`. The request of a clip is encoded once."""

    def __init__(
        self, config: LoadConfig, target: Target, model: str, workload: Workload, first_prompt_idx: int
    ) -> None:
        self.target = target
        self._fields = {"model": model, **config.extra_body}
        self._workload = workload
        self._first_prompt_idx = first_prompt_idx
        self._keep_text = config.keep_text
        self._clip_requests: dict[int, bytes] = {}

    def build(self, index: int) -> EncodedRequest:
        """Encode the request `index`, which counts from 0 within the level."""
        prompt = self._workload.make_prompt(self._first_prompt_idx + index)
        fields = {**self._fields, **prompt.fields}
        if prompt.clip_idx is None:
            body = msgspec.json.encode(fields)
            data = self.target.encode_head("POST", prompt.path, len(body)) + body
        else:
            data = self._clip_requests.get(prompt.clip_idx) or self._encode_clip(prompt.path, fields, prompt.clip_idx)
        return EncodedRequest(index, data, prompt.grade, self._keep_text, needs_token_count=False, work=prompt.work)

    def _encode_clip(self, path: str, fields: dict[str, Any], clip_idx: int) -> bytes:
        """Return the upload of a clip. Connections share its bytes: 10,000 copies of 0.5 MB would fill the memory."""
        clip = self._workload.clips[clip_idx]
        body = encode_form(fields, clip.name, clip.data)
        head = self.target.encode_head("POST", path, len(body), f"multipart/form-data; boundary={_BOUNDARY}")
        return self._clip_requests.setdefault(clip_idx, head + body)


def encode_form(fields: dict[str, Any], file_name: str, data: bytes) -> bytes:
    """Encode a multipart form with `fields` and one `file`."""
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    disposition = f'Content-Disposition: form-data; name="file"; filename="{file_name}"'
    parts.append(f"--{_BOUNDARY}\r\n{disposition}\r\nContent-Type: application/octet-stream\r\n\r\n".encode())
    return b"".join([*parts, data, f"\r\n--{_BOUNDARY}--\r\n".encode()])


def _translation_workload(
    spec: str, options_text: str, num_requests: int, seed: int, clips: Sequence[Clip]
) -> Workload:
    del num_requests, clips
    fields = _parse_options(options_text, spec, ("src", "tgt", "words", "sentences", "script", "file"))
    if "src" not in fields or "tgt" not in fields:
        raise ConfigError(f"workload {spec}: needs src=LANGUAGE and tgt=LANGUAGE, such as src=eng_Latn,tgt=kan_Knda")
    counts = parse_range(fields.get("sentences", "1"), f"workload {spec}: sentences")
    texts = _Texts(spec, fields, fields["src"])
    languages = {"src_lang": fields["src"], "tgt_lang": fields["tgt"]}

    def prompt(index: int) -> Prompt:
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 - must repeat for a seed
        num_sentences = rng.randint(*counts)
        # Sentences of a file follow one another: request i has those from i * (the most of a request) on.
        lines = [texts.line(index * counts.high + each, rng) for each in range(num_sentences)]
        sentences = [line.text for line in lines]
        work = TaskWork(sentences=num_sentences, source_chars=sum(map(len, sentences)))
        grade = _make_grader([line.answer for line in lines])
        return Prompt(TRANSLATE_PATH, {**languages, "sentences": sentences}, grade, work)

    return Workload(published_workload(spec), prompt, texts.are_graded, task="translation")


def _transcription_workload(
    spec: str, options_text: str, num_requests: int, seed: int, clips: Sequence[Clip]
) -> Workload:
    fields = _parse_options(options_text, spec, ("language", "seconds", "clips", "decoder", "manifest"))
    if "language" not in fields:
        raise ConfigError(f"workload {spec}: needs language=CODE, such as language=kn")
    if not clips and "manifest" in fields:
        clips = read_manifest(Path(fields["manifest"]))
    elif not clips:
        clips = _make_pool(spec, fields, num_requests, seed)
    form = {"language": fields["language"]} | ({"decoder": fields["decoder"]} if "decoder" in fields else {})

    def prompt(index: int) -> Prompt:
        clip_idx = index % len(clips)
        clip = clips[clip_idx]
        return Prompt(
            TRANSCRIPTIONS_PATH, form, _make_grader([clip.transcript]), TaskWork(audio_s=clip.seconds), clip_idx
        )

    is_graded = all(clip.transcript is not None for clip in clips)
    return Workload(published_workload(spec), prompt, is_graded, task="transcription", clips=tuple(clips))


def _make_pool(spec: str, fields: dict[str, str], num_requests: int, seed: int) -> list[Clip]:
    num_clips = parse_range(fields.get("clips", str(DEFAULT_NUM_CLIPS)), f"workload {spec}: clips").high
    if num_clips > MAX_NUM_CLIPS:
        raise ConfigError(f"workload {spec}: clips may be at most {MAX_NUM_CLIPS:,}; got {num_clips:,}")
    seconds = parse_range(fields.get("seconds", DEFAULT_SECONDS), f"workload {spec}: seconds")
    return make_clips(seed, min(num_clips, num_requests), seconds)


def _synthesis_workload(spec: str, options_text: str, num_requests: int, seed: int, clips: Sequence[Clip]) -> Workload:
    del num_requests, clips
    fields = _parse_options(options_text, spec, ("voice", "language", "words", "script", "file", "format"))
    speech_format = fields.get("format", "wav")
    if speech_format not in get_args(SpeechFormat):
        raise ConfigError(
            f"workload {spec}: format {speech_format} is not one of {', '.join(get_args(SpeechFormat))}, "
            f"whose length is known without decoding"
        )
    texts = _Texts(spec, fields, fields.get("language", ""))
    voice = {"voice": fields["voice"]} if "voice" in fields else {}
    common = {**voice, "response_format": speech_format}

    def prompt(index: int) -> Prompt:
        text = texts.line(index, random.Random(f"{seed}/{index}")).text  # noqa: S311 - must repeat for a seed
        return Prompt(SPEECH_PATH, {**common, "input": text}, None, TaskWork(source_chars=len(text)))

    return Workload(published_workload(spec), prompt, False, task="synthesis", speech_format=speech_format)


class _Texts:
    """Returns texts: those of `file`, one a line with an answer behind a tab, or sentences of random words."""

    def __init__(self, spec: str, fields: dict[str, str], language: str) -> None:
        self._words: IntRange = parse_range(fields.get("words", DEFAULT_WORDS), f"workload {spec}: words")
        self._script = check_script(fields.get("script", script_of(language)), f"workload {spec}")
        self._lines = _read_lines(Path(fields["file"])) if "file" in fields else []
        given = [name for name in ("words", "script") if self._lines and name in fields]
        if given:
            raise ConfigError(f"workload {spec}: {given[0]} is for made sentences, and file gives the texts")

    @property
    def are_graded(self) -> bool:
        """Return whether every text has an answer."""
        return bool(self._lines) and all(line.answer is not None for line in self._lines)

    def line(self, index: int, rng: random.Random) -> _Line:
        """Return text `index` of the run; made ones are drawn from `rng`."""
        if self._lines:
            return self._lines[index % len(self._lines)]
        return _Line(make_sentence(rng, rng.randint(*self._words), self._script), None)


def _read_lines(path: Path) -> list[_Line]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts {path}: cannot be read ({error})") from error
    parts = [line.rstrip("\r").partition("\t") for line in lines if line.strip()]
    if not parts:
        raise ConfigError(f"texts {path}: the file has no texts")
    return [_Line(text, answer if separator else None) for text, separator, answer in parts]


def _make_grader(answers: list[str | None]) -> Callable[[str], bool] | None:
    """Return the grader of an answer whose texts must be `answers`, but for spaces around each."""
    if any(answer is None for answer in answers):
        return None
    expected = [str(answer).strip() for answer in answers]
    return lambda text: [line.strip() for line in text.split("\n")] == expected


def _parse_options(text: str, spec: str, names: tuple[str, ...]) -> dict[str, str]:
    return parse_fields(text, f"workload {spec}", names)


_WORKLOADS = {"translate": _translation_workload, "transcribe": _transcription_workload, "speak": _synthesis_workload}
