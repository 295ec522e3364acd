"""Forms of a request on which servers differ: what is accepted, what is refused, and that every error has an id."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from server_harness import MODEL, RunningServer, chat_body, scripted_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(api_server_count=1) as running:
        yield running
        running.check_no_leak()
        assert "Traceback" not in running.stderr


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2.0}', "ab"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2e0, "top_k": -1.0, "seed": 16.0}', "ab"),
        (b'{"model": "scripted", "prompt": [97.0, 98], "max_tokens": 2}', "ab"),
        (b'{"model": "scripted", "prompt": [[97, 98.0]], "max_tokens": 2, "stop_token_ids": [5.0]}', "ab"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2.0, "n": 1.0, "temperature": 0}', "ab"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2, "n": 1.0, "best_of": 1e0}', "ab"),
        (b'\xef\xbb\xbf{"model": "scripted", "prompt": "ab", "max_tokens": 2}', "ab"),
        (b'{"model": "other", "model": "scripted", "prompt": "no", "prompt": "ab", "max_tokens": 2}', "ab"),
        (b'{"prompt": "ab", "max_tokens": 2}', "ab"),
        (b'{"model": null, "prompt": "ab", "max_tokens": 2, "stop": null, "stream_options": null}', "ab"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2, "stop": [], "logprobs": null}', "ab"),
        (b'{"model": "scripted", "prompt": "\\ud83d\\ude00", "max_tokens": 4}', "\U0001f600"),
        (b' \r\n\t{"model": "scripted", "prompt": "ab", "max_tokens": 2}\n', "ab"),
    ],
    ids=lambda value: value[:80].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_forms_of_a_body_that_are_accepted(server: RunningServer, body: bytes, text: str) -> None:
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == text
    assert answer.json["model"] == MODEL


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "the body is empty"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2.5}', "max_tokens", "got `float`"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 1e300}', "max_tokens", "at most"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": Infinity}', None, "not valid JSON"),
        (b'{"model": "scripted", "prompt": "ab", "top_p": NaN}', None, "not valid JSON"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": 2.0, "top_p": "x"}', "top_p", "got `str`"),
        (b'{"model": "scripted", "prompt": [1.5], "max_tokens": 2}', "prompt[0]", "got `float`"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": "16"}', "max_tokens", "got `str`"),
        (b'{"model": "scripted", "prompt": "ab", "max_tokens": true}', "max_tokens", "got `bool`"),
        (b'{"model": "scripted", "prompt": "ab", "logprobs": true}', "logprobs", "got `bool`"),
        (b'{"model": "scripted", "prompt": "ab\\udc00"}', None, "invalid utf-16 surrogate pair"),
        (b'{"model": "scripted", "prompt": "ab\\ud83d"}', None, "not valid JSON: \\ud83d is half of a surrogate pair"),
        (b'{"prompt": "ab", "model": "\\\\\\uDBFF."\n}', None, "not valid JSON: \\uDBFF is half of a surrogate pair"),
        (b'{"model": "scripted", "prompt": "ab\\ud83d\\ude', None, "not valid JSON: Input data was truncated"),
        (b'{"model": "scripted", "prompt": "ab\\ud83d', None, "not valid JSON: Input data was truncated"),
        (b'{"model": "scripted", "prompt": "ab\\\\ud83d"', None, "not valid JSON: Input data was truncated"),
        ('{"model": "scripted", "prompt": "ab"}'.encode("utf-16"), None, "not valid JSON"),
        (b'{"model": "scripted", "prompt": "ab"} {}', None, "not valid JSON"),
        (b'{"model": "scripted", "prompt": "ab",}', None, "not valid JSON"),
        (b"{'model': 'scripted'}", None, "not valid JSON"),
        (b'{"model": "scripted", "prompt": ' + b"[" * 5000 + b"1.0" + b"]" * 5000 + b"}", "prompt[0][0]", "array"),
        (b'{"model": "scripted", "prompt": [1.0, ' + b"[" * 5000 + b"]" * 5000 + b"]}", None, "nested too deeply"),
    ],
    ids=lambda value: value[:80].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_forms_of_a_body_that_are_refused(server: RunningServer, body: bytes, param: str | None, message: str) -> None:
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert message in answer.error["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "text/plain", "application/x-foo", ""])
def test_content_type_of_a_json_body_is_not_looked_at(server: RunningServer, content_type: str) -> None:
    assert server.post(CHAT, chat_body("ab", max_tokens=1), {"content-type": content_type}).status == 200


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("", 200)])
def test_compressed_body_is_refused_by_name(server: RunningServer, coding: str, status: int) -> None:
    answer = server.post(CHAT, chat_body("ab", max_tokens=1), {"content-encoding": coding})
    assert answer.status == status
    assert status == 200 or repr(coding) in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/v1/responses", 400),
        ("POST", "/v1/audio/translations", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", CHAT, 400),
        ("POST", "/tokenize", 400),
    ],
)
@pytest.mark.parametrize("sent", ["", "id-7", "not an id"])
def test_every_error_has_a_request_id(server: RunningServer, method: str, path: str, status: int, sent: str) -> None:
    answer = server.request(method, path, b"{", {"x-request-id": sent} if sent else {})
    assert answer.status == status
    assert set(answer.error) == {"message", "type", "param", "code"}
    identity = answer.headers["x-request-id"]
    assert identity == sent if sent == "id-7" else len(identity) == 32


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", CHAT + "/", 307), ("GET", "/tokenize/", 307), ("GET", "/", 200)]
)
def test_redirects_and_pages_have_a_request_id(server: RunningServer, method: str, path: str, status: int) -> None:
    answer = server.request(method, path, b"{}" if method == "POST" else None, {"x-request-id": "id-7"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "id-7")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models?limit=1&x", 200),
        ("/v1/models/", 200),
        ("/%76%31/models", 200),
        ("/v1%2Fmodels", 200),
        ("/v1/models/scripted", 200),
        ("/v1/models/%73cripted", 200),
        ("/health/", 307),
        ("//v1/models", 404),
        ("/v1/./models", 404),
        ("/v1/Models", 404),
        ("http://localhost/v1/models", 200),
    ],
)
def test_forms_of_a_path(server: RunningServer, path: str, status: int) -> None:
    assert server.request("GET", path).status == status


def test_large_announced_body_is_refused_before_it_is_sent(server: RunningServer) -> None:
    with closing(server.connect()) as connection:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("content-length", str(10**10))
        connection.putheader("expect", "100-continue")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"
        assert answer.getheader("connection") == "close"


def test_parts_of_a_text_are_lines(server: RunningServer) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in ("one", "", "two\n", "three")]
    whole = server.post("/tokenize", {"messages": [{"role": "user", "content": "one\n\ntwo\n\nthree"}]}).json
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json == whole
    alone = server.post("/tokenize", {"messages": [{"role": "user", "content": parts[:1]}]}).json
    assert alone == server.post("/tokenize", {"messages": [{"role": "user", "content": "one"}]}).json
