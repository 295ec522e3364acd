"""Collects a submission from finished runs: start script, write-up, result files and a record of the checks."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import meltcore
from meltcore.common.errors import ConfigError
from meltcore.common.files import write_atomic, write_document
from meltcore.measure.documents.runfolder import RESULT_FILE, read_result
from meltcore.measure.documents.schema import CheckResult, RunResult
from meltcore.measure.documents.submission import SUBMISSION_FILE, Submission
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.experiments.evals.config import SubmissionConfig
from meltcore.measure.experiments.evals.evaluation import score_runs
from meltcore.measure.experiments.evals.public_harness import as_json, correctness, public_score, throughput
from meltcore.measure.experiments.evals.rules import SubmittedRun, broken_rules, hackathon_gates
from meltcore.measure.experiments.evals.write_up import write_up

START_SCRIPT = "start_server.sh"
WRITE_UP_FILE = "WRITEUP.md"
CORRECTNESS_FILE, THROUGHPUT_FILE = "results/correctness.json", "results/throughput.json"
_GSM8K_COMMAND = "meltcore eval gsm8k URL --data test.jsonl"
_THROUGHPUT_COMMAND = "meltcore eval throughput URL --tokenizer MODEL_FOLDER"
_ALL_COMMAND = "meltcore eval all URL --data test.jsonl --tokenizer MODEL_FOLDER"
# What a server says of itself; other settings are those of the measurement, which its result holds.
_SERVER_SETTINGS = ("model", "weights", "weight_dtypes", "kv_cache_dtype", "dtype", "speculative_decoding", "device",
                    "replicas", "max_model_len", "tokenizer", "debug")  # fmt: skip


class SubmissionEvidence(NamedTuple):
    """Holds the chosen runs, and one result that combines them."""

    runs: list[SubmittedRun]
    result: RunResult


def find_evidence(paths: Sequence[str]) -> SubmissionEvidence:
    """Choose the newest finished GSM8K and throughput runs among `paths`: run folders, or folders of run folders.

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
    if full_run is None:
        raise AssertionError("there is a run of each kind, so either one has both or each kind has one of its own")
    return [full_run]


def _usable_runs(paths: Sequence[str]) -> tuple[list[SubmittedRun], list[str]]:
    """Return the finished evaluations, and "name (reason)" for each evaluation that cannot be submitted."""
    usable_runs, skipped_runs = [], []
    for path in _result_paths(paths):
        result = read_result(path)
        if result.command != "eval" or result.settings.get("what") not in ("gsm8k", "throughput", "all", "baseline"):
            continue
        run = SubmittedRun(path, result)
        reason = _unusable_reason(result)
        if reason is None:
            usable_runs.append(run)
        else:
            skipped_runs.append(f"{path.name} ({reason})")
    return usable_runs, skipped_runs


def _unusable_reason(result: RunResult) -> str | None:
    if result.settings.get("what") == "baseline":
        return "another server's, as a baseline"
    if result.status != "complete":
        return "partial"
    if result.settings.get("speed_only"):
        return "--speed-only: no answer was checked"
    return None


def _result_paths(paths: Sequence[str]) -> Iterable[Path]:
    for path in map(Path, paths):
        if (path / RESULT_FILE).is_file() or path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(folder for folder in path.iterdir() if (folder / RESULT_FILE).is_file())


def collect(folder: Path, evidence: SubmissionEvidence, config: SubmissionConfig) -> Submission:
    """Write the submission into `folder`, which must be new or empty. The caller adds the report.

    If a rule does not hold, only the record of the checks is written. Raises ConfigError if `folder` is not empty, or
    if the checkout lacks a document.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; give a new folder, so that no file of another submission stays")
    gates = hackathon_gates(evidence.runs) if config.rules == "hackathon" else []
    if broken_rules(gates):
        return _write_record(folder, evidence, config, gates, "REFUSED")
    source = find_source(config.source)
    correctness_result, throughput_result = correctness(evidence.result), throughput(evidence.result)
    evidence.result.gates += gates
    score = public_score(correctness_result, throughput_result)
    write_up_text = write_up(source, evidence.result, gates, throughput_result, score)
    (folder / "results").mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CORRECTNESS_FILE, as_json(correctness_result))
    write_atomic(folder / THROUGHPUT_FILE, as_json(throughput_result))
    write_atomic(folder / WRITE_UP_FILE, write_up_text.encode())
    shutil.copy(source / "scripts" / START_SCRIPT, folder / START_SCRIPT)  # keeps its mode: it can be run
    verdict: Verdict = "ACCEPTED" if gates else "NOT CHECKED"
    return _write_record(folder, evidence, config, gates, verdict, score)


def find_source(source_option: str | None) -> Path:
    """Return the checkout with the documents and the start script. Raises ConfigError if they are missing."""
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
