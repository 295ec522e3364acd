"""Puts the engines of a model to sleep and wakes them. An engine that cannot sleep is ended, and started again later.

While a model sleeps, its requests wait in the queues of the API servers. The API servers do not know how the model
sleeps. Its engine processes may have freed their memory, or may be gone because they died or have no sleep mode.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, TypeVar

from meltcore.fleet.run.replica import BaseReplica
from meltcore.fleet.run.supervised_model import SupervisedModel, wait_while
from meltcore.protocol.channel import EndRequests
from meltcore.serve.requests.admission import MODEL_ASLEEP

OVERDUE = "the model is put to sleep for another one, and the time for its open requests is over; send it again"
WAKE_LIMIT_S = 120.0  # for an engine's answer, when it is put to sleep or woken
_END_LIMIT_S = 1.0  # for API servers to end requests that were given an error
_R = TypeVar("_R", bound=BaseReplica[Any])
Keep = Literal["host", "disk"]  # where weights of a model that sleeps are
_LEVELS: dict[Keep, int] = {"host": 1, "disk": 2}


async def put_to_sleep(model: SupervisedModel[Any], keep: Keep, drain_limit_s: float) -> None:
    """Wait for the open requests of a model within the limit, and free its memory. New requests wait.

    The model holds no memory afterwards in any case.
    """
    async with model.changing:
        model.begin_sleep()
        awake = [replica for replica in model.replicas if replica.state == "ready"]
        others = [replica for replica in model.replicas if replica.state not in ("ready", "failed")]
        for replica in awake:
            replica.apply("drain")
        await asyncio.gather(
            *(_sleep(model, replica, keep, drain_limit_s) for replica in awake),
            *(model.end_engine(replica) for replica in others),
        )
        holds_weights = any(replica.state == "sleeping" for replica in model.replicas)
        model.stats.set("sleep_level", _LEVELS[keep if holds_weights else "disk"])
        model.update_status()


async def wake_up(model: SupervisedModel[Any], start_limit_s: float) -> str:
    """Wake a model. Return the reason if its engines still sleep, or "" if it can serve or its engines are starting."""
    async with model.changing:
        began_s = time.monotonic()
        model.begin_wake()
        asleep = [replica for replica in model.replicas if replica.state == "sleeping"]
        answers = await asyncio.gather(*(model.wake_process(replica, WAKE_LIMIT_S) for replica in asleep))
        failed = [(replica, reason) for replica, reason in zip(asleep, answers, strict=True) if reason]
        if failed and len(failed) == len(model.replicas):
            model.begin_sleep()
            model.update_status()
            return failed[0][1]
        for replica, _ in failed:
            if replica.state == "sleeping":  # else it has died meanwhile
                await model.end_engine(replica)  # it is started like one that has died
        await _wait_started(model, start_limit_s)
        model.end_wake(time.monotonic() - began_s)
        return ""


def refuse_waiting(model: SupervisedModel[Any], reason: str, until_s: float) -> None:
    """End the requests that wait for a model that could not be woken. The next attempt is at `until_s`."""
    model.stats.set("wake_at_s", until_s)
    model.broadcast(
        EndRequests(model.number, f"{model.name} sleeps and could not be woken: {reason}", 503, MODEL_ASLEEP)
    )


async def _sleep(model: SupervisedModel[Any], replica: BaseReplica[Any], keep: Keep, drain_limit_s: float) -> None:
    await _drain(model, replica.index, drain_limit_s)
    is_asleep = replica.state == "draining" and await model.sleep_process(replica, keep, WAKE_LIMIT_S)
    if replica.state == "draining":  # else it has died, which was reported
        if is_asleep:
            replica.apply("slept")
        else:
            await model.end_engine(replica)


async def _drain(model: SupervisedModel[Any], replica: int, limit_s: float) -> None:
    """Wait until a replica has no open requests. Requests that exceed the limit are ended."""
    if not await wait_while(lambda: model.stats.open_requests(replica), limit_s):
        model.broadcast(EndRequests(model.number, OVERDUE, 503, MODEL_ASLEEP, replica))
        await wait_while(lambda: model.stats.open_requests(replica), _END_LIMIT_S)


async def _wait_started(model: SupervisedModel[Any], limit_s: float) -> None:
    """Wait until each engine serves or its first start has failed. Engines that exceed the limit are ended."""
    starting = ("unloaded", "waiting", "loading")
    await wait_while(lambda: any(each.state in starting for each in model.replicas), limit_s)
    for each in model.replicas:
        if each.state in starting:
            each.process.fail(f"it was not loaded within {limit_s:g} s")
