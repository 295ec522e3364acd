"""Whether a trace holds all that the GPU did.

CUDA graphs hide kernels from profilers: other tools called a GPU 26 % idle that was 99 % busy.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from meltcore.forensics.trace import Activity, HostEvent, Trace

_GRAPH_LAUNCH = "graphlaunch"
_KERNEL_LAUNCH = "launchkernel"
_CAPTURE_BEGINS, _CAPTURE_ENDS = "streambegincapture", "streamendcapture"
LOST_SHARE = 0.01  # of the launches may lack their kernel: those at the ends of a recording do
ACTIVITY_MARGIN = 0.10


def graph_counts(trace: Trace, device: int) -> tuple[int, int]:
    """(graph launches with kernels on this GPU or none anywhere, kernels recorded of graphs on it)."""
    launched = {each.correlation for each in trace.host if each.call and _GRAPH_LAUNCH in each.name.lower()}
    elsewhere = {each.correlation for each in trace.activities if each.device != device}
    of_graphs = [each for each in trace.activities if each.device == device and each.correlation in launched]
    here = {each.correlation for each in of_graphs}
    kernels = sum(each.kind != "copy" for each in of_graphs)
    return len({each for each in launched if each in here or each not in elsewhere}), kernels


def reasons_to_distrust(trace: Trace, device: int, busy_share: float, activity_share: float | None) -> list[str]:
    """Why the trace may show less than was done; empty where nothing speaks against it."""
    recorded: Counter[int | None] = Counter(each.correlation for each in trace.activities)
    graphs = [each for each in trace.host if each.call and _GRAPH_LAUNCH in each.name.lower()]
    reasons = []
    empty = sum(recorded[each.correlation] == 0 for each in graphs)
    if empty:
        reasons.append(f"{empty:,} of {len(graphs):,} graph launches have no kernel in the trace")
    launched = {each.correlation for each in graphs}
    # Of a launch before the recording began only the end may be there, and that is no loss.
    whole = [each for each in trace.activities if each.device == device and each.correlation in launched]
    reasons += _uneven_graphs(whole)
    plain = _run_by_themselves(trace.host)
    lost = sum(recorded[each.correlation] == 0 for each in plain)
    if plain and lost / len(plain) > LOST_SHARE:
        reasons.append(f"{lost:,} of {len(plain):,} kernel launches have no kernel in the trace")
    if activity_share is not None and activity_share - busy_share > ACTIVITY_MARGIN:
        reasons.append(
            f"the GPU's own counters say it was active {100 * activity_share:.0f} % of the time, "
            f"the trace {100 * busy_share:.0f} %"
        )
    return reasons


def _run_by_themselves(host: list[HostEvent]) -> list[HostEvent]:
    """Launches of kernels, but for those between the start and the end of a capture: a graph keeps them for later."""
    capturing: set[str] = set()
    launches = []
    for each in host:  # in the order of time
        name = each.name.lower()
        if _CAPTURE_BEGINS in name:
            capturing.add(each.thread)
        elif _CAPTURE_ENDS in name:
            capturing.discard(each.thread)
        elif each.call and _KERNEL_LAUNCH in name and each.thread not in capturing:
            launches.append(each)
    return launches


def _uneven_graphs(activities: list[Activity]) -> list[str]:
    """One graph holds the same kernels every time, so a launch of it with fewer has lost some."""
    by_graph: dict[int, Counter[int | None]] = defaultdict(Counter)
    for each in activities:
        if each.graph is not None:
            by_graph[each.graph][each.correlation] += 1
    reasons = []
    for graph, counts in sorted(by_graph.items()):
        most = max(counts.values())
        fewer = sum(count < most for count in counts.values())
        if fewer:
            reasons.append(f"graph {graph}: {fewer:,} of {len(counts):,} launches have fewer than its {most:,} kernels")
    return reasons
