"""Gemma 3 and Mistral against transformers: chunked, cached past the window, preempted and batched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import engine_tools as tools
import pytest
import sliding_tools
import torch
from transformers import PreTrainedModel

from meltcore.common.errors import ConfigError
from meltcore.engine.core.kv_cache import PAGE_SIZE, PageGroup, pages_for
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.worker.caches import allocate_caches
from meltcore.kernels.attention import paged as attention_kernel
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.norm import add_rms_norm
from meltcore.layers import attention as attention_layer
from meltcore.layers import embedding as embedding_layer
from meltcore.layers import feed_forward
from meltcore.layers import norm as norm_layer
from meltcore.layers import residual as residual_stream
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, SlidingWindowSpec, group_layers

TOLERANCE = 1e-4
NOTICED = 1e-3  # a mutation's error


@pytest.fixture(scope="module", params=["mixed", "pairs"])
def network(request: pytest.FixtureRequest) -> sliding_tools.Network:
    return sliding_tools.NETWORKS[request.param]


@pytest.fixture(scope="module")
def reference(network: sliding_tools.Network) -> PreTrainedModel:
    return sliding_tools.make_reference(network)


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sliding_tools.save(reference, tmp_path_factory.mktemp("sliding"))


def worst_error(seen: tools.SeenEngine, reference: PreTrainedModel, prompts: dict[str, list[int]]) -> float:
    tokens = seen.run()
    return max(
        tools.relative_error(torch.stack(seen.logits[name]), tools.reference_logits(reference, prompt, tokens[name]))
        for name, prompt in prompts.items()
    )


def test_reference_depends_on_its_window(network: sliding_tools.Network, reference: PreTrainedModel) -> None:
    """Without this the other tests could pass without a window."""
    prompt = tools.random_prompt(200, 0)
    plain = sliding_tools.make_reference(network, window=1000)
    plain.load_state_dict(reference.state_dict())
    with torch.no_grad():
        ids = torch.tensor([prompt])
        ours, theirs = (each(ids).logits[0, network.window :] for each in (reference, plain))
    assert tools.relative_error(ours, theirs) > 0.1


@pytest.mark.slow
def test_prefill_then_decode_equals_transformers(
    network: sliding_tools.Network, reference: PreTrainedModel, checkpoint: Path
) -> None:
    seen = tools.open_engine(checkpoint)
    assert seen.engine.scheduler.layout.column_pages == network.sub_groups()
    prompt = tools.random_prompt(60, 30)
    seen.add("one", prompt, max_tokens=80)
    assert worst_error(seen, reference, {"one": prompt}) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("budget", [7, 100])
def test_chunked_prefill_equals_transformers(reference: PreTrainedModel, checkpoint: Path, budget: int) -> None:
    seen = tools.open_engine(checkpoint, max_num_batched_tokens=budget)
    prompts = {"a": tools.random_prompt(250, 1), "b": tools.random_prompt(90, 2)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert worst_error(seen, reference, prompts) <= TOLERANCE


def test_many_sequences_of_different_lengths(reference: PreTrainedModel, checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, overlap=True, max_num_batched_tokens=96)
    prompts = {f"r{index}": tools.random_prompt(1 + 50 * index, index) for index in range(6)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        seen.add(request_id, prompt, max_tokens=3 + 6 * index)
    assert worst_error(seen, reference, prompts) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_prefix_cached_past_the_window_equals_transformers(
    reference: PreTrainedModel, checkpoint: Path, overlap: bool
) -> None:
    seen = tools.open_engine(checkpoint, overlap=overlap, max_num_batched_tokens=100)
    shared = tools.random_prompt(330, 3)
    seen.add("first", [*shared, 5, 6, 7])
    seen.run()
    prompts = {"again": [*shared, 5, 6, 7], "branch": shared[:200] + tools.random_prompt(40, 4), "exact": shared[:256]}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert worst_error(seen, reference, prompts) <= TOLERANCE
    assert seen.engine.stats().prefix_hit_tokens_total == 320 + 192 + 192


@pytest.mark.slow
def test_preempted_request_resumes_with_same_logits(
    network: sliding_tools.Network, reference: PreTrainedModel, checkpoint: Path
) -> None:
    """Five may start in one page per sub-group, for which there is room; then they grow."""
    prompts = {f"r{index}": tools.random_prompt(30, 50 + index) for index in range(5)}
    pages = 6 * network.sub_groups()
    seen = tools.open_engine(checkpoint, overlap=True, pages=pages, max_model_len=200, max_num_batched_tokens=64)
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=60)
    assert worst_error(seen, reference, prompts) <= TOLERANCE
    assert seen.engine.stats().preemptions_total > 0


def test_network_of_sliding_layers_only_equals_transformers(tmp_path: Path) -> None:
    """As Mistral 7B v0.1: one group, whose pages all slide; chunked, and with more sequences than the pool holds."""
    reference = sliding_tools.make_reference(sliding_tools.NETWORKS["all sliding"])
    sliding_tools.save(reference, tmp_path)
    seen = tools.open_engine(tmp_path, overlap=True, pages=7, max_num_batched_tokens=64)
    prompts = {f"r{index}": tools.random_prompt(30 + 70 * index, index) for index in range(4)}
    for name, prompt in prompts.items():
        seen.add(name, prompt, max_tokens=40)
    assert worst_error(seen, reference, prompts) <= TOLERANCE
    assert seen.engine.scheduler.layout.column_pages == 1


def test_prompt_logprobs_beyond_the_window(reference: PreTrainedModel, checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, max_num_batched_tokens=64)
    prompt = tools.random_prompt(230, 9)
    seen.add("one", prompt, max_tokens=2, prompt_logprobs=1)
    (listed,) = [output.prompt_logprobs for output in seen.outputs() if output.prompt_logprobs is not None]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    for token_id, logprobs, row in zip(prompt[1:], listed, expected, strict=True):
        assert logprobs.logprob == pytest.approx(float(row[token_id]), abs=2e-3)


@pytest.mark.slow
def test_pages_are_free_once_they_left_the_window(network: sliding_tools.Network, checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, enable_prefix_caching=False)
    seen.add("one", tools.random_prompt(100, 0), max_tokens=100)
    full = network.layers.count("f") * network.sub_groups() // len(network.layers)
    sliding = network.sub_groups() - full
    for _ in seen.outputs():
        request = next(iter(seen.engine.scheduler.running), None)
        if request is not None:
            computed = request.num_computed_tokens
            first = max(0, computed - network.window) // PAGE_SIZE  # of the step that was just computed
            assert seen.engine.pool.num_used == full * pages_for(computed) + sliding * (pages_for(computed) - first)
    seen.engine.check_idle()


def test_cache_bytes_are_those_of_the_pool(network: sliding_tools.Network, checkpoint: Path) -> None:
    """Sub-groups share storage: the caches hold the pool's pages once, and the page table all sub-groups' rows."""
    engine = tools.open_engine(checkpoint).engine
    layers_per_page = len(network.layers) // network.sub_groups()
    page_bytes = layers_per_page * 2 * PAGE_SIZE * 2 * 32 * 4
    assert engine.runner.cache_bytes == (engine.pool.total + 1) * page_bytes
    assert len({keys.data_ptr() for keys, _ in engine.runner.caches}) == layers_per_page
    planned = {row.name: row.size_bytes for row in engine.memory}
    assert planned["KV pages"] == engine.pool.total * page_bytes
    if network.sub_groups() > 1:
        assert planned["page tables"] == engine.runner.page_tables.flat.nbytes


def test_fp8_caches_of_sub_groups_share_their_bytes() -> None:
    groups = group_layers([SlidingWindowSpec(2, 32, 96), FullAttentionSpec(4, 16), SlidingWindowSpec(2, 32, 96)])
    caches = allocate_caches(groups, 5, PAGE_SIZE, FP8, torch.device("cpu"), None)
    assert [keys.shape for keys, _ in caches] == [(5, 64, 2, 32), (5, 64, 4, 16), (5, 64, 2, 32)]
    assert len({tensor.data_ptr() for pair in caches for tensor in pair}) == 2
    assert sum(
        {tensor.data_ptr(): tensor.nbytes for pair in caches for tensor in pair}.values()
    ) == 5 * groups.page_bytes(PAGE_SIZE, 1)


def test_window_of_no_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"sliding_window": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"sliding_window must be a whole number from 1 to \d+; got 0"):
        tools.open_engine(tmp_path, load_format="dummy")


# --- mutations, each of which must fail parity ---


def error_beyond_the_window(reference: PreTrainedModel, checkpoint: Path) -> float:
    """A prompt in chunks without a prefix cache, so that released pages are written by the next chunk."""
    seen = tools.open_engine(checkpoint, max_num_batched_tokens=64, enable_prefix_caching=False)
    prompts = {"a": tools.random_prompt(150, 1), "b": tools.random_prompt(250, 2)}
    for name, prompt in prompts.items():
        seen.add(name, prompt, max_tokens=10)
    return worst_error(seen, reference, prompts)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    reference = sliding_tools.make_reference(sliding_tools.NETWORKS["mixed"])
    return reference, sliding_tools.save(reference, tmp_path_factory.mktemp("mixed"))


def test_unmutated_engine_is_below_the_threshold(mixed: tuple[PreTrainedModel, Path]) -> None:
    assert error_beyond_the_window(*mixed) < NOTICED / 10


def window_one_token_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda *sizes: whole(*sizes[:-1], sizes[-1] and sizes[-1] + 1))


def window_one_token_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda *sizes: whole(*sizes[:-1], sizes[-1] and sizes[-1] - 1))


def window_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_kernel.causal_mask
    monkeypatch.setattr(attention_kernel, "causal_mask", lambda *sizes: whole(*sizes[:-1], None))


def page_freed_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the position after the step that is being scheduled. Its next owner is in the same step."""
    whole = Scheduler.allocate_pages

    def early(self: Scheduler, request: Request, tokens: int) -> bool:
        computed, request.num_computed_tokens = request.num_computed_tokens, tokens
        try:
            return whole(self, request, tokens)
        finally:
            request.num_computed_tokens = computed

    monkeypatch.setattr(Scheduler, "allocate_pages", early)


