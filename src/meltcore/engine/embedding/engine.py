"""Computes embeddings and scores for the batch engine. A batch takes one step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.embedding.encoder_graphs import TextEncoderGraphs
from meltcore.engine.embedding.memory import graph_bytes, plan_embedding, read_config, token_slots
from meltcore.engine.host.device import byte_budget, has_budget
from meltcore.engine.tasks.batch_engine import BatchEngine, BatchTask
from meltcore.engine.tasks.device_task import DeviceTask
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_checkpoint
from meltcore.models.configs.pooling_config import PoolingConfig
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.loader import build_meta_model, load_task_model, parameter_bytes, planned_device, task_dtype
from meltcore.models.tasks.encoder import TextEncoder
from meltcore.models.tasks.pooled_decoder import PooledDecoder
from meltcore.models.tasks.pooled_decoder_config import PooledDecoderConfig
from meltcore.models.tasks.pooling_model import PoolingModel
from meltcore.protocol.embedding import Embed, EmbeddingOutputs, EmbeddingReady, EmbeddingResult
from meltcore.settings.config import DType, EngineConfig
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.tokenizer import Tokenizer

_ID_BYTES = 4  # int32, as messages have token ids
_TINY = 1e-12  # the smallest norm that a vector is divided by


class _Launched(NamedTuple):
    """A forward pass: its requests, None for those that were aborted, and its results.

    `values` is [requests, values] float32 on the host. On a GPU it is valid after `event`.
    """

    requests: list[Embed | None]
    values: torch.Tensor
    event: torch.cuda.Event | None


class EmbeddingTask(DeviceTask, BatchTask[Embed, EmbeddingResult]):
    """Computes embeddings, or scores of pairs, with a text encoder or a decoder on one device."""

    result, message = EmbeddingResult, EmbeddingOutputs

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda _stage, _part: None
    ) -> None:
        """Load the model and plan its memory.

        Raises ConfigError if the checkpoint or a setting cannot work, or if memory is not enough for one input.
        """
        super().__init__(config)
        checkpoint = self._open_checkpoint(config)
        sizes = read_config(checkpoint)
        self._dtype = _dtype(config.dtype, sizes, self._device)
        if not self._is_dummy:
            _check_answers(sizes, checkpoint)
        self._is_gpu = self._device.type == "cuda"
        self._begun: deque[Embed] = deque()
        self._launched: deque[_Launched] = deque()
        self._has_waited = False
        seed = config.seed if self._is_dummy else None
        load = partial(load_pooling_model, checkpoint, self._dtype, self._device, seed)
        self.model = self._keep_model(load, progress)
        self._max_tokens = sizes.input_limit(config.max_model_len)
        weight_bytes = parameter_bytes(self.model)
        is_exact = has_budget(config, self._device)
        self._batch_tokens, self.memory = plan_embedding(
            sizes,
            weight_bytes=weight_bytes,
            element_size=self._dtype.itemsize,
            memory_bytes=byte_budget(config, self._device, weight_bytes),
            max_tokens=self._max_tokens,
            device=self._device.type,
            is_exact=is_exact,
        )
        self.memory += self._sleep_rows()
        progress("warming up", 0.0)
        self._graphs: TextEncoderGraphs | None = None
        if self._is_gpu and isinstance(self.model, TextEncoder) and self.model.is_packed:
            self.outside_bytes = graph_bytes(sizes, self._batch_tokens) if is_exact else 0
            with self._building():
                self._graphs = TextEncoderGraphs(self.model, self._batch_tokens)
                self._graphs.capture(progress)
        # A GPU computes one forward pass while the next ones wait in its queue, and while requests begin for a later
        # one. Activations of all of them share memory. Graphs are short, so that one more waits.
        self._max_launched = 1 if not self._is_gpu else 2 if self._graphs is None else 3
        self.max_cost = self._batch_tokens * (self._max_launched + 1 if self._is_gpu else 1)
        for lengths in self._warm_up_lengths():
            self._launch([Embed(request_id="warm up", token_ids=bytes(_ID_BYTES * length)) for length in lengths])
        self._load_s = time.monotonic() - self._start_s

    def cost(self, request: Embed) -> int:
        """Return the number of tokens of an input. Raises RequestError if the input cannot be computed."""
        sizes, token_ids = self.model.config, np.frombuffer(request.token_ids, np.uint32)
        if not 1 <= len(token_ids) <= self._max_tokens:
            raise RequestError(
                f"an input has {len(token_ids)} tokens; it must have 1 to {self._max_tokens}", param="input"
            )
        if token_ids[token_ids.argmax()] >= sizes.vocab_size:  # negative ones are large
            raise RequestError(
                f"an input has token ids outside the model's, 0 to {sizes.vocab_size - 1}", param="input"
            )
        if not 0 <= request.dimensions <= sizes.hidden_size:
            raise RequestError(f"dimensions is {request.dimensions}; embeddings have {sizes.hidden_size} values")
        return token_slots(sizes, len(token_ids))

    def _warm_up_lengths(self) -> list[list[int]]:
        """Return lengths of the texts of batches that compile and load all kernels, so that no request waits for it.

        A batch has padding or none. A decoder has kernels for different numbers of tokens, and of texts.
        """
        batches = [[1, 2], [1]]
        if self._is_gpu and token_slots(self.model.config, 1) > 1:
            batches += [[min(2**power, self._max_tokens)] for power in range(2, self._max_tokens.bit_length() + 1)]
            length = min(512, self._max_tokens)
            batches.append([length] * (self._batch_tokens // token_slots(self.model.config, length)))
        return batches

    def start(self, requests: Sequence[Embed], padded_cost: int) -> None:  # noqa: ARG002 - no kernel needs padding
        """Take requests into the next forward passes."""
        self._begun.extend(requests)

    def step(self) -> list[EmbeddingResult]:
        """Launch forward passes ahead, and return the results of the oldest one.

        If it is the only one, return none the first time, so that the engine can begin more before it waits.
        """
        while self._begun and len(self._launched) < self._max_launched:
            self._launched.append(self._launch(self._next_batch()))
        if len(self._launched) == 1 and self._is_gpu and not self._has_waited:
            self._has_waited = True
            return []
        self._has_waited = False
        if not self._launched:  # all were aborted
            return []
        requests, values, event = self._launched.popleft()
        if event is not None:
            event.synchronize()
        rows, row_bytes = values.numpy().tobytes(), values.shape[1] * values.itemsize
        return [
            EmbeddingResult(
                request_id=request.request_id,
                finish_reason="stop",
                values=self._cut(rows[index * row_bytes : (index + 1) * row_bytes], request.dimensions),
            )
            for index, request in enumerate(requests)
            if request is not None
        ]

    def _next_batch(self) -> list[Embed]:
        """Remove the oldest requests that have begun, of as many tokens as memory was planned for."""
        batch: list[Embed] = []
        tokens = 0
        while self._begun:
            tokens += token_slots(self.model.config, len(self._begun[0].token_ids) // _ID_BYTES)
            if tokens > self._batch_tokens:
                break
            batch.append(self._begun.popleft())
        return batch

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests and their results."""
        ids = frozenset(request_ids)
        self._begun = deque(each for each in self._begun if each.request_id not in ids)
        for requests, _, _ in self._launched:
            requests[:] = [None if each is None or each.request_id in ids else each for each in requests]
        while self._launched and not any(self._launched[-1].requests):
            self._launched.pop()

    @torch.inference_mode()
    def _launch(self, requests: Sequence[Embed]) -> _Launched:
        """Launch one forward pass. On a CPU it is complete when this returns."""
        lengths = np.array([len(request.token_ids) // _ID_BYTES for request in requests], np.int32)
        second_starts = np.array([request.second_start for request in requests], np.int32)
        has_pairs = bool(second_starts.any())
        second_starts = np.where(second_starts, second_starts, lengths)
        token_ids = np.frombuffer(b"".join([request.token_ids for request in requests]), np.int32)
        if self._graphs is not None:
            values = self._graphs.launch(token_ids, lengths, second_starts if has_pairs else None)
        else:
            size = len(token_ids) + 2 * len(requests)
            packed = torch.empty(size, dtype=torch.int32, pin_memory=self._is_gpu)
            np.concatenate([token_ids, lengths, second_starts], out=packed.numpy())
            ids, rows = packed.to(self._device, non_blocking=True).long().split([len(token_ids), 2 * len(requests)])
            values = self.model(ids, *rows.view(2, -1), lengths.tolist())
        if not self._is_gpu:
            return _Launched([*requests], values, None)
        on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Launched([*requests], on_host, event)

    def _cut(self, values: bytes, dimensions: int) -> bytes:
        """Return the float32 bytes of the first `dimensions` values, which are normalized again if the whole was."""
        if not dimensions:
            return values
        cut = np.frombuffer(values, np.float32)[:dimensions]
        if self.model.config.is_normalized:
            cut = cut / max(float(np.linalg.norm(cut)), _TINY)
        return cut.tobytes()

    def ready(self) -> EmbeddingReady:
        """Return the limits of requests."""
        sizes = self.model.config
        return EmbeddingReady(
            **self._ready_fields(),
            max_tokens=self._max_tokens,
            size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            is_reranker=sizes.is_reranker,
            has_pair_prompt=isinstance(sizes, PooledDecoderConfig) and sizes.answer_ids is not None,
            cut_sizes=sizes.cut_sizes,
        )


def load_pooling_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    *,
    progress: Progress = lambda _stage, _part: None,
) -> PoolingModel:
    """Build the model and load its weights. With `dummy_seed` it gets random weights instead.

    Raises ConfigError when the configuration or a file cannot be used, or memory is not enough.
    """
    model = _meta_model(checkpoint, dtype)
    if isinstance(model, PooledDecoder):
        checkpoint = replace(checkpoint, config=dict(model.config.values))
    model = load_task_model(model, checkpoint, device, dummy_seed, progress)
    model.prepare()
    return model


def _meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PoolingModel:
    config, meta = read_config(checkpoint), torch.device("meta")
    if isinstance(config, PooledDecoderConfig):
        decoder = build_meta_model(replace(checkpoint, config=dict(config.values)), dtype, meta)
        assert isinstance(decoder, Decoder)
        return PooledDecoder(config, decoder)
    with meta:
        return TextEncoder(config).set_dtype(dtype)


def _dtype(name: DType, config: PoolingConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations. Decoders overflow float16, in which encoders are more exact."""
    is_decoder = isinstance(config, PooledDecoderConfig)
    return task_dtype(name, device, on_gpu=torch.bfloat16 if is_decoder else torch.float16)


def _check_answers(config: PoolingConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a reranker's answers are other tokens than the prompt asks for."""
    if isinstance(config, PooledDecoderConfig) and config.answer_ids is not None:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        found = tokenizer.token_id("no"), tokenizer.token_id("yes")
        if found != config.answer_ids:
            raise ConfigError(
                f"{checkpoint.name}: the tokens of LogitScore are {config.answer_ids}, "
                f"but the tokens of no and yes are {found}; "
                "rerankers here have the prompt and the answers of Qwen3-Reranker"
            )


def weight_bytes(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a model's weights, for a plan."""
    assert model.checkpoint is not None
    checkpoint = open_checkpoint(model.checkpoint, files="config")
    dtype = _dtype(model.dtype, read_config(checkpoint), planned_device(on_cpu))
    return parameter_bytes(_meta_model(checkpoint, dtype))


def embedding_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> BatchEngine[Embed, EmbeddingResult]:
    """Load an encoder and return its engine. Raises ConfigError if the checkpoint cannot be loaded."""
    return BatchEngine(EmbeddingTask(config, progress))
