"""Recurrent states beside the prefix cache: with them a cached beginning can be gone on from.

A page of keys and values serves whoever has the same beginning. A recurrent state serves only at the very token that
it was taken after, and is as large as thousands of tokens of pages. So states are kept at few places, all of them ends
of full pages: the last one of each prompt, for the next turn of a conversation, and wherever a prompt leaves a text
that was there before, for the third one that begins like it. Which of them stay, where slots are few, the pool decides
(state_pool.py). A snapshot goes when its page is evicted. The other way round the page stays: it is no hit any more,
but it shows where beginnings part, so where to take the next snapshot.
"""

from __future__ import annotations

from typing import NamedTuple

from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.prefix_cache import PrefixCache
from meltcore.engine.request import Request
from meltcore.engine.state_pool import StatePool


class Beginning(NamedTuple):
    """Where a sequence can go on from.

    pages: those of its beginning; slot: the state after them, 0 where there are none; stops: the positions at which its
    prompt is to be cut, ascending, so that a snapshot can be taken.
    """

    pages: list[int]
    slot: int
    stops: list[int]


class StateSnapshots:
    """The snapshot at each page's key, if there is one."""

    def __init__(self, states: StatePool, cache: PrefixCache) -> None:
        self._states = states
        self._cache = cache
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._claimed: set[bytes] = set()  # by steps under way
        states.on_evict = self._forget
        cache.on_forget = self._drop

    def find(self, request: Request, pages: list[int]) -> Beginning:
        """The longest beginning among the `pages` that the prefix cache has found, after which a state is kept."""
        keys = self._cache.keys(request, len(request.token_ids) // PAGE_SIZE)
        depth = len(pages)
        while depth and keys[depth - 1] not in self._slot_of:
            depth -= 1
        request.goes_on_from = keys[depth - 1] if depth else None
        stops = sorted({count * PAGE_SIZE for count in (len(pages), len(keys)) if count > depth})
        return Beginning(pages[:depth], self._slot_of[keys[depth - 1]] if depth else 0, stops)

    def claim(self, request: Request, end: int) -> bool:
        """Whether to keep the state after the first `end` tokens: nobody has, or is about to, and there is room.

        Where this is so, a slot is free for it, and `attach` or `abandon` must follow.
        """
        key = self._key(request, end)
        if key in self._slot_of or key in self._claimed or not self._states.make_room(len(self._claimed)):
            return False
        self._claimed.add(key)
        return True

    def attach(self, request: Request, end: int, slot: int) -> None:
        """Keep the held `slot`, the claimed state; or release it where the page that ends there is not cached."""
        key = self._key(request, end)
        self._claimed.remove(key)
        if not self._cache.knows(key):
            self._states.release(slot)
            return
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._states.keep(slot)
        begun_from = self._slot_of.get(request.goes_on_from) if request.goes_on_from else None
        if begun_from is not None:
            self._states.outgrow(begun_from)

    def abandon(self, request: Request, end: int, slot: int) -> None:
        """The step that was to take the claimed state has failed: let the held `slot` go."""
        self._claimed.remove(self._key(request, end))
        self._states.release(slot)

    def check(self) -> None:
        """Raise AssertionError where the books disagree; for tests and for an idle engine."""
        assert {slot: key for key, slot in self._slot_of.items()} == self._key_of, "keys and snapshots disagree"
        assert set(self._key_of) == set(self._states.snapshots), "the pool keeps other snapshots than are known"
        assert all(self._cache.knows(key) for key in self._slot_of), "a snapshot without its page"

    def _key(self, request: Request, end: int) -> bytes:
        return self._cache.keys(request, end // PAGE_SIZE)[-1]

    def _forget(self, slot: int) -> None:
        """The pool has handed the slot out."""
        del self._slot_of[self._key_of.pop(slot)]

    def _drop(self, key: bytes) -> None:
        """The prefix cache has lost the page."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._key_of[slot]
            self._states.drop(slot)
