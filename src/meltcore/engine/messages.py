"""What the fronts and an engine process say to each other (msgpack over ZeroMQ). No torch: a front imports this.

Front to engine: a list of `ToEngine` messages a send. Engine to front: one `FromEngine` message a send; all outputs of
a step that are for one front travel in one `StepOutputs`. Each front has two sockets of its own, and gets what belongs
to what it has sent; the rest (loading, failures) goes to the first. All times are `time.monotonic()` seconds, one clock
for every process of a machine.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from meltcore.engine.sampling_params import SamplingParams

# Of a packed token id, as this machine has it: both ends of a socket are processes of one machine.
TOKEN_BYTES = array("I").itemsize

FinishReason = Literal["stop", "length", "abort", "error"]


def socket_address(directory: Path, way: Literal["to-engine", "from-engine"], front: int) -> str:
    """Where `front` (counted from 0) binds its PUSH ("to-engine") or PULL ("from-engine") and the engine connects."""
    return f"ipc://{directory}/{way}-{front}.sock"


# --- front to engine ---------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """One sequence to generate. `priority`: lower runs earlier; ties run in order of arrival.

    Fronts pack the prompt (`packed`): as lists of numbers 10,000 waiting prompts are hundreds of megabytes, and the
    C library does not give all of that back.
    """

    request_id: str
    prompt_token_ids: bytes | list[int]
    sampling: SamplingParams
    priority: int = 0
    arrived_s: float = 0.0

    @property
    def prompt(self) -> "array[int]":
        """Raises OverflowError for an id that is negative or needs more than 32 bits."""
        return array("I", self.prompt_token_ids)

    @property
    def prompt_length(self) -> int:
        ids = self.prompt_token_ids
        return len(ids) // TOKEN_BYTES if isinstance(ids, bytes) else len(ids)


def packed(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Stop these and free their pages; unknown and finished ids are ignored. Each live one ends with reason "abort"."""

    request_ids: list[str]


class Profile(msgspec.Struct, tag="profile", array_like=True, frozen=True):
    """Start or stop the torch profiler in the engine; answered by `ProfileDone`."""

    action: Literal["start", "stop"]
    directory: str


class ForgetFront(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """A front has died: stop all it has asked for. Their ends are reported to the first front, which sends this."""

    front: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Leave at once; the front has drained already."""


ToEngine = AddRequest | AbortRequests | Profile | ForgetFront | Shutdown


# --- engine to front ---------------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at one generated position, of the raw model distribution (before temperature and penalties)."""

    chosen: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """When one request was first scheduled, gave its first token and ended, as the engine saw it."""

    arrived_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class SequenceOutput(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of one sequence after a step.

    `token_ids` includes the end or stop token. On the last output `finish_reason` is set: "stop" for an end or stop id
    (`stop_token_id` says which), "length" for max_tokens or the context limit, "abort", or "error" with `error`.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str | None = None
    times: RequestTimes | None = None


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a step. Counts ending in `_total` only grow."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    steps_total: int = 0
    step_s_total: float = 0.0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    state_slots: int = 0
    state_slots_used: int = 0
    state_snapshots: int = 0


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    outputs: list[SequenceOutput]
    stats: EngineStats
    step_ended_s: float


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """Progress while starting: what is being done and how far it is (0 to 1)."""

    stage: str
    fraction: float


class MemoryRow(msgspec.Struct, array_like=True, frozen=True):
    name: str
    size_bytes: int
    note: str = ""


class EngineReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine can serve. `max_model_len` and `vocab_size` are limits the front checks requests against."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    pages_total: int
    page_size: int
    weights: Literal["real", "dummy"]
    memory: list[MemoryRow]
    load_s: float


class EngineFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine cannot start or go on; `message` is one line for the user. The process exits after it."""

    message: str


class ProfileDone(msgspec.Struct, tag="profiled", array_like=True, frozen=True):
    path: str
    error: str | None = None


FromEngine = StepOutputs | Loading | EngineReady | EngineFailed | ProfileDone
