"""Serves GET /, a page on which people try the server's models. The page is one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.types import Receive, Scope, Send

from meltcore.serve.requests.asgi import Headers, send_bytes

_FILE = Path(__file__).with_name("page.html")
_INLINE_CODE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class ChatPage:
    """Serves the page as a raw ASGI application.

    It needs no API key, because it contains nothing of a user or of a model.
    """

    def __init__(self) -> None:
        self._body = _FILE.read_bytes()
        self._headers = page_headers(self._body.decode())

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the page."""
        await send_bytes(send, self._body, b"text/html; charset=utf-8", headers=self._headers)


def page_headers(page: str, *, scripts: str = "", styles: str = "") -> Headers:
    """Return headers that let a browser run only the page's own script, and connect only to this server.

    `scripts` and `styles` are additional sources that the policy allows.
    """
    sources = {"script": scripts, "style": styles}
    for kind, content in _INLINE_CODE.findall(page):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[kind] = f"{sources[kind]} 'sha256-{digest}'".strip()
    policy = {
        "default-src": "'none'",
        "script-src": sources["script"],
        "style-src": sources["style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "media-src": "blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return [
        (b"content-security-policy", "; ".join(f"{name} {value}" for name, value in policy.items()).encode()),
        (b"permissions-policy", b"microphone=(self), camera=(), geolocation=()"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-cache"),
    ]
