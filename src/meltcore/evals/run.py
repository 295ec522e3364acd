"""One evaluation of one server, as a result in the common schema."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from meltcore.evals.api import Api
from meltcore.evals.ask import failures, server_died
from meltcore.evals.conformance import run_checks
from meltcore.evals.problems import CONCURRENCY, evaluate
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.schema import CheckResult, Evaluation, RunResult
from meltcore.results.served import model_notes
from meltcore.results.wording import percent

What = Literal["problems", "conformance"]


def run_eval(
    url: str,
    what: What,
    *,
    model: str | None = None,
    api_key: str | None = None,
    at_least: float | None = None,
    concurrency: int = CONCURRENCY,
    arguments: Sequence[str] = (),
    on_answer: Callable[[int, int, int], None] | None = None,
    on_check: Callable[[CheckResult], None] | None = None,
) -> RunResult:
    """Evaluate `url`. FAILED where a check fails, a request fails, or the share right is below `at_least`;
    a partial run, SERVER_DIED, where the server does not live to the last problem.

    Raises ConfigError where the server cannot be reached or names no model.
    """
    api = Api(url, api_key=api_key)
    model, facts = api.served(model)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    checks: list[CheckResult] = []
    evaluation = None
    if what == "conformance":
        checks = run_checks(api, model, on_check)
    else:
        evaluation = evaluate(api, model, concurrency=concurrency, on_progress=on_answer)
    death = None if evaluation is None else server_died(api, evaluation)
    if death is not None:
        evaluation = None  # the share right of what was answered is that of nothing
    reasons = _reasons(checks, evaluation, at_least) if death is None else [death]
    return RunResult(
        command="eval",
        status="complete" if death is None else "partial",
        started=started,
        duration_s=time.monotonic() - clock,
        fingerprint=take_fingerprint(arguments),
        settings={"what": what, "model": model, "concurrency": concurrency, "at_least": at_least, **facts},
        accuracy=evaluation.share if evaluation else None,
        evaluation=evaluation,
        checks=checks,
        verdict="SERVER_DIED" if death else "FAILED" if reasons else "OK",
        reasons=reasons,
        notes=model_notes(facts),
    )


def _reasons(checks: Sequence[CheckResult], evaluation: Evaluation | None, at_least: float | None) -> list[str]:
    failed = sum(check.status == "FAIL" for check in checks)
    reasons = [f"{failed} of {len(checks)} API checks failed"] if failed else []
    if evaluation is not None:
        reasons += failures(evaluation)
    if evaluation is not None and at_least is not None and evaluation.share < at_least:
        reasons.append(f"{percent(evaluation.share)} right; at least {percent(at_least)} was asked for")
    return reasons
