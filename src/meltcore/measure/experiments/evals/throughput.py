"""Runs `meltcore eval throughput` once: builds requests, loads levels, and checks the answers.

All requests, random prompts and spot checks alike, are built before the first level starts.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from meltcore.common.errors import ConfigError
from meltcore.common.files import file_errors
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, LevelChecks, LevelResult, RunResult, WeightedThroughput
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.documents.values.progress import dim_printer
from meltcore.measure.documents.verdicts import CUT_SHORT, SCORED, worst_verdict
from meltcore.measure.documents.weights import missing_concurrencies, weighted_sum
from meltcore.measure.experiments.evals.config import NUM_SPOT_CHECKS, ThroughputConfig
from meltcore.measure.experiments.servers import Api
from meltcore.measure.load.config import RANDOM_HIGH_ID, RANDOM_LOW_ID, LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.runner import level_bars, run_levels
from meltcore.measure.load.tasks.generation import IGNORE_EOS_FIELDS
from meltcore.measure.load.token_counter import TokenCounter

NUM_WARMUPS = 2
NUM_REUSED_PROMPTS = 128
# A text of Qwen's tokenizer is stable after one or two rounds; one that is not by then rarely becomes so.
_MAX_ROUNDS = 10
_MAX_DRAWS = 20
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_OPERAND = 99
PROMPTS_FILE = "prompts.jsonl"
# Random text need not encode to the tokens it was decoded from; the public harness allows as much.
TOLERANCE_RATIO = 0.05
TOLERANCE_TOKENS = 10
# What a chat template may add to one message: Qwen3.5 adds 12 tokens, Llama 3 with its system message about 36. Not in
# addition to the tolerance above: a server that counts too much could hide in both.
MAX_TEMPLATE_TOKENS = 64
# Most prompt tokens of a level from a prefix cache: all prompts are new, and only their template is the same.
MAX_CACHED_RATIO = 0.05
# Most empty answers of a level: more of them are not chance, and are cheap work.
MAX_EMPTY_RATIO = 0.05


class SpotCheck(NamedTuple):
    """Holds an arithmetic question among the requests of a level. It detects a server that is fast but wrong.

    `question` does not contain `value`, so that an echo of the question is not an answer.
    """

    question: str
    value: int

    def passes(self, text: str) -> bool:
        """Return whether any number in `text` equals `value`. Models write the result in many ways."""
        return any(float(number.replace(",", "")) == self.value for number in _NUMBER.findall(text))


def draw_spot_check(rng: random.Random) -> SpotCheck:
    """Draw a sum or a difference of two-digit numbers. A fixed list of questions could be memorized."""
    while True:
        a, b = sorted((rng.randint(2, _MAX_OPERAND), rng.randint(2, _MAX_OPERAND)), reverse=True)
        sign = rng.choice("+-")
        value = a + b if sign == "+" else a - b
        if value not in (a, b):
            return SpotCheck(f"What is {a} {sign} {b}?", value)


class TextGenerator(TokenCounter):
    """Generates texts of an exact number of tokens. Raises ConfigError if `path` has no tokenizer.

    `token_ids` are the tokenizer's ordinary tokens, without added tokens.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        added_tokens = self.tokenizer.get_added_tokens_decoder()
        vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=False)
        self.token_ids = [token_id for token_id in range(vocab_size) if token_id not in added_tokens]

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Return a random text of exactly `num_tokens` tokens. Raises ConfigError if the tokenizer yields none."""
        for _ in range(_MAX_DRAWS):
            token_ids = rng.choices(self.token_ids, k=num_tokens)
            for _ in range(_MAX_ROUNDS):
                text = self.tokenizer.decode(token_ids)
                token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
                if len(token_ids) == num_tokens:
                    return text
                token_ids = token_ids[:num_tokens] + rng.choices(self.token_ids, k=max(0, num_tokens - len(token_ids)))
        raise ConfigError(
            f"no random text of {num_tokens} tokens keeps that length when it is decoded and encoded again"
        )


class PlannedRequest(NamedTuple):
    """Holds one request: its line of the workload file, and its text and spot check, or None without them."""

    line: dict[str, Any]
    text: str | None = None  # of the user message; None: token ids
    check: SpotCheck | None = None


class PromptPlan(NamedTuple):
    """Holds all requests. Level i has the requests `warmups[i]` and `levels[i]`, each in the order of sending."""

    warmups: list[list[PlannedRequest]]
    levels: list[list[PlannedRequest]]

    def write(self, path: Path) -> None:
        """Write the workload file, with each level's warm-ups before its requests.

        Raises ConfigError if `path` cannot be written.
        """
        lines = [
            request.line
            for warmups, level in zip(self.warmups, self.levels, strict=True)
            for request in (*warmups, *level)
        ]
        with file_errors("write", path):
            path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


def make_plan(config: ThroughputConfig, generator: TextGenerator | None, vocab_size: int | None = None) -> PromptPlan:
    """Build the requests of all levels. The same seed gives the same requests.

    Without a tokenizer, token ids are below `vocab_size`, and below RANDOM_HIGH_ID if a server reports none.

    Raises ConfigError if the tokenizer yields no text of the required length.
    """
    rng = random.Random(f"throughput/{config.seed}")  # noqa: S311 - must repeat for a seed
    make_request = _request_factory(config, generator, vocab_size, rng)
    shared_requests = [make_request() for _ in range(NUM_REUSED_PROMPTS)] if config.reuse_prompts else []
    plan = PromptPlan([], [])
    for _ in config.levels:
        checks = [] if config.speed_only else [_spot_check(config, rng) for _ in range(NUM_SPOT_CHECKS)]
        num_random = config.num_prompts - len(checks)
        plan.warmups.append(shared_requests[:NUM_WARMUPS] or [make_request() for _ in range(NUM_WARMUPS)])
        requests = (
            [shared_requests[i % len(shared_requests)] for i in range(num_random)]
            if shared_requests
            else [make_request() for _ in range(num_random)]
        )
        for check in checks:
            requests.insert(rng.randint(0, len(requests)), check)
        plan.levels.append(requests)
    return plan


def _request_factory(
    config: ThroughputConfig, generator: TextGenerator | None, vocab_size: int | None, rng: random.Random
) -> Callable[[], PlannedRequest]:
    common_fields: dict[str, Any] = {"max_tokens": config.output_len, "temperature": 1.0}
    if config.fixed_output:
        common_fields |= IGNORE_EOS_FIELDS
    end_id = min(vocab_size or RANDOM_HIGH_ID, RANDOM_HIGH_ID)
    vocabulary = range(min(RANDOM_LOW_ID, end_id // 2), end_id) if generator is None else generator.token_ids

    def make_request() -> PlannedRequest:
        if config.speed_only:
            token_ids = rng.choices(vocabulary, k=config.input_len)
            return PlannedRequest({**common_fields, "prompt_token_ids": token_ids})
        assert generator is not None, "ThroughputConfig requires a tokenizer unless speed_only"
        text = generator.text(rng, config.input_len)
        return PlannedRequest({**common_fields, "messages": [{"role": "user", "content": text}]}, text)

    return make_request


def _spot_check(config: ThroughputConfig, rng: random.Random) -> PlannedRequest:
    check = draw_spot_check(rng)
    messages = [{"role": "user", "content": check.question}]
    line = {"max_tokens": config.output_len, "temperature": 0.0, "messages": messages}
    return PlannedRequest(line, check.question, check)


def run_throughput(
    config: ThroughputConfig,
    folder: Path,
    arguments: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Build every prompt, run the levels and return the result. Prompts and records are written into `folder`.

    `console` shows a line while the prompts are built, which takes seconds with some tokenizers, and a bar per level.

    The verdict is FAILED if a request, a spot check, a token count or a fixed length is wrong at any level. Raises
    ConfigError if the run cannot start.
    """
    api = Api(config.url, api_key=config.api_key)
    model, facts = api.resolve_model(config.model)
    generator = None if config.tokenizer is None else TextGenerator(config.tokenizer)
    console = console or Console(quiet=True)
    num_prompts = (NUM_WARMUPS + config.num_prompts) * len(config.levels)
    dim_printer(console)(f"making {num_prompts:,} prompts of {config.input_len:,} tokens")
    plan = make_plan(config, generator, facts.get("vocab_size"))
    plan.write(folder / PROMPTS_FILE)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    level_records: list[list[RequestRecord]] = []
    load_config = _load_config(config, model, folder)
    with level_bars(load_config.levels, console) as on_progress:
        levels = run_levels(load_config, on_progress, on_level=lambda _, records: level_records.append(records))
    # After the last level: counting tokens between two levels would let the server rest.
    for level, records, planned_requests in zip(levels, level_records, plan.levels, strict=False):
        check_level(config, level, records, planned_requests, generator)
    verdict = worst_verdict((level.verdict for level in levels), "PARTIAL")
    gates = make_gates(config, levels)
    return RunResult(
        command="eval",
        status="partial" if verdict in CUT_SHORT or len(levels) < len(config.levels) else "complete",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=_settings(config) | {"model": model} | facts,
        gates=gates,
        levels=levels,
        weighted_throughput=weighted_throughput(levels) if config.speed_only else None,
        verdict=verdict,
        reasons=[f"gate failed: {gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"],
        notes=[*_notes(config, levels, facts.get("vocab_size")), *model_notes(facts)],
    )


