"""Reads multipart/form-data in memory: no temporary file is written, and the body's limit bounds its size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from meltcore.api.http import join_pieces
from meltcore.errors import RequestError

# Parsed or copied before other connections get their turn: 25 MB together would stop the event loop for 40 ms.
_PIECE_BYTES = 2**16
_MAX_FIELD_BYTES = 64 * 1024
_MAX_FIELDS = 32


class _InMemoryParser(MultiPartParser):
    spool_max_size = 2**62


def is_multipart(content_type: str | None) -> bool:
    """Return whether a body of this content type is a form with files."""
    return content_type is not None and content_type.lower().startswith("multipart/form-data")


async def read_multipart(body: bytes, content_type: str, max_files: int = 1) -> list[tuple[str, str | bytes]]:
    """Return the fields in their order, a file as bytes. Raises RequestError (400) for another body."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE_BYTES):
            yield body[start : start + _PIECE_BYTES]
            await asyncio.sleep(0)

    headers = Headers({"content-type": content_type})
    limits: dict[str, Any] = {"max_files": max_files, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
    parser = _InMemoryParser(headers, chunks(), **limits)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise RequestError(f"the body is not valid multipart/form-data: {reason}") from error
    return [
        (name, await _read(value) if isinstance(value, UploadFile) else value) for name, value in form.multi_items()
    ]


async def _read(file: UploadFile) -> bytes:
    pieces = []
    while piece := await file.read(_PIECE_BYTES):
        pieces.append(piece)
        await asyncio.sleep(0)
    return await join_pieces(pieces)
