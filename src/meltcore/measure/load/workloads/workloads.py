"""Opens the workload of a run: of generation, or of another task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import FIRST_AUDIO, LoadConfig
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.wire.stream import StreamedResponse, UnstreamedResponse
from meltcore.measure.load.workloads.clips import Clip
from meltcore.measure.load.workloads.dispatcher import MakeResponse
from meltcore.measure.load.workloads.task_workload import (
    TaskRequestBuilder,
    check_task_options,
    is_task,
    load_task_workload,
    task_response_maker,
)
from meltcore.measure.load.workloads.workload import Builder, RequestBuilder, Workload, load_workload


def open_workload(config: LoadConfig, num_requests: int, clips: Sequence[Clip] = ()) -> Workload:
    """Open the workload of `config` for `num_requests` requests.

    `clips` are those of a run on transcription, where another process has made them. Raises ConfigError for a malformed
    description, a file that cannot be read, and an option that has no meaning for the task.
    """
    spec = config.workload
    if is_task(spec):
        workload = load_task_workload(spec, num_requests=num_requests, seed=config.seed, clips=clips)
        check_task_options(config, workload)
        return workload
    if FIRST_AUDIO in config.slo_ms:
        raise ConfigError(f"--goodput: {FIRST_AUDIO} is of synthesis; the workload {spec} is of generation")
    return load_workload(spec, num_requests=num_requests, seed=config.seed, max_tokens=config.max_tokens)


def check_workload(config: LoadConfig) -> None:
    """Raise ConfigError where `config` has no workload that can be opened, before a server is started."""
    open_workload(config, num_requests=1)


def make_builder(config: LoadConfig, target: Target, model: str, workload: Workload, first_prompt_idx: int) -> Builder:
    """Return the builder of the requests of `workload`; prompt `first_prompt_idx` is its request 0."""
    builder = RequestBuilder if workload.task is None else TaskRequestBuilder
    return builder(config, target, model, workload, first_prompt_idx)


def response_maker(config: LoadConfig, workload: Workload) -> MakeResponse:
    """Return what makes the readers of the responses to `workload`."""
    if workload.task is not None:
        return task_response_maker(workload)
    return partial(StreamedResponse if config.stream else UnstreamedResponse, rules=config.answer_rules)
