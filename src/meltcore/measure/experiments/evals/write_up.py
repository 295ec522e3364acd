"""Builds the one-page write-up of a submission from sections of the documentation and the submitted results.

No text is written twice. A section or a decision that the documents lack is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import CheckResult, RunResult
from meltcore.measure.documents.values.formatting import evaluation_line, format_number
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.public_harness import Throughput

_ARCHITECTURE_PAGE, _DECISIONS_INDEX = "docs/architecture.md", "docs/decisions/index.md"
_LIFE_HEADING = "A request's life"
_FP8_PAGE = "fp8-kv-cache.md"  # no part of a server whose cache is not FP8
# A submission is measured on one node, and its speed is not that of the package's layout.
_OTHER_PAGES = ("cluster-placement.md", "cluster-transport.md", "package-layout.md")
_DECISION = re.compile(r"^\*\*Decision:\*\*\s+(.*?)\n\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\([^)]*\)")
_INDEX_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", re.MULTILINE)


def write_up(
    source: Path, result: RunResult, gates: Sequence[CheckResult], throughput: Throughput, score: float
) -> str:
    """Return the write-up as Markdown. Raises ConfigError if a document lacks a required part.

    `source` is the checkout with the documents.
    """
    architecture = _read(source / _ARCHITECTURE_PAGE)
    parts = [
        f"# Meltcore: {throughput.model}",
        "## Approach",
        _without_links(find_section(architecture, None)),
        "## Architecture",
        _without_links(find_section(architecture, _LIFE_HEADING)),
        "## Optimizations",
        "\n".join(decision_items(source, fp8_cache="float8" in str(result.settings.get("kv_cache_dtype")))),
        "## Results",
        *_result_paragraphs(result, throughput, score),
    ]
    if gates:
        parts += ["## Rules", "\n".join(f"- {gate.status}: {gate.name} ({gate.detail})" for gate in gates)]
    return "\n\n".join([*parts, "## Reproduce", _reproduce_text(result)]) + "\n"


def find_section(text: str, heading: str | None) -> str:
    """Return the text below a heading of second level.

    If `heading` is None, return the text between the title and the first such heading. Raises ConfigError if the
    heading is missing.
    """
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    if heading is None:
        return re.sub(r"^# .*$", "", sections[0], flags=re.MULTILINE).strip()
    for heading_text, body in zip(sections[1::2], sections[2::2], strict=True):
        if heading_text.strip() == heading:
            return body.strip()
    raise ConfigError(f"the documents have no section {heading!r} for the write-up")


def decision_items(source: Path, *, fp8_cache: bool) -> list[str]:
    """Return one list item per decision page about the speed of one node. Raises ConfigError if one is missing."""
    index = source / _DECISIONS_INDEX
    rows = _INDEX_ROW.findall(_read(index))
    if not rows:
        raise ConfigError(f"{index} lists no decisions for the write-up")
    items = []
    for title, page_name in rows:
        if page_name in _OTHER_PAGES or (page_name == _FP8_PAGE and not fp8_cache):
            continue
        match = _DECISION.search(_read(index.parent / page_name))
        if match is None:
            raise ConfigError(f"{index.parent / page_name} states no decision for the write-up")
        items.append(f"- {title}: {_without_links(' '.join(match[1].split()))}")
    return items


def _result_paragraphs(result: RunResult, throughput: Throughput, score: float) -> list[str]:
    rows = ["| concurrency | weight | tok/s, prompts and answers | answered | wall s |", "|--:|--:|--:|--:|--:|"]
    rows += [
        f"| {level.concurrency} | {WEIGHTS.get(level.concurrency, 1)} | {level.throughput_tok_per_sec:,.2f} "
        f"| {level.successful_requests} of {level.successful_requests + level.failed_requests} "
        f"| {level.wall_time_sec:,.2f} |"
        for level in throughput.results
    ]
    eval_score = result.eval_score
    lines = [f"Score of these files: {score:,.2f}."]
    if eval_score is not None and eval_score.zero_reasons:
        lines.append(f"A check failed, so our own score is 0: {'; '.join(eval_score.zero_reasons)}.")
    elif eval_score is not None:
        lines.append(
            f"Counted by the server, chat template and end tokens included: "
            f"{format_number(eval_score.total_tokens_per_s)}; "
            f"answers alone: {format_number(eval_score.output_tokens_per_s)}."
        )
    accuracy = [] if result.evaluation is None else [evaluation_line(result.evaluation)]
    notes = ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return ["\n".join(rows), " ".join(lines), *accuracy, *notes]


def _reproduce_text(result: RunResult) -> str:
    settings, fingerprint = result.settings, result.fingerprint
    gpu_names = [gpu.name for gpu in fingerprint.gpus]
    machine = ", ".join(f"{gpu_names.count(name)} x {name}" for name in dict.fromkeys(gpu_names)) or fingerprint.cpu
    versions = ", ".join(
        f"{name} {fingerprint.versions[name]}"
        for name in ("meltcore", "torch", "triton")
        if name in fingerprint.versions
    )
    replicas, device, dtype = (settings.get(name, "not stated") for name in ("replicas", "device", "dtype"))
    lines = [
        "- `./start_server.sh` starts the server, waits until /health answers 200 and leaves it running.",
        f"- Served: replicas: {replicas}; device: {device}; computation: {dtype}.",
        f"- Measured on {machine}; {versions}; source {fingerprint.git_revision or 'of the installed package'}.",
    ]
    return "\n".join(lines)


def _without_links(text: str) -> str:
    """Remove images, and links to pages that are not part of the submission."""
    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(lambda link: "" if link[1] else link[2], text)).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path} for the write-up: {error.strerror}") from error
