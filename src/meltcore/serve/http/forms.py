"""Reads multipart/form-data in memory. No temporary file is written, and the limit of the body bounds the memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from email import message_from_bytes
from itertools import pairwise
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from meltcore.common.errors import RequestError
from meltcore.serve.requests.asgi import join_pieces
from meltcore.serve.requests.request_fields import shorten

# Parsed or copied before other connections get their turn: 25 MB together would stop the event loop for 40 ms.
_PIECE_BYTES = 2**16
MAX_BATCH = 64  # files of a form, or texts of a request
_MAX_FIELD_BYTES = 64 * 1024
_MAX_FIELDS = 32
# Of a form that is searched for one field. The time to read the parameters of a part grows with the square of its head.
_MAX_PARTS = 64
_MAX_PART_HEAD_BYTES = 4 * 1024
_MISSING_NAME_ERROR = 'a file needs filename="..." in its Content-Disposition'
_FILE_NAME = re.compile(rb";\s*filename\s*=", re.IGNORECASE)
_OTHER_FILE_NAME = re.compile(rb";\s*filename\*\s*=", re.IGNORECASE)


class _InMemoryParser(MultiPartParser):
    spool_max_size = 2**62
    is_complete = False

    @property
    def part_name(self) -> str:
        """The name of the current part, as errors give it."""
        return str(shorten(self._current_part.field_name))

    def on_headers_finished(self) -> None:
        """Begin a part.

        Some clients give the name of a file only in the parameter for other character sets (RFC 5987).
        """
        disposition = self._current_part.content_disposition or b""
        if _OTHER_FILE_NAME.search(disposition) and not _FILE_NAME.search(disposition):
            self._current_part.content_disposition = disposition + b'; filename="file"'
        super().on_headers_finished()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Add data to a part. Raises RequestError for a text that is too long: it may be a file without a name."""
        part = self._current_part
        if part.file is None and len(part.data) + end - start > self.max_part_size:
            raise RequestError(
                f"the part {self.part_name} has more than {self.max_part_size:,} bytes, the limit of a text; "
                f"{_MISSING_NAME_ERROR}",
                param=self.part_name,
            )
        super().on_part_data(data, start, end)

    def on_end(self) -> None:
        """Note the closing boundary."""
        self.is_complete = True


def file_name_error(name: str) -> RequestError:
    """Return the error for a file that was sent as a text, because its part has no file name."""
    return RequestError(f"the part {name} has no file name, so that it is text: {_MISSING_NAME_ERROR}", param=name)


def is_multipart(content_type: str) -> bool:
    """Return whether a body of this content type is a form with files."""
    return content_type.lower().startswith("multipart/form-data")


def find_field(body: bytes, content_type: str, name: str) -> slice | None:
    """Return the slice of a form's bytes that has the value of the first field of this name.

    Returns None if the form has no such field. Nothing is copied or decoded, so a form can be forwarded byte for byte.
    The standard library parses the headers of the parts. So a server that only forwards forms does not need the package
    that parses forms.
    """
    boundary = _header_parameter(b"content-type: " + content_type.encode("latin-1"), "content-type", "boundary")
    if not boundary:
        return None
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    for start, end in pairwise(_part_starts(body, delimiter)):
        part_start = start + len(delimiter)
        part_head, separator, _ = body[part_start : min(part_start + _MAX_PART_HEAD_BYTES, end - 2)].partition(
            b"\r\n\r\n"
        )
        if separator and _header_parameter(part_head.partition(b"\r\n")[2], "content-disposition", "name") == name:
            return slice(part_start + len(part_head) + 4, end - 2)
    return None


def _part_starts(body: bytes, delimiter: bytes) -> Iterator[int]:
    """Yield the position at which each part of a form begins, and finally the position at which the form ends.

    A line that is longer than the delimiter, but begins with it, is data.
    """
    position = body.find(delimiter)
    for _ in range(_MAX_PARTS):
        if position < 0:
            return
        next_byte = position + len(delimiter)
        if body.startswith((b"\r\n", b"--", b" ", b"\t"), next_byte):
            yield position
        position = body.find(b"\r\n" + delimiter, next_byte)
        position += 2 if position >= 0 else 0


def _header_parameter(part_head: bytes, header: str, name: str) -> str | None:
    """Return a parameter of a header, or None if there is none.

    Its value is written as a token or as a quoted string.
    """
    value = message_from_bytes(part_head).get_param(name, header=header)
    return value if isinstance(value, str) else None


async def read_multipart(body: bytes, content_type: str, max_files: int = 1) -> list[tuple[str, str | bytes]]:
    """Return the fields of a form in their order; files are bytes. Raises RequestError (400) for an invalid form."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE_BYTES):
            yield body[start : start + _PIECE_BYTES]
            await asyncio.sleep(0)

    headers = Headers({"content-type": content_type})
    limits: dict[str, Any] = {"max_files": max_files, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
    parser = _InMemoryParser(headers, chunks(), **limits)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:  # ValueError: of the codec that `charset` names
        if parser._current_files > max_files:
            raise RequestError(
                f"the form has more than {max_files} file{'s' * (max_files > 1)}, the limit", param=parser.part_name
            ) from error
        reason = getattr(error, "message", None) or str(error)
        if error.__cause__ is not None:  # of the parser's package, which a server of texts need not have
            reason = f"{error.__cause__}: lines must end in CR LF and parts begin with the boundary of Content-Type"
        raise RequestError(f"the body is not valid multipart/form-data: {reason}") from error
    if not parser.is_complete:
        raise RequestError("the form ends before its closing boundary: it was cut off, or has no parts")
    return [
        (name, await _read(value) if isinstance(value, UploadFile) else value) for name, value in form.multi_items()
    ]


async def split_form(
    body: bytes, content_type: str, file_names: Sequence[str], max_files: int = 1
) -> tuple[list[tuple[str, str]], list[bytes]]:
    """Return the texts of a form as pairs of name and text, and the files of the form as bytes.

    The fields in `file_names` must be files, and all other fields must be texts. Raises RequestError (400) for any
    other form.
    """
    texts, files = list[tuple[str, str]](), list[bytes]()
    for name, value in await read_multipart(body, content_type, max_files):
        if isinstance(value, str) and name in file_names:
            raise file_name_error(name)
        if isinstance(value, str):
            texts.append((name, value))
        elif name in file_names:
            files.append(value)
        else:
            message = f"{shorten(name)} must be text, not a file; a file goes into the field {file_names[0]}"
            raise RequestError(message, param=shorten(name))
    return texts, files


async def split_audio_form(
    body: bytes, content_type: str, file_names: Sequence[str], max_files: int = 1
) -> tuple[list[tuple[str, str]], list[bytes]]:
    """Return the texts of a form as pairs of name and text, and the audio files of the form as bytes.

    Raises RequestError (400) if the form has no file.
    """
    name = file_names[0]
    if not is_multipart(content_type):
        raise RequestError(f"the body must be multipart/form-data with the audio in the field {name}", param=name)
    texts, files = await split_form(body, content_type, file_names, max_files)
    if not files:
        raise RequestError(f"the field {name} is missing: it must hold the audio, with a file name", param=name)
    return texts, files


async def _read(file: UploadFile) -> bytes:
    pieces = []
    while piece := await file.read(_PIECE_BYTES):
        pieces.append(piece)
        await asyncio.sleep(0)
    return await join_pieces(pieces)
