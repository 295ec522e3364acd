"""Samples the next token of each sequence from its logits.

The host knows from the sampling parameters what each row needs, so a step launches only the kernels that some row
needs. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from meltcore.engine.core.constraint import MaskTable
from meltcore.engine.core.request import Request
from meltcore.engine.memory.workspace import PENALTY_BYTES
from meltcore.engine.worker.transfer import align_entries, to_device, to_device_together, to_host
from meltcore.kernels.sampling.argmax import argmax
from meltcore.kernels.sampling.draw import gumbel_sample
from meltcore.kernels.sampling.penalties import apply_penalties
from meltcore.kernels.sampling.resample import RowSettings, StepTokens, resample
from meltcore.kernels.sampling.token_mask import WORD_BITS, mask_logits, wait_for_masks
from meltcore.kernels.sampling.top_k_top_p import threshold_tokens
from meltcore.protocol.generation import TokenLogprobs
from meltcore.protocol.sampling_params import SEED_LIMIT

# Of each row of logits: the drafts before its token.
Drafts = Sequence[tuple[int, ...]]


class SampleResult(NamedTuple):
    """Sampled token ids [rows] on the device, and the log-probabilities of the rows that ask for them.

    `logprobs` holds the sampled tokens' values [logprob_rows], then values and ids of the most probable tokens
    [logprob_rows, num_logprobs].
    """

    token_ids: torch.Tensor
    logprob_rows: list[int]
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    @classmethod
    def concatenate(cls, blocks: list[SampleResult]) -> SampleResult:
        """Concatenate the results of all blocks, in order."""
        if len(blocks) == 1:
            return blocks[0]
        rows: list[int] = []
        first_row = 0
        for block in blocks:
            rows += [first_row + row for row in block.logprob_rows]
            first_row += len(block.token_ids)
        token_ids = torch.cat([block.token_ids for block in blocks])
        logprob_blocks = [block.logprobs for block in blocks if block.logprobs is not None]
        if not logprob_blocks:
            return cls(token_ids, [], None)
        sampled_logprobs, values, ids = zip(*logprob_blocks, strict=True)
        return cls(
            token_ids, rows, (torch.cat(sampled_logprobs), _concatenate_padded(values), _concatenate_padded(ids))
        )

    def copy_to_host(self) -> SampleResult:
        """Start a copy to the host. The copy is complete once the stream has passed this point."""
        logprobs = None if self.logprobs is None else tuple(to_host(part) for part in self.logprobs)
        return SampleResult(to_host(self.token_ids), self.logprob_rows, logprobs)  # type: ignore[arg-type]

    def read(self, requests: list[Request]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the token of each row, and the log-probabilities by row, from a complete host copy."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            sampled_logprobs, values, ids = (part.tolist() for part in self.logprobs)
            for index, row in enumerate(self.logprob_rows):
                num_logprobs = requests[row].sampling.logprobs or 0
                logprobs[row] = TokenLogprobs(
                    sampled_logprobs[index], ids[index][:num_logprobs], values[index][:num_logprobs]
                )
        return self.token_ids.tolist(), logprobs


class _Masks(NamedTuple):
    """The tensors of a `MaskTable`, in pinned memory if there is a GPU."""

    masks: torch.Tensor
    filled: torch.Tensor
    outcomes: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, words: int, device: torch.device, per_row: int = 1) -> _Masks:
        is_pinned = device.type == "cuda"
        return cls(
            torch.zeros(rows * per_row, words, dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros(rows, dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros(2, rows, dtype=torch.int64, pin_memory=is_pinned),
        )


class _GraphSettings:
    """What graphs of `resample` read, at fixed addresses: the settings of the requests for which they were sent."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        """Allocate settings with which every sequence keeps its greedy token."""
        self._width = align_entries(max_num_seqs)
        self._memory = torch.zeros(4 + 3 * self._width, dtype=torch.int64, device=device)
        self._views(self._memory, max_num_seqs).temperatures.fill_(-1.0)

    def of_rows(self, num_rows: int) -> RowSettings:
        """Return the settings of the first rows."""
        return self._views(self._memory, num_rows)

    def send(
        self,
        requests: list[Request],
        masks: torch.Tensor | None,
        limits_s: tuple[float, float],
        seed_of: Callable[[Request], int],
    ) -> None:
        """Send the settings of a step's requests, which are constant while they run."""
        staged = torch.zeros(len(self._memory), dtype=torch.int64, pin_memory=self._memory.is_cuda)
        self._views(staged, self._width).temperatures.fill_(-1.0)  # of padding
        address, limits_ns, tickets, seeds, temperatures = (view.numpy() for view in self._views(staged, len(requests)))
        if masks is not None:
            address[:] = masks.data_ptr(), masks.shape[1]
        limits_ns[:] = np.array(limits_s) * 1e9
        tickets[:] = [_first_ticket(request) for request in requests]
        seeds[:] = [seed_of(request) for request in requests]
        temperatures[:] = [-1.0 if request.is_unmasked_greedy else request.sampling.temperature for request in requests]
        self._memory.copy_(staged, non_blocking=True)

    def _views(self, memory: torch.Tensor, num_rows: int) -> RowSettings:
        tickets, seeds, temperatures = (memory[4 + index * self._width :] for index in range(3))
        return RowSettings(
            memory[:2],
            memory[2:4],
            tickets[:num_rows],
            seeds[:num_rows],
            temperatures.view(torch.float32)[:num_rows],
        )


