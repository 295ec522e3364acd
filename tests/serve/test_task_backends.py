"""Backends of tasks other than generation: the texts and errors that they send, without an engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from open_tickets import new_backend, open_backend, open_requests, wide_queue
from waiting import WAIT_S, until

pytest.importorskip("sentencepiece", reason="the extra `translate` is not installed: make .venv/.installed")
pytest.importorskip("soundfile", reason="the extra audio has soundfile")

from meltcore.common.errors import ConfigError, RequestError
from meltcore.protocol.batch import BatchStats
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady, Synthesized
from meltcore.protocol.translation import TranslationReady
from meltcore.serve.engines.batch_backend import BatchTicket, BatchTickets
from meltcore.serve.requests.backend import ModelTable
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.tasks.audio_backend import _RUNNING_REQUESTS
from meltcore.serve.tasks.generation.generation_ticket import GenerationTicket
from meltcore.serve.tasks.generation.local_engine import LocalEngine
from meltcore.serve.tasks.generation.text_model import find_task
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.serve.tasks.synthesis import synthesis_engine
from meltcore.serve.tasks.synthesis.forms import SynthesisRequest, synthesizer
from meltcore.serve.tasks.synthesis.synthesis_engine import SynthesisEngine
from meltcore.serve.tasks.transcription import forms
from meltcore.serve.tasks.transcription.transcription_engine import TranscriptionEngine
from meltcore.serve.tasks.transcription.transcription_form import speech_request
from meltcore.serve.tasks.translation import translations as translations_module
from meltcore.serve.tasks.translation.choice import translator
from meltcore.serve.tasks.translation.forms import TranslateRequest
from meltcore.serve.tasks.translation.translation_engine import TranslationEngine
from meltcore.serve.tasks.translation.translations import TranslationText
from meltcore.settings.fleet_spec import ModelSection
from meltcore.settings.routes_section import LanguagesSection, RoutesSection, TranslateRoute, TranslationRule
from meltcore.text.translation.document import prepare
from meltcore.text.translation.languages import find_language
from meltcore.text.translation.tokenizer import SyntheticTokenizer

TRANSLATOR = "ai4bharat/indictrans2-indic-en-dist-200M"
ENGINE = ("CPU", "float32", "dummy", [], 0.0)  # of every ready message


def model(name: str, **fields: Any) -> ModelSection:
    return ModelSection(checkpoint=name, load_format="dummy", **fields)


def test_replica_whose_engine_has_ended_is_not_connected(tmp_path: Path) -> None:
    """An API server that starts late may be told of an engine whose folder is gone."""
    server = ServerStats()
    backend = new_backend(SynthesisEngine, model("ai4bharat/IndicF5"), server, server.models[0])
    backend.stats.mark_replica_ready(0)

    async def scenario() -> None:
        backend.connect(0, tmp_path / "removed", 1, lambda *_: None)
        assert backend.stats.live_replicas() == []
        backend.connect(0, tmp_path, 1, lambda *_: None)  # the next engine of this replica
        assert backend.stats.live_replicas() == [0]
        backend.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("normalizer", ["itt", "original"])
def test_normalizer_of_a_server_prepares_its_texts(normalizer: Literal["itt", "original"]) -> None:
    sent: list[Any] = []
    tokenizer, text = SyntheticTokenizer(32_000), "सुबह 5:30 बजे"
    ready = TranslationReady(*ENGINE, 64, 4, 256, 32_000, 5, 256, "synthetic")
    config, texts = model(TRANSLATOR, normalizer=normalizer), TranslationText(tokenizer, True, "indic-en")
    backend = open_backend(
        *(TranslationEngine, config, ServerStats(), lambda message, _replica: sent.append(message), texts, ready)
    )

    async def translate() -> None:
        translating = asyncio.create_task(backend.translate(TranslateRequest([text], "hi", "en")))
        await until(lambda: sent, "a message to the engine")
        translating.cancel()
        await asyncio.wait([translating])

    asyncio.run(translate())
    source, target = find_language("hi", "x"), find_language("en", "x")
    ids = {
        name: prepare(text, tokenizer, source, target, 256, name).sentences[0].token_ids for name in ("itt", "original")
    }
    assert sent[0].token_ids == ids[normalizer]
    assert ids["itt"] != ids["original"]


def test_texts_are_prepared_in_turns_and_the_longest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread at a time; a short request passes between the turns of a long one, whose rest ends with it."""
    prepared: list[str] = []
    threads: list[int] = []

    def prepare_slowly(text: str, *rest: Any) -> Any:
        threads.append(1)
        time.sleep(0.005)
        assert len(threads) == 1, "two threads prepare texts"
        prepared.append(text)
        threads.pop()
        return prepare(text, *rest)

    monkeypatch.setattr(translations_module, "prepare", prepare_slowly)
    ready = TranslationReady(*ENGINE, 64, 4, 256, 32_000, 5, 256, "synthetic")
    sent: list[Any] = []

    async def scenario() -> None:
        text = TranslationText(SyntheticTokenizer(32_000), True, "indic-en")
        backend = open_backend(
            *(TranslationEngine, model(TRANSLATOR), ServerStats(), lambda *each: sent.append(each), text, ready)
        )

        def start(texts: list[str]) -> asyncio.Task[Any]:
            return asyncio.create_task(backend.translate(TranslateRequest(texts, "hi", "en")))

        with pytest.raises(
            RequestError, match=r"sentences have 262,145 characters; the limit is 262,144: send several"
        ):
            await start(["क"] * 262_145)
        assert prepared == []
        long_text = "सुबह। " * 680  # two of them are a turn
        long = start([long_text] * 60)
        while not prepared:  # noqa: ASYNC110 - a thread fills it
            await asyncio.sleep(0.001)
        short = start(["शाम"])
        while not sent:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(sent) == 1, "the long one is still prepared"
        assert len(sent[0][0].token_ids) < 20
        long.cancel()
        short.cancel()
        await asyncio.gather(long, short, return_exceptions=True)
        num_prepared = len(prepared)
        await asyncio.sleep(0.05)
        assert len(prepared) == num_prepared < 12, "the rest of its texts was prepared"

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_request_without_messages_waits_for_no_result() -> None:
    (stats,) = ServerStats().models
    tickets = BatchTickets(stats, lambda *_message: None, wide_queue(stats), 30.0)

    async def scenario() -> list[Any]:
        return await tickets.results(BatchTicket(time.monotonic()), "standard", units=0, cost=0)

    assert asyncio.run(asyncio.wait_for(scenario(), WAIT_S)) == []
    assert (len(tickets), stats.total("accepted")) == (0, 0)


