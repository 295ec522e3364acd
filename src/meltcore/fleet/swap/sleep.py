"""Puts the engines of one model to sleep and wakes them. An engine that cannot sleep is ended, and started again.

While a model sleeps its requests wait in the queues of the API servers. They do not see how it sleeps: with an engine
process that has given its memory back, or without one because it has died or has no sleep mode.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from meltcore.fleet.run.foreign_model import ForeignModel
from meltcore.fleet.run.replica import Replica
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.run.supervised_model import POLL_S
from meltcore.protocol.channel import EndRequests
from meltcore.protocol.shell import Asleep, Awake, Sleep, Wake
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.terms import MODEL_ASLEEP
from meltcore.settings.server_config import ResidencyConfig

Model = ServedModel | ForeignModel
OVERDUE = "the model is put to sleep for another one, and the time for its open requests is over; send it again"
WAKE_LIMIT_S = 120.0  # for an engine's answer, when it is put to sleep or woken
_END_LIMIT_S = 1.0  # for API servers to end requests that were given an error
_LEVELS: dict[Literal["host", "disk"], int] = {"host": 1, "disk": 2}


async def put_to_sleep(model: Model, config: ResidencyConfig, drain_limit_s: float) -> None:
    """Let the open requests of a model finish within the limit, and free its memory. New requests wait.

    However this goes, the model holds no memory afterwards.
    """
    async with model.changing:
        model.begin_sleep()
        keep = config.keep
        if isinstance(model, ServedModel):
            awake = [replica for replica in model.replicas if replica.state == "ready"]
            others = [replica for replica in model.replicas if replica.state not in ("ready", "failed")]
            for replica in awake:
                replica.state = "draining"
            await asyncio.gather(
                *(_sleep(model, replica, config, drain_limit_s) for replica in awake),
                *(model.end_engine(replica) for replica in others),
            )
        else:
            await asyncio.gather(*(_drain(model, replica.index, drain_limit_s) for replica in model.replicas))
            keep = await model.sleep_servers(config.keep, WAKE_LIMIT_S)
        model.stats.set("sleep_level", _LEVELS[keep])
        model.update_status()


async def wake_up(model: Model, config: ResidencyConfig) -> str:
    """Wake a model; returns "" once it can serve or tries to by itself, else why its engines still sleep."""
    async with model.changing:
        began_s = time.monotonic()
        model.begin_wake()
        problems: list[str] = []
        if isinstance(model, ServedModel):
            warm = [replica for replica in model.replicas if replica.is_asleep]
            answers = await asyncio.gather(*(_wake(model, replica) for replica in warm))
            failed = [(replica, text) for replica, text in zip(warm, answers, strict=True) if text]
            problems = [text for _, text in failed]
            if failed and len(failed) == len(model.replicas):
                model.begin_sleep()
                model.update_status()
                return problems[0]
            for replica, _ in failed:
                await model.end_engine(replica)  # it is started like one that has died
        else:
            await model.wake_servers(WAKE_LIMIT_S)
        await _wait_started(model, config.start_timeout_s)
        model.end_wake(time.monotonic() - began_s)
        return ""


def refuse_waiting(model: Model, reason: str, until_s: float) -> None:
    """End the requests that wait for a model which could not be woken. `until_s`: when it is tried again."""
    model.stats.set("wake_at_s", until_s)
    model.broadcast(
        EndRequests(model.number, f"{model.name} sleeps and could not be woken: {reason}", 503, MODEL_ASLEEP)
    )


async def _sleep(model: ServedModel, replica: Replica, config: ResidencyConfig, drain_limit_s: float) -> None:
    await _drain(model, replica.index, drain_limit_s)
    answer = await _ask(model, replica, Sleep(config.keep))
    if isinstance(answer, Asleep) and answer.error is None:
        replica.state, replica.is_asleep, replica.resident_bytes = "sleeping", True, answer.resident_bytes
        model.log("engine_asleep", replica, freed_bytes=answer.freed_bytes, seconds=round(answer.seconds, 6))
        return
    reason = answer.error if isinstance(answer, Asleep) else answer
    if replica.state == "draining":  # else it has died, which is reported
        subject = model.describe(replica.index, model.name)
        model.report(f"{subject} cannot sleep ({reason}): its process is ended, and started when it is wanted")
        await model.end_engine(replica)


async def _wake(model: ServedModel, replica: Replica) -> str:
    answer = await _ask(model, replica, Wake())
    if isinstance(answer, Awake) and answer.error is None:
        replica.is_asleep = False
        replica.state = "ready"
        model.stats.mark_replica_ready(replica.index)
        model.log("engine_awake", replica, bytes_copied=answer.bytes_copied, seconds=round(answer.seconds, 6))
        return ""
    reason = answer.error if isinstance(answer, Awake) else str(answer)
    if not replica.is_asleep:  # it has died, and is started again by its model
        return ""
    model.log("wake_failed", replica, why=reason)
    model.report(f"{model.describe(replica.index, model.name)} could not be woken: {reason}")
    return str(reason)


async def _ask(model: ServedModel, replica: Replica, message: Sleep | Wake) -> Asleep | Awake | str:
    """Return an engine's answer, or why there is none."""
    engine = model.engines[replica.index]
    answer: asyncio.Future[Asleep | Awake] = asyncio.get_running_loop().create_future()
    replica.answer = answer
    engine.send(message)
    ended = asyncio.create_task(engine.wait())
    waited: set[asyncio.Future[Any]] = {answer, ended}
    try:
        await asyncio.wait(waited, timeout=WAKE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if ended.done():
            await asyncio.sleep(POLL_S)  # its model notes the end
            return ended.result()
        return f"it did not answer within {WAKE_LIMIT_S:g} s"
    finally:
        ended.cancel()
        replica.answer = None


async def _drain(model: Model, replica: int, limit_s: float) -> None:
    """Wait until a replica has no open requests; end those that take longer than the limit."""
    if not await _wait_idle(model.stats, replica, limit_s):
        model.broadcast(EndRequests(model.number, OVERDUE, 503, MODEL_ASLEEP, replica))
        await _wait_idle(model.stats, replica, _END_LIMIT_S)


async def _wait_idle(stats: ModelStats, replica: int, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while stats.open_requests(replica) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - counts in shared memory
        await asyncio.sleep(POLL_S)
    return not stats.open_requests(replica)


async def _wait_started(model: Model, limit_s: float) -> None:
    """Wait until each engine serves, or has failed to at its first try; end those that take longer than the limit."""
    starting = ("sleeping", "waiting", "loading")
    deadline_s = time.monotonic() + limit_s
    while any(each.state in starting for each in model.replicas) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    for each in model.replicas:
        if each.state in starting:
            model.fail_start(each.index, f"it was not loaded within {limit_s:g} s")
