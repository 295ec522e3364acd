"""Finds the models of a server by its address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.load.tasks.task import ServedModel, default_task, find_task
from meltcore.measure.load.wire.connection import HttpRequestError, Target, request
from meltcore.measure.load.wire.probe import PROBE_TIMEOUT_S
from meltcore.measure.load.wire.response import BadJsonError, decode_json


async def find_models(target: Target, names: Sequence[str] = ()) -> list[ServedModel]:
    """Return the models of /v1/models without aliases, in the server's order. With `names`, return only these models.

    Raises ConfigError if the server does not answer, lists no model, or lacks one of `names`.
    """
    try:
        response = await request(target, "GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
    except HttpRequestError as error:
        raise ConfigError(f"{target.url} does not answer: {error}") from error
    try:
        cards = decode_json(msgspec.json.Decoder(), response.body)["data"] if response.status == 200 else []
        ids = {str(card["id"]) for card in cards}
    except (BadJsonError, KeyError, TypeError) as error:
        raise ConfigError(f"/v1/models of {target.url} is no list of models: {response.body[:80]!r}") from error
    unknown = [name for name in names if name not in ids]
    if unknown:
        raise ConfigError(f"--models: {unknown[0]} is not served; {target.url} has {', '.join(sorted(ids)) or 'none'}")
    if not cards:
        raise ConfigError(f"/v1/models of {target.url} names no model (status {response.status})")
    if names:
        return [_served(card) for card in cards if card["id"] in names]
    return [_served(card) for card in cards if card.get("root", card["id"]) == card["id"] or card["root"] not in ids]


def _served(card: Mapping[str, Any]) -> ServedModel:
    word = str(card.get("task") or default_task().name)
    task = find_task(word, f"/v1/models: {card['id']} has the task {word!r}")
    return ServedModel(name=str(card["id"]), task=task.name, card=card)
