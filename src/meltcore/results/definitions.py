"""What every metric means, once. The load generator computes these; the report and the CLI's help quote them.

Tools use the same words for different numbers, so each definition says what starts and ends the clock and what counts.
"""

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """One metric: the key results use, the name people say, its unit, and one or two sentences."""

    key: str
    name: str
    unit: str
    text: str


DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "ttft_ms",
        "TTFT",
        "ms",
        "Time to first token: from the intended start of a request to the first chunk that carries text. "
        "The empty chunk that only names the role does not count.",
    ),
    Definition(
        "itl_ms",
        "ITL",
        "ms",
        "Inter-token latency: the gaps between chunks that carry text, pooled over all requests. Where the server "
        "reports tokens per chunk, a gap is shared evenly among the tokens it brought; elsewhere it is one per chunk.",
    ),
    Definition(
        "tpot_ms",
        "TPOT",
        "ms",
        "Time per output token of one request, without its first: (end-to-end - TTFT) / (output tokens - 1).",
    ),
    Definition(
        "e2e_ms", "End to end", "ms", "From the intended start of a request to the last byte of its whole answer."
    ),
    Definition(
        "queue_delay_ms",
        "Queue delay",
        "ms",
        "Time a request spent in the client: from its intended start to the moment it was sent. "
        "It is inside TTFT and end-to-end, and shown apart so that a late client cannot hide.",
    ),
    Definition(
        "output_tokens_per_s",
        "Output tok/s",
        "tokens/s",
        "Generated tokens of succeeded requests, divided by the whole level from release to last answer, "
        "ramp and drain included.",
    ),
    Definition(
        "total_tokens_per_s",
        "Total tok/s",
        "tokens/s",
        "Prompt and generated tokens of succeeded requests over the same time.",
    ),
    Definition(
        "steady",
        "Steady tok/s",
        "tokens/s",
        "Output tokens a second within the longest span that has at least 90 % of the level in flight; "
        '"none" where the level never held that many.',
    ),
    Definition(
        "goodput_per_s",
        "Goodput",
        "requests/s",
        "Requests that met every limit of --slo, divided by the duration of the level. Failed requests meet none.",
    ),
    Definition(
        "peak_in_flight",
        "Peak in flight",
        "requests",
        "The most requests that were sent and not yet answered in full at one moment, counted by the client.",
    ),
    Definition(
        "accuracy",
        "Accuracy",
        "share",
        "Requests whose answer was right, divided by all requests of the level. A failed request is not right.",
    ),
    Definition(
        "succeeded",
        "Succeeded",
        "requests",
        "Requests that got their whole answer: a finish reason, the end-of-stream mark, and the token counts.",
    ),
    Definition(
        "chunk_to_token_ratio",
        "Chunks per token",
        "ratio",
        "Chunks that carried text, divided by output tokens. Below 1, the server put several tokens in one chunk.",
    ),
)

_BY_KEY = {definition.key: definition for definition in DEFINITIONS}


def define(key: str) -> Definition:
    """The definition of one metric. Raises KeyError for a key that results do not have."""
    return _BY_KEY[key]


def as_text(*keys: str, width: int = 100) -> str:
    """Definitions of `keys` (or all) as wrapped lines for a command's help."""
    chosen = [define(key) for key in keys] if keys else list(DEFINITIONS)
    return "\n".join(
        textwrap.fill(f"{item.name} ({item.unit}): {item.text}", width, initial_indent="  ", subsequent_indent="    ")
        for item in chosen
    )
