"""Mutations of Qwen3.5's own features, each of which must fail parity, so that its tests can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from speculation_tools import NGRAM, ForcedDrafts
from test_mutations import NOTICED, error_of, topk_prob_not_normalized
from transformers import PreTrainedModel

from meltcore.kernels.attention.metadata import AttentionMetadata, AttentionParams
from meltcore.kernels.gated_delta.common import GatedDeltaParams
from meltcore.kernels.moe import router as router_kernel
from meltcore.kernels.moe.routing import Routing
from meltcore.layers import attention as attention_layer
from meltcore.layers import gated_delta_net as delta_layer
from meltcore.layers import norm as norm_layer
from meltcore.models.decoders import tensor_names

Delta = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def hybrid_reference() -> PreTrainedModel:
    return tools.make_reference(family="qwen3_5_moe_text")


@pytest.fixture(scope="module")
def hybrid_checkpoint(hybrid_reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    hybrid_reference.save_pretrained(folder)
    return folder


def of_weights(monkeypatch: pytest.MonkeyPatch, change: Callable[[GatedDeltaParams], GatedDeltaParams]) -> None:
    whole: Delta = delta_layer.gated_delta_net
    monkeypatch.setattr(
        delta_layer, "gated_delta_net", lambda projected, params, metadata: whole(projected, change(params), metadata)
    )


def decay_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(a_log=weights.a_log + 0.1))


def convolution_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(conv=weights.conv.roll(1, dims=1)))


def step_size_without_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights(monkeypatch, lambda weights: weights._replace(dt_bias=torch.zeros_like(weights.dt_bias)))


def kept_as_before(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The update of one of the two state tensors is lost."""
    whole: Delta = delta_layer.gated_delta_net

    def forgetting(projected: torch.Tensor, params: GatedDeltaParams, metadata: AttentionMetadata) -> torch.Tensor:
        kept = (params.conv_states, params.recurrent_states)[which]
        before = kept.clone()
        output = whole(projected, params, metadata)
        kept.copy_(before)
        return output

    monkeypatch.setattr(delta_layer, "gated_delta_net", forgetting)


def convolution_window_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_as_before(monkeypatch, 0)


def state_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_as_before(monkeypatch, 1)


def norms_not_zero_centered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_layer.ZeroCenteredRMSNorm, "loader", norm_layer.RMSNorm.loader)


def output_gate_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layer, "apply_sigmoid_gate", lambda mixed, gates: mixed)


def gates_and_queries_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are read as all queries and then all gates, an order that no checkpoint has."""
    monkeypatch.setattr(
        tensor_names,
        "_query_order",
        lambda attention, dims: torch.arange(2 * attention.num_heads * len(dims)).roll(attention.num_heads * len(dims)),
    )


def whole_heads_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_layer.paged_attention

    def turning(
        qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        cos, sin = params.rotary_table.chunk(2, dim=1)
        table = torch.cat([cos.roll(1, 1), sin.roll(1, 1)], 1)
        return whole(qkv, params._replace(rotary_table=table), positions, metadata)

    monkeypatch.setattr(attention_layer, "paged_attention", turning)


def of_routing(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`change` the weights of the shared expert."""
    whole = router_kernel.select_experts

    def changed(*given: object, **how: bool) -> Routing:
        routing = whole(*given, **how)  # type: ignore[arg-type]
        weights = torch.cat([routing.topk_weights[:, :-1], change(routing.topk_weights[:, -1:])], 1)
        return routing._replace(topk_weights=weights)

    monkeypatch.setattr(router_kernel, "select_experts", changed)


def shared_expert_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of_routing(monkeypatch, torch.zeros_like)


def shared_expert_not_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    of_routing(monkeypatch, torch.ones_like)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        decay_changed,
        convolution_shifted,
        step_size_without_its_bias,
        convolution_window_stale,
        state_stale,
        norms_not_zero_centered,
        output_gate_left_out,
        gates_and_queries_mixed_up,
        whole_heads_turned,
        topk_prob_not_normalized,
        shared_expert_left_out,
        shared_expert_not_gated,
    ],
)
def test_mutation_of_the_hybrid_fails_parity(
    hybrid_reference: PreTrainedModel,
    hybrid_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutation: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Its parity tests say that the whole engine is below the threshold."""
    mutation(monkeypatch)
    assert error_of(hybrid_reference, tools.open_engine(hybrid_checkpoint, max_num_batched_tokens=64)) > NOTICED


@pytest.mark.parametrize("begins_anew", [True, False])
def test_sequence_does_not_start_from_the_previous_state_of_its_slot(
    hybrid_reference: PreTrainedModel, hybrid_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    """A reused slot with the state of another sequence: without a reset at the start, parity fails."""
    seen = tools.open_engine(hybrid_checkpoint, max_num_seqs=1)
    seen.add("before", tools.random_prompt(90, 2), max_tokens=2)
    seen.run()
    whole: Delta = delta_layer.gated_delta_net

    def going_on(projected: torch.Tensor, params: GatedDeltaParams, metadata: AttentionMetadata) -> torch.Tensor:
        later = metadata._replace(context_lens=metadata.context_lens.clamp(min=64))
        return whole(projected, params, later)

    if not begins_anew:
        monkeypatch.setattr(delta_layer, "gated_delta_net", going_on)
    error = error_of(hybrid_reference, seen)
    assert error < NOTICED / 10 if begins_anew else error > NOTICED


def of_windows(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[GatedDeltaParams, AttentionMetadata], AttentionMetadata]
) -> None:
    whole: Delta = delta_layer.gated_delta_net
    monkeypatch.setattr(
        delta_layer,
        "gated_delta_net",
        lambda projected, params, metadata: whole(projected, params, change(params, metadata)),
    )


def rejected_drafts_stay_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    of_windows(monkeypatch, lambda _, metadata: metadata._replace(num_windows=0, num_decodes=0))


def accepted_draft_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(_: GatedDeltaParams, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata._replace(replay_lens=(metadata.replay_lens - 1).clamp(min=0))

    of_windows(monkeypatch, fewer)


def convolution_of_windows_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(params: GatedDeltaParams, metadata: AttentionMetadata) -> AttentionMetadata:
        if metadata.num_windows:
            params.conv_states.copy_(params.conv_states.roll(1, dims=1))
        return metadata

    of_windows(monkeypatch, shifted)


def answers(seen: tools.SeenEngine) -> dict[str, list[int]]:
    for index in range(2):
        seen.add(f"r{index}", tools.random_prompt(5 + 61 * index, index), max_tokens=32)
    return seen.run()


@pytest.fixture(scope="module")
def tokens_without_drafts(hybrid_checkpoint: Path) -> dict[str, list[int]]:
    return answers(tools.open_engine(hybrid_checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", [rejected_drafts_stay_in_the_state, accepted_draft_not_replayed, convolution_of_windows_shifted]
)
def test_mutation_of_the_rollback_changes_the_tokens(
    hybrid_checkpoint: Path,
    tokens_without_drafts: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    mutation: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Tests of speculative decoding say that they are the same without a mutation."""
    ForcedDrafts(monkeypatch, tokens_without_drafts, 2)
    seen = tools.open_engine(hybrid_checkpoint, speculative_config=NGRAM)
    mutation(monkeypatch)
    assert answers(seen) != tokens_without_drafts
