"""Chooses each sequence's next token from its logits.

The host knows from the settings which rows need what, so that a step launches what some row asks for and nothing else;
nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meltcore.engine.messages import TokenLogprobs
from meltcore.engine.request import Request
from meltcore.engine.sampling_params import SEED_LIMIT, SamplingParams
from meltcore.engine.transfer import to_device, to_device_together, to_host
from meltcore.kernels.likeliest import last_kept
from meltcore.kernels.penalties import penalise
from meltcore.kernels.sampling import draw, greedy


class SampleResult(NamedTuple):
    """Token ids [rows] on the device, and the log-probabilities asked for: rows, chosen, likeliest values and ids."""

    token_ids: torch.Tensor
    logprob_rows: list[int]
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    @classmethod
    def of_blocks(cls, blocks: list[SampleResult]) -> SampleResult:
        """One for the rows of all blocks, in their order."""
        if len(blocks) == 1:
            return blocks[0]
        rows: list[int] = []
        first = 0
        for block in blocks:
            rows += [first + row for row in block.logprob_rows]
            first += len(block.token_ids)
        token_ids = torch.cat([block.token_ids for block in blocks])
        known = [block.logprobs for block in blocks if block.logprobs is not None]
        if not known:
            return cls(token_ids, [], None)
        chosen, values, ids = zip(*known, strict=True)
        return cls(token_ids, rows, (torch.cat(chosen), _as_wide(values), _as_wide(ids)))

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
    """penalty_slots: the most sequences with penalties at once, which the scheduler keeps to."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int, penalty_slots: int = 0) -> None:
        self.device = device
        self._seed = seed
        self._penalties = PenaltyTable(penalty_slots, vocab_size, device)

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> SampleResult:
        """logits: [rows, vocab] of any floating type (overwritten); requests: one for each row."""
        raw = self._raw_logprobs(logits, requests)
        logits = self._penalties.apply(logits, requests)
        self._mask(logits, requests)
        token_ids = self._choose(logits, requests)
        self._penalties.count(token_ids, requests)
        if raw is None:
            return SampleResult(token_ids, [], None)
        logprob_rows, distribution, most = raw
        chosen = distribution.gather(1, token_ids[self._tensor(logprob_rows)][:, None])[:, 0]
        values, ids = distribution.topk(most, dim=-1)
        return SampleResult(token_ids, logprob_rows, (chosen, values, ids))

    def _raw_logprobs(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[list[int], torch.Tensor, int] | None:
        """The model's own distribution, taken before anything changes the logits."""
        rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        if not rows:
            return None
        most = max(requests[row].sampling.logprobs or 0 for row in rows)
        return rows, logits[self._tensor(rows)].float().log_softmax(-1), max(1, most)

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
            at_rows, at_tokens = to_device_together([rows, tokens], self.device)
            logits[at_rows, at_tokens] = float("-inf")

    def _choose(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        settings = [request.sampling for request in requests]
        if all(each.temperature == 0 for each in settings):
            return greedy(logits)
        seeds, positions, top_k = to_device_together(
            [
                [self.seed_of(request) for request in requests],
                [request.length for request in requests],
                [each.top_k if _is_filtered(each) else 0 for each in settings],
            ],
            self.device,
        )
        temperatures, top_p, min_p = to_device(
            [
                [each.temperature for each in settings],
                [each.top_p if _is_filtered(each) else 1.0 for each in settings],
                [each.min_p if _is_filtered(each) else 0.0 for each in settings],
            ],
            torch.float32,
            self.device,
        )
        kept = None
        if any(_is_filtered(each) for each in settings):
            kept = last_kept(logits, temperatures, top_k, top_p, min_p)
        return draw(logits, temperatures, seeds, positions, kept)

    def seed_of(self, request: Request) -> int:
        """The request's own seed, or one that no other request of this engine shares."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        own = (self._seed << 40) ^ (self._seed >> 23)  # a seed of any size tells in the 63 bits that there are
        return (own ^ (request.order << 1) ^ 1) % SEED_LIMIT

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


class PenaltyTable:
    """Token counts of the sequences that use penalties, in the slots that the scheduler gave them.

    output_counts: [slots, vocab] int32; in_prompt: [slots, vocab] bool. What a slot holds is worthless until a sequence
    starts it, so nothing is written before: host memory that no sequence has used yet is not taken.
    """

    BYTES_PER_TOKEN = 5  # of the vocabulary, in each slot

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._output_counts = torch.empty(slots, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.empty(slots, vocab_size, dtype=torch.bool, device=device)

    def apply(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        rows = [row for row, request in enumerate(requests) if request.penalised]
        if not rows:
            return logits
        at, slots = self._places(rows, requests)
        settings = [requests[row].sampling for row in rows]
        presence, frequency, repetition = to_device(
            [
                [each.presence_penalty for each in settings],
                [each.frequency_penalty for each in settings],
                [each.repetition_penalty for each in settings],
            ],
            torch.float32,
            self._device,
        )
        logits = logits.float()
        penalise(logits, at, slots, self._output_counts, self._in_prompt, presence, frequency, repetition)
        return logits

    def count(self, token_ids: torch.Tensor, requests: list[Request]) -> None:
        """Add the tokens just chosen, on the device: the host may not have read them when the next step starts."""
        rows = [row for row, request in enumerate(requests) if request.penalised]
        if rows:
            at, slots = self._places(rows, requests)
            self._output_counts.index_put_((slots, token_ids[at]), slots.new_ones(len(rows), dtype=torch.int32), True)

    def _places(self, rows: list[int], requests: list[Request]) -> list[torch.Tensor]:
        return to_device_together([rows, [self._slot(requests[row]) for row in rows]], self._device)

    def _slot(self, request: Request) -> int:
        if not request.counted:
            self._fill(request.penalty_slot, request)
            request.counted = True
        return request.penalty_slot

    def _fill(self, slot: int, request: Request) -> None:
        """Start a slot from the tokens the host knows: all of them, for only then does a sequence (re)start."""
        self._output_counts[slot].zero_()
        self._in_prompt[slot].zero_()
        prompt, output = to_device_together(
            [request.token_ids[: request.prompt_length], request.output_ids], self._device
        )
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._output_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _as_wide(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Below each other, [rows, columns of the widest]; what the others lack is zero."""
    most = max(block.shape[1] for block in blocks)
    return torch.cat([torch.nn.functional.pad(block, (0, most - block.shape[1])) for block in blocks])


def _is_filtered(sampling: SamplingParams) -> bool:
    """Whether a drawn token comes from fewer than all; a greedy one always is among those."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
