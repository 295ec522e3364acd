"""Defines the settings of evaluations and submissions, options of `meltcore eval` and `meltcore submit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meltcore.common.errors import ConfigError
from meltcore.common.options import option
from meltcore.measure.documents.weights import WEIGHTS

CONCURRENCY = 8  # low enough that load is not what is tested
GSM8K_LIMIT = 200
GSM8K_DATASET = "openai/gsm8k"
GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
LEVELS = tuple(WEIGHTS)
NUM_SPOT_CHECKS = 2  # per level

_LOAD_GROUP = "load"


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """Holds the settings of a throughput evaluation.

    With `ignore_eos` every answer has exactly `output_len` tokens. With `reuse_prompts` all levels and warm-ups use the
    same 128 prompts, as the hackathon's harness does, so a prefix cache can serve them. Without `stream` answers are
    not streamed, as in the hackathon's harness, and have no TTFT and no ITL. With `speed_only` prompts are token ids,
    end tokens are ignored and answers are not checked.
    """

    url: str
    levels: tuple[int, ...] = option(LEVELS, "Concurrency of each level.", group=_LOAD_GROUP)
    num_prompts: int = option(64, "Requests per level.", group=_LOAD_GROUP)
    input_len: int = option(1024, "Tokens of each prompt.", group=_LOAD_GROUP)
    output_len: int = option(1024, "Most tokens of each answer.", group=_LOAD_GROUP)
    ignore_eos: bool = option(
        False, "Answers have exactly --output-len tokens: end tokens are ignored.", group=_LOAD_GROUP
    )
    reuse_prompts: bool = option(False, "The same 128 prompts at every level.", group=_LOAD_GROUP)
    stream: bool = option(
        True, "Ask for unstreamed answers, as the public harness does: no TTFT and no ITL.", group=_LOAD_GROUP
    )
    continuous_usage: bool = option(True, "Do not ask for token counts with every event.", group=_LOAD_GROUP)
    speed_only: bool = option(
        False,
        "Send token ids of --tokenizer or the server's vocabulary, ignore end tokens, check no answer: no score.",
        group=_LOAD_GROUP,
    )
    tokenizer: str | None = option(
        None,
        "A tokenizer.json or its folder, a hub id or a bundled model (default: the name of the served model).",
        group=_LOAD_GROUP,
        metavar="PATH",
    )
    seed: int = option(0, "Seed of the prompts (default: a new one each run).", group=_LOAD_GROUP)
    model: str | None = option(None, "Model to ask for (default: the first of /v1/models).", group="server")
    api_key: str | None = option(None, "Bearer token.", group="server", metavar="KEY")

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels must be different numbers of at least 1; got {self.levels}")
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if self.num_prompts <= NUM_SPOT_CHECKS and not self.speed_only:
            raise ConfigError(
                f"--num-prompts {self.num_prompts} leaves none beside the {NUM_SPOT_CHECKS} spot checks of a level"
            )
        if self.tokenizer is None and not self.speed_only:
            raise ConfigError(
                "prompts are made and answers counted with the model's tokenizer: give --tokenizer, or --speed-only"
            )

    @property
    def fixed_output(self) -> bool:
        """Return whether every answer has exactly `output_len` tokens."""
        return self.ignore_eos or self.speed_only


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig:
    """Holds the settings of GSM8K."""

    data: str = option(
        GSM8K_DATASET,
        f"Problems: a JSONL file such as GSM8K's test.jsonl ({GSM8K_URL}) or its folder, meltcore/problems, or a data "
        "set of the hub, which needs the package datasets.",
        group="GSM8K",
        metavar="DATA",
    )
    shots: str | None = option(
        None, "File of eight worked examples, or none (default: lm-eval's, else our own).", group="GSM8K"
    )
    limit: int = option(GSM8K_LIMIT, "Number of problems.", group="GSM8K")
    concurrency: int = option(CONCURRENCY, "Problems asked concurrently.", group="GSM8K")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Gsm8kConfig):
    """Holds the settings of a full evaluation.

    `throughput` names the server. Its `speed_only` leaves out GSM8K and the score.
    """

    throughput: ThroughputConfig

    @property
    def missing_levels(self) -> list[int]:
        """Return the levels that a score requires and `throughput` lacks."""
        return [level for level in LEVELS if level not in self.throughput.levels]


@dataclass(frozen=True, kw_only=True)
class SubmissionConfig:
    """Holds the settings of a submission, which are also options of `meltcore submit`."""

    rules: Literal["none", "hackathon"] = option(
        "none", "hackathon: refuse FP8, 4-bit and speculative decoding in the served process.", group="submission"
    )
    source: str | None = option(
        None,
        "Checkout that holds docs/ and scripts/ (default: the one that meltcore runs from).",
        group="submission",
        metavar="DIR",
    )
