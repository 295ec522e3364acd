"""Ranks against one: the same logits and tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import engine_tools as tools
import pytest
import torch
from waiting import WAIT_S

from meltcore.common.errors import ConfigError, RankError
from meltcore.engine.core.request import Request
from meltcore.engine.distributed.group_runner import GroupRunner
from meltcore.engine.distributed.ranks import LaunchWatch, Ranks
from meltcore.engine.generation import engine as engine_module
from meltcore.engine.worker.cuda_graphs import DecodeGraphs
from meltcore.engine.worker.sampler import SampleResult
from meltcore.engine.worker.warm_up import StepLimits, rehearse
from meltcore.layers import tensor_parallel
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import Grammar, SamplingParams

LOGITS_TOLERANCE = 1e-5  # relative to the largest; sums of float32 in another order
GPU_LOGITS_TOLERANCE = 1e-4  # kernels add up in the order that suits a size, and a share has another

# What each adds: a bias and a key head that both ranks hold; head norms; experts; recurrent layers, a shared expert.
# A layer of qwen3_moe is dense, as all of qwen3 are, which GPUs run too.
NETWORKS: dict[str, dict[str, object]] = {
    "qwen2": {"family": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    # Norms over the heads of all ranks, which share one key head.
    "olmo2": {"family": "olmo2", "num_key_value_heads": 1},
    "qwen3_5": {"family": "qwen3_5_moe_text"},
    # Heads as the published ones have them: eight ranks hold two queries' each, and four the same key head.
    "qwen3_5 for eight": {
        "family": "qwen3_5_moe_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    # Steps of more than 128 tokens have messages of more than 1 MiB.
    "wide qwen3": {"family": "qwen3", "hidden_size": 2048},
    "wide qwen3_5": {"family": "qwen3_5_moe_text", "hidden_size": 2048},
}
# Every way that ranks sample together: rank 0 alone, by candidates, and from whole rows.
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "drawn without a seed": {"temperature": 0.7},
    "logprobs": {"logprobs": 3},
    "top-k": {"temperature": 0.9, "top_k": 6, "seed": 8},
    "top-p": {"temperature": 1.2, "top_p": 0.7, "min_p": 0.02, "seed": 9},
    "drawn with a bias": {"temperature": 1.0, "seed": 6, "logit_bias": {5: 3.0, 9: -100.0}},
    "penalties": {"frequency_penalty": 0.8, "repetition_penalty": 1.3},
    "no early end": {"temperature": 1.0, "seed": 2, "min_tokens": 9, "ignore_eos": False},
    "no early end, greedy": {"min_tokens": 9, "ignore_eos": False},
    "no end to forbid": {"temperature": 1.0, "seed": 3, "min_tokens": 12},
    "no end to forbid, greedy": {"min_tokens": 12},
}
BY_CANDIDATES = {"greedy", "drawn", "drawn without a seed", "no end to forbid", "no end to forbid, greedy"}
BY_CANDIDATES_AFTER = {"no early end": 9, "no early end, greedy": 9}  # tokens


class Answers(NamedTuple):
    tokens: dict[str, list[int]]
    logits: dict[str, list[torch.Tensor]]  # of the rows that are gathered


@contextmanager
def opened(folder: Path, ranks: int, **settings: object) -> Iterator[tools.SeenEngine]:
    seen = tools.open_engine(folder, tensor_parallel_size=ranks, **({"rank_timeout_s": 30.0} | settings))
    if ranks > 1:
        del seen.engine.runner.sample  # the recording one: with ranks there are no whole rows to record
    try:
        yield seen
    finally:
        seen.engine.close()


def answers(seen: tools.SeenEngine) -> Answers:
    """Prompts of several lengths, one cut into chunks, each with every kind of sampling."""
    logits: dict[str, list[torch.Tensor]] = {}
    sampler = seen.engine.runner.sampler
    whole = sampler.sample

    def recording(rows: torch.Tensor, requests: list[Request], *rest: Any) -> SampleResult:
        for row, request in zip(rows, requests, strict=True):
            logits.setdefault(request.id, []).append(row.clone())
        return whole(rows, requests, *rest)

    sampler.sample = recording  # type: ignore[method-assign]
    for number, (name, sampling) in enumerate(SAMPLING.items()):
        for length in (3, 90):
            seen.add(f"{name}; {length}", tools.random_prompt(length, number), max_tokens=12, **sampling)
    return Answers(seen.run(), logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "ranks", "overlap"),
    [
        ("qwen2", 2, False),
        ("qwen3_moe", 2, True),
        # Eight are for GPUs, below: each process imports torch.
        ("qwen3_5 for eight", 4, True),
    ],
)
def test_ranks_give_the_logits_and_tokens_of_one_device(
    network: str, ranks: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And graphs are dropped before the group is destroyed: NCCL waits for the graphs that use it, for ever."""
    graphs_left = []
    destroy = TensorParallelGroup.destroy

    def leaving(group: TensorParallelGroup) -> None:
        graphs_left.append(together.engine.runner._decode_graphs)
        destroy(group)

    tools.make_reference(**NETWORKS[network]).save_pretrained(tmp_path)  # type: ignore[arg-type]
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 12, "overlap": overlap}
    with opened(tmp_path, 1, **settings) as alone:
        expected = answers(alone)
    with opened(tmp_path, ranks, **settings) as together:
        assert isinstance(together.engine.runner, GroupRunner)
        found = answers(together)
        assert together.engine.ready().device == f"{ranks} x CPU"
        monkeypatch.setattr(TensorParallelGroup, "destroy", leaving)
        together.engine.runner._decode_graphs = DecodeGraphs.__new__(DecodeGraphs)
    assert graphs_left == [None]
    assert found.tokens == expected.tokens
    assert len({tuple(tokens) for tokens in found.tokens.values()}) > len(SAMPLING)
    # Only rows that need more than the candidate of each rank are gathered.
    assert {name.partition(";")[0] for name in found.logits} == set(SAMPLING) - BY_CANDIDATES
    compared = 0
    for request_id, rows in found.logits.items():
        count = BY_CANDIDATES_AFTER.get(request_id.partition(";")[0], len(found.tokens[request_id]))
        for ours, theirs in zip(rows, expected.logits[request_id][:count], strict=True):
            assert tools.relative_error(ours, theirs) <= LOGITS_TOLERANCE, request_id
            compared += 1
    assert compared >= 12 * 2 * 4 + 9 * 2 * 2


