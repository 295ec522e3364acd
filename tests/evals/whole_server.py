"""A scripted server for a whole evaluation: it marks GSM8K as told, sums rightly, and counts with a real tokenizer.

As a program (`whole_server.py --items FILE --right N --port P`) it stands in for the server of a baseline.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from counting_server import CountingServer

import meltcore
from meltcore.evals.gsm8k_data import Item, read_items

TOKENIZER = str(Path(meltcore.__file__).parent / "bundled" / "sums")
ITEMS = [Item(f"Problem {at}: how many?", f"Some work.\n#### {at * 37 + 5}") for at in range(200)]


def write_items(path: Path) -> Path:
    path.write_text("".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in ITEMS))
    return path


class WholeServer(CountingServer):
    """Answers the first `right` of `items` rightly, the others one too high; all else as a CountingServer."""

    def __init__(self, items: list[Item], right: int, port: int = 0) -> None:
        self._values = {item.question: int(item.reference) + (at >= right) for at, item in enumerate(items)}
        super().__init__(TOKENIZER, port=port)

    def answer(self, question: str, streamed: bool) -> str:
        found = re.fullmatch(r"Q: (.*)\nA:", question, re.DOTALL)
        if found is None:
            return super().answer(question, streamed)
        return f"The answer is {self._values[found[1]]}."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", required=True)
    parser.add_argument("--right", type=int, default=200)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--child", help="write the id of a child of ours, which outlives us, into this file")
    parser.add_argument("--never", action="store_true", help="do not become ready")
    options = parser.parse_args()
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options.child).write_text(str(child.pid))
    if not options.never:
        WholeServer(read_items(options.items, 200), options.right, options.port)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
