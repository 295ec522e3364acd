"""dwani.ai's chats, translation by a language model, and refused routes: a server whose model repeats its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dwani
import pytest
from server_harness import RunningServer, configure, running, scripted_server, serve_command
from waiting import wait_until

from meltcore.common.errors import ConfigError
from meltcore.serve.dialects.vision import PATHS as VISION_PATHS
from meltcore.settings.fleet_file import parse_fleet
from meltcore.settings.fleet_spec import ModelSection
from meltcore.settings.routes_section import ChatRoute, RoutesSection, TranslateRoute

TRANSLATE = TranslateRoute(backend="llm", prompt="{source} to {target}:", stop=("|",))
ROUTES = RoutesSection(translate=TRANSLATE, chat=ChatRoute(prompt="In {language}:", model="gemma3"))
UPSTREAM_ROUTES = RoutesSection(translate=TRANSLATE, chat=ChatRoute(prompt="In {language}:", model="far"))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ("--tokens-per-step", "64")
    with scripted_server(*options, names=("gemma3", "qwen3"), routes=ROUTES) as running_server:
        yield running_server
        running_server.check_no_leak()


@pytest.fixture
def client(server: RunningServer) -> Any:
    return dwani.DwaniClient("none", server.url)


def test_dwani_client_chats(client: Any, server: RunningServer) -> None:
    # The template joins the messages; the model repeats them until the limit of an answer.
    answer = client.chat("hello. ", "english", "Kannada")["response"]
    assert answer.startswith("In Kannada:hello. In Kannada:hello. ")
    assert 2000 < len(answer) < 3500
    assert client.chat_direct("hi ", "qwen3", "Be brief: ")["response"].startswith("Be brief: hi Be brief: hi ")
    assert client.chat_direct("hi ")["response"].startswith("hi hi hi")
    reply = server.post("/v1/chat", {"text": "hey "}).json
    assert (reply["user"], reply["reply"][:8]) == ("hey ", "hey hey ")


def test_dwani_client_translates_with_a_language_model(client: Any) -> None:
    # "|" ends an answer: each text is asked for by itself, and has its own translation.
    found = client.translate(["one|", "", "two, |", "\u200b", "\ufeff \u0301"], "Kannada", "German")
    assert found["translations"] == ["Kannada to German:one", "", "Kannada to German:two,", "\u200b", "\ufeff \u0301"]
    assert found["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("indic_chat", {"prompt": "a", "src_lang": "en", "tgt_lang": "tlh"}, 400, "tgt_lang 'tlh' is not a known"),
        ("indic_chat", {"prompt": " ", "src_lang": "en", "tgt_lang": "kn"}, 400, "prompt is empty"),
        ("indic_chat", {"prompt": "a", "src_lang": "en"}, 400, "tgt_lang: this field is required"),
        ("indic_chat", {"prompt": "a", "src_lang": "en", "tgt_lang": "kn", "model": "x"}, 404, "there is no model 'x'"),
        ("chat_direct", {"prompt": "a" * 10_001}, 400, "prompt has 10,001 characters; the limit is 10,000"),
        ("chat_direct", {"prompt": "a", "wings": 2}, 400, "wings"),
        ("chat", {"text": "a" * 4_001}, 400, "text has 4,001 characters; the limit is 4,000"),
        ("chat", {"text": "a", "mode": "agent"}, 501, "mode agent is not supported"),
        ("chat", {"text": "a", "mode": "duel"}, 400, "known are llm, agent"),
        ("translate", {"sentences": ["a"], "src_lang": "en", "tgt_lang": "English"}, 400, "both English"),
    ],
)
def test_bad_request_is_named_in_both_forms(
    server: RunningServer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = server.post(f"/v1/{path}", body)
    assert (answer.status, message in answer.json["detail"]) == (status, True), answer.body
    assert answer.json["detail"] == answer.error["message"]


def test_speech_is_refused_without_its_models(server: RunningServer, client: Any) -> None:
    with pytest.raises(dwani.DwaniAPIError, match="gemma3 cannot synthesize speech"):
        client.speech("hello")
    assert server.post("/v1/audio/speech_batch", {"input": ["a"]}).status == 400


def test_routes_of_images_and_documents_say_that_they_are_not_supported(
    server: RunningServer, client: Any, tmp_path: Path
) -> None:
    image, document = tmp_path / "a.png", tmp_path / "a.pdf"
    image.write_bytes(bytes(3 * 2**20))  # the client reads the answer although it sends more than is looked at
    document.write_bytes(b"%PDF")
    for call in (client.caption, client.ocr_image, client.caption_direct):
        with pytest.raises(dwani.DwaniAPIError, match="needs a vision model") as caught:
            call(str(image))
        assert caught.value.status_code == 501
    assert "not supported" in caught.value.response.json()["detail"]
    for path in VISION_PATHS:
        assert server.request("POST", path, b"x").status == 501
    with pytest.raises(Exception, match="501"):
        client.document_ocr_all(str(document))


def test_routes_name_models_of_the_server_and_fields_of_prompts() -> None:
    model = "models: {scripted: {checkpoint: m}}\n"
    for fields, message in [
        (
            "routes: {translate: {backend: llm, model: scripted, prompt: '{text}'}}",
            "got .* may hold .source. and .target.",
        ),
        ("routes: {chat: {prompt: '{'}}", "routes.chat.prompt: got .* may hold .language."),
        ("routes: {translate: {backend: llm, model: x}}", "routes.translate.model: got 'x'; no model has this name"),
        ("routes: {chat: {model: far}}", "routes.chat.model: got 'far'; no model has this name; models are scripted"),
        ("languages: {synthesis: {kan_Knda: x}}", "languages.synthesis.kan_Knda: got 'x'; no model has this name"),
        (
            "languages: {translation: [{source: '*', target: kan_Knda, model: x}]}",
            r"languages.translation\[0\].model: got 'x'; no model has this name; models are scripted",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_fleet(model + fields)
    parse_fleet(model + "routes: {translate: {backend: llm, model: scripted}}")


@pytest.mark.slow
def test_an_upstream_language_model_is_asked_over_http(server: RunningServer, tmp_path: Path) -> None:
    models = {
        "far": ModelSection(url=server.url, upstream_model="gemma3"),
        "dead": ModelSection(url="http://127.0.0.1:1"),
    }
    config = configure(models, port=0, api_server_count=1, routes=UPSTREAM_ROUTES)
    with running(serve_command(config), tmp_path / "stderr") as near:
        wait_until(lambda: near.post("/v1/chat/completions", {"model": "far"}).status == 400, "the upstream's answer")
        found = near.post("/v1/translate", {"sentences": ["one|", "two|"], "src_lang": "kn", "tgt_lang": "de"})
        assert found.json["translations"] == ["Kannada to German:one", "Kannada to German:two"]
        assert found.json["usage"]["completion_tokens"] > 0
        reply = near.post("/v1/chat_direct", {"prompt": "hi ", "model": "far"}).json["response"]
        assert reply.startswith("hi hi hi ")
        refused = near.post("/v1/chat_direct", {"prompt": "boom", "model": "far"})
        assert (refused.status, "far answered with status 400" in refused.json["detail"]) == (400, True)
        assert "no booms" in refused.json["detail"]
        assert near.post("/v1/chat_direct", {"prompt": "hi", "model": "dead"}).status in (502, 503)
        wait_until(lambda: near.metrics()["requests_in_flight"] == 0, "nothing in flight")
    server.check_no_leak()
