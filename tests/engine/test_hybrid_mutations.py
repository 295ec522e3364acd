"""What sets Qwen3.5 apart, broken one thing at a time: parity must notice each, so its tests can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from test_mutations import NOTICED, error_of, router_not_renormalised
from transformers import PreTrainedModel

from meltcore.kernels import router as router_kernel
from meltcore.kernels.delta_net import DeltaWeights
from meltcore.kernels.paged_attention import Segments
from meltcore.kernels.routing import Routing
from meltcore.layers import attention as attention_layer
from meltcore.layers import delta_net as delta_layer
from meltcore.layers import norm as norm_layer
from meltcore.models import tensor_names

Delta = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def hybrid_reference() -> PreTrainedModel:
    return tools.make_reference(family="qwen3_5_moe_text")


@pytest.fixture(scope="module")
def hybrid_checkpoint(hybrid_reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    hybrid_reference.save_pretrained(folder)
    return folder


def of_weights(monkeypatch: pytest.MonkeyPatch, change: Callable[[DeltaWeights], DeltaWeights]) -> None:
    whole: Delta = delta_layer.delta_net
    monkeypatch.setattr(
        delta_layer, "delta_net", lambda projected, weights, *rest: whole(projected, change(weights), *rest)
    )


def decay_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(a_log=weights.a_log + 0.1))


def convolution_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(conv=weights.conv.roll(1, dims=1)))


def step_size_without_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(dt_bias=torch.zeros_like(weights.dt_bias)))


def kept_as_before(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """What a step leaves in one of the two tensors is thrown away."""
    whole: Delta = delta_layer.delta_net

    def forgetting(projected: torch.Tensor, weights: DeltaWeights, *rest: object) -> torch.Tensor:
        kept = rest[which]
        assert isinstance(kept, torch.Tensor)
        before = kept.clone()
        mixed = whole(projected, weights, *rest)
        kept.copy_(before)
        return mixed

    monkeypatch.setattr(delta_layer, "delta_net", forgetting)


def convolution_window_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_as_before(monkeypatch, 0)


def state_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_as_before(monkeypatch, 1)


def norms_not_zero_centred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_layer._OneMore, "copy_", lambda self, source: self._scale.copy_(source))


def output_gate_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layer, "gate_output", lambda mixed, gates: mixed)


def gates_and_queries_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken as all queries and then all gates, as no checkpoint has them."""
    monkeypatch.setattr(
        tensor_names,
        "_query_order",
        lambda attention, dims: torch.arange(2 * attention.heads * len(dims)).roll(attention.heads * len(dims)),
    )


def whole_heads_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_layer.paged_attention

    def turning(
        qkv: torch.Tensor, norms: object, rotary: torch.Tensor, positions: torch.Tensor, *rest: object
    ) -> torch.Tensor:
        cos, sin = rotary.chunk(2, dim=1)
        return whole(qkv, norms, torch.cat([cos.roll(1, 1), sin.roll(1, 1)], 1), positions, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_layer, "paged_attention", turning)


def of_routing(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`change` the weights of the shared expert."""
    whole = router_kernel.route

    def changed(*given: object, **how: bool) -> Routing:
        routing = whole(*given, **how)  # type: ignore[arg-type]
        weights = torch.cat([routing.weights[:, :-1], change(routing.weights[:, -1:])], 1)
        return routing._replace(weights=weights)

    monkeypatch.setattr(router_kernel, "route", changed)


def shared_expert_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of_routing(monkeypatch, torch.zeros_like)


def shared_expert_not_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    of_routing(monkeypatch, torch.ones_like)


@pytest.mark.parametrize(
    "mutation",
    [
        decay_changed,
        convolution_shifted,
        step_size_without_its_bias,
        convolution_window_stale,
        state_stale,
        norms_not_zero_centred,
        output_gate_left_out,
        gates_and_queries_mixed_up,
        whole_heads_turned,
        router_not_renormalised,
        shared_expert_left_out,
        shared_expert_not_gated,
    ],
)
def test_a_mutation_of_the_hybrid_fails_parity(
    hybrid_reference: PreTrainedModel,
    hybrid_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutation: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Its parity tests say that the whole engine is below the threshold."""
    mutation(monkeypatch)
    assert error_of(hybrid_reference, tools.open_engine(hybrid_checkpoint, max_num_batched_tokens=64)) > NOTICED


@pytest.mark.parametrize("begins_anew", [True, False])
def test_a_sequence_begins_with_nothing_of_the_one_before(
    hybrid_reference: PreTrainedModel, hybrid_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    """Its slot holds another's state. Were its start told as any other, parity would notice."""
    seen = tools.open_engine(hybrid_checkpoint, max_num_seqs=1)
    seen.add("before", tools.random_prompt(90, 2), max_tokens=2)
    seen.run()
    whole: Delta = delta_layer.delta_net

    def going_on(
        projected: torch.Tensor,
        weights: DeltaWeights,
        conv: torch.Tensor,
        states: torch.Tensor,
        segments: Segments,
        *rest: int,
    ) -> torch.Tensor:
        return whole(projected, weights, conv, states, segments._replace(starts=segments.starts.clamp(min=64)), *rest)

    if not begins_anew:
        monkeypatch.setattr(delta_layer, "delta_net", going_on)
    error = error_of(hybrid_reference, seen)
    assert error < NOTICED / 10 if begins_anew else error > NOTICED
