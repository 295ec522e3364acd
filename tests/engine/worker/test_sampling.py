"""Sampling settings through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import AddRequest, SequenceOutput
from meltcore.protocol.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
)

PROMPT = tools.random_prompt(30, 0)


def run(seen: tools.SeenEngine) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for output in seen.outputs():
        outputs.setdefault(output.request_id, []).append(output)
    seen.engine.check_idle()
    return outputs


def ids(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(params=[False, True], ids=["in step", "one ahead"])
def seen(request: pytest.FixtureRequest, checkpoint: Path) -> tools.SeenEngine:
    return tools.open_engine(checkpoint, overlap=request.param)


def test_seeded_request_draws_the_same_tokens_alone_and_batched(seen: tools.SeenEngine) -> None:
    seen.add("alone", PROMPT, temperature=1.0, seed=5, max_tokens=12)
    alone = ids(run(seen)["alone"])
    seen.add("again", PROMPT, temperature=1.0, seed=5, max_tokens=12)
    seen.add("other", PROMPT, temperature=1.0, seed=6, max_tokens=12)
    seen.add("unseeded", PROMPT, temperature=1.0, max_tokens=12)
    seen.add("unseeded too", PROMPT, temperature=1.0, max_tokens=12)
    outputs = run(seen)
    assert ids(outputs["again"]) == alone
    assert len({tuple(ids(each)) for each in outputs.values()}) == 4


def test_top_k_of_one_is_greedy_at_any_temperature(seen: tools.SeenEngine) -> None:
    seen.add("greedy", PROMPT)
    seen.add("hot", PROMPT, temperature=2.0, top_k=1)
    outputs = run(seen)
    assert ids(outputs["greedy"]) == ids(outputs["hot"])


def test_smallest_temperature_and_penalty_are_greedy(seen: tools.SeenEngine) -> None:
    """Logits divided by the smallest values still differ: after an overflow all tokens would be equally probable."""
    seen.add("greedy", PROMPT, repetition_penalty=MIN_REPETITION_PENALTY)
    seen.add("cold", PROMPT, repetition_penalty=MIN_REPETITION_PENALTY, temperature=MIN_TEMPERATURE, seed=3)
    seen.add("kept", PROMPT, repetition_penalty=MIN_REPETITION_PENALTY, temperature=MIN_TEMPERATURE, top_k=MAX_TOP_K)
    outputs = run(seen)
    assert ids(outputs["greedy"]) == ids(outputs["cold"]) == ids(outputs["kept"])


def test_engine_accepts_a_seed_of_any_size(checkpoint: Path) -> None:
    drawn = []
    for seed in (0, 2**23, 2**62, 2**64 - 1):
        seen = tools.open_engine(checkpoint, seed=seed)
        seen.add("unseeded", PROMPT, temperature=2.0, max_tokens=12)
        drawn.append(tuple(ids(run(seen)["unseeded"])))
    assert len(set(drawn)) == 4


def test_logprobs_are_the_raw_distribution(seen: tools.SeenEngine) -> None:
    seen.add("one", PROMPT, logprobs=3, presence_penalty=2.0, temperature=1.5, seed=1)
    outputs = run(seen)["one"]
    first = outputs[0].logprobs
    assert first is not None
    expected = seen.logits["one"][0].log_softmax(-1)
    assert first[0].logprob == pytest.approx(float(expected[outputs[0].token_ids[0]]), abs=1e-4)
    assert first[0].top_token_ids == expected.topk(3).indices.tolist()
    assert len(outputs) == 8


def test_frequency_penalty_forbids_repeats(seen: tools.SeenEngine) -> None:
    """Counts are kept on the device, one step ahead of the host: a token sampled in the last step counts already."""
    vocab = tools.VOCAB
    # All logits equal: greedy repeats token 0 unless it is penalized.
    seen.engine.runner.model.lm_head.weight.values.zero_()
    seen.add("plain", PROMPT, max_tokens=6)
    seen.add("penalized", PROMPT, max_tokens=6, frequency_penalty=1.0)
    outputs = run(seen)
    assert ids(outputs["plain"]) == [0] * 6
    assert sorted(ids(outputs["penalized"])) == list(range(6))
    assert vocab > 6


def test_logit_bias_comes_before_penalties_and_leaves_other_rows_alone(seen: tools.SeenEngine) -> None:
    seen.add("alone", PROMPT, max_tokens=6)
    alone = ids(run(seen)["alone"])
    settings: list[dict[str, Any]] = [{}, {"logit_bias": {alone[0]: -100.0}}, {"logit_bias": {7: 100.0}}]
    for index, chosen in enumerate(settings):
        seen.add(f"greedy {index}", PROMPT, max_tokens=6, **chosen)
    seen.add("drawn", PROMPT, max_tokens=6, temperature=1.0, seed=1, logprobs=0, logit_bias={3: -100.0, 9: 100.0})
    outputs = run(seen)
    assert ids(outputs["greedy 0"]) == alone
    assert alone[0] not in ids(outputs["greedy 1"])
    logits = seen.logits["greedy 1"][0].clone()
    logits[alone[0]] = float("-inf")
    assert ids(outputs["greedy 1"])[0] == int(logits.argmax())
    assert ids(outputs["greedy 2"]) == [7] * 6
    assert ids(outputs["drawn"]) == [9] * 6
    first = outputs["drawn"][0].logprobs
    assert first is not None
    assert first[0].logprob == pytest.approx(float(seen.logits["drawn"][0].log_softmax(-1)[9]), abs=1e-4)
    # All logits equal: a repetition halves the biased logit, not the bias that would be added to a halved one.
    seen.engine.runner.model.lm_head.weight.values.zero_()
    seen.add("penalized", PROMPT, max_tokens=4, repetition_penalty=2.0, logit_bias={5: 4.0, 7: 3.0})
    assert 5 not in PROMPT
    assert 7 not in PROMPT
    assert ids(run(seen)["penalized"]) == [5, 7, 5, 5]


@pytest.mark.parametrize(
    ("bias", "fault"),
    [
        ({tools.VOCAB: 1.0}, f"token id {tools.VOCAB} is outside the vocabulary of {tools.VOCAB} ids"),
        ({-1: 1.0}, "token id -1 is outside"),
        ({5: 100.5}, "at least -100 and at most 100; got 100.5"),
        ({5: float("nan")}, "got nan"),
        (dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0), f"holds {MAX_LOGIT_BIASES + 1} token ids"),
    ],
)
def test_logit_bias_out_of_range_is_refused_by_value(bias: dict[int, float], fault: str) -> None:
    with pytest.raises(RequestError, match=fault) as refused:
        SamplingParams(logit_bias=bias).check(tools.VOCAB)
    assert refused.value.param == "logit_bias"


def test_stop_ids_min_tokens_and_ignore_eos(seen: tools.SeenEngine) -> None:
    seen.add("free", PROMPT, max_tokens=10)
    free = ids(run(seen)["free"])
    stop = free[3]
    seen.add("stopped", PROMPT, max_tokens=10, stop_token_ids=(stop,))
    seen.add("later", PROMPT, max_tokens=10, stop_token_ids=(stop,), min_tokens=6)
    outputs = run(seen)
    stopped = outputs["stopped"]
    assert ids(stopped) == free[: free.index(stop) + 1]
    assert stopped[-1].finish_reason == "stop"
    assert stopped[-1].stop_token_id == stop
    later = ids(outputs["later"])
    assert stop not in later[:6]
    assert len(later) > 6 or outputs["later"][-1].finish_reason == "length"


def test_every_end_id_of_the_generation_config_ends_a_request(checkpoint: Path, tmp_path: Path) -> None:
    seen = tools.open_engine(checkpoint)
    seen.add("free", PROMPT, max_tokens=10)
    free = ids(run(seen)["free"])
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [9999, {free[2]}]}}')
    seen = tools.open_engine(tmp_path)
    seen.add("ends", PROMPT, max_tokens=10, ignore_eos=False)
    seen.add("goes on", PROMPT, max_tokens=10)
    # An id beyond the vocabulary cannot be masked.
    seen.add("later", PROMPT, max_tokens=10, ignore_eos=False, min_tokens=6)
    outputs = run(seen)
    assert free[2] not in ids(outputs["later"])[:6]
    assert ids(outputs["ends"]) == free[: free.index(free[2]) + 1]
    assert ids(outputs["goes on"]) == free


def test_token_mask_limits_each_token(seen: tools.SeenEngine) -> None:
    """A mask that depends on the last token: the engine must not run ahead of the host for this row."""
    asked = []

    def next_even_then_odd(output: list[int]) -> torch.Tensor:
        asked.append(list(output))
        parity = len(output) % 2
        return torch.arange(tools.VOCAB) % 2 == parity

    seen.add("free", PROMPT, max_tokens=6)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    seen.engine.add(AddRequest("masked", PROMPT, sampling), next_even_then_odd)
    outputs = run(seen)
    masked = ids(outputs["masked"])
    assert [token % 2 for token in masked] == [0, 1, 0, 1, 0, 1]
    assert asked == [masked[:count] for count in range(6)]
    assert len(ids(outputs["free"])) == 6


def test_context_limit_ends_with_length(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, max_model_len=40)
    seen.add("one", PROMPT, max_tokens=100)
    outputs = run(seen)["one"]
    assert len(ids(outputs)) == 10
    assert outputs[-1].finish_reason == "length"


def test_abort_frees_pages_in_any_status(seen: tools.SeenEngine) -> None:
    for name in ("waiting", "running", "again"):
        seen.add(name, PROMPT, max_tokens=500)
    seen.engine.abort(["waiting", "unknown"])
    for _ in range(3):
        seen.engine.step()
    seen.engine.abort(["running", "running"])
    seen.engine.abort(["again", "running"])
    outputs = run(seen)
    assert {name: each[-1].finish_reason for name, each in outputs.items()} == {"running": "abort", "again": "abort"}


def test_priorities_run_the_lower_number_first(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, max_num_seqs=1)
    for name, priority in (("first", 0), ("low", 5), ("high", -5)):
        seen.engine.add(AddRequest(name, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), priority))
    ended = [output.request_id for output in seen.outputs() if output.finish_reason]
    assert ended == ["high", "first", "low"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"temperature": 1e-30}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 10**400}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (tools.VOCAB,)}, "stop_token_ids"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": 10**400}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ],
)
def test_invalid_parameter_is_refused_by_name(checkpoint: Path, settings: dict, field: str) -> None:
    seen = tools.open_engine(checkpoint)
    with pytest.raises(RequestError) as refused:
        seen.add("bad", PROMPT, **settings)
    assert refused.value.param == field
    assert str(next(iter(settings.values()))).strip("()',") in refused.value.message or field == "stop"
    assert not seen.engine.has_work
