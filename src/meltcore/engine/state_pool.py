"""Slots of recurrent state: which sequence has which, and which hold snapshots.

A slot is free (content worthless), held (by a running sequence, or for a snapshot that a step under way is taking), or
a snapshot (the state after the beginning of some text, kept until the room is needed). What a slot holds when it is
handed out is of no account: a sequence at position 0 begins from zero whatever is there.

Every prompt brings snapshots, and most are never gone on from. So a new one is on trial until it is of use, and the
oldest on trial gives way first: with all in one row, the ends of prompts would push out the beginning that all prompts
share. A proven one is safe from new ones, but within bounds: what was of use once must not stay for ever.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

# Of all snapshots, how many may be proven: in the rest new ones can show that they are of use too.
_PROVEN_SHARE = 0.75
# A proven snapshot is on trial again once so many new ones for each slot have been asked for since it was of use. A
# prompt asks for two at most, so by then there was a prompt for each sequence that runs, and none began like it.
_PATIENCE = 2


class StatePool:
    """Hands out slot numbers 1..slots; slot 0, the null slot, is never handed out: padding reads and writes it."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots, 0, -1))
        self._held: set[int] = set()
        self._on_trial: OrderedDict[int, None] = OrderedDict()  # oldest first, as all that follow
        self._proven: OrderedDict[int, int] = OrderedDict()  # and the value of `_asked` when it was last of use
        self._uses: dict[int, int] = {}  # of each snapshot since it was made, or fell back for want of them
        self._asked = 0  # how often room for a new snapshot was asked for
        self.on_evict: Callable[[int], None] = lambda slot: None

    @property
    def available(self) -> int:
        """Slots that `take` could hand out now."""
        return len(self._free) + len(self._uses)

    @property
    def used(self) -> int:
        return len(self._held)

    @property
    def snapshots(self) -> Collection[int]:
        return self._uses.keys()

    def take(self) -> int:
        """Hold a slot, evicting a snapshot where none is free: the oldest on trial, else the proven one longest unused.

        The caller checked `available`.
        """
        if not self._free:
            if not self._uses:
                raise RuntimeError(f"asked for a state slot, all {self.total} are held")
            self._evict(next(iter(self._on_trial or self._proven)))
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def make_room(self, coming: int) -> bool:
        """Have a slot free for one more snapshot. False: all there are have proven to be worth more than a new one.

        coming: snapshots that steps under way are taking, in held slots.
        """
        self._asked += 1
        if self._proven and self._asked - next(iter(self._proven.values())) > _PATIENCE * self.total:
            self._put_on_trial()
        if self._free:
            return True
        most = max(1, int(_PROVEN_SHARE * (len(self._uses) + coming)))
        while len(self._proven) > most:
            self._put_on_trial()
        if not self._on_trial:
            return False
        self._evict(next(iter(self._on_trial)))
        return True

    def release(self, slot: int) -> None:
        """Let go of a held slot, whose content is worthless from now on."""
        self._let_go(slot)
        self._free.append(slot)

    def keep(self, slot: int) -> None:
        """Let go of a held slot, whose content is a snapshot from now on."""
        self._let_go(slot)
        self._on_trial[slot] = None
        self._uses[slot] = 0

    def touch(self, slot: int) -> None:
        """A sequence goes on from a snapshot, which has proven to be of use by that."""
        self._on_trial.pop(slot, None)
        self._proven[slot] = self._asked
        self._proven.move_to_end(slot)
        self._uses[slot] += 1

    def outgrow(self, slot: int) -> None:
        """A sequence that went on from this snapshot has left a later one.

        In a conversation each turn goes on from the one before it, and nobody comes back to earlier ones: where this
        was the snapshot's only use, it is on trial again. A beginning that many share has more.
        """
        if slot in self._proven and self._uses[slot] == 1:
            del self._proven[slot]
            self._on_trial[slot] = None

    def drop(self, slot: int) -> None:
        """Give up a snapshot."""
        self._on_trial.pop(slot, None)
        self._proven.pop(slot, None)
        del self._uses[slot]
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance; for tests and for an idle engine."""
        free, snapshots = set(self._free), set(self._uses)
        assert self._on_trial.keys().isdisjoint(self._proven), "a snapshot is on trial and proven"
        assert self._on_trial.keys() | self._proven.keys() == snapshots, "a snapshot is neither on trial nor proven"
        assert all(self._uses[slot] > 0 for slot in self._proven), "a proven snapshot that was never of use"
        last_used = list(self._proven.values())
        assert last_used == sorted(last_used), "proven snapshots are out of order"
        assert len(free) == len(self._free), "a slot is free twice"
        assert self._held.isdisjoint(free | snapshots), "a held slot is up for grabs"
        assert free.isdisjoint(snapshots), "a snapshot's slot is free"
        every = set(range(1, self.total + 1))
        assert self._held | free | snapshots == every, "a slot is lost, or the null slot is in use"

    def _put_on_trial(self) -> None:
        """The proven snapshot longest unused: it has one more turn among the new ones."""
        slot, _ = self._proven.popitem(last=False)
        self._on_trial[slot] = None
        self._uses[slot] = 0

    def _evict(self, slot: int) -> None:
        self.drop(slot)
        self.on_evict(slot)

    def _let_go(self, slot: int) -> None:
        if slot not in self._held:
            raise RuntimeError(f"state slot {slot} released, which nobody holds")
        self._held.remove(slot)
