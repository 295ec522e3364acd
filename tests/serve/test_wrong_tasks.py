"""Models of every task, own and upstream, on every route that is for another task: each refuses in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from open_tickets import new_backend
from waiting import WAIT_S

pytest.importorskip("sentencepiece", reason="the extra `translate` is not installed: make .venv/.installed")
pytest.importorskip("soundfile", reason="the extra audio has soundfile")

from server_harness import configure

from meltcore.protocol.translation import TranslationReady
from meltcore.serve.dialects.vision import PATHS as VISION_PATHS
from meltcore.serve.requests.backend import ModelTable
from meltcore.serve.requests.keys import ApiKeys
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.routes import build_app
from meltcore.serve.tasks.embedding.backend import EmbeddingBackend
from meltcore.serve.tasks.forwarding import UPSTREAM_PATHS, read_request
from meltcore.serve.tasks.generation.local_engine import LocalEngine
from meltcore.serve.tasks.synthesis.synthesis_engine import SynthesisEngine
from meltcore.serve.tasks.transcription.transcription_engine import TranscriptionEngine
from meltcore.serve.tasks.translation.translation_engine import TranslationEngine
from meltcore.serve.tasks.translation.translations import TranslationText
from meltcore.serve.upstream.http_backend import HttpBackend
from meltcore.settings.fleet_spec import LimitsSection, ModelSection, TimeoutsSection
from meltcore.text.translation.tokenizer import SyntheticTokenizer

ENGINES: dict[str, Any] = {
    "generation": LocalEngine,
    "translation": TranslationEngine,
    "transcription": TranscriptionEngine,
    "synthesis": SynthesisEngine,
    "embedding": EmbeddingBackend,
}
UPSTREAM = [f"far-{task}" for task in ENGINES]
URL = "http://127.0.0.1:1"
CHAT = {"prompt": "a", "src_lang": "en", "tgt_lang": "kn"}
TRANSLATE = {"sentences": ["a"], "src_lang": "en", "tgt_lang": "kn"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
UPLOAD = {"file": "RIFF"}
# A request for each route whose requests name a model, and the models that may answer it.
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, ("generation", "far-generation")),
    "/v1/completions": ({"prompt": "a"}, ("generation", "far-generation")),
    "/tokenize": ({"prompt": "a"}, ("generation",)),
    "/detokenize": ({"tokens": [1]}, ("generation",)),
    "/v1/indic_chat": (CHAT, ("generation", "far-generation")),
    "/v1/chat_direct": ({"prompt": "a"}, ("generation", "far-generation")),
    "/v1/speech_to_speech": (UPLOAD | {"language": "kn"}, ("generation", "far-generation")),
    "/v1/speech_to_speech/": (UPLOAD | {"language": "kn"}, ("generation", "far-generation")),
    "/v1/translate": (TRANSLATE, ("translation", "far-translation")),
    "/translate": (TRANSLATE, ("translation",)),
    "/v1/audio/speech": ({"input": "a"}, ("synthesis", "far-synthesis")),
    "/audio/speech": ({"input": "a"}, ("synthesis",)),
    "/v1/audio/speech_batch": ({"input": ["a"]}, ("synthesis",)),
    "/audio/speech_batch": ({"input": ["a"]}, ("synthesis",)),
    "/v1/audio/transcriptions": (UPLOAD, ("transcription", "far-transcription")),
    **{f"{base}{end}": (UPLOAD, ("transcription",)) for base in ("/v1/transcribe", "/transcribe") for end in ("", "/")},
    **{
        f"{base}{end}": ({"files": "RIFF"}, ("transcription",))
        for base in ("/v1/transcribe_batch", "/transcribe_batch")
        for end in ("", "/")
    },
    "/v1/embeddings": ({"input": "a"}, ("embedding", "far-embedding")),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"), ({"query": "a", "documents": ["b"]}, ("embedding", "far-embedding"))
    ),
    **dict.fromkeys(("/v1/score", "/score"), ({"text_1": "a", "text_2": "b"}, ("embedding", "far-embedding"))),
    **dict.fromkeys(UPSTREAM_PATHS, ({"input": "a"}, ())),
    "/v1/responses": ({"input": "a"}, ("generation",)),
    "/v1/responses/input_tokens": ({"input": "a"}, ("generation", "far-generation")),
    "/v1/messages": (MESSAGES | {"max_tokens": 1}, ("generation",)),
    "/v1/messages/count_tokens": (MESSAGES, ("generation", "far-generation")),
}
OWN_ROUTE = {
    "generation": "/v1/chat/completions",
    "translation": "/v1/translate",
    "transcription": "/v1/audio/transcriptions",
    "synthesis": "/v1/audio/speech",
    "embedding": "/v1/embeddings",
}
NAMELESS = {"/v1/chat", *VISION_PATHS}


def build() -> Any:
    """The application over real backends whose engines never answer."""
    server = ServerStats([1] * (len(ENGINES) + len(UPSTREAM)))
    stats = iter(server.models)
    backends: list[Any] = [
        new_backend(kind, ModelSection(checkpoint=task), server, next(stats)) for task, kind in ENGINES.items()
    ]
    ready = TranslationReady(*("CPU", "float32", "dummy", [], 0.0), 64, 4, 256, 32_000, 5, 256, "synthetic")
    backends[1].open(TranslationText(SyntheticTokenizer(32_000), True, "en-indic"), ready, 0)
    for backend in backends:
        backend.health.set("ready", "ready")
        backend.check_ready = lambda: None
    for backend in backends[2:]:
        backend._ready = SimpleNamespace(languages=["kn"])
    backends += [
        HttpBackend(
            name,
            ModelSection(url=URL, task=name.removeprefix("far-")),
            (URL,),
            next(stats),
            limits=LimitsSection(),
            timeouts=TimeoutsSection(request_s=1.0),
        )
        for name in UPSTREAM
    ]
    for backend in backends[len(ENGINES) :]:
        backend.check_ready = lambda: None
    log: Any = SimpleNamespace(write=lambda event, **fields: None)
    config = configure({"m": backends[0].config}, port=0).spec
    return build_app(ModelTable(backends), config, Metrics(server, dict), log, ApiKeys((), server))


def encoded(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """A body, and its content type: a form where the fields have a file."""
    if not {"file", "files"} & set(fields):
        return json.dumps(fields).encode(), b"application/json"
    parts = []
    for name, value in fields.items():
        file_name = '; filename="a.wav"' if name in ("file", "files") else ""
        parts.append(f'--b\r\ncontent-disposition: form-data; name="{name}"{file_name}\r\n\r\n{value}\r\n')
    return "".join([*parts, "--b--\r\n"]).encode(), b"multipart/form-data; boundary=b"


async def ask(app: Any, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer."""
    body, content_type = encoded(fields)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    connection = SimpleNamespace(set_disconnect_callback=lambda _callback: None)
    scope |= {"headers": [(b"content-type", content_type)], "meltcore.connection": connection}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


def test_all_routes_that_take_a_request_are_known_here() -> None:
    routes = {route.path for route in build()._app._app.routes if "POST" in route.methods}
    assert routes == set(ROUTES) | NAMELESS


@pytest.mark.parametrize("model", [*ENGINES, *UPSTREAM])
def test_model_of_another_task_is_refused_in_words(model: str) -> None:
    async def scenario() -> dict[str, tuple[int, dict[str, Any]]]:
        app = build()
        wrong = {path: fields for path, (fields, models) in ROUTES.items() if model not in models}
        return {path: await ask(app, path, fields | {"model": model}) for path, fields in wrong.items()}

    found = asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
    assert len(found) >= len(ROUTES) - 12
    for path, (status, answer) in found.items():
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}, path
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "model"), (path, answer)
        assert model in error["message"], path
        assert OWN_ROUTE[model.removeprefix("far-")] in error["message"], (path, error["message"])
        assert answer.get("detail", error["message"]) == error["message"]
        assert answer.get("type") == ("error" if path.startswith("/v1/messages") else None)


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 200_000, b'{"model": "\xff"}', b"", b"5"])
def test_body_that_is_no_object_names_no_model(body: bytes) -> None:
    assert read_request(body, "application/json") is None
