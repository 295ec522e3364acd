"""Runs one step of few utterances as a CUDA graph, because its kernels take less time than their launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.engine.synthesis.memory import GRAPHS
from meltcore.kernels.graph_capture import GraphCache, GraphCapturer
from meltcore.models.tasks.indicf5 import IndicF5


class StepInputs(NamedTuple):
    """The inputs of a batch's step: arguments of `IndicF5.velocity`, and each row's index in the table of steps."""

    noisy: torch.Tensor
    condition: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor | None


class _Graph(NamedTuple):
    inputs: StepInputs
    graph: torch.cuda.CUDAGraph
    velocity: torch.Tensor


def step_velocity(model: IndicF5, inputs: StepInputs) -> torch.Tensor:
    """Return the velocity of one step, the direction from noise to speech, [rows, frames, num_mels] float32."""
    modulations = model.modulations[inputs.positions]
    return model.velocity(inputs.noisy, inputs.condition, modulations, inputs.is_padding)


class StepGraphs:
    """CUDA graphs of `step_velocity` for few utterances, by the shape of the batch.

    Frames are not rounded up: without padding, attention needs no mask, and 32 replays pay for one capture.
    """

    def __init__(self, model: IndicF5, limits: tuple[int, int] = GRAPHS) -> None:
        """Create an empty cache.

        `limits` are the frames of the longest step that is a graph, and the number of graphs.
        """
        self._model = model
        self._max_frames, max_graphs = limits
        self._cache: GraphCache[_Graph] = GraphCache(max_graphs)

    def velocity(self, inputs: StepInputs) -> torch.Tensor:
        """Return the result of `step_velocity`. The next step of the same shape overwrites this tensor."""
        rows, frames, _ = inputs.noisy.shape
        if rows * frames > self._max_frames:
            return step_velocity(self._model, inputs)

        def make(capturer: GraphCapturer) -> _Graph:
            graph_inputs = StepInputs(*(None if values is None else values.clone() for values in inputs))  # type: ignore[arg-type]
            step_velocity(self._model, graph_inputs)  # so that nothing is loaded or chosen during the capture
            torch.cuda.synchronize()
            return _Graph(graph_inputs, *capturer.capture(lambda: step_velocity(self._model, graph_inputs)))

        captured = self._cache.get((rows, frames, inputs.is_padding is None), make)
        for target, values in zip(captured.inputs, inputs, strict=True):
            if target is not None and values is not None:
                target.copy_(values)
        captured.graph.replay()
        return captured.velocity
