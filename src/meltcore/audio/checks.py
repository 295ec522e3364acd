"""Defines what all readers of audio files share: their errors, and a limit on the number of counted elements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from meltcore.common.errors import RequestError

# Pages, chunks or boxes of one file. Counting this number takes about a second. It is 3.3 hours of Opus at least.
_MAX_ELEMENTS = 600_000


def refusal(reason: str) -> RequestError:
    """Return the error for audio that cannot be used."""
    return RequestError(f"the audio {reason}", param="file", code="invalid_audio")


def truncation_error(announced_bytes: int, found_bytes: int) -> RequestError:
    """Return the error for a file that ends within one of its parts."""
    return refusal(f"is truncated: a part of it has {announced_bytes} bytes, of which {found_bytes} are there")


def each_element() -> Iterator[None]:
    """Yield None once per element of a file, for a loop. Raises RequestError after _MAX_ELEMENTS elements."""
    yield from repeat(None, _MAX_ELEMENTS)
    raise refusal(f"has more than {_MAX_ELEMENTS:,} parts, the limit")
