"""Slots of recurrent state: which sequence has which, and which hold snapshots.

A slot is free (content worthless), held (by a running sequence, or for a snapshot that a step under way is taking), or
a snapshot (the state after the beginning of some text, kept until the room is needed). What a slot holds when it is
handed out is of no account: a sequence at position 0 begins from zero whatever is there.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection


class StatePool:
    """Hands out slot numbers 1..slots; slot 0, the null slot, is never handed out: padding reads and writes it."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots, 0, -1))
        self._held: set[int] = set()
        self._snapshots: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[int], None] = lambda slot: None

    @property
    def available(self) -> int:
        """Slots that `take` could hand out now."""
        return len(self._free) + len(self._snapshots)

    @property
    def used(self) -> int:
        return len(self._held)

    @property
    def snapshots(self) -> Collection[int]:
        return self._snapshots.keys()

    def take(self) -> int:
        """Hold a slot, evicting the snapshot longest unused where none is free. The caller checked `available`."""
        if self._free:
            slot = self._free.pop()
        elif self._snapshots:
            slot, _ = self._snapshots.popitem(last=False)
            self.on_evict(slot)
        else:
            raise RuntimeError(f"asked for a state slot, all {self.total} are held")
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Let go of a held slot, whose content is worthless from now on."""
        self._let_go(slot)
        self._free.append(slot)

    def keep(self, slot: int) -> None:
        """Let go of a held slot, whose content is a snapshot from now on."""
        self._let_go(slot)
        self._snapshots[slot] = None

    def touch(self, slot: int) -> None:
        """A snapshot was of use: it is evicted after those that were not since."""
        self._snapshots.move_to_end(slot)

    def drop(self, slot: int) -> None:
        """Give up a snapshot."""
        del self._snapshots[slot]
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance; for tests and for an idle engine."""
        free, snapshots = set(self._free), set(self._snapshots)
        assert len(free) == len(self._free), "a slot is free twice"
        assert self._held.isdisjoint(free | snapshots), "a held slot is up for grabs"
        assert free.isdisjoint(snapshots), "a snapshot's slot is free"
        every = set(range(1, self.total + 1))
        assert self._held | free | snapshots == every, "a slot is lost, or the null slot is in use"

    def _let_go(self, slot: int) -> None:
        if slot not in self._held:
            raise RuntimeError(f"state slot {slot} released, which nobody holds")
        self._held.remove(slot)
