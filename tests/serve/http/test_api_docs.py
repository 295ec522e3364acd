"""/openapi.json and Swagger UI at /docs: valid references, files from the package, and both in headless Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser
from server_harness import scripted_server

from meltcore.serve import docs
from meltcore.serve.docs import ApiDocs
from meltcore.serve.http.paths import OPEN_PATHS
from meltcore.serve.openapi import document

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
needs_package = pytest.mark.skipif(docs._swagger_folder() is None, reason="the extra swagger is not installed")


def test_document_is_complete_openapi() -> None:
    described = json.loads(json.dumps(document()))
    assert described["openapi"].startswith("3.1")
    tags = {tag["name"] for tag in described["tags"]}
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(described)):
        found: Any = described
        for part in reference.split("/"):
            found = found[part]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["responses"], where
            assert set(operation["tags"]) <= tags, where
            named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path)), where
            assert (operation.get("security") == []) == (path in OPEN_PATHS), where
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                schema = described["components"]["schemas"].get(name, content["schema"])
                assert set(content.get("example", ())) <= set(schema["properties"]), where
                if "example" in content:
                    assert set(schema.get("required", ())) <= set(content["example"]), where
    streamed = {
        path
        for path, methods in described["paths"].items()
        for method in methods.values()
        if "text/event-stream" in method["responses"].get("200", {}).get("content", {})
    }
    assert streamed == {f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses",
                                                   "audio/transcriptions")}  # fmt: skip
    schemes = described["components"]["securitySchemes"]
    assert (schemes["bearer"]["scheme"], schemes["x_api_key"]["name"]) == ("bearer", "X-API-Key")


def test_without_the_package_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "PACKAGE", "no_such_package")
    body, content_type, _ = ApiDocs()._answers["/docs"]
    assert b"Swagger UI is not installed" in body
    assert b'href="openapi.json"' in body
    assert content_type == b"text/html; charset=utf-8"


@needs_package
def test_files_of_swagger_ui_are_served_and_cached() -> None:
    with scripted_server(api_key="secret") as server:  # none of these needs a key
        page = server.request("GET", "/docs")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self' 'sha256-" in policy
        assert "unsafe" not in policy
        assert not re.search(rb"https?://", page.body)
        for path, content_type in (("swagger-ui.css", "text/css"), ("swagger-ui-bundle.js", "text/javascript")):
            answer = server.request("GET", f"/docs/{path}")
            assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, content_type)
            again = server.request("GET", f"/docs/{path}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            assert server.request("HEAD", f"/docs/{path}").headers["content-length"] == str(len(answer.body))
        for path in ("index.html", "../__init__.py", "..%2f__init__.py", "swagger-ui.css/"):
            assert server.request("GET", f"/docs/{path}").status in (307, 401, 404)


@needs_chromium
@needs_package
@pytest.mark.slow
def test_operations_are_shown_and_sent_with_a_key(tmp_path: Path) -> None:
    with scripted_server(api_key="secret") as server, browser(tmp_path) as tab:
        for width in (1200, 400):
            tab.open(f"{server.url}/docs", width)
            tab.wait("document.querySelectorAll('.opblock').length > 20")
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth"), width
        assert tab.problems == []
        tab.run("document.querySelector('.authorize').click()")
        assert tab.wait("document.querySelector('.modal-ux')?.textContent.includes('X-API-Key')")
        fill = (
            "field => {Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, 'secret');"
        )
        fill += " field.dispatchEvent(new Event('input', {bubbles: true})); }"
        tab.run(f"({fill})(document.querySelector('.modal-ux input'))")
        tab.run("document.querySelector('.modal-ux .authorize').click()")
        tab.run("document.querySelector('.modal-ux .close-modal').click()")
        tab.run("document.querySelector('[data-path=\"/v1/models\"]').click()")
        for button in (".try-out__btn", ".execute"):
            tab.wait(f"!!document.querySelector('{button}')")
            tab.run(f"document.querySelector('{button}').click()")
        tab.wait("document.querySelector('.live-responses-table')?.textContent.includes('\"id\": \"scripted\"')")
        tab.run("document.querySelector('[data-path=\"/v1/audio/transcriptions\"]').click()")
        tab.wait("document.querySelectorAll('.try-out__btn').length === 2")
        tab.run("document.querySelectorAll('.try-out__btn')[0].click()")
        tab.wait("!!document.querySelector('input[type=file]')")
        assert tab.problems == []
