"""The experts that a decode step used with --debug uniform-routing, beside the expected number."""

from __future__ import annotations

from typing import NamedTuple

from bench_output import Row

from meltcore import LLM
from meltcore.engine.memory.graph_sizes import capture_sizes
from meltcore.layers.uniform_routing import mean_experts_used

TOLERANCE = 0.05  # of the expected number


class ExpertsUsed(NamedTuple):
    """Experts per layer of a decode step of `tokens` tokens, padding included; mean over layers."""

    tokens: int
    distinct: float
    expected: float

    @property
    def invalid(self) -> str | None:
        if abs(self.distinct - self.expected) <= TOLERANCE * self.expected:
            return None
        return f"{self.distinct:.1f} experts per layer for {self.tokens} tokens, {self.expected:.1f} expected"


def expected_experts(experts: int, top_k: int, tokens: float) -> float:
    """Expected number of a layer's experts that `tokens` tokens select, each top_k uniformly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def experts_used_by(llm: LLM, sequences: int) -> ExpertsUsed | None:
    """The decode step of `sequences`, limited to the largest batch; None where none is on record."""
    configured = llm.engine.runner.model.config.experts
    assert configured is not None, "--debug uniform-routing without experts"
    batch = min(sequences, llm.engine.max_num_seqs)
    tokens = min(size for size in capture_sizes(llm.engine.max_num_seqs) if size >= batch)
    found = mean_experts_used().get(tokens)
    if found is None:
        return None
    return ExpertsUsed(tokens, found, expected_experts(configured.num_experts, configured.num_experts_per_tok, tokens))


def record(row: Row, found: ExpertsUsed | None) -> None:
    """Write the experts to `row`, which is invalid where they are unknown or too far from the expected number."""
    if found is None:
        row.invalid = "the number of experts is not on record"
    else:
        row.routed_tokens, row.experts_used, row.experts_expected = found
        row.invalid = found.invalid
