"""The layers that run before a capture, and those that are captured, without a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_tools as tools
import pytest
import torch
from test_decode_graphs import AbsentEvent

from meltcore.engine.core.graph_sizes import capture_sizes
from meltcore.engine.worker import cuda_graphs, model_runner, prefill_graphs, transfer
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.models.decoder import Block, Decoder
from meltcore.models.model import Model

MAX_SEQS, MAX_TOKENS = 5, 160


class RecordedLayers:
    """The layers that each eager and each captured pass ran, by the number of its tokens."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.eager: defaultdict[int, list[int]] = defaultdict(list)
        self.captured: defaultdict[int, list[int]] = defaultdict(list)
        self.passes: list[tuple[int, bool]] = []

    def record(self, layer: int, tokens: int) -> None:
        if layer == 0:
            self.passes.append((tokens, self.is_capturing))
        (self.captured if self.is_capturing else self.eager)[tokens].append(layer)

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        self.is_capturing = True
        try:
            return SimpleNamespace(replay=step), step()
        finally:
            self.is_capturing = False


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedLayers:
    """Captures that run their step, of layers that only add to the residual stream."""
    recorded = RecordedLayers()
    for module in (cuda_graphs, prefill_graphs):
        monkeypatch.setattr(module, "GraphCapturer", lambda: recorded)
    for module in (cuda_graphs, transfer):
        monkeypatch.setattr(module, "pinned", lambda *shape: torch.zeros(shape, dtype=torch.int64))
    monkeypatch.setattr(model_runner, "_memory_bytes", lambda device: 2**40)
    monkeypatch.setattr(torch.cuda, "Event", AbsentEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return recorded


def open_runner(
    folder: Path, recorded: RecordedLayers, monkeypatch: pytest.MonkeyPatch, **sizes: object
) -> ModelRunner:
    tools.make_reference(**sizes).save_pretrained(folder)  # type: ignore[arg-type]
    settings = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_TOKENS, "max_model_len": 300}
    runner = tools.open_engine(folder, **settings).engine.runner
    assert isinstance(runner.model, Decoder)
    layers = {id(block): layer for layer, block in enumerate(runner.model.blocks)}

    def forward(block: Block, residual: Any, positions: torch.Tensor, *_: object) -> None:
        recorded.record(layers[id(block)], len(positions))
        residual.values.add_(1)

    monkeypatch.setattr(Block, "forward", forward)
    return runner


HYBRID = ["linear_attention"] * 3 + ["full_attention"]
GEMMA = ["sliding_attention"] * 2 + ["full_attention"]
# The sizes of a network, and the layers that run before an even and before an odd number of tokens is captured. The
# last has three sub-groups of four layers. The second one's slots of an odd number of tokens are not aligned: those of
# the first sliding layers, but not of the others.
NETWORKS: dict[str, tuple[dict[str, object], list[int], list[int]]] = {
    "equal": ({"num_hidden_layers": 6}, [0, 1, 5], [0, 1, 5]),
    "hybrid": (
        {"family": "qwen3_5_moe_text", "num_hidden_layers": 8, "layer_types": HYBRID * 2},
        [0, 1, 2, 3, 4, 7],
        [0, 1, 2, 3, 4, 7],
    ),
    "sliding": (
        {"family": "gemma3_text", "num_hidden_layers": 12, "layer_types": GEMMA * 4},
        [0, 1, 2, 3, 11],
        [0, 1, 2, 3, 5, 6, 7, 8, 11],
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_few_layers_run_before_all_are_captured(
    name: str, tmp_path: Path, recorded: RecordedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, few, few_of_odd = NETWORKS[name]
    runner = open_runner(tmp_path, recorded, monkeypatch, **sizes)
    runner.capture_graphs(lambda _stage, _part: None, prefill=True)
    every = list(range(int(str(sizes["num_hidden_layers"]))))
    assert runner._decode_graphs is not None
    assert runner._prefill_graphs is not None
    decodes, prefills = capture_sizes(MAX_SEQS), [sum(bucket) for bucket in runner._prefill_graphs._buckets]
    assert any(tokens % 2 for tokens in prefills)
    assert dict(recorded.captured) == dict.fromkeys(decodes + prefills, every)
    expected = {tokens: few_of_odd if tokens % 2 and tokens in prefills else few for tokens in decodes + prefills}
    assert dict(recorded.eager) == expected
    # Each size right before its capture: kernels are selected by size.
    pairs = zip(recorded.passes[::2], recorded.passes[1::2], strict=True)
    assert all((before, after) == ((after[0], False), after) and after[1] for before, after in pairs)
    assert 0 <= int(runner._last_token.min()) <= int(runner._last_token.max()) < tools.VOCAB


def test_step_that_is_captured_at_its_first_use_runs_all_layers(
    tmp_path: Path, recorded: RecordedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are used."""
    runner = open_runner(tmp_path, recorded, monkeypatch, num_hidden_layers=6)
    monkeypatch.setattr(prefill_graphs, "CAPTURED_DECODES", -1)  # none at start
    runner.capture_graphs(lambda _stage, _part: None, prefill=True)
    recorded.eager.clear()
    recorded.captured.clear()
    graphs = runner._prefill_graphs
    assert graphs is not None
    bucket = graphs._buckets[0]
    with torch.inference_mode():
        graphs.replay(prefill_graphs.EMPTY_BATCH, bucket, prefill_graphs.NewPages([], [], []))
    assert recorded.eager[sum(bucket)] == recorded.captured[sum(bucket)] == list(range(6))


def test_model_without_kinds_runs_all_layers_before_a_capture(
    tmp_path: Path, recorded: RecordedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(tmp_path, recorded, monkeypatch, num_hidden_layers=4)
    monkeypatch.setattr(Decoder, "one_layer_per_kind", Model.one_layer_per_kind)
    assert isinstance(runner.model.one_layer_per_kind(), nullcontext)
    runner.capture_graphs(lambda _stage, _part: None, prefill=True)
    assert recorded.eager == recorded.captured
    assert set(map(tuple, recorded.eager.values())) == {(0, 1, 2, 3)}
