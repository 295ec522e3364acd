"""Runs a step of the model on the device: tables, forward, sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.engine.batch import Batch, build_batch
from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.request import Sampled
from meltcore.engine.sampler import Sampler, SampleResult
from meltcore.engine.scheduler import Chunk, pages_for
from meltcore.engine.transfer import to_device
from meltcore.kernels.paged_attention import Segments
from meltcore.models.qwen3 import Qwen3


class LaunchedStep(NamedTuple):
    """A step under way on the device. `read` waits for it."""

    chunks: list[Chunk]
    result: SampleResult
    done: torch.cuda.Event | None

    def read(self) -> list[Sampled]:
        """What each sampling chunk chose, in the order of `chunks`."""
        if self.done is not None:
            self.done.synchronize()
        requests = [chunk.request for chunk in self.chunks if chunk.samples]
        return [Sampled(token_id, logprobs) for token_id, logprobs in self.result.read(requests)]


class ModelRunner:
    """Holds the paged cache and a table row for each running sequence: its pages and its last token."""

    def __init__(self, model: Qwen3, sampler: Sampler, *, pages: int, max_num_seqs: int, max_model_len: int) -> None:
        self.model = model
        self.sampler = sampler
        self.device = model.embedding.device
        (group,) = model.cache_groups()
        shape = (pages + 1, PAGE_SIZE, group.kv_heads, group.head_dim)  # page 0 is for padding
        dtype = model.embedding.dtype
        # Zeros, not whatever was there: a masked key still takes part as 0 * value, and 0 * NaN is NaN.
        self.caches = [
            (torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device))
            for _ in range(group.layers)
        ]
        rows = max_num_seqs + 1
        self._page_table = torch.zeros(rows, pages_for(max_model_len), dtype=torch.int64, device=self.device)
        self._last_token = torch.zeros(rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def launch(self, plan: list[Chunk]) -> LaunchedStep:
        """Start a step and return without waiting for the device."""
        batch = build_batch(plan)
        self._send_pages(batch)
        hidden = self._forward(batch)
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        logits = self.model.logits(hidden[self._tensor(batch.last_tokens)])
        result = self.sampler.sample(logits, requests)
        self._last_token.index_copy_(0, self._tensor(batch.sample_rows), result.token_ids)
        on_host = result.copy_to_host()
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(batch.chunks, on_host, done)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """[tokens, hidden_size] of a step. Slots and page tables are built on the device from the rows."""
        token_ids = self._tensor(batch.token_ids)
        if batch.unread_tokens:
            token_ids[self._tensor(batch.unread_tokens)] = self._last_token[self._tensor(batch.unread_rows)]
        positions = self._tensor(batch.positions)
        pages = self._page_table[self._tensor(batch.token_rows), positions // PAGE_SIZE]
        segments = Segments(
            page_table=self._page_table[self._tensor(batch.rows)],
            starts=self._tensor(batch.starts),
            slots=pages * PAGE_SIZE + positions % PAGE_SIZE,
            places=self._tensor(batch.places),
            groups=batch.groups,
        )
        return self.model(token_ids, positions, self.caches, segments)

    def _send_pages(self, batch: Batch) -> None:
        """Write the pages that sequences were given since their last step into the device's table."""
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for chunk in batch.chunks:
            request = chunk.request
            fresh = request.pages[request.sent_pages :]
            rows += [request.row] * len(fresh)
            columns += range(request.sent_pages, len(request.pages))
            pages += fresh
            request.sent_pages = len(request.pages)
        if rows:
            self._page_table[self._tensor(rows), self._tensor(columns)] = self._tensor(pages)

    def _tensor(self, values: object) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)  # type: ignore[arg-type]
