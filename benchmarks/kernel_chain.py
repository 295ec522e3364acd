"""The kernels of a layer in the order in which they end, and how much later each ends than the one before it.

That is what a kernel adds to a step. A kernel's own duration says too much where kernels overlap, by PDL or on two
streams.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

# One per layer in our steps: attention of sequences that decode or of prompts, or what stands for it beside a recurrent
# state.
BEGINS = re.compile("_decode_kernel|_decode_stream_k_kernel|_prefill_kernel|_scan_kernel")


class Kernel(NamedTuple):
    """start_us, end_us: on the trace's clock."""

    name: str
    start_us: float
    end_us: float


class Link(NamedTuple):
    """Medians over layers. later_us: after the kernel before it had ended; lasts_us: from its own start."""

    name: str
    later_us: float
    lasts_us: float


class Chain(NamedTuple):
    """layers: how many of the trace have these kernels in this order."""

    layers: int
    links: list[Link]

    @property
    def time_us(self) -> float:
        return sum(link.later_us for link in self.links)


def chains_of(kernels: Iterable[Kernel], begins: re.Pattern[str] = BEGINS) -> list[Chain]:
    """Layers of the same kernels together, the most frequent first.

    A layer goes from a kernel that `begins` matches to before the next; what comes after the last one is left out.
    """
    ended = sorted(kernels, key=lambda kernel: kernel.end_us)
    starts = [place for place, kernel in enumerate(ended) if begins.search(kernel.name)]
    alike: dict[tuple[str, ...], list[int]] = {}
    for first, after in pairwise(starts):
        if first > 0:  # the first kernel of all has none before it
            alike.setdefault(tuple(kernel.name for kernel in ended[first:after]), []).append(first)
    chains = []
    for names, starts in alike.items():
        links = []
        for place, name in enumerate(names):
            later = [ended[start + place].end_us - ended[start + place - 1].end_us for start in starts]
            lasts = [ended[start + place].end_us - ended[start + place].start_us for start in starts]
            links.append(Link(name, statistics.median(later), statistics.median(lasts)))
        chains.append(Chain(len(starts), links))
    return sorted(chains, key=lambda chain: -chain.layers)