ALLOWED = [7, 200, 319]


def check_warm_up(seen: tools.SeenEngine) -> list[int]:
    """The tokens that a mask allows, after a warm-up.

    A warm-up does not involve the other rank, which receives nothing: its next step is the first.
    """
    if isinstance(seen.engine.runner, GroupRunner):
        rehearse(seen.engine.runner, StepLimits(0, 300, 140))  # decode steps have no torch body
    allowed = torch.zeros(tools.VOCAB, dtype=torch.bool)
    allowed[ALLOWED] = True
    message = AddRequest("masked", tools.random_prompt(30, 0), SamplingParams(max_tokens=8, ignore_eos=True))
    seen.engine.add(message, lambda generated: allowed)
    return seen.run()["masked"]


def check_faulty_mask(seen: tools.SeenEngine, fault: object) -> list[int]:
    """The tokens of a request after a token mask that has failed. The other rank waits for the sampled tokens.

    A mask of the wrong size raises torch's RuntimeError, as a failed collective does.
    """

    def mask(generated: Sequence[int]) -> torch.Tensor | None:
        if len(generated) < 2:
            return None
        if isinstance(fault, Exception):
            raise fault
        assert isinstance(fault, torch.Tensor)
        return fault

    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    seen.engine.add(AddRequest("masked", tools.random_prompt(30, 0), sampling), mask)
    seen.add("beside it", tools.random_prompt(20, 1), max_tokens=8)
    with pytest.raises((ValueError, RuntimeError), match=r"its own|must match") as raised:
        seen.run()
    assert not isinstance(raised.value, RankError)
    seen.engine.abort(["masked", "beside it"])
    seen.run()
    seen.add("next", tools.random_prompt(30, 2), max_tokens=6, temperature=1.0, top_k=5, seed=1)
    return seen.run()["next"]


@pytest.mark.slow
def test_ranks_apply_a_token_mask_and_continue_after_a_faulty_one_until_one_dies(checkpoint: Path) -> None:
    """The engine checks the ranks while it is idle."""
    tokens = []
    for ranks in (1, 2):
        with opened(checkpoint, ranks) as seen:
            tokens.append((check_warm_up(seen), check_faulty_mask(seen, ValueError("its own"))))
            seen.engine.check()
            if seen.engine._ranks is not None:
                process = seen.engine._ranks._processes[1]
                process.kill()
                process.wait(WAIT_S)
                with pytest.raises(
                    RankError, match=rf"rank 1 \(process {process.pid}\): has ended: killed by signal 9"
                ):
                    seen.engine.check()
    assert tokens[0] == tokens[1]
    assert set(tokens[0][0]) <= set(ALLOWED)


@pytest.mark.slow
def test_ranks_follow_grammars_beside_free_answers(checkpoint: Path, tmp_path: Path) -> None:
    folder, tokens = tools.with_tokenizer(checkpoint, tmp_path / "constrained"), []
    for ranks in (1, 2):
        with opened(folder, ranks, overlap=True) as seen:
            seen.add("free", tools.random_prompt(30, 1), max_tokens=12)
            seen.add("warm", tools.random_prompt(30, 2), max_tokens=12, temperature=1.0, seed=1)
            for seed, temperature in ((1, 0.0), (2, 1.0)):
                grammar = Grammar("start: /[0-9]{4}x[a-f]{5}/")
                prompt = tools.random_prompt(30, 2 + seed)
                seen.add(f"{seed}", prompt, max_tokens=20, temperature=temperature, seed=seed, grammar=grammar)
            tokens.append(seen.run())
    assert tokens[0] == tokens[1]
    assert all(re.fullmatch(rb"\d{4}x[a-f]{5}", bytes(tokens[0][name])) for name in ("1", "2"))


