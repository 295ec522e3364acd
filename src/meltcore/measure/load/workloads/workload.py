"""Declares workloads, which have prompts and graders of known answers, and encodes their requests.

Request `i` of a workload is the same in every process, so worker processes need no channel to exchange prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.wire.response import BaseResponse
from meltcore.measure.load.wire.stream import StreamedResponse

TOKEN_CHECK_SAMPLE_SIZE = 64  # answers per level whose text is kept for the tokenizer
_BOUNDARY = "meltcore-load-5b8f0c1e7a"


class Clip(msgspec.Struct, array_like=True, frozen=True):
    """One audio file as it is uploaded, its length in seconds, and its transcript if it is known."""

    name: str
    data: bytes
    seconds: float
    transcript: str | None = None


@dataclass(frozen=True)
class Prompt:
    """Holds a request's path, the body fields that vary, and the grader of its answer if the right answer is known.

    A request for a task that counts no tokens has its `work`. A request that uploads audio sends clip `clip_idx`.
    """

    path: str
    fields: dict[str, Any]
    grade: Callable[[str], bool] | None = None
    work: TaskWork | None = None
    clip_idx: int | None = None


class MakeResponse(Protocol):
    """Declares a function that returns the reader of one response."""

    def __call__(
        self,
        record: RequestRecord,
        on_done: Callable[[BaseResponse], None],
        *,
        keep_text: bool,
        max_output_tokens: int | None,
    ) -> BaseResponse:
        """Return a reader that fills `record` and then calls `on_done`."""


@dataclass(frozen=True)
class Workload:
    """Describes a source of prompts.

    `make_prompt(i)` returns the prompt of request i of the run, for any i from 0. `is_graded` is True if every answer
    can be graded. `make_response` makes the readers of the answers. `clips` are the files that requests upload.
    `fields` are the fields that all bodies have.
    """

    name: str
    make_prompt: Callable[[int], Prompt]
    is_graded: bool
    make_response: MakeResponse = StreamedResponse
    clips: tuple[Clip, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


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


class RequestBuilder:
    """Builds request `i` of a level from prompt `first_prompt_idx + i`, so that levels do not share prompts."""

    def __init__(
        self, config: LoadConfig, target: Target, model: str, workload: Workload, first_prompt_idx: int
    ) -> None:
        self.target = target
        self._fields = {"model": model, **workload.fields}
        self._extra_body = config.extra_body
        self._workload = workload
        self._first_prompt_idx = first_prompt_idx
        self._count_tokens = config.tokenizer is not None
        self._check_sample_size = None if config.keep_text else TOKEN_CHECK_SAMPLE_SIZE if self._count_tokens else 0
        self._encode = msgspec.json.Encoder().encode
        self._clip_requests: dict[int, bytes] = {}

    def build(self, index: int) -> EncodedRequest:
        """Encode the request `index`, which counts from 0 within the level."""
        prompt = self._workload.make_prompt(self._first_prompt_idx + index)
        fields = {**self._fields, **prompt.fields, **self._extra_body}
        if prompt.clip_idx is None:
            body = self._encode(fields)
            data = self.target.encode_head("POST", prompt.path, len(body)) + body
        else:
            data = self._clip_requests.get(prompt.clip_idx) or self._encode_clip(prompt.path, fields, prompt.clip_idx)
        return EncodedRequest(
            index,
            data,
            prompt.grade,
            self._check_sample_size is None or index < self._check_sample_size,
            self._count_tokens,
            max_output_tokens(fields),
            prompt.work,
        )

    def _encode_clip(self, path: str, fields: dict[str, Any], clip_idx: int) -> bytes:
        """Return the upload of a clip. Connections share its bytes: 10,000 copies of 0.5 MB would fill the memory."""
        clip = self._workload.clips[clip_idx]
        body = encode_form(fields, clip.name, clip.data)
        head = self.target.encode_head("POST", path, len(body), f"multipart/form-data; boundary={_BOUNDARY}")
        return self._clip_requests.setdefault(clip_idx, head + body)


def encode_form(fields: dict[str, Any], file_name: str, data: bytes) -> bytes:
    """Encode a multipart form with `fields` and one `file`."""
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    disposition = f'Content-Disposition: form-data; name="file"; filename="{file_name}"'
    parts.append(f"--{_BOUNDARY}\r\n{disposition}\r\nContent-Type: application/octet-stream\r\n\r\n".encode())
    return b"".join([*parts, data, f"\r\n--{_BOUNDARY}--\r\n".encode()])


def max_output_tokens(fields: dict[str, Any]) -> int | None:
    """Return the most tokens that the answer to a request with `fields` may have, or None without a limit."""
    limits = [fields.get(name) for name in ("max_tokens", "max_completion_tokens")]
    choice_counts = [fields.get(name) for name in ("n", "best_of")]
    known_limits = [limit for limit in limits if isinstance(limit, int)]
    if not known_limits:
        return None
    return max(known_limits) * max([1, *(count for count in choice_counts if isinstance(count, int))])
