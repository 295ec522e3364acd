"""Runs GSM8K with chain of thought: eight worked examples as a conversation, greedy answers, graded in two ways.

lm-evaluation-harness can run the same problems against the same server, and its items are compared with ours. The
harness runs as a separate program in any Python environment that has it, so none of its packages is needed here. It
runs its own task `gsm8k_cot` with our problems and worked examples.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meltcore.common import process
from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.files import file_errors
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, Evaluation, RunResult
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.experiments.evals.config import CONCURRENCY, GSM8K_DATASET, GSM8K_LIMIT, Gsm8kConfig
from meltcore.measure.experiments.evals.gsm8k_data import (
    TASK_FILE,
    GradedAnswer,
    Item,
    Shots,
    conversation,
    grade,
    read_items,
    read_shots,
)
from meltcore.measure.experiments.evals.run import OnAnswer, ask_and_grade, make_evaluation
from meltcore.measure.experiments.servers import Answer, Api, death_reason, failure_reasons

MAX_TOKENS = 256  # that of lm-evaluation-harness for an API model
STOP_STRINGS = ("Q:", "</s>", "<|im_end|>")  # of the task gsm8k_cot
# 175 of 200. As a fraction, because a ratio such as 0.875 times a count need not be a whole number.
GATE_NUMERATOR, GATE_DENOMINATOR = 7, 8
ANSWERS_FILE = "gsm8k.jsonl"
# Of the first GSM8K_LIMIT problems of the data set's test split, as computed by `_digest`.
_PUBLISHED_SHA256 = "7c16294687f5eeaeb0cb5c225df9cf25455497ede5912a000a9597f492c19a0a"
_TASK = "meltcore_gsm8k"
_PRINT_PACKAGE_FOLDER = "import lm_eval, os; print(os.path.dirname(lm_eval.__file__))"
_FIND_PACKAGE_TIMEOUT_S = 120.0
_TERMINATE_LIMIT_S = 5.0  # the harness has nothing to save
_GRADE_BY_FILTER = {"strict-match": "strict", "flexible-extract": "flexible"}


def run_gsm8k(
    url: str,
    config: Gsm8kConfig,
    *,
    model: str | None = None,
    api_key: str | None = None,
    harness: str | None = None,
    arguments: Sequence[str] = (),
    on_answer: OnAnswer | None = None,
    folder: Path | None = None,
) -> RunResult:
    """Evaluate GSM8K with the problems of `config`, and return the result. A failed gate or request makes it FAILED.

    `harness` is the path of a Python that has lm-evaluation-harness. The harness then runs the same problems, and its
    items are compared with Meltcore's. If the harness fails, the comparison is a failed gate, and Meltcore's answers
    are still in the result. Every answer is written into `folder` as it arrives. If the server dies, the run is partial
    and has the verdict SERVER_DIED.

    Raises ConfigError if data or examples cannot be read, or if the server cannot be reached or names no model.
    """
    package = find_package(harness) if harness is not None else None
    items, shots = read_items(config.data, config.limit), read_shots(config.shots, package)
    api = Api(url, api_key=api_key)
    model, facts = api.resolve_model(model)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    path = None if folder is None else folder / ANSWERS_FILE
    graded_answers = ask_items(
        api, model, items, shots, concurrency=config.concurrency, on_progress=on_answer, answers_path=path
    )
    evaluation = make_evaluation(graded_answers)
    server_death = death_reason(api, evaluation)
    gates = [gate(evaluation)]
    if server_death is not None:
        gates = [gate_not_run(len(items), server_death)]
    elif harness is not None and package is not None:
        try:
            harness_items = run_harness(
                harness, package, api.chat_url, model, items, shots, api_key=api_key, concurrency=config.concurrency
            )
            gates += compare(graded_answers, harness_items, shots)
        except MeltcoreError as error:  # our own answers are kept
            name = "compared with lm-evaluation-harness"
            gates.append(CheckResult(name=name, status="FAIL", detail=str(error)))
    reasons = [f"gate failed: {gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"]
    reasons += failure_reasons(evaluation) if server_death is None else [server_death]
    data_name = config.data if config.data == GSM8K_DATASET else Path(config.data).resolve().name
    return RunResult(
        command="eval",
        status="complete" if server_death is None else "partial",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments),
        settings={
            "what": "gsm8k",
            "model": model,
            "concurrency": config.concurrency,
            "data": data_name,
            "limit": config.limit,
            "shots": shots.source,
            "comparable": is_published(items) and shots.is_comparable,
            **facts,
        },
        accuracy=evaluation.accuracy if server_death is None else None,
        evaluation=evaluation if server_death is None else None,
        gates=gates,
        verdict="SERVER_DIED" if server_death else "FAILED" if reasons else "OK",
        reasons=reasons,
        notes=[*_comparability_notes(items, shots), *model_notes(facts)],
    )


def ask_items(
    api: Api,
    model: str,
    items: Sequence[Item],
    shots: Shots,
    *,
    concurrency: int = CONCURRENCY,
    on_progress: OnAnswer | None = None,
    answers_path: Path | None = None,
) -> list[GradedAnswer]:
    """Ask every item once, greedily and unstreamed, and return the graded answers in the order of `items`.

    Each answer is appended as a line of JSON to `answers_path` as it arrives, so that an interrupted run loses no
    answer. Raises ConfigError if a line cannot be written.
    """
    common_fields = {
        "model": model,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": MAX_TOKENS,
        "stop": list(STOP_STRINGS),
    }
    bodies = [{**common_fields, "messages": conversation(shots.examples, item)} for item in items]

    def grade_and_keep(index: int, answer: Answer) -> GradedAnswer:
        graded = grade(items[index], answer)
        if answers_path is not None:
            _append_answer(answers_path, index, graded)
        return graded

    return ask_and_grade(api, bodies, concurrency, grade_and_keep, on_progress)


def _append_answer(path: Path, index: int, graded: GradedAnswer) -> None:
    line = {
        "item": index,
        "question": graded.item.question,
        "reference": graded.item.reference,
        "answer": graded.answer.text,
        "failed": graded.answer.failed,
        **graded.grades,
    }
    with file_errors("write", path), path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def is_published(items: Sequence[Item]) -> bool:
    """Return whether `items` are the problems of published results."""
    return len(items) == GSM8K_LIMIT and _digest(items) == _PUBLISHED_SHA256


def _digest(items: Sequence[Item]) -> str:
    """Return the SHA-256 of all questions and references. Differences in white space do not change the digest."""
    digest = hashlib.sha256()
    for item in items:
        for text in (item.question, item.reference):
            digest.update(" ".join(text.split()).encode() + b"\n")
    return digest.hexdigest()


def gate(evaluation: Evaluation) -> CheckResult:
    """Return the gate of the evaluation, which requires 87.5 % correct by flexible extraction."""
    return CheckResult(
        name=gate_name(evaluation.total),
        status="PASS" if evaluation.correct >= min_correct(evaluation.total) else "FAIL",
        detail=f"{evaluation.correct} by flexible extraction, {evaluation.strict_correct} by strict",
    )


def gate_not_run(total: int, reason: str) -> CheckResult:
    """Return the gate of an evaluation that did not run."""
    return CheckResult(name=gate_name(total), status="NOT RUN", detail=reason)


def gate_name(total: int) -> str:
    """Return the name of the gate for `total` problems."""
    return f"GSM8K: at least {min_correct(total)} of {total} correct"


def min_correct(total: int) -> int:
    """Return the minimum number of correct answers of `total` that passes the gate."""
    return -(-total * GATE_NUMERATOR // GATE_DENOMINATOR)


def _comparability_notes(items: Sequence[Item], shots: Shots) -> list[str]:
    """Return the reasons why the accuracy is not comparable with published results, or an empty list if it is."""
    notes = []
    if not is_published(items):
        notes.append(
            f"Not the first {GSM8K_LIMIT} problems of GSM8K's test split: it compares with no published result."
        )
    if not shots.is_comparable:
        notes.append(
            "Asked with eight examples of our own: not comparable with published GSM8K results. Install lm-eval or "
            "give --shots FILE."
            if shots.examples
            else "Asked without examples: not comparable with published GSM8K results, which have eight."
        )
    return notes


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
    package: Path,
    chat_url: str,
    model: str,
    items: Sequence[Item],
    shots: Shots,
    *,
    api_key: str | None = None,
    concurrency: int = 8,
    timeout_s: float = 3600.0,
) -> list[HarnessItem]:
    """Run `items` through the harness in `package` and return its items in the same order.

    Raises HarnessError if the harness fails or exceeds `timeout_s`.
    """
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
            # Some versions of the harness add a type to each message.
            messages = [{"role": message["role"], "content": message["content"]} for message in messages]
            item = items_by_id.setdefault(sample["doc_id"], HarnessItem(messages, sample["resps"][0][0], {}))
            item.grades[_GRADE_BY_FILTER[sample["filter"]]] = bool(sample["exact_match"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HarnessError(f"lm-eval's samples are not in the form of version 0.4: {error!r}") from error
    if sorted(items_by_id) != list(range(num_items)) or any(
        len(item.grades) != len(_GRADE_BY_FILTER) for item in items_by_id.values()
    ):
        raise HarnessError(f"lm-eval graded {len(items_by_id)} of {num_items} items")
    return [items_by_id[i] for i in range(num_items)]
