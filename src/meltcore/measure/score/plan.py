"""What a run measures: the name of its workload, its prompts, and the grid of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meltcore.measure.documents.score import PromptFile, SweepGrid
from meltcore.measure.score import workload
from meltcore.measure.score.config import SWEEP_FRACTION, BenchConfig
from meltcore.measure.score.prompts import Prompts, load_prompts
from meltcore.measure.score.workload import Precision

SWEEP_PROMPT_TOKENS = workload.MIN_PROMPT


@dataclass(frozen=True, kw_only=True)
class ScorePlan:
    """The workload of a score. Only results of equal `name` rank. `prompt` returns tokens for (number, vocabulary).

    `grid` has the cells of a sweep, or is None for a score. `prompt_file` is set if the prompts come from a file.
    """

    name: str
    precision: Precision
    prompt: Callable[[int, int], list[int]] = workload.prompt
    grid: SweepGrid | None = None
    prompt_file: PromptFile | None = None

    @property
    def context(self) -> int:
        """The number of tokens of the longest request, at least the longest of the score's workload."""
        max_prompt_tokens = 0 if self.prompt_file is None else self.prompt_file.max_tokens
        return max(workload.CONTEXT, max_prompt_tokens + workload.OUTPUT_TOKENS)


def make_plan(config: BenchConfig) -> ScorePlan:
    """Return the plan of a run: the score, a file of prompts, or a sweep. Raises ConfigError for an unusable file."""
    precision = workload.PRECISIONS[config.precision]
    if config.prompts is not None:
        return _prompts_plan(load_prompts(config.prompts, config.model, cpu=config.cpu), precision)
    if not config.sweep:
        return ScorePlan(name=precision.name, precision=precision)
    grid = SweepGrid(
        concurrency=list(config.sweep_concurrency),
        output_lens=list(config.sweep_output_lens),
        temperatures=list(config.sweep_temperatures),
        prompt_tokens=SWEEP_PROMPT_TOKENS,
        cell_s=SWEEP_FRACTION * config.duration_s / config.sweep_cells,
    )
    return ScorePlan(
        name=precision.name.replace("score", "sweep"), precision=precision, prompt=_sweep_prompt, grid=grid
    )


def _prompts_plan(prompts: Prompts, precision: Precision) -> ScorePlan:
    lengths = [len(tokens) for tokens in prompts.tokens]
    return ScorePlan(
        name=f"{precision.name.replace('score', 'prompts')}+{prompts.digest}",
        precision=precision,
        prompt=prompts.prompt,
        prompt_file=PromptFile(
            sha256=prompts.sha256,
            prompts=len(lengths),
            min_tokens=min(lengths),
            mean_tokens=sum(lengths) / len(lengths),
            max_tokens=max(lengths),
        ),
    )


def _sweep_prompt(index: int, vocab_size: int) -> list[int]:
    """Return the first SWEEP_PROMPT_TOKENS tokens of the score's prompt `index`: all have the same length."""
    return workload.prompt(index, vocab_size)[:SWEEP_PROMPT_TOKENS]
