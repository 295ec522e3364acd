"""Slots of recurrent state: which sequence has which.

A running sequence of a model with recurrent layers has one slot, from its start to its end or preemption. What a slot
holds when it is handed out is of no account: a sequence at position 0 begins from zero whatever is there.
"""


class StatePool:
    """Hands out slot numbers 1..slots; slot 0, the null slot, is never handed out: padding reads and writes it."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots, 0, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Slots that `take` could hand out now."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.available

    def take(self) -> int:
        """Hold a slot. The caller checked `available`."""
        if not self._free:
            raise RuntimeError(f"asked for a state slot, all {self.total} are held")
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Let go of a held slot."""
        if slot not in self._held:
            raise RuntimeError(f"state slot {slot} released, which nobody holds")
        self._held.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance; for tests and for an idle engine."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert self._held.isdisjoint(free), "a held slot is up for grabs"
        assert self._held | free == set(range(1, self.total + 1)), "a slot is lost, or the null slot is in use"
