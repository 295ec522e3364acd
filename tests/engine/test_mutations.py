"""Each of these breaks one thing; parity must notice every one. It proves that the parity tests can fail."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch
from transformers import PreTrainedModel

from meltcore.engine import runner as runner_module
from meltcore.kernels import paged_attention as attention_kernel
from meltcore.kernels import qkv as qkv_kernel
from meltcore.kernels import router as router_kernel
from meltcore.kernels.routing import Routing
from meltcore.layers import attention as attention_layer
from meltcore.layers import moe as moe_layer

# A correct engine stays below 1e-4; a mutation that changes less than ten times that would be lost in the noise.
NOTICED = 1e-3


def error_of(reference: PreTrainedModel, seen: tools.SeenEngine) -> float:
    prompt = tools.random_prompt(150, 1)
    seen.add("one", prompt, max_tokens=4)
    tokens = seen.run()
    theirs = tools.reference_logits(reference, prompt, tokens["one"])
    return tools.relative_error(torch.stack(seen.logits["one"]), theirs)


def test_nothing_broken_is_below_the_threshold(reference: PreTrainedModel, checkpoint: Path) -> None:
    assert error_of(reference, tools.open_engine(checkpoint, max_num_batched_tokens=64)) < NOTICED / 10


def rotary_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the keys: a shift of both would be a relative position and rightly change nothing."""
    whole = qkv_kernel.apply_rotary

    def shifted(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return whole(heads, table, positions + (heads.shape[1] == 2))

    monkeypatch.setattr(qkv_kernel, "apply_rotary", shifted)


def mask_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda starts, *sizes: whole(starts - 1, *sizes))


def mask_sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda starts, *sizes: whole(starts + 1, *sizes))


def query_norm_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = qkv_kernel.rms_norm

    def skipping(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        is_query = heads.shape[1] == 4
        return heads if is_query else whole(heads, weight, eps)

    monkeypatch.setattr(qkv_kernel, "rms_norm", skipping)


def scale_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_layer.paged_attention
    monkeypatch.setattr(
        attention_layer,
        "paged_attention",
        lambda *given: whole(*given[:-1], given[-1] * 0.9),
    )


def one_page_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full page and the one being written change places. (Two full pages could: keys carry their own position.)"""
    whole = runner_module.ModelRunner._forward

    def swapping(self: runner_module.ModelRunner, batch: object) -> torch.Tensor:
        if batch.starts[0] == 128:  # type: ignore[attr-defined]
            row = self._page_table[batch.rows[0]]  # type: ignore[attr-defined]
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


def test_a_dropped_bias_fails_parity(tmp_path: Path) -> None:
    """Qwen2's, of one layer: its parity tests say that the whole engine is below the threshold."""
    reference = tools.make_reference(family="qwen2")
    reference.save_pretrained(tmp_path)
    seen = tools.open_engine(tmp_path)
    seen.engine.runner.model.blocks[1].attention.qkv.bias.zero_()
    assert error_of(reference, seen) > NOTICED


@pytest.fixture(scope="module")
def routed_reference() -> PreTrainedModel:
    return tools.make_reference(family="qwen3_moe")


@pytest.fixture(scope="module")
def routed_checkpoint(routed_reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    routed_reference.save_pretrained(folder)
    return folder


def router_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.route
    monkeypatch.setattr(
        router_kernel, "route", lambda *given, shared, **_: whole(*given, renormalised=False, shared=shared)
    )


def experts_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.route

    def rotated(logits: torch.Tensor, choices: int, **how: bool) -> Routing:
        routing = whole(logits, choices, **how)
        return routing._replace(experts=(routing.experts + 1) % logits.shape[1])

    monkeypatch.setattr(router_kernel, "route", rotated)


def weights_of_choices_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.route

    def swapped(logits: torch.Tensor, choices: int, **how: bool) -> Routing:
        routing = whole(logits, choices, **how)
        return routing._replace(weights=routing.weights.flip(-1))

    monkeypatch.setattr(router_kernel, "route", swapped)


def last_choice_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = router_kernel.route
    monkeypatch.setattr(router_kernel, "route", lambda logits, choices, **how: whole(logits, choices - 1, **how))


def norm_before_the_experts_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = moe_layer.to_experts
    monkeypatch.setattr(moe_layer, "to_experts", lambda tokens, norm, *given, **how: whole(tokens, None, *given, **how))


@pytest.mark.parametrize(
    "mutation",
    [
        router_not_renormalised,
        experts_rotated,
        weights_of_choices_swapped,
        last_choice_left_out,
        norm_before_the_experts_dropped,
    ],
)
def test_a_mutation_of_routed_experts_fails_parity(
    routed_reference: PreTrainedModel, routed_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mutation: object
) -> None:
    """Their parity tests say that the whole engine is below the threshold."""
    mutation(monkeypatch)  # type: ignore[operator]
    assert error_of(routed_reference, tools.open_engine(routed_checkpoint, max_num_batched_tokens=64)) > NOTICED
