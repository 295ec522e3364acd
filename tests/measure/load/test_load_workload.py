"""Prompts: the same for the same seed, in the form asked for, and errors that name the line."""

import json
from pathlib import Path

import msgspec
import pytest

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import LoadConfig, Timeouts, parse_slo
from meltcore.measure.load.run.loops import arrival_offsets
from meltcore.measure.load.run.runner import check_limits
from meltcore.measure.load.tasks.generation import CHAT_PATH, COMPLETIONS_PATH, fit_vocabulary, load_workload
from meltcore.measure.load.tasks.task import check_workload
from meltcore.measure.load.workloads.workload import Workload
from meltcore.measure.problems import generate


def load(text: str, seed: int = 0, max_tokens: int | None = None) -> Workload:
    return load_workload(text, num_requests=50, seed=seed, max_tokens=max_tokens)


def test_problems_workload_is_held_out_and_graded() -> None:
    workload = load("problems:mixed", seed=3)
    problem = generate("heldout", kind="mixed", num_problems=50, seed=3)[7]
    prompt = workload.make_prompt(7)
    assert prompt.path == CHAT_PATH
    assert prompt.fields["messages"][0]["content"] == problem.question
    assert prompt.grade is not None
    assert prompt.grade(problem.answer)
    assert not prompt.grade("The answer is 123456789.")


def test_random_ids_have_their_lengths_and_differ_by_request_and_seed() -> None:
    workload = load("random:in=3-9,out=5-6")
    prompts = [workload.make_prompt(index) for index in range(200)]
    assert {len(prompt.fields["prompt"]) for prompt in prompts} == set(range(3, 10))
    assert {prompt.fields["max_tokens"] for prompt in prompts} == {5, 6}
    # Special tokens shown: an answer of nothing else would have no text, and fail.
    assert all(prompt.fields["ignore_eos"] and not prompt.fields["skip_special_tokens"] for prompt in prompts)
    assert {prompt.path for prompt in prompts} == {COMPLETIONS_PATH}
    assert workload.make_prompt(5) == load("random:in=3-9,out=5-6").make_prompt(5)
    assert workload.make_prompt(5) != load("random:in=3-9,out=5-6", seed=1).make_prompt(5)


def test_random_ids_stay_inside_a_small_vocabulary() -> None:
    fields = load("random:in=500,vocab=40,eos=1").make_prompt(0).fields
    assert 0 < min(fields["prompt"]) <= max(fields["prompt"]) < 40
    assert set(fields) == {"prompt", "max_tokens"}


def test_file_lines_become_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Say four", "answer": "4", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "Capital?"}], "answer": "Paris"},
        {"prompt_token_ids": [1, 2, 3]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    workload = load(str(path), max_tokens=30)
    first, second, third, fourth = (workload.make_prompt(index) for index in range(4))
    assert (first.path, first.fields) == (COMPLETIONS_PATH, {"prompt": "Say four", "max_tokens": 9})
    assert (second.path, second.fields["max_tokens"]) == (CHAT_PATH, 30)
    assert third.fields["prompt"] == [1, 2, 3]
    assert fourth == first
    assert first.grade is not None
    assert first.grade("2 + 2 = 4.0")
    assert not first.grade("4 and then 5")
    assert second.grade is not None
    assert second.grade("It is paris.")
    assert not workload.is_graded, "one line has no answer"


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    text = "a\x0b\x0c\x1c\x85\u2028\u2029 ä"  # every character at which str.splitlines() splits, and the locale's trap
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(msgspec.json.Encoder().encode_lines([{"prompt": text}, {"prompt": "b"}]))
    workload = load(str(path))
    assert [workload.make_prompt(at).fields["prompt"] for at in range(2)] == [text, "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: not JSON"), ("[]", "not a JSON object"), ('{"prompt": "a", "messages": []}', "exactly one of")],
)
def test_malformed_line_is_reported_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        load(str(path))


