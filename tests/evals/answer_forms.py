"""A scripted server that answers GSM8K-form questions in a chosen form, an exact number of them rightly."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from fake_openai import FakeServer

from meltcore.evals.gsm8k_data import Item

# How models end an answer; each takes the number as text with and without thousands commas.
FORMS: dict[str, Callable[[int], str]] = {
    "sentence": lambda value: f"First 2 + 3 = 5. The answer is {value}.",
    "sentence-commas": lambda value: f"First 2 + 3 = 5. The answer is {value:,}.",
    "sentence-dollars": lambda value: f"First 2 + 3 = 5 dollars. The answer is ${value:,}.",
    "hashes": lambda value: f"2 + 3 = 5\n#### {value:,}",
    "bold": lambda value: f"First 2 + 3 = 5.\n\n**{value}**",
    "boxed": lambda value: f"First 2 + 3 = 5. So \\boxed{{{value}}}",
    "unit": lambda value: f"They pay ${value:,} together",
    "number": lambda value: str(value),
}
# Those that also have the words and characters which strict extraction asks for.
STRICT_FORMS = ("sentence", "sentence-commas")


class AnsweringServer(FakeServer):
    """Answers the first `right` of `items` rightly in `form` and the others one too high."""

    def __init__(self, items: list[Item], right: int, form: str) -> None:
        super().__init__()
        self._form = FORMS[form]
        self._values = {
            item.question: int(item.reference.replace(",", "")) + (at >= right) for at, item in enumerate(items)
        }
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, question: str, streamed: bool) -> str:
        self.asked.append(question)
        found = re.fullmatch(r"(?:Q: )?(.*?)(?:\nA:)?", question, re.DOTALL)
        assert found is not None
        return self._form(self._values[found[1]])

    def close(self) -> None:
        self.shutdown()
        self.server_close()
