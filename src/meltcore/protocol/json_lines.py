"""Defines the JSON lines between an engine behind two pipes and the program that measures it.

The measuring program sends any number of

    {"type": "generate", "id": 7, "prompt": [1015, 88], "max_tokens": 128}    greedy, end tokens ignored
    {..., "temperature": 0.7}                                                 sampled; left out where it is 0
    {"type": "abort", "ids": [7]}

The engine sends "loading" while it starts and "ready" once. Then it sends one "step" per step with output, which holds
all outputs of that step. It sends "refused" for a request that it cannot serve, and "failed" when it cannot start or
continue.
"""

from __future__ import annotations

import msgspec


class Generate(msgspec.Struct, tag="generate", frozen=True, omit_defaults=True):
    """Asks for the tokens that follow a prompt. A temperature of 0 means greedy sampling.

    An id may be used again after its request has ended.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Ends running requests with the finish reason "abort". Unknown ids are ignored."""

    ids: list[int]


class LoadingLine(msgspec.Struct, tag="loading"):
    """Reports the progress of a start: the current stage, and the completed fraction of this stage (0 to 1)."""

    stage: str
    fraction: float


class ReadyLine(msgspec.Struct, tag="ready", kw_only=True):
    """Reports that the engine can serve.

    `version` names the engine's code. `num_parameters` is the number of parameters of the published model. The fields
    with a default are for the log, so another engine may leave them out.
    """

    version: str
    device: str
    dtype: str
    weight_source: str = msgspec.field(name="weights")  # "real" or "dummy"
    num_parameters: int = msgspec.field(name="parameters")
    vocab_size: int
    max_num_seqs: int
    max_model_len: int = 0
    num_pages: int = msgspec.field(default=0, name="pages_total")
    page_size: int = 0
    load_s: float = 0.0


class StepLine(msgspec.Struct, tag="step"):
    """Holds the new tokens of one step. `tokens[i]` belong to the request `ids[i]`, and each id occurs once.

    `finish_reasons` has (id, finish reason) of each request that has ended. `t_s` is the `time.monotonic()` at which
    the tokens reached the host.
    """

    t_s: float
    ids: list[int]
    tokens: list[list[int]]
    finish_reasons: list[tuple[int, str]] = msgspec.field(name="ended")


class RefusedLine(msgspec.Struct, tag="refused"):
    """Reports a request that cannot be served, and the reason."""

    id: int
    error: str


class FailedLine(msgspec.Struct, tag="failed"):
    """Reports that the engine cannot start or continue. Its process ends after this line."""

    message: str


FromEngineLine = LoadingLine | ReadyLine | StepLine | RefusedLine | FailedLine
ToEngineLine = Generate | Abort
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(FromEngineLine).decode
decode_request = msgspec.json.Decoder(ToEngineLine).decode
