"""A scripted server that counts with a real tokenizer, knows sums, and can lie on purpose."""

from __future__ import annotations

import re
import threading
from typing import Literal

from fake_openai import FakeServer
from tokenizers import Tokenizer

Lie = Literal[
    "none",
    "wrong-sums",
    "one-wrong-sum",
    "prompt-cut",
    "prompt-stretched",
    "output-doubled",
    "echo",
    "mute",
    "once-mute",
    "strict",
    "stops",
    "remembers",
]
TEMPLATE_TOKENS = 12
CHATTER = " it is a sum of many parts" * 4


class CountingServer(FakeServer):
    """Answers "What is a + b?" rightly and anything else with `CHATTER`."""

    def __init__(self, tokenizer: str, lie: Lie = "none", port: int = 0) -> None:
        super().__init__("strict" if lie == "strict" else "none", port=port)
        self._tokenizer = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
        self._lie = lie
        if lie != "stops":
            self.end_token = "<|im_end|>"
        if lie == "remembers":
            self.seen = set()
        self.asked: list[str] = []
        self.sums = 0
        self.chats = 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, question: str, streamed: bool) -> str:
        self.asked.append(question)
        found = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", question)
        if found is None:
            self.chats += 1
            return "" if self._lie == "mute" or (self._lie == "once-mute" and self.chats % 8 == 5) else CHATTER
        self.sums += 1
        a, b = int(found[1]), int(found[3])
        value = a + b if found[2] == "+" else a - b
        if self._lie == "wrong-sums" or (self._lie == "one-wrong-sum" and self.sums == 1):
            value += 1000
        return f"You ask {a} and {b}." if self._lie == "echo" else f"{a} {found[2]} {b} = {value}."

    def tokens(self, text: str) -> list[str]:
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def usage(self, question: str, used: int, reason: str) -> tuple[int, int]:
        """An answer that stops by itself has an end token, which has no text."""
        prompt = len(self._tokenizer.encode(question, add_special_tokens=False).ids)
        if self._lie == "prompt-cut":
            prompt //= 2
        elif self._lie == "prompt-stretched":  # by more than a template would
            prompt += prompt // 20 + 46
        else:
            prompt += TEMPLATE_TOKENS
        return prompt, 2 * used if self._lie == "output-doubled" else used + (reason == "stop")

    def close(self) -> None:
        self.shutdown()
        self.server_close()
