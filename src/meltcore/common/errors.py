"""Defines the errors that a user can act on. Their texts say what was wrong, the limit, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence


class MeltcoreError(Exception):
    """The base class of all errors that Meltcore raises on purpose.

    The command line prints the text as one line and exits with a non-zero status.
    """


class ConfigError(MeltcoreError):
    """Reports a setting, file or checkpoint that cannot work.

    The error is raised at the start, before anything is served.
    """


class UnservableModelError(ConfigError):
    """Reports in one line all reasons why a model cannot be served. `source` is the file or folder with the model."""

    def __init__(self, source: str, reasons: Sequence[str]) -> None:
        self.source, self.reasons = source, tuple(reasons)
        numbered = "; ".join(f"({index}) {reason}" for index, reason in enumerate(reasons, 1))
        text = f"{source}: {reasons[0]}" if len(reasons) == 1 else f"{source}: {len(reasons)} reasons: {numbered}"
        super().__init__(text)


class BudgetError(ConfigError):
    """Reports that a memory budget does not hold the weights and the largest request. A larger one may."""


class ShardError(ConfigError):
    """Reports a model dimension that the ranks cannot divide evenly, or cannot divide between quantized blocks."""


class RequestError(MeltcoreError):
    """Reports one request that cannot be served. Other requests continue.

    `param` is the name of the invalid field. `status` is the HTTP status. `code` is the error code of the response in
    OpenAI's form (https://platform.openai.com/docs/guides/error-codes). `retry_after_s` becomes the header Retry-After.
    `model` is for the log line: the name of the model that cannot serve the request, or of the model that is not there.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
        model: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.model = model
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class SleepError(MeltcoreError):
    """Reports that an engine cannot sleep or wake now. The state of the engine has not changed."""


class EngineDeadError(MeltcoreError):
    """Reports that the engine process has ended. Each of its open requests has failed."""


class EnginePendingError(MeltcoreError):
    """Reports that an engine was not started: no node has enough free memory, or the cluster cannot be changed now.

    The start is tried again later.
    """


class EngineEvictedError(EnginePendingError):
    """Reports that the cluster has ended the start of an engine, because the engine's node ran out of memory.

    The start is not tried on another node. The engine process may continue until its limit FIRST_CLIENT_S for a first
    client has passed.
    """


class RankError(MeltcoreError):
    """Reports that a rank of a tensor-parallel group has ended or hangs. The engine cannot continue."""
