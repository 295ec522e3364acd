"""Computes embeddings and scores for the batch engine. A batch takes one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from meltcore.common.errors import RequestError
from meltcore.common.tasks import task_of_part
from meltcore.engine.embedding.memory import MAX_BATCH_TOKENS, plan_embedding
from meltcore.engine.host.device import byte_budget, choose_device, describe_device, has_budget
from meltcore.engine.host.sleep_memory import SleepableTask
from meltcore.engine.tasks.batch_engine import BatchEngine, OneStepTask, check_options
from meltcore.kernels.memory_pools import free_cached_memory
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_checkpoint, open_task_checkpoint
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.models.loader import (
    allocate,
    check_memory,
    fill_dummy_weights,
    load_weights,
    parameter_bytes,
    planned_device,
    task_dtype,
)
from meltcore.models.tasks.encoder import TextEncoder
from meltcore.protocol.embedding import Embed, EmbeddingOutputs, EmbeddingReady, EmbeddingResult
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection

_ID_BYTES = 4  # int32, as messages have token ids


class EmbeddingTask(SleepableTask, OneStepTask[Embed, EmbeddingResult]):
    """Computes embeddings, or scores of pairs, with a BERT-class encoder on one device."""

    result, message = EmbeddingResult, EmbeddingOutputs

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda _stage, _part: None
    ) -> None:
        """Load the model and plan its memory.

        Raises ConfigError if the checkpoint or a setting cannot work, or if memory is not enough for one input.
        """
        start_s = time.monotonic()
        task, is_dummy = task_of_part(__name__), config.load_format == "dummy"
        check_options(config, task)
        checkpoint = open_task_checkpoint(config.model, task, is_dummy=is_dummy)
        self._device = choose_device(config.device)
        super().__init__(config, self._device)
        self._weights: Literal["real", "dummy"] = "dummy" if is_dummy else "real"
        dtype = task_dtype(config.dtype, self._device, on_gpu=torch.float16)
        seed = config.seed if is_dummy else None
        self.model = self._keep_model(partial(load_encoder, checkpoint, dtype, self._device, seed), progress)
        self._max_tokens = self.model.config.input_limit(config.max_model_len)
        weight_bytes = parameter_bytes(self.model)
        self.max_cost, self.memory = plan_embedding(
            self.model.config,
            weight_bytes=weight_bytes,
            element_size=dtype.itemsize,
            memory_bytes=byte_budget(config, self._device, weight_bytes),
            max_tokens=self._max_tokens,
            limit=MAX_BATCH_TOKENS[self._device.type],
            is_exact=has_budget(config, self._device),
        )
        self.memory += self._sleep_rows()
        progress("warming up", 0.0)
        # A batch with padding and one without: kernels are compiled and loaded before requests.
        texts = [Embed(request_id="warm up", token_ids=bytes(_ID_BYTES * length)) for length in (1, 2)]
        for batch in (texts, texts[:1]):
            self.compute(batch, 0)
        self._load_s = time.monotonic() - start_s

    def cost(self, request: Embed) -> int:
        """Return the number of tokens of an input. Raises RequestError if the input cannot be computed."""
        sizes, token_ids = self.model.config, np.frombuffer(request.token_ids, np.int32)
        if not 1 <= len(token_ids) <= self._max_tokens:
            raise RequestError(
                f"an input has {len(token_ids)} tokens; it must have 1 to {self._max_tokens}", param="input"
            )
        if not 0 <= token_ids.min() <= token_ids.max() < sizes.vocab_size:
            raise RequestError(
                f"an input has token ids outside the model's, 0 to {sizes.vocab_size - 1}", param="input"
            )
        if not 0 <= request.dimensions <= sizes.hidden_size:
            raise RequestError(f"dimensions is {request.dimensions}; embeddings have {sizes.hidden_size} values")
        return len(token_ids)

    @torch.inference_mode()
    def compute(self, requests: Sequence[Embed], padded_cost: int) -> list[EmbeddingResult]:
        """Return one result per request."""
        del padded_cost  # no kernel here is captured for a padded length
        lengths = [len(request.token_ids) // _ID_BYTES for request in requests]
        second_starts = [request.second_start or len(request.token_ids) for request in requests]
        token_ids = np.frombuffer(b"".join(request.token_ids for request in requests), np.int32)
        packed = torch.from_numpy(np.concatenate([token_ids, np.array([lengths, second_starts], np.int32).ravel()]))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        ids, rows = packed.long().split([len(token_ids), 2 * len(requests)])
        values = self.model(ids, *rows.view(2, -1), max(lengths)).cpu()
        return [
            EmbeddingResult(
                request_id=request.request_id, finish_reason="stop", values=self._cut(row, request.dimensions)
            )
            for request, row in zip(requests, values, strict=True)
        ]

    def _cut(self, values: torch.Tensor, dimensions: int) -> bytes:
        """Return the first `dimensions` values as float32 bytes. A normalized embedding is normalized again."""
        if dimensions:
            values = values[:dimensions]
            if self.model.config.is_normalized:
                values = functional.normalize(values, dim=0)
        return values.numpy().tobytes()

    def ready(self) -> EmbeddingReady:
        """Return the limits of requests."""
        sizes = self.model.config
        return EmbeddingReady(
            device=describe_device(self._device, 1),
            dtype=str(self.model.dtype).removeprefix("torch."),
            weights=self._weights,
            memory=self.memory,
            load_s=self._load_s,
            max_cost=self.max_cost,
            max_tokens=self._max_tokens,
            size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            is_reranker=sizes.is_reranker,
        )


def load_encoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    *,
    progress: Progress = lambda _stage, _part: None,
) -> TextEncoder:
    """Build the model and load its weights. With `dummy_seed` it gets random weights instead.

    Raises ConfigError when the configuration or a file cannot be used, or memory is not enough.
    """
    model = _meta_model(checkpoint, dtype)
    check_memory(checkpoint.name, parameter_bytes(model), device, 1)
    model = allocate(model, device)
    if dummy_seed is None:
        load_weights(model, checkpoint, progress)
    else:
        fill_dummy_weights(model, checkpoint, dummy_seed)
    free_cached_memory(device)
    model.prepare()
    return model


def _meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> TextEncoder:
    with torch.device("meta"):
        return TextEncoder(EncoderConfig.read(checkpoint.config, checkpoint.folder)).set_dtype(dtype)


def weight_bytes(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a model's weights, for a plan."""
    assert model.checkpoint is not None
    dtype = task_dtype(model.dtype, planned_device(on_cpu), on_gpu=torch.float16)
    return parameter_bytes(_meta_model(open_checkpoint(model.checkpoint, files="config"), dtype))


def embedding_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> BatchEngine[Embed, EmbeddingResult]:
    """Load an encoder and return its engine. Raises ConfigError if the checkpoint cannot be loaded."""
    return BatchEngine(EmbeddingTask(config, progress))
