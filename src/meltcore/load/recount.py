"""Counting a sample of answers with the model's own tokenizer, to check what the server says it generated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meltcore.errors import ConfigError
from meltcore.load.record import Record

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# An end token has no text, and text need not encode to the very tokens it was decoded from.
TOLERANCE_SHARE = 0.02
END_TOKENS = 1


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json or its folder, to count texts whole. Raises ConfigError where there is none."""
    from tokenizers import Tokenizer  # 50 ms, and most runs do without

    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every cause
        raise ConfigError(f"tokenizer {file}: {error}") from error
    tokenizer.no_truncation()  # the file may store either, left from training: counts would be of something else
    tokenizer.no_padding()
    return tokenizer


class Recounter:
    """Holds a tokenizer. Raises ConfigError where `path` (tokenizer.json or its folder) has none."""

    def __init__(self, path: str) -> None:
        self._tokenizer = open_tokenizer(path)

    def check(self, records: list[Record]) -> tuple[int, str | None]:
        """(answers counted, what is wrong with the server's counts or None)."""
        sample = [record for record in records if record.text is not None and record.failure is None]
        reported = sum(record.output_tokens for record in sample)
        counted = sum(
            len(self._tokenizer.encode(record.text, add_special_tokens=False).ids)
            + (END_TOKENS if record.finish_reason == "stop" else 0)
            for record in sample
        )
        if abs(reported - counted) <= TOLERANCE_SHARE * counted + END_TOKENS:
            return len(sample), None
        return len(sample), (
            f"token counts disagree: in {len(sample)} answers the server reports {reported} output tokens, "
            f"the tokenizer counts {counted}"
        )
