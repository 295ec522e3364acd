"""The warm-up covers every launch and leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.common.errors import ConfigError
from meltcore.engine.generation import engine as engine_file
from meltcore.engine.worker import sampler as sampler_file
from meltcore.engine.worker.sampler import Sampler, _Masks
from meltcore.engine.worker.transfer import to_device, to_device_together
from meltcore.engine.worker.warm_up import (
    EXPERT_TOKENS,
    PROMPT_TOKENS,
    PROMPTS_PER_STEP,
    CompileOrder,
    KernelCompiler,
    StepLimits,
    _max_tile_prompts,
    rehearse,
    warm_up,
)
from meltcore.kernels.attention.metadata import BLOCK_QUERIES
from meltcore.kernels.fp8 import fp8_split_k
from meltcore.kernels.fp8.fp8 import FP8, Fp8Tensor
from meltcore.kernels.fp8.fp8_linear import uses_tma
from meltcore.kernels.gated_delta.common import GatedDeltaShape
from meltcore.kernels.gated_delta.state_scan import ScanLaunch, scan_launch
from meltcore.kernels.gemm import tma
from meltcore.kernels.moe import grouped_gemm, grouped_gemm_tma, grouped_gemm_wgmma
from meltcore.kernels.moe.align import scan_size
from meltcore.kernels.moe.grouped_gemm import select_configs, select_mode
from meltcore.kernels.sampling.token_mask import wait_for_masks


@pytest.mark.parametrize("max_model_len", [20, 300])
def test_warm_up_does_not_change_answers(checkpoint: Path, max_model_len: int) -> None:
    logits = []
    for warm in (False, True):
        seen = tools.open_engine(checkpoint, max_model_len=max_model_len)
        if warm:
            rehearse(seen.engine.runner, StepLimits(0, max_model_len, 140))  # decode steps have no torch body
            assert not seen.engine.runner._last_token.any()
            warm_up(seen.engine.runner, StepLimits(4, max_model_len, 140))
            seen.logits.clear()
        seen.add("one", tools.random_prompt(12, 1), max_tokens=6, temperature=1.0, seed=7, frequency_penalty=1.0)
        seen.run()
        seen.engine.check_idle()
        logits.append(torch.stack(seen.logits["one"]))
    assert torch.equal(*logits)


def test_rehearsal_launches_penalties_and_counts_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tools.open_engine(checkpoint, max_model_len=300)
    sampler, launches = seen.engine.runner.sampler, []
    monkeypatch.setattr(sampler_file, "apply_penalties", lambda *arguments: launches.append(arguments))
    rehearse(seen.engine.runner, StepLimits(0, 300, 140))
    counts = sampler._penalties._output_counts
    assert launches
    assert not counts[0].any(), "a skipped kernel leaves values that are no token ids"
    warm_up(seen.engine.runner, StepLimits(4, 300, 140))
    assert counts[0].sum() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels refuse memory of the CPU where there is a GPU")
def test_warm_up_of_masks_waits_before_it_frees_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sampler, cpu, allocate = Sampler(tools.VOCAB, torch.device("cpu"), 0), torch.device("cpu"), _Masks.allocate

    def wait(rows: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
        outcomes = settings[3]
        weakref.finalize(outcomes, events.append, "freed")
        return wait_for_masks(rows, *settings)

    sampler.device = torch.device("cuda")
    monkeypatch.setattr(sampler_file, "to_device_together", lambda arrays, _: to_device_together(arrays, cpu))
    monkeypatch.setattr(_Masks, "allocate", lambda rows, words, _: allocate(rows, words, cpu))
    monkeypatch.setattr(sampler_file, "wait_for_masks", wait)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("waited"))
    sampler.warm_up_masks()
    assert events == ["waited", "freed"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "send",
    [
        lambda device: torch.cat(to_device_together([[5, 6], [7, 8]], device)),
        lambda device: to_device([[5, 6, 7, 8], [9, 10, 11, 12]], torch.int32, device),
    ],
    ids=["rows", "tiles"],
)
def test_masks_of_the_warm_up_change_no_later_copy(send: Callable[[torch.device], torch.Tensor]) -> None:
    """Copies of as many bytes as the outcomes of masks have, while the device is late."""
    device = torch.device("cuda")
    sampler = Sampler(tools.VOCAB, device, 0)
    sampler.warm_up_masks()  # compiles
    expected = send(torch.device("cpu"))
    torch.cuda._sleep(2 * 10**8)
    sampler.warm_up_masks()
    assert torch.equal(send(device).cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["make_sleep_memory", "load"])
def test_failed_start_ends_the_processes_that_compile(
    failing: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KernelCompiler] = []

    def make(*_: object) -> KernelCompiler:
        made.append(KernelCompiler(CompileOrder(), 1))
        return made[0]

    def fail(*_: object) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(engine_file, "make_compiler", make)
    monkeypatch.setattr(engine_file, failing, fail)
    with pytest.raises(ConfigError, match="no memory"):
        tools.open_engine(checkpoint)
    assert made[0].workers.is_closed


def test_engine_forks_before_it_makes_a_context_on_its_gpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def fail(device: torch.device) -> None:
        calls.append(device)
        raise ConfigError("no such GPU")

    monkeypatch.setattr(engine_file, "choose_device", lambda *_, **__: torch.device("cuda", 1))
    monkeypatch.setattr(engine_file, "make_compiler", lambda *_: calls.append("fork"))
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(ConfigError, match="no such GPU"):
        tools.open_engine(checkpoint)
    assert calls == ["fork", torch.device("cuda", 1)]


def test_warm_up_writes_only_the_padding_page(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, max_model_len=300)
    warm_up(seen.engine.runner, StepLimits(4, 300, 2048))
    for keys, values in seen.engine.runner.caches:
        assert keys[0].any()
        assert not keys[1:].any()
        assert not values[1:].any()


@pytest.mark.parametrize("limit", [2048, 8192, 16384])
@pytest.mark.parametrize("rows", [2048, 6144, 12288, 19456, 28672])
def test_warm_up_covers_every_tile_of_gate_and_up(rows: int, limit: int) -> None:
    """On a Hopper GPU; a step of the most tokens is part of every warm-up."""

    def launches(tokens: int) -> object:
        is_faster = tma.is_faster(tokens, rows)
        return tma.select_config(tokens, rows, gated=True, is_fp8=False) if is_faster else None

    warmed = [tokens for tokens in (*PROMPT_TOKENS, limit) if tokens <= limit]
    assert set(map(launches, range(1, limit + 1))) == set(map(launches, warmed))


@pytest.mark.slow
@pytest.mark.parametrize(("hidden_size", "width"), [(1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288)])
def test_warm_up_covers_every_tile_of_fp8(hidden_size: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense layers on a Hopper GPU; one token and up to 16 have kernels of their own."""
    monkeypatch.setattr(tma, "capability", lambda device: 90)

    @cache
    def launches(tokens: int) -> object:
        chosen = []
        for rows, k, gated in ((2 * width, hidden_size, True), (hidden_size, width, False), (6144, hidden_size, False)):
            hidden, weight = (
                Fp8Tensor(torch.empty(count, k, dtype=FP8, device="meta"), torch.empty(count, device="meta"))
                for count in (tokens, rows)
            )
            if uses_tma(hidden, weight, gated=gated):
                chosen.append(tma.select_config(tokens, rows, gated=gated, is_fp8=True))
            else:
                chosen.append(fp8_split_k.select_config(tokens, rows, k, 227 * 1024))
        return tuple(chosen)

    def kernels(counts: Iterable[int]) -> list[set[object]]:
        """Of each of the three layers: they need not change at one number of tokens."""
        return [set(each) for each in zip(*map(launches, counts), strict=True)]

    for limit in (2048, 8192, 16384):
        warmed = [tokens for tokens in (*PROMPT_TOKENS, limit) if 16 < tokens <= limit]
        assert kernels(range(17, limit + 1)) == kernels(warmed), limit