def test_tasks_of_checkpoints(tmp_path: Path) -> None:
    assert find_task(model("ai4bharat/IndicF5")).name == "synthesis"
    assert find_task(model("ai4bharat/indic-conformer-600m-multilingual")).name == "transcription"
    assert find_task(model(TRANSLATOR, normalizer="original")).name == "translation"
    assert find_task(model("meltcore/sums")).name == "generation"
    with pytest.raises(ConfigError, match="nothing"):
        find_task(model(str(tmp_path / "nothing")))


def test_requests_beyond_the_queue_get_429_and_leave_no_trace() -> None:
    server = ServerStats()
    stats = server.models[0]
    backend = new_backend(SynthesisEngine, model("ai4bharat/IndicF5"), server, stats, 30.0, max_queue=2)

    async def scenario() -> None:
        async with AsyncExitStack() as held:
            places = [await held.enter_async_context(backend.admitted(10, 1)) for _ in range(_RUNNING_REQUESTS + 2)]
            with pytest.raises(RequestError, match="the queue is full: 3 requests would wait, the limit is 2") as full:
                await held.enter_async_context(backend.admitted(10, 1))
            assert ({place.replica for place in places}, full.value.status) == ({0}, 429)
            assert stats.total("in_flight") == len(places)
        backend.tickets.limit_s = 0.2
        with pytest.raises(RequestError, match=r"longer than 0\.2 s") as late:
            async with backend.admitted(10, 1):
                await asyncio.sleep(5)
        assert (late.value.status, stats.total("in_flight")) == (504, 0)
        ended = {outcome: stats.total(outcome) for outcome in ("accepted", "finished", "failed", "rejected_queue_full")}
        counts = {"accepted": 67, "finished": 66, "failed": 0, "rejected_queue_full": 1}
        assert ended == counts

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def table(backends: list[Any], languages: LanguagesSection, routes: RoutesSection | None = None) -> ModelTable:
    found = ModelTable(backends)
    found.change_routes((), languages, routes or RoutesSection())
    return found