class Sampler:
    """Samples by each request's own parameters."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int, penalty_slots: int = 0) -> None:
        """Allocate the penalty table.

        The scheduler enforces that at most `penalty_slots` sequences with penalties run.
        """
        self.device = device
        self._seed, self._vocab_size = seed, vocab_size
        self._penalties = PenaltyTable(penalty_slots, vocab_size, device)
        self._masks: _Masks | None = None
        self._graph_settings = _GraphSettings(0, device)  # of no sequence, without graphs
        self._sent: tuple[list[Request], tuple[float, float] | None] = [], None  # for which the device has settings
        # How long the device waits for masks (`Constraints.device_limits_s`). None if the host has waited.
        self.mask_limits_s: tuple[float, float] | None = None

    def allocate_masks(self, rows: int, num_ids: int, max_drafts: int = 0) -> MaskTable:
        """Allocate the masks of grammars: a bit for each of `num_ids` token ids.

        Each of the runner's `rows` has a mask for its next token and for the token after each of its drafts.
        """
        masks = _Masks.allocate(rows, -(-num_ids // WORD_BITS), self.device, 1 + max_drafts)
        self._masks = masks if self._masks is None else self._masks._replace(masks=masks.masks)  # graphs read the rest
        return MaskTable(*(part.numpy() for part in self._masks))

    def warm_up_masks(self) -> None:
        """Launch the kernels of masks, as no request of the warm-up has a grammar."""
        masks = _Masks.allocate(2, 1, self.device)
        rows, tickets, positions, limits_ns = to_device_together([[1], [1], [0], [0, 0]], self.device)
        mask_rows = wait_for_masks(rows, tickets, positions, masks.filled, masks.outcomes, limits_ns)
        mask_logits(torch.zeros(1, self._vocab_size, device=rows.device), masks.masks, mask_rows)
        if self.device.type == "cuda":
            # The kernels read and write `masks`. Torch's pool of pinned memory tracks copies only, and would give it to
            # the first step, whose row of a sequence they then overwrite.
            torch.cuda.synchronize()

    def prepare_graphs(self, max_num_seqs: int) -> None:
        """Allocate what graphs of `resample` read."""
        self._masks = self._masks or _Masks.allocate(max_num_seqs + 1, 0, self.device)
        self._graph_settings, self._sent = _GraphSettings(max_num_seqs, self.device), ([], None)

    def resample(self, logits: torch.Tensor, tokens: StepTokens) -> None:
        """Launch what a graph does after a decode step, for the requests of `send_settings`."""
        assert self._masks is not None
        resample(logits, self._graph_settings.of_rows(len(logits)), tokens, self._masks.filled, self._masks.outcomes)

    def send_settings(self, requests: list[Request]) -> bool:
        """Send what graphs of `resample` need to know of a step's requests, unless the device has it.

        Return False and send nothing if some request needs more than a temperature and a mask, or if the host waits for
        masks.
        """
        if (requests, self.mask_limits_s) == self._sent:
            return True
        has_masks = any(request.constraint is not None for request in requests)
        if (has_masks and self.mask_limits_s is None) or not all(request.is_graph_sampled for request in requests):
            return False
        masks = self._masks.masks if has_masks and self._masks is not None else None
        self._graph_settings.send(requests, masks, self.mask_limits_s or (0.0, 0.0), self.seed_of)
        self._sent = requests, self.mask_limits_s
        return True

    def sample(
        self,
        logits: torch.Tensor,
        requests: list[Request],
        drafts: Drafts | None = None,
        positions: torch.Tensor | None = None,
    ) -> SampleResult:
        """Sample one token per row, for the request of the row.

        `logits` is [rows, vocab] of any floating type, and is overwritten. A row may follow `drafts`, which are taken
        for tokens of its request. Its token is not counted for penalties: the caller counts it if it is accepted. If
        only the device knows the drafts, it has the `positions` of the noise, [rows] int64 (`positions_of`).
        """
        raw_logprobs = self._raw_logprobs(logits, requests)
        logits = self._penalties.apply(self._add_biases(logits, requests), requests, drafts)
        self._mask_tokens(logits, requests, drafts)
        token_ids = self._sample(logits, requests, drafts, positions)
        if drafts is None:
            self.count(token_ids, requests)
        if raw_logprobs is None:
            return SampleResult(token_ids, [], None)
        logprob_rows, distribution, num_logprobs = raw_logprobs
        sampled_ids = token_ids[self._tensor(logprob_rows)]
        return SampleResult(token_ids, logprob_rows, select_logprobs(distribution, sampled_ids, num_logprobs))

    def count(self, token_ids: torch.Tensor, requests: list[Request], is_used: torch.Tensor | None = None) -> None:
        """Count sampled tokens [rows] for penalties, of the rows that `is_used` [rows] bool selects."""
        self._penalties.count(token_ids, requests, is_used)

    def without_counts(self) -> AbstractContextManager[None]:
        """Return a context in which sampled tokens are not counted, since values of warm-up steps are not token ids."""
        return self._penalties.without_counts()

    def _raw_logprobs(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[list[int], torch.Tensor, int] | None:
        """Return the rows that ask for log-probabilities, the values, and the maximum number of top tokens.

        Returns None if no row asks for log-probabilities.
        """
        rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        if not rows:
            return None
        num_logprobs = max(requests[row].sampling.logprobs or 0 for row in rows)
        return rows, logits[self._tensor(rows)].float().log_softmax(-1), num_logprobs

    def _add_biases(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        """Return the logits with `logit_bias` added: `logits`, or a float32 copy if any row has a bias."""
        biased = [(row, *request.biases) for row, request in enumerate(requests) if request.biases is not None]
        if not biased:
            return logits
        rows, token_ids, values = zip(*biased, strict=True)
        indices = [np.repeat(rows, list(map(len, token_ids))), np.concatenate(token_ids)]
        row_indices, id_indices = to_device_together(indices, self.device)
        logits = logits.float()
        logits[row_indices, id_indices] += to_device(np.concatenate(values), torch.float32, self.device)
        return logits

    def _mask_tokens(self, logits: torch.Tensor, requests: list[Request], drafts: Drafts | None) -> None:
        """Mask end tokens before min_tokens, and the tokens that a grammar or a request's own mask excludes."""
        mask_rows = self._mask_rows(requests, drafts)
        if mask_rows is not None:
            assert self._masks is not None
            mask_logits(logits, self._masks.masks, mask_rows)
        rows: list[int] = []
        tokens: list[int] = []
        for row, (request, before) in enumerate(zip(requests, drafts or _no_drafts(requests), strict=True)):
            # The token being sampled is counted as in flight already.
            if request.num_generated + len(before) <= request.sampling.min_tokens:
                rows += [row] * len(request.stop_ids)
                tokens += request.stop_ids
            if request.token_mask is None:
                continue
            if (token_mask := request.token_mask([*request.output_ids, *before])) is not None:
                logits[row].masked_fill_(~token_mask.to(self.device), float("-inf"))
        if rows:
            masked_rows, masked_tokens = to_device_together([rows, tokens], self.device)
            logits[masked_rows, masked_tokens] = float("-inf")

    def _mask_rows(self, requests: list[Request], drafts: Drafts | None) -> torch.Tensor | None:
        """Return the row of each request's mask, [rows] int64, or 0 where every token may be sampled.

        Returns None if no request has a mask.
        """
        constraints = [request.constraint for request in requests]
        if self.mask_limits_s is None:
            per_row = 1 if self._masks is None else len(self._masks.masks) // len(self._masks.filled)
            mask_rows = [
                0 if constraint is None or not constraint.needs_mask else per_row * request.row + len(before)
                for constraint, request, before in zip(
                    constraints, requests, drafts or _no_drafts(requests), strict=True
                )
            ]
            return self._tensor(mask_rows) if any(mask_rows) else None
        if not any(constraints):
            return None
        assert self._masks is not None
        rows, tickets, positions, limits_ns = to_device_together(
            [
                [request.row for request in requests],
                [_first_ticket(request) for request in requests],
                [request.length - 1 for request in requests],
                np.array(self.mask_limits_s) * 1e9,
            ],
            self.device,
        )
        return wait_for_masks(rows, tickets, positions, self._masks.filled, self._masks.outcomes, limits_ns)

    def _sample(
        self, logits: torch.Tensor, requests: list[Request], drafts: Drafts | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        sampling_params = [request.sampling for request in requests]
        if all(params.temperature == 0 for params in sampling_params):
            return argmax(logits)
        seeds, host_positions, top_k = to_device_together(
            [
                [self.seed_of(request) for request in requests],
                positions_of(requests, drafts),
                [params.top_k if params.is_filtered else 0 for params in sampling_params],
            ],
            self.device,
        )
        positions = host_positions if positions is None else positions
        temperatures, top_p, min_p = to_device(
            [
                [params.temperature for params in sampling_params],
                [params.top_p if params.is_filtered else 1.0 for params in sampling_params],
                [params.min_p if params.is_filtered else 0.0 for params in sampling_params],
            ],
            torch.float32,
            self.device,
        )
        thresholds = None
        if any(params.is_filtered for params in sampling_params):
            thresholds = threshold_tokens(logits, temperatures, top_k, top_p, min_p)
        return gumbel_sample(logits, temperatures, seeds, positions, thresholds)

    def seed_of(self, request: Request) -> int:
        """Return the request's seed. A request without a seed gets one that no other request of this engine has."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        request_seed = (self._seed << 40) ^ (self._seed >> 23)  # every bit of the engine's seed counts in the 63 bits
        return (request_seed ^ (request.arrival << 1) ^ 1) % SEED_LIMIT

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


def positions_of(requests: Sequence[Request], drafts: Drafts | None) -> list[int]:
    """Return the position of the token that is sampled in each row, by which its noise is drawn."""
    if drafts is None:
        return [request.length for request in requests]
    return [request.length + len(before) for request, before in zip(requests, drafts, strict=True)]


def _no_drafts(requests: Sequence[Request]) -> Drafts:
    return ((),) * len(requests)


def _first_ticket(request: Request) -> int:
    """Return the ticket of the token at position 0, if the answer follows a grammar, and else 0."""
    constraint = request.constraint
    return 0 if constraint is None else constraint.ticket(1 - request.prompt_length)


def select_logprobs(
    distribution: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the log-probabilities of `token_ids` [rows], and the highest ones with their ids [rows, num_logprobs].

    `distribution` holds all log-probabilities, [rows, vocab].
    """
    values, ids = distribution.topk(max(1, num_logprobs), dim=-1)
    return distribution.gather(1, token_ids[:, None])[:, 0], values, ids


class PenaltyTable:
    """Token counts of the sequences with penalties, in the slots that the scheduler assigned.

    `output_counts` is [slots, vocab] int32, and `in_prompt` is [slots, vocab] bool. A slot is not written before a
    sequence starts in it, so a host maps no memory for slots that are never used.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts_tokens = True
        self._output_counts = torch.empty(slots, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.empty(slots, vocab_size, dtype=torch.bool, device=device)
        assert self._output_counts.nbytes + self._in_prompt.nbytes == PENALTY_BYTES * slots * vocab_size, "as planned"

    def apply(self, logits: torch.Tensor, requests: list[Request], drafts: Drafts | None = None) -> torch.Tensor:
        """Return the logits with penalties applied: `logits`, or a float32 copy if any row has penalties.

        The drafts before a row count for it as if they were tokens of its request.
        """
        rows = [row for row, request in enumerate(requests) if request.has_penalties]
        if not rows:
            return logits
        logits = logits.float()
        if drafts is None:
            self._apply(logits, rows, requests)
            return logits
        for num_drafts in sorted({len(drafts[row]) for row in rows}):  # a row of each sequence at a time
            together = [row for row in rows if len(drafts[row]) == num_drafts]
            self._add_counts(together, requests, drafts, 1)
            self._apply(logits, together, requests)
            self._add_counts(together, requests, drafts, -1)
        return logits

    def _add_counts(self, rows: list[int], requests: list[Request], drafts: Drafts, change: int) -> None:
        slots = [self._slot(requests[row]) for row in rows for _ in drafts[row]]
        if slots:
            token_ids = [token_id for row in rows for token_id in drafts[row]]
            indices = to_device_together([slots, token_ids], self._device)
            changes = torch.full_like(indices[0], change, dtype=torch.int32)
            self._output_counts.index_put_(tuple(indices), changes, accumulate=True)

    def _apply(self, logits: torch.Tensor, rows: list[int], requests: list[Request]) -> None:
        """Apply penalties to some rows of float32 logits."""
        row_indices, slots = self._rows_and_slots(rows, requests)
        sampling_params = [requests[row].sampling for row in rows]
        presence, frequency, repetition = to_device(
            [
                [params.presence_penalty for params in sampling_params],
                [params.frequency_penalty for params in sampling_params],
                [params.repetition_penalty for params in sampling_params],
            ],
            torch.float32,
            self._device,
        )
        apply_penalties(
            logits, row_indices, slots, self._output_counts, self._in_prompt, presence, frequency, repetition
        )

    def count(self, token_ids: torch.Tensor, requests: list[Request], is_used: torch.Tensor | None = None) -> None:
        """Count the sampled tokens on the device, since the host may not have read them when the next step starts."""
        rows = [row for row, request in enumerate(requests) if request.has_penalties]
        if rows and self._counts_tokens:
            row_indices, slots = self._rows_and_slots(rows, requests)
            counts = slots.new_ones(len(rows)) if is_used is None else is_used[row_indices]
            self._output_counts.index_put_((slots, token_ids[row_indices]), counts.int(), accumulate=True)

    @contextmanager
    def without_counts(self) -> Iterator[None]:
        """Return a context in which `count` does nothing."""
        self._counts_tokens = False
        try:
            yield
        finally:
            self._counts_tokens = True

    def _rows_and_slots(self, rows: list[int], requests: list[Request]) -> list[torch.Tensor]:
        return to_device_together([rows, [self._slot(requests[row]) for row in rows]], self._device)

    def _slot(self, request: Request) -> int:
        if not request.is_counted:
            self._fill(request.penalty_slot, request)
            request.is_counted = True
        return request.penalty_slot

    def _fill(self, slot: int, request: Request) -> None:
        """Count the tokens of a sequence that is started or restarted.

        The host knows all of its tokens at that time.
        """
        self._output_counts[slot].zero_()
        self._in_prompt[slot].zero_()
        prompt, output = to_device_together(
            [request.token_ids[: request.prompt_length], request.output_ids], self._device
        )
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._output_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _concatenate_padded(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the rows of blocks, padded to the widest block.

    Returns [rows of all blocks, columns of the widest block]; missing columns are zero.
    """
    num_columns = max(block.shape[1] for block in blocks)
    return torch.cat([torch.nn.functional.pad(block, (0, num_columns - block.shape[1])) for block in blocks])
