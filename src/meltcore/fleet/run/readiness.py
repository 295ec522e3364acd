"""Sends one tiny real request to an engine. The engine must answer it before it gets requests of clients."""

from __future__ import annotations

import asyncio
from typing import Any

from meltcore.common.errors import EngineDeadError
from meltcore.fleet.processes.engine_process import EngineProcess
from meltcore.fleet.run.replica import Replica
from meltcore.protocol.engines import FromEngine
from meltcore.protocol.shell import EngineOutputs, EngineReady

PROBE_ID = "readiness"


async def probe(replica: Replica, engine: EngineProcess, limits: EngineReady, limit_s: float) -> None:
    """Send one tiny request to the engine of a replica. Raises EngineDeadError if the engine does not answer."""
    replica.probe = asyncio.get_running_loop().create_future()
    engine.send(limits.probe(PROBE_ID))
    ended = asyncio.create_task(engine.wait())
    waited: set[asyncio.Future[Any]] = {replica.probe, ended}
    try:
        await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if replica.probe.done():
            problem = replica.probe.result()
        elif ended.done():
            problem = ended.result()
        else:
            problem = f"no answer within {limit_s:g} s"
    finally:
        ended.cancel()
        replica.probe = None
    if problem:
        raise EngineDeadError(f"the readiness request failed: {problem}")


def probe_error(message: FromEngine) -> str | None:
    """Return the error with which `message` ends the request, or "" if `message` completes the answer.

    Returns None if `message` does not end the request.
    """
    if isinstance(message, EngineOutputs):
        for output in message.outputs:
            if output.request_id == PROBE_ID and output.finish_reason is not None:
                is_whole = output.finish_reason in ("stop", "length")
                return "" if is_whole else output.error or f"the engine ended it: {output.finish_reason}"
    return None