def weighted_throughput(levels: Sequence[LevelResult]) -> WeightedThroughput | None:
    """Return the weighted sum of the throughput. Returns None if any of the seven levels lacks a valid result."""
    valid_levels = [level for level in levels if level.verdict in SCORED]
    if missing_concurrencies(valid_levels):
        return None
    return WeightedThroughput(
        total_tokens_per_s=weighted_sum(valid_levels, "total_tokens_per_s"),
        output_tokens_per_s=weighted_sum(valid_levels, "output_tokens_per_s"),
    )


def _load_config(config: ThroughputConfig, model: str, folder: Path) -> LoadConfig:
    """Return the load generator's settings for the levels, requests and warm-ups of `config`."""
    return LoadConfig(
        url=config.url,
        concurrency=config.levels,
        num_prompts=(config.num_prompts,),
        num_warmups=NUM_WARMUPS,
        workload=str(folder / PROMPTS_FILE),
        model=model,
        api_key=config.api_key,
        seed=config.seed,
        stream=config.stream,
        continuous_usage=config.continuous_usage,
        temperature=None,  # each request has its own
        strict=True,
        # For random text at temperature 1 a model rarely ends at its first token: see MAX_EMPTY_RATIO.
        allow_empty=not config.fixed_output,
        keep_text=not config.speed_only,
        records_path=folder / "requests.jsonl",
    )


