"""Reads multipart/form-data in memory: no temporary file is written, and the body's limit bounds its size."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from meltcore.errors import RequestError

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
        yield body

    headers = Headers({"content-type": content_type})
    limits: dict[str, Any] = {"max_files": max_files, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
    parser = _InMemoryParser(headers, chunks(), **limits)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise RequestError(f"the body is not valid multipart/form-data: {reason}") from error
    return [
        (name, await value.read() if isinstance(value, UploadFile) else value) for name, value in form.multi_items()
    ]
