"""Mutations of the engine, each of which must fail parity: this proves that the parity tests can fail."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch
from transformers import PreTrainedModel

from meltcore.engine.worker import model_runner as runner_module
from meltcore.kernels.attention import kv_cache as kv_cache_kernel
from meltcore.kernels.attention import paged as attention_kernel
from meltcore.kernels.moe import router as router_kernel
from meltcore.kernels.moe.routing import Routing
from meltcore.layers import attention as attention_layer
from meltcore.layers import feed_forward as moe_layer

# A correct engine stays below 1e-4; a mutation that changes less than ten times that would be lost in the noise.
NOTICED = 1e-3


def error_of(reference: PreTrainedModel, seen: tools.SeenEngine) -> float:
    prompt = tools.random_prompt(150, 1)
    seen.add("one", prompt, max_tokens=4)
    tokens = seen.run()
    theirs = tools.reference_logits(reference, prompt, tokens["one"])
    return tools.relative_error(torch.stack(seen.logits["one"]), theirs)


def test_unmutated_engine_is_below_the_threshold(reference: PreTrainedModel, checkpoint: Path) -> None:
    assert error_of(reference, tools.open_engine(checkpoint, max_num_batched_tokens=64)) < NOTICED / 10


def rotary_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the keys: a shift of both would be a relative position and rightly change nothing."""
    whole = kv_cache_kernel.apply_rope

    def shifted(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return whole(heads, table, positions + (heads.shape[1] == 2))

    monkeypatch.setattr(kv_cache_kernel, "apply_rope", shifted)


def mask_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda context_lens, *sizes: whole(context_lens - 1, *sizes))


def mask_sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda context_lens, *sizes: whole(context_lens + 1, *sizes))


def query_norm_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kv_cache_kernel.rms_norm_reference

    def skipping(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        is_query = heads.shape[1] == 4
        return heads if is_query else whole(heads, weight, eps)

    monkeypatch.setattr(kv_cache_kernel, "rms_norm_reference", skipping)


def scale_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_layer.paged_attention
    monkeypatch.setattr(
        attention_layer,
        "paged_attention",
        lambda qkv, params, *rest: whole(qkv, params._replace(scale=params.scale * 0.9), *rest),
    )


def one_page_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full page and the one being written are swapped. (Two full pages may be: keys carry their own position.)"""
    whole = runner_module.ModelRunner._forward

    def swapping(self: runner_module.ModelRunner, batch: object) -> torch.Tensor:
        if batch.context_lens[0] == 128:  # type: ignore[attr-defined]
            row = self.page_tables.flat[batch.rows[0]]  # type: ignore[attr-defined]
            row[[0, 2]] = row[[2, 0]]
        return whole(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module.ModelRunner, "_forward", swapping)


@pytest.mark.parametrize(
    "mutation",
    [rotary_off_by_one, mask_off_by_one, mask_sees_the_future, query_norm_skipped, scale_wrong, one_page_swapped],
)
def test_mutation_fails_parity(
    reference: PreTrainedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mutation: object
) -> None:
    mutation(monkeypatch)  # type: ignore[operator]
    assert error_of(reference, tools.open_engine(checkpoint, max_num_batched_tokens=64)) > NOTICED


def test_dropped_bias_fails_parity(tmp_path: Path) -> None:
    """Qwen2's, of one layer: its parity tests say that the whole engine is below the threshold."""
    reference = tools.make_reference(family="qwen2")
    reference.save_pretrained(tmp_path)
    seen = tools.open_engine(tmp_path)
    seen.engine.runner.model.blocks[1].attention.qkv_proj.bias.zero_()
    assert error_of(reference, seen) > NOTICED


@pytest.fixture(scope="module")
def routed_reference() -> PreTrainedModel:
    return tools.make_reference(family="qwen3_moe")


@pytest.fixture(scope="module")
def routed_checkpoint(routed_reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    routed_reference.save_pretrained(folder)
    return folder


def topk_prob_not_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.select_experts
    monkeypatch.setattr(
        router_kernel,
        "select_experts",
        lambda *given, shared_expert, **_: whole(*given, norm_topk_prob=False, shared_expert=shared_expert),
    )


def experts_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.select_experts

    def rotated(logits: torch.Tensor, top_k: int, **how: bool) -> Routing:
        routing = whole(logits, top_k, **how)
        return routing._replace(topk_ids=(routing.topk_ids + 1) % logits.shape[1])

    monkeypatch.setattr(router_kernel, "select_experts", rotated)


def topk_weights_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.select_experts

    def swapped(logits: torch.Tensor, top_k: int, **how: bool) -> Routing:
        routing = whole(logits, top_k, **how)
        return routing._replace(topk_weights=routing.topk_weights.flip(-1))

    monkeypatch.setattr(router_kernel, "select_experts", swapped)


def last_expert_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.select_experts
    monkeypatch.setattr(router_kernel, "select_experts", lambda logits, top_k, **how: whole(logits, top_k - 1, **how))


def norm_before_the_experts_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = moe_layer.route_tokens
    monkeypatch.setattr(
        moe_layer, "route_tokens", lambda tokens, norm, *given, **how: whole(tokens, None, *given, **how)
    )


@pytest.mark.parametrize(
    "mutation",
    [
        topk_prob_not_normalized,
        experts_rotated,
        topk_weights_swapped,
        last_expert_left_out,
        norm_before_the_experts_dropped,
    ],
)
def test_mutation_of_routed_experts_fails_parity(
    routed_reference: PreTrainedModel, routed_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mutation: object
) -> None:
    """Their parity tests say that the whole engine is below the threshold."""
    mutation(monkeypatch)  # type: ignore[operator]
    assert error_of(routed_reference, tools.open_engine(routed_checkpoint, max_num_batched_tokens=64)) > NOTICED
