"""Chooses each sequence's next token from its logits.

The host knows from the settings which rows need what, so the common step (all greedy) is one argmax; nothing here
waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.engine.messages import TokenLogprobs
from meltcore.engine.request import Request
from meltcore.engine.transfer import to_device, to_host
from meltcore.kernels.sampling import gumbel_noise, keep_likeliest, penalise


class SampleResult(NamedTuple):
    """Token ids [rows] on the device, and the log-probabilities asked for: rows, chosen, likeliest values and ids."""

    token_ids: torch.Tensor
    logprob_rows: list[int]
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def copy_to_host(self) -> SampleResult:
        logprobs = None if self.logprobs is None else tuple(to_host(part) for part in self.logprobs)
        return SampleResult(to_host(self.token_ids), self.logprob_rows, logprobs)  # type: ignore[arg-type]

    def read(self, requests: list[Request]) -> list[tuple[int, TokenLogprobs | None]]:
        """On the host copy, once it is complete: each row's token and log-probabilities."""
        found: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            chosen, values, ids = (part.tolist() for part in self.logprobs)
            for index, row in enumerate(self.logprob_rows):
                wanted = requests[row].sampling.logprobs or 0
                found[row] = TokenLogprobs(chosen[index], ids[index][:wanted], values[index][:wanted])
        return [(token_id, found.get(row)) for row, token_id in enumerate(self.token_ids.tolist())]


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device, seed: int) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._seed = seed
        self._penalties = PenaltyTable(vocab_size, device)

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> SampleResult:
        """logits: [rows, vocab] float32 (overwritten); requests: one for each row."""
        raw = self._raw_logprobs(logits, requests)
        logits = self._penalties.apply(logits, requests)
        self._mask(logits, requests)
        token_ids = logits.argmax(-1)
        drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if drawn:
            rows = self._tensor(drawn, torch.int64)
            token_ids[rows] = self._draw(logits[rows], [requests[row] for row in drawn])
        self._penalties.count(token_ids, requests)
        if raw is None:
            return SampleResult(token_ids, [], None)
        logprob_rows, distribution, most = raw
        chosen = distribution.gather(1, token_ids[self._tensor(logprob_rows, torch.int64)][:, None])[:, 0]
        values, ids = distribution.topk(most, dim=-1)
        return SampleResult(token_ids, logprob_rows, (chosen, values, ids))

    def forget(self, request: Request) -> None:
        """Let go of what is kept for a sequence that ended."""
        self._penalties.release(request)

    def _raw_logprobs(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[list[int], torch.Tensor, int] | None:
        """The model's own distribution, taken before anything changes the logits."""
        rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        if not rows:
            return None
        most = max(requests[row].sampling.logprobs or 0 for row in rows)
        return rows, logits[self._tensor(rows, torch.int64)].log_softmax(-1), max(1, most)

    def _mask(self, logits: torch.Tensor, requests: list[Request]) -> None:
        """Forbid end tokens before min_tokens, and whatever a sequence's own mask leaves out."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, request in enumerate(requests):
            # The token being chosen is counted as in flight already.
            if request.generated <= request.sampling.min_tokens:
                rows += [row] * len(request.stop_ids)
                tokens += request.stop_ids
            if request.token_mask is not None and (allowed := request.token_mask(request.output_ids)) is not None:
                logits[row].masked_fill_(~allowed.to(self.device), float("-inf"))
        if rows:
            logits[self._tensor(rows, torch.int64), self._tensor(tokens, torch.int64)] = float("-inf")

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        settings = [request.sampling for request in requests]
        logits = logits / self._tensor([each.temperature for each in settings], torch.float32)[:, None]
        filtered = [row for row, each in enumerate(settings) if each.top_k > 0 or each.top_p < 1.0 or each.min_p > 0.0]
        if filtered:
            rows = self._tensor(filtered, torch.int64)
            logits[rows] = keep_likeliest(
                logits[rows],
                self._tensor([settings[row].top_k for row in filtered], torch.int64),
                self._tensor([settings[row].top_p for row in filtered], torch.float32),
                self._tensor([settings[row].min_p for row in filtered], torch.float32),
            )
        seeds = self._tensor([self._seed_of(request) for request in requests], torch.int64)
        positions = self._tensor([request.length for request in requests], torch.int64)
        return (logits + gumbel_noise(seeds, positions, self.vocab_size)).argmax(-1)

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or one that no other request of this engine shares."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        return (self._seed << 40) ^ (request.order << 1) ^ 1

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, dtype, self.device)


class PenaltyTable:
    """Token counts of the sequences that use penalties: a slot each, allocated on first use and doubled when full.

    output_counts: [slots, vocab] int32; in_prompt: [slots, vocab] bool.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def apply(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        rows = [row for row, request in enumerate(requests) if _has_penalties(request)]
        if not rows:
            return logits
        slots = self._tensor([self._slot(requests[row]) for row in rows], torch.int64)
        settings = [requests[row].sampling for row in rows]
        at = self._tensor(rows, torch.int64)
        logits[at] = penalise(
            logits[at],
            self._output_counts[slots],
            self._in_prompt[slots],
            self._tensor([each.presence_penalty for each in settings], torch.float32),
            self._tensor([each.frequency_penalty for each in settings], torch.float32),
            self._tensor([each.repetition_penalty for each in settings], torch.float32),
        )
        return logits

    def count(self, token_ids: torch.Tensor, requests: list[Request]) -> None:
        """Add the tokens just chosen, on the device: the host may not have read them when the next step starts."""
        rows = [row for row, request in enumerate(requests) if _has_penalties(request)]
        if rows:
            slots = self._tensor([self._slot(requests[row]) for row in rows], torch.int64)
            chosen = token_ids[self._tensor(rows, torch.int64)]
            self._output_counts.index_put_((slots, chosen), slots.new_ones(len(rows), dtype=torch.int32), True)

    def release(self, request: Request) -> None:
        slot = self._slot_of.pop(request.id, None)
        if slot is not None:
            self._free.append(slot)

    def _slot(self, request: Request) -> int:
        slot = self._slot_of.get(request.id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[request.id] = self._free.pop()
            self._fill(slot, request)
        return slot

    def _fill(self, slot: int, request: Request) -> None:
        """Start a slot from the tokens the host knows: all of them, for only then does a sequence (re)start."""
        self._output_counts[slot].zero_()
        self._in_prompt[slot].zero_()
        prompt = self._tensor(request.token_ids[: request.prompt_length], torch.int64)
        self._in_prompt[slot].index_fill_(0, prompt, True)
        output = self._tensor(request.output_ids, torch.int64)
        self._output_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _grow(self) -> None:
        slots = self._output_counts.shape[0]
        more = max(1, slots)
        self._output_counts = _with_rows(self._output_counts, more)
        self._in_prompt = _with_rows(self._in_prompt, more)
        self._free += range(slots, slots + more)

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, dtype, self._device)


def _has_penalties(request: Request) -> bool:
    each = request.sampling
    return each.presence_penalty != 0.0 or each.frequency_penalty != 0.0 or each.repetition_penalty != 1.0


def _with_rows(table: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat((table, table.new_zeros(more, table.shape[1])))
