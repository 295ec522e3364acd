"""A minute of inference: does the engine give correct answers on each GPU?

Each GPU serves the bundled language and translation models by itself, and all GPUs run concurrently. The answers are
judged by their accuracy, once the server has named this GPU as the device of each model.
"""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.process import CompletedRun
from meltcore.measure.documents.node import CertificateRow, CheckReport
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.node.certify.check import HardwareCheck
from meltcore.measure.node.certify.conditions import ConditionsWatch
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.judge import Judgment, make_findings, warn_throttled
from meltcore.measure.node.node import last_line

_ENGINE = ("torch", "tokenizers", "starlette", "zmq")
_LEVELS = {"standard": "10,100"}
_LEVELS_OF_LARGER = "10,100,400"
_LIMIT_S = 300.0
_TASKS = "generation,translation"  # the tasks that need no packages for audio
_ACCURACY_FLOOR = 95.0  # percent, the floor of meltcore demo
_PASSED = 0  # exit code of meltcore demo


class InferenceCheck(HardwareCheck):
    """Runs `meltcore demo` on each GPU concurrently and judges its accuracy."""

    name = "inference"
    title = "A minute of inference"

    def unavailable(self) -> str:
        """Return a reason if the engine's packages are not installed, else ""."""
        missing_packages = [package for package in _ENGINE if find_spec(package) is None]
        return f"the engine is not installed ({', '.join(missing_packages)} missing)" if missing_packages else ""

    def measure(self, context: CertifyContext) -> CheckReport:
        """Run the demo on every GPU, watch the GPUs meanwhile, and return the judged accuracies."""
        busy = context.busy()
        watch = ConditionsWatch(context, self.name)
        with ThreadPoolExecutor(max_workers=len(context.gpus)) as pool:
            try:
                completed = list(pool.map(lambda gpu_index: _run_demo(context, gpu_index), context.gpu_indices))
            except BaseException:  # Ctrl-C: the pool waits for its threads, and these for their programs
                context.node.terminate_programs()
                raise
        conditions, findings, throttled = watch.close()
        results = [_result(context, gpu_index) for gpu_index in context.gpu_indices]
        judgments = [
            _judge_demo(context, gpu_index, completed[gpu_index], results[gpu_index], gpu_index in busy)
            for gpu_index in context.gpu_indices
        ]
        warn_throttled(judgments, throttled)
        rows = [judged_row.row for judged_row in judgments]
        # Speeds are recorded and not judged: all GPUs use the host's cores together.
        rows += [
            CertificateRow(
                key=f"inference/concurrency-{level.connections}",
                subject=context.label((gpu_index,)),
                gpus=[gpu_index],
                unit="tok/s",
                verdict="RECORDED",
                measured=sum(load.level.output_tokens_per_s for load in level.streams),
            )
            for gpu_index, result in enumerate(results)
            if result is not None
            for level in result.mixed
        ]
        return self.report(rows, [*make_findings(self.name, judgments), *findings], conditions)


def _demo_folder(context: CertifyContext, gpu_index: int) -> Path:
    return context.folder / f"inference-{gpu_index}"


def _run_demo(context: CertifyContext, gpu_index: int) -> CompletedRun:
    levels = _LEVELS.get(context.tier, _LEVELS_OF_LARGER)
    command = [sys.executable, "-m", "meltcore.cli.main", "demo", "--levels", levels, "--no-clients"]
    command += ["--device", "cuda", "--tasks", _TASKS]
    environment = {**context.environment(), "CUDA_VISIBLE_DEVICES": context.gpus[gpu_index].info.uuid}
    return context.node.run([*command, "--out", str(_demo_folder(context, gpu_index))], b"", environment, _LIMIT_S)


def _result(context: CertifyContext, gpu_index: int) -> RunResult | None:
    """Return the result of the only run in the folder. Returns None if the run wrote no result."""
    folder = _demo_folder(context, gpu_index)
    runs = sorted(folder.glob("*-demo")) if folder.is_dir() else []
    try:
        return read_result(runs[-1]) if runs else None
    except ConfigError:
        return None  # a run that was interrupted has no result, and its verdict says so


def _judge_demo(
    context: CertifyContext, gpu_index: int, completed: CompletedRun, result: RunResult | None, busy: bool
) -> Judgment:
    row = CertificateRow(
        key="inference/accuracy",
        subject=context.label((gpu_index,)),
        gpus=[gpu_index],
        unit="% correct",
        verdict="UNKNOWN",
        floor=_ACCURACY_FLOOR,
    )
    judgment = Judgment(row)
    name = context.gpus[gpu_index].info.name
    accuracies = {} if result is None else _accuracies(result)
    devices = {} if result is None else result.settings.get("devices", {})
    elsewhere = [f"{model} ran on {device}" for model, device in devices.items() if not str(device).startswith(name)]
    row.measured = min(accuracies.values(), default=None)
    answers = ", ".join(f"{part} {accuracy:.1f} % right" for part, accuracy in accuracies.items())
    if completed.returncode is None:
        judgment.set_verdict("UNKNOWN", "TIMED_OUT", f"the run took more than {_LIMIT_S:.0f} s and was killed")
    elif result is None or row.measured is None:
        code, line = completed.returncode, last_line(completed)
        judgment.set_verdict("UNKNOWN", "PROBE_FAILED", f"the run ended with status {code} without an answer: {line}")
    elif elsewhere or not devices:
        reason = ", ".join(elsewhere) or "the server named no device"
        judgment.set_verdict("UNKNOWN", "PROBE_FAILED", f"the answers say nothing about {name}: {reason}")
    elif row.measured < _ACCURACY_FLOOR:
        judgment.set_verdict("FAIL", "WRONG_ANSWERS", answers)
    elif completed.returncode != _PASSED:
        reasons = "; ".join(result.reasons[:3]) or last_line(completed)
        judgment.set_verdict("UNKNOWN", "PROBE_FAILED", f"{answers}, but the run did not pass: {reasons}")
    elif busy:
        judgment.set_verdict("INVALID", "BUSY", "another program was computing on it")
    else:
        row.verdict, row.note = "PASS", f"{', '.join(devices)} on {name}: {answers}"
    return judgment


def _accuracies(result: RunResult) -> dict[str, float]:
    """Return the percentages of correct answers: unloaded, under load, and by other task.

    A failed request is no answer.
    """
    evaluation = result.evaluation
    if evaluation is None:
        return {}
    correct = Counter({"unloaded": evaluation.correct})
    answered = Counter({"unloaded": evaluation.total - evaluation.failed})
    streams = [load.level for mixed_level in result.mixed for load in mixed_level.streams]
    for level in [*result.levels, *streams]:
        if level.accuracy is not None:
            part = "under load" if level.task is None else level.task.task
            correct[part] += round(level.accuracy * level.requests)
            answered[part] += level.succeeded
    return {part: 100 * correct[part] / number for part, number in answered.items() if number}
