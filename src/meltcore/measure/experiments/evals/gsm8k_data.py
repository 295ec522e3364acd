"""Reads problems in GSM8K's format and the worked examples of the prompt, and grades answers.

The data set is from Cobbe et al. 2021, and the prompt from Wei et al. 2022. Answers are graded exactly as `gsm8k_cot`
of lm-evaluation-harness 0.4 does (task version 3.0). The corner cases of its rules are included, because an accuracy is
comparable only if every item is graded alike. Strict extraction requires one character after the number: "The answer is
18" without a full stop reads as 1. Flexible extraction takes the last run of two or more of `$ 0-9 . ,`, which may be
an ellipsis.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meltcore.common.errors import ConfigError
from meltcore.measure.experiments.evals.config import GSM8K_URL
from meltcore.measure.experiments.servers import Answer
from meltcore.measure.problems import evaluation_set

BUNDLED_SOURCE = "meltcore/problems"
NUM_SHOTS = 8
TASK_FILE = Path("tasks", "gsm8k", "gsm8k-cot.yaml")
TEST_FILE = "test.jsonl"  # in the data set's folder, as published
INVALID = "[invalid]"
_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# Removed from both sides before they are compared, one after another.
_IGNORED_PATTERNS = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


@dataclass(frozen=True)
class Item:
    """Holds one problem. `answer` ends in "#### N" if the problem comes from the data set."""

    question: str
    answer: str

    @property
    def reference(self) -> str:
        """Return the expected answer."""
        return self.answer.split("####")[-1].strip()


@dataclass(frozen=True)
class Shots:
    """Holds the worked examples. `is_comparable` is True if published results used the same examples."""

    examples: tuple[Item, ...]
    source: str
    is_comparable: bool


# Our own, for a machine without lm-evaluation-harness: the same kind and length of reasoning, other problems.
BUNDLED_SHOTS = (
    Item(
        "A tram leaves the depot with 18 passengers. At the first stop 7 get off and 12 get on. How many are "
        "on it then?",
        "The tram starts with 18 passengers. After 7 get off there are 18 - 7 = 11. After 12 get on there are "
        "11 + 12 = 23. The answer is 23.",
    ),
    Item(
        "A bakery packs rolls in bags of 6. It has baked 90 rolls and wants to keep 12 for itself. How many bags can "
        "it fill?",
        "The bakery packs 90 - 12 = 78 rolls. In bags of 6 that is 78 / 6 = 13 bags. The answer is 13.",
    ),
    Item(
        "Petra swims 20 lengths of a 25 meter pool on each of 3 days. How many meters does she swim in all?",
        "Each day Petra swims 20 * 25 = 500 meters. In 3 days she swims 500 * 3 = 1500 meters. The answer is 1500.",
    ),
    Item(
        "A lamp costs $48. It is sold at a quarter off, and a bulb for $5 is added. How much is paid together?",
        "A quarter of $48 is 48 / 4 = 12 dollars. The lamp costs 48 - 12 = 36 dollars. With the bulb that is "
        "36 + 5 = 41 dollars. The answer is 41.",
    ),
    Item(
        "Ilse is 4 years older than twice her brother's age. Her brother is 9. How old is Ilse?",
        "Twice the brother's age is 2 * 9 = 18. Ilse is 18 + 4 = 22 years old. The answer is 22.",
    ),
    Item(
        "A tank holds 240 liters. A pump fills 15 liters a minute while 3 liters a minute leak out. How many minutes "
        "does it take to fill the empty tank?",
        "Each minute the tank gains 15 - 3 = 12 liters. Filling 240 liters takes 240 / 12 = 20 minutes. "
        "The answer is 20.",
    ),
    Item(
        "In a class of 30 pupils 40% walk to school and half of the others cycle. How many cycle?",
        "40% of 30 pupils is 30 * 0.4 = 12 who walk. The others are 30 - 12 = 18. Half of them is 18 / 2 = 9. "
        "The answer is 9.",
    ),
    Item(
        "Jonas reads 14 pages on Monday, three times as many on Tuesday and 10 fewer than on Tuesday on Wednesday. How "
        "many pages does he read in the three days?",
        "On Tuesday Jonas reads 14 * 3 = 42 pages. On Wednesday he reads 42 - 10 = 32 pages. Together that is "
        "14 + 42 + 32 = 88 pages. The answer is 88.",
    ),
)


def read_items(source: str, limit: int) -> list[Item]:
    """Read the first `limit` problems of `source`.

    `source` is a JSONL file, a folder with test.jsonl, the bundled problems, or a data set of the hub. Raises
    ConfigError if the source cannot be read or holds fewer problems.
    """
    if source == BUNDLED_SOURCE:
        items = [Item(problem.question, f"{problem.answer}\n#### {problem.value}") for problem in evaluation_set()]
    elif Path(source).is_dir():
        items = _read_lines(Path(source, TEST_FILE))
    elif Path(source).exists() or source.endswith((".json", ".jsonl")) or source.startswith(("/", ".", "~")):
        items = _read_lines(Path(source))
    else:
        items = _load_hub_dataset(source)
    if len(items) < limit:
        raise ConfigError(f"{source} holds {len(items)} problems, fewer than {limit}; lower --limit")
    return items[:limit]


def read_shots(source: str | None, package: Path | None = None) -> Shots:
    """Read the eight worked examples. A `source` of "none" gives no examples.

    The examples come from the JSONL file `source`, else from an installed lm-eval, else from this package. `package` is
    the folder of lm_eval in another environment. Raises ConfigError if the file does not hold eight examples.
    """
    if source == "none":
        return Shots((), "none", is_comparable=False)
    if source is not None:
        examples = _read_lines(Path(source))
        if len(examples) != NUM_SHOTS:
            raise ConfigError(f"--shots {source} holds {len(examples)} examples; the task has {NUM_SHOTS}")
        return Shots(tuple(examples), "file", is_comparable=True)
    package = package or _installed_harness()
    harness_examples = _harness_shots(package) if package is not None else ()
    return (
        Shots(harness_examples, "lm-eval", is_comparable=True)
        if harness_examples
        else Shots(BUNDLED_SHOTS, "own", is_comparable=False)
    )


def conversation(shots: Sequence[Item], item: Item) -> list[dict[str, str]]:
    """Return the chat messages of `item`: the examples as turns, then the question."""
    if not shots:
        return [{"role": "user", "content": item.question}]
    turns = [(_user_message(shot), {"role": "assistant", "content": shot.answer}) for shot in shots]
    return [*chain.from_iterable(turns), _user_message(item)]


def _user_message(item: Item) -> dict[str, str]:
    return {"role": "user", "content": f"Q: {item.question}\nA:"}


def _read_lines(path: Path) -> list[Item]:
    try:
        # Not splitlines(): JSON strings may hold U+0085, U+2028 and U+2029, where it splits.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that none can have
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [
        _parse_item(line, f"{path} line {line_number}") for line_number, line in enumerate(lines, 1) if line.strip()
    ]


def _parse_item(line: str, location: str) -> Item:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{location}: not JSON: {error}") from error
    return _to_item(entry, location)


def _to_item(entry: object, location: str) -> Item:
    answer = entry.get("answer", entry.get("target")) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(answer, str) or not isinstance(entry.get("question"), str):
        raise ConfigError(f'{location}: needs the texts "question" and "answer" (or "target")')
    return Item(entry["question"], answer)


def _load_hub_dataset(name: str) -> list[Item]:
    try:
        from datasets import load_dataset  # comes with lm-eval
    except ImportError as error:
        raise ConfigError(
            f"reading the data set {name} needs the package datasets, which is not installed (pip install "
            f"datasets); or fetch {GSM8K_URL} and give --data test.jsonl"
        ) from error
    try:
        rows = load_dataset(name, "main", split="test")
    except Exception as error:  # network, hub and format errors share no base class
        raise ConfigError(f"the data set {name} cannot be loaded ({error}); give --data FILE.jsonl") from error
    return [_to_item(row, f"{name} row {row_number}") for row_number, row in enumerate(rows, 1)]


def _installed_harness() -> Path | None:
    spec = importlib.util.find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _harness_shots(package: Path) -> tuple[Item, ...]:
    """Read the worked examples from the task file of an installed lm-eval."""
    try:
        task: dict[str, Any] = yaml.safe_load((package / TASK_FILE).read_text(encoding="utf-8"))
        examples = tuple(Item(sample["question"], sample["target"]) for sample in task["fewshot_config"]["samples"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"the installed lm-eval has no gsm8k_cot examples where expected ({error!r})") from error
    if len(examples) != NUM_SHOTS:
        raise ConfigError(
            f"the installed lm-eval has {len(examples)} gsm8k_cot examples, not {NUM_SHOTS}; give --shots"
        )
    return examples


class GradedAnswer(NamedTuple):
    """Holds one item's answer and its two grades. A failed request is incorrect in both grades.

    `strict_correct` is None for an evaluation without strict extraction.
    """

    item: Item
    answer: Answer
    flexible_correct: bool
    strict_correct: bool | None = None

    @property
    def grades(self) -> dict[str, bool]:
        """Return the two grades by the name of the extraction: strict or flexible."""
        return {"strict": bool(self.strict_correct), "flexible": self.flexible_correct}


def grade(item: Item, answer: Answer) -> GradedAnswer:
    """Return an answer with its grades by strict and by flexible extraction."""
    strict, flexible = (
        not answer.failed and exact_match(extract(answer.text), item.reference)
        for extract in (extract_strict, extract_flexible)
    )
    return GradedAnswer(item, answer, flexible, strict)


def extract_strict(text: str) -> str:
    """Return the number after the first "The answer is", or INVALID."""
    match = _STRICT.search(text)
    return match[1] if match else INVALID


def extract_flexible(text: str) -> str:
    """Return the last run of digits, dollar signs, points and commas in `text`, or INVALID."""
    last_number = INVALID
    for match in _FLEXIBLE.finditer(text):
        last_number = match[0]
    return last_number


def exact_match(extracted: str, reference: str) -> bool:
    """Return whether both texts are equal, ignoring commas, dollar signs, a final full stop and upper or lower case."""
    return _normalize(extracted) == _normalize(reference)


def _normalize(text: str) -> str:
    for pattern in _IGNORED_PATTERNS:
        text = pattern.sub("", text)
    return text.lower()
