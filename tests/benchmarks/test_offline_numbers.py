"""What stands beside our offline rates: the floor of bytes and operations, the weighted throughput, the peer's file."""

from __future__ import annotations

import json
import os
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace

import msgspec
import peer_llamacpp
import pytest
import torch
from floors import Limits, Needs, floor_s, step_needs, write_bound
from gguf.constants import GGMLQuantizationType
from offline import Peer, Peers
from offline_reach import TARGETS, weighted_throughputs
from offline_work import Measured, Work, measure, parse_works
from places import ROOT
from random_gguf import layout, new_writer, text_config, write_header

from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.loader import build_model
from meltcore.settings.fleet_file import load_fleet

LIMITS = Limits(bytes_per_us=4.3e6, flops_per_us=700e6)  # an H200


def needs_of(name: str, ranks: int = 1) -> Needs:
    checkpoint = open_checkpoint(name, files="config")
    group = TensorParallelGroup(0, ranks) if ranks > 1 else None
    return Needs.of(build_model(checkpoint, torch.bfloat16, torch.device("meta"), group=group))


@pytest.fixture(scope="module")
def hybrid() -> Needs:
    return needs_of("Qwen/Qwen3.5-35B-A3B")


def test_step_reads_the_experts_that_uniform_routing_uses(hybrid: Needs) -> None:
    """2.946 billion weights for one token; all but an eighth of the experts for 64."""
    found = [hybrid.weight_bytes(tokens) / 1e9 for tokens in (1, 8, 64)]
    assert found == pytest.approx([5.89, 18.33, 59.86], abs=0.01)
    assert hybrid.step_bytes + 256 * hybrid.expert_bytes == pytest.approx(69.32e9 - 2 * 248_320 * 2048, rel=1e-3)


@pytest.mark.slow
def test_bound_of_a_fleet_is_written_beside_what_was_measured() -> None:
    """27 billion weights of Gemma 3 in 4.5 bits and its head; of Qwen3-30B-A3B 8 to 128 experts in 8.5 bits."""
    fleet = load_fleet(ROOT / "src/meltcore/fleet/examples/fleet.yaml")
    names = ("gemma-3-27b", "indictrans2-en-indic", "indicconformer", "indicf5")
    needs = {name: step_needs(fleet.engines[name]) for name in names}
    found = {name: each.step_bytes(64) / 1e9 for name, each in needs.items()}
    assert found["gemma-3-27b"] == pytest.approx(17.22, abs=0.01)
    assert found["indictrans2-en-indic"] == pytest.approx(0.91, abs=0.01), "18 layers of a decoder"
    assert found["indicconformer"] == pytest.approx(1.22, abs=0.01), "600 million weights in 16 bits"
    assert found["indicf5"] == pytest.approx(0.37, abs=0.01), "22 layers without modulations"
    gemma = needs.pop("gemma-3-27b")
    assert gemma.unit_flops == pytest.approx(51.2e9, abs=1e7)
    assert gemma.row_bytes(3000, 1) == 1024 * 507_904 + 1976 * 81_920, "sliding windows"
    assert {each.unit_flops for each in needs.values()} == {None}, "units are characters and seconds"
    gpu = GpuStepCosts(models={"qwen3-30b-a3b": StepCosts(decode_s=[(1.0, 0.005)])})
    models = {name: fleet.engines[name] for name in ("qwen3-30b-a3b", "indicf5")}
    on_cpu = msgspec.structs.replace(models["indicf5"], device="cpu")
    write_bound(gpu, models | {"on-cpu": on_cpu}, Limits(bytes_per_us=4e6, flops_per_us=7e8))
    assert (gpu.bytes_per_s, gpu.flops_per_s) == (4e12, 7e14)
    assert set(gpu.models) == set(models)
    assert gpu.models["qwen3-30b-a3b"].decode_s == [(1.0, 0.005)]
    read = [gpu.models["qwen3-30b-a3b"].step_bytes(rows) / 1e9 for rows in (1, 64, 4096)]
    assert read == pytest.approx([3.24, 31.63, 32.12], abs=0.01), "64 rows read nearly all experts"
    assert gpu.models["qwen3-30b-a3b"].unit_flops == pytest.approx(5.46e9, abs=1e7)
    assert gpu.models["indicf5"].decode_s == [], "not measured yet"


def test_sequence_has_keys_values_and_states(hybrid: Needs) -> None:
    heads_and_rings = 30 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert (hybrid.kv_bytes, hybrid.state_bytes) == (20_480, 2 * heads_and_rings)


