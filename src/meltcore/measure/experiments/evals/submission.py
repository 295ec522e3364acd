"""Collects a submission from finished runs: start script, write-up, result files and a record of the checks.

A run's settings hold the fields that the server reported about itself in /v1/models (`served_model.py`). The rules of a
competition are checked against these settings. A rule about a setting that a run lacks is NOT RUN, which does not pass.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import meltcore
from meltcore.common.errors import ConfigError
from meltcore.common.files import write_atomic, write_document
from meltcore.measure.documents.runfolder import RESULT_FILE, read_result
from meltcore.measure.documents.schema import CheckResult, RunResult
from meltcore.measure.documents.submission import SUBMISSION_FILE, Submission
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.experiments.evals.config import SubmissionConfig
from meltcore.measure.experiments.evals.evaluation import PUBLISHED_SETTINGS, score_runs
from meltcore.measure.experiments.evals.gsm8k import ANSWERS_FILE
from meltcore.measure.experiments.evals.submission_files import correctness, public_score, throughput, write_up

# The inference track of GPU MODE and PyTorch in Paris, April 2026.
HACKATHON_MODEL = "Qwen/Qwen3.5-35B-A3B"
# Norms and decay rates may be held in more bits than BF16, never in fewer.
_ALLOWED_WEIGHT_DTYPES = frozenset({"bfloat16", "float32"})
_FORBIDDEN_DEBUG_OPTION = "uniform-routing"  # a debug option that replaces the router's choice of experts
_THINKING_TAGS = ("<think>", "</think>")
START_SCRIPT = "start_server.sh"
WRITE_UP_FILE = "WRITEUP.md"
CORRECTNESS_FILE, THROUGHPUT_FILE = "results/correctness.json", "results/throughput.json"
_GSM8K_COMMAND = "meltcore eval gsm8k URL --data test.jsonl"
_THROUGHPUT_COMMAND = "meltcore eval throughput URL --tokenizer MODEL_FOLDER"
_ALL_COMMAND = "meltcore eval all URL --data test.jsonl --tokenizer MODEL_FOLDER"
# What a server says of itself; other settings are those of the measurement, which its result holds.
_SERVER_SETTINGS = ("model", "weights", "weight_dtypes", "kv_cache_dtype", "dtype", "speculative_decoding", "device",
                    "replicas", "max_model_len", "tokenizer", "debug")  # fmt: skip


@dataclass(frozen=True)
class SubmittedRun:
    """Holds one run of a submission: the path of its folder, and its result."""

    path: Path
    result: RunResult

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.path if self.path.is_dir() else self.path.parent


def hackathon_gates(runs: Sequence[SubmittedRun]) -> list[CheckResult]:
    """Return one gate per rule of the hackathon.

    The rules say what the served process may use, and which workload must be measured. A gate passes only if its rule
    holds in every run, because GSM8K and the levels may come from separate runs.
    """
    return [
        _setting_gate(runs, "weights in BF16 (no FP8, INT8 or 4-bit)", "weight_dtypes", _is_bf16_weights),
        _setting_gate(runs, "computation in BF16", "dtype", lambda value: value == "bfloat16"),
        _setting_gate(runs, "KV cache in BF16", "kv_cache_dtype", lambda value: value == "bfloat16"),
        # The rules allow a method whose output is that of the model alone. No run shows that yet.
        _setting_gate(
            runs,
            "no speculative decoding without proof of equal output",
            "speculative_decoding",
            lambda value: value == "none",
        ),
        _setting_gate(runs, "the checkpoint's weights", "weights", lambda value: value == "real"),
        _debug_gate(runs),
        _setting_gate(runs, f"model {HACKATHON_MODEL}", "model", lambda value: value == HACKATHON_MODEL),
        _thinking_gate(runs),
        _workload_gate(runs),
        _problems_gate(runs),
    ]


def _setting_gate(runs: Sequence[SubmittedRun], name: str, key: str, is_allowed: Callable[[Any], bool]) -> CheckResult:
    """Return a gate that requires `is_allowed` of the setting `key` in every run."""
    runs_without_setting = [run.path.name for run in runs if run.result.settings.get(key) is None]
    if runs_without_setting:
        names = ", ".join(runs_without_setting)
        reason = f"{key} is not stated by the server of {names}; measure it again with this version"
        return CheckResult(name=name, status="NOT RUN", detail=reason)
    values = [run.result.settings[key] for run in runs]
    value_texts = dict.fromkeys(", ".join(value) if isinstance(value, list) else str(value) for value in values)
    return CheckResult(
        name=name,
        status="PASS" if all(map(is_allowed, values)) else "FAIL",
        detail=f"{key}: {' and '.join(value_texts)}",
    )


def _is_bf16_weights(value: object) -> bool:
    return isinstance(value, list) and "bfloat16" in value and set(value) <= _ALLOWED_WEIGHT_DTYPES


def _debug_gate(runs: Sequence[SubmittedRun]) -> CheckResult:
    # A server states debug options only where it has any.
    debug_options = sorted({option for run in runs for option in run.result.settings.get("debug", ())})
    return CheckResult(
        name="no option that changes answers",
        status="FAIL" if _FORBIDDEN_DEBUG_OPTION in debug_options else "PASS",
        detail=f"debug: {', '.join(debug_options) or 'none'}",
    )


def _thinking_gate(runs: Sequence[SubmittedRun]) -> CheckResult:
    name = "no <think> tag in an answer"
    paths = [path for run in runs if (path := run.folder / ANSWERS_FILE).is_file()]
    if not paths:
        reason = f"no {ANSWERS_FILE} beside {', '.join(run.path.name for run in runs)}"
        return CheckResult(name=name, status="NOT RUN", detail=reason)
    answers = [answer for path in paths for answer in _read_answers(path)]
    num_tagged = sum(any(tag in answer for tag in _THINKING_TAGS) for answer in answers)
    return CheckResult(
        name=name,
        status="FAIL" if num_tagged else "PASS",
        detail=f"{num_tagged} of {len(answers)} GSM8K answers have one",
    )


def _read_answers(path: Path) -> Iterator[str]:
    try:
        for line in path.read_bytes().splitlines():
            yield str(json.loads(line)["answer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the answers in {path}: {error!r}") from error


def _workload_gate(runs: Sequence[SubmittedRun]) -> CheckResult:
    settings = {name: value for run in runs for name, value in run.result.settings.items()}
    differences = [
        f"{name} {settings.get(name, 'unknown')} instead of {value}"
        for name, value in PUBLISHED_SETTINGS.items()
        if settings.get(name) != value
    ]
    detail = ", ".join(differences) or ", ".join(f"{name} {value}" for name, value in PUBLISHED_SETTINGS.items())
    return CheckResult(name="the public harness's workload", status="FAIL" if differences else "PASS", detail=detail)


def _problems_gate(runs: Sequence[SubmittedRun]) -> CheckResult:
    name = "GSM8K's own problems and examples"
    run_settings = [run.result.settings for run in runs if run.result.evaluation is not None]
    if any("comparable" not in settings for settings in run_settings):
        return CheckResult(
            name=name, status="NOT RUN", detail="the run does not state it; run eval gsm8k with this version"
        )
    detail = ", ".join(f"data {settings.get('data')}, examples: {settings.get('shots')}" for settings in run_settings)
    is_passed = bool(run_settings) and all(settings["comparable"] for settings in run_settings)
    return CheckResult(name=name, status="PASS" if is_passed else "FAIL", detail=detail)


class SubmissionEvidence(NamedTuple):
    """Holds the chosen runs, and one result that combines all runs."""

    runs: list[SubmittedRun]
    result: RunResult


def find_evidence(paths: Sequence[str]) -> SubmissionEvidence:
    """Return the newest finished GSM8K and throughput runs among `paths`: run folders, or folders of run folders.

    Raises ConfigError if a run is missing; the error names the command that makes it. Raises ConfigError also if the
    runs cannot be scored together.
    """
    usable_runs, skipped_runs = _usable_runs(paths)
    skipped_runs = [*skipped_runs, *(f"{path}: there is no such folder" for path in paths if not Path(path).exists())]
    gsm8k_runs = [run for run in usable_runs if run.result.evaluation is not None]
    throughput_runs = [run for run in usable_runs if run.result.levels]
    for part_runs, part_name, command in (
        (gsm8k_runs, "GSM8K", _GSM8K_COMMAND),
        (throughput_runs, "throughput", _THROUGHPUT_COMMAND),
    ):
        if not part_runs:
            raise ConfigError(
                f"no finished {part_name} run in {', '.join(paths)}: run `{command}`, or `{_ALL_COMMAND}` for both"
                + "".join(f"; skipped {skipped_run}" for skipped_run in skipped_runs)
            )
    runs = _newest_runs(gsm8k_runs, throughput_runs)
    return SubmissionEvidence(runs, score_runs([run.path for run in runs]))


def _newest_runs(gsm8k_runs: Sequence[SubmittedRun], throughput_runs: Sequence[SubmittedRun]) -> list[SubmittedRun]:
    """Return the newest full run, or the newest separate run of each kind if both are newer than the full run."""

    def started(run: SubmittedRun) -> str:
        return run.result.started

    full_run = max((run for run in gsm8k_runs if run in throughput_runs), key=started, default=None)
    gsm8k_runs, throughput_runs = (
        [run for run in runs if run not in other_runs]
        for runs, other_runs in ((gsm8k_runs, throughput_runs), (throughput_runs, gsm8k_runs))
    )
    if gsm8k_runs and throughput_runs:
        newest_pair = [max(gsm8k_runs, key=started), max(throughput_runs, key=started)]
        if full_run is None or started(full_run) < min(map(started, newest_pair)):
            return newest_pair
    assert full_run is not None, "there is a run of each kind: one has both, or each kind has one of its own"
    return [full_run]


def _usable_runs(paths: Sequence[str]) -> tuple[list[SubmittedRun], list[str]]:
    """Return the finished evaluations, and "name (reason)" for each evaluation that cannot be submitted."""
    usable_runs, skipped_runs = [], []
    for path in _result_paths(paths):
        result = read_result(path)
        if result.command != "eval" or result.settings.get("what") not in ("gsm8k", "throughput", "all", "baseline"):
            continue
        obstacles = {
            "another server's, as a baseline": result.settings["what"] == "baseline",
            "partial": result.status != "complete",
            "--speed-only: no answer was checked": result.settings.get("speed_only"),
        }
        reason = next((reason for reason, holds in obstacles.items() if holds), None)
        if reason is None:
            usable_runs.append(SubmittedRun(path, result))
        else:
            skipped_runs.append(f"{path.name} ({reason})")
    return usable_runs, skipped_runs


def _result_paths(paths: Sequence[str]) -> Iterable[Path]:
    for path in map(Path, paths):
        if (path / RESULT_FILE).is_file() or path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(folder for folder in path.iterdir() if (folder / RESULT_FILE).is_file())


def collect(folder: Path, evidence: SubmissionEvidence, config: SubmissionConfig) -> Submission:
    """Write the submission into `folder`, which must be new or empty, and return its record.

    The caller adds the report. If a rule does not hold, only the record of the checks is written. Raises ConfigError if
    `folder` is not empty, or if the checkout lacks a document.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; give a new folder, so that no file of another submission stays")
    gates = hackathon_gates(evidence.runs) if config.rules == "hackathon" else []
    if any(gate.status != "PASS" for gate in gates):
        return _write_record(folder, evidence, config, gates, "REFUSED")
    source = find_source(config.source)
    correctness_result, throughput_result = correctness(evidence.result), throughput(evidence.result)
    evidence.result.gates += gates
    score = public_score(correctness_result, throughput_result)
    write_up_text = write_up(source, evidence.result, gates, throughput_result, score)
    write_document(folder / CORRECTNESS_FILE, correctness_result)
    write_document(folder / THROUGHPUT_FILE, throughput_result)
    write_atomic(folder / WRITE_UP_FILE, write_up_text.encode())
    shutil.copy(source / "scripts" / START_SCRIPT, folder / START_SCRIPT)  # keeps its mode: it can be run
    verdict: Verdict = "ACCEPTED" if gates else "NOT CHECKED"
    return _write_record(folder, evidence, config, gates, verdict, score)


