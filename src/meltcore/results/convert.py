"""Converts documents of schema version 1 to version 2, by a table of renamed keys and values per type.

Readers convert on read (`files.read_document`), so a stored baseline stays usable; `meltcore report --convert` rewrites
files. No number changes: tests/results/test_convert.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meltcore.errors import ConfigError
from meltcore.results.schema import SCHEMA_VERSION

TYPE_KEY = "document"  # names the type of a document since version 2
VERSION_KEY = "schema_version"


@dataclass(frozen=True)
class Renames:
    """The keys and values of one document type that were renamed since version 1.

    A path names an old key relative to the document, as in "checks.*.rows.*.share"; "*" stands for every element of a
    list and every key of a mapping. `keys` maps a path to the new last key. `values` maps a path of a string to
    (regular expression, replacement) pairs. `parts` maps a path to the type whose table applies to the value there.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


# Names of a certificate's checks (several, separated by commas, in a merged finding), and keys of its rows, which also
# occur in messages.
_CHECKS = ((r"\bproduct\b", "gemm"),)
_METRICS = (
    (r"\bMatrix product\b", "GEMM"),
    (r"\bproduct/", "gemm/"),
    (r"\bpeers/one-way\b", "peers/unidirectional"),
    (r"\bpeers/both-ways\b", "peers/bidirectional"),
    (r"\bhost/to-device\b", "host/host-to-device"),
    (r"\bhost/to-host\b", "host/device-to-host"),
    (r"\binference/right\b", "inference/accuracy"),
    (r"\binference/(\d+)-at-once\b", r"inference/concurrency-\1"),
)
_RUN_PARTS = {"fingerprint": "fingerprint"}
_CAUSES = (
    ("^host late$", "late launch"),
    ("^synchronisation$", "synchronization"),
    ("^copy$", "exposed copy"),
    ("^collective wait$", "exposed communication"),
    ("^host silent$", "untraced host"),
    ("^queued$", "kernel wait"),
)
_LOAD_SETTINGS = {
    "rates": "request_rate",
    "requests": "num_prompts",
    "warmup": "num_warmups",
    "may_be_empty": "allow_empty",
    "record_chunks": "record_event_times",
}
_LEVEL_NAMES = ((r"^([\d,]+) at once$", r"concurrency \1"),)
_LEVEL_KEYS = {
    "levels.*.chunk_to_token_ratio": "events_per_token",
    "levels.*.client.cpu_share": "cpu_utilization",
    "levels.*.checks.spot_checks_right": "spot_checks_correct",
}
# Every document type by the name in its "document" key, and parts that several types share.
RENAMES: dict[str, Renames] = {
    "fingerprint": Renames(),
    "run": Renames(
        keys={
            **_LEVEL_KEYS,
            **{f"settings.{old}": new for old, new in _LOAD_SETTINGS.items()},
            "settings.input_tokens": "input_len",
            "settings.output_tokens": "output_len",
            "settings.fixed_output": "ignore_eos",
            "settings.at_least": "min_accuracy",
            "evaluation.asked": "total",
            "evaluation.right": "correct",
            "evaluation.strict_right": "strict_correct",
            "evaluation.low": "ci_low",
            "evaluation.high": "ci_high",
            "evaluation.wrong": "incorrect",
            "evaluation.wrong.*.got": "actual",
            "speed_sum": "weighted_throughput",
            "eval_score.zero_because": "zero_reasons",
        },
        values={
            "levels.*.itl_unit": (("^chunk$", "event"),),
            "levels.*.token_count_source": (("^re-counted$", "confirmed"),),
        },
        parts=_RUN_PARTS,
    ),
    "score": Renames(keys={"speed_sum": "weighted_throughput"}, parts=_RUN_PARTS),
    "snapshot": Renames(parts=_RUN_PARTS),
    "certificate": Renames(
        keys={
            "checks.*.rows.*.share": "ratio",
            "checks.*.rows.*.expectations.*.why": "basis",
            "checks.*.why": "reason",
            "checks.*.conditions.*.reasons": "clock_reasons",
            "unseen": "unverified",
        },
        values={
            "required.*": _CHECKS,
            "checks.*.name": _CHECKS,
            "checks.*.title": _METRICS,
            "checks.*.rows.*.key": _METRICS,
            "checks.*.findings.*.check": _CHECKS,
            "checks.*.findings.*.message": _METRICS,
            "findings.*.check": _CHECKS,
            "findings.*.message": _METRICS,
            "unseen.*": _METRICS,
        },
        parts={"snapshot": "snapshot"},
    ),
    "tuning": Renames(
        keys={
            "tuning_version": VERSION_KEY,
            "limits_ms": "slo_ms",
            "points.*.words": "args",
            "points.*.why": "reason",
            "points.*.within_limits": "slo_attainment",
            "points.*.running_peak": "peak_running",
            "points.*.settings.seqs": "max_num_seqs",
            "points.*.settings.tokens": "max_num_batched_tokens",
            "points.*.settings.length": "max_model_len",
            "points.*.answers.right": "correct",
            **{f"load.{old}": new for old, new in _LOAD_SETTINGS.items()},
            "points.*.answers.same_text": "identical",
            "points.*.answers.logprob_mean": "logprob_diff_mean",
            "points.*.answers.logprob_most": "logprob_diff_max",
        },
        parts=_RUN_PARTS,
    ),
    "profile": Renames(
        keys={
            "gaps_version": VERSION_KEY,
            "reports.*.steps_by": "step_marker",
            "reports.*.budget.*.before_us": "idle_before_us",
        },
        values={
            "reports.*.by_cause.*.name": _CAUSES,
            "reports.*.pairs.*.cause": _CAUSES,
            "reports.*.budget.*.name": (
                ("^experts$", "MoE"),
                ("^attention and states$", "attention and recurrent state"),
                ("^quantisation$", "quantization"),
                ("^products$", "GEMM"),
                ("^norms and activations$", "norm and activation"),
                ("^cache and embedding$", "KV cache and embedding"),
                ("^nothing after$", "after the last kernel"),
            ),
        },
        parts=_RUN_PARTS,
    ),
    "comparison": Renames(
        keys={
            "judgement_version": VERSION_KEY,
            "why": "reason",
            **{f"load.{old}": new for old, new in _LOAD_SETTINGS.items()},
        },
        values={f"{path}.load": _LEVEL_NAMES for path in ("primary", "control", "rows.*")},
        parts=_RUN_PARTS,
    ),
    "baseline": Renames(
        keys={"starts_version": VERSION_KEY, **{f"load.{old}": new for old, new in _LOAD_SETTINGS.items()}},
        parts={"starts.*": "run"},
    ),
    "card": Renames(
        keys={
            "card_version": VERSION_KEY,
            "why": "reason",
            "parts": "evidence",
            "parts.*.kind": "type",
            "parts.*.line": "summary",
            "earlier": "superseded",
            "stories.*.judged": "compared",
        },
        parts={
            "snapshot": "snapshot",
            "certificate": "certificate",
            "benchmark": "score",
            "runs.*": "run",
            "tunings.*": "tuning",
            "profiles.*": "profile",
            "comparisons.*": "comparison",
        },
    ),
}
# The keys that identify a type in version 1, which had no "document" key: the first whose keys are all there.
_VERSION_1_TYPES: tuple[tuple[str, frozenset[str]], ...] = (
    ("card", frozenset({"card_version"})),
    ("tuning", frozenset({"tuning_version"})),
    ("comparison", frozenset({"judgement_version"})),
    ("profile", frozenset({"gaps_version"})),
    ("baseline", frozenset({"starts_version"})),
    ("certificate", frozenset({VERSION_KEY, "tier", "checks"})),
    ("snapshot", frozenset({VERSION_KEY, "topology"})),
    ("run", frozenset({VERSION_KEY, "command"})),
)
_NEWER_TYPES = frozenset({"backend-comparison", "fleet-load"})  # never written in version 1


