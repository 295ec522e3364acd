"""Memory that engines need: enough for what is asked, no MiB more, and more for longer contexts."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meltcore.common.errors import ConfigError
from meltcore.common.options import Size
from meltcore.engine.core.kv_cache import PageLayout
from meltcore.engine.memory.memory_needs import engine_needs
from meltcore.engine.memory.memory_plan import MemoryPlan
from meltcore.engine.worker import loading
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.decoders.model import Model
from meltcore.models.loader import build_meta_model
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection

GEMMA = {"checkpoint": "not/here", "shapes": "google/gemma-3-27b-it", "format": "q4_0", "max_num_seqs": 8}
FLEET = {
    "generation": {**GEMMA, "max_model_len": 8192},
    "translation": {"checkpoint": "not/here", "shapes": "ai4bharat/indictrans2-en-indic-1B"},
    "transcription": {"checkpoint": "ai4bharat/indic-conformer-600m-multilingual", "load_format": "dummy"},
    "synthesis": {"checkpoint": "not/here", "shapes": "ai4bharat/IndicF5"},
}
FLEET = {task: fields | {"task": task} for task, fields in FLEET.items()}


@pytest.mark.parametrize("task", FLEET)
def test_rows_add_up_to_the_budget_of_each_task(task: str) -> None:
    needs = engine_needs(ModelSection(**FLEET[task]))
    assert needs.task == task
    assert 0 <= needs.budget_bytes - sum(row.size_bytes for row in needs.rows) < 2**20 + 0.08 * needs.budget_bytes
    assert needs.budget_bytes > needs.rows[0].size_bytes > 0


NAMES = ["Qwen/Qwen3-0.6B", "google/gemma-3-1b-it", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B-AWQ"]
NAMES += ["Qwen/Qwen3.5-35B-A3B-FP8"]


@functools.cache
def meta_model(name: str) -> Model:
    return build_meta_model(open_checkpoint(name, files="config"), torch.bfloat16, torch.device("meta"))


def engine_plan(name: str, memory_bytes: int, limits: dict[str, Any]) -> MemoryPlan:
    """The plan that an engine on a GPU makes of the model that it builds."""
    config = EngineConfig(model=name, memory_bytes=memory_bytes, **limits)
    length = limits["max_model_len"]
    with mock.patch.object(loading, "byte_budget", lambda config, *_: config.memory_bytes):
        return loading._plan_memory(config, meta_model(name), torch.device("cuda"), length, torch.bfloat16)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    length=st.integers(256, 16_384),
    seqs=st.integers(1, 80),
    batched=st.sampled_from([None, 256, 4096]),
    enforce_eager=st.booleans(),
)
def test_engine_accepts_the_budget_that_is_planned_for_it(
    name: str, length: int, seqs: int, batched: int | None, enforce_eager: bool
) -> None:
    limits: dict[str, Any] = {"max_model_len": length, "max_num_seqs": seqs, "enforce_eager": enforce_eager}
    model = ModelSection(checkpoint="not/here", shapes=name, max_num_batched_tokens=batched, **limits)
    needs = engine_needs(model)
    assert needs.max_num_batched_tokens is not None
    limits["max_num_batched_tokens"] = needs.max_num_batched_tokens
    plan = engine_plan(name, needs.budget_bytes, limits)
    layout = PageLayout.of(group_layers(meta_model(name).kv_cache_specs()))
    assert plan.pages >= layout.pages_together(seqs, length, needs.max_num_batched_tokens)
    assert plan.max_num_seqs == seqs
    assert [(row.name, row.size_bytes) for row in plan.rows] == [(row.name, row.size_bytes) for row in needs.rows]
    assert sum(row.size_bytes for row in plan.rows) <= needs.budget_bytes
    assert plan.workspace is not None
    assert (plan.workspace.graphs == 0) == enforce_eager
    for more in ({"max_model_len": length + 512}, {"max_num_seqs": seqs + 1}):
        assert engine_needs(msgspec.structs.replace(model, **more)).budget_bytes >= needs.budget_bytes


def test_budget_without_a_number_of_sequences_has_no_more_than_its_fraction_holds() -> None:
    few = engine_plan("Qwen/Qwen3-0.6B", 6 * 2**30, {"max_model_len": 4096, "max_num_batched_tokens": 8192})
    many = engine_plan("Qwen/Qwen3-0.6B", 80 * 2**30, {"max_model_len": 4096, "max_num_batched_tokens": 8192})
    assert 16 <= few.max_num_seqs < many.max_num_seqs == 1024
    assert few.workspace is not None
    assert few.workspace.total_bytes < 0.5 * 6 * 2**30


def test_one_mebibyte_less_is_not_enough() -> None:
    needs = engine_needs(ModelSection(**FLEET["generation"]))
    pages = next(row for row in needs.rows if row.name == "KV pages").size_bytes
    less = engine_needs(ModelSection(**FLEET["generation"], memory=Size(needs.budget_bytes - 2**20)))
    assert next(row for row in less.rows if row.name == "KV pages").size_bytes < pages


def test_memory_grows_with_context_and_concurrency() -> None:
    def budget(length: int, seqs: int) -> int:
        return engine_needs(ModelSection(**{**GEMMA, "max_model_len": length, "max_num_seqs": seqs})).budget_bytes

    lengths = [budget(length, 8) for length in (512, 1024, 4096, 8192, 65_536)]
    assert lengths == sorted(set(lengths))
    counts = [budget(8192, seqs) for seqs in (1, 2, 8, 64)]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(("task", "full"), [("translation", 1024), ("transcription", 88), ("synthesis", 4)])
def test_concurrency_ends_where_a_step_is_full(task: str, full: int) -> None:
    less, most, more = (
        engine_needs(ModelSection(**{**FLEET[task], "max_num_seqs": seqs})) for seqs in (full - 1, full, 65_536)
    )
    assert (less.concurrency, most.concurrency, more.concurrency) == (full - 1, full, full)
    assert less.budget_bytes < most.budget_bytes == more.budget_bytes


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold the weights"):
        engine_needs(ModelSection(**FLEET["generation"], memory=Size(2**30)))
