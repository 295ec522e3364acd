"""Describes the task `generation` to the load generator: prompts of chats and completions, answers, and token rates."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from meltcore.common.errors import ConfigError
from meltcore.measure import problems
from meltcore.measure.documents.schema import LevelResult, TokenCountSource
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.load.config import (
    RANDOM_HIGH_ID,
    RANDOM_LOW_ID,
    IntRange,
    LoadConfig,
    parse_range,
    workload_fields,
)
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.tasks.task import (
    ACCURACY,
    E2E_P50,
    END_TO_END,
    Latency,
    MeasuredTask,
    Metric,
    ServedModel,
    Sizes,
    ThroughputUnit,
    percentile,
    tasks,
)
from meltcore.measure.load.wire.stream import StreamedResponse, UnstreamedResponse, text_of
from meltcore.measure.load.workloads.workload import Clip, Prompt, Workload

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

PROBLEM_KINDS = ("short", "long", "mixed")
PROBLEM_MAX_TOKENS = 512

_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
# Fields that a line of a file may set for its request.
_SAMPLING_FIELDS = ("temperature", "ignore_eos", "skip_special_tokens")
# Generation goes on after an end token, so answers hold special tokens. Without their text an answer of nothing else is
# empty, one that begins with some has a late first text, and none can be counted with a tokenizer.
IGNORE_EOS_FIELDS = {"ignore_eos": True, "skip_special_tokens": False}

_SMALL_SIZES = ("8-64", "16")  # tokens of prompts and of answers
_TOKEN_COUNT_SOURCES: dict[TokenCountSource, str] = {
    "server-reported": "server-reported",
    "confirmed": "server-reported, confirmed with the tokenizer",
    "tokenizer": "counted with the tokenizer: the server reported none",
    "events": "events that carried text: the server reported none",
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load_workload(spec: str, *, num_requests: int, seed: int, max_tokens: int | None) -> Workload:
    """Open the workload that `spec` describes. Raises ConfigError for a malformed `spec` or file.

    `spec` is `problems:KIND`, `random:in=RANGE,out=RANGE[,vocab=N][,eos=1]` or the path of a JSONL file. `num_requests`
    is the maximum number of requests that the run will send.
    """
    workload_type, _, options_text = spec.partition(":")
    if workload_type == "problems":
        return _problem_workload(spec, options_text or "short", num_requests, seed, max_tokens)
    if workload_type == "random":
        return _random_workload(spec, seed, max_tokens)
    return _file_workload(Path(spec), max_tokens)


def _problem_workload(name: str, kind: str, num_requests: int, seed: int, max_tokens: int | None) -> Workload:
    if kind not in PROBLEM_KINDS:
        raise ConfigError(f"workload {name}: there are problems:{', problems:'.join(PROBLEM_KINDS)}")
    problem_list = problems.generate(
        "heldout", kind=cast(Literal["short", "long", "mixed"], kind), num_problems=num_requests, seed=seed
    )
    output_limit = max_tokens or PROBLEM_MAX_TOKENS

    def prompt(index: int) -> Prompt:
        problem = problem_list[index % len(problem_list)]
        fields = {"messages": [{"role": "user", "content": problem.question}], "max_tokens": output_limit}
        return Prompt(CHAT_PATH, fields, lambda text: problems.is_correct(problem, text))

    return Workload(name, prompt, is_graded=True)


def _random_workload(spec: str, seed: int, max_tokens: int | None) -> Workload:
    """Return prompts of random token ids.

    Prompts are ids, because text that is decoded from random ids would encode to another number of tokens.
    """
    fields = workload_fields(spec, ("in", "out", "vocab", "eos"))
    input_range = parse_range(fields.get("in", "128"), "random:in")
    output_range = parse_range(fields.get("out", str(max_tokens or 128)), "random:out")
    end_id = parse_range(fields.get("vocab", str(RANDOM_HIGH_ID)), "random:vocab").high
    low_id = min(RANDOM_LOW_ID, end_id // 2)
    ignore_eos = fields.get("eos", "0") == "0"

    def prompt(index: int) -> Prompt:
        # A generator per request: no shared state. The run's seed in it prevents hits in prefix caches of other runs.
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 - must repeat for a seed
        token_ids = [rng.randrange(low_id, end_id) for _ in range(_draw_length(rng, input_range))]
        fields: dict[str, Any] = {"prompt": token_ids, "max_tokens": _draw_length(rng, output_range)}
        if ignore_eos:
            fields |= IGNORE_EOS_FIELDS
        return Prompt(COMPLETIONS_PATH, fields)

    return Workload(spec, prompt, is_graded=False)


def fit_vocabulary(spec: str, vocab_size: int | None) -> str:
    """Return the workload `spec`, with random ids below `vocab_size` if it names no vocabulary of its own."""
    kind, _, options_text = spec.partition(":")
    if kind != "random" or vocab_size is None or vocab_size >= RANDOM_HIGH_ID or "vocab=" in options_text:
        return spec
    return f"{spec}{',' if options_text else ':'}vocab={vocab_size}"


def _as_completion(prompt: Prompt) -> Prompt:
    """Return a chat as the completion of its texts, for a model without a chat template."""
    fields = dict(prompt.fields)
    messages = fields.pop("messages", None)
    if messages is None:
        return prompt
    texts = [text_of(message.get("content")) or "" for message in messages]
    return replace(prompt, path=COMPLETIONS_PATH, fields={**fields, "prompt": "\n".join(texts)})


def _draw_length(rng: random.Random, length_range: IntRange) -> int:
    return rng.randint(length_range.low, length_range.high)


def _file_workload(path: Path, max_tokens: int | None) -> Workload:
    """Return the prompts of a file, which has one JSON object per line.

    If the run needs more requests than the file has lines, it starts again at the first line.
    """
    try:
        # Not splitlines(): JSON strings may hold U+0085, U+2028 and U+2029, where it splits.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"workload {path}: cannot be read ({error}); a workload is a JSONL file or begins with problems:, random:, "
            f"{', '.join(f'{task.word}:' for task in tasks().values() if task.word)}; see meltcore load --help"
        ) from error
    prompts = [
        _parse_prompt_line(line, f"{path} line {line_number}", max_tokens)
        for line_number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"workload {path}: the file has no requests")
    all_graded = all(prompt.grade is not None for prompt in prompts)
    return Workload(path.name, lambda index: prompts[index % len(prompts)], all_graded)


def _parse_prompt_line(line: str, location: str, max_tokens: int | None) -> Prompt:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{location}: not JSON: {error}") from error
    if not isinstance(request, dict):
        raise ConfigError(f"{location}: not a JSON object")
    prompt_fields = [name for name in _PROMPT_FIELDS if name in request]
    unknown_fields = set(request) - {*_PROMPT_FIELDS, *_SAMPLING_FIELDS, "max_tokens", "answer"}
    if len(prompt_fields) != 1 or unknown_fields:
        raise ConfigError(
            f"{location}: needs exactly one of prompt, messages, prompt_token_ids (and may have max_tokens, answer, "
            f"{', '.join(_SAMPLING_FIELDS)}); "
            f"it has {', '.join(request)}"
        )
    output_limit = request.get("max_tokens", max_tokens)
    fields: dict[str, Any] = {} if output_limit is None else {"max_tokens": output_limit}
    fields |= {name: request[name] for name in _SAMPLING_FIELDS if name in request}
    if prompt_fields == ["messages"]:
        path, fields["messages"] = CHAT_PATH, request["messages"]
    else:
        path, fields["prompt"] = COMPLETIONS_PATH, request[prompt_fields[0]]
    return Prompt(path, fields, _make_grader(str(request["answer"])) if "answer" in request else None)


def _make_grader(answer: str) -> Callable[[str], bool]:
    """Return a function that says whether a generated text has the right `answer`.

    If the answer is a number, the last number of the text must be equal to it. Any other answer must occur in the text,
    in upper or lower case.
    """
    expected_number = _parse_number(answer)

    def last_number_matches(text: str) -> bool:
        numbers = _NUMBER.findall(text)
        return bool(numbers) and _parse_number(numbers[-1]) == expected_number

    if expected_number is None:
        return lambda text: answer.casefold() in text.casefold()
    return last_number_matches


def _parse_number(text: str) -> float | None:
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text.strip()) else None


def _open(config: LoadConfig, num_requests: int, _clips: Sequence[Clip]) -> Workload:
    fields: dict[str, Any] = {"stream": config.stream}
    if config.stream:
        usage = {"continuous_usage_stats": True} if config.continuous_usage else {}
        fields["stream_options"] = {"include_usage": True, **usage}
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    workload = load_workload(config.workload, num_requests=num_requests, seed=config.seed, max_tokens=config.max_tokens)
    if not config.has_chats:
        make_prompt = workload.make_prompt
        workload = replace(workload, make_prompt=lambda index: _as_completion(make_prompt(index)))
    reader = StreamedResponse if config.stream else UnstreamedResponse
    return replace(workload, make_response=partial(reader, rules=config.answer_rules), fields=fields)


def _default_workload(model: ServedModel, sizes: Sizes) -> str:
    """Return the description of random prompts. A small model with real weights gets short, graded problems."""
    context = model.card.get("max_model_len")
    if model.is_small and model.card.get("weights") != "dummy":
        return "problems:short"
    inputs, outputs = _SMALL_SIZES if model.is_small else (sizes.input_len.text, sizes.output_len.text)
    needed = 0 if model.is_small else sizes.input_len.high + sizes.output_len.high
    if context and context < needed:
        raise ConfigError(
            f"{model.name} has a context of {context} tokens, and a request has up to {needed}; set --input-len and "
            f"--output-len"
        )
    return fit_vocabulary(f"random:in={inputs},out={outputs}", model.card.get("vocab_size"))


def _facts(level: LevelResult) -> list[tuple[str, str]]:
    source = _TOKEN_COUNT_SOURCES[level.token_count_source]
    return [
        (
            "Tokens",
            f"{level.prompt_tokens:,} prompt, {level.output_tokens:,} output ({source}); "
            f"{format_number(level.total_tokens_per_s)} tok/s together",
        ),
        ("Events per token", f"{format_number(level.events_per_token)}; ITL per {level.itl_unit}"),
        (
            "Tokens per event",
            f"{format_number(level.tokens_per_event)}; the gaps between events stand above as event gap",
        ),
    ]


def _notes(records: Sequence[RequestRecord], result: LevelResult) -> list[str]:
    """Return notes on the parts that complete answers lack: text, [DONE] or usage."""
    notes = []
    records_without_text = [record for record in records if not record.first_text_s]
    if records_without_text:
        num_tokens = sum(record.output_tokens for record in records_without_text)
        notes.append(
            f"{len(records_without_text)} of {len(records)} answers had no text; the server counted "
            f"{num_tokens:,} tokens in them (a model with random weights generates such); "
            f"they have no TTFT, ITL and TPOT"
        )
    num_without_done = sum(not record.saw_done for record in records)
    if num_without_done:
        notes.append(f"{num_without_done} of {len(records)} streams ended after finish_reason, without [DONE]")
    split_records = [record for record in records if record.saw_usage and record.output_tokens < len(record.times_s)]
    if split_records:
        notes.append(
            f"{len(split_records)} of {len(records)} answers report fewer tokens than events with text (the "
            f"first: {split_records[0].output_tokens} tokens, {len(split_records[0].times_s)} events): the server "
            f"splits tokens into several events, or counts too few"
        )
    num_without_usage = sum(not record.saw_usage for record in records)
    if num_without_usage:
        counting_note = (
            "counted with the tokenizer, prompts without the server's template"
            if result.token_count_source == "tokenizer"
            else "counted as events that carried text, prompts not at all; --tokenizer counts both"
        )
        notes.append(
            f"{num_without_usage} of {len(records)} answers came without usage: their tokens are {counting_note}"
        )
    return notes


TASK = MeasuredTask(
    aliases=("text",),
    word="",
    usage=(
        ("problems:short|long|mixed", "the bundled arithmetic problems; answers are graded"),
        ("random:in=128-1024,out=128", "random token ids (vocab=N: ids below N; eos=1: end tokens end an answer)"),
        ("FILE.jsonl", "one object per line: prompt, messages or prompt_token_ids; max_tokens, answer,"),
        ("", "temperature, ignore_eos, skip_special_tokens"),
    ),
    share=70.0,
    demo_share=80.0,
    open=_open,
    default_workload=_default_workload,
    slo_metrics=("ttft", "tpot", "itl", "e2e"),
    work_of=None,
    notes=_notes,
    unit=ThroughputUnit("output_tokens_per_s", "Output tokens per second", "output tok/s", "tok/s", "Output tok/s"),
    first_key="ttft_ms",
    first_word="first token",
    latencies=(
        Latency("ttft_ms", "Time to first token", "TTFT, ms", ("TTFT\np50 ms", "\np99 ms")),
        Latency("itl_ms", "Inter-token latency", "ITL, ms", ("ITL\np50 ms", "\np99 ms")),
        END_TO_END,
    ),
    distributions=("ttft_ms", "itl_ms", "event_gap_ms", "tpot_ms", "e2e_ms", "queue_delay_ms"),
    metrics=(
        Metric("total tok/s", lambda level: level.total_tokens_per_s, "higher"),
        Metric("TTFT p50 ms", percentile("ttft_ms", "p50"), "lower"),
        Metric("TTFT p99 ms", percentile("ttft_ms", "p99"), "lower"),
        Metric("ITL p50 ms", percentile("itl_ms", "p50"), "lower"),
        Metric("ITL p99 ms", percentile("itl_ms", "p99"), "lower"),
    ),
    shared_metrics=(E2E_P50, ACCURACY),
    definitions=(),
    facts=_facts,
)
