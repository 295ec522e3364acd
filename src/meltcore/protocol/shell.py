"""Defines the messages that engines of all types share with API servers.

They travel as msgpack over ZeroMQ. The engine receives lists of messages, and sends single messages.
Each engine adds the messages of its own requests (`protocol/generation.py`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import msgspec

_Output = TypeVar("_Output")
_Stats = TypeVar("_Stats")

# --- API server to engine ------------------------------------------------------------------------------------------


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Ends requests with the finish reason "abort" and frees their memory. Unknown and finished ids are ignored."""

    request_ids: list[str]


class Profile(msgspec.Struct, tag="profile", array_like=True, frozen=True):
    """Starts or stops a profiler in the engine process, which answers with `ProfileDone`.

    The profiler "torch" writes a trace into `directory`; "cuda" marks the range that Nsight Systems captures.
    """

    action: Literal["start", "stop"]
    directory: str
    profiler: Literal["torch", "cuda"] = "torch"


class ForgetClient(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """Ends all requests of an API server that has died.

    Their last outputs go to the supervisor, which sends this message.
    """

    client_index: int


class Sleep(msgspec.Struct, tag="sleep", array_like=True, frozen=True):
    """Makes an idle engine release its device memory. The engine answers with `Asleep`.

    With `keep` "host" the engine copies the weights to pinned host memory. With "disk" it drops the weights and reads
    the checkpoint again at `Wake` (levels 1 and 2 of vLLM's sleep mode). The content of caches is lost in both cases.
    """

    keep: Literal["host", "disk"] = "host"


class Wake(msgspec.Struct, tag="wake", array_like=True, frozen=True):
    """Makes a sleeping engine load its weights into device memory again. The engine answers with `Awake`."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Ends the engine process immediately. The API server has drained its requests before."""


# --- engine to API server ------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """Reports the progress of a start: the current stage, and the completed fraction of this stage (0 to 1)."""

    stage: str
    fraction: float


class MemoryRow(msgspec.Struct, array_like=True, frozen=True):
    """Holds one row of the memory table that is printed at the start: a purpose, its bytes, and a note."""

    name: str
    size_bytes: int
    note: str = ""


class EngineReady(msgspec.Struct, array_like=True, frozen=True):
    """Reports that the engine can serve. Each engine type adds its limits in a subclass with a tag.

    Replicas of a model share the lowest value of each limit that LOWEST names.
    """

    LOWEST: ClassVar[Sequence[str]] = ()

    device: str
    dtype: str
    weights: Literal["real", "dummy"]
    memory: list[MemoryRow]
    load_s: float

    @property
    def has_synthetic_lengths(self) -> bool:
        """Whether random weights generate the answers, so that a rule must decide the length of an answer."""
        return False

    def describe_limits(self) -> str:
        """Return a text with the limits of requests, which a server prints at its start."""
        raise NotImplementedError

    def probe(self, request_id: str) -> Any:
        """Return the message of a tiny request. An engine must answer it before it gets requests of clients."""
        raise NotImplementedError


class EngineOutputs(msgspec.Struct, Generic[_Output, _Stats], array_like=True, frozen=True):
    """Holds the outputs of one step: all of them, or those for one API server."""

    outputs: list[_Output]
    stats: _Stats
    step_ended_s: float

    def with_outputs(self, outputs: list[_Output]) -> Self:
        """Return a copy of the message with other `outputs`."""
        return type(self)(outputs, self.stats, self.step_ended_s)


class EngineFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Reports that the engine cannot start or continue.

    The process exits afterwards. `message` is one line for the user.
    """

    message: str


class ProfileDone(msgspec.Struct, tag="profiled", array_like=True, frozen=True):
    """Reports the folder of a started profile, the file of a finished profile, or the reason of a failure.

    The path is empty for the cuda profiler, because Nsight Systems writes the file.
    """

    path: str
    error: str | None = None


class Asleep(msgspec.Struct, tag="asleep", array_like=True, frozen=True):
    """Reports that the engine sleeps. If it cannot sleep, `error` has the reason, and it serves as before.

    Args:
        freed_bytes: Device memory that was released, or host memory for an engine on a CPU.
        resident_bytes: Device memory that the engine holds while it sleeps, such as CUDA graphs.

    Requests that arrive while the engine sleeps are refused.
    """

    freed_bytes: int
    seconds: float
    resident_bytes: int = 0
    error: str | None = None


class Awake(msgspec.Struct, tag="awake", array_like=True, frozen=True):
    """Reports that the engine serves again. If it still sleeps, `error` has the reason, and it may be woken again.

    `bytes_copied` counts bytes of weights, which come from the host or from the checkpoint.
    """

    seconds: float
    bytes_copied: int
    error: str | None = None


# What engines of all types receive besides their requests, and send besides their outputs and limits.
CommonToEngine = AbortRequests | Profile | ForgetClient | Sleep | Wake | Shutdown
CommonFromEngine = Loading | EngineFailed | ProfileDone | Asleep | Awake
