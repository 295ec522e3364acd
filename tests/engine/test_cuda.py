"""The same engine on CUDA: parity with transformers, one step ahead of the host, and no wait inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import sliding_tools
import torch
from transformers import PreTrainedModel
from triton import knobs

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.worker.model_runner import PrepareSampling

pytestmark = pytest.mark.gpu

EAGER: dict[str, Any] = {"enforce_eager": True}
NO_PREFILL_GRAPHS: dict[str, Any] = {"debug": ("no-prefill-graphs",)}

# One request for each path through the sampler.
EVERY_PATH: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 5},
    {"logprobs": 2},
    {"frequency_penalty": 1.0, "min_tokens": 3},
    {"logit_bias": {5: 100.0, 9: -100.0}},
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [None, 8])
@pytest.mark.parametrize("settings", [{}, NO_PREFILL_GRAPHS, EAGER, {"debug": ("reference-kernels",)}])
def test_parity_on_cuda(
    reference: PreTrainedModel, checkpoint: Path, overlap: bool, pages: int | None, settings: dict[str, Any]
) -> None:
    seen = tools.open_engine(
        checkpoint,
        device="cuda",
        overlap=overlap,
        pages=pages,
        max_model_len=300,
        max_num_batched_tokens=160,
        **settings,
    )
    prompts = {f"r{index}": tools.random_prompt(100, 50 + index) for index in range(4)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=150)
    tokens = seen.run()
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id]).cpu()
        theirs = tools.reference_logits(reference, prompt, tokens[request_id])
        assert tools.relative_error(ours, theirs) <= 1e-4
    if pages is not None:
        assert seen.engine.stats().preemptions_total > 0


def test_second_gpu_gives_the_same_tokens(checkpoint: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def answers(device: str) -> dict[str, list[int]]:
        seen = tools.open_engine(checkpoint, device=device, overlap=True, max_model_len=300, max_num_batched_tokens=160)
        for index in range(3):
            seen.add(f"r{index}", tools.random_prompt(100, 50 + index), max_tokens=40)
        return seen.run()

    try:
        assert answers("cuda:1") == answers("cuda:0")
    finally:
        torch.cuda.set_device(0)


@pytest.fixture(scope="module")
def recurrent_reference() -> PreTrainedModel:
    return tools.make_reference(family="qwen3_5_moe_text")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, NO_PREFILL_GRAPHS, EAGER])
def test_recurrent_states_on_cuda(
    recurrent_reference: PreTrainedModel, tmp_path: Path, overlap: bool, settings: dict[str, Any]
) -> None:
    """Three sequences at a time in graphs padded to four, on slots that snapshots are copied to and from."""
    recurrent_reference.save_pretrained(tmp_path)
    seen = tools.open_engine(
        tmp_path,
        device="cuda",
        overlap=overlap,
        max_num_seqs=4,
        recurrent_slots=6,
        max_model_len=300,
        max_num_batched_tokens=160,
        **settings,
    )
    beginnings = [tools.random_prompt(130, index) for index in range(2)]
    prompts = {f"r{index}": beginnings[index % 2] + tools.random_prompt(5 * index, 9) for index in range(9)}
    tokens: dict[str, list[int]] = {}
    for first in (0, 3, 6):
        for index in range(first, first + 3):
            seen.add(f"r{index}", prompts[f"r{index}"], max_tokens=40)
        tokens |= seen.run()
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id]).cpu()
        theirs = tools.reference_logits(recurrent_reference, prompt, tokens[request_id])
        assert tools.relative_error(ours, theirs) <= 1e-4
    assert seen.engine.stats().prefix_hit_tokens_total >= 3 * 128


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("short_of_pages", [False, True])
@pytest.mark.parametrize("settings", [{}, NO_PREFILL_GRAPHS, EAGER])
@pytest.mark.parametrize("network", sliding_tools.NETWORKS.values(), ids=sliding_tools.NETWORKS.keys())
def test_sliding_windows_on_cuda(
    network: sliding_tools.Network, tmp_path: Path, overlap: bool, short_of_pages: bool, settings: dict[str, Any]
) -> None:
    """Several sub-groups of pages in one page table; prompts in chunks past the window; cached beginnings."""
    reference = sliding_tools.make_reference(network)
    sliding_tools.save(reference, tmp_path)
    pages = 8 * network.sub_groups() if short_of_pages else None
    seen = tools.open_engine(
        tmp_path,
        device="cuda",
        overlap=overlap,
        pages=pages,
        max_model_len=400,
        max_num_batched_tokens=160,
        **settings,
    )
    prompts = {f"r{index}": tools.random_prompt(20 + 45 * index, 50 + index) for index in range(6)}
    prompts["again"] = [*prompts["r5"], 7, 8]
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=130)
    tokens = seen.run()
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id]).cpu()
        theirs = tools.reference_logits(reference, prompt, tokens[request_id])
        assert tools.relative_error(ours, theirs) <= 1e-4
    if short_of_pages and "f" in network.layers:
        assert seen.engine.stats().preemptions_total > 0


def test_graphs_give_the_bits_of_eager_steps_at_the_same_batch(checkpoint: Path) -> None:
    """Four sequences fill a captured size, so that eager steps compute on the very same shapes."""
    logits = []
    for settings in (NO_PREFILL_GRAPHS, EAGER):
        seen = tools.open_engine(checkpoint, device="cuda", dtype="bfloat16", overlap=True, **settings)
        for index in range(4):
            seen.add(f"r{index}", tools.random_prompt(50 + 30 * index, index), max_tokens=40)
        seen.run()
        logits.append({name: torch.stack(each) for name, each in seen.logits.items()})
    for name, with_graphs in logits[0].items():
        assert torch.equal(with_graphs, logits[1][name]), name


# Sub-groups of pages share the slots of an odd number of tokens. No other test has these sizes: the kernels are new.
SEVERAL_KINDS: dict[str, dict[str, object]] = {
    "recurrent": {
        "family": "qwen3_5_moe_text",
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "hidden_size": 80,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 80,
    },
    "sliding": {
        "family": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size": 80,
        "intermediate_size": 80,
    },
}


@pytest.mark.parametrize("kinds", SEVERAL_KINDS)
def test_graphs_of_layers_of_several_kinds_load_no_kernel_during_a_capture(kinds: str, tmp_path: Path) -> None:
    """Replays give the logits of all layers."""
    reference = tools.make_reference(**SEVERAL_KINDS[kinds])  # type: ignore[arg-type]
    reference.save_pretrained(tmp_path)
    loaded: list[tuple[str, bool]] = []

    def record(_module: object, _function: object, name: str, *_: object) -> None:
        loaded.append((name, torch.cuda.is_current_stream_capturing()))

    knobs.runtime.kernel_load_start_hook.add(record)
    try:
        seen = tools.open_engine(tmp_path, device="cuda", max_num_seqs=5, max_model_len=300, max_num_batched_tokens=160)
    finally:
        knobs.runtime.kernel_load_start_hook.remove(record)
    assert loaded, "the sizes are those of another test"
    assert [name for name, is_capturing in loaded if is_capturing] == []
    prompts = {f"r{index}": tools.random_prompt(20 + 30 * index, index) for index in range(5)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        seen.add(request_id, prompt, max_tokens=10 + 20 * index)
    tokens = seen.run()
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id]).cpu()
        theirs = tools.reference_logits(reference, prompt, tokens[request_id])
        assert tools.relative_error(ours, theirs) <= 1e-4


def test_launch_does_not_wait_for_the_device(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, device="cuda", overlap=True)
    launch = seen.engine.runner.launch

    def strict_launch(plan: list[Chunk], prepare: PrepareSampling | None) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan, prepare)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for index, sampling in enumerate(EVERY_PATH):
        seen.add(f"warm {index}", tools.random_prompt(70, index), **sampling)
    seen.run()
    seen.engine.runner.launch = strict_launch  # type: ignore[assignment,method-assign]
    for index, sampling in enumerate(EVERY_PATH):
        seen.add(f"strict {index}", tools.random_prompt(70, 10 + index), **sampling)
    assert len(seen.run()) == len(EVERY_PATH)


@pytest.mark.parametrize("captured_decodes", [0, 64])
def test_mixed_buckets_are_captured_at_start_or_first_use(
    captured_decodes: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wave has the buckets of the first, and the logits of launching kernel by kernel."""
    monkeypatch.setattr("meltcore.engine.worker.prefill_graphs.CAPTURED_DECODES", captured_decodes)
    answers = []
    for debug in ((), ("no-prefill-graphs",)):
        seen = tools.open_engine(checkpoint, device="cuda", overlap=True, debug=debug, max_num_batched_tokens=200)
        for wave in range(2):
            for index in range(6):
                seen.add(f"{wave}.{index}", tools.random_prompt(40 + 20 * index, index), max_tokens=3 + 5 * index)
            seen.run()
        graphs = seen.engine.runner._prefill_graphs
        assert (graphs is not None and any(size.num_decodes for size in graphs._captured)) == (debug == ())
        answers.append({name: torch.stack(each) for name, each in seen.logits.items()})
    for name, padded in answers[0].items():
        assert tools.relative_error(padded, answers[1][name]) <= 1e-4, name
