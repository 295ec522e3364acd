"""Recurrent states: prefill(n) leaves the state of prefill(k) and n - k decode steps, however a prompt is chunked."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

TOKENS = 140
RECURRENT = (0, 2)  # layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tools.make_reference(family="qwen3_5_moe_text").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def token_ids(checkpoint: Path) -> list[int]:
    """A prompt and the network's next tokens, so that it can also be decoded."""
    seen, prompt = tools.open_engine(checkpoint), tools.random_prompt(20, 0)
    seen.add("one", prompt, max_tokens=TOKENS - len(prompt))
    return prompt + seen.run()["one"]


def states_after(checkpoint: Path, token_ids: list[int], prefilled: int, budget: int = 2048) -> list[torch.Tensor]:
    """The one slot used, of both kinds and every recurrent layer, when all of `token_ids` have been read."""
    seen = tools.open_engine(checkpoint, max_num_seqs=1, max_num_batched_tokens=budget, enable_prefix_caching=False)
    seen.add("one", token_ids[:prefilled], max_tokens=len(token_ids) - prefilled + 1)
    answer = seen.run()["one"]
    assert answer[:-1] == token_ids[prefilled:]
    runner = seen.engine.runner
    kept = [tensor for layer in RECURRENT for tensor in runner.caches[layer]]
    (slot,) = kept[1].flatten(1).any(1).nonzero()[:, 0].tolist()
    assert slot > 0, "the null slot is never allocated"
    return [tensor[slot] for tensor in kept]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, token_ids: list[int]) -> list[torch.Tensor]:
    return states_after(checkpoint, token_ids, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefilled", "budget"), [(20, 2048), (64, 2048), (139, 2048), (140, 1), (140, 7), (140, 64), (140, 100), (90, 33)]
)
def test_recurrent_states_do_not_depend_on_chunking(
    checkpoint: Path, token_ids: list[int], whole: list[torch.Tensor], prefilled: int, budget: int
) -> None:
    for ours, expected in zip(states_after(checkpoint, token_ids, prefilled, budget), whole, strict=True):
        assert tools.relative_error(ours, expected) <= 1e-5


def test_failed_step_releases_its_snapshots(checkpoint: Path) -> None:
    """By an error in a caller's token mask, in the step that ends a prompt on a full page."""
    seen = tools.open_engine(checkpoint)

    def faulty(generated: object) -> None:
        raise ValueError("not this time")

    prompt = tools.random_prompt(64, 3)
    for number in range(2):
        message = AddRequest(f"{number}", prompt, SamplingParams(max_tokens=4))
        seen.engine.add(message, faulty)
        with pytest.raises(ValueError, match="not this time"):
            seen.run()
        seen.engine.abort([f"{number}"])
        seen.run()  # ends with a look for leaks
    seen.add("later", prompt, max_tokens=4)
    assert len(seen.run()["later"]) == 4
    assert seen.engine.stats().recurrent_state_snapshots == 1