@pytest.mark.parametrize("text", ["problems:huge", "random:in=9-3", "random:in=x", "random:what=3", "no-such.jsonl"])
def test_invalid_workload_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": (0,)}, "concurrency must be at least 1"),
        ({"request_rate": (0.0,)}, "request_rate must be more than 0"),
        ({"num_prompts": (0,)}, "num_prompts must be at least 1"),
        ({"num_prompts": (1, 2)}, "2 values for 1 levels"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"slo_ms": {"ttft": -1.0}}, "ttft must be more than 0 ms"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"timeouts": Timeouts(total_s=float("nan"))}, "total_s must be more than 0 seconds; got nan"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadConfig(url="http://127.0.0.1:1", **fields)


def test_limit_that_the_task_does_not_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="tfft is not measured of generation; ttft, "):
        check_workload(LoadConfig(url="http://127.0.0.1:1", slo_ms={"tfft": 1.0}))


def test_goodput_limits_are_parsed_and_malformed_ones_refused() -> None:
    assert parse_slo("ttft:2000,tpot:99.5") == {"ttft": 2000.0, "tpot": 99.5}
    with pytest.raises(ConfigError, match="ttft:2000"):
        parse_slo("ttft=3")


def test_arrivals_offer_exactly_the_requested_rate() -> None:
    constant = arrival_offsets(20.0, 101, "constant", 0)
    poisson = arrival_offsets(20.0, 101, "poisson", 0)
    assert constant == pytest.approx([index / 20 for index in range(101)])
    assert (poisson[0], poisson[-1]) == (0.0, pytest.approx(5.0))
    gaps = poisson[1:] - poisson[:-1]
    assert (gaps >= 0).all()
    assert 0.7 < gaps.std() / gaps.mean() < 1.3, "exponential gaps scatter as much as their mean"
    assert (arrival_offsets(20.0, 101, "poisson", 0) == poisson).all()
    assert (arrival_offsets(20.0, 101, "poisson", 1) != poisson).any()


def test_too_few_ports_or_files_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    ports = tmp_path / "range"
    ports.write_text("32768\t32867\n")
    check_limits(100, connections_per_process=100, port_range=ports)
    with pytest.raises(ConfigError, match="ip_local_port_range"):
        check_limits(101, connections_per_process=101, port_range=ports)
    with pytest.raises(ConfigError, match="ulimit -Hn"):
        check_limits(1, connections_per_process=2**40, port_range=ports)


def test_line_sets_sampling_parameters_of_its_request(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "temperature": 1.0, "ignore_eos": true}\n{"prompt": "b"}\n')
    workload = load_workload(str(path), num_requests=2, seed=0, max_tokens=None)
    assert workload.make_prompt(0).fields == {"prompt": "a", "temperature": 1.0, "ignore_eos": True}
    assert workload.make_prompt(1).fields == {"prompt": "b"}


def test_levels_send_for_ten_seconds_by_default_and_say_so() -> None:
    config = LoadConfig(url="", concurrency=(1, 100))
    assert [(level.duration_s, level.num_connections) for level in config.levels] == [(10.0, 1), (10.0, 100)]
    plan = "concurrency 1: 10 s after 1 warm-ups; concurrency 100: 10 s after 32 warm-ups; 20 s or more in all"
    assert (config.plan, config.settings["plan"]) == (plan, plan)


def test_levels_with_a_number_of_requests_have_no_time() -> None:
    config = LoadConfig(url="", concurrency=(5,), num_prompts=(1200,), num_warmups=0)
    assert [(level.duration_s, level.num_requests) for level in config.levels] == [(None, 1200)]
    assert config.plan == "concurrency 5: 1,200 requests after 0 warm-ups; the server sets the time"
    arrivals = LoadConfig(url="", request_rate=(2.0,))
    assert [level.num_requests for level in arrivals.levels] == [60]
    assert arrivals.plan == "rate 2/s: 60 requests after 8 warm-ups; 30 s or more in all"


@pytest.mark.parametrize(
    ("spec", "vocab_size", "fitted"),
    [
        ("random:in=8", 824, "random:in=8,vocab=824"),
        ("random", 824, "random:vocab=824"),
        ("random:in=8,vocab=99", 824, "random:in=8,vocab=99"),
        ("random:in=8", 30_000, "random:in=8"),
        ("random:in=8", None, "random:in=8"),
        ("problems:short", 824, "problems:short"),
    ],
)
def test_random_ids_fit_the_servers_vocabulary(spec: str, vocab_size: int | None, fitted: str) -> None:
    assert fit_vocabulary(spec, vocab_size) == fitted
