"""Describes the task transcription to measurements: the clips to upload, and their transcripts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.definitions import Definition
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.load.config import LoadConfig, parse_range, published_workload, workload_fields
from meltcore.measure.load.record import TaskWork
from meltcore.measure.load.tasks.task import (
    DemoStep,
    MeasuredTask,
    Problem,
    ServedModel,
    Sizes,
    ThroughputUnit,
    task_load,
    work,
)
from meltcore.measure.load.wire.response import TextResponse
from meltcore.measure.load.workloads.sentences import make_grader
from meltcore.measure.load.workloads.workload import Clip, Prompt, Workload

PATH = "/v1/audio/transcriptions"
DEFAULT_SECONDS, DEFAULT_NUM_CLIPS = "5-25", 64
MAX_NUM_CLIPS = 10_000
_SMALL_SECONDS, _SMALL_NUM_CLIPS = "2-4", 16
DEMO_LANGUAGE = "en"
_DEMO_CLIP_S = (3.0, 8.0)


def _open(config: LoadConfig, num_requests: int, clips: Sequence[Clip]) -> Workload:
    from meltcore.measure.load.workloads.clips import read_manifest

    spec = config.workload
    fields = workload_fields(spec, ("language", "seconds", "clips", "decoder", "manifest"))
    if "language" not in fields:
        raise ConfigError(f"workload {spec}: needs language=CODE, such as language=kn")
    if not clips and "manifest" in fields:
        clips = read_manifest(Path(fields["manifest"]))
    elif not clips:
        clips = _make_pool(spec, fields, num_requests, config.seed)
    form = {"language": fields["language"]} | ({"decoder": fields["decoder"]} if "decoder" in fields else {})

    def prompt(index: int) -> Prompt:
        clip_idx = index % len(clips)
        clip = clips[clip_idx]
        return Prompt(PATH, form, make_grader([clip.transcript]), TaskWork(audio_s=clip.seconds), clip_idx)

    is_graded = all(clip.transcript is not None for clip in clips)
    return Workload(published_workload(spec), prompt, is_graded, TextResponse, tuple(clips))


def _make_pool(spec: str, fields: dict[str, str], num_requests: int, seed: int) -> list[Clip]:
    from meltcore.measure.load.workloads.clips import make_clips

    num_clips = parse_range(fields.get("clips", str(DEFAULT_NUM_CLIPS)), f"workload {spec}: clips").high
    if num_clips > MAX_NUM_CLIPS:
        raise ConfigError(f"workload {spec}: clips may be at most {MAX_NUM_CLIPS:,}; got {num_clips:,}")
    seconds = parse_range(fields.get("seconds", DEFAULT_SECONDS), f"workload {spec}: seconds")
    return make_clips(seed, min(num_clips, num_requests), seconds)


def _default_workload(model: ServedModel, sizes: Sizes) -> str:
    languages = [str(each) for each in model.card.get("languages") or []]
    language = "kn" if "kn" in languages or not languages else languages[0]
    seconds = _SMALL_SECONDS if model.is_small else sizes.clip_s.text
    num_clips = _SMALL_NUM_CLIPS if model.is_small else DEFAULT_NUM_CLIPS
    return f"transcribe:language={language},seconds={seconds},clips={num_clips}"


def _facts(level: LevelResult) -> list[tuple[str, str]]:
    return [
        ("Transcribed", f"{format_number(task_load(level).work)} s of audio"),
        ("Answers without text", f"{task_load(level).empty_answers:,}"),
    ]


def clips(seed: int, num_clips: int = 48) -> list[Problem]:
    """Return held-out clips with their transcripts."""
    import numpy as np

    from meltcore.measure.load.workloads.clips import SAMPLE_RATE, encode_wav
    from meltcore.measure.problems.tones import render, tone_clip

    rng = random.Random(f"demo/{seed}")  # noqa: S311 - must repeat for a seed
    problems = []
    for index in range(num_clips):
        clip = tone_clip(rng, "heldout", rng.uniform(*_DEMO_CLIP_S))
        samples = np.asarray(render(clip, SAMPLE_RATE, seed=index) * 32767, dtype=np.int16)
        text = clip.text(DEMO_LANGUAGE)
        problems.append(Problem(f"clip {index}, {clip.duration_s:.1f} s", text, encode_wav(samples)))
    return problems


def _write_clips(folder: Path, problems: Sequence[Problem]) -> str:
    lines = []
    for index, problem in enumerate(problems):
        (folder / f"clip-{index}.wav").write_bytes(problem.audio_wav or b"")
        lines.append(json.dumps({"audio_filepath": f"clip-{index}.wav", "text": problem.answer}) + "\n")
    path = folder / "clips.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return f"transcribe:language={DEMO_LANGUAGE},manifest={path}"


TASK = MeasuredTask(
    word="transcribe",
    usage=(("transcribe:language=kn,seconds=5-25", "made clips (clips=64; decoder=ctc; manifest=PATH)"),),
    uploads=True,
    share=12.0,
    demo_share=7.7,
    open=_open,
    default_workload=_default_workload,
    work_of=lambda record: work(record).audio_s,
    may_be_empty=True,  # a clip need not hold speech
    unit=ThroughputUnit("rtfx", "RTFx: audio seconds transcribed per second", "RTFx", "RTFx"),
    definitions=(
        Definition(
            "rtfx",
            "RTFx",
            "s/s",
            "Seconds of audio transcribed, divided by the seconds of the whole level: the inverse real-time factor, "
            "with the upload of every clip included. Latency per clip is end to end.",
        ),
    ),
    facts=_facts,
    step=DemoStep(16, clips, _write_clips),
)
