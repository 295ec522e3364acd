"""Converts a request's sampling fields and the server's defaults to SamplingParams."""

from __future__ import annotations

from typing import Any

import msgspec

from meltcore.common.errors import ConfigError, RequestError
from meltcore.protocol.sampling_params import MAX_LOGPROBS, SEED_LIMIT, Grammar, SamplingParams
from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest

MAX_ANSWERS = 128  # to one prompt
MAX_CHOICES = 1024  # of one request
MAX_STOP_CHARS = 4096  # of one stop string: text of its length may be held back
MAX_STOP_TOKEN_IDS = 256
MAX_ID_DIGITS = 20  # of a key of logit_bias
_TOP_K_OFF = -1  # as several servers, clients and checkpoints write it
_GREEDY_HINT = "--generation-config greedy does without"

_PLAIN_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "speculative_decoding",
)
_MODEL_DEFAULTS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def checkpoint_defaults(generation_config: dict[str, Any], source: str = "generation_config.json") -> dict[str, Any]:
    """Return the sampling defaults of a checkpoint. `do_sample: false` means greedy, whatever the other fields are.

    Numbers may be written as text. Raises ConfigError with the file (`source`), the field and the value if a default is
    out of range. Otherwise every request that does not set this field would fail.
    """
    defaults: dict[str, Any] = {}
    for name, value_type in _MODEL_DEFAULTS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            defaults[name] = msgspec.convert(value, value_type, strict=False)
        except msgspec.ValidationError as error:
            expected = "a whole number" if value_type is int else "a number"
            raise ConfigError(f"{source}: {name} must be {expected}; got {value!r}; {_GREEDY_HINT}") from error
    if defaults.get("top_k") == _TOP_K_OFF:
        defaults["top_k"] = 0
    do_sample = generation_config.get("do_sample", bool(defaults))
    if not isinstance(do_sample, bool | None):
        raise ConfigError(f"{source}: do_sample must be true or false; got {do_sample!r}; {_GREEDY_HINT}")
    if not do_sample:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults).check(vocab_size=1)  # these fields do not depend on it
    except RequestError as error:
        raise ConfigError(f"{source}: {error}; {_GREEDY_HINT}") from error
    return defaults


def num_answers(request: ChatRequest | CompletionRequest, num_prompts: int) -> int:
    """Return how many answers to each prompt are made: `best_of`, else `n`. Raises RequestError (400)."""
    made = _num_answers(request)
    if num_prompts * made > MAX_CHOICES:
        raise RequestError(
            f"{num_prompts} prompts with {made} answers each are {num_prompts * made} answers; "
            f"the limit is {MAX_CHOICES}",
            param="n",
        )
    return made


def _num_answers(request: ChatRequest | CompletionRequest) -> int:
    count = 1 if request.n is None else request.n
    if not 1 <= count <= MAX_ANSWERS:
        raise RequestError(f"n must be at least 1 and at most {MAX_ANSWERS}; got {count}", param="n")
    if not isinstance(request, CompletionRequest) or request.best_of is None:
        return count
    if not count <= request.best_of <= MAX_ANSWERS:
        raise RequestError(
            f"best_of must be at least n, which is {count}, and at most {MAX_ANSWERS}; got {request.best_of}",
            param="best_of",
        )
    if request.stream and request.best_of > count:
        raise RequestError(
            f"best_of ({request.best_of}) above n ({count}) cannot be streamed: the best answers are known at the end",
            param="best_of",
        )
    return request.best_of


def params_of_answer(params: SamplingParams, index: int) -> SamplingParams:
    """Return the settings of the answer `index` to a prompt: its seed is the request's seed + index, as in vLLM."""
    if params.seed is None or index == 0:
        return params
    # The highest seed is followed by the lowest.
    seed = (params.seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
    return msgspec.structs.replace(params, seed=seed)


def sampling_params(
    request: ChatRequest | CompletionRequest, *, prompt_tokens: int, max_model_len: int, vocab_size: int,
    defaults: dict[str, Any], grammar: Grammar | None = None,
) -> SamplingParams:  # fmt: skip
    """Return the sampling settings for one prompt of `prompt_tokens` tokens.

    Raises RequestError that names the first field that is out of range.
    """
    fields = dict(defaults)
    for name in _PLAIN_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.top_k == _TOP_K_OFF:
        fields["top_k"] = 0
    fields["max_tokens"] = _max_tokens(request, prompt_tokens, max_model_len)
    fields["logprobs"] = _logprobs(request)
    if isinstance(request, CompletionRequest) and request.echo:
        fields["prompt_logprobs"] = request.logprobs
    fields["stop"] = _stop(request.stop)
    fields["logit_bias"] = _logit_bias(request.logit_bias)
    fields["stop_token_ids"] = tuple(request.stop_token_ids or ())
    if len(fields["stop_token_ids"]) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids holds {len(fields['stop_token_ids'])} ids; the limit is {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    params = msgspec.structs.replace(msgspec.convert(fields, SamplingParams), grammar=grammar)
    params.check(vocab_size)
    return params


def _max_tokens(request: ChatRequest | CompletionRequest, prompt_tokens: int, max_model_len: int) -> int:
    """Return the requested limit, or the rest of the context. Raises RequestError if the limit exceeds the context."""
    max_output_tokens = max_model_len - prompt_tokens
    if max_output_tokens < 1:
        raise RequestError(
            f"this model's maximum context length is {max_model_len} tokens, so a prompt may have at most "
            f"{max_model_len - 1}; this one has {prompt_tokens}",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    name, requested = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if requested is not None and requested != request.max_completion_tokens:
            raise RequestError(
                f"max_tokens ({requested}) and max_completion_tokens ({request.max_completion_tokens}) "
                "disagree; give one",
                param="max_completion_tokens",
            )
        name, requested = "max_completion_tokens", request.max_completion_tokens
    if requested is None:
        return max_output_tokens
    if requested == 0 and is_echo_only(request):
        return 1  # the engine generates a token or more; the answer leaves it out
    if requested < 1:
        raise RequestError(f"{name} must be at least 1; got {requested}", param=name)
    if requested > max_output_tokens:
        raise RequestError(
            f"this model's maximum context length is {max_model_len} tokens; {name} is {requested} and the prompt has "
            f"{prompt_tokens} tokens, {requested + prompt_tokens} together: {name} may be at most {max_output_tokens}",
            param=name,
            code="context_length_exceeded",
        )
    return requested


def is_echo_only(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether the answer is the prompt alone: `echo` with `max_tokens` 0."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is None:
        return 0 if request.logprobs else None
    if not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be at least 0 and at most {MAX_LOGPROBS}; got {request.top_logprobs}",
            param="top_logprobs",
        )
    return request.top_logprobs


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float] | None:
    """Return the biases by token id. Raises RequestError (400) for a key that is no decimal integer."""
    for key in biases or ():
        if not (key.isascii() and key.isdecimal() and len(key) < MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: its keys are token ids; got {key[:80]!r}", param="logit_bias")
    return {int(key): bias for key, bias in (biases or {}).items()} or None


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(text)} characters; the limit is {MAX_STOP_CHARS}", param="stop")
    return stops