def _settings(config: ThroughputConfig) -> dict[str, object]:
    settings = {"what": "throughput", "levels": list(config.levels), "ignore_eos": config.fixed_output}
    names = ("num_prompts", "input_len", "output_len", "reuse_prompts", "stream", "speed_only", "seed")
    return settings | {name: getattr(config, name) for name in names}


def _notes(config: ThroughputConfig, levels: Sequence[LevelResult], vocab_size: int | None) -> list[str]:
    notes = []
    if config.speed_only:
        notes.append(
            "Speed only: token ids as prompts, end tokens ignored, no answer checked. The weighted throughput is no "
            "score."
        )
        if config.tokenizer is None and vocab_size is None and any(level.failed for level in levels):
            notes.append(f"Ids below {RANDOM_HIGH_ID:,} were sent; give the --tokenizer of a smaller vocabulary.")
    wide_levels = [str(level) for level in config.levels if level > config.num_prompts]
    if wide_levels:
        notes.append(
            f"--num-prompts {config.num_prompts} is fewer than the concurrency of the levels {', '.join(wide_levels)}: "
            f"they never had more than {config.num_prompts} in flight."
        )
    if config.reuse_prompts:
        notes.append("All levels used the same prompts: a prefix cache may have served them.")
    notes += [reason for level in levels if level.verdict == "OK" for reason in level.reasons]
    return notes


# --- checks of a level


def check_level(
    config: ThroughputConfig,
    result: LevelResult,
    records: Sequence[RequestRecord],
    planned_requests: Sequence[PlannedRequest],
    generator: TextGenerator | None,
) -> None:
    """Check the answers of a level and write the findings into `result`.

    The verdict becomes FAILED if an answer, a token count or a length is wrong.
    """
    complete_records = [record for record in records if record.failure is None]
    problems = _workload_problems(config, complete_records, planned_requests)
    if generator is not None and not config.speed_only:
        result.checks, answer_problems = _check_counts_and_answers(complete_records, planned_requests, generator)
        problems += answer_problems
        num_empty = sum(not record.text for record in complete_records)
        if num_empty > max(1.0, MAX_EMPTY_RATIO * len(complete_records)):
            problems.append(f"{num_empty} of {len(complete_records)} answers were an end token and nothing else")
        if result.checks.counts_agree:
            result.token_count_source = "confirmed"
    if problems:
        result.reasons += problems
        if result.verdict in SCORED:
            result.verdict = "FAILED"


