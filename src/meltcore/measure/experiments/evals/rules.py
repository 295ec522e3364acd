"""Checks the rules of a competition against what a server reported about itself when it was measured.

The served process reports its precision in /v1/models (`served_model.py`), and every run keeps the report in its
settings. A rule about a setting that a run lacks is NOT RUN, which does not pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import CheckResult, RunResult
from meltcore.measure.experiments.evals.evaluation import PUBLISHED_SETTINGS
from meltcore.measure.experiments.evals.gsm8k import ANSWERS_FILE

# The inference track of GPU MODE and PyTorch in Paris, April 2026.
HACKATHON_MODEL = "Qwen/Qwen3.5-35B-A3B"
# Norms and decay rates may be held in more bits than BF16, never in fewer.
_ALLOWED_WEIGHT_DTYPES = frozenset({"bfloat16", "float32"})
_FORBIDDEN_DEBUG_OPTION = "uniform-routing"  # a debug option that replaces the router's choice of experts
_THINKING_TAGS = ("<think>", "</think>")


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
    holds in every run: GSM8K and the levels may come from separate runs.
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


def broken_rules(gates: Sequence[CheckResult]) -> list[str]:
    """Return one line per rule that does not hold or was not checked."""
    return [f"{gate.name}: {gate.status}: {gate.detail}" for gate in gates if gate.status != "PASS"]


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
