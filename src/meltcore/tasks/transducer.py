"""Greedy RNN-T decoding of a batch by label looping.

The decoder state of a clip changes only with a token. So one iteration computes, for every clip, the logits of several
frames with the same prediction, takes the first frame whose best token is not the blank, and then advances the
prediction network once for all clips (after Xu et al., "Label-Looping", 2024; the window of frames is ours). Clips in
different places of their audio share every operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.models.indicconformer import IndicConformer
from meltcore.tasks.ctc import Emissions

# Frames whose logits an iteration computes per clip. Speech has a token every 2 to 4 frames of 80 ms.
WINDOW_FRAMES = 4
# Iterations between two looks at the device for whether all clips have ended.
_GPU_ITERATIONS = 8


class _State(NamedTuple):
    """The decoder state of a batch: what the prediction network made of each clip's tokens so far."""

    predicted: torch.Tensor  # [clips, joint_size]
    hidden: torch.Tensor  # [layers, clips, prediction_size]
    cell: torch.Tensor

    def updated(self, new: _State, rows: torch.Tensor) -> _State:
        """Return the state with the new values of `rows` ([clips] bool), and the old ones elsewhere."""
        return _State(
            torch.where(rows[:, None], new.predicted, self.predicted),
            torch.where(rows[None, :, None], new.hidden, self.hidden),
            torch.where(rows[None, :, None], new.cell, self.cell),
        )


def transducer_greedy(
    model: IndicConformer,
    encoded: torch.Tensor,
    frames: torch.Tensor,
    languages: torch.Tensor,
    start_token: int | None = None,
) -> list[Emissions]:
    """Return each clip's emissions. A token spans the frame at which it is emitted.

    encoded: [clips, frames, hidden_size]; frames, languages: [clips] int64; start_token: the prediction network's first
    input (default: the global blank).
    """
    config = model.config
    clips, size, _ = encoded.shape
    start = config.vocab_size if start_token is None else start_token
    blank, window = config.blank, min(WINDOW_FRAMES, size)
    projected, heads = model.joint.enc(encoded), model.joint.heads(languages)
    offsets = torch.arange(window, device=encoded.device)
    rows = torch.arange(clips, device=encoded.device)
    state = _advance(model, torch.full_like(frames, start), _initial_state(model, clips))
    frame, symbols, count = torch.zeros_like(frames), torch.zeros_like(frames), torch.zeros_like(frames)
    max_tokens = size * config.max_symbols
    # One column more: iterations of a clip that emit nothing write there.
    tokens = torch.zeros(clips, max_tokens + 1, dtype=torch.int32, device=encoded.device)
    places = torch.zeros_like(tokens)
    per_look = 1 if encoded.device.type == "cpu" else _GPU_ITERATIONS
    while bool((frame < frames).any()):
        for _ in range(per_look):
            window_frames = frame[:, None] + offsets
            read = projected[rows[:, None], window_frames.clamp(max=size - 1)]
            best = model.joint(read, state.predicted, heads).argmax(-1)
            is_token = (best != blank) & (window_frames < frames[:, None])
            emits, first = is_token.any(1), is_token.int().argmax(1)
            token = best.gather(1, first[:, None])[:, 0]
            # A frame that is left by blanks begins its successor's count; so does one with the most tokens.
            frame = frame + torch.where(emits, first, window)
            symbols = torch.where(emits, torch.where(first > 0, 1, symbols + 1), 0)
            column = torch.where(emits, count, max_tokens)[:, None]
            tokens.scatter_(1, column, token[:, None].int())
            places.scatter_(1, column, frame[:, None].int())
            count = count + emits
            state = state.updated(_advance(model, torch.where(emits, token, start), state), emits)
            is_full = symbols >= config.max_symbols
            frame, symbols = frame + is_full, symbols.masked_fill(is_full, 0)
    counts = count.tolist()
    longest = max(counts)
    host_tokens, host_places = tokens[:, :longest].cpu(), places[:, :longest].cpu()
    return [
        Emissions(host_tokens[i, :n].tolist(), host_places[i, :n].tolist(), (host_places[i, :n] + 1).tolist())
        for i, n in enumerate(counts)
    ]


def _initial_state(model: IndicConformer, clips: int) -> _State:
    config = model.config
    zeros = torch.zeros(config.prediction_layers, clips, config.prediction_size, dtype=model.dtype, device=model.device)
    return _State(zeros.new_zeros(clips, config.joint_size), zeros, zeros)


def _advance(model: IndicConformer, tokens: torch.Tensor, state: _State) -> _State:
    """Feed one token of every clip to the prediction network."""
    output, (hidden, cell) = model.prediction(tokens, (state.hidden, state.cell))
    return _State(model.joint.pred(output), hidden, cell)
