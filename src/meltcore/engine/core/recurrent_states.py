"""Allocates slots of recurrent states, and keeps the snapshots from which a cached prefix can be continued.

A page of keys and values serves every sequence with the same prefix. A recurrent state is valid only after the token at
which it was taken, and is as large as the pages of thousands of tokens. So snapshots are taken only at the ends of a
few full pages. One is the last full page of each prompt, for the next turn of a conversation. Another is the last page
that a prompt shares with an earlier prompt, for a third prompt with this prefix.

A snapshot is dropped with its page. A page that has lost its snapshot no longer counts as a hit. Such a page still
shows where prompts diverge, and so where to take the next snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from meltcore.engine.core.kv_cache import PAGE_SIZE, PrefixCache
from meltcore.engine.core.request import Request

# At most this fraction of all snapshots is protected, so that new ones get a chance to be reused.
_PROTECTED_FRACTION = 0.75
# A protected snapshot is demoted once this many new ones per slot have been requested since its last reuse. A prompt
# requests at most two, so by then there was a prompt for each running sequence, and none started with it.
_DEMOTE_AFTER = 2


class RecurrentStatePool:
    """Allocates slot numbers 1..slots. Slot 0, the null slot, is never allocated: padding reads and writes it.

    A slot is free, held (by a running sequence, or for a snapshot that a launched step takes), or a snapshot, which is
    evicted when its slot is needed. The content of an allocated slot does not matter: a sequence at position 0 starts
    from zero.

    Eviction is a segmented LRU. A new snapshot is on probation until it is reused, and the oldest on probation is
    evicted first. Most snapshots are never reused. In a single queue, the snapshots at the ends of prompts would evict
    the prefix that all prompts share. A reused snapshot is protected, within the limits _PROTECTED_FRACTION and
    _DEMOTE_AFTER.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots, 0, -1))
        self._held_slots: set[int] = set()
        self._probation: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._protected: OrderedDict[int, int] = (
            OrderedDict()
        )  # least recently reused first: `_num_requested` at that time
        self._num_reuses: dict[int, int] = {}  # per snapshot, since it was taken or demoted
        self._num_requested = 0  # how often a slot for a new snapshot was requested
        self.on_evict: Callable[[int], None] = lambda _: None

    @property
    def num_available(self) -> int:
        """The number of slots that `take` could return now."""
        return len(self._free) + len(self._num_reuses)

    @property
    def num_used(self) -> int:
        """The number of slots that sequences hold."""
        return len(self._held_slots)

    @property
    def snapshots(self) -> Collection[int]:
        """The slots that hold snapshots."""
        return self._num_reuses.keys()

    def stats(self) -> dict[str, Any]:
        """Return the fields of EngineStats about slots."""
        return {
            "recurrent_state_slots": self.total,
            "recurrent_state_slots_used": self.num_used,
            "recurrent_state_snapshots": len(self.snapshots),
        }

    def take(self) -> int:
        """Return a slot that is held from now on.

        If no slot is free, the oldest snapshot on probation is evicted, otherwise the oldest protected snapshot. The
        caller must have checked that a slot is available.
        """
        if not self._free:
            if not self._num_reuses:
                raise RuntimeError(f"asked for a recurrent-state slot, all {self.total} are held")
            self._evict(next(iter(self._probation or self._protected)))
        slot = self._free.pop()
        self._held_slots.add(slot)
        return slot

    def free_one_for_snapshot(self, num_pending: int) -> bool:
        """Free a slot for one more snapshot. Return False if only protected snapshots could be evicted.

        `num_pending` is the number of snapshots in progress, which launched steps write into held slots.
        """
        self._num_requested += 1
        if self._protected and self._num_requested - next(iter(self._protected.values())) > _DEMOTE_AFTER * self.total:
            self._demote()
        if self._free:
            return True
        max_protected = max(1, int(_PROTECTED_FRACTION * (len(self._num_reuses) + num_pending)))
        while len(self._protected) > max_protected:
            self._demote()
        if not self._probation:
            return False
        self._evict(next(iter(self._probation)))
        return True

    def release(self, slot: int) -> None:
        """Free a held slot."""
        self._release_hold(slot)
        self._free.append(slot)

    def keep(self, slot: int) -> None:
        """Turn a held slot into a snapshot."""
        self._release_hold(slot)
        self._probation[slot] = None
        self._num_reuses[slot] = 0

    def touch(self, slot: int) -> None:
        """Protect a snapshot, because a sequence is started from it."""
        self._probation.pop(slot, None)
        self._protected[slot] = self._num_requested
        self._protected.move_to_end(slot)
        self._num_reuses[slot] += 1

    def supersede(self, slot: int) -> None:
        """Put a snapshot back on probation after its sequence has taken a later snapshot.

        Each turn of a conversation continues the previous turn and never an earlier one. So a snapshot that was reused
        only once, by this sequence, is no longer useful. A prefix that several sequences share has more reuses.
        """
        if slot in self._protected and self._num_reuses[slot] == 1:
            del self._protected[slot]
            self._probation[slot] = None

    def drop(self, slot: int) -> None:
        """Free the slot of a snapshot."""
        self._probation.pop(slot, None)
        self._protected.pop(slot, None)
        del self._num_reuses[slot]
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. Tests and an idle engine call this."""
        free, snapshots = set(self._free), set(self._num_reuses)
        assert self._probation.keys().isdisjoint(self._protected), "a snapshot is on probation and protected"
        assert self._probation.keys() | self._protected.keys() == snapshots, "a snapshot is in no queue"
        assert all(self._num_reuses[slot] > 0 for slot in self._protected), "a protected snapshot that was never reused"
        last_used = list(self._protected.values())
        assert last_used == sorted(last_used), "protected snapshots are out of order"
        assert len(free) == len(self._free), "a slot is free twice"
        assert self._held_slots.isdisjoint(free | snapshots), "a held slot can be allocated"
        assert free.isdisjoint(snapshots), "a snapshot's slot is free"
        all_slots = set(range(1, self.total + 1))
        assert self._held_slots | free | snapshots == all_slots, "a slot is lost, or the null slot is in use"

    def _demote(self) -> None:
        """Put the least recently reused protected snapshot back on probation, as the newest there."""
        slot, _ = self._protected.popitem(last=False)
        self._probation[slot] = None
        self._num_reuses[slot] = 0

    def _evict(self, slot: int) -> None:
        self.drop(slot)
        self.on_evict(slot)

    def _release_hold(self, slot: int) -> None:
        if slot not in self._held_slots:
            raise RuntimeError(f"recurrent-state slot {slot} released, which is not held")
        self._held_slots.remove(slot)


class PrefixMatch(NamedTuple):
    """The cached prefix from which a sequence is started.

    Args:
        columns: length of the prefix in columns.
        pages: pages of the prefix.
        slot: the snapshot at the prefix's end, or 0 without a snapshot.
        snapshot_positions: positions at which the prompt is cut to take snapshots, ascending.
    """

    columns: int
    pages: list[int]
    slot: int
    snapshot_positions: list[int]


class StateSnapshots:
    """Keeps the snapshots of recurrent states by the hash of the page at whose end they were taken."""

    def __init__(self, states: RecurrentStatePool, cache: PrefixCache) -> None:
        self._states = states
        self._cache = cache
        self._slot_by_hash: dict[bytes, int] = {}
        self._hash_by_slot: dict[int, bytes] = {}
        self._claimed: set[bytes] = set()  # by launched steps
        states.on_evict = self._forget
        cache.on_forget = self._drop

    def find(self, request: Request, hits: Sequence[int], *, is_leader: bool = False) -> PrefixMatch:
        """Return the longest cached prefix that ends with a snapshot.

        `hits` are the lengths in columns of the prefixes in the prefix cache. The followers of a leader have the same
        prompt, and compute its last token again. So they need a snapshot before it.
        """
        hashes = self._cache.page_hashes(request, len(request.token_ids) // PAGE_SIZE)
        hit_columns = next((hit for hit in reversed(hits) if hashes[hit - 1] in self._slot_by_hash), 0)
        request.parent_snapshot = hashes[hit_columns - 1] if hit_columns else None
        longest_hit = hits[-1] if hits else 0
        shared_columns = (request.prompt_length - 1) // PAGE_SIZE if is_leader else 0
        counts = {longest_hit, len(hashes), shared_columns}
        positions = sorted(count * PAGE_SIZE for count in counts if count > hit_columns)
        slot = self._slot_by_hash[hashes[hit_columns - 1]] if hit_columns else 0
        return PrefixMatch(hit_columns, self._cache.prefix_pages(request, hit_columns), slot, positions)

    def claim(self, request: Request, end: int) -> bool:
        """Return whether to keep the state after the first `end` tokens.

        The state is kept if no snapshot of it exists or is being taken, and a slot can be freed for it. If the method
        returns True, a slot is free, and the caller must call `attach` or `abandon` later.
        """
        page_hash = self._page_hash(request, end)
        if page_hash in self._slot_by_hash or page_hash in self._claimed:
            return False
        if not self._states.free_one_for_snapshot(len(self._claimed)):
            return False
        self._claimed.add(page_hash)
        return True

    def attach(self, request: Request, end: int, slot: int) -> None:
        """Keep the claimed state in the held `slot`.

        The slot is released if the page that ends at `end` is not cached.
        """
        page_hash = self._page_hash(request, end)
        self._claimed.remove(page_hash)
        if not self._cache.is_known(page_hash):
            self._states.release(slot)
            return
        self._slot_by_hash[page_hash] = slot
        self._hash_by_slot[slot] = page_hash
        self._states.keep(slot)
        parent = self._slot_by_hash.get(request.parent_snapshot) if request.parent_snapshot else None
        if parent is not None:
            self._states.supersede(parent)

    def abandon(self, request: Request, end: int, slot: int) -> None:
        """Release the held `slot` after a failure of the step that was to take the claimed state."""
        self._claimed.remove(self._page_hash(request, end))
        self._states.release(slot)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. Tests and an idle engine call this."""
        assert {slot: page_hash for page_hash, slot in self._slot_by_hash.items()} == self._hash_by_slot, (
            "maps disagree"
        )
        assert set(self._hash_by_slot) == set(self._states.snapshots), "the pool keeps other snapshots than are known"
        assert all(self._cache.is_known(page_hash) for page_hash in self._slot_by_hash), "a snapshot without its page"

    def _page_hash(self, request: Request, end: int) -> bytes:
        return self._cache.page_hashes(request, end // PAGE_SIZE)[-1]

    def _forget(self, slot: int) -> None:
        """Remove a snapshot that the pool has evicted."""
        del self._slot_by_hash[self._hash_by_slot.pop(slot)]

    def _drop(self, page_hash: bytes) -> None:
        """Drop the snapshot of a page that the prefix cache has evicted."""
        slot = self._slot_by_hash.pop(page_hash, None)
        if slot is not None:
            del self._hash_by_slot[slot]
            self._states.drop(slot)
