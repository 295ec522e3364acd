"""Loads a translation checkpoint, and translates a list of token sequences through the slots of one beam search."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meltcore.engine.translation.beam_search import BeamSearch
from meltcore.engine.translation.beam_state import BeamOptions
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_checkpoint
from meltcore.models.loader import load_task_model, parameter_bytes, planned_device, task_dtype
from meltcore.models.tasks.indictrans2 import IndicTrans2
from meltcore.settings.fleet_spec import ModelSection


def load_translation_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dummy_seed: int | None = None,
    progress: Progress = lambda _stage, _part: None,
) -> IndicTrans2:
    """Build the model and load its weights. With `dummy_seed` it gets random weights instead.

    Raises ConfigError when the configuration or a file cannot be used, or memory is not enough.
    """
    model = load_task_model(_meta_model(checkpoint, dtype), checkpoint, device, dummy_seed, progress)
    model.prepare()
    return model


def _meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> IndicTrans2:
    with torch.device("meta"):
        return IndicTrans2(checkpoint.config).to(dtype)


def weight_bytes(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a model's weights, for a plan."""
    assert model.checkpoint is not None
    dtype = task_dtype(model.dtype, planned_device(on_cpu), on_gpu=torch.float16)
    return parameter_bytes(_meta_model(open_checkpoint(model.checkpoint, files="config"), dtype))


def translate_all(
    model: IndicTrans2, sources: Sequence[list[int]], options: BeamOptions, *, slots: int
) -> list[list[int]]:
    """Return the best translation of each source. At most `slots` sources are decoded together.

    Long sources begin first, and shorter sources fill the slots that become free.
    """
    if not sources:
        return []
    search = BeamSearch(model, options, slots=min(slots, len(sources)), max_source=max(map(len, sources)))
    waiting = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    outputs: dict[object, list[int]] = {}
    while waiting or search.num_running:
        count = min(search.num_free, len(waiting))
        keys = waiting[len(waiting) - count :]
        del waiting[len(waiting) - count :]
        search.add(keys, [sources[key] for key in keys])
        outputs |= {translation.key: translation.token_ids for translation in search.step()}
    return [outputs[i] for i in range(len(sources))]
