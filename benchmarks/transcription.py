"""Seconds of audio per second that IndicConformer transcribes offline, with CTC and with RNN-T; latency of a clip.

16-bit samples in host memory in, words with times out, through the batch engine. A level of c is c clips of uniform
random lengths that start together, the longest first. Weights are random: the engine gives RNN-T about 4 tokens per
second, and the head of CTC is changed so that a clip has about --tokens tokens per second, as speech has; a note says
how many they had. The median of the repetitions is quoted, with its share of the floor: the GEMMs of the encoder at the
measured rate. No engine that serves this model could be carried to the machine, so that rows have no peer: the targets
come from the published rates of its class.

    python benchmarks/transcription.py
    python benchmarks/transcription.py --profile rnnt      # kernels of the largest level by their time; prints only
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from bench_output import Row, Target, need_gpu, write_result
from floors import Limits
from torch.nn.utils.rnn import pad_sequence

from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.transcription.engine import TranscriptionTask
from meltcore.models.configs.task_configs import ConformerConfig
from meltcore.protocol.transcription import Transcribe, Transcript
from meltcore.settings.config import EngineConfig

PUBLISHED = "ai4bharat/indic-conformer-600m-multilingual"
Decoder = Literal["ctc", "rnnt"]
DECODERS: tuple[Decoder, ...] = ("ctc", "rnnt")
RATE, LATENCY = "x real time", "ms"
FAST = {"ctc": Target(10_000.0), "rnnt": Target(7_000.0)}
SOON = {"ctc": Target(15.0, better="lower"), "rnnt": Target(25.0, better="lower")}
LATENCY_S, LATENCY_REPS = 10.0, 15
MAX_BIAS, HALVINGS = 16.0, 12  # random logits are of a size of 1
LATENCY_BOUND_S = 3600.0  # offline, no request waits for the end of a batch


class Clips(NamedTuple):
    """Clips as requests for one decoder, and the seconds of all of them."""

    requests: list[Transcribe]
    audio_s: float


def make_clips(lengths_s: list[float], rate: int, language: str, decoder: Decoder, seed: int) -> Clips:
    """Noise with sliding tones, the longest clip first."""
    generator = np.random.default_rng(seed)
    requests = []
    for index, length_s in enumerate(sorted(lengths_s, reverse=True)):
        time_s = np.arange(round(length_s * rate)) / rate
        tone = np.sin(2 * np.pi * (200 + 3000 * generator.random()) * time_s * (1 + 0.02 * time_s))
        samples = 8000 * tone + 3000 * generator.standard_normal(len(time_s))
        requests.append(
            Transcribe(
                request_id=f"clip-{index}",
                samples=samples.clip(-32768, 32767).astype(np.int16).tobytes(),
                language=language,
                decoder=decoder,
            )
        )
    return Clips(requests, sum(lengths_s))


def spread_tokens(task: TranscriptionTask, lengths_s: list[float], tokens_per_s: float) -> None:
    """Change the random head of CTC so that clips have about as many tokens as asked for, spread over their frames.

    A random encoder says nearly the same at all frames, so that a clip would have no token or one at every frame. The
    mean over the frames is taken out of what the head reads, and the rest scaled to logits of a size of 1. Then the
    bias of the blank is found by halving an interval: with more bias there are fewer tokens.
    """
    model, config = task.model, task.model.config
    language = config.languages[0]
    clips = make_clips(lengths_s, config.features.sample_rate, language, "ctc", seed=0)
    samples = [torch.frombuffer(bytearray(each.samples), dtype=torch.int16) for each in clips.requests]
    padded = pad_sequence(samples, batch_first=True).to(model.device) / 32768
    with torch.inference_mode():
        encoded, frames = model.encode(padded, torch.tensor([len(each) for each in samples], device=model.device))
        read = torch.cat([rows[:count] for rows, count in zip(encoded, frames.tolist(), strict=True)])
        head = model.ctc_head
        head.weight /= head(read).float().std(0).mean()
        head.bias -= head(read).mean(0)
    engine = BatchEngine(task, max_start_s=LATENCY_BOUND_S)
    bias = head.bias[-1:]
    original = bias.clone()
    low, high = -MAX_BIAS, MAX_BIAS
    for _ in range(HALVINGS):
        with torch.inference_mode():
            bias.copy_(original + (low + high) / 2)
        tokens = sum(each.tokens for each in transcribe(engine, clips))
        low, high = ((low + high) / 2, high) if tokens > tokens_per_s * clips.audio_s else (low, (low + high) / 2)


def transcribe(engine: BatchEngine[Transcribe, Transcript], clips: Clips) -> list[Transcript]:
    for request in clips.requests:
        engine.add(request)
    found: list[Any] = []
    while engine.has_work:
        found += engine.step().outputs
    if len(found) != len(clips.requests) or any(each.finish_reason != "stop" for each in found):
        raise RuntimeError(f"{len(found)} of {len(clips.requests)} clips were transcribed")
    return found


def encoder_flops(config: ConformerConfig, frames: list[int]) -> float:
    """Operations of the encoder's GEMMs and attention for clips of these encoder frames."""
    width, total = config.hidden_size, sum(frames)
    layer = 4 * width * config.feed_forward_size + 7 * width**2
    # The last two pointwise convolutions, over the frequencies that are left, and the projection after them
    channels, mels, factor = config.subsampling_channels, config.num_mels, config.subsampling_factor
    subsampling = channels**2 * (mels // 4 * factor // 4 + mels // 8) + channels * mels // 8 * width
    attention = sum(4 * count**2 * width for count in frames)  # scores, their position part of twice the width, values
    return 2.0 * (total * (config.num_layers * layer + subsampling) + config.num_layers * attention)


def measure(task: TranscriptionTask, clips: Clips, reps: int) -> tuple[float, int]:
    """The median seconds of a transcription, after one that warms up, and the tokens of all clips."""
    engine = BatchEngine(task, max_start_s=LATENCY_BOUND_S)
    tokens = sum(each.tokens for each in transcribe(engine, clips))
    times = []
    for _ in range(reps):
        started = time.perf_counter()
        transcribe(engine, clips)
        times.append(time.perf_counter() - started)
    return statistics.median(times), tokens


def profile(task: TranscriptionTask, clips: Clips) -> None:
    """Print the kernels of a transcription by their time."""
    engine = BatchEngine(task, max_start_s=LATENCY_BOUND_S)
    transcribe(engine, clips)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
        transcribe(engine, clips)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"{len(clips.requests)} clips, {clips.audio_s:,.0f} s of audio")
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=PUBLISHED, help="Published name, or a .nemo file.")
    parser.add_argument("--levels", default="1,64,400", help="Clips that start together.")
    parser.add_argument("--lengths", default="5:25", help="Seconds of a clip, LOW:HIGH.")
    parser.add_argument("--tokens", type=float, default=4.0, help="Tokens per second of audio with CTC, about.")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", choices=DECODERS, help="Only print the kernels of the largest level.")
    args = parser.parse_args()
    need_gpu(model=args.model)

    is_gpu = torch.cuda.is_available()
    task = TranscriptionTask(EngineConfig(model=args.model, load_format="dummy", device="cuda" if is_gpu else "cpu"))
    features, language = task.model.config.features, task.model.config.languages[0]
    low, high = map(float, args.lengths.split(":"))
    draw = random.Random(args.seed)
    spread_tokens(task, [high] * 4, args.tokens)
    levels = [int(level) for level in args.levels.split(",")]
    limits = Limits.measure() if is_gpu else None
    rows, notes = [], []
    lengths = {level: [draw.uniform(low, high) for _ in range(level)] for level in levels}
    for decoder in DECODERS:
        if args.profile:
            if args.profile == decoder:
                profile(task, make_clips(lengths[levels[-1]], features.sample_rate, language, decoder, args.seed))
            continue
        clips = make_clips([LATENCY_S], features.sample_rate, language, decoder, args.seed)
        taken_s, _ = measure(task, clips, LATENCY_REPS)
        target = SOON[decoder] if args.model == PUBLISHED else None
        rows.append(
            Row(work=f"{decoder}, a clip of {LATENCY_S:.0f} s", unit=LATENCY, value=taken_s * 1000, target=target)
        )
        for level in levels:
            clips = make_clips(lengths[level], features.sample_rate, language, decoder, args.seed)
            taken_s, tokens = measure(task, clips, args.reps)
            row = Row(
                work=f"{decoder}, {level} clip{'s' * (level != 1)} of {low:g} to {high:g} s",
                unit=RATE,
                value=clips.audio_s / taken_s,
            )
            if args.model == PUBLISHED and level == levels[-1]:
                row.target = FAST[decoder]
            if limits:
                flops = encoder_flops(task.model.config.encoder, [task.cost(each) for each in clips.requests])
                row.limit_share = flops / limits.flops_per_us / 1e6 / taken_s
            rows.append(row)
            notes.append(f"{row.work}: {clips.audio_s:,.0f} s of audio, {tokens / clips.audio_s:.1f} tokens per second")
            print(f"{row.work}: {row.value:,.0f} x real time, {taken_s * 1000:,.1f} ms", flush=True)
    if args.profile:
        return
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    notes.append(f"{task.ready().dtype}, random weights, batches of at most {task.max_cost:,} encoder frames")
    write_result(rows, versions, notes, subject=args.model, gpus=int(is_gpu))


if __name__ == "__main__":
    main()