@pytest.mark.slow
def test_overlapping_ranks_continue_after_a_faulty_token_mask_and_a_blocked_launch_names_a_dead_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a launch blocks when the device's queue is full."""
    tokens = []
    for ranks in (1, 2):
        with opened(checkpoint, ranks, overlap=True) as seen:
            tokens.append(check_faulty_mask(seen, torch.ones(3, dtype=torch.bool)))
            if seen.engine._ranks is not None:
                check_blocked_launch(seen, seen.engine._ranks, monkeypatch)
    assert tokens[0] == tokens[1]


def check_blocked_launch(seen: tools.SeenEngine, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted, process = threading.Event(), ranks._processes[1]

    def launch(step: object) -> tuple[torch.Tensor, None]:
        process.kill()
        assert aborted.wait(WAIT_S)
        return torch.zeros(1, dtype=torch.int64), None

    monkeypatch.setattr(ranks, "_watch", LaunchWatch(ranks._processes, aborted.set))
    monkeypatch.setattr(seen.engine.runner, "_compute", launch)
    seen.add("one", tools.random_prompt(20, 3), max_tokens=6)
    with pytest.raises(RankError, match=rf"rank 1 \(process {process.pid}\): has ended: killed by signal 9"):
        seen.run()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("network", "ranks", "changes"),
    [
        ("qwen3", 2, {}),
        ("qwen3", 2, {"debug": ("no-peer-memory",)}),
        ("qwen3", 2, {"enforce_eager": True}),
        ("qwen3", 4, {}),
        ("qwen3_5", 2, {}),
        ("qwen3_5", 2, {"enforce_eager": True}),
        ("qwen3_5 for eight", 4, {}),
        ("qwen3_5 for eight", 8, {}),
        ("wide qwen3", 2, {}),
        ("wide qwen3", 2, {"enforce_eager": True}),
        ("wide qwen3", 4, {}),
        ("wide qwen3_5", 2, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_gpus_give_the_logits_and_tokens_of_one_gpu(
    network: str, ranks: int, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide networks reduce steps of long prompts in stages, on rank 0 as on all."""
    staged: set[str] = set()

    def record(name: str, reduce: Callable[..., object], *inputs: object) -> object:
        staged.add(name)
        return reduce(*inputs)

    for name in ("staged_all_reduce_rms_norm", "staged_combine_all_reduce_rms_norm"):
        monkeypatch.setattr(tensor_parallel, name, partial(record, name, getattr(tensor_parallel, name)))
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs are needed")
    tools.make_reference(**NETWORKS[network]).save_pretrained(tmp_path)  # type: ignore[arg-type]
    settings = {"device": "cuda", "memory_bytes": 2**30, "max_num_batched_tokens": 160, "max_num_seqs": 20}
    with opened(tmp_path, 1, **settings) as alone:
        expected = answers(alone)
    with opened(tmp_path, ranks, **changes, **settings) as together:
        staged.clear()  # by the start, which checks them
        found = answers(together)
        assert bool(staged) == network.startswith("wide")
    assert found.tokens == expected.tokens
    for request_id, rows in found.logits.items():
        count = BY_CANDIDATES_AFTER.get(request_id.partition(";")[0], len(found.tokens[request_id]))
        for ours, theirs in zip(rows, expected.logits[request_id][:count], strict=True):
            assert tools.relative_error(ours, theirs) <= GPU_LOGITS_TOLERANCE, request_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "--tensor-parallel-size 2 does not divide this model's 3 attention heads",
        ),
        (
            {"intermediate_size": 97},
            "--tensor-parallel-size 2 does not divide this model's 97 columns of the feed-forward",
        ),
        ({"vocab_size": 321}, "--tensor-parallel-size 2 does not divide this model's 321 tokens of the vocabulary"),
    ],
)
def test_model_that_cannot_be_sharded_is_refused_before_ranks_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    tools.make_reference(**changes).save_pretrained(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        tools.open_engine(tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 1025},
            "^--max-model-len must be from 2 to the model's 1024; got 1025\\. For a longer context state",
        ),
        ({"memory_bytes": 2**16}, "^64 KiB must hold the weights .* Raise --memory.$"),
        ({"quantization": "fp8"}, "^--quantization fp8 needs sizes that are multiples of 16"),
    ],
)
def test_settings_that_fit_no_rank_are_refused_before_ranks_load(
    tmp_path: Path, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.make_reference(intermediate_size=100).save_pretrained(tmp_path)
    monkeypatch.setattr(engine_module, "Ranks", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError, match=message):
        tools.open_engine(tmp_path, tensor_parallel_size=2, **settings)


def test_more_ranks_than_gpus_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 4 needs 4 GPUs from cuda:0 on; torch sees 3"):
        tools.open_engine(checkpoint, tensor_parallel_size=4, device="auto")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs 2 GPUs from cuda:2 on; torch sees 3"):
        tools.open_engine(checkpoint, tensor_parallel_size=2, device="cuda:2")
