"""What is open at a replica that is lost: another one begins it again, once, where its client has seen nothing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from open_tickets import new_backend, open_backend, open_requests, start
from waiting import WAIT_S

pytest.importorskip("sentencepiece", reason="the extra `translate` is not installed: make .venv/.installed")
pytest.importorskip("soundfile", reason="the extra audio has soundfile")

from meltcore.common.errors import RequestError
from meltcore.protocol.batch import BatchStats
from meltcore.protocol.generation import AddRequest, EngineStats, SequenceOutput, StepOutputs, pack_token_ids
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady, Synthesized
from meltcore.protocol.transcription import Transcript, TranscriptionOutputs, TranscriptionReady
from meltcore.protocol.translation import Translated, TranslationReady
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.tasks.generation.generation_ticket import Choice, Echo, GenerationTicket
from meltcore.serve.tasks.generation.open_requests import client_disconnected
from meltcore.serve.tasks.synthesis.forms import SynthesisRequest
from meltcore.serve.tasks.synthesis.synthesis_engine import SynthesisEngine
from meltcore.serve.tasks.transcription.transcription_engine import TranscriptionEngine
from meltcore.serve.tasks.translation.forms import TranslateRequest
from meltcore.serve.tasks.translation.translation_engine import TranslationEngine
from meltcore.serve.tasks.translation.translations import TranslationText
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.tokenizer import Tokenizer
from meltcore.text.translation.tokenizer import SyntheticTokenizer

ENGINE: Any = ("CPU", "float32", "dummy", [], 0.0)  # of every ready message
TOKENIZER = Tokenizer.synthetic_bytes(300)
DEAD = RequestError("dead", status=503, code="engine_dead")


def config(name: str) -> ModelSection:
    return ModelSection(checkpoint=name, load_format="dummy", replicas=2)


def check_idle(stats: ModelStats, **outcomes: int) -> None:
    ended = {name: round(stats.total(name)) for name in ("accepted", "finished", "aborted", "failed", "retried")}
    expected = {"finished": 0, "aborted": 0, "failed": 0, "retried": 0} | outcomes
    assert ended == expected | {"accepted": sum(expected.values()) - expected["retried"]}
    assert (stats.total("in_flight"), stats.total("waiting_prompt_tokens")) == (0, 0)
    assert [(stats.open_requests(each), stats.open_tokens(each)) for each in range(2)] == [(0, 0), (0, 0)]


class Table:
    """The requests of one API server for two replicas, and what it sends to which."""

    def __init__(self) -> None:
        (self.stats,) = ServerStats((2,)).models
        self.sent: list[tuple[Any, int]] = []
        self.requests = open_requests(self.stats, lambda message, replica: self.sent.append((message, replica)))

    def add(self, *texts: str, streaming: bool = False, echo: Echo | None = None, **fields: Any) -> GenerationTicket:
        ticket = GenerationTicket(arrived_s=0.0, streaming=streaming)
        for text in texts:
            Choice(ticket, list(text.encode()), SamplingParams(**fields), TOKENIZER, None, echo)
        start(self.requests, ticket, 3)
        return ticket

    def step(self, replica: int, ticket: GenerationTicket, text: str, index: int = 0, end: Any = None) -> None:
        output = SequenceOutput(ticket.choices[index].request_id, list(text.encode()), end)
        self.requests.on_step(StepOutputs([output], EngineStats(), 1.0), replica)

    def given(self) -> list[tuple[bytes | list[int], int]]:
        return [
            (message.prompt_token_ids, replica) for message, replica in self.sent if isinstance(message, AddRequest)
        ]


def test_answer_of_which_nothing_was_sent_begins_again() -> None:
    table = Table()
    echo = Echo("ab", pack_token_ids(list(b"ab")), False)
    ticket = table.add("ab", seed=5, echo=echo)
    table.step(0, ticket, "par")
    table.requests.retry(0, [1])
    first, again = (message for message, _ in table.sent if isinstance(message, AddRequest))
    assert (first, [replica for _, replica in table.given()]) == (again, [0, 1])
    assert (again.priority, again.sampling.seed, ticket.exchange.retries) == (3, 5, 1)
    table.step(0, ticket, "late", end="stop")  # of the lost one, which is within reach again
    table.step(1, ticket, "part")
    table.step(1, ticket, "!", end="stop")
    (choice,) = ticket.choices
    assert (choice.take_text(), choice.output_tokens, ticket.unsent_chars) == ("abpart!", 5, 0)
    check_idle(table.stats, finished=1, retried=1)


def test_request_is_retried_once_and_only_where_nothing_was_sent() -> None:
    table = Table()
    sent, unsent, other, gone = (table.add(name, streaming=True) for name in ("sent", "unsent", "other", "gone"))
    for ticket in (sent, unsent, other, gone):
        ticket.choices[0].replica, replica = 0 if ticket is not other else 1, ticket.choices[0].replica
        table.stats.unassign(replica, ticket.choices[0].cost)
        table.stats.assign(ticket.choices[0].replica, ticket.choices[0].cost)
    table.step(0, sent, "x")
    sent.choices[0].take_text()
    assert (sent.choices[0].prompt_token_ids, len(unsent.choices[0].prompt_token_ids)) == (b"", 4 * len("unsent"))
    table.requests.end(gone, client_disconnected(), "aborted")
    table.sent.clear()
    table.requests.retry(0, [1])
    table.requests.end_all(DEAD, "failed", 0)
    assert table.given() == [(pack_token_ids(list(b"unsent")), 1)]
    assert (sent.error, unsent.error, other.error) == (DEAD, None, None)
    table.requests.retry(1, [0])
    table.requests.end_all(DEAD, "failed", 1)
    assert unsent.error is DEAD
    assert other.error is None, "its first retry"
    table.step(0, other, "y", end="stop")
    check_idle(table.stats, finished=1, aborted=1, failed=2, retried=2)


def test_other_choices_of_a_retried_request_go_on() -> None:
    table = Table()
    ticket = table.add("one", "two")
    assert [choice.replica for choice in ticket.choices] == [0, 1]
    table.step(1, ticket, "kept", 1)
    table.requests.retry(0, [1])
    table.step(1, ticket, "new", 0, "stop")
    table.step(1, ticket, "!", 1, "stop")
    assert [choice.take_text() for choice in ticket.choices] == ["new", "kept!"]
    check_idle(table.stats, finished=2, retried=1)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


def lose(backend: EngineBackend) -> None:
    backend._on_lost(0, "the engine on a node cannot be reached: the connection is lost")


def test_translation_is_retried_once() -> None:
    async def scenario() -> None:
        sent: list[tuple[Any, int]] = []
        backend = open_backend(
            TranslationEngine,
            config("ai4bharat/indictrans2-indic-en-dist-200M"),
            ServerStats((2,)),
            lambda message, replica: sent.append((message, replica)),
            TranslationText(SyntheticTokenizer(32_000), True, "indic-en"),
            TranslationReady(*ENGINE, 64, 4, 256, 32_000, 5, 256, "synthetic"),
        )

        def end(message: Any, replica: int) -> None:
            result = Translated(request_id=message.request_id, token_ids=(7,), finish_reason="stop")
            backend.on_output(replica, result)

        async def begin() -> asyncio.Task[Any]:
            sent.clear()
            request = TranslateRequest(["सुबह", "शाम"], "hi", "en")
            task = asyncio.create_task(backend.translate(request))
            await until(lambda: bool(sent))
            return task

        task = await begin()
        (first, _), (second, _) = sent
        end(second, 1)
        backend.retry(0, [1])
        backend.end_all(DEAD, "failed", 0)
        assert sent[2:] == [(AbortRequests([first.request_id]), 0), (first, 1)]
        end(first, 0)
        assert not task.done()
        end(first, 1)
        assert (await task).completion_tokens == 2
        task = await begin()
        for lost in (0, 1):
            backend.retry(lost, [1 - lost])
            backend.end_all(DEAD, "failed", lost)
        with pytest.raises(RequestError, match="dead"):
            await task
        check_idle(backend.stats, finished=2, failed=2, retried=2)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_clips_without_a_transcript_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        server = ServerStats((2,))
        (stats,) = server.models
        stats.task = "transcription"
        backend = new_backend(TranscriptionEngine, config("tones"), server, stats, 30.0)
        ready = TranscriptionReady(*ENGINE, 100, ["kn"], 16_000, 16, 16_000, "real")
        sent: list[tuple[Any, int]] = []
        monkeypatch.setattr(backend, "_send", lambda message, replica: sent.append((message, replica)))
        request: Any = SimpleNamespace(decoder="ctc")

        def end(clip: str, replica: int, text: str) -> None:
            result = Transcript(request_id=clip, text=text, finish_reason="stop")
            backend.on_message(replica, TranscriptionOutputs([result], BatchStats(), 1.0))

        async with backend.admitted(10, 1) as place:
            a, b = (f"{place.request_id}-{name}" for name in ("a", "b"))
            clips = [backend._send_clip(name, bytes(64), "kn", request, ready, place) for name in (a, b)]
            end(a, 0, "done")
            lose(backend)
            assert place.replica == 1
            assert sent[2:] == [(AbortRequests([b]), 0), (sent[1][0], 1)]
            backend._send_clip("c", bytes(64), "kn", request, ready, place)
            assert sent[-1][1] == 1, "later clips go there, too"
            end(b, 0, "late")
            end(b, 1, "again")
            assert [(await clip).text for clip in clips] == ["done", "again"]
        check_idle(stats, finished=1, retried=1)
        stats.mark_replica_dead(1)

        async def lose_between_clips() -> None:  # and there is no other replica
            async with backend.admitted(10, 1) as place:
                lose(backend)
                backend._send_clip("d", bytes(64), "kn", request, ready, place)

        with pytest.raises(RequestError, match="cannot be reached") as lost:
            await lose_between_clips()
        assert (lost.value.status, lost.value.code) == (503, "engine_lost")
        check_idle(stats, finished=1, failed=1, retried=1)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


@pytest.mark.parametrize("is_whole", [True, False])
def test_speech_of_which_nothing_was_sent_begins_again(monkeypatch: pytest.MonkeyPatch, is_whole: bool) -> None:
    """A whole file begins again after its first chunk; a stream, of which the client has that chunk, ends."""

    async def scenario() -> None:
        server = ServerStats((2,))
        (stats,) = server.models
        stats.task = "synthesis"
        backend = new_backend(SynthesisEngine, config("ai4bharat/IndicF5"), server, stats, 30.0)
        sent: list[tuple[Any, int]] = []
        monkeypatch.setattr(backend, "_send", lambda message, replica: sent.append((message, replica)))
        ready = SynthesisReady(*ENGINE, 9, ["a"], 24_000, 99, 0.5, 15, 0.5, 2, [32], "synthetic")
        backend.open(None, ready, 0)
        backend.health.set("ready", "ready")
        request = SynthesisRequest("Hello.", None, None, "", "pcm", 1.0, 0, None, is_whole, False, None, None, None)
        parts: list[bytes] = []

        async def on_part(part: Any) -> None:
            parts.append(part.data)

        def say(replica: int, value: float, chunk: int) -> None:
            samples = array("f", [value] * 1000).tobytes()
            result = Synthesized(
                request_id=sent[0][0].request_id,
                samples=samples,
                chunk=chunk,
                chunks=2,
                finish_reason="stop" if chunk == 2 else None,
            )
            backend.on_message(replica, SynthesisOutputs([result], BatchStats(), 1.0))

        speaking = asyncio.create_task(backend.synthesize(request, on_part))
        await until(lambda: bool(sent))
        say(0, 0.5, 1)
        await until(lambda: backend._waiting_bytes == 0 and (is_whole or bool(parts)))
        await asyncio.sleep(0.05)
        lose(backend)
        if is_whole:
            assert sent[1:] == [(AbortRequests([sent[0][0].request_id]), 0), (sent[0][0], 1)]
            say(0, 0.5, 2)
            say(1, 0.25, 1)
            say(1, 0.25, 2)
            assert await speaking == pytest.approx(2000 / 24_000)
            assert {len(b"".join(parts)), b"".join(parts).count(b"\x00\x20")} == {4000, 2000}
            check_idle(stats, finished=1, retried=1)
        else:
            with pytest.raises(RequestError, match="cannot be reached"):
                await speaking
            check_idle(stats, failed=1)
        assert backend._waiting_bytes == 0
        await backend.close_workers()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
