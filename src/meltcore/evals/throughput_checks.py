"""What must be right of a throughput level for its speed to count: answers, token counts, lengths."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.evals.throughput_plan import Planned, ThroughputConfig
from meltcore.evals.throughput_prompts import TextMaker
from meltcore.load.record import Record
from meltcore.results.schema import Gate, LevelChecks, LevelResult

# Random text need not encode to the tokens it was decoded from; the public harness allows as much.
TOLERANCE_SHARE = 0.05
TOLERANCE_TOKENS = 10
# What a chat template may add around one message: Qwen3.5 adds 12 tokens, Llama 3 with its system turn about 36. Not on
# top of the share above: who counts too much could hide in both.
TEMPLATE_TOKENS = 64
# Of a level's prompt tokens, at most, from a prefix cache: all prompts are new, and only their template is the same.
CACHED_SHARE = 0.05
# Of a level's answers, at most: more of them empty are no chance, and cheap work.
EMPTY_SHARE = 0.05
_END_TOKENS = 1  # an end token is generated and has no text


def check_level(
    config: ThroughputConfig,
    result: LevelResult,
    records: Sequence[Record],
    planned: Sequence[Planned],
    maker: TextMaker | None,
) -> None:
    """Write what was found into `result`; it FAILS where an answer, a count or a length is wrong."""
    whole = [record for record in records if record.failure is None]
    found = _lengths(config, whole, planned) + _cached(config, whole)
    if maker is not None and not config.speed_only:
        result.checks, problems = _counts_and_answers(whole, planned, maker)
        found += problems
        found += _empty(whole)
        if result.checks.counts_agree:
            result.token_count_source = "confirmed"
    if found:
        result.reasons += found
        if result.verdict in ("OK", "CLIENT_BOUND"):
            result.verdict = "FAILED"


def gates(config: ThroughputConfig, levels: Sequence[LevelResult]) -> list[Gate]:
    """One gate for each kind of check, over all planned levels; a level that never ran passes none."""
    missing = len(config.levels) - len(levels)
    asked = len(levels) * config.requests
    whole = sum(level.succeeded for level in levels)
    rest = f"; {missing} levels did not run" if missing else ""
    answered = Gate(
        name="every request answered whole",
        status="FAIL" if whole < asked or missing else "PASS",
        detail=f"{whole} of {asked}{rest}",
    )
    names = ("spot checks right", "reported tokens agree with the tokenizer's")
    if config.speed_only:
        return [answered, *(Gate(name=name, status="NOT RUN", detail="--speed-only") for name in names)]
    checks = [level.checks for level in levels if level.checks is not None]
    right, spots = sum(each.spot_checks_right for each in checks), sum(each.spot_checks for each in checks)
    agree = sum(each.counts_agree for each in checks)
    passed = (right == spots and not missing, agree == len(checks) and not missing)
    details = (f"{right} of {spots}{rest}", f"at {agree} of {len(checks)} levels{rest}")
    return [
        answered,
        *(
            Gate(name=name, status="PASS" if good else "FAIL", detail=detail)
            for name, good, detail in zip(names, passed, details, strict=True)
        ),
    ]


def _lengths(config: ThroughputConfig, whole: Sequence[Record], planned: Sequence[Planned]) -> list[str]:
    """Where the output length is fixed, an answer of another length was cheaper work than its neighbours."""
    if not (config.fixed_output or config.speed_only):
        return []
    own = [record for record in whole if planned[record.index].check is None]
    other = [record.output_tokens for record in own if record.output_tokens != config.output_tokens]
    if not other:
        return []
    return [f"{len(other)} of {len(own)} answers have not {config.output_tokens} tokens (one has {other[0]})"]


def _cached(config: ThroughputConfig, whole: Sequence[Record]) -> list[str]:
    """Prompts that the server has seen before are not computed, and the level is faster than the server is."""
    cached, prompts = sum(record.cached_tokens or 0 for record in whole), sum(record.prompt_tokens for record in whole)
    if config.reuse_prompts or cached <= CACHED_SHARE * prompts:
        return []
    return [
        f"{cached:,} of {prompts:,} prompt tokens came from a prefix cache: this server has had the prompts of"
        f" --seed {config.seed} before; take another seed, or --reuse-prompts"
    ]


def _empty(whole: Sequence[Record]) -> list[str]:
    empty = sum(not record.text for record in whole)
    if empty <= max(1.0, EMPTY_SHARE * len(whole)):
        return []
    return [f"{empty} of {len(whole)} answers were an end token and nothing else"]


def _counts_and_answers(
    whole: Sequence[Record], planned: Sequence[Planned], maker: TextMaker
) -> tuple[LevelChecks, list[str]]:
    prompt_tokens = sum(maker.count(planned[record.index].text or "") for record in whole)
    output_tokens = sum(
        maker.count(record.text or "") + (_END_TOKENS if record.finish_reason == "stop" else 0) for record in whole
    )
    reported_prompt = sum(record.prompt_tokens for record in whole)
    reported_output = sum(record.output_tokens for record in whole)
    problems = []
    if not _agrees(reported_prompt, prompt_tokens, TEMPLATE_TOKENS * len(whole)):
        problems.append(f"the server reports {reported_prompt} prompt tokens, the tokenizer counts {prompt_tokens}")
    if not _agrees(reported_output, output_tokens, 0):
        problems.append(f"the server reports {reported_output} output tokens, the tokenizer counts {output_tokens}")
    agree = bool(whole) and not problems  # without an answer there is nothing that could agree
    spots = [each.check for each in planned if each.check is not None]
    wrong = _wrong_answers(whole, planned)
    problems += wrong[:1]
    right = sum(_right(record, planned) for record in whole)
    if right < len(spots) and not wrong:
        problems.append(f"{len(spots) - right} of {len(spots)} spot checks got no answer")
    checks = LevelChecks(
        spot_checks=len(spots),
        spot_checks_right=right,
        counted_prompt_tokens=prompt_tokens,
        counted_output_tokens=output_tokens,
        counts_agree=agree,
    )
    return checks, problems


def _agrees(reported: int, counted: int, extra: int) -> bool:
    allowed = max(TOLERANCE_SHARE * counted, TOLERANCE_TOKENS)
    return counted - allowed <= reported <= counted + max(extra, allowed)


def _right(record: Record, planned: Sequence[Planned]) -> bool:
    check = planned[record.index].check
    return check is not None and check.passes(record.answer)


def _wrong_answers(whole: Sequence[Record], planned: Sequence[Planned]) -> list[str]:
    return [
        f"spot check failed: {check.question} was answered {record.answer[-80:]!r}, not {check.value}"
        for record in whole
        if (check := planned[record.index].check) is not None and not check.passes(record.answer)
    ]