def find_source(source_option: str | None) -> Path:
    """Return the checkout with the documents and the start script. Raises ConfigError if a file is missing."""
    source = Path(source_option) if source_option is not None else Path(meltcore.__file__).parents[2]
    missing = [name for name in ("docs", f"scripts/{START_SCRIPT}") if not (source / name).exists()]
    if missing:
        raise ConfigError(f"{source} has no {' and no '.join(missing)}: give the checkout of meltcore with --source")
    return source


def _write_record(
    folder: Path,
    evidence: SubmissionEvidence,
    config: SubmissionConfig,
    gates: list[CheckResult],
    verdict: Verdict,
    score: float | None = None,
) -> Submission:
    file_names = [] if verdict == "REFUSED" else [START_SCRIPT, WRITE_UP_FILE, CORRECTNESS_FILE, THROUGHPUT_FILE]
    record = Submission(
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        meltcore=meltcore.__version__,
        rules=config.rules,
        verdict=verdict,
        gates=gates,
        settings={
            run.folder.resolve().name: {
                name: value for name in _SERVER_SETTINGS if (value := run.result.settings.get(name))
            }
            for run in evidence.runs
        },
        public_score=score,
        files={name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in file_names},
    )
    write_document(folder / SUBMISSION_FILE, record)
    return record
