"""One run of `meltcore eval URL gsm8k`, as a result in the common schema."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from meltcore.errors import MeltcoreError
from meltcore.evals import gsm8k
from meltcore.evals.api import Api
from meltcore.evals.ask import failures, server_died
from meltcore.evals.gsm8k_data import DATASET, Item, Shots, read_items, read_shots
from meltcore.evals.harness import compare, find_package, not_compared, run_harness
from meltcore.evals.problems import CONCURRENCY
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.schema import RunResult
from meltcore.results.served import model_notes

ANSWERS_FILE = "gsm8k.jsonl"


def run_gsm8k(
    url: str,
    *,
    data: str = DATASET,
    shots: str | None = None,
    limit: int = gsm8k.LIMIT,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = CONCURRENCY,
    harness: str | None = None,
    arguments: Sequence[str] = (),
    on_answer: Callable[[int, int, int], None] | None = None,
    folder: Path | None = None,
) -> RunResult:
    """Ask `limit` problems of `data`. FAILED where a gate fails or a request does; a partial run, SERVER_DIED, where
    the server does not live to the end.

    `harness`: a Python that has lm-evaluation-harness, which then asks the same and is compared item by item; where it
    fails, that is a failed gate and our own answers are kept. Every answer is written into `folder` as it comes.

    Raises ConfigError where data or examples cannot be read, or the server cannot be reached or names no model.
    """
    package = find_package(harness) if harness is not None else None
    items, examples = read_items(data, limit), read_shots(shots, package)
    api = Api(url, api_key=api_key)
    model, facts = api.served(model)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    keep = None if folder is None else gsm8k.written_to(folder / ANSWERS_FILE)
    marked = gsm8k.ask_items(
        api, model, items, examples, concurrency=concurrency, on_progress=on_answer, on_marked=keep
    )
    evaluation = gsm8k.sum_up(marked)
    death = server_died(api, evaluation)
    gates = [gsm8k.gate(evaluation)]
    if death is not None:
        gates = [gsm8k.gate_not_run(len(items), death)]
    elif harness is not None:
        try:
            theirs = run_harness(
                harness, api.chat_url, model, items, examples, api_key=api_key, concurrency=concurrency
            )
            gates += compare(marked, theirs, examples)
        except MeltcoreError as error:  # the answers are there and marked: they are kept
            gates.append(not_compared(error))
    reasons = [f"gate failed: {gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"]
    reasons += failures(evaluation) if death is None else [death]
    told = {"data": data if data == DATASET else Path(data).resolve().name, "limit": limit, "shots": examples.source}
    return RunResult(
        command="eval",
        status="complete" if death is None else "partial",
        started=started,
        duration_s=time.monotonic() - clock,
        fingerprint=take_fingerprint(arguments),
        settings={"what": "gsm8k", "model": model, "concurrency": concurrency, **told, **facts},
        accuracy=evaluation.share if death is None else None,
        evaluation=evaluation if death is None else None,
        gates=gates,
        verdict="SERVER_DIED" if death else "FAILED" if reasons else "OK",
        reasons=reasons,
        notes=[*_items_notes(items), *_shots_notes(examples), *model_notes(facts)],
    )


def _items_notes(items: Sequence[Item]) -> list[str]:
    if gsm8k.published(items):
        return []
    return [f"Not the first {gsm8k.LIMIT} problems of GSM8K's test split: it compares with no published result."]


def _shots_notes(shots: Shots) -> list[str]:
    if shots.comparable:
        return []
    if not shots.examples:
        return ["Asked without examples: not comparable with published GSM8K results, which have eight."]
    what = "with eight examples of our own: not comparable with published GSM8K results"
    return [f"Asked {what}. Install lm-eval or give --shots FILE."]
