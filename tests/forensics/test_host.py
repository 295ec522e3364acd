"""Finding what a host thread did within a window, among millions of events that lie in each other."""

import time

from hypothesis import given
from hypothesis import strategies as st

from meltcore.forensics.host import Host
from meltcore.forensics.trace import HostEvent

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from("ab")), max_size=40)


def host_of(spans: list[tuple[int, int, str]]) -> list[HostEvent]:
    events = [HostEvent(f"{place}", thread, start, start + dur) for place, (start, dur, thread) in enumerate(spans)]
    return sorted(events, key=lambda each: each.start)


@given(SPANS, st.integers(0, 80), st.integers(1, 40))
def test_what_was_under_way_is_what_looking_at_every_event_finds(
    spans: list[tuple[int, int, str]], begin: int, dur: int
) -> None:
    events, window = host_of([*spans, (0, 1, "a")]), (begin, begin + dur)
    found = Host(events).under_way("a", window)
    wanted = {each.name for each in events if each.thread == "a" and each.start < window[1] and each.end > window[0]}
    assert len(found) == len(wanted)
    assert {each.name for each in found} == wanted


def test_an_event_around_all_others_makes_no_search_long() -> None:
    """The range of a whole recording: going back as far as the longest event would meet every other one each time."""
    count = 20_000
    host = Host(host_of([(0, 10 * count, "a"), *((10 * place, 8, "a") for place in range(count))]))
    began_s = time.process_time()
    assert all(len(host.under_way("a", (10 * place + 3, 10 * place + 5))) == 2 for place in range(0, count, 2))
    assert time.process_time() - began_s < 3.0
