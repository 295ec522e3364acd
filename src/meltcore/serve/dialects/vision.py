"""dwani.ai's routes for images and PDF files, which need a vision model. Each route answers 501."""

from __future__ import annotations

from meltcore.common.errors import RequestError
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.requests.asgi import discard_body
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.endpoint import Endpoint

_NAMES = (
    "visual_query_direct",
    "indic_visual_query",
    "ocr",
    *("extract-text", "extract-text-all", "extract-text-all-chunk", "indic-extract-text", "indic-extract-text-all"),
    *("summarize-pdf", "indic-summarize-pdf", "indic-summarize-pdf-all"),
    *("custom-prompt-pdf", "indic-custom-prompt-pdf", "indic-custom-prompt-pdf-all", "indic-custom-prompt-kannada-pdf"),
)
PATHS = ("/app-extract-text", *(f"/v1/{name}{slash}" for name in _NAMES for slash in ("", "/")))


class VisionEndpoint(Endpoint):
    """Refuses every request, but only after its body has arrived.

    A client that is still sending would not read the answer.
    """

    paths = dwani_paths = PATHS
    operations = tuple(
        Operation("post", path, "Refused: images and PDF files need a vision model", answer="", tag=DWANI)
        for path in PATHS
        if not path.endswith("/")
    )

    async def respond(self, exchange: Exchange) -> None:
        """Raise RequestError (501), because no model of this server reads images."""
        await discard_body(exchange.scope, exchange.receive)
        raise RequestError(
            f"{exchange.scope['path']} needs a vision model, which Meltcore does not serve: images and PDF files are "
            "not supported",
            status=501,
            code="not_implemented",
        )
