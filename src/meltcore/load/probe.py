"""What a server says of itself, outside the measured requests: its models, and how many requests it holds."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from meltcore.errors import ConfigError
from meltcore.load.connection import ConnectError, Target, get
from meltcore.load.stream import error_message
from meltcore.results.served import model_facts

PROBE_TIMEOUT_S = 10.0
SAMPLE_S = 0.5

_GAUGE = re.compile(r"^(?:meltcore|vllm):(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(target: Target) -> str:
    """The first name in /v1/models. Raises ConfigError where the server gives none."""
    where = f"{target.scheme}://{target.host}:{target.port}"
    try:
        status, body = await get(target, "/v1/models", PROBE_TIMEOUT_S)
    except ConnectError as error:
        raise ConfigError(f"{where} does not answer: {error}") from error
    if status != 200:
        raise ConfigError(f"{where}/v1/models says {status}: {error_message(body.decode('utf-8', 'replace'))}")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}/v1/models is not in the OpenAI form: {error}") from error
    if not models:
        raise ConfigError(f"{where}/v1/models names no model; give one with --model")
    return models[0].id


async def served_facts(target: Target, model: str) -> dict[str, Any]:
    """What the server says of `model` beyond OpenAI's fields; empty where it says nothing."""
    try:
        status, body = await get(target, "/v1/models", PROBE_TIMEOUT_S)
        return model_facts(msgspec.json.decode(body), model) if status == 200 else {}
    except (ConnectError, msgspec.DecodeError):
        return {}  # a server without the listing can be loaded all the same, given --model


def read_gauges(text: str) -> dict[str, float]:
    """Values of a Prometheus page by name without prefix; series of one name are added up."""
    gauges: dict[str, float] = {}
    for name, value in _GAUGE.findall(text):
        gauges[name] = gauges.get(name, 0.0) + float(value)
    return gauges


class InFlightProbe:
    """The server's own peak of requests held during a level; None where it has no such gauge.

    Either its high-water mark (`meltcore:requests_in_flight_peak`, taken only if it moved during the level: it may be
    older), or the most seen by sampling `requests_in_flight`, or `num_requests_running` + `num_requests_waiting`.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._mark_at_start: float | None = None
        self._peak: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the high-water mark before the release, then sample until `finish`."""
        gauges = await self._read()
        if gauges is None:
            return
        self._mark_at_start = gauges.get("requests_in_flight_peak")
        self._note(gauges)
        self._task = asyncio.ensure_future(self._sample())

    async def finish(self) -> int | None:
        """The peak of the level."""
        if self._task is None:
            return None
        self._task.cancel()
        gauges = await self._read()
        if gauges is not None:
            self._note(gauges)
        return None if self._peak is None else round(self._peak)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            gauges = await self._read()
            if gauges is not None:
                self._note(gauges)

    async def _read(self) -> dict[str, float] | None:
        try:
            status, body = await get(self._target, "/metrics", PROBE_TIMEOUT_S)
        except ConnectError:
            return None  # the gauge is optional; the requests themselves tell whether the server lives
        return read_gauges(body.decode("utf-8", "replace")) if status == 200 else None

    def _note(self, gauges: dict[str, float]) -> None:
        held = gauges.get("requests_in_flight")
        if held is None and {"num_requests_running", "num_requests_waiting"} <= gauges.keys():
            held = gauges["num_requests_running"] + gauges["num_requests_waiting"]
        mark = gauges.get("requests_in_flight_peak")
        candidates = [self._peak, held, mark if mark != self._mark_at_start else None]
        known = [value for value in candidates if value is not None]
        self._peak = max(known) if known else None