def test_rank_has_its_share(hybrid: Needs) -> None:
    rank = needs_of("Qwen/Qwen3.5-35B-A3B", 8)
    assert rank.expert_bytes == hybrid.expert_bytes / 8
    assert rank.state_bytes == hybrid.state_bytes / 8
    assert rank.kv_bytes == hybrid.kv_bytes / 2  # of two key heads each is on four ranks


def test_tied_table_is_read_as_the_head() -> None:
    dense = needs_of("Qwen/Qwen3-0.6B")
    assert dense.weight_bytes(1) == dense.weight_bytes(500) == 2 * 596_049_920
    assert dense.token_weights == 596_049_920 - 151_936 * 1024


def test_window_bounds_the_keys_that_are_read() -> None:
    """Gemma-3-27B has 508 KB per token up to 1,024 tokens, and 82 KB per token beyond."""
    gemma = needs_of("google/gemma-3-27b-it")
    assert gemma.context_bytes(1000) == 1000 * 507_904
    assert gemma.context_bytes(3000) == 1024 * 507_904 + 1976 * 81_920


@pytest.mark.parametrize(("model", "file_type"), [("google/gemma-3-27b-it", "q4_0"), ("Qwen/Qwen3-30B-A3B", "q8_0")])
def test_quantized_weights_count_as_the_bytes_that_they_take(tmp_path: Path, model: str, file_type: str) -> None:
    """Of a GGUF file; with their number in the operations. A token uses 8 of 128 experts."""
    config = text_config(model) | {
        "num_hidden_layers": 2,
        "vocab_size": 4096,
        "bos_token_id": 4000,
        "eos_token_id": 4001,
    }
    sizes, tensors = layout(config, file_type, None)
    path = tmp_path / "model.gguf"
    write_header(new_writer(path, config, sizes, file_type), tensors)
    os.truncate(path, 10**11)  # a hole in place of the data
    needs = needs_of(str(path))
    used = {
        tensor: 8 / 128 if "_exps" in tensor.name else 1.0
        for tensor in tensors
        if tensor.type != GGMLQuantizationType.F32 and (sizes.tie_word_embeddings or "token_embd" not in tensor.name)
    }
    read = sum(tensor.num_bytes * share for tensor, share in used.items())
    assert needs.weight_bytes(1) == pytest.approx(read, rel=0.02)  # routers and norms beside them
    weights = sum(prod(tensor.shape) * share for tensor, share in used.items())
    assert needs.token_weights + needs.head_weights == pytest.approx(weights, rel=0.02)


def test_bytes_bound_a_single_prompt_of_a_routed_model_and_operations_bound_many(hybrid: Needs) -> None:
    assert hybrid.prompts_us(1, 1024, LIMITS) == pytest.approx(hybrid.weight_bytes(1024) / 4.3e6)
    many_us = 2 * 64 * (1024 * hybrid.token_weights + hybrid.head_weights) / 700e6
    assert hybrid.prompts_us(64, 1024, LIMITS) == many_us


def test_work_is_its_rounds_of_prompts_and_steps(hybrid: Needs) -> None:
    whole, rest = (floor_s(hybrid, Work(count, 100, 300, 5), 30, LIMITS) for count in (30, 10))
    assert floor_s(hybrid, Work(100, 100, 300, 5), 30, LIMITS) == pytest.approx(3 * whole + rest)
    steps_us = sum(hybrid.decode_us(30, 200 + done, LIMITS) for done in (1, 2, 3, 4))
    assert whole == pytest.approx((hybrid.prompts_us(30, 200, LIMITS) + steps_us) / 1e6)


