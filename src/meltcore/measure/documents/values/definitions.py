"""Definitions of all metrics. The load generator computes the metrics.

The report and the CLI's help quote the definitions. Tools use the same words for different numbers. So each definition
states when a time starts and ends, and what counts.
"""

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """The definition of a metric: its key in results, name and unit, and a text of one or two sentences."""

    key: str
    name: str
    unit: str
    text: str


DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "ttft_ms",
        "TTFT",
        "ms",
        "Time to first token: from the intended start of a request to the first event that carries text. "
        "The event that only names the role does not count.",
    ),
    Definition(
        "itl_ms",
        "ITL",
        "ms",
        "Inter-token latency: the gaps between events that carry text, pooled over all complete answers with text. "
        "Where the server reports tokens per event, a gap is divided evenly among the tokens of its event; elsewhere "
        "there is one gap per event.",
    ),
    Definition(
        "event_gap_ms",
        "Event gap",
        "ms",
        "Time between events that carry text, for any number of tokens per event, pooled over all complete answers "
        "with text. Events that were read together count as one.",
    ),
    Definition(
        "tpot_ms",
        "TPOT",
        "ms",
        "Time per output token of one request, without its first: (end-to-end - TTFT) / (output tokens - 1).",
    ),
    Definition("e2e_ms", "End to end", "ms", "From the intended start of a request to the last byte of its answer."),
    Definition(
        "queue_delay_ms",
        "Queue delay",
        "ms",
        "Time a request spent in the client, from its intended start to the moment it was sent. The other latencies "
        "include it; its own metric shows a late client.",
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
        "Throughput within the longest window that has at least 90 % of the level in flight; "
        '"none" where the level never reached that.',
    ),
    Definition(
        "goodput_per_s",
        "Goodput",
        "requests/s",
        "Requests that met every limit of --goodput, divided by the duration of the level. Failed requests and "
        "answers without text meet none. The limit itl is for the mean of a request's gaps; an answer of one token "
        "has no TPOT and no ITL to exceed.",
    ),
    Definition(
        "peak_in_flight",
        "Peak in flight",
        "requests",
        "Most requests that were sent and not yet completed at one time, counted by the client.",
    ),
    Definition(
        "accuracy",
        "Accuracy",
        "ratio",
        "Requests with a correct answer, divided by all requests of the level. A failed request is not correct.",
    ),
    Definition(
        "succeeded",
        "Succeeded",
        "requests",
        "Requests with a complete answer: a finish reason, and a response that ended in order.",
    ),
    Definition(
        "events_per_token",
        "Events per token",
        "ratio",
        "Events that carried text, divided by output tokens. Below 1, the server put several tokens into one event.",
    ),
    Definition(
        "tokens_per_event",
        "Tokens per event",
        "tokens",
        "Output tokens, divided by events that carried text; events that were read together count as one.",
    ),
)

# Metrics of the GPU score, which is measured on an engine, not a server, and counts token ids.
SCORE_DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "score",
        "GPU score",
        "tokens/s",
        "Output tokens over the window of the sustained run, counted by the measuring process from the token ids it "
        "received. The window begins when as many requests have ended as run concurrently; it starts and ends at the "
        "end of an engine step.",
    ),
    Definition(
        "score_ttft_ms",
        "TTFT",
        "ms",
        "From the sending of a request to its first token, for requests whose first token arrived within the window. "
        "Where more are in flight than run concurrently, this is mostly waiting.",
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
        "Output tokens divided by the increase of the GPU's energy counter in the same window, without the host's "
        "energy.",
    ),
    Definition(
        "health",
        "Health",
        "verdict",
        "DEGRADED: an event that does not happen on a healthy GPU (a slowdown by heat or power brake, a new ECC or XID "
        "error, clocks that drift under load). UNKNOWN: no such event was seen, and not all values could be read. A "
        "value that the GPU model does not have is neutral.",
    ),
    Definition(
        "utilization",
        "Utilization",
        "%",
        "Means over a window, from NVML's GPM counters. SM active: the share of time in which an SM had work, over all "
        "SMs. Tensor cores: the share of cycles in which they computed. DRAM bandwidth: the share of its peak, which "
        "DCGM calls DRAM active.",
    ),
    Definition(
        "nvml_utilization",
        "NVML utilization",
        "%",
        "Time with at least one resident kernel within NVML's last sampling period: a single thread on a single SM "
        "makes it 100 %. No verdict uses it; SM activity is the meaningful metric.",
    ),
)

_DEFINITION_BY_KEY = {definition.key: definition for definition in (*DEFINITIONS, *SCORE_DEFINITIONS)}


def define(key: str) -> Definition:
    """Return the definition of one metric. Raises KeyError for a key that results do not have."""
    return _DEFINITION_BY_KEY[key]


def definitions_text(*keys: str, width: int = 100) -> str:
    """Format the definitions of `keys` (default: all) as wrapped lines for a command's help."""
    definitions = [define(key) for key in keys] if keys else list(DEFINITIONS)
    return "\n".join(
        textwrap.fill(
            f"{definition.name} ({definition.unit}): {definition.text}",
            width,
            initial_indent="  ",
            subsequent_indent="    ",
        )
        for definition in definitions
    )
