"""Decides which sleepable models are awake. It reads times, bytes and counts of requests, but no processes and clocks.

Models that take turns share the memory of their devices. A model that is needed replaces other models: idle ones first,
then models of the least urgent class, then models that were used longest ago. Three rules limit swaps. Each model stays
awake for a minimum time. A busy model stays awake if no more urgent class waits. The swaps per minute are limited. No
model starves: a model that was passed over several times comes before all classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meltcore.settings.fleet_spec import ResidencySection

Residence = Literal["awake", "falling_asleep", "asleep", "waking"]
# Turns after which a waiting model replaces a busy one of a more urgent class, and comes before all others that wait.
LONGEST_TURNS = 4
SWAP_WINDOW_S = 60.0
IDLE_RANK = 99  # of a model without work: after every class


class Demand(NamedTuple):
    """Says how urgently a model is needed now.

    Args:
        rank: index of the most urgent class that waits, where 0 is the most urgent. None if no request waits.
        running: whether engines work for the model.
        is_forced: whether an operator wakes the model, or it has to be loaded. The minimum time and the limit of swaps
            then do not apply.
    """

    rank: int | None = None
    running: bool = False
    is_forced: bool = False


class Swap(NamedTuple):
    """A model to wake, and the models `sleep` that must sleep first.

    The caller carries out the swap, and reports to the policy when each of the models sleeps or is awake.
    """

    wake: int
    sleep: tuple[int, ...]


@dataclass
class _Member:
    """A sleepable model, and the bytes that it takes on each device while it is awake.

    A model of unknown size (None) shares a device with no other model.
    """

    rank: int  # of its requests that run
    size_bytes: Mapping[str, int | None]
    state: Residence = "asleep"
    since_s: float = -1e9  # when it became awake
    used_s: float = -1e9
    wanted_s: float | None = None  # since when it has been wanted and not awake
    blocked_s: float = -1e9  # until then it is not woken: it could not be
    wake_s: float = 0.0  # that the last wake took
    demand: Demand = field(default_factory=Demand)

    @property
    def work_rank(self) -> int:
        """The rank of the most urgent class for which the model works now, or IDLE_RANK if it works for none."""
        ranks = [self.rank] if self.demand.running else []
        return min([*ranks, *([] if self.demand.rank is None else [self.demand.rank])], default=IDLE_RANK)


class Residency:
    """Decides on swaps. Times are monotonic seconds, and must not decrease from call to call."""

    def __init__(self, config: ResidencySection, room_bytes: Mapping[str, int]) -> None:
        """Create the policy. `room_bytes` are the bytes that models which take turns share, by device.

        For a device that is missing there, they are the bytes of the largest model.
        """
        self.change_config(config, room_bytes)
        self._members: dict[int, _Member] = {}
        self._swaps_s: deque[float] = deque()

    def change_config(self, config: ResidencySection, room_bytes: Mapping[str, int]) -> None:
        """Use other settings from now on."""
        self._config, self._room_bytes = config, room_bytes
        self._turn_s = max(config.minimum_s, config.turn_s)

    # --- members

    def add(self, key: int, rank: int, size_bytes: Mapping[str, int | None]) -> None:
        """Add a sleeping model. `rank` is the index of its class.

        `size_bytes` are the bytes that the model takes on each device while it is awake.
        """
        self._members[key] = _Member(rank, dict(size_bytes))

    def move(self, key: int, size_bytes: Mapping[str, int | None]) -> None:
        """Store the devices to which the engines of a model have moved."""
        self._members[key].size_bytes = dict(size_bytes)

    def remove(self, key: int) -> None:
        """Remove a model. Its memory is free from now on."""
        self._members.pop(key, None)

    def state(self, key: int) -> Residence:
        """Return the state of a model: awake, asleep, waking, or falling asleep."""
        return self._members[key].state

    def __contains__(self, key: int) -> bool:
        return key in self._members

    def fell_asleep(self, key: int) -> None:
        """Store that a model has freed its memory."""
        if key in self._members:
            self._members[key].state = "asleep"

    def woke(self, key: int, now_s: float, took_s: float) -> None:
        """Store that a model can serve, or that its engines keep trying to start."""
        if (member := self._members.get(key)) is not None:
            member.state, member.since_s, member.used_s = "awake", now_s, now_s
            member.wake_s, member.wanted_s = took_s, None

    def block(self, key: int, until_s: float) -> None:
        """Store that a model could not be woken. It is asleep, and is not woken before `until_s`."""
        if (member := self._members.get(key)) is not None:
            member.state, member.blocked_s, member.wanted_s = "asleep", until_s, None

    def begin_sleep(self, key: int) -> None:
        """Store that an awake model is being put to sleep, although no other model needs its memory."""
        self._members[key].state = "falling_asleep"

    # --- decisions

    def decide(self, now_s: float, demands: Mapping[int, Demand]) -> list[Swap]:
        """Return the swaps to begin now. Their models count as falling asleep or waking up from now on."""
        for key, member in self._members.items():
            member.demand = demands.get(key, Demand())
            is_wanted = member.demand.rank is not None or member.demand.is_forced
            if is_wanted or member.demand.running:
                member.used_s = now_s
            if member.state != "awake":
                member.wanted_s = (now_s if member.wanted_s is None else member.wanted_s) if is_wanted else None
        swaps = []
        reserved: set[str] = set()  # devices whose next change is for a model before in the order
        for key in self._candidates(now_s):
            member = self._members[key]
            if reserved.isdisjoint(member.size_bytes):
                victims = self._victims(key, now_s)
                if victims is not None and (not victims or self._may_swap(member, now_s)):
                    if victims:
                        self._swaps_s.append(now_s)
                    for victim in victims:
                        self._members[victim].state = "falling_asleep"
                    member.state = "waking"
                    swaps.append(Swap(key, tuple(victims)))
            reserved.update(member.size_bytes)
        return swaps

    def wake_at_s(self, key: int, now_s: float) -> float:
        """Return the earliest time at which a sleeping model can be awake, as far as is known now."""
        member = self._members[key]
        at_s = max(now_s, member.blocked_s)
        if not self._fits(key, self._occupants(member)):
            at_s = max(at_s, min(self._may_leave_s(self._members[each], now_s) for each in self._occupants(member)))
            if len(self._recent_swaps(now_s)) >= self._config.swaps_per_minute:
                at_s = max(at_s, self._swaps_s[-self._config.swaps_per_minute] + SWAP_WINDOW_S)
        return at_s + member.wake_s

    def _may_leave_s(self, member: _Member, now_s: float) -> float:
        if member.state == "falling_asleep":
            return now_s
        return (now_s if member.state == "waking" else member.since_s) + self._config.minimum_s

    def _candidates(self, now_s: float) -> list[int]:
        """Return the sleeping models that are needed. The model to wake first comes first."""

        def order(key: int) -> tuple[bool, bool, int, float, int]:
            member = self._members[key]
            wanted_s = now_s if member.wanted_s is None else member.wanted_s
            is_long = self._has_waited(member, now_s) and not member.demand.is_forced
            rank = -1 if is_long or member.demand.rank is None else member.demand.rank
            return not member.demand.is_forced, not is_long, rank, wanted_s, key

        wanted = [
            key
            for key, member in self._members.items()
            if member.state == "asleep"
            and member.wanted_s is not None
            and (now_s >= member.blocked_s or member.demand.is_forced)
        ]
        return sorted(wanted, key=order)

    def _has_waited(self, member: _Member, now_s: float) -> bool:
        return member.wanted_s is not None and now_s - member.wanted_s >= LONGEST_TURNS * self._turn_s

    def _victims(self, key: int, now_s: float) -> list[int] | None:
        """Return the models to put to sleep so that a model fits. Returns None if it does not fit yet."""
        member, occupants = self._members[key], self._occupants(self._members[key])
        allowed = [each for each in occupants if self._may_replace(member, self._members[each], now_s)]
        allowed.sort(key=lambda each: (-self._members[each].work_rank, self._members[each].used_s, each))
        victims: list[int] = []
        for each in allowed:
            if self._fits(key, set(occupants) - set(victims)):
                break
            victims.append(each)
        if not self._fits(key, set(occupants) - set(victims)):
            return None
        for each in list(victims):  # a later one may make room enough without it
            if self._fits(key, set(occupants) - set(victims) | {each}):
                victims.remove(each)
        return victims

    def _may_replace(self, member: _Member, victim: _Member, now_s: float) -> bool:
        if victim.state != "awake":
            return False
        if member.demand.is_forced:
            return True
        rank = -1 if member.demand.rank is None else member.demand.rank
        needed_s = self._config.minimum_s
        if rank == victim.work_rank or self._has_waited(member, now_s):
            needed_s = self._turn_s
        elif rank > victim.work_rank:
            needed_s = LONGEST_TURNS * self._turn_s
        return now_s - victim.since_s >= (self._config.minimum_s if victim.work_rank == IDLE_RANK else needed_s)

    def _may_swap(self, member: _Member, now_s: float) -> bool:
        return member.demand.is_forced or len(self._recent_swaps(now_s)) < self._config.swaps_per_minute

    def _recent_swaps(self, now_s: float) -> Sequence[float]:
        while self._swaps_s and now_s - self._swaps_s[0] >= SWAP_WINDOW_S:
            self._swaps_s.popleft()
        return self._swaps_s

    # --- memory

    def _occupants(self, member: _Member) -> list[int]:
        """Return the models that hold memory on a device of this model."""
        return [
            key
            for key, other in self._members.items()
            if other is not member
            and other.state != "asleep"
            and not set(other.size_bytes).isdisjoint(member.size_bytes)
        ]

    def _fits(self, key: int, occupants: Iterable[int]) -> bool:
        """Return whether a model fits beside others.

        A single model always fits, because the plan allows for the largest.
        """
        member = self._members[key]
        for device, own in member.size_bytes.items():
            sizes = [
                self._members[other].size_bytes[device]
                for other in occupants
                if device in self._members[other].size_bytes
            ]
            known = [size for size in (own, *sizes) if size is not None]
            if sizes and (len(known) <= len(sizes) or sum(known) > self._turns_bytes(device)):
                return False
        return True

    def _turns_bytes(self, device: str) -> int:
        """Return the bytes on a device that models which take turns share.

        They are the planned bytes, or without a plan the bytes of the largest model.
        """
        if (room := self._room_bytes.get(device)) is not None:
            return room
        return max(member.size_bytes.get(device) or 0 for member in self._members.values())
