"""Lets sleepable models take turns: reads how urgently each model is needed, and carries out the swaps of the policy.

The numbers of waiting requests are in statistics that all processes share, so no message can be lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from meltcore.common.errors import ConfigError
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.run.upstream_model import UpstreamModel
from meltcore.fleet.swap.residency import Demand, Residency, Swap
from meltcore.fleet.swap.sleep import put_to_sleep, refuse_waiting, wake_up
from meltcore.serve.requests.stats import CLASSES
from meltcore.settings.fleet_spec import ResidencySection, TimeoutsSection

Model = ServedModel | UpstreamModel
CPU = "cpu"  # the device of engines without a GPU
TICK_S = 0.02
# A request that was refused because its model would wake too late keeps it wanted for so long.
WANTED_S = 60.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # of a wake that failed
# From the start of a fleet on: for so long first loads wait for models whose tasks are not known, to keep their order.
ORDER_LIMIT_S = 5.0


class Turns:
    """Puts the sleepable models of a fleet to sleep and wakes them."""

    def __init__(self, config: ResidencySection, timeouts: TimeoutsSection, room_bytes: Mapping[str, int]) -> None:
        """Create the object without models.

        `room_bytes` are the bytes that models which take turns share, by device.
        """
        self._config = config
        self._timeouts = timeouts
        self._policy = Residency(config, room_bytes)
        self._models: dict[int, Model] = {}
        self._forced: set[int] = set()  # that an operator wants
        self._woke_s: dict[int, float] = {}
        self._failures: Counter[int] = Counter()  # of wakes in a row
        self._swaps: set[asyncio.Task[None]] = set()
        self._run: asyncio.Task[None] | None = None
        self._ordered_until_s = 0.0

    def change_config(self, config: ResidencySection, room_bytes: Mapping[str, int]) -> None:
        """Use the settings of another plan, in which the memory for models that take turns may differ."""
        self._config = config
        self._policy.change_config(config, room_bytes)

    # --- models

    def add(self, model: Model) -> None:
        """Add a model before it is loaded. It is loaded when the policy wakes it.

        Models that are always on are ignored.
        """
        if not model.is_sleepable:
            return
        self._models[model.number] = model
        self._policy.add(model.number, CLASSES.index(model.priority_class), device_bytes(model))

    def update_devices(self) -> None:
        """Store the devices on which a cluster has started engines."""
        for key, model in self._models.items():
            self._policy.move(key, device_bytes(model))

    def start(self) -> None:
        """Begin to load and swap models, after all models of the start were added.

        The models of the most urgent class are loaded last, so they stay awake. Only a model whose task is found later
        than ORDER_LIMIT_S may come after them.
        """
        self._ordered_until_s = time.monotonic() + ORDER_LIMIT_S
        self._run = asyncio.create_task(self._run_until_cancelled())

    def remove(self, model: Model) -> None:
        """Remove a model whose engines have ended."""
        self._models.pop(model.number, None)
        self._policy.remove(model.number)
        self._forced.discard(model.number)

    async def stop(self) -> None:
        """Stop all swaps, even swaps that are not complete."""
        tasks = [task for task in (self._run, *self._swaps) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- operators

    async def sleep(self, model: Model) -> None:
        """Put a model to sleep until a request or `wake` wakes it. Raises ConfigError if it cannot sleep now."""
        key = self._key(model)
        if self._policy.state(key) == "asleep":
            return
        if self._policy.state(key) != "awake":
            raise ConfigError(f"{model.name} is {model.status}; try again when it is ready")
        self._policy.begin_sleep(key)
        await self._sleep(key)

    async def wake(self, model: Model) -> None:
        """Wake a model before a request needs it, and put other models to sleep for it.

        Raises ConfigError if the model could not be woken.
        """
        key = self._key(model)
        failures = self._failures[key]
        deadline_s = time.monotonic() + 2 * self._timeouts.start_s
        self._forced.add(key)
        try:
            while self._models.get(key) is model and time.monotonic() < deadline_s:
                if self._policy.state(key) == "awake":
                    break
                if self._failures[key] > failures or model.status == "failed":
                    raise ConfigError(f"{model.name} could not be woken: {model.reason}")
                await asyncio.sleep(TICK_S)
        finally:
            self._forced.discard(key)
        if model.status != "ready":
            raise ConfigError(f"{model.name} could not be woken: {model.reason}")

    def _key(self, model: Model) -> int:
        if model.number not in self._policy:
            raise ConfigError(f"{model.name} is always on: `residency: sleepable` in fleet.yaml lets it sleep")
        return model.number

    # --- turns

    async def _run_until_cancelled(self) -> None:
        while True:
            self._tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _tick(self, now_s: float) -> None:
        demands = {key: self._demand(key, model, now_s) for key, model in self._models.items()}
        for swap in self._policy.decide(now_s, demands):
            task = asyncio.create_task(self._swap(swap))
            self._swaps.add(task)
            task.add_done_callback(self._swaps.discard)
        for key, model in self._models.items():
            if self._policy.state(key) != "awake":
                model.stats.set("wake_at_s", self._policy.wake_at_s(key, now_s))

    def _demand(self, key: int, model: Model, now_s: float) -> Demand:
        stats = model.stats
        if model.status == "failed":
            return Demand()
        if model.is_loading:  # the most urgent class last: it stays awake
            is_ordered = now_s > self._ordered_until_s or all(each.prepared.is_set() for each in self._models.values())
            can_load = is_ordered and model.prepared.is_set() and model.status != "draining"
            return Demand(-CLASSES.index(model.priority_class), is_forced=True) if can_load else Demand()
        rank = next((index for index, name in enumerate(CLASSES) if stats.total(f"queue_requests/{name}")), None)
        wanted_s = stats.max_value("wanted_s")
        if rank is None and now_s - wanted_s < WANTED_S and wanted_s > self._woke_s.get(key, 0.0):
            rank = CLASSES.index(model.priority_class)
        running = any(stats.open_requests(replica) for replica in range(stats.replicas))
        return Demand(rank, running, is_forced=key in self._forced)

    async def _swap(self, swap: Swap) -> None:
        await asyncio.gather(*(self._sleep(key) for key in swap.sleep))
        model = self._models.get(swap.wake)
        if model is None:
            return
        if model.is_loading:
            await self._load(swap.wake, model)
            return
        began_s = time.monotonic()
        problem = await wake_up(model, self._timeouts.start_s)
        now_s = time.monotonic()
        if problem:
            pause_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** self._failures[swap.wake])
            self._failures[swap.wake] += 1
            self._policy.block(swap.wake, now_s + pause_s)
            refuse_waiting(model, problem, now_s + pause_s)
            return
        del self._failures[swap.wake]
        self._woke_s[swap.wake] = now_s
        self._policy.woke(swap.wake, now_s, now_s - began_s)

    async def _sleep(self, key: int) -> None:
        if (model := self._models.get(key)) is not None:
            await put_to_sleep(model, self._config.keep, self._timeouts.drain_s)
        self._policy.fell_asleep(key)

    async def _load(self, key: int, model: Model) -> None:
        """Let a model load for the first time."""
        model.may_run.set()
        if model.loading is not None:
            await asyncio.wait({model.loading}, timeout=self._timeouts.start_s)
        if model.is_loading and not (isinstance(model, ServedModel) and model.is_pending):
            await model.fail_loading(f"it was not loaded within {self._timeouts.start_s:g} s (timeouts.start_s)")
        if model.status == "failed":
            self._policy.fell_asleep(key)
        else:
            self._policy.woke(key, time.monotonic(), 0.0)


def device_bytes(model: Model) -> dict[str, int | None]:
    """Return the bytes that a model takes on each device while it is awake. Unknown bytes are None."""
    if isinstance(model, ServedModel):
        placed = [(each.gpu_names, each.engine.memory_bytes) for each in model.replicas]
    else:
        placed = [(frozenset(map(str, gpus)), model.config.memory) for gpus in model.config.replica_gpus]
    found: dict[str, int | None] = {}
    for names, size in placed:
        for device in names or {CPU}:
            before = found.get(device, 0)
            found[device] = None if size is None or before is None else before + size
    return found
