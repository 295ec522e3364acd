"""Provides prompts with output limits, graders of answers where the right one is known, and encoded requests.

Request `i` of a workload is the same in every process, so worker processes need no channel to exchange prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure import problems
from meltcore.measure.documents.schema import Task
from meltcore.measure.load.config import RANDOM_HIGH_ID, RANDOM_LOW_ID, IntRange, LoadConfig, parse_fields, parse_range
from meltcore.measure.load.record import TaskWork
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.workloads.clips import Clip

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

TOKEN_CHECK_SAMPLE_SIZE = 64  # answers per level whose text is kept for the tokenizer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """Holds a request's path, the body fields that vary, and the grader of its answer where there is one.

    A request for a task other than generation has its `work`; one for transcription sends clip `clip_idx`.
    """

    path: str
    fields: dict[str, Any]
    grade: Callable[[str], bool] | None = None
    work: TaskWork | None = None
    clip_idx: int | None = None


@dataclass(frozen=True)
class Workload:
    """Describes a source of prompts.

    `make_prompt(i)` returns the prompt of request i of the run, for any i from 0. `is_graded` tells whether every
    answer can be graded. `task` is None for generation; `clips` are those that requests for transcription send.
    """

    name: str
    make_prompt: Callable[[int], Prompt]
    is_graded: bool
    task: Task | None = None
    clips: tuple[Clip, ...] = ()
    speech_format: str = ""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """Holds one encoded request and the grader of its answer."""

    index: int
    data: bytes
    grade: Callable[[str], bool] | None
    in_check_sample: bool  # the text is kept in the record
    needs_token_count: bool  # the text is kept in the record if the server sends no token count
    max_output_tokens: int | None = None  # of all choices together; None: the request sets no limit
    work: TaskWork | None = None

    @property
    def keep_text(self) -> bool:
        """Return whether the answer's text is needed once the answer is complete."""
        return self.grade is not None or self.in_check_sample or self.needs_token_count


class Builder(Protocol):
    """Declares the interface of a builder of requests."""

    target: Target

    def build(self, index: int) -> EncodedRequest:
        """Encode the request `index`, which counts from 0 within the level."""


class RequestBuilder:
    """Builds request `i` of a level from prompt `first_prompt_idx + i`, so that no level repeats another's prompts."""

    def __init__(
        self, config: LoadConfig, target: Target, model: str, workload: Workload, first_prompt_idx: int
    ) -> None:
        self._common_fields: dict[str, Any] = {"model": model, "stream": config.stream}
        if config.stream:
            stream_options = {"include_usage": True}
            if config.continuous_usage:
                stream_options["continuous_usage_stats"] = True
            self._common_fields["stream_options"] = stream_options
        if config.temperature is not None:
            self._common_fields["temperature"] = config.temperature
        self.target = target
        self._extra_body = config.extra_body
        self._workload = workload
        self._first_prompt_idx = first_prompt_idx
        self._count_tokens = config.tokenizer is not None
        self._check_sample_size = None if config.keep_text else TOKEN_CHECK_SAMPLE_SIZE if self._count_tokens else 0
        self._encode = msgspec.json.Encoder().encode

    def build(self, index: int) -> EncodedRequest:
        """Encode the request `index`, which counts from 0 within the level."""
        prompt = self._workload.make_prompt(self._first_prompt_idx + index)
        fields = {**self._common_fields, **prompt.fields, **self._extra_body}
        body = self._encode(fields)
        data = self.target.encode_head("POST", prompt.path, len(body)) + body
        return EncodedRequest(
            index,
            data,
            prompt.grade,
            self._check_sample_size is None or index < self._check_sample_size,
            self._count_tokens,
            max_output_tokens(fields),
        )


def max_output_tokens(fields: dict[str, Any]) -> int | None:
    """Return the most tokens that the answer to a request with `fields` may have; None where it sets no limit."""
    limits = [fields.get(name) for name in ("max_tokens", "max_completion_tokens")]
    choice_counts = [fields.get(name) for name in ("n", "best_of")]
    known_limits = [limit for limit in limits if isinstance(limit, int)]
    if not known_limits:
        return None
    return max(known_limits) * max([1, *(count for count in choice_counts if isinstance(count, int))])


def load_workload(spec: str, *, num_requests: int, seed: int, max_tokens: int | None) -> Workload:
    """Open the workload that `spec` describes. Raises ConfigError for a malformed `spec` or file.

    `spec` is `problems:KIND`, `random:in=RANGE,out=RANGE[,vocab=N][,eos=1]` or the path of a JSONL file. `num_requests`
    is the most requests that the run will send.
    """
    workload_type, _, options_text = spec.partition(":")
    if workload_type == "problems":
        return _problem_workload(spec, options_text or "short", num_requests, seed, max_tokens)
    if workload_type == "random":
        return _random_workload(spec, options_text, seed, max_tokens)
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


def _random_workload(name: str, options_text: str, seed: int, max_tokens: int | None) -> Workload:
    """Return prompts of random token ids. Text decoded from random ids would encode to another number of tokens."""
    fields = parse_fields(options_text, f"workload {name}", ("in", "out", "vocab", "eos"))
    input_range = parse_range(fields.get("in", "128"), "random:in")
    output_range = parse_range(fields.get("out", str(max_tokens or 128)), "random:out")
    high_id = parse_range(fields.get("vocab", str(RANDOM_HIGH_ID)), "random:vocab").high
    low_id = min(RANDOM_LOW_ID, high_id // 2)
    ignore_eos = fields.get("eos", "0") == "0"

    def prompt(index: int) -> Prompt:
        # A generator per request: no shared state. The run's seed in it prevents hits in prefix caches of other runs.
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 - must repeat for a seed
        token_ids = [rng.randrange(low_id, high_id) for _ in range(_draw_length(rng, input_range))]
        fields: dict[str, Any] = {"prompt": token_ids, "max_tokens": _draw_length(rng, output_range)}
        if ignore_eos:
            fields |= IGNORE_EOS_FIELDS
        return Prompt(COMPLETIONS_PATH, fields)

    return Workload(name, prompt, is_graded=False)


def _draw_length(rng: random.Random, length_range: IntRange) -> int:
    return rng.randint(length_range.low, length_range.high)


def _file_workload(path: Path, max_tokens: int | None) -> Workload:
    """Return the prompts of a file with one JSON object per line.

    When the run needs more requests than there are lines, it starts again at the first line.
    """
    try:
        # Not splitlines(): JSON strings may hold U+0085, U+2028 and U+2029, where it splits.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"workload {path}: cannot be read ({error}); a workload is a JSONL file, problems:short|long|mixed, "
            f"random:in=128-1024,out=128, translate:..., transcribe:... or speak:..."
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
    """Return the grader for `answer`.

    A number must be the last number of the text. Any other answer must occur in the text, in upper or lower case.
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
