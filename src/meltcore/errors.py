"""Errors a user can act on: what was wrong, the limit, the value seen, what to do."""


class MeltcoreError(Exception):
    """Base of every error we raise on purpose. The CLI prints its text as one line and exits non-zero."""


class ConfigError(MeltcoreError):
    """A setting, file or checkpoint that cannot work: found at start-up, before anything is served."""


class RequestError(MeltcoreError):
    """One request that cannot be served; nothing else is touched.

    `param` names the field at fault; `status` is the HTTP status of its OpenAI error form
    (https://platform.openai.com/docs/guides/error-codes).
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class EngineDeadError(MeltcoreError):
    """The engine process is gone; every open request of it has failed."""


class RankError(MeltcoreError):
    """A rank of a tensor-parallel group is gone or stuck; the engine cannot go on."""
