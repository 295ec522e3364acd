"""The work that our engine and a peer both get: closed batches of requests on random token ids.

All requests start together and have the same number of output tokens. Greedy, end tokens ignored, no prefix cache,
prefill in the wall time. Only the standard library, so that it imports beside any engine.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

LOWEST_ID, VOCAB = 1000, 140_000  # of a prompt's tokens: VOCAB - 1 is the highest
SHORT = "1,10,100,400,1000,2000@128:1024/128"
LONG = "64,256@1024:1024/1024"
MOST_WARM_UP = 2000  # requests: twice the largest batch, so that every shape of a step occurs

# Takes prompts and output tokens per prompt; returns the number of generated tokens.
Generate = Callable[[list[list[int]], int], int]


class Work(NamedTuple):
    """`requests` prompts of uniform length in [low, high], answered with `out` tokens each."""

    requests: int
    low: int
    high: int
    out: int

    def __str__(self) -> str:
        lengths = f"{self.low} to {self.high}" if self.low < self.high else str(self.low)
        return f"{self.requests:,} request{'s' * (self.requests != 1)}, {lengths} in / {self.out} out"


class Meter(Protocol):
    """Watches the GPU during each repetition of a work, outside of its time."""

    def begin(self) -> None: ...

    def end(self, tokens: int, seconds: float) -> None: ...


class Measured(NamedTuple):
    """Output tokens per second of each repetition. prompt_share: of the time, None where it was not measured."""

    work: Work
    rates: list[float]
    prompt_share: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def parse_works(text: str) -> list[Work]:
    """From "C,C@LOW:HIGH/OUT C@LOW:HIGH/OUT": levels, prompt tokens and output tokens."""
    works = []
    for part in text.split():
        levels, _, rest = part.partition("@")
        lengths, _, out = rest.partition("/")
        low, high = map(int, lengths.split(":"))
        works += [Work(int(level), low, high, int(out)) for level in levels.split(",")]
    return works


def measure(
    works: list[Work],
    generate: Generate,
    reps: int,
    seed: int,
    vocab: int = VOCAB,
    *,
    prompt_share: bool = False,
    meter: Meter | None = None,
) -> Iterator[Measured]:
    """Measure each work after its own short warm-up. Equal seeds and vocabularies draw equal prompts anywhere.

    prompt_share: also measure the time of one repetition's prompts, answered with one token each.
    """
    draw = random.Random(seed)
    for work in works:
        prompts = [
            [
                [draw.randrange(min(LOWEST_ID, vocab // 2), vocab) for _ in range(draw.randint(work.low, work.high))]
                for _ in range(work.requests)
            ]
            for _ in range(reps)
        ]
        generate(prompts[0][:MOST_WARM_UP], 8)
        rates = []
        for batch in prompts:
            if meter:
                meter.begin()
            started = time.perf_counter()
            tokens = generate(batch, work.out)
            seconds = time.perf_counter() - started
            if meter:
                meter.end(tokens, seconds)
            rates.append(tokens / seconds)
            if tokens != work.requests * work.out:
                raise RuntimeError(f"{work}: {tokens} tokens came")
        share = None
        if prompt_share:
            started = time.perf_counter()
            generate(prompts[-1], 1)
            share = (time.perf_counter() - started) * statistics.median(rates) / (work.requests * work.out)
        yield Measured(work, rates, share)


def process_age_s() -> float:
    """Seconds since this process was started, imports included; from /proc/self/stat, field 22."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