def test_model_of_a_request_is_chosen_by_name_rule_language_and_task() -> None:
    classes = {
        "meltcore/sums": LocalEngine,
        "ai4bharat/IndicF5": SynthesisEngine,
        "copy": SynthesisEngine,
        "tamil": TranscriptionEngine,
        "kannada": TranscriptionEngine,
    }
    server = ServerStats([1] * len(classes))
    backends: dict[str, Any] = {
        name: new_backend(each, model(name), server, stats)
        for (name, each), stats in zip(classes.items(), server.models, strict=True)
    }
    for name, backend in backends.items():
        backend.health.set("ready", "ready")
        backend.check_ready = lambda: None
        backend._ready = SimpleNamespace(languages=[name[:2].replace("ka", "kn")])

    def choice(**fields: Any) -> ModelChoice:
        return ModelChoice(table(list(backends.values()), LanguagesSection(**fields)))

    def transcriber(choice: ModelChoice, language: str | None, model: str | None = None) -> tuple[str, str | None]:
        request = speech_request({"language": language or "", **({} if model is None else {"model": model})}, b"")
        backend, request = forms.transcriber(choice, request)
        return backend.names[0], request.language

    plain = choice()
    assert plain.chat_model() is backends["meltcore/sums"]
    assert synthesizer(plain, None) is backends["ai4bharat/IndicF5"]
    assert synthesizer(plain, "hindi", "copy") is backends["copy"]
    assert [transcriber(plain, name)[0] for name in ("kn", "Kannada", "tam_Taml", "hi", None)] == [
        *("kannada", "kannada", "tamil", "tamil", "tamil"),
    ]
    ruled = choice(
        synthesis={"hi": "copy", "*": "ai4bharat/IndicF5"},
        transcription={"eng_Latn": "kannada"},
        substitute={"German": ("or", "ta"), "kn": ("ta",), "en": ("pa",)},
    )
    assert [synthesizer(ruled, name).names[0] for name in ("Hindi", "kn")] == ["copy", "ai4bharat/IndicF5"]
    assert transcriber(ruled, "english") == ("kannada", "english")
    assert transcriber(ruled, "german") == ("tamil", "ta")  # the first that a model knows
    assert transcriber(ruled, "Kannada") == ("kannada", "Kannada")  # a known language stays
    assert synthesizer(ruled, "English").names[0] == "ai4bharat/IndicF5"
    assert transcriber(ruled, "english", "tamil")[0] == "tamil"
    for call, message in [
        (lambda: synthesizer(plain, None, "meltcore/sums"), "meltcore/sums cannot synthesize speech"),
        (lambda: synthesizer(plain, "en"), "language 'en' is not one of the model's: as, bn"),
        (lambda: plain.chat_model("copy"), "copy cannot chat"),
        (
            lambda: forms.transcriber(choice(transcription={"*": "copy"}), speech_request({}, b"")),
            "copy cannot transcribe",
        ),
    ]:
        with pytest.raises(RequestError, match=message):
            call()


def test_direction_of_a_translation_is_chosen_by_rules_and_checkpoints() -> None:
    names = ("meltcore/sums", "x/indictrans2-en-indic", "x/indictrans2-indic-en")
    kinds = (LocalEngine, TranslationEngine, TranslationEngine)
    server = ServerStats([1, 1, 1])
    backends: list[Any] = [
        new_backend(kind, model(name), server, stats)
        for kind, name, stats in zip(kinds, names, server.models, strict=True)
    ]
    ready = TranslationReady(*ENGINE, 64, 4, 256, 32_000, 5, 256, "synthetic")
    for backend in backends[1:]:
        text = TranslationText(SyntheticTokenizer(32_000), True, backend.names[0].removeprefix("x/indictrans2-"))
        backend.open(text, ready, 0)
    for backend in backends:
        backend.health.set("ready", "ready")
    backends[0].check_ready = lambda: None

    def chosen(source: str, target: str, name: str | None = None, **fields: Any) -> tuple[str, str, str]:
        route = TranslateRoute(backend=fields.pop("backend", "indictrans2"))
        choice = ModelChoice(table(backends, LanguagesSection(**fields), RoutesSection(translate=route)))
        backend, request = translator(choice, TranslateRequest(["a"], source, target, name))
        return backend.names[0].removeprefix("x/indictrans2-"), request.src_lang, request.tgt_lang

    assert chosen("en", "kn") == ("en-indic", "en", "kn")
    assert chosen("Kannada", "eng_Latn")[0] == "indic-en"
    assert chosen("kn", "hi")[0] == "en-indic"  # whose error names its direction
    assert chosen("kn", "en", names[1])[0] == "en-indic"
    rules = (
        TranslationRule(source="kan_Knda", target="*", model="meltcore/sums"),
        TranslationRule(source="*", target="English", model=names[2]),
    )
    assert chosen("kn", "en", translation=rules)[0] == "meltcore/sums"
    assert chosen("hi", "en", translation=rules)[0] == "indic-en"
    both = {"German": ("eng_Latn",), "eng_Latn": ("hi",)}
    assert chosen("de", "hi", substitute=both) == ("en-indic", "eng_Latn", "hi")
    assert chosen("en", "hi", substitute=both) == ("en-indic", "en", "hi")
    assert chosen("en", "English", substitute=both) == ("en-indic", "en", "English")  # whose error says it
    assert chosen("de", "kn", substitute={"German": ("hi",)}) == ("en-indic", "de", "kn")
    assert chosen("en", "kn", backend="llm")[0] == "meltcore/sums"
    assert chosen("en", "kn", names[1], backend="llm")[0] == "en-indic"
    assert chosen("en", "kn", "meltcore/sums", backend="llm")[0] == "meltcore/sums"
    with pytest.raises(RequestError, match="meltcore/sums cannot translate"):
        chosen("en", "kn", "meltcore/sums")