@pytest.mark.parametrize("vocab", [300, 5000])
def test_prompts_are_below_the_vocabulary_and_their_share_is_measured(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator whose every token takes 2 ms of the clock, with a prompt of 10 ms per request."""
    seen: set[int] = set()
    spent_s = [0.0]
    monkeypatch.setattr("offline_work.time", SimpleNamespace(perf_counter=lambda: spent_s[0]))

    def generate(prompts: list[list[int]], out: int) -> int:
        seen.update(token for prompt in prompts for token in prompt)
        spent_s[0] += len(prompts) * (0.01 + 0.002 * (out - 1))
        return len(prompts) * out

    [measured] = measure([Work(3, 40, 60, 6)], generate, 2, 1, vocab, prompt_share=True)
    assert max(seen) < vocab
    assert measured.prompt_share == pytest.approx(0.5)
    [unmeasured] = measure([Work(1, 4, 6, 2)], generate, 1, 1, vocab)
    assert unmeasured.prompt_share is None


def test_weighted_throughput_of_the_peer_is_the_one_that_was_measured() -> None:
    """vLLM 0.25.0 on eight H200s, 2026-11-20: 364,000."""
    rates = dict(zip((1, 2, 4, 8, 16, 32, 64), (248, 497, 925, 1_674, 2_547, 3_914, 5_705), strict=True))
    works = parse_works("1,2,4,8,16,32,64@1024:1024/277")
    [(name, found)] = weighted_throughputs(works, lambda work: rates[work.requests]).items()
    assert found == pytest.approx(364_000, rel=2e-3)
    assert name in {work for work, _ in TARGETS["Qwen/Qwen3.5-35B-A3B", 8]}


@pytest.mark.parametrize("works", ["1,2,4,8,16,32@1024:1024/277", "1,2,4,8,16,32,64@128:1024/277"])
def test_without_a_level_or_a_length_there_is_no_weighted_throughput(works: str) -> None:
    asked = parse_works(works)
    assert weighted_throughputs(asked, lambda work: 1.0 if work in asked else None) == {}


@pytest.mark.parametrize(("routing", "uniform"), [(None, True), ("uniform_random", False)])
def test_peer_that_routed_otherwise_is_no_comparison(tmp_path: Path, routing: str | None, uniform: bool) -> None:
    path = tmp_path / "peer.json"
    run = {"subject": "m", "versions": {"vllm": "0"}, "rows": [], "routing": routing}
    path.write_text(json.dumps({"runs": [run]}))
    with pytest.raises(SystemExit, match="no run of other"):
        Peer(path, "other", uniform=uniform)
    with pytest.raises(SystemExit, match="routing"):
        Peer(path, "m", uniform=uniform)
    assert Peer(path, "m", uniform=not uniform).name == "vLLM 0"


def test_row_stands_beside_the_fastest_peer_that_has_it(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("vllm", "sglang")]
    one, two = parse_works("1,2@8:8/4")
    for path, start_s, rates in zip(
        paths, (9.0, 6.0), ({one: [30.0, 50.0, 40.0]}, {one: [35.0], two: [7.0]}), strict=True
    ):
        rows = [{"work": str(work), "rates": found} for work, found in rates.items()]
        run = {"subject": "m", "versions": {path.name: "1"}, "process_start_to_first_token_s": start_s, "rows": rows}
        path.write_text(json.dumps({"runs": [run]}))
    peers = Peers([Peer(path, "m", uniform=False) for path in paths])
    rate, time_ms = peers.rows(Measured(one, [80.0]))
    assert (rate.peer, rate.peer_value, rate.ratio) == ("vLLM 1", 40.0, 2.0)
    assert (time_ms.peer, time_ms.peer_value, time_ms.ratio) == ("vLLM 1", 25.0, 2.0)
    [rate] = peers.rows(Measured(two, [14.0]))
    assert (rate.peer, rate.ratio) == ("SGLang 1", 2.0)
    assert (peers.start(3.0).peer, peers.start(3.0).ratio) == ("SGLang 1", 2.0)
    [alone] = Peers([]).rows(Measured(two, [14.0]))
    assert (alone.peer, alone.ratio) == (None, None)


BATCHED_BENCH = """#!/bin/sh
case $1 in --version) echo "version: 7 (abc)" >&2; exit;; esac
echo loading
for level in 1 4; do
  echo "{\\"pp\\": 64, \\"tg\\": 16, \\"pl\\": $level, \\"t_pp\\": 1.5, \\"t_tg\\": 0.5}"
done
echo "$@" > "$0.asked"
"""


def test_rates_of_llamacpp_count_the_prompts_and_stand_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, out = tmp_path / "bench", tmp_path / "out" / "peer.json"
    bench.write_text(BATCHED_BENCH)
    bench.chmod(0o755)
    words = ["peer", "--model", "m.gguf", "--bench", str(bench), "--out", str(out), "--works"]
    monkeypatch.setattr(sys, "argv", [*words, "1,4@64:64/16"])
    peer_llamacpp.main()
    peer = Peer(out, "m.gguf", uniform=False)
    assert peer.name == "llama.cpp 7 (abc)"
    assert [peer.rate(work) for work in parse_works("1,4@64:64/16")] == [8.0, 32.0]
    asked = (tmp_path / "bench.asked").read_text()
    assert "-c 320 " in asked
    assert "-npl 1,4 " in asked
    monkeypatch.setattr(sys, "argv", [*words, "1,8@64:64/16"])
    with pytest.raises(SystemExit, match="without 8 requests"):
        peer_llamacpp.main()
    monkeypatch.setattr(sys, "argv", [*words, "1@32:64/16"])
    with pytest.raises(SystemExit, match="one length"):
        peer_llamacpp.main()
