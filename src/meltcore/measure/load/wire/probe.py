"""Queries the models of a server and its number of requests in flight, outside the measured requests."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.served_model import model_facts
from meltcore.measure.load.wire.connection import HttpRequestError, Target, get, request
from meltcore.measure.load.wire.response import BadJsonError, decode_json

PROBE_TIMEOUT_S = 10.0
SAMPLE_S = 0.5

_decoder = msgspec.json.Decoder(Any)
_GAUGE_LINE = re.compile(r"^(?:meltcore|vllm):(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


async def served_model(target: Target, model: str | None, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """Return the name of the model to request, and the fields that the server reports about it.

    The name is `model`, or the first model of /v1/models if `model` is None. A server without that list reports no
    fields and needs a `model`. Raises HttpRequestError if the server does not answer, and ConfigError if there is no
    model name.
    """
    response = await request(target, "GET", "/v1/models", timeout_s=timeout_s)
    model_list = None
    if response.status == 200:
        with suppress(BadJsonError):
            model_list = decode_json(_decoder, response.body)
    try:
        model_name = model or str(model_list["data"][0]["id"])  # type: ignore[index]  # whatever it is
    except (KeyError, IndexError, TypeError) as error:
        response_text = f"status {response.status}, {response.body[:80]!r}"
        raise ConfigError(
            f"/v1/models of {target.url} names no model ({response_text}); give one with --model"
        ) from error
    return model_name, model_facts(model_list, model_name)


async def first_model(target: Target) -> str:
    """Return the first model of /v1/models. Raises ConfigError if the server does not answer or names no model."""
    try:
        return (await served_model(target, None, PROBE_TIMEOUT_S))[0]
    except HttpRequestError as error:
        raise ConfigError(f"{target.url} does not answer: {error}") from error


async def served_facts(target: Target, model: str) -> dict[str, Any]:
    """Return the fields beyond OpenAI's that the server reports about `model`. Without any, return an empty dict."""
    with suppress(HttpRequestError):
        return (await served_model(target, model, PROBE_TIMEOUT_S))[1]
    return {}


def parse_gauges(text: str) -> dict[str, float]:
    """Return the values of a Prometheus page by name, without the prefix. Series of one name are added up."""
    gauges: dict[str, float] = {}
    for name, value in _GAUGE_LINE.findall(text):
        gauges[name] = gauges.get(name, 0.0) + float(value)
    return gauges


class InFlightProbe:
    """Measures the server's own peak of requests in flight during a level.

    The peak is the maximum of sampled gauges: `requests_in_flight`, or `num_requests_running` + `num_requests_waiting`.
    Some servers report their own maximum (`meltcore:requests_in_flight_peak`). That value is used if it changed during
    the level, because an unchanged value may be older than the level. The peak is None if the server reported neither
    during the level.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._initial_high_water_mark: float | None = None
        self._high_water_mark: float | None = None
        self._samples: list[tuple[float, float, float]] = []  # request and response time in s, requests in flight
        self._sampling_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the server's maximum before the release, then sample until `finish` is called."""
        gauges = await self._read_gauges()
        if gauges is None:
            return
        self._initial_high_water_mark = gauges.get("requests_in_flight_peak")
        self._sampling_task = asyncio.ensure_future(self._sample())

    async def finish(self, start_s: float, end_s: float) -> int | None:
        """Stop sampling and return the peak of the level, which lasted from `start_s` to `end_s` (monotonic clock).

        Samples before the release and after the last answer are ignored. Without samples and a reported maximum, return
        None.
        """
        if self._sampling_task is None:
            return None
        self._sampling_task.cancel()
        gauges = await self._read_gauges()
        if gauges is not None:
            self._high_water_mark = gauges.get("requests_in_flight_peak")
        peaks = [count for sent_s, received_s, count in self._samples if start_s <= sent_s and received_s <= end_s]
        if self._high_water_mark is not None and self._high_water_mark != self._initial_high_water_mark:
            peaks.append(self._high_water_mark)
        return round(max(peaks)) if peaks else None

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            sent_s = time.monotonic()
            in_flight = _in_flight(await self._read_gauges() or {})
            if in_flight is not None:
                self._samples.append((sent_s, time.monotonic(), in_flight))

    async def _read_gauges(self) -> dict[str, float] | None:
        try:
            status, body = await get(self._target, "/metrics", PROBE_TIMEOUT_S)
        except HttpRequestError:
            return None  # the gauge is optional; the requests themselves show whether the server is alive
        return parse_gauges(body.decode("utf-8", "replace")) if status == 200 else None


def _in_flight(gauges: dict[str, float]) -> float | None:
    """Return the number of requests in flight, or None if the server has no such gauge."""
    if "requests_in_flight" in gauges:
        return gauges["requests_in_flight"]
    if {"num_requests_running", "num_requests_waiting"} <= gauges.keys():
        return gauges["num_requests_running"] + gauges["num_requests_waiting"]
    return None
