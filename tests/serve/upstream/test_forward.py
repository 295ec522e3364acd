"""What is read of requests and answers that pass through: the model of a form, and the encoding of a body."""

from __future__ import annotations

import asyncio
import gzip
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from server_harness import configure
from upstream_tools import CHAT, DONE, EVENT, Upstream, answer, chunk, sends, served

from meltcore.common.errors import RequestError
from meltcore.serve.requests.backend import LANGUAGE_PATHS, ModelTable
from meltcore.serve.requests.exchange import Exchange, set_exchange
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.forwarding import ForwardingEndpoint, read_request
from meltcore.serve.tasks.generation.upstream_chat import ask_upstream
from meltcore.serve.upstream.http_attempt import ForwardOutcome
from meltcore.serve.upstream.http_backend import HttpBackend

SPEECH = "/v1/audio/transcriptions"
TEXT = b'{"text":"x"}'


def form(*parts: tuple[str, bytes], boundary: str = "B", head: str = "") -> bytes:
    """A form of parts, each with its header and its data."""
    lines = [f"--{boundary}\r\n{head}Content-Disposition: {each}\r\n\r\n".encode() + data for each, data in parts]
    return b"\r\n".join([*lines, f"--{boundary}--\r\n".encode()])


FILE = ("form-data; name=file; filename=a.wav; filename*=utf-8''a.wav", b"RIFF\r\n\r\n--Bx\r\n--")
FORM = ("form-data; name=model", b"m")
OTHER = b"\r\nContent-Disposition: form-data; name=model\r\n\r\nother"
FORMS = {
    "token": form(FILE, ("form-data; name=model", b"m")),
    "quoted": form(('form-data; name="model"', b"m"), FILE),
    "other case and spaces": form(FILE, ('Form-Data ; NAME = "model"', b"m"), head="X-Other: name=model\r\n"),
    "parameters in another order": form(("form-data; charset=utf-8; name=model", b"m")),
    "file called model": form(('form-data; name="file"; filename="model"', b"RIFF"), ("form-data; name=model", b"m")),
    "file with a name inside": form(('form-data; filename="a; name=model"; name=file', b"no"), FORM),
    "names in data": form(("form-data; name=prompt", b'name="model"\r\n\r\nother\r\n--'), FORM),
    "longer line in data": form(("form-data; name=prompt", b"\r\n--Bx" + OTHER), FORM),
    "preamble": b"Some text\r\n" + form(FORM),
}
TYPES = ("multipart/form-data; boundary=B", 'Multipart/Form-Data; charset=utf-8; Boundary="B"')


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_model_of_a_form_is_read_as_our_own_models_read_it(body: bytes, content_type: str) -> None:
    fields = read_request(body, content_type)
    assert fields is not None
    assert fields.model == "m"
    if not body.startswith(b"Some"):  # which starlette's parser refuses
        pytest.importorskip("python_multipart", reason="the extra audio has it")
        from meltcore.serve.http.forms import read_multipart

        assert ("model", "m") in asyncio.run(read_multipart(body, content_type))


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(('form-data; name="file"; filename="model"', b"m")), None),
        (form(("form-data; name=models", b"m")), None),
        (form(("form-data; name*=utf-8''model", b"m")), None),
        (form(FORM, boundary="C"), None),
        (form(FORM).removesuffix(b"\r\n--B--\r\n"), None),  # cut off
        (b"--B\r\n\r\n--B\r\n--B--" * 40, None),
        (b'--B\r\nContent-Disposition: form-data; name="model' + b'";' * 5000 + b"\r\n\r\nm\r\n--B--", None),
        (form(("form-data; name=model", b"")), ""),
        (form(("form-data; name=model", "mödel".encode())), "mödel"),
    ],
)
def test_form_without_the_field_has_no_model(body: bytes, model: str | None) -> None:
    fields = read_request(body, TYPES[0])
    assert fields is not None
    assert fields.model == model


@pytest.mark.parametrize("name", ["token", "file called model", "names in data", "longer line in data"])
@pytest.mark.parametrize("content_type", TYPES)
def test_only_the_model_of_a_form_changes(name: str, content_type: str) -> None:
    async def check() -> None:
        upstream = Upstream(sends(_encoded(TEXT, "identity")))
        async with served(upstream, upstream_model="org/big", paths=(SPEECH,)) as server:
            headers = {"content-type": content_type}
            async with server.session.post(server.url + SPEECH, data=FORMS[name], headers=headers) as response:
                assert (response.status, await response.read()) == (200, TEXT)
        [received] = upstream.received
        at = FORMS[name].rindex(b"\r\n\r\nm\r\n--B") + 4
        assert received.body == FORMS[name][:at] + b"org/big" + FORMS[name][at + 1 :]
        assert received.headers["content-type"] == content_type

    uvloop.run(check())