@pytest.mark.parametrize("width", [768, 512, 256, 128, 64])
def test_warm_up_covers_every_launch_of_routed_experts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table of an H200: Qwen3-30B-A3B's experts, and Qwen3.5-35B-A3B's on one to eight GPUs."""
    for module in (grouped_gemm, grouped_gemm_tma):
        monkeypatch.setattr(module, "capability", lambda device: 90)
    experts, top_k = (128, 8) if width == 768 else (257, 9)
    gate_up = torch.empty(experts, 2 * width, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(experts, 2048, width, dtype=torch.bfloat16, device="meta")

    def launches(tokens: int) -> object:
        topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
        if width % 128 == 0 and grouped_gemm_wgmma.is_faster(topk_ids.numel(), experts, width):
            return "wgmma"
        if grouped_gemm_tma.supports(gate_up[0], topk_ids, gate_up, down):
            return "tma"
        mode, pairs = select_mode(tokens, down), topk_ids.numel()
        return mode, select_configs(pairs, gate_up, down), scan_size(pairs) if mode == "grouped" else None

    assert set(map(launches, range(1, 8193))) == set(map(launches, PROMPT_TOKENS + EXPERT_TOKENS))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "tokens", "most"),
    [
        (1024, 4096, 8192, 1119),  # 1,023 of two tokens, and the rest in 96 tiles
        (16, 4096, 2048, 47),
        (16, 300, 8192, 80),  # each of five
        (4, 300, 140, 6),
        (1, 2, 2, 1),
    ],
)
def test_warm_up_has_the_most_query_tiles_of_any_step(
    max_num_seqs: int, max_model_len: int, tokens: int, most: int
) -> None:
    chunks = _max_tile_prompts(StepLimits(max_num_seqs, max_model_len, tokens))
    assert sum(-(-chunk.size // BLOCK_QUERIES) for chunk in chunks) == most
    assert len(chunks) <= max_num_seqs
    assert sum(chunk.size for chunk in chunks) <= tokens
    assert all(2 <= chunk.size <= max_model_len for chunk in chunks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_warm_up_covers_every_launch_of_a_recurrent_layer(ranks: int) -> None:
    """Launches of Qwen3.5-35B-A3B on an H200: kernels without warm-up would be compiled while serving."""
    shape = GatedDeltaShape(16 // ranks, 32 // ranks, 128, 128, 4)

    def launches(counts: Iterable[int]) -> set[ScanLaunch]:
        return {scan_launch(shape, count, 2, torch.device("cpu")) for count in counts}

    assert launches(range(1, 513)) == launches((1, *PROMPTS_PER_STEP))