def test_average_length_of_answers_is_what_one_without_a_limit_counts_as() -> None:
    requests: Any = open_requests(ServerStats([2]).models[0], lambda *_: None)
    before = requests.usual_output_tokens
    ticket = Mock(spec=GenerationTicket, children=[None], prompt_tokens=1, output_tokens=1000, exchange=Mock())
    assert requests.settle(ticket) == 1001
    ticket.exchange.charge.assert_called_once_with(1000)
    assert before < requests.usual_output_tokens < 1000


@pytest.mark.parametrize("kind", ["nothing sent", "events", "audio"])
def test_an_error_after_the_beginning_is_seen_by_the_client(kind: str) -> None:
    """A status before the first part, an event among events, and a broken connection within audio."""
    sent: list[Any] = []
    connection = SimpleNamespace(transport=SimpleNamespace(abort=lambda: sent.append("aborted")))

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        exchange = Exchange({"path": "/", "headers": [], "meltcore.connection": connection}, None, send)  # type: ignore[arg-type]
        if kind == "events":
            await exchange.event({"a": 1})
        elif kind == "audio":
            await exchange.stream(b"RIFF", b"audio/wav")
        await exchange.fail(RequestError("the engine has died", status=500))

    asyncio.run(scenario())
    if kind == "nothing sent":
        assert (sent[0]["status"], sent[1].get("more_body", False)) == (500, False)
    elif kind == "events":
        assert b"the engine has died" in sent[2]["body"]
        assert sent[3] == {"type": "http.response.body", "body": b""}
    else:
        assert (sent[1]["more_body"], sent[2:]) == (True, ["aborted"])


def test_speech_that_no_client_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops reading after the first part: its request ends, in the engine too, and memory is free."""
    monkeypatch.setattr(synthesis_engine, "_MAX_WAITING_BYTES", 30_000)
    server = ServerStats()
    server.models[0].task = "synthesis"
    backend = new_backend(SynthesisEngine, model("ai4bharat/IndicF5"), server, server.models[0], 30.0)
    sent: list[Any] = []
    request = SynthesisRequest("Hello.", None, None, "", "pcm", 1.0, 0, None, False, False, None, None, None)

    async def scenario() -> None:
        backend.open(None, SynthesisReady(*ENGINE, 9, ["a"], 24_000, 99, 0.5, 15, 0.5, 2, [32], "synthetic"), 0)
        backend.health.set("ready", "ready")
        is_sent, is_stuck, may_go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def send(message: Any, _replica: int) -> None:
            sent.append(message)
            is_sent.set()

        monkeypatch.setattr(backend, "_send", send)

        async def on_part(_part: Any) -> None:
            is_stuck.set()
            await may_go_on.wait()

        speaking = asyncio.create_task(backend.synthesize(request, on_part))
        await is_sent.wait()
        for chunk in range(1, 6):
            part = Synthesized(request_id=sent[0].request_id, samples=bytes(8000), chunk=chunk, chunks=9)
            backend.on_message(0, SynthesisOutputs([part], BatchStats(), time.monotonic()))
            if chunk == 1:
                await is_stuck.wait()
        assert backend._waiting_bytes == 24_000
        may_go_on.set()
        with pytest.raises(RequestError, match="the client reads too slowly: 24000 bytes of speech wait"):
            await speaking
        assert backend._waiting_bytes == 0
        assert sent[1:] == [AbortRequests([sent[0].request_id])]
        await backend.close_workers()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
