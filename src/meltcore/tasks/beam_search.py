"""Beam search and greedy decoding of an encoder-decoder, for many sources that begin and end at different steps.

Scores, stopping and length penalty are those of `generate` in transformers. Each source has a slot with its state:
beams do not copy their prefixes when they are reordered, since a table names for each beam and position the beam that
wrote the keys and values there. The beams of a source share its cross-attention keys and values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from meltcore.errors import ConfigError, RequestError
from meltcore.models.indictrans2 import EOS_ID, DecodeStep, IndicTrans2

MAX_BEAMS = 8
# Tokens, with padding, that are encoded together at most: they bound the encoder's activations.
_ENCODER_TOKENS = {"cuda": 16_384, "cpu": 2048}
_IMPOSSIBLE = -1e9  # the score of a beam that does not exist


@dataclass(frozen=True)
class BeamOptions:
    """Holds the settings of a search, as transformers names them. One beam is greedy decoding.

    length_penalty: a finished score is divided by the length to this power, so that more prefers longer ones.
    early_stopping: True ends with as many finished beams as `num_beams`; False when no running beam can become better
    at its length; "never" when none can at the best length.
    """

    num_beams: int = 5
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

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


class Translation(NamedTuple):
    """The best sequence of a source, without start and end token, and its score (log-probability with penalty)."""

    key: Hashable
    token_ids: list[int]
    score: float


class BeamSearch:
    """Decodes sources in slots. `add` fills free slots, `step` computes one token per beam of all filled ones."""

    def __init__(self, model: IndicTrans2, options: BeamOptions, *, slots: int, max_source: int) -> None:
        """Allocate the state of `slots` sources of at most `max_source` tokens.

        Raises ConfigError for more tokens than the model has positions.
        """
        config = model.config
        for limit, most, name in (
            (max_source, config.max_source_positions, "max_source_positions"),
            (options.max_new_tokens, config.max_target_positions, "max_target_positions"),
        ):
            if limit > most:
                raise ConfigError(f"{limit} tokens are more than the model's {name}, {most}")
        self.model, self.options = model, options
        self.max_source, self.num_slots = max_source, slots
        self._keys: list[Hashable] = []  # of the filled slots, which are the first ones
        # Per filled slot, known without asking the device: tokens of the source, and of the target so far
        self._source_sizes: list[int] = []
        self._target_sizes: list[int] = []
        beams, length, device = options.num_beams, options.max_new_tokens, model.device
        head_dim = config.hidden_size // config.decoder.num_heads
        shape = (config.decoder.num_layers, 2, slots, config.decoder.num_heads)
        self._self_kv = torch.zeros(*shape, length, beams, head_dim, dtype=model.dtype, device=device)
        self._cross_kv = torch.zeros(*shape, max_source, head_dim, dtype=model.dtype, device=device)

        def table(*sizes: int, fill: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((slots, *sizes), fill, dtype=dtype, device=device)

        self._source_lengths = table(fill=1)
        self._positions = table(fill=0)  # of the next tokens
        self._writers = table(beams, length, fill=-1)  # the beam that wrote a position of a beam's prefix
        self._tokens = table(beams, length, fill=0)
        self._scores = table(beams, fill=_IMPOSSIBLE, dtype=torch.float32)
        self._finished_tokens = table(beams, length, fill=0)
        self._finished_lengths = table(beams, fill=0)
        self._finished_scores = table(beams, fill=_IMPOSSIBLE, dtype=torch.float32)
        self._is_finished = table(beams, fill=False, dtype=torch.bool)

    @staticmethod
    def slot_bytes(model: IndicTrans2, options: BeamOptions, max_source: int) -> int:
        """Return the bytes of one slot: keys and values, and the logits of a step."""
        config = model.config
        positions = max_source + options.num_beams * options.max_new_tokens
        kv_bytes = 2 * config.decoder.num_layers * config.hidden_size * model.dtype.itemsize * positions
        return kv_bytes + options.num_beams * config.decoder.vocab_size * (model.dtype.itemsize + 4)

    @property
    def num_running(self) -> int:
        """The number of filled slots."""
        return len(self._keys)

    @property
    def num_free(self) -> int:
        """The number of sources that `add` takes now."""
        return self.num_slots - len(self._keys)

    @torch.inference_mode()
    def add(self, keys: Sequence[Hashable], sources: Sequence[Sequence[int]]) -> None:
        """Encode sources and begin to decode them. keys: one per source, which its translation will have.

        Raises RequestError for an empty or too long source; then none is added.
        """
        assert len(keys) == len(sources) <= self.num_free
        for source in sources:
            if not 1 <= len(source) <= self.max_source:
                raise RequestError(f"a sentence has {len(source)} tokens; the limit is {self.max_source}")
        # Short ones first: sources that are encoded together have about one length.
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        max_tokens = _ENCODER_TOKENS[self.model.device.type]
        while order:
            count = max(1, min(len(order), max_tokens // len(sources[order[-1]])))
            part, order = order[-count:], order[:-count]
            self._encode([keys[i] for i in part], [sources[i] for i in part])

    def _encode(self, keys: list[Hashable], sources: list[Sequence[int]]) -> None:
        lengths = torch.tensor([len(source) for source in sources])
        token_ids = torch.zeros(len(sources), int(lengths.max()), dtype=torch.int64)
        for row, source in zip(token_ids, sources, strict=True):
            row[: len(source)] = torch.tensor(source)
        device = self.model.device
        lengths = lengths.to(device)
        encoded = self.model.encode(token_ids.to(device), lengths)
        new = slice(len(self._keys), len(self._keys) + len(keys))
        for cache, keys_values in zip(self._cross_kv, self.model.cross_keys_values(encoded), strict=True):
            cache[:, new, :, : encoded.shape[1]] = keys_values
        self._source_lengths[new] = lengths
        self._positions[new] = 0
        self._writers[new] = -1
        self._scores[new] = _IMPOSSIBLE  # so that the first tokens are all of one beam
        self._scores[new, 0] = 0.0
        self._finished_scores[new] = _IMPOSSIBLE
        self._is_finished[new] = False
        self._keys += keys
        self._source_sizes += map(len, sources)
        self._target_sizes += [0] * len(keys)

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """End sources without a translation. Unknown keys are ignored."""
        unwanted = set(keys)
        for slot in reversed([i for i, key in enumerate(self._keys) if key in unwanted]):
            self._free(slot)

    @torch.inference_mode()
    def step(self) -> list[Translation]:
        """Compute the next token of every beam. Returns the translations that are complete, whose slots are free."""
        if not self._keys:
            return []
        num_rows = len(self._keys)
        logits = self._next_logits(num_rows).float()
        totals = logits.logsumexp(dim=-1)
        generated = self._positions[:num_rows] + 1
        if self.options.min_new_tokens:  # the probabilities of the other tokens stay, as in transformers
            logits[..., EOS_ID].masked_fill_((generated <= self.options.min_new_tokens)[:, None], -torch.inf)
        extend = self._extend_greedy if self.options.num_beams == 1 else self._extend_beams
        is_done = extend(logits, totals) | (generated >= self.options.max_new_tokens)
        self._positions[:num_rows] = generated
        self._target_sizes = [size + 1 for size in self._target_sizes]
        return self._take(is_done.nonzero().flatten().tolist())

    def _next_logits(self, num_rows: int) -> torch.Tensor:
        """Return the logits of the next tokens: [rows, beams, vocab]."""
        beams = torch.arange(self.options.num_beams, device=self.model.device)
        rows = torch.arange(num_rows, device=self.model.device)
        positions = self._positions[:num_rows]
        self._writers[rows, :, positions] = beams
        num_positions, max_source = max(self._target_sizes) + 1, max(self._source_sizes)
        last = self._tokens[rows, :, (positions - 1).clamp(min=0)]
        writers = self._writers[:num_rows, :, :num_positions]
        source_positions = torch.arange(max_source, device=self.model.device)
        step = DecodeStep(
            token_ids=torch.where(positions[:, None] == 0, EOS_ID, last),
            rows=rows,
            positions=positions,
            num_positions=num_positions,
            self_mask=(writers[..., None] == beams).flatten(2)[:, None],
            cross_mask=(source_positions < self._source_lengths[:num_rows, None])[:, None, None],
        )
        return self.model.decode(step, self._self_kv[:, :, :num_rows], self._cross_kv[:, :, :num_rows, :, :max_source])

    def _extend_greedy(self, logits: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """Append the most probable tokens of single beams. Returns which rows end: [rows] bool.

        logits: [rows, 1, vocab] float32; totals: their logsumexp [rows, 1].
        """
        num_rows = len(logits)
        best, tokens = logits[:, 0].max(dim=-1)
        log_probs = best - totals[:, 0]
        rows, positions = torch.arange(num_rows, device=logits.device), self._positions[:num_rows]
        self._tokens[rows, 0, positions] = tokens
        self._scores[:num_rows, 0] += log_probs
        lengths = positions + 1
        self._finished_tokens[:num_rows] = self._tokens[:num_rows]
        self._finished_lengths[:num_rows, 0] = lengths
        self._finished_scores[:num_rows, 0] = self._scores[:num_rows, 0] / self._length_factor(lengths)
        return tokens == EOS_ID

    def _extend_beams(self, logits: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """Choose the best extensions of all beams, and finish those that end. Returns which rows end: [rows] bool.

        logits: [rows, beams, vocab] float32; totals: their logsumexp [rows, beams].
        """
        num_rows, beams, _ = logits.shape
        positions = self._positions[:num_rows]
        lengths = positions + 1
        # Twice as many candidates as beams: at most half of them end, so that as many as there are beams can run on.
        count = 2 * beams
        top, top_tokens = logits.topk(count, dim=-1)
        top = top - totals[..., None] + self._scores[:num_rows, :, None]
        scores, chosen = top.flatten(1).topk(count)
        parents = chosen // count
        tokens = top_tokens.flatten(1).gather(1, chosen)
        sequences = _take_beams(self._tokens[:num_rows], parents)
        sequences.scatter_(2, positions[:, None, None].expand(-1, count, 1), tokens[..., None])
        ends = (tokens == EOS_ID) | (lengths >= self.options.max_new_tokens)[:, None]

        running_scores = scores + ends * _IMPOSSIBLE
        keep = running_scores.topk(beams).indices
        self._finish(scores, sequences, ends)
        self._scores[:num_rows] = running_scores.gather(1, keep)
        self._tokens[:num_rows] = _take_beams(sequences, keep)
        self._writers[:num_rows] = _take_beams(self._writers[:num_rows], parents.gather(1, keep))
        return self._cannot_improve(lengths)

    def _finish(self, scores: torch.Tensor, sequences: torch.Tensor, ends: torch.Tensor) -> None:
        """Keep the best finished sequences of each row: of those it has and of the first candidates that end."""
        num_rows, beams = len(scores), self.options.num_beams
        lengths = self._positions[:num_rows] + 1
        is_first = torch.arange(scores.shape[1], device=scores.device) < beams
        is_new = ends & is_first
        new_scores = scores / self._length_factor(lengths)[:, None] + ~is_new * _IMPOSSIBLE
        merged = torch.cat([self._finished_scores[:num_rows], new_scores], dim=1)
        best, index = merged.topk(beams)
        new_lengths = lengths[:, None].expand(-1, scores.shape[1])
        self._finished_scores[:num_rows] = best
        for state, new in (
            (self._is_finished, is_new),
            (self._finished_lengths, new_lengths),
            (self._finished_tokens, sequences),
        ):
            state[:num_rows] = _take_beams(torch.cat([state[:num_rows], new], dim=1), index)

    def _cannot_improve(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return which rows are done: no running beam is expected to become better than a finished one, [rows] bool."""
        num_rows = len(lengths)
        early_stopping, penalty = self.options.early_stopping, self.options.length_penalty
        if early_stopping == "never" and penalty > 0:
            lengths = torch.full_like(lengths, self.options.max_new_tokens)
        best_running = self._scores[:num_rows, 0] / self._length_factor(lengths)
        all_finished = self._is_finished[:num_rows].all(dim=1)
        is_done = all_finished & (best_running <= self._finished_scores[:num_rows].amin(dim=1))
        return is_done | all_finished if early_stopping is True else is_done

    def _length_factor(self, lengths: torch.Tensor) -> torch.Tensor:
        return lengths.float() ** self.options.length_penalty

    def _take(self, slots: list[int]) -> list[Translation]:
        """Return the best translations of slots in increasing order, and free them."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self.model.device)
        lengths = self._finished_lengths[index, 0].tolist()
        sequences = self._finished_tokens[index, 0].tolist()
        scores = self._finished_scores[index, 0].tolist()
        translations = []
        for slot, length, sequence, score in zip(slots, lengths, sequences, scores, strict=True):
            token_ids = sequence[:length]
            if token_ids[-1] == EOS_ID:
                token_ids.pop()
            translations.append(Translation(self._keys[slot], token_ids, score))
        for slot in reversed(slots):
            self._free(slot)
        return translations

    def _free(self, slot: int) -> None:
        """Free a slot: the last filled one moves there, so that filled slots remain the first ones."""
        last = len(self._keys) - 1
        if slot != last:
            self._self_kv[:, :, slot] = self._self_kv[:, :, last]
            self._cross_kv[:, :, slot] = self._cross_kv[:, :, last]
            for state in (
                self._source_lengths, self._positions, self._writers, self._tokens, self._scores, self._finished_tokens,
                self._finished_lengths, self._finished_scores, self._is_finished,
            ):  # fmt: skip
                state[slot] = state[last]
        self._keys[slot] = self._keys[last]
        self._keys.pop()
        for sizes in (self._source_sizes, self._target_sizes):
            sizes[slot] = sizes[last]
            sizes.pop()


def _take_beams(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return values [rows, beams, ...] of the beams `index` [rows, new beams]."""
    expanded = index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
    return values.gather(1, expanded)
