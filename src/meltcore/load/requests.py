"""The bytes of each request, made from the workload and the run's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from meltcore.load.config import LoadConfig
from meltcore.load.connection import Target
from meltcore.load.workload import Workload

RECOUNT_SAMPLE = 64  # answers of a level whose text is kept for the tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """One request ready to be written. `keep_text`: its answer is to be judged or re-counted."""

    index: int
    data: bytes
    judge: Callable[[str], bool] | None
    sampled: bool  # its text is kept in its record


class RequestMaker:
    """Makes request `i` of a level: prompt `first + i` of the workload, so no level repeats another's prompts."""

    def __init__(self, config: LoadConfig, target: Target, model: str, workload: Workload, first: int) -> None:
        self._common: dict[str, Any] = {"model": model, "stream": config.stream}
        if config.stream:
            options = {"include_usage": True}
            if config.continuous_usage:
                options["continuous_usage_stats"] = True
            self._common["stream_options"] = options
        if config.temperature is not None:
            self._common["temperature"] = config.temperature
        self._extra = config.extra_body
        self._target = target
        self._workload = workload
        self._first = first
        self._kept = None if config.keep_text else RECOUNT_SAMPLE if config.tokenizer is not None else 0
        self._encode = msgspec.json.Encoder().encode

    def make(self, index: int) -> Request:
        """`index` counts from 0 within the level."""
        prompt = self._workload.prompt(self._first + index)
        body = self._encode({**self._common, **prompt.fields, **self._extra})
        data = self._target.head("POST", prompt.path, len(body)) + body
        return Request(index, data, prompt.judge, self._kept is None or index < self._kept)