@pytest.mark.parametrize(
    ("first", "body", "answered_by"),
    [
        ("own", b'{"model":"own","prompt":"w\\u0939"}', "own"),
        ("own", b'{"prompt":"a"}', "own"),
        ("own", b'{"model":"org/far"}', "org/far"),
        ("own", b'{"model":"org\\/far"}', "org/far"),
        ("own", b'{"m\\u006fdel":"\\u006frg/far"}', "org/far"),
        ("own", b'{"model":"own","prompt":"Who is org/far?"}', "own"),
        ("org/far", b'{"prompt":"a"}', "org/far"),
        ("org/far", b'{"model":"own"}', "own"),
    ],
)
def test_request_goes_to_the_model_that_it_names_or_to_the_default(first: str, body: bytes, answered_by: str) -> None:
    answers: list[str] = []

    class Far(HttpBackend):
        names, paths = ("org/far",), LANGUAGE_PATHS

        def __init__(self) -> None:
            self.health: Any = SimpleNamespace(status="ready")

        def check_ready(self) -> None: ...

        async def forward(self, *_request: Any) -> ForwardOutcome:
            answers.append("org/far")
            return ForwardOutcome(200, 0)

    class Own(Endpoint):
        async def respond(self, exchange: Exchange) -> None:
            assert await exchange.body(self.limit_bytes) == body
            answers.append("own")

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    ready = SimpleNamespace(status="ready")
    own: Any = SimpleNamespace(names=("own",), paths=LANGUAGE_PATHS, check_ready=lambda: None, health=ready)
    table = ModelTable([own, Far()] if first == "own" else [Far(), own])
    log: Any = SimpleNamespace(write=lambda _event, **_fields: None)
    config = configure().spec
    endpoint = ForwardingEndpoint(Own(table, config, log), table, config, log)
    scope: Any = {"type": "http", "path": "/v1/completions", "headers": []}
    set_exchange(Exchange(scope, receive, None))  # type: ignore[arg-type]
    asyncio.run(endpoint(scope, receive, None))  # type: ignore[arg-type]
    assert answers == [answered_by]


def _encoded(body: bytes, encoding: str, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Encoding: {encoding}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(("status", "encoding"), [("200 OK", "gzip"), ("400 Bad Request", "x-own"), ("200 OK", "br")])
def test_encoding_that_was_not_asked_for_is_named_to_the_client(status: str, encoding: str) -> None:
    data = gzip.compress(TEXT)

    async def check() -> None:
        upstream = Upstream(sends(_encoded(data, encoding, status=status)))
        async with served(upstream) as server:
            url, body = server.url + CHAT, {"model": "m"}
            async with server.session.post(url, json=body, auto_decompress=False) as response:
                assert (response.headers["content-encoding"], response.status) == (encoding, int(status[:3]))
                assert await response.read() == data
        assert upstream.received[0].headers["accept-encoding"] == "identity"

    uvloop.run(check())


@pytest.mark.parametrize("then", ["keep", "close"])
def test_encoded_stream_is_passed_on_as_it_comes(then: str) -> None:
    """With its encoding. One that breaks off ends without its last chunk, as no event can be added to it."""
    data = gzip.compress(EVENT + DONE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: GZip\r\n"
    parts = [head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(data[:9]), chunk(data[9:])]

    async def check() -> None:
        upstream = Upstream(sends(*parts, *[chunk(b"")] * (then == "keep"), then=then))
        async with served(upstream) as server:
            if then == "close":
                body = await server.broken_stream()
                assert data[:9] in body
                assert b"error" not in body
            else:
                url, fields = server.url + CHAT, {"model": "m", "stream": True}
                async with server.session.post(url, json=fields, auto_decompress=False) as response:
                    assert await response.read() == data
                    assert response.headers["content-encoding"] == "GZip"
                    assert response.headers["x-accel-buffering"] == "no"
            server.check_no_leak()

    uvloop.run(check())


@pytest.mark.parametrize(("status", "encoding"), [("200 OK", "gzip"), ("500 No", "br")])
def test_encoded_answer_that_the_server_reads_itself_is_502_and_named(status: str, encoding: str) -> None:
    async def check() -> None:
        upstream = Upstream(sends(_encoded(gzip.compress(TEXT), encoding, status=status)))
        async with served(upstream) as server:
            with pytest.raises(RequestError, match=f"m answered with Content-Encoding '{encoding}'") as caught:
                await ask_upstream(server.backend, {"model": "m"})
            assert (caught.value.status, caught.value.code) == (502, "upstream_failed")
            for begin in (b'{"choices":' + b"[" * 3000, b'{"a":' * 3000):  # deeper than any JSON is read
                upstream.behave = sends(answer(begin))
                with pytest.raises(RequestError, match="something that is no chat completion") as caught:
                    await ask_upstream(server.backend, {"model": "m"})
                assert (caught.value.status, caught.value.code) == (502, "upstream_failed")

    uvloop.run(check())
