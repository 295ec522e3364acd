"""Serves /openapi.json, and Swagger UI at /docs. The files of Swagger UI come from a Python package, not from a CDN."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
from pathlib import Path

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore.serve.http.page import page_headers
from meltcore.serve.http.paths import SWAGGER_PATHS
from meltcore.serve.openapi import document
from meltcore.serve.requests.asgi import send_bytes
from meltcore.serve.requests.request_fields import header

PACKAGE = "flask_swagger_ui"  # for the files that it ships; it is never imported, and so neither is Flask
_CONTENT_TYPES = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8"}
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Meltcore API</title>
<link rel="icon" href="data:,">
"""
# The style is for narrow windows, in which Swagger UI lets long paths and schemas push the page wider than the window.
_PAGE = f"""{_HEAD}<link rel="stylesheet" href="docs/swagger-ui.css">
<style>
body {{ margin: 0; }}
@media (max-width: 640px) {{
  .swagger-ui .wrapper, .swagger-ui .opblock .opblock-section-header {{ padding: 0 10px; }}
  .swagger-ui .opblock .opblock-summary-path {{ max-width: 100%; flex-shrink: 1; }}
  .swagger-ui .opblock .opblock-summary-description {{ flex: 1 1 100%; }}
  .swagger-ui .opblock .opblock-summary .opblock-summary-path-description-wrapper {{ flex-wrap: wrap; min-width: 0; }}
  .swagger-ui table, .swagger-ui .model-box, .swagger-ui .scheme-container {{ max-width: 100%; overflow-x: auto; }}
  .swagger-ui table.parameters tr, .swagger-ui table.responses-table tr {{ display: flex; flex-wrap: wrap; }}
}}
</style>
</head>
<body>
<div id="operations"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
  url: "openapi.json", dom_id: "#operations", deepLinking: true, displayRequestDuration: true,
  defaultModelsExpandDepth: 0, validatorUrl: null,
}});
</script>
</body>
</html>
"""
_WITHOUT_PACKAGE = f"""{_HEAD}</head>
<body>
<h1>Meltcore API</h1>
<p>Swagger UI is not installed: <code>pip install 'meltcore[swagger]'</code> shows it here after a restart.</p>
<p>The description of the API as OpenAPI: <a href="openapi.json">openapi.json</a></p>
</body>
</html>
"""


def _swagger_folder() -> Path | None:
    """Return the folder with Swagger UI's files, or None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).with_name("dist")
    return (
        folder if folder is not None and all((folder / Path(path).name).is_file() for path in SWAGGER_PATHS) else None
    )


def _read(file: Path) -> tuple[bytes, bytes]:
    """Return the contents of a file, and the ETag of these contents."""
    body = file.read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()


class ApiDocs:
    """Serves the routes of the API description as a raw ASGI application.

    The routes need no API key, because the description contains nothing of a user or of a model.
    """

    def __init__(self) -> None:
        self._folder = folder = _swagger_folder()
        self._contents: dict[str, tuple[bytes, bytes]] = {}  # of files that were asked for, with their ETags
        page = _WITHOUT_PACKAGE if folder is None else _PAGE
        headers = page_headers(page, scripts="'self'", styles="'self'")
        self._answers = {
            "/docs": (page.encode(), b"text/html; charset=utf-8", headers),
            "/openapi.json": (
                msgspec.json.encode(document()),
                b"application/json",
                [(b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")],
            ),
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the page, the description, or a file of Swagger UI."""
        path = scope["path"]
        if path in self._answers:
            body, content_type, headers = self._answers[path]
            await send_bytes(send, body, content_type, headers=headers)
        elif self._folder is None:
            await send_bytes(send, b"Swagger UI is not installed\n", b"text/plain; charset=utf-8", status=404)
        else:
            name, content_type = Path(path).name, _CONTENT_TYPES[Path(path).suffix]
            if name not in self._contents:
                self._contents[name] = await asyncio.to_thread(_read, self._folder / name)
            body, etag = self._contents[name]
            headers = [(b"etag", etag), (b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")]
            if header(scope, b"if-none-match") == etag:
                await send({"type": "http.response.start", "status": 304, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
            else:
                await send_bytes(send, body, content_type, headers=headers)
