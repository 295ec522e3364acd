"""Defines the sampling parameters of a request and the valid range of each parameter."""

import msgspec

from meltcore.common.errors import RequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100
MAX_STOP_STRINGS = 16
SEED_LIMIT = 2**63
MAX_LOGIT_BIASES = 1024  # of one request: a step copies the biases of all its rows to the device
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary, and fits the 32 bits of the kernels
# Logits are divided by these in float32. Beyond its largest value, 3.4e38, all tokens would become equal.
MIN_TEMPERATURE, MIN_REPETITION_PENALTY = 1e-20, 1e-3


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Holds the grammar that an answer follows, as `text/grammar.py` reads it.

    A model that reasons is free until its reasoning ends: `reasoning_ids` are the start and end token of its reasoning.
    With `starts_in_reasoning` the prompt has begun the reasoning. Otherwise the first token may begin it.
    """

    text: str
    reasoning_ids: tuple[int, int] | None = None
    starts_in_reasoning: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds the sampling parameters of one request, which `check` validates.

    The default is greedy. A `temperature` of 0 means greedy sampling, whatever the other fields are. A `top_k` of 0
    means no limit. `logit_bias` is added to the logits of its token ids, before penalties. If `logprobs` is None, no
    log-probabilities are returned. If it is n, they are returned for the sampled token and for the n most probable
    tokens. `prompt_logprobs` does the same for each prompt token except the first. `max_tokens` counts generated
    tokens, including the end token. Where a `grammar` allows no further token, the answer ends. Without
    `speculative_decoding` each step computes one token.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    grammar: Grammar | None = None
    speculative_decoding: bool = True

    @property
    def has_penalties(self) -> bool:
        """Return whether the next token depends on how often each token occurred before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_filtered(self) -> bool:
        """Return whether top-k, top-p or min-p may exclude tokens. They never exclude the token of a greedy request."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_logits(self) -> bool:
        """Return whether sampling reads or changes rows of logits, beside a temperature and filters."""
        changes = self.has_penalties or bool(self.logit_bias) or self.grammar is not None
        return changes or self.logprobs is not None

    def check(self, vocab_size: int) -> None:
        """Raise RequestError that names the first field out of its range, if there is one."""
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}; got {self.temperature}",
                param="temperature",
            )
        _check_range("top_p", self.top_p, 0.0, 1.0, exclude_minimum=True)
        _check_range("top_k", self.top_k, 0, MAX_TOP_K)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop")
        if "" in self.stop:
            raise RequestError("stop holds an empty string, which would end every answer", param="stop")
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, vocab_size - 1)
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias, vocab_size)
        if self.grammar is not None and self.min_tokens:
            raise RequestError(
                f"min_tokens must be 0 for structured output, whose grammar says where it ends; got {self.min_tokens}",
                param="min_tokens",
            )


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias holds {len(logit_bias)} token ids; the limit is {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size} ids", param="logit_bias"
            )
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias of token {token_id} must be at least -{MAX_LOGIT_BIAS} and at most {MAX_LOGIT_BIAS}; "
                f"got {bias}",
                param="logit_bias",
            )


def _check_range(
    name: str, value: float, minimum: float, maximum: float | None, *, exclude_minimum: bool = False
) -> None:
    # Written so that NaN is outside of every range.
    is_in_range = (minimum < value if exclude_minimum else minimum <= value) and (maximum is None or value <= maximum)
    if not is_in_range:
        limits_text = f"{'more than' if exclude_minimum else 'at least'} {minimum}" + (
            f" and at most {maximum}" if maximum is not None else ""
        )
        raise RequestError(f"{name} must be {limits_text}; got {value}", param=name)
