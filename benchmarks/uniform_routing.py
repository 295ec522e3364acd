"""What rows measured with --debug uniform-routing say of the experts met, and whether so many were to be met."""

from __future__ import annotations

from typing import NamedTuple

from bench_output import Row

from meltcore import LLM
from meltcore.engine.graphs import padded_sizes
from meltcore.layers.uniform_routing import experts_met

FURTHEST = 0.05  # from what is expected, as a share of it


class Met(NamedTuple):
    """A decode step's experts: of so many tokens, padding included, mean over layers."""

    tokens: int
    distinct: float
    expected: float

    @property
    def invalid(self) -> str | None:
        if abs(self.distinct - self.expected) <= FURTHEST * self.expected:
            return None
        return f"{self.distinct:.1f} experts a layer for {self.tokens} tokens, {self.expected:.1f} expected"


def expected_experts(experts: int, choices: int, tokens: float) -> float:
    """How many of a layer's experts tokens meet whose choices are all alike."""
    return experts * (1 - (1 - choices / experts) ** tokens)


def met_by(llm: LLM, sequences: int) -> Met | None:
    """The decode step that held `sequences`, as many of them as run at once; None where none is on record."""
    configured = llm.engine.runner.model.config.experts
    assert configured is not None, "--debug uniform-routing without experts"
    at_once = min(sequences, llm.engine.max_num_seqs)
    tokens = min(size for size in padded_sizes(llm.engine.max_num_seqs) if size >= at_once)
    found = experts_met().get(tokens)
    if found is None:
        return None
    return Met(tokens, found, expected_experts(configured.num_experts, configured.num_experts_per_tok, tokens))


def tell(row: Row, met: Met | None) -> None:
    """Put it on record in a row."""
    if met is None:
        row.invalid = "the experts met are not on record"
    else:
        row.routed_tokens, row.experts_met, row.experts_expected = met
        row.invalid = met.invalid
