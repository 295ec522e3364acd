"""Holds the tables of a beam search on the device, and computes one step: a token for every beam of the given slots.

Scores, stopping and length penalty are computed as by `generate` in transformers. A step reads nothing from the host
but the slots, so that it can be captured as a CUDA graph. What a step computes for a sentence that is done goes to a
spare slot. So its result stays as it is until the host has read it, though the next step may run already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from meltcore.common.errors import ConfigError
from meltcore.engine.tasks.packed_graphs import PackedBatch
from meltcore.kernels.memory_pools import memory_pool
from meltcore.kernels.sampling.beam_top_k import log_softmax_top_k
from meltcore.models.configs.task_configs import MAX_NEW_TOKENS, NUM_BEAMS
from meltcore.models.tasks.indictrans2 import EOS_ID, DecodeStep, IndicTrans2

MAX_BEAMS = 8
_IMPOSSIBLE_SCORE = -1e9  # the score of a beam that does not exist
# Synthetic lengths: tokens more than the source has, with its tags and end token, and the fewest.
_SYNTHETIC_EXTRA, _SYNTHETIC_LEAST = 5, 8


@dataclass(frozen=True)
class BeamOptions:
    """Holds the settings of a search, by the names that transformers uses. One beam is greedy decoding.

    Args:
        length_penalty: a finished score is divided by the length to this power. Larger values prefer longer
            translations.
        early_stopping: True ends the search when `num_beams` beams are finished. False ends it when no running beam can
            become better at its current length. "never" ends it when no running beam can become better at any length.
        has_synthetic_lengths: whether a translation has 5 tokens more than its source, at least 8 and at most
            `max_new_tokens`. This is for random weights, which do not end by themselves.
    """

    num_beams: int = NUM_BEAMS
    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    has_synthetic_lengths: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_beams <= MAX_BEAMS:
            raise ConfigError(f"num_beams must be from 1 to {MAX_BEAMS}; got {self.num_beams}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens or self.max_new_tokens < 1:
            raise ConfigError(
                "min_new_tokens and max_new_tokens must be 0 <= min <= max and max >= 1; "
                f"got {self.min_new_tokens} and {self.max_new_tokens}"
            )
        if not -100 <= self.length_penalty <= 100:
            raise ConfigError(f"length_penalty must be from -100 to 100; got {self.length_penalty}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f'early_stopping must be True, False or "never"; got {self.early_stopping!r}')


class Finished(NamedTuple):
    """The best sequences of some slots, on the host: their tokens with the end token, and their scores."""

    tokens: list[list[int]]
    scores: list[float]


class BeamState:
    """Tables of `slots` sentences, with a spare slot at the end."""

    def __init__(self, model: IndicTrans2, options: BeamOptions, *, slots: int, max_source: int) -> None:
        """Allocate the tables. The longest source has `max_source` tokens."""
        self.model, self.options, self.spare = model, options, slots
        self.device = model.device
        config, slots = model.config, slots + 1
        beams, length, heads = options.num_beams, options.max_new_tokens, config.decoder.num_heads
        shape = (config.decoder.num_layers, 2, slots, heads)
        head_dim = config.hidden_size // heads
        with memory_pool("kv_cache"):
            self.self_kv = torch.zeros(*shape, length, beams, head_dim, dtype=model.dtype, device=self.device)
            self.cross_kv = torch.zeros(*shape, max_source, head_dim, dtype=model.dtype, device=self.device)

        def table(*sizes: int, fill: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((slots, *sizes), fill, dtype=dtype, device=self.device)

        self._source_lengths = table(fill=1)
        self._positions = table(fill=0)  # of the next tokens
        self._writers = table(beams, length, fill=0, dtype=torch.int8)  # the beam that wrote a position of a prefix
        self._last_tokens = table(beams, fill=EOS_ID)
        self._tokens = table(beams, length, fill=0)
        self._scores = table(beams, fill=_IMPOSSIBLE_SCORE, dtype=torch.float32)
        self._finished_tokens = table(beams, length, fill=0)
        self._finished_lengths = table(beams, fill=0)
        self._finished_scores = table(beams, fill=_IMPOSSIBLE_SCORE, dtype=torch.float32)
        self._is_finished = table(beams, fill=False, dtype=torch.bool)
        self._is_done = table(fill=True, dtype=torch.bool)
        self._synthetic_lengths = table(fill=length) if options.has_synthetic_lengths else None

    @staticmethod
    def slot_bytes(model: IndicTrans2, options: BeamOptions, max_source: int) -> int:
        """Return the bytes of one slot: keys and values, and the logits of a step."""
        return model.config.slot_bytes(
            model.dtype.itemsize,
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            max_source=max_source,
        )

    def begin(self, slots: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor) -> None:
        """Encode sources into slots.

        Args:
            slots: [rows] int64.
            token_ids: [rows, positions], padded at the end.
            lengths: [rows] int64, the number of tokens of each source.
        """
        encoded = self.model.encode(token_ids, lengths)
        for cache, keys_values in zip(self.cross_kv, self.model.cross_keys_values(encoded), strict=True):
            cache[:, slots, :, : encoded.shape[1]] = keys_values
        self._begin(slots, lengths)

    def begin_packed(self, batch: PackedBatch) -> None:
        """Encode sources that lie one after another into slots.

        The values of a token are its id, its position, and how far its slot is before the spare one. The values of a
        row are that distance, and its length. So padding, which has zeros, goes to the spare slot.
        """
        (token_ids, positions, distances), (row_distances, lengths) = batch.tokens, batch.rows
        encoded = self.model.encode_packed(token_ids, positions, batch.tiles)
        places = self.spare - distances.long(), positions.long()
        for cache, keys_values in zip(self.cross_kv, self.model.cross_keys_values(encoded[None]), strict=True):
            cache.permute(1, 3, 0, 2, 4)[places] = keys_values[:, 0].permute(2, 0, 1, 3)
        # A source without tokens would give the spare slot values that are no numbers.
        self._begin(self.spare - row_distances.long(), lengths.long().clamp(min=1))

    def _begin(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the tables of slots whose sources were encoded."""
        self._source_lengths[slots] = lengths
        if self._synthetic_lengths is not None:
            target_lengths = (lengths + _SYNTHETIC_EXTRA).clamp(min=_SYNTHETIC_LEAST)
            self._synthetic_lengths[slots] = target_lengths.clamp(max=self.options.max_new_tokens)
        for table, value in (
            (self._positions, 0), (self._last_tokens, EOS_ID), (self._finished_scores, _IMPOSSIBLE_SCORE),
            (self._is_finished, False), (self._is_done, False),
        ):  # fmt: skip
            table.index_fill_(0, slots, value)
        first = torch.arange(self.options.num_beams, device=self.device) == 0
        # So that the first tokens are all of one beam
        self._scores[slots] = torch.where(first, 0.0, _IMPOSSIBLE_SCORE)

    def step(self, slots: torch.Tensor, num_positions: int, max_source: int) -> torch.Tensor:
        """Compute the next token of every beam of these slots. Returns [rows] bool: True for sentences that are done.

        Args:
            slots: [rows] int64. Only the spare slot may occur several times.
            num_positions: an upper bound of the tokens of a translation, including the new token.
            max_source: an upper bound of the tokens of a source.
        """
        positions, was_done = self._positions[slots], self._is_done[slots]
        step = DecodeStep(
            token_ids=self._last_tokens[slots],
            slots=slots,
            positions=positions,
            num_positions=num_positions,
            writers=self._writers,
            source_lengths=self._source_lengths[slots],
            max_source=max_source,
        )
        logits = self.model.decode(step, self.self_kv, self.cross_kv)
        lengths = positions + 1
        beams = self.options.num_beams
        # Twice as many candidates as beams: at most half of them end, so that as many as there are beams can run on.
        count = 2 * beams if beams > 1 else 1
        is_last, is_too_short = lengths >= self.options.max_new_tokens, lengths <= self.options.min_new_tokens
        if self._synthetic_lengths is not None:
            is_last = lengths >= self._synthetic_lengths[slots]
            is_too_short = ~is_last
        must_go_on = is_too_short[:, None].expand(-1, beams).flatten()
        log_probs, tokens = (
            values.unflatten(0, (len(slots), beams))
            for values in log_softmax_top_k(logits.flatten(0, 1), count, EOS_ID, must_go_on)
        )
        targets = torch.where(was_done, self.spare, slots)
        extend = self._extend_greedy if beams == 1 else self._extend_beams
        is_done = extend(slots, targets, lengths, log_probs, tokens, is_last) | is_last
        # Not beyond the last position, which the spare slot would reach.
        self._positions[targets] = lengths.clamp(max=self.options.max_new_tokens - 1)
        self._is_done[targets] = is_done
        return is_done | was_done

    def read(self, slots: torch.Tensor) -> Finished:
        """Return the best sequences of slots that are done, after waiting for the stream.

        slots: [rows] int64 on the device.
        """
        parts = (
            self._finished_tokens[slots, 0],
            self._finished_lengths[slots, :1],
            self._finished_scores[slots, :1].double().view(torch.int64),
        )
        on_host = torch.cat(parts, dim=1).cpu()
        lengths = on_host[:, -2].tolist()
        tokens = [row[:length] for row, length in zip(on_host[:, :-2].tolist(), lengths, strict=True)]
        return Finished(tokens, on_host[:, -1:].clone().view(torch.float64)[:, 0].tolist())

    def _extend_greedy(
        self,
        slots: torch.Tensor,
        targets: torch.Tensor,
        lengths: torch.Tensor,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        is_last: torch.Tensor,  # noqa: ARG002 - a single beam ends in any case
    ) -> torch.Tensor:
        """Append the most probable tokens of single beams. Arguments and result are as in `_extend_beams`."""
        token, scores = tokens[:, :, 0], self._scores[slots] + log_probs[:, :, 0]
        sequences = self._tokens[slots].scatter(2, (lengths - 1)[:, None, None], token[..., None])
        self._tokens[targets] = self._finished_tokens[targets] = sequences
        self._last_tokens[targets] = token
        self._scores[targets] = scores
        self._finished_lengths[targets] = lengths[:, None]
        self._finished_scores[targets] = scores / self._length_factor(lengths)[:, None]
        return token[:, 0] == EOS_ID

    def _extend_beams(
        self,
        slots: torch.Tensor,
        targets: torch.Tensor,
        lengths: torch.Tensor,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        is_last: torch.Tensor,
    ) -> torch.Tensor:
        """Select the best extensions of all beams, and finish beams that end.

        Returns [rows] bool: True for rows that end.

        Args:
            slots: slots from which the state is read.
            targets: slots to which the state is written.
            lengths: [rows], lengths of the sequences with the new tokens.
            log_probs: [rows, beams, candidates], the highest log-probabilities of each beam.
            tokens: [rows, beams, candidates], the tokens with these log-probabilities.
            is_last: [rows], True for rows that end in this step.
        """
        beams, count = self.options.num_beams, log_probs.shape[-1]
        totals = log_probs + self._scores[slots][..., None]
        scores, best_indices = totals.flatten(1).topk(count)
        parents = best_indices // count
        new_tokens = tokens.flatten(1).gather(1, best_indices)
        positions = (lengths - 1)[:, None, None]
        sequences = _take_beams(self._tokens[slots], parents)
        sequences.scatter_(2, positions.expand(-1, count, 1), new_tokens[..., None])
        ends = (new_tokens == EOS_ID) | is_last[:, None]

        running_scores = scores + ends * _IMPOSSIBLE_SCORE
        kept_scores, keep = running_scores.topk(beams)
        finished_scores, is_finished = self._finish(slots, targets, lengths, scores, sequences, ends)
        self._scores[targets] = kept_scores
        self._tokens[targets] = _take_beams(sequences, keep)
        self._last_tokens[targets] = new_tokens.gather(1, keep)
        beam_ids = torch.arange(beams, dtype=torch.int8, device=self.device)[:, None]
        writers = self._writers[slots].scatter_(2, positions.expand(-1, beams, 1), beam_ids.expand(len(slots), -1, 1))
        self._writers[targets] = _take_beams(writers, parents.gather(1, keep))
        return self._cannot_improve(lengths, kept_scores[:, 0], finished_scores, is_finished)

    def _finish(
        self,
        slots: torch.Tensor,
        targets: torch.Tensor,
        lengths: torch.Tensor,
        scores: torch.Tensor,
        sequences: torch.Tensor,
        ends: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the best finished sequences of each row, among the earlier ones and the first candidates that end.

        Returns their scores and whether they exist, [rows, beams] each.
        """
        beams = self.options.num_beams
        is_new = ends & (torch.arange(scores.shape[1], device=self.device) < beams)
        new_scores = scores / self._length_factor(lengths)[:, None] + ~is_new * _IMPOSSIBLE_SCORE
        best, index = torch.cat([self._finished_scores[slots], new_scores], dim=1).topk(beams)
        self._finished_scores[targets] = best
        is_finished = torch.cat([self._is_finished[slots], is_new], dim=1).gather(1, index)
        self._is_finished[targets] = is_finished
        new_lengths = lengths[:, None].expand(-1, scores.shape[1])
        for state, new in ((self._finished_lengths, new_lengths), (self._finished_tokens, sequences)):
            state[targets] = _take_beams(torch.cat([state[slots], new], dim=1), index)
        return best, is_finished

    def _cannot_improve(
        self,
        lengths: torch.Tensor,
        best_scores: torch.Tensor,
        finished_scores: torch.Tensor,
        is_finished: torch.Tensor,
    ) -> torch.Tensor:
        """Return [rows] bool: True for rows whose running beams are not expected to beat a finished beam."""
        early_stopping, penalty = self.options.early_stopping, self.options.length_penalty
        if early_stopping == "never" and penalty > 0:
            lengths = torch.full_like(lengths, self.options.max_new_tokens)
        best_running = best_scores / self._length_factor(lengths)
        all_finished = is_finished.all(dim=1)
        is_done = all_finished & (best_running <= finished_scores.amin(dim=1))
        return is_done | all_finished if early_stopping is True else is_done

    def _length_factor(self, lengths: torch.Tensor) -> torch.Tensor:
        return lengths.float() ** self.options.length_penalty


def _take_beams(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select beams of `values` [rows, beams, ...] by `index` [rows, new beams]."""
    expanded = index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
    return values.gather(1, expanded)
