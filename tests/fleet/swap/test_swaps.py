"""Fifty swaps under load, with scripted engines: nothing is lost, no byte is kept, and no model is passed over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from meltcore.common.tasks import DEFAULT
from meltcore.fleet.plan.placement import engine_config
from meltcore.fleet.run import supervised_model
from meltcore.fleet.run.replica import Replica
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.run.start_gate import StartGate
from meltcore.fleet.run.supervised_model import ServerContext
from meltcore.fleet.swap import turns
from meltcore.fleet.swap.residency import Demand, Swap
from meltcore.fleet.swap.turns import CPU, Turns
from meltcore.protocol.generation import GenerationReady
from meltcore.protocol.shell import Asleep, Awake, Sleep
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import ModelSection, ResidencySection, TimeoutsSection

LIMITS = GenerationReady("CPU", "float32", "dummy", [], 0.0, 64, 8, 300, 64, 64, ["float32"], "float32", "none")
RESIDENCY = ResidencySection(minimum_s=5.0, turn_s=20.0, swaps_per_minute=60)
SIZES, ROOM, RESIDENT = (6, 5, 4, 3), 9, 7  # bytes awake, of all awake models together, and of one that sleeps
TICK_S, SERVICE_S, NUM_SWAPS = 0.5, 1.0, 50


class Engine:
    """An engine that holds `device[key]` bytes while it is awake, and answers immediately."""

    loaded = pid = node = None
    cpus, is_evicted = (), False

    def __init__(self, device: dict[int, int], key: int, on_message: Any) -> None:
        self._device, self._key, self._on_message = device, key, on_message

    async def prepare(self) -> None:
        """A node has memory for it."""

    leave = wait_freed = prepare

    async def start(self) -> GenerationReady:
        self._device[self._key] = SIZES[self._key]
        return LIMITS

    async def sharing_problem(self) -> str:
        return ""

    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        self._device[self._key] = 0

    def send(self, message: Any) -> None:
        is_sleep = isinstance(message, Sleep)
        self._device[self._key] = 0 if is_sleep else SIZES[self._key]
        answer = Asleep(SIZES[self._key], 0.0, RESIDENT, None) if is_sleep else Awake(0.0, 0, None)
        asyncio.get_running_loop().call_soon(self._on_message, answer)


class Unproved(RestartAfterPause):
    async def prove(self, probe: Any, left_s: float) -> None:
        """An engine that is scripted answers."""


class Fleet:
    """Models of one class that take turns, their requests, and what the policy has decided."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self.device, self.engines = 1000.0, dict.fromkeys(range(len(SIZES)), 0), 0
        self.waiting: list[deque[float]] = [deque() for _ in SIZES]
        self.open: list[deque[float]] = [deque() for _ in SIZES]
        self.num_sent = self.num_served = 0
        self.swaps: list[Swap] = []
        self.woke_s: dict[int, float] = {}
        self.wanted_s: dict[int, float] = {}
        self.turns = Turns(RESIDENCY, TimeoutsSection(), {CPU: ROOM})
        self._decide = self.turns._policy.decide
        self.turns._policy.decide = self.decide  # type: ignore[method-assign]
        stats = ServerStats(())
        self.models = [self._add(number, stats, folder) for number in range(len(SIZES))]

    def _add(self, number: int, stats: ServerStats, folder: Path) -> ServedModel:
        def new_engine(*call: Any) -> Engine:
            self.engines += 1
            return Engine(self.device, number, call[3])

        parts = ServerContext(
            pool=Mock(num_models=len(SIZES), open_model=AsyncMock(return_value=True)),
            gate=StartGate(),
            log=Mock(),
            report=Mock(),
            sockets=folder,
            next_engine=itertools.count().__next__,
            launcher=SimpleNamespace(problem="", new_engine=new_engine),  # type: ignore[arg-type]
            policy=Unproved(),
            timeouts=TimeoutsSection(),
            log_folder=folder,
        )
        section = ModelSection(checkpoint="none", device="cpu", residency="sleepable")
        engine = msgspec.structs.replace(engine_config(section), memory_bytes=SIZES[number])
        replica = Replica(index=0, log=None, engine=engine)
        model = ServedModel(number, f"m{number}", section, DEFAULT, [replica], stats.add_model(number, 1), parts)
        self.turns.add(model)
        model.prepared.set()
        model.loading = asyncio.create_task(model.load_or_fail())
        return model

    def decide(self, now_s: float, demands: Mapping[int, Demand]) -> list[Swap]:
        """Check each decision: who waited longest is next, and who must sleep was loaded for long enough."""
        self.wanted_s = {
            key: self.wanted_s.get(key, now_s)
            for key, demand in demands.items()
            if self.turns._policy.state(key) == "asleep" and demand.rank is not None
        }
        is_loading = any(model.is_loading for model in self.models)
        swaps = self._decide(now_s, demands)
        if swaps and not is_loading:
            order = [self.wanted_s[swap.wake] for swap in swaps]
            assert order == sorted(self.wanted_s.values())[: len(order)], "another one has waited longer"
        for swap in swaps if not is_loading else ():
            for victim in swap.sleep:
                is_busy = demands[victim].running or demands[victim].rank is not None
                stayed_s = now_s - self.woke_s[victim]
                assert stayed_s >= (RESIDENCY.turn_s if is_busy else RESIDENCY.minimum_s)
            self.swaps += [swap] if swap.sleep else []
        return swaps

    async def tick(self, arrivals: list[int]) -> None:
        self.now_s += TICK_S
        for key in arrivals:
            self.num_sent += 1
            self.waiting[key].append(self.now_s)
            self.models[key].stats.add("queue_requests/standard")
        self.turns._tick(self.now_s)
        for _ in range(50):  # all that can happen at this time
            await asyncio.sleep(0)
        assert sum(self.device.values()) <= ROOM, "more than the models may have together"
        for key, model in enumerate(self.models):
            if model.status == "ready" and not model.stats.is_asleep:
                self.woke_s.setdefault(key, self.now_s)
                while self.waiting[key]:
                    self.waiting[key].popleft()
                    model.stats.add("queue_requests/standard", -1)
                    model.stats.assign(0, 1)
                    self.open[key].append(self.now_s + SERVICE_S)
            elif self.device[key] == 0:
                self.woke_s.pop(key, None)
            while self.open[key] and self.open[key][0] <= self.now_s:
                self.open[key].popleft()
                model.stats.unassign(0, 1)
                self.num_served += 1

    async def end(self) -> None:
        await self.turns.stop()
        await asyncio.gather(*(model.stop() for model in self.models))


@pytest.mark.slow
def test_fifty_swaps_lose_no_request_and_keep_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervised_model, "POLL_S", 0.0)

    async def live() -> None:
        fleet, chance = Fleet(tmp_path), random.Random(4)
        monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: fleet.now_s))
        try:
            for _ in range(20_000):
                if len(fleet.swaps) >= NUM_SWAPS:
                    break
                await fleet.tick([key for key in range(len(SIZES)) if chance.random() < 0.3])
            assert len(fleet.swaps) >= NUM_SWAPS
            while fleet.num_served < fleet.num_sent:
                await fleet.tick([])
            assert fleet.num_sent > 4 * NUM_SWAPS
            assert not any(model.stats.open_requests(0) for model in fleet.models)
            assert fleet.engines == 2 * len(SIZES), "each was started once, beside the one of its model's first state"
            asleep = [model for key, model in enumerate(fleet.models) if fleet.device[key] == 0]
            assert asleep
            assert {model.replicas[0].resident_bytes for model in asleep} == {RESIDENT}
            assert {swap.wake for swap in fleet.swaps} == set(range(len(SIZES)))
        finally:
            await fleet.end()
        assert set(fleet.device.values()) == {0}

    asyncio.run(live())
