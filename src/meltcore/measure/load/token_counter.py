"""Counts tokens with the tokenizer of the model, to check the server's counts and to replace missing counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meltcore.common.errors import ConfigError
from meltcore.measure.load.record import RequestRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# An end token has no text, and text need not encode to the tokens that it was decoded from.
TOLERANCE_RATIO = 0.02
NUM_EOS_TOKENS = 1


def open_tokenizer(path: str) -> Tokenizer:
    """Open a tokenizer.json, or the tokenizer.json of a folder. Raises ConfigError if the file is missing."""
    from tokenizers import Tokenizer  # takes 50 ms, and most runs do without

    tokenizer_path = Path(path).expanduser()
    tokenizer_path = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # the library raises bare Exception for every cause
        raise ConfigError(f"tokenizer {tokenizer_path}: {error}") from error
    tokenizer.no_truncation()  # the file may store either, left from training, and both change counts
    tokenizer.no_padding()
    return tokenizer


class TokenCounter:
    """Counts the tokens of texts and records. Raises ConfigError if `path` has no tokenizer."""

    def __init__(self, path: str) -> None:
        self.tokenizer = open_tokenizer(path)

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, without special tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def count_output_tokens(self, record: RequestRecord) -> int:
        """Return the number of tokens of an answer, including its end token."""
        return self.count(record.text or "") + (NUM_EOS_TOKENS if record.finish_reason == "stop" else 0)

    def check_counts(self, records: Sequence[RequestRecord]) -> tuple[int, str | None]:
        """Compare the server's token counts with the tokenizer's counts.

        Returns the number of answers compared, and a description of the disagreement or None. Only answers with a text
        and with the server's counts are compared.
        """
        checked_records = [
            record for record in records if record.text is not None and record.failure is None and record.saw_usage
        ]
        num_reported = sum(record.output_tokens for record in checked_records)
        num_counted = sum(map(self.count_output_tokens, checked_records))
        if abs(num_reported - num_counted) <= TOLERANCE_RATIO * num_counted + NUM_EOS_TOKENS:
            return len(checked_records), None
        return len(checked_records), (
            f"token counts disagree: in {len(checked_records)} answers the server reports {num_reported} "
            f"output tokens, the tokenizer counts {num_counted}"
        )

    def fill_missing_counts(
        self, records: Sequence[RequestRecord], get_request_fields: Callable[[int], dict[str, Any]]
    ) -> None:
        """Set the token counts of the answers for which the server sent no counts.

        `get_request_fields` returns the body fields of a request by index. The prompt is counted without the server's
        chat template, which is unknown.
        """
        for record in records:
            if record.failure is None and not record.saw_usage:
                if record.text is not None:  # else it has a tool call or audio, and its events are counted
                    record.output_tokens = self.count_output_tokens(record)
                record.prompt_tokens = self._count_prompt_tokens(get_request_fields(record.index))

    def _count_prompt_tokens(self, fields: dict[str, Any]) -> int:
        prompt = fields.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        texts = [prompt] if prompt is not None else [message.get("content") for message in fields["messages"]]
        return sum(self.count(text) for text in texts if isinstance(text, str))
