"""From a request's sampling fields, and the server's defaults, to the engine's SamplingParams."""

from __future__ import annotations

from typing import Any

import msgspec

from meltcore.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from meltcore.errors import ConfigError, RequestError
from meltcore.server.protocol import ChatRequest, CompletionRequest

MAX_STOP_CHARS = 4096  # of one stop string: text as long as it may be held back
MAX_STOP_TOKEN_IDS = 256
_TOP_K_OFF = -1  # what several servers, clients and checkpoints write for it
_DO_WITHOUT = "--generation-config greedy does without"

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
)
_MODEL_DEFAULTS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def checkpoint_defaults(generation_config: dict[str, Any], source: str = "generation_config.json") -> dict[str, Any]:
    """The sampling defaults a checkpoint asks for. `do_sample: false` means greedy whatever the others say.

    Numbers may be written as text. Raises ConfigError that names `source`, where they stand, with field and value where
    one is no setting that we could serve: it would fail requests that do not name that field.
    """
    defaults: dict[str, Any] = {}
    for name, kind in _MODEL_DEFAULTS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            defaults[name] = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{source}: {name} must be {what}; got {value!r}; {_DO_WITHOUT}") from error
    if defaults.get("top_k") == _TOP_K_OFF:
        defaults["top_k"] = 0
    do_sample = generation_config.get("do_sample", bool(defaults))
    if not isinstance(do_sample, bool | None):
        raise ConfigError(f"{source}: do_sample must be true or false; got {do_sample!r}; {_DO_WITHOUT}")
    if not do_sample:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults).check(vocab_size=1)  # which the fields here do not depend on
    except RequestError as error:
        raise ConfigError(f"{source}: {error}; {_DO_WITHOUT}") from error
    return defaults


def sampling_params(
    request: ChatRequest | CompletionRequest, *, prompt_tokens: int, max_model_len: int, vocab_size: int,
    defaults: dict[str, Any],
) -> SamplingParams:  # fmt: skip
    """Settings for one prompt of `prompt_tokens` tokens. Raises RequestError naming the first field out of range."""
    fields = dict(defaults)
    for name in _PLAIN_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.top_k == _TOP_K_OFF:
        fields["top_k"] = 0
    fields["max_tokens"] = _max_tokens(request, prompt_tokens, max_model_len)
    fields["logprobs"] = _logprobs(request)
    fields["stop"] = _stop(request.stop)
    fields["stop_token_ids"] = tuple(request.stop_token_ids or ())
    if len(fields["stop_token_ids"]) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids holds {len(fields['stop_token_ids'])} ids; the limit is {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    params = msgspec.convert(fields, SamplingParams)
    params.check(vocab_size)
    return params


def _max_tokens(request: ChatRequest | CompletionRequest, prompt_tokens: int, max_model_len: int) -> int:
    """The asked-for limit, or all that is left of the context. Raises RequestError where they do not fit."""
    left = max_model_len - prompt_tokens
    if left < 1:
        raise RequestError(
            f"the prompt is {prompt_tokens} tokens long; the context is {max_model_len} tokens, "
            f"so a prompt may have at most {max_model_len - 1}",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if asked is not None and asked != request.max_completion_tokens:
            raise RequestError(
                f"max_tokens ({asked}) and max_completion_tokens ({request.max_completion_tokens}) disagree; give one",
                param="max_completion_tokens",
            )
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        return left
    if asked < 1:
        raise RequestError(f"{name} must be at least 1; got {asked}", param=name)
    if asked > left:
        raise RequestError(
            f"{name} is {asked} and the prompt {prompt_tokens} tokens, {asked + prompt_tokens} together; "
            f"the context is {max_model_len} tokens, which leaves {left}",
            param=name,
            code="context_length_exceeded",
        )
    return asked


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


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(text)} characters; the limit is {MAX_STOP_CHARS}", param="stop")
    return stops
