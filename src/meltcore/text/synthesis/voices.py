"""Finds a voice by its name, which may contain spaces and brackets, or by the stem of its published file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meltcore.common.errors import RequestError

# Of the published checkpoint: "KAN_F (Happy)" is prompts/KAN_F_HAPPY_00001.wav.
PUBLISHED_VOICES = ("KAN_F (Happy)", "MAR_F (WIKI)", "MAR_M (WIKI)", "PAN_F (Happy)", "TAM_F (Happy)")
_FILE_NUMBER = re.compile(r"_\d{5}$")


def find_voice(name: str, voices: Sequence[str]) -> str:
    """Return the voice that `name` means: in any case, with or without spaces, brackets and a file's number.

    Raises RequestError if no voice or several voices match; the error lists the voices.
    """
    if name in voices:
        return name
    found = [voice for voice in voices if _name_key(voice) == _name_key(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(voices) or "none, so give a reference and its text"
    raise RequestError(f"voice {name[:60]!r} is not one of the model's: {known}", param="voice")


def _name_key(name: str) -> str:
    return "".join(filter(str.isalnum, _FILE_NUMBER.sub("", name).casefold()))
