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

# What the GPU score's words mean: its measurer talks to an engine, not to a server, and counts token ids.
SCORE_DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "score",
        "The score",
        "tokens/s",
        "Output tokens over the window of the sustained run, counted by the measuring process from the token ids it "
        "received. The window begins when as many requests have ended as run at once, and both its ends are ends of "
        "steps.",
    ),
    Definition(
        "score_ttft_ms",
        "TTFT",
        "ms",
        "From the sending of a request to its first token, for requests whose first token came within the window. "
        "Where more are in flight than run at once, this is mostly waiting.",
    ),
    Definition(
        "score_itl_ms",
        "ITL",
        "ms",
        "Gaps between the tokens of one request, pooled over all tokens of the window.",
    ),
    Definition(
        "tokens_per_joule",
        "Tokens per joule",
        "tokens/J",
        "Output tokens over the growth of the GPU's own energy counter in the same window. The host's energy is not "
        "in it.",
    ),
    Definition(
        "health",
        "Health",
        "verdict",
        "DEGRADED: something happened that does not happen on a healthy GPU (a slowdown by heat or power brake, a new "
        "ECC or XID error, clocks that drift under load). UNKNOWN: nothing did as far as could be seen, and not all "
        "could be seen. A value that the product does not have is neutral.",
    ),
    Definition(
        "nvml_utilization",
        "NVML utilization",
        "%",
        "The share of NVML's last window with at least one kernel resident: a single thread on a single SM makes it "
        "100 %. It is shown because people look for it, and no verdict uses it; SM activity is what it is taken for.",
    ),
)

_BY_KEY = {definition.key: definition for definition in (*DEFINITIONS, *SCORE_DEFINITIONS)}


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
