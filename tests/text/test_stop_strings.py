"""Stop strings against the plain search they replace."""

import time

from hypothesis import given
from hypothesis import strategies as st

from meltcore.text.stop_strings import StopStrings

TEXT = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first to end wins; of those that end together, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@given(TEXT, STOPS, st.lists(st.integers(1, 4)), st.booleans())
def test_pieces_find_what_a_plain_search_of_the_whole_finds(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    finder = StopStrings(stops, include_stop=include)
    shown, found, rest = "", None, text
    while rest and found is None:
        size = sizes.pop() if sizes else 2
        released, found = finder.feed(rest[:size])
        shown, rest = shown + released, rest[size:]
    assert (shown + finder.release(), found) == search(text, stops, include)


@given(TEXT, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops, include_stop=False)
    shown, found = finder.feed(text)
    held = finder.release()
    if found is None:
        assert shown + held == text
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_long_stop_string_costs_the_same_a_character() -> None:
    finder = StopStrings(["a" * 4000 + "b"], include_stop=False)
    for _ in range(50):
        finder.feed("a" * 1000)  # quadratic matching would take minutes here
    assert finder.feed("b")[1] is not None


def test_thousand_answers_share_what_is_made_of_their_stop_strings() -> None:
    """One request of 70 KB may ask for 1,024 answers that stop at 16 strings of 4,096 characters."""
    stops = [letter * 4096 for letter in "abcdefghijklmnop"]
    began_s = time.process_time()
    for _ in range(1024):
        StopStrings(stops, include_stop=False)
    assert time.process_time() - began_s < 2  # made anew each time they take twenty
