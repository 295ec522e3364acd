"""Every request of a throughput evaluation, made before its clock starts and written as a workload file."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meltcore.errors import ConfigError
from meltcore.evals.spot_checks import SpotCheck, draw
from meltcore.evals.throughput_prompts import TextMaker, random_ids
from meltcore.load.workload import WHOLE_LENGTH
from meltcore.results.weights import WEIGHTS

WARMUPS = 2
SPOT_CHECKS = 2
REUSED_PROMPTS = 128
LEVELS = tuple(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """What is asked for. `fixed_output`: every answer has exactly `output_tokens` tokens, its end token ignored.

    `reuse_prompts` takes all levels' prompts from the same 128, warm-ups too, as the hackathon's harness does: a prefix
    cache then answers for the model. `stream` False asks for whole answers, which have neither TTFT nor ITL, as that
    harness does. `speed_only` sends token ids, ignores end tokens and checks no answer.
    """

    url: str
    levels: tuple[int, ...] = LEVELS
    requests: int = 64  # a level
    input_tokens: int = 1024
    output_tokens: int = 1024
    fixed_output: bool = False
    reuse_prompts: bool = False
    speed_only: bool = False
    stream: bool = True
    continuous_usage: bool = True  # ask for token counts with every chunk; some servers refuse the field
    tokenizer: str | None = None  # tokenizer.json or its folder; speed alone takes ids below 30,000 without
    seed: int = 0
    model: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels must be different numbers of at least 1; got {self.levels}")
        for name in ("requests", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if self.requests < max(self.levels):
            raise ConfigError(f"--requests {self.requests} are never {max(self.levels)} at once, as a level asks")
        if self.requests <= SPOT_CHECKS and not self.speed_only:
            raise ConfigError(f"--requests {self.requests} leaves none beside the {SPOT_CHECKS} spot checks of a level")
        if self.tokenizer is None and not self.speed_only:
            raise ConfigError("prompts are made and answers re-counted with the model's tokenizer: give --tokenizer")


@dataclass(frozen=True)
class Planned:
    """One request: its line of the workload, and what is known of it beforehand."""

    line: dict[str, Any]
    text: str | None = None  # what the user says; None: token ids
    check: SpotCheck | None = None


@dataclass(frozen=True)
class Plan:
    """`warmups[i]` and `levels[i]` are the requests of level i, in the order they are sent."""

    warmups: list[list[Planned]]
    levels: list[list[Planned]]

    def write(self, path: Path) -> None:
        """As a workload of the load generator, which takes a level's warm-ups first."""
        lines = [each.line for warm, level in zip(self.warmups, self.levels, strict=True) for each in (*warm, *level)]
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


def make_plan(config: ThroughputConfig, maker: TextMaker | None) -> Plan:
    """The requests of all levels, the same for the same seed. Raises ConfigError as `TextMaker.text`."""
    rng = random.Random(f"throughput/{config.seed}")
    new = _prompt_source(config, maker, rng)
    shared = [new() for _ in range(REUSED_PROMPTS)] if config.reuse_prompts else []
    plan = Plan([], [])
    for _ in config.levels:
        checks = [] if config.speed_only else [_spot_check(config, rng) for _ in range(SPOT_CHECKS)]
        own = config.requests - len(checks)
        plan.warmups.append(shared[:WARMUPS] or [new() for _ in range(WARMUPS)])
        level = [shared[at % len(shared)] for at in range(own)] if shared else [new() for _ in range(own)]
        for check in checks:
            level.insert(rng.randint(0, len(level)), check)
        plan.levels.append(level)
    return plan


def _prompt_source(config: ThroughputConfig, maker: TextMaker | None, rng: random.Random) -> Callable[[], Planned]:
    common: dict[str, Any] = {"max_tokens": config.output_tokens, "temperature": 1.0}
    if config.fixed_output or config.speed_only:
        common |= WHOLE_LENGTH
    among = () if maker is None else (maker.ids,)

    def new() -> Planned:
        if config.speed_only:
            ids = random_ids(rng, config.input_tokens, *among)
            return Planned({**common, "prompt_token_ids": ids})
        assert maker is not None, "ThroughputConfig wants a tokenizer unless speed_only"
        text = maker.text(rng, config.input_tokens)
        return Planned({**common, "messages": [{"role": "user", "content": text}]}, text)

    return new


def _spot_check(config: ThroughputConfig, rng: random.Random) -> Planned:
    check = draw(rng)
    messages = [{"role": "user", "content": check.question}]
    line = {"max_tokens": config.output_tokens, "temperature": 0.0, "messages": messages}
    return Planned(line, check.question, check)
