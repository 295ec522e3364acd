"""Defines the messages about text generation between an API server and an engine (msgpack over ZeroMQ).

An API server sends lists of `ToEngine` messages and receives single `FromEngine` messages. The outputs of one step for
one API server travel in one `StepOutputs`. Every API server has its own two sockets and receives the outputs of its own
requests. The first API server also receives messages that concern no request (loading, failures). All times are
`time.monotonic()` seconds, one clock for all processes of a machine; `protocol/tcp.py` moves them between machines.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec

from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs, EngineReady
from meltcore.protocol.step_sums import NO_STEPS, NUM_SUMS
from meltcore.settings.speculation import MAX_DRAFTS

# Packed token ids are unsigned integers of 32 bits, little endian: the engine may run on another machine.
_TOKEN_TYPECODE = "I"
_TOKEN_BYTES = array(_TOKEN_TYPECODE).itemsize
_CELL_BYTES = 8  # of a double
_DRAFT_SUMS = 2 * MAX_DRAFTS
NO_DRAFTS = bytes(_CELL_BYTES * _DRAFT_SUMS)
_IS_SWAPPED = sys.byteorder == "big"  # this machine has the other byte order

FinishReason = Literal["stop", "length", "abort", "error"]

# --- API server to engine ------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Asks the engine to generate one sequence.

    A lower `priority` is scheduled earlier; requests of equal priority are scheduled in order of arrival. `leader_id`
    names an earlier request with the same prompt: this one starts from its pages once they are computed. If the engine
    still has the earlier request, as when both come in one message, `prompt_token_ids` may be empty. API servers
    pack the prompt (`pack_token_ids`). As lists of Python integers, 10,000 waiting prompts would take hundreds of
    megabytes, not all of which the C library returns to the system.
    """

    request_id: str
    prompt_token_ids: bytes | list[int]
    sampling: SamplingParams
    priority: int = 0
    arrived_s: float = 0.0
    leader_id: str | None = None

    @property
    def prompt(self) -> "array[int]":
        """The token ids of the prompt. Raises OverflowError for an id that is negative or needs more than 32 bits."""
        return unpack_token_ids(self.prompt_token_ids)

    @property
    def prompt_length(self) -> int:
        """The number of prompt tokens."""
        token_ids = self.prompt_token_ids
        return len(token_ids) // _TOKEN_BYTES if isinstance(token_ids, bytes) else len(token_ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes for `AddRequest`. Each id takes 4 bytes, little endian."""
    packed = array(_TOKEN_TYPECODE, token_ids)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(token_ids: bytes | list[int]) -> "array[int]":
    """Return token ids as an array. Raises OverflowError for an id that is negative or exceeds 32 bits."""
    unpacked = array(_TOKEN_TYPECODE, token_ids)
    if _IS_SWAPPED and isinstance(token_ids, bytes):
        unpacked.byteswap()
    return unpacked


ToEngine = AddRequest | CommonToEngine


# --- engine to API server ------------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Holds the log-probabilities of the token at one position, and of the most probable tokens there.

    They come from the raw model distribution, before temperature and penalties.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """Holds the times at which the engine received and scheduled a request, read its first token, and finished it."""

    arrived_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class SequenceOutput(msgspec.Struct, array_like=True, frozen=True):
    """Holds the new tokens of one sequence after a step.

    `token_ids` includes the end or stop token. The last output has a `finish_reason`: "stop" for an end or stop id
    (`stop_token_id` has the id), "length" for max_tokens or the context limit, "abort", or "error" with `error`.
    An `error_code` says that the request is at fault, and is the code of its response. If it was requested,
    `prompt_logprobs` comes with the first token. It has one entry per prompt token after the first.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str | None = None
    times: RequestTimes | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error_code: str | None = None


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """Holds gauges and counters of the engine after a step. The names of counters end in `_total` or `_sums`.

    `draft_sums` holds how many drafts were checked at each position after a token, and then how many of them were
    accepted, as doubles. `step_sums` holds the sums of all steps by their kinds (`protocol/step_sums.py`).
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    num_pages: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    recurrent_state_slots: int = 0
    recurrent_state_slots_used: int = 0
    recurrent_state_snapshots: int = 0
    masks_total: int = 0
    mask_s_total: float = 0.0
    late_masks_total: int = 0
    draft_sums: bytes = NO_DRAFTS
    step_sums: bytes = NO_STEPS

    @property
    def drafted(self) -> Sequence[float]:
        """How many drafts were checked, by position."""
        return memoryview(self.draft_sums).cast("d")[:MAX_DRAFTS]

    @property
    def accepted(self) -> Sequence[float]:
        """How many drafts were accepted, by position."""
        return memoryview(self.draft_sums).cast("d")[MAX_DRAFTS:]

    def cells(self) -> "memoryview[float]":
        """Return all numbers of the statistics, in the order of `ENGINE_CELLS`."""
        cells = memoryview(bytearray(_CELL_BYTES * len(ENGINE_CELLS))).cast("d")
        self.write(cells, 0)
        return cells

    def write(self, cells: "memoryview[float]", first: int) -> None:
        """Write all numbers of the statistics into `cells` from index `first` on, in the order of `ENGINE_CELLS`."""
        *numbers, draft_sums, step_sums = msgspec.structs.astuple(self)
        for index, number in enumerate(numbers, first):
            cells[index] = number
        cells[first + len(numbers) : first + len(ENGINE_CELLS)] = memoryview(draft_sums + step_sums).cast("d")

    @classmethod
    def of_cells(cls, cells: Sequence[float]) -> Self:
        """Return the statistics that have these numbers."""
        packed = array("d", cells[-_DRAFT_SUMS - NUM_SUMS :])
        values: list[Any] = [*cells[: -len(packed)], packed[:_DRAFT_SUMS].tobytes(), packed[_DRAFT_SUMS:].tobytes()]
        return cls(*values)

    def counters(self) -> Self:
        """Return the statistics with all gauges at 0."""
        gauges = [name for name in self.__struct_fields__ if not name.endswith(("_total", "_sums"))]
        return msgspec.structs.replace(self, **dict.fromkeys(gauges, 0))


ENGINE_CELLS = (
    *EngineStats.__struct_fields__[:-2],
    *(f"draft_sums/{index}" for index in range(_DRAFT_SUMS)),
    *(f"step_sums/{index}" for index in range(NUM_SUMS)),
)


class StepOutputs(EngineOutputs[SequenceOutput, EngineStats], tag="outputs", array_like=True, frozen=True):
    """Holds the outputs of one step, one per sequence."""


class GenerationReady(EngineReady, tag="ready", array_like=True, frozen=True):
    """Reports that a generation engine can serve.

    API servers check requests against `max_model_len` and `vocab_size`. `weight_dtypes` and `kv_cache_dtype` are read
    from the allocated tensors. `speculative_decoding` is "none" or the name of its method.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_pages: int
    page_size: int
    weight_dtypes: list[str]
    kv_cache_dtype: str
    speculative_decoding: str

    LOWEST = ("max_model_len", "max_num_seqs", "num_pages")

    def describe_limits(self) -> str:
        """Return a text with the limits of requests."""
        return (
            f"context {self.max_model_len} tokens, {self.max_num_seqs} sequences per step, "
            f"{self.num_pages} KV pages of {self.page_size} tokens"
        )

    def probe(self, request_id: str) -> AddRequest:
        """Return a request with a prompt of one token for one output token."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        return AddRequest(request_id, pack_token_ids([min(1, self.vocab_size - 1)]), sampling)


FromEngine = StepOutputs | GenerationReady | CommonFromEngine
