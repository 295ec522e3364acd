"""Search of nested host events, of which a trace has millions."""

import time

from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.trace.host import HostTimeline
from meltcore.measure.trace.trace import HostEvent

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from("ab")), max_size=40)


def events_of(spans: list[tuple[int, int, str]]) -> list[HostEvent]:
    events = [HostEvent(f"{index}", thread, start, start + dur) for index, (start, dur, thread) in enumerate(spans)]
    return sorted(events, key=lambda each: each.start)


@given(SPANS, st.integers(0, 80), st.integers(1, 40))
def test_active_events_equal_those_of_a_full_scan(spans: list[tuple[int, int, str]], begin: int, dur: int) -> None:
    events, window = events_of([*spans, (0, 1, "a")]), (begin, begin + dur)
    found = HostTimeline(events).active_events("a", window)
    wanted = {each.name for each in events if each.thread == "a" and each.start < window[1] and each.end > window[0]}
    assert len(found) == len(wanted)
    assert {each.name for each in found} == wanted


def test_search_stays_fast_with_an_event_around_all_others() -> None:
    """A range of a whole recording must not make every search visit all earlier events."""
    count = 20_000
    host = HostTimeline(events_of([(0, 10 * count, "a"), *((10 * index, 8, "a") for index in range(count))]))
    began_s = time.process_time()
    assert all(len(host.active_events("a", (10 * index + 3, 10 * index + 5))) == 2 for index in range(0, count, 2))
    assert time.process_time() - began_s < 3.0