def document_type(content: object) -> str | None:
    """Returns the document type of a parsed JSON file of any schema version; None if it is no document."""
    if not isinstance(content, dict):
        return None
    if TYPE_KEY in content:
        return str(content[TYPE_KEY])
    name = next((name for name, keys in _VERSION_1_TYPES if keys <= content.keys()), None)
    return "score" if name == "run" and content.get("command") == "bench" else name


def to_current(content: dict[str, Any]) -> dict[str, Any]:
    """Converts a document to the current schema version, and returns a current one unchanged.

    Raises ConfigError for an unknown type or version.
    """
    name = document_type(content)
    if name in _NEWER_TYPES and content.get(VERSION_KEY) == SCHEMA_VERSION:
        return content
    if name not in RENAMES:
        raise ConfigError("it is not a meltcore document")
    version_key = next((old for old, new in RENAMES[name].keys.items() if new == VERSION_KEY), VERSION_KEY)
    version = content.get(VERSION_KEY if TYPE_KEY in content else version_key)
    if version == SCHEMA_VERSION and TYPE_KEY in content:
        return content
    if version != 1:
        raise ConfigError(f"it has schema version {version}; this meltcore reads versions 1 and {SCHEMA_VERSION}")
    return _convert_part(content, name)


def _convert_part(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Converts a document or a part by its table, and adds type and version to a document."""
    converted: dict[str, Any] = _convert(content, "", RENAMES[name])
    if name == "fingerprint":
        return converted
    return {TYPE_KEY: name} | converted | {VERSION_KEY: SCHEMA_VERSION}


def _convert(value: Any, path: str, table: Renames) -> Any:
    part_type = table.parts.get(path)
    if part_type is not None and value is not None:
        return _convert_part(value, part_type)
    if isinstance(value, dict):
        converted = {}
        for key, child_value in value.items():
            child_path = _child_path(path, key, table)
            converted[table.keys.get(child_path, key)] = _convert(child_value, child_path, table)
        return converted
    if isinstance(value, list):
        return [_convert(child_value, f"{path}.*", table) for child_value in value]
    if isinstance(value, str):
        for pattern, replacement in table.values.get(path, ()):
            value = re.sub(pattern, replacement, value)
    return value


def _child_path(path: str, key: str, table: Renames) -> str:
    """Returns the path of `key` below `path`, or the path with "*" if the table has a wildcard there."""
    exact_path, wildcard_path = (f"{path}.{step}" if path else step for step in (key, "*"))
    paths = (*table.keys, *table.values, *table.parts)
    return (
        wildcard_path
        if any(candidate == wildcard_path or candidate.startswith(f"{wildcard_path}.") for candidate in paths)
        else exact_path
    )