def make_gates(config: ThroughputConfig, levels: Sequence[LevelResult]) -> list[CheckResult]:
    """Return one gate per kind of check over all planned levels. A level that did not run passes no gate."""
    num_missing = len(config.levels) - len(levels)
    missing_text = f"; {num_missing} levels did not run" if num_missing else ""
    num_sent, num_complete = len(levels) * config.num_prompts, sum(level.succeeded for level in levels)
    checks = [level.checks for level in levels if level.checks is not None]
    num_correct = sum(level_checks.spot_checks_correct for level_checks in checks)
    num_spot_checks = sum(level_checks.spot_checks for level_checks in checks)
    num_agreeing = sum(level_checks.counts_agree for level_checks in checks)
    gates = [
        CheckResult(
            name=name,
            status="PASS" if is_right and not num_missing else "FAIL",
            detail=f"{detail}{missing_text}",
        )
        for name, is_right, detail in (
            ("every request answered completely", num_complete >= num_sent, f"{num_complete} of {num_sent}"),
            ("spot checks correct", num_correct == num_spot_checks, f"{num_correct} of {num_spot_checks}"),
            (
                "reported tokens agree with the tokenizer",
                num_agreeing == len(checks),
                f"at {num_agreeing} of {len(checks)} levels",
            ),
        )
    ]
    for gate in gates[1:] if config.speed_only else ():
        gate.status, gate.detail = "NOT RUN", "--speed-only"
    return gates


def _workload_problems(
    config: ThroughputConfig, complete_records: Sequence[RequestRecord], planned_requests: Sequence[PlannedRequest]
) -> list[str]:
    """Return a sentence for each way in which a level cost less than its workload: wrong lengths, or a prefix cache."""
    problems = []
    fixed_records = [record for record in complete_records if planned_requests[record.index].check is None]
    wrong_lengths = [record.output_tokens for record in fixed_records if record.output_tokens != config.output_len]
    if config.fixed_output and wrong_lengths:
        problems.append(
            f"{len(wrong_lengths)} of {len(fixed_records)} answers do not have {config.output_len} tokens "
            f"(one has {wrong_lengths[0]})"
        )
    num_cached = sum(record.cached_tokens or 0 for record in complete_records)
    num_prompt_tokens = sum(record.prompt_tokens for record in complete_records)
    if not config.reuse_prompts and num_cached > MAX_CACHED_RATIO * num_prompt_tokens:
        problems.append(
            f"{num_cached:,} of {num_prompt_tokens:,} prompt tokens came from a prefix cache: this server has had the "
            f"prompts of --seed {config.seed} before; take another seed, or --reuse-prompts"
        )
    return problems


def _check_counts_and_answers(
    complete_records: Sequence[RequestRecord], planned_requests: Sequence[PlannedRequest], generator: TextGenerator
) -> tuple[LevelChecks, list[str]]:
    prompt_tokens = sum(generator.count(planned_requests[record.index].text or "") for record in complete_records)
    output_tokens = sum(map(generator.count_output_tokens, complete_records))
    reported_prompt = sum(record.prompt_tokens for record in complete_records)
    reported_output = sum(record.output_tokens for record in complete_records)
    problems = []
    if not _counts_agree(reported_prompt, prompt_tokens, MAX_TEMPLATE_TOKENS * len(complete_records)):
        problems.append(f"the server reports {reported_prompt} prompt tokens, the tokenizer counts {prompt_tokens}")
    if not _counts_agree(reported_output, output_tokens, 0):
        problems.append(f"the server reports {reported_output} output tokens, the tokenizer counts {output_tokens}")
    counts_agree = bool(complete_records) and not problems  # without an answer there is nothing to agree on
    num_spot_checks = sum(request.check is not None for request in planned_requests)
    checked_answers = [
        (check, record) for record in complete_records if (check := planned_requests[record.index].check) is not None
    ]
    wrong_answers = [
        f"spot check failed: {check.question} was answered {record.content[-80:]!r}, not {check.value}"
        for check, record in checked_answers
        if not check.passes(record.content)
    ]
    problems += wrong_answers[:1]
    num_correct = len(checked_answers) - len(wrong_answers)
    if num_correct < num_spot_checks and not wrong_answers:
        problems.append(f"{num_spot_checks - num_correct} of {num_spot_checks} spot checks got no answer")
    checks = LevelChecks(
        spot_checks=num_spot_checks,
        spot_checks_correct=num_correct,
        counted_prompt_tokens=prompt_tokens,
        counted_output_tokens=output_tokens,
        counts_agree=counts_agree,
        counted_content_tokens=sum(generator.count(record.content) for record in complete_records),
    )
    return checks, problems


def _counts_agree(num_reported: int, num_counted: int, max_extra: int) -> bool:
    tolerance = max(TOLERANCE_RATIO * num_counted, TOLERANCE_TOKENS)
    return num_counted - tolerance <= num_reported <= num_counted + max(max_extra, tolerance)