def window_one_column_later(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PageGroup.first_column
    monkeypatch.setattr(PageGroup, "first_column", lambda self, tokens: whole(self, max(0, tokens + PAGE_SIZE)))


def local_layers_with_the_global_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Decoder.prepare

    def prepare(self: Decoder, max_model_len: int) -> None:
        whole(self, max_model_len)
        self.local_rotary = self.rotary

    monkeypatch.setattr(Decoder, "prepare", prepare)


def scores_scaled_by_the_head_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_layer.paged_attention
    monkeypatch.setattr(
        attention_layer,
        "paged_attention",
        lambda qkv, params, *rest: whole(qkv, params._replace(scale=params.key_cache.shape[-1] ** -0.5), *rest),
    )


def post_norm_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        residual_stream,
        "norm_add_rms_norm",
        lambda residual, output, post_norm, norm: add_rms_norm(residual, output, *norm),
    )


def norms_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_layer.ZeroCenteredRMSNorm, "loader", norm_layer.RMSNorm.loader)


def embedding_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_layer, "_round_to", lambda value, dtype: 1.0)


def silu_for_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    monkeypatch.setattr(feed_forward, "geglu", swiglu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        local_layers_with_the_global_rope,
        scores_scaled_by_the_head_size,
        post_norm_skipped,
        norms_without_one,
        embedding_not_scaled,
        silu_for_gelu,
        window_one_token_larger,
        window_one_token_smaller,
        window_ignored,
        page_freed_one_step_early,
        window_one_column_later,
    ],
)
def test_mutation_fails_parity(
    mixed: tuple[PreTrainedModel, Path],
    monkeypatch: pytest.MonkeyPatch,
    mutation: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutation(monkeypatch)
    assert error_beyond_the_window(*mixed) > NOTICED
