"""Open requests: each ends exactly once, and one that fails does not affect others."""

import asyncio
import gc
import os
import sys
import weakref
from typing import Any

import pytest
from open_tickets import open_requests, start

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import AddRequest, EngineStats, SequenceOutput, StepOutputs, ToEngine, TokenLogprobs
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.serve.tasks.generation.generation_ticket import (
    BURST_TOKENS,
    MAX_UNSENT_CHARS,
    Choice,
    GenerationTicket,
)
from meltcore.serve.tasks.generation.open_requests import client_disconnected
from meltcore.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.synthetic_bytes(300)


class Table:
    def __init__(self) -> None:
        (self.stats,) = ServerStats().models
        self.sent: list[ToEngine] = []
        self.requests = open_requests(self.stats, lambda message, replica: self.sent.append(message))

    def add(self, *prompts: list[int], **fields: Any) -> GenerationTicket:
        ticket = GenerationTicket(arrived_s=0.0, streaming=True)
        for prompt in prompts:
            Choice(ticket, prompt, SamplingParams(**fields), TOKENIZER)
        start(self.requests, ticket)
        return ticket

    def step(self, *outputs: SequenceOutput) -> None:
        self.requests.on_step(StepOutputs(list(outputs), EngineStats(), 1.0))

    def check_idle(self, **outcomes: int) -> None:
        assert len(self.requests) == 0
        assert (self.stats.local_value("in_flight"), self.stats.local_value("waiting_prompt_tokens")) == (0, 0)
        ended = {outcome: self.stats.local_value(outcome) for outcome in ("finished", "aborted", "failed")}
        assert ended == {"finished": 0, "aborted": 0, "failed": 0} | outcomes
        assert self.stats.local_value("accepted") == sum(outcomes.values())


def output(ticket: GenerationTicket, text: str, index: int = 0, **fields: Any) -> SequenceOutput:
    return SequenceOutput(ticket.choices[index].request_id, list(text.encode()), **fields)


def test_request_ends_once_when_aborted_several_times() -> None:
    table = Table()
    ticket = table.add([1, 2], [3])
    for _ in range(3):
        table.requests.end(ticket, client_disconnected(), "aborted")
    aborts = [message for message in table.sent if isinstance(message, AbortRequests)]
    assert aborts == [AbortRequests([choice.request_id for choice in ticket.choices])]
    table.step(output(ticket, "late", finish_reason="length"))
    table.check_idle(aborted=2)


def test_burst_leaves_no_memory_in_the_table() -> None:
    table = Table()
    burst = [table.add([1]) for _ in range(1000)]
    for ticket in burst:
        table.requests.end(ticket, client_disconnected(), "aborted")
    table.check_idle(aborted=1000)
    assert sys.getsizeof(table.requests._open) == sys.getsizeof({})


def test_ended_request_is_freed_without_a_garbage_collection() -> None:
    """Until the next collection, a cycle would keep the prompt and the text of each request."""
    table = Table()
    ticket = GenerationTicket(arrived_s=0.0, streaming=True)
    Choice(ticket, [1], SamplingParams(), TOKENIZER)
    gc.disable()
    try:
        table.requests.admit(ticket, "standard", units=1, cost=1.0)
        table.step(output(ticket, "x", finish_reason="length"))
        table.check_idle(finished=1)
        ticket.choices.clear()  # as routes do when the answer is sent
        is_freed = weakref.ref(ticket)
        del ticket
        assert is_freed() is None
    finally:
        gc.enable()


def test_abort_after_the_last_token_changes_nothing() -> None:
    table = Table()
    ticket = table.add([1])
    table.step(output(ticket, "x", finish_reason="length"))
    table.requests.end(ticket, client_disconnected(), "aborted")
    assert ticket.error is None
    assert [type(message) for message in table.sent] == [AddRequest]
    table.check_idle(finished=1)


def test_outputs_of_unknown_requests_are_dropped() -> None:
    table = Table()
    table.step(SequenceOutput("unknown", [1, 2, 3], finish_reason="stop"))
    table.check_idle()


@pytest.mark.parametrize(("code", "status"), [("grammar_failed", 400), (None, 500)])
def test_error_of_the_engine_has_a_code_if_the_request_is_at_fault(code: str | None, status: int) -> None:
    table = Table()
    ticket = table.add([1])
    table.step(output(ticket, "", finish_reason="error", error="it cannot go on", error_code=code))
    assert ticket.error is not None
    assert (ticket.error.message, ticket.error.status, ticket.error.code) == ("it cannot go on", status, code)
    table.check_idle(failed=1)


