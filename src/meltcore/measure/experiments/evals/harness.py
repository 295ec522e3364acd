"""Runs lm-evaluation-harness against the same server with the same problems and compares the items.

The harness runs as a separate program, from any Python that has it, so none of its packages is needed here. It runs its
own task `gsm8k_cot`; only the problems and the worked examples are replaced by ours.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meltcore.common import process
from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.measure.documents.schema import CheckResult
from meltcore.measure.experiments.evals.gsm8k_data import TASK_FILE, GradedAnswer, Item, Shots, conversation, grade
from meltcore.measure.experiments.servers.api import Answer

_TASK = "meltcore_gsm8k"
_PRINT_PACKAGE_FOLDER = "import lm_eval, os; print(os.path.dirname(lm_eval.__file__))"
_FIND_PACKAGE_TIMEOUT_S = 120.0
_TERMINATE_LIMIT_S = 5.0  # the harness has nothing to save
_GRADE_BY_FILTER = {"strict-match": "strict", "flexible-extract": "flexible"}


class HarnessError(MeltcoreError):
    """Reports that the harness ended without its results."""


class HarnessItem(NamedTuple):
    """Holds the harness's messages, answer and grades of one item."""

    messages: list[dict[str, str]]
    text: str
    grades: dict[str, bool]  # strict, flexible


def find_package(python: str) -> Path:
    """Return the folder of lm_eval in the environment of `python`. Raises ConfigError if it has none."""
    try:
        completed_run = process.run(
            [python, "-c", _PRINT_PACKAGE_FOLDER], limit_s=_FIND_PACKAGE_TIMEOUT_S, terminate_limit_s=_TERMINATE_LIMIT_S
        )
    except process.ProcessError as error:
        raise ConfigError(f"--harness {python} cannot be run: {error}") from error
    if completed_run.returncode is None:
        raise ConfigError(f"--harness {python} cannot be run: it did not end within {_FIND_PACKAGE_TIMEOUT_S:.0f} s")
    if completed_run.returncode:
        error_text = completed_run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"--harness {python} has no lm-eval: {error_text} (pip install 'lm_eval[api]')")
    return Path(completed_run.stdout.decode(errors="replace").strip().rpartition("\n")[2])


def run_harness(
    python: str,
    chat_url: str,
    model: str,
    items: Sequence[Item],
    shots: Shots,
    *,
    api_key: str | None = None,
    concurrency: int = 8,
    timeout_s: float = 3600.0,
) -> list[HarnessItem]:
    """Run `items` through the harness and return its items in the same order.

    Raises ConfigError if `python` has no harness, and HarnessError if the harness fails or exceeds `timeout_s`.
    """
    package = find_package(python)
    with tempfile.TemporaryDirectory(prefix="meltcore-lm-eval-") as folder_name:
        folder = Path(folder_name)
        arguments = f"model={model},base_url={chat_url},num_concurrent={concurrency},eos_string=<|im_end|>"
        command = [python, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", arguments,
                   "--tasks", _TASK, "--include_path", folder_name, "--apply_chat_template", "--log_samples",
                   "--output_path", str(folder / "out")]  # fmt: skip
        offline_variables = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {**os.environ, **offline_variables, "OPENAI_API_KEY": api_key or "none"}
        try:
            _write_task(folder, package, items, shots)
            completed_run = process.run(
                command, limit_s=timeout_s, environment=environment, terminate_limit_s=_TERMINATE_LIMIT_S
            )
            if completed_run.returncode is None:
                raise HarnessError(f"lm-eval did not end within {timeout_s:.0f} s")
            if completed_run.returncode:
                error_text = completed_run.stderr.decode(errors="replace").strip()[-500:]
                raise HarnessError(f"lm-eval ended with {completed_run.returncode}: {error_text}")
            return _read_samples(folder / "out", len(items))
        except (OSError, process.ProcessError) as error:  # for one a full disk: our own answers are kept
            raise HarnessError(f"lm-eval cannot be run: {error}") from error


