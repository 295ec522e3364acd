"""Several answers to one prompt: `n` and `best_of`, streamed and whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from open_tickets import open_requests, start
from server_harness import MODEL, RunningServer, scripted_server

from meltcore.protocol.generation import AddRequest, EngineStats, SequenceOutput, StepOutputs, TokenLogprobs
from meltcore.protocol.sampling_params import SEED_LIMIT, SamplingParams
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.tasks.generation.generation_ticket import BestOf, Choice, GenerationTicket
from meltcore.serve.tasks.generation.sampling import MAX_ANSWERS, params_of_answer
from meltcore.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.synthetic_bytes(300)
COMPLETION = {"model": MODEL, "prompt": "ab", "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running
        running.check_no_leak()


def test_chat_counts_its_prompt_once(server: RunningServer) -> None:
    answer = server.chat("hello", max_tokens=7, n=3, logprobs=True).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hellohe", "length")
        assert len(choice["logprobs"]["content"]) == 7
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 21)


def test_every_streamed_choice_is_whole_and_has_its_index(server: RunningServer) -> None:
    events = server.chat("hello", max_tokens=60, n=3, stream=True, stream_options={"include_usage": True}).events
    texts: dict[int, str] = defaultdict(str)
    roles, ends = [], []
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"]["content"]
        roles += [choice["index"]] if "role" in choice["delta"] else []
        ends += [choice["index"]] if choice["finish_reason"] == "length" else []
    assert texts == dict.fromkeys(range(3), "hello" * 12)
    assert sorted(roles) == sorted(ends) == [0, 1, 2]
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 180)


def test_answers_to_several_prompts_come_prompt_by_prompt(server: RunningServer) -> None:
    answer = server.post("/v1/completions", COMPLETION | {"prompt": ["ab", "cde"], "n": 2, "echo": True}).json
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "ababa"),
        (1, "ababa"),
        (2, "cdecde"),
        (3, "cdecde"),
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 12)


def test_best_of_returns_n_answers_and_counts_all(server: RunningServer) -> None:
    answer = server.post("/v1/completions", COMPLETION | {"best_of": 4, "n": 2}).json
    assert [(choice["index"], choice["logprobs"]) for choice in answer["choices"]] == [(0, None), (1, None)]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 12)
    streamed = server.post("/v1/completions", COMPLETION | {"best_of": 2, "n": 2, "stream": True})
    assert {choice["index"] for event in streamed.events for choice in event["choices"]} == {0, 1}


@pytest.mark.parametrize(
    ("fields", "param", "fault"),
    [
        ({"n": 0}, "n", "got 0"),
        ({"n": MAX_ANSWERS + 1}, "n", f"at most {MAX_ANSWERS}; got {MAX_ANSWERS + 1}"),
        ({"n": 100, "prompt": ["a"] * 11}, "n", "1100 answers; the limit is 1024"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
        ({"best_of": MAX_ANSWERS + 1}, "best_of", f"at most {MAX_ANSWERS}; got {MAX_ANSWERS + 1}"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"n": 2, "prompt": [0, 5]}, None, "scripted failure"),
    ],
)
def test_fault_is_one_error_of_the_whole_request(
    server: RunningServer, fields: dict[str, Any], param: str | None, fault: str
) -> None:
    answer = server.post("/v1/completions", COMPLETION | fields)
    assert (answer.status, answer.error["param"]) == (400 if param else 500, param)
    assert fault in answer.error["message"]
    server.check_no_leak()


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_ends_all_answers(server: RunningServer, stream: bool) -> None:
    aborted = server.metrics()["requests_aborted_total"]
    connection = server.open("/v1/completions", COMPLETION | {"max_tokens": 4000, "n": 5, "stream": stream})
    server.wait_metric("num_requests_running", 5)
    connection.close()
    assert server.check_no_leak()["requests_aborted_total"] == aborted + 5


def test_seeds_of_the_answers_follow_each_other() -> None:
    params = SamplingParams(seed=7)
    assert [params_of_answer(params, index).seed for index in range(3)] == [7, 8, 9]
    assert params_of_answer(SamplingParams(), 2).seed is None
    last = params_of_answer(SamplingParams(seed=SEED_LIMIT - 1), 1)
    assert last.seed == -SEED_LIMIT
    last.check(300)


def add_answers(ticket: GenerationTicket, count: int, **fields: Any) -> None:
    leader = None
    for _ in range(count):
        choice = Choice(ticket, [1, 2, 3], SamplingParams(**fields), TOKENIZER, leader=leader)
        leader = leader or choice


def test_answers_follow_the_first_one_to_its_replica_also_when_it_is_lost() -> None:
    (stats,) = ServerStats((3,)).models
    sent: list[tuple[AddRequest, int]] = []
    requests = open_requests(stats, lambda message, replica: sent.append((message, replica)))  # type: ignore[arg-type, return-value]
    ticket = GenerationTicket(arrived_s=0.0, streaming=False)
    add_answers(ticket, 4)
    add_answers(ticket, 2)
    assert (ticket.prompt_tokens, sum(choice.waiting_tokens for choice in ticket.choices)) == (6, 6)
    start(requests, ticket)
    ids = [choice.request_id for choice in ticket.choices]
    assert [message.leader_id for message, _ in sent] == [None, *ids[:1] * 3, None, ids[4]]
    assert [replica for _, replica in sent] == [0, 0, 0, 0, 1, 1]
    assert [message.prompt.tolist() for message, _ in sent] == [[1, 2, 3], [], [], [], [1, 2, 3], []]
    sent.clear()
    requests.retry(0, [1, 2])
    adds = [(message, replica) for message, replica in sent if isinstance(message, AddRequest)]
    assert [replica for _, replica in adds] == [2] * 4
    assert [message.prompt.tolist() for message, _ in adds] == [[1, 2, 3], [], [], []]


def test_answer_whose_leader_has_ended_begins_again_with_its_own_prompt() -> None:
    (stats,) = ServerStats((2,)).models
    sent: list[tuple[AddRequest, int]] = []
    requests = open_requests(stats, lambda message, replica: sent.append((message, replica)))  # type: ignore[arg-type, return-value]
    ticket = GenerationTicket(arrived_s=0.0, streaming=False)
    add_answers(ticket, 3)
    start(requests, ticket)
    output = SequenceOutput(ticket.choices[0].request_id, [97], "length")
    requests.on_step(StepOutputs([output], EngineStats(), 1.0))
    sent.clear()
    requests.retry(0, [1])
    adds = [message for message, _ in sent if isinstance(message, AddRequest)]
    assert [message.prompt.tolist() for message in adds] == [[1, 2, 3]] * 2


def test_best_answers_have_the_highest_mean_log_probability() -> None:
    (stats,) = ServerStats().models
    sent: list[AddRequest] = []
    requests = open_requests(stats, lambda message, replica: sent.append(message))  # type: ignore[arg-type, return-value]
    ticket = GenerationTicket(arrived_s=0.0, streaming=False)
    ticket.best_of = BestOf(3, 2)
    for stop in ((), ("b",)):
        add_answers(ticket, 3, stop=stop)
    start(requests, ticket)
    assert {message.sampling.logprobs for message in sent} == {0}
    # The last of the second prompt is cut before its improbable tokens.
    texts = ["ab", "abcd", "a", "x", "ac", "abzz"]
    means = [-2.0, -1.0, -3.0, -0.5, -0.25, -0.125]
    for choice, text, mean in zip(ticket.choices, texts, means, strict=True):
        logprobs = [TokenLogprobs(mean if token != "z" else -50.0, [], []) for token in text]
        output = SequenceOutput(choice.request_id, list(text.encode()), "length", logprobs=logprobs)
        requests.on_step(StepOutputs([output], EngineStats(), 1.0))
    found = ticket.answers()
    assert [(choice.index, choice.take_text()) for choice in found] == [(0, "abcd"), (1, "ab"), (2, "a"), (3, "ac")]
    assert (ticket.prompt_tokens, ticket.output_tokens, ticket.unsent_chars) == (6, 12, 2)