def test_stop_string_aborts_the_request_in_the_engine() -> None:
    table = Table()
    ticket = table.add([1], stop=("b",))
    table.step(output(ticket, "abc"))
    assert table.sent[-1] == AbortRequests([ticket.choices[0].request_id])
    assert ticket.choices[0].take_text() == "a"
    assert ticket.choices[0].output_tokens == 2
    table.check_idle(finished=1)


def test_failing_output_does_not_affect_the_others_of_its_step() -> None:
    async def run() -> None:
        table = Table()
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        bad, good = table.add([1]), table.add([2])
        bad.choices[0].detokenizer = None  # type: ignore[assignment]
        table.step(output(bad, "x"), output(good, "y", finish_reason="length"))
        assert isinstance(bad.error, RequestError)
        assert bad.error.status == 500
        assert good.choices[0].take_text() == "y"
        assert isinstance(reported[0], AttributeError)
        table.check_idle(finished=1, failed=1)

    asyncio.run(run())


def test_all_requests_end_when_the_engine_dies() -> None:
    table = Table()
    generations = [table.add([1, 2, 3]) for _ in range(5)]
    table.step(output(generations[0], "a"))
    table.requests.end_all(RequestError("gone", status=500), "failed")
    assert all(ticket.error is not None for ticket in generations)
    table.check_idle(failed=5)


def test_unsent_logprobs_count_against_a_slow_reader() -> None:
    table = Table()
    ticket = table.add([1], logprobs=20, max_tokens=100_000)
    several = [TokenLogprobs(-0.5, list(range(20)), [-1.0] * 20)] * 100
    table.step(output(ticket, "a" * 100, logprobs=several))
    waiting = ticket.unsent_chars
    assert waiting > 100 * 21
    ticket.choices[0].take_logprobs()
    ticket.choices[0].take_text()
    assert ticket.unsent_chars == 0
    for _ in range(1 + MAX_UNSENT_CHARS // waiting):
        assert ticket.error is None
        table.step(output(ticket, "a" * 100, logprobs=several))
    assert ticket.error is not None
    assert ticket.error.code == "slow_reader"
    table.check_idle(aborted=1)


@pytest.mark.parametrize("answers", [1, 128, 1024])
def test_all_answers_of_a_request_share_one_bound(answers: int) -> None:
    """The first tokens of 1,024 answers with log-probabilities are more than the bound: their client reads well."""
    table = Table()
    ticket = table.add(*[[1]] * answers, logprobs=20, max_tokens=100_000)
    logprobs = [TokenLogprobs(-0.5, list(range(20)), [-1.0] * 20)]
    for _ in range(BURST_TOKENS):
        table.step(*(output(ticket, "a", index, logprobs=logprobs) for index in range(answers)))
    assert ticket.error is None
    token_chars = ticket.unsent_chars // (answers * BURST_TOKENS)
    for index in range(MAX_UNSENT_CHARS // token_chars + 2):
        table.step(output(ticket, "a", index % answers, logprobs=logprobs))
        assert ticket.unsent_chars <= ticket.max_unsent_chars + token_chars
    assert ticket.error is not None
    assert (ticket.error.code, str(ticket.max_unsent_chars) in ticket.error.message) == ("slow_reader", True)
    table.check_idle(aborted=answers)


def test_stop_strings_are_not_sent_to_the_engine() -> None:
    table = Table()
    ticket = table.add([1], [2], stop=("ab", "x" * 4096), max_tokens=9)
    (first, second) = table.sent
    assert isinstance(first, AddRequest)
    assert isinstance(second, AddRequest)
    assert first.sampling == second.sampling == SamplingParams(max_tokens=9)
    table.step(output(ticket, "1ab2", 0), output(ticket, "xyz", 1, finish_reason="length"))
    assert [choice.take_text() for choice in ticket.choices] == ["1", "xyz"]
    table.check_idle(finished=2)


def test_ids_at_engines_differ_among_api_server_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the engines. A number of the process alone, or after the client's header, may occur in each."""
    ids: list[str] = []
    for process in (10, 11):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        ids += [Child(Ticket(0.0)).request_id for _ in range(2)]
    assert [each.partition("-")[0] for each in ids] == ["a", "a", "b", "b"]
    assert len(set(ids)) == len(ids)
