"""Builds every request of a throughput evaluation before its clock starts: random prompts and spot checks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.experiments.evals.config import NUM_SPOT_CHECKS, ThroughputConfig
from meltcore.measure.load.config import RANDOM_HIGH_ID, RANDOM_LOW_ID
from meltcore.measure.load.tasks.generation import IGNORE_EOS_FIELDS
from meltcore.measure.load.token_counter import TokenCounter

NUM_WARMUPS = 2
NUM_REUSED_PROMPTS = 128
# A text of Qwen's tokenizer is stable after one or two rounds; one that is not by then rarely becomes so.
_MAX_ROUNDS = 10
_MAX_DRAWS = 20
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_OPERAND = 99


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


def random_ids(
    rng: random.Random, num_tokens: int, vocabulary: Sequence[int] = range(RANDOM_LOW_ID, RANDOM_HIGH_ID)
) -> list[int]:
    """Draw the token ids of a prompt from `vocabulary`."""
    return rng.choices(vocabulary, k=num_tokens)


class PlannedRequest(NamedTuple):
    """Holds one request: its line of the workload file, and its text and spot check if it has them."""

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
        try:
            path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def make_plan(config: ThroughputConfig, generator: TextGenerator | None) -> PromptPlan:
    """Build the requests of all levels. The same seed gives the same requests.

    Raises ConfigError if the tokenizer yields no text of the required length.
    """
    rng = random.Random(f"throughput/{config.seed}")  # noqa: S311 - must repeat for a seed
    make_request = _request_factory(config, generator, rng)
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
    config: ThroughputConfig, generator: TextGenerator | None, rng: random.Random
) -> Callable[[], PlannedRequest]:
    common_fields: dict[str, Any] = {"max_tokens": config.output_len, "temperature": 1.0}
    if config.fixed_output:
        common_fields |= IGNORE_EOS_FIELDS
    vocabulary_args = () if generator is None else (generator.token_ids,)

    def make_request() -> PlannedRequest:
        if config.speed_only:
            token_ids = random_ids(rng, config.input_len, *vocabulary_args)
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
