"""The lines that an engine and its measurer exchange (engine/json_lines.py describes them), as the measurer sees them.

Declared again on this side: the measuring half imports nothing of what it measures.
"""

from __future__ import annotations

import msgspec


class Generate(msgspec.Struct, tag="generate", frozen=True):
    id: int
    prompt: list[int]
    max_tokens: int


class Abort(msgspec.Struct, tag="abort", frozen=True):
    ids: list[int]


class Loading(msgspec.Struct, tag="loading"):
    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    version: str
    device: str
    dtype: str
    weights: str
    parameters: int
    vocab_size: int
    max_num_seqs: int


class Step(msgspec.Struct, tag="step"):
    t_s: float
    ids: list[int]
    tokens: list[list[int]]
    ended: list[tuple[int, str]]


class Refused(msgspec.Struct, tag="refused"):
    id: int
    error: str


class Failed(msgspec.Struct, tag="failed"):
    message: str


FromEngine = Loading | Ready | Step | Refused | Failed
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(FromEngine).decode
