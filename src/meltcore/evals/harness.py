"""lm-evaluation-harness against the same server with the same problems, compared item by item with our own marks.

The harness runs as a program of its own, from any Python that has it, so none of its packages is needed here. Its task
is its own `gsm8k_cot`; only the problems and the worked examples are replaced by ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.evals.ask import Answer
from meltcore.evals.gsm8k import Marked, mark
from meltcore.evals.gsm8k_data import TASK_FILE, Item, Shots, conversation
from meltcore.evals.server_process import end_group
from meltcore.results.patience import undisturbed
from meltcore.results.schema import Gate

_TASK = "meltcore_gsm8k"
_FIND = "import lm_eval, os; print(os.path.dirname(lm_eval.__file__))"
_FIND_TIMEOUT_S = 120.0
_LEAVE_S = 5.0  # for the harness's program, asked to end; it has nothing to put away
_FILTERS = {"strict-match": "strict", "flexible-extract": "flexible"}


class HarnessError(MeltcoreError):
    """The harness ended without the results it was asked for."""


@dataclass(frozen=True)
class HarnessItem:
    """What the harness sent and got for one item, and how it marked the answer."""

    messages: list[dict[str, str]]
    text: str
    marks: dict[str, bool]  # strict, flexible


def find_package(python: str) -> Path:
    """The folder of lm_eval in the environment of `python`. Raises ConfigError where it has none."""
    try:
        done = _run([python, "-c", _FIND], os.environ, _FIND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--harness {python} cannot be run: {error}") from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--harness {python} has no lm-eval: {last} (pip install 'lm_eval[api]')")
    return Path(done.stdout.strip().rpartition("\n")[2])


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
    """Ask `items` through the harness, in order. Raises ConfigError without one, HarnessError where it fails."""
    package = find_package(python)
    with tempfile.TemporaryDirectory(prefix="meltcore-lm-eval-") as name:
        folder = Path(name)
        arguments = f"model={model},base_url={chat_url},num_concurrent={concurrency},eos_string=<|im_end|>"
        command = [python, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", arguments,
                   "--tasks", _TASK, "--include_path", name, "--apply_chat_template", "--log_samples",
                   "--output_path", str(folder / "out")]  # fmt: skip
        offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {**os.environ, **offline, "OPENAI_API_KEY": api_key or "none"}
        try:
            _write_task(folder, package, items, shots)
            done = _run(command, environment, timeout_s)
            if done.returncode:
                raise HarnessError(f"lm-eval ended with {done.returncode}: {done.stderr.strip()[-500:]}")
            return _read_samples(folder / "out", len(items))
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"lm-eval did not end within {timeout_s:.0f} s") from error
        except OSError as error:  # a full disk, a Python that has gone: no reason to lose our own answers
            raise HarnessError(f"lm-eval cannot be run: {error}") from error


def not_compared(error: MeltcoreError) -> Gate:
    """In place of the comparison where the harness did not come to its end."""
    return Gate(name="compared with lm-evaluation-harness", status="FAIL", detail=str(error))


def compare(marked: Sequence[Marked], theirs: Sequence[HarnessItem], shots: Shots) -> list[Gate]:
    """Whether both asked the same and mark the same; and on how many items the two askings came out alike.

    The marks are compared on the harness's own answers. A server may answer differently when asked again (sums in
    another order in another batch), so items that differ between the two askings are told, and fail nothing.
    """
    alike = sum(
        other.messages == conversation(shots.examples, one.item) for one, other in zip(marked, theirs, strict=True)
    )
    again = [mark(one.item, Answer(other.text)) for one, other in zip(marked, theirs, strict=True)]
    same = sum(_marks(one) == other.marks for one, other in zip(again, theirs, strict=True))
    stable = sum(_marks(one) == other.marks for one, other in zip(marked, theirs, strict=True))
    right = {name: sum(other.marks[name] for other in theirs) for name in ("flexible", "strict")}
    asked = len(theirs)
    return [
        Gate(
            name="asked as lm-evaluation-harness asks",
            status="PASS" if alike == asked else "FAIL",
            detail=f"{alike} of {asked} conversations are the same",
        ),
        Gate(
            name="marked as lm-evaluation-harness marks",
            status="PASS" if same == asked else "FAIL",
            detail=f"{same} of {asked} of its answers; in both askings alike: {stable}; "
            f"it found {right['flexible']} right by flexible extraction, {right['strict']} by strict",
        ),
    ]


def _marks(marked: Marked) -> dict[str, bool]:
    return {"strict": marked.strict, "flexible": marked.flexible}


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; whatever ends us, or its time, first ends it and all that it started.

    Raises OSError where it cannot be started, TimeoutExpired past the limit.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        process: subprocess.Popen[bytes] | None = None
        try:
            with undisturbed():
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=told, env=environment, start_new_session=True
                )
            code = process.wait(limit_s)
        finally:
            if process is not None:
                end_group(process, _LEAVE_S)
        out.seek(0)
        told.seek(0)
        texts = (file.read().decode(errors="replace") for file in (out, told))
        return subprocess.CompletedProcess(command, code, *texts)


def _write_task(folder: Path, package: Path, items: Sequence[Item], shots: Shots) -> None:
    """A task file (JSON is YAML) that includes the harness's own and replaces what must be ours."""
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps({"question": each.question, "answer": each.answer}) + "\n" for each in items))
    task: dict[str, Any] = {
        "include": str(package / TASK_FILE),
        "task": _TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "num_fewshot": len(shots.examples),
    }
    if shots.examples:
        samples = [{"question": each.question, "target": each.answer} for each in shots.examples]
        task["fewshot_config"] = {"sampler": "first_n", "samples": samples}
    else:
        task["doc_to_text"] = "{{question}}"
    (folder / "task.yaml").write_text(json.dumps(task))


def _read_samples(folder: Path, asked: int) -> list[HarnessItem]:
    files = list(folder.rglob(f"samples_{_TASK}_*.jsonl"))
    if len(files) != 1:
        raise HarnessError(f"lm-eval wrote {len(files)} files of samples, not 1")
    found: dict[int, HarnessItem] = {}
    try:
        # JSON leaves U+0085, U+2028 and U+2029 as they are inside its strings, and splitlines() would split there.
        for line in files[0].read_text(encoding="utf-8").rstrip("\n").split("\n"):
            sample = json.loads(line)
            messages = json.loads(sample["arguments"]["gen_args_0"]["arg_0"][0])
            item = found.setdefault(sample["doc_id"], HarnessItem(_plain(messages), sample["resps"][0][0], {}))
            item.marks[_FILTERS[sample["filter"]]] = bool(sample["exact_match"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HarnessError(f"lm-eval's samples are not in the form of version 0.4: {error!r}") from error
    if sorted(found) != list(range(asked)) or any(len(item.marks) != len(_FILTERS) for item in found.values()):
        raise HarnessError(f"lm-eval marked {len(found)} of {asked} items")
    return [found[at] for at in range(asked)]


def _plain(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Role and content alone: some versions name a type beside them."""
    return [{"role": each["role"], "content": each["content"]} for each in messages]