def failed_comparison(error: MeltcoreError) -> CheckResult:
    """Return the failed gate that replaces the comparison if the harness fails."""
    return CheckResult(name="compared with lm-evaluation-harness", status="FAIL", detail=str(error))


def compare(graded: Sequence[GradedAnswer], harness_items: Sequence[HarnessItem], shots: Shots) -> list[CheckResult]:
    """Return gates that compare our prompts and grades with the harness's.

    Our grading rules are applied to the harness's own answers. A server may answer a repeated question differently,
    because another batch has another order of summation. So items that differ between the two runs are reported but
    fail no gate.
    """
    pairs = list(zip(graded, harness_items, strict=True))
    num_items = len(pairs)
    num_same_prompts = sum(
        harness_item.messages == conversation(shots.examples, graded_answer.item)
        for graded_answer, harness_item in pairs
    )
    num_same_grades = sum(
        grade(graded_answer.item, Answer(harness_item.text)).grades == harness_item.grades
        for graded_answer, harness_item in pairs
    )
    num_stable_grades = sum(graded_answer.grades == harness_item.grades for graded_answer, harness_item in pairs)
    num_correct = {
        name: sum(harness_item.grades[name] for harness_item in harness_items) for name in ("flexible", "strict")
    }
    return [
        CheckResult(
            name="same prompts as lm-evaluation-harness",
            status="PASS" if num_same_prompts == num_items else "FAIL",
            detail=f"{num_same_prompts} of {num_items} conversations are the same",
        ),
        CheckResult(
            name="same grades as lm-evaluation-harness",
            status="PASS" if num_same_grades == num_items else "FAIL",
            detail=f"{num_same_grades} of {num_items} of its answers; equal in both runs: {num_stable_grades}; "
            f"it found {num_correct['flexible']} correct by flexible extraction, {num_correct['strict']} by strict",
        ),
    ]


def _write_task(folder: Path, package: Path, items: Sequence[Item], shots: Shots) -> None:
    """Write a task file (JSON is YAML) that includes the harness's own task and replaces problems and examples."""
    items_path = folder / "items.jsonl"
    items_path.write_text(
        "".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in items)
    )
    task: dict[str, Any] = {
        "include": str(package / TASK_FILE),
        "task": _TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(items_path)}},
        "num_fewshot": len(shots.examples),
    }
    if shots.examples:
        samples = [{"question": item.question, "target": item.answer} for item in shots.examples]
        task["fewshot_config"] = {"sampler": "first_n", "samples": samples}
    else:
        task["doc_to_text"] = "{{question}}"
    (folder / "task.yaml").write_text(json.dumps(task))


def _read_samples(folder: Path, num_items: int) -> list[HarnessItem]:
    paths = list(folder.rglob(f"samples_{_TASK}_*.jsonl"))
    if len(paths) != 1:
        raise HarnessError(f"lm-eval wrote {len(paths)} files of samples, not 1")
    items_by_id: dict[int, HarnessItem] = {}
    try:
        # JSON strings may hold U+0085, U+2028 and U+2029, where splitlines() would split.
        for line in paths[0].read_text(encoding="utf-8").rstrip("\n").split("\n"):
            sample = json.loads(line)
            messages = json.loads(sample["arguments"]["gen_args_0"]["arg_0"][0])
            item = items_by_id.setdefault(
                sample["doc_id"], HarnessItem(_role_and_content(messages), sample["resps"][0][0], {})
            )
            item.grades[_GRADE_BY_FILTER[sample["filter"]]] = bool(sample["exact_match"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HarnessError(f"lm-eval's samples are not in the form of version 0.4: {error!r}") from error
    if sorted(items_by_id) != list(range(num_items)) or any(
        len(item.grades) != len(_GRADE_BY_FILTER) for item in items_by_id.values()
    ):
        raise HarnessError(f"lm-eval graded {len(items_by_id)} of {num_items} items")
    return [items_by_id[i] for i in range(num_items)]


def _role_and_content(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the messages with only role and content. Some versions of the harness add a type to each message."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]
