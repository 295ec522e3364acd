"""Loads a synthesis checkpoint, and turns utterances into samples, batch by batch.

An utterance is one pass of the model: a reference, and the text to speak after it. Utterances of similar length share a
batch. `step` moves one batch one step of Euler's method from noise to a spectrogram. Utterances at their last step
become samples. The batch whose first utterance is due earliest goes first. So an urgent utterance waits at most for one
step of another batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from meltcore.engine.synthesis.memory import GRAPHS
from meltcore.engine.synthesis.synthesis_graphs import StepGraphs, StepInputs, step_velocity
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_checkpoint
from meltcore.models.configs.task_configs import IndicF5Config
from meltcore.models.loader import load_task_model, planned_device, task_dtype
from meltcore.models.tasks.indicf5 import FILLER, IndicF5
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.synthesis.vocabulary import load_vocabulary

# Accepted numbers of steps; the first is the default.
STEPS = (32, 16, 8)
# An utterance joins a batch of a longer one if padding adds at most this factor to its cost.
_MAX_PADDING = 1.5
# Launched while the GPU computes: it never waits for the host between two steps.
_STEPS_AHEAD = 1

Samples = npt.NDArray[np.float32]


class Utterance(NamedTuple):
    """One pass of the model.

    Args:
        due: an utterance with a lower value is computed earlier.
        reference: [reference frames, num_mels] float32 on the device.
        token_ids: ids of the reference's text and of the new text, at most `frames` ids.
        frames: the number of frames of the reference and of the new speech together.
        first_frame: samples are returned from this frame on.
        noise: [frames, num_mels] float32 on the host.
    """

    key: str
    due: tuple[float, ...]
    reference: torch.Tensor
    token_ids: Sequence[int]
    frames: int
    first_frame: int
    noise: torch.Tensor
    num_steps: int


@dataclass
class _Batch:
    """Utterances that are computed together.

    `positions` has the row of each utterance in the model's table of steps, on the device. `host_positions` has the
    same numbers on the host.
    """

    utterances: list[Utterance]
    noisy: torch.Tensor
    condition: torch.Tensor
    is_padding: torch.Tensor | None
    positions: torch.Tensor
    host_positions: list[int]

    @property
    def due(self) -> tuple[float, ...]:
        return min(utterance.due for utterance in self.utterances)

    def keep(self, rows: list[int]) -> None:
        """Keep the utterances of `rows`, and drop all other utterances."""
        index = torch.tensor(rows, device=self.noisy.device)
        num_rows = len(self.utterances)
        self.utterances = [self.utterances[row] for row in rows]
        self.noisy, self.positions = self.noisy[index], self.positions[index]
        self.condition = self.condition[torch.cat([index, index + num_rows])]
        self.is_padding = None if self.is_padding is None else self.is_padding[index]
        self.host_positions = [self.host_positions[row] for row in rows]


class SpeechSampler:
    """Computes utterances in batches of bounded size."""

    def __init__(self, model: IndicF5, max_batch_frames: int, graph_limits: tuple[int, int] = GRAPHS) -> None:
        """Use a prepared model.

        A batch has at most `max_batch_frames` frames with its padding. An utterance that is longer is computed alone.
        `graph_limits` are the limits of StepGraphs.
        """
        self.model = model
        self._max_frames = max_batch_frames
        self._waiting: dict[str, Utterance] = {}
        self._batches: list[_Batch] = []
        self._launched: deque[torch.cuda.Event] = deque()
        self._graphs = StepGraphs(model, graph_limits) if model.device.type == "cuda" else None

    @property
    def is_idle(self) -> bool:
        """Whether the sampler has no utterance to compute."""
        return not self._waiting and not self._batches

    def add(self, utterance: Utterance) -> None:
        """Queue an utterance. Its computation begins with one of the next steps."""
        self._waiting[utterance.key] = utterance

    def cancel(self, keys: Collection[str]) -> None:
        """Drop utterances."""
        for key in keys:
            self._waiting.pop(key, None)
        for batch in list(self._batches):
            rows = [row for row, utterance in enumerate(batch.utterances) if utterance.key not in keys]
            if not rows:
                self._batches.remove(batch)
            elif len(rows) < len(batch.utterances):
                batch.keep(rows)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Samples]]:
        """Compute one step of the batch that is due first. Return (key, samples) of each completed utterance."""
        if self.is_idle:
            return []
        batch = min(self._batches, key=lambda each: each.due, default=None)
        if self._waiting and (batch is None or min(each.due for each in self._waiting.values()) < batch.due):
            batch = self._begin()
        assert batch is not None
        self._wait_for_device()
        self._advance(batch)
        ends = [self.model.first_step[each.num_steps] + each.num_steps for each in batch.utterances]
        done = [row for row, position in enumerate(batch.host_positions) if position == ends[row]]
        if not done:
            return []
        samples = self._decode(batch, done)
        keys = [batch.utterances[row].key for row in done]
        if len(done) == len(batch.utterances):
            self._batches.remove(batch)
        else:
            batch.keep([row for row in range(len(batch.utterances)) if row not in done])
        return list(zip(keys, samples, strict=True))

    def _wait_for_device(self) -> None:
        """Wait until a GPU has at most _STEPS_AHEAD queued steps, so that urgent and cancelled utterances act soon."""
        if self.model.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()  # after the last step
        self._launched.append(event)
        if len(self._launched) > _STEPS_AHEAD:
            self._launched.popleft().synchronize()

    def _begin(self) -> _Batch:
        """Make a batch of the waiting utterance that is due first and other waiting utterances of similar length."""
        in_order = sorted(self._waiting.values(), key=lambda utterance: utterance.due)
        utterances: list[Utterance] = []
        for utterance in in_order:
            lengths = [each.frames for each in (*utterances, utterance)]
            has_space = max(lengths) * len(lengths) <= self._max_frames and max(lengths) <= min(lengths) * _MAX_PADDING
            if not utterances or has_space:
                utterances.append(utterance)
        for utterance in utterances:
            del self._waiting[utterance.key]
        batch = self._make_batch(utterances)
        self._batches.append(batch)
        return batch

    def _make_batch(self, utterances: list[Utterance]) -> _Batch:
        device, frames = self.model.device, max(utterance.frames for utterance in utterances)
        lengths = [utterance.frames for utterance in utterances]

        def pad_rows(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([functional.pad(row, (0, 0, 0, frames - len(row))) for row in rows])

        token_ids = torch.full((len(utterances), frames), FILLER)
        for row, utterance in zip(token_ids, utterances, strict=True):
            row[: len(utterance.token_ids)] = torch.tensor(utterance.token_ids)
        is_padding = None
        if min(lengths) < frames:
            is_padding = torch.arange(frames, device=device) >= torch.tensor(lengths, device=device)[:, None]
        positions = [self.model.first_step[utterance.num_steps] for utterance in utterances]
        return _Batch(
            utterances,
            noisy=pad_rows([utterance.noise for utterance in utterances]).to(device),
            condition=self.model.condition(
                pad_rows([utterance.reference for utterance in utterances]), token_ids.to(device), is_padding
            ),
            is_padding=is_padding,
            positions=torch.tensor(positions, device=device),
            host_positions=positions,
        )

    def _advance(self, batch: _Batch) -> None:
        """Compute one step, without a transfer from the device."""
        inputs = StepInputs(batch.noisy, batch.condition, batch.positions, batch.is_padding)
        velocity = step_velocity(self.model, inputs) if self._graphs is None else self._graphs.velocity(inputs)
        batch.noisy.addcmul_(velocity, self.model.step_sizes[batch.positions][:, None, None])
        batch.positions += 1
        batch.host_positions = [position + 1 for position in batch.host_positions]

    def _decode(self, batch: _Batch, rows: list[int]) -> list[Samples]:
        """Return the samples of complete utterances, from their first frame on."""
        parts = []
        for row in rows:
            utterance = batch.utterances[row]
            mels = torch.cat([utterance.reference, batch.noisy[row, len(utterance.reference) : utterance.frames]])
            parts.append(mels[utterance.first_frame :])
        lengths = [len(part) for part in parts]
        pad_rows = torch.stack([functional.pad(part, (0, 0, 0, max(lengths) - len(part))) for part in parts])
        samples = self.model.vocoder(pad_rows, torch.tensor(lengths, device=pad_rows.device)).cpu().numpy()
        hop = self.model.config.mel.hop
        return [row[: (length - 1) * hop] for row, length in zip(samples, lengths, strict=True)]


def load_synthesis_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    *,
    steps: Sequence[int] = STEPS,
    dummy_seed: int | None = None,
    progress: Progress = lambda _stage, _part: None,
) -> IndicF5:
    """Build the model and load its weights.

    The checkpoint's vocabulary has `vocab_size` characters. With `dummy_seed` the model gets random weights instead.

    Raises ConfigError when the configuration or a file cannot be used, or memory is not enough.
    """
    model = load_task_model(_meta_model(checkpoint, dtype, vocab_size), checkpoint, device, dummy_seed, progress)
    model.prepare(steps)
    return model


def _meta_model(checkpoint: Checkpoint, dtype: torch.dtype, vocab_size: int) -> IndicF5:
    with torch.device("meta"):
        model = IndicF5(IndicF5Config.read(checkpoint.config, vocab_size)).to(dtype)
        model.vocoder.float()
    return model


def weight_bytes(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a prepared model's weights, for a plan.

    `prepare` replaces the weights of modulations by their values at each step. This function only computes the sizes
    after the replacement, since on the meta device torch would import its compiler.
    """
    assert model.checkpoint is not None
    checkpoint = open_checkpoint(model.checkpoint, files="config")
    dtype = task_dtype(model.dtype, planned_device(on_cpu), on_gpu=torch.bfloat16)
    network = _meta_model(checkpoint, dtype, load_vocabulary(checkpoint, is_dummy=True).size)
    kept_bytes = sum(values.nbytes for name, values in network.named_parameters() if "modulation." not in name)
    rows = sum(each.out_features for each in network.modulation_layers)
    return kept_bytes + sum(STEPS) * rows * dtype.itemsize
