"""What the backends of speech recognition and synthesis share: admission, the time limit, and refused routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, Literal

from meltcore.api.admission import Admission
from meltcore.api.generation import Generation
from meltcore.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meltcore.api.stats import ModelStats, ServerStats
from meltcore.audio.pool import AudioWorkers
from meltcore.backends.engine_backend import EngineBackend
from meltcore.config import ModelConfig
from meltcore.errors import ConfigError, RequestError

# Uploads of open requests in this process. Beyond it requests are refused: memory stays bounded.
_MAX_UPLOADS_BYTES = 2**30
# Requests that the admission counts as running; more are in the queue.
_RUNNING_REQUESTS = 64


class AudioBackend(EngineBackend):
    """The engines of a model of speech. `purpose` says in errors what it does, and where."""

    purpose: str

    def __init__(
        self, config: ModelConfig, server: ServerStats, stats: ModelStats, *, request_timeout_s: float
    ) -> None:
        super().__init__(config, server, stats)
        self.workers = AudioWorkers()
        self.limit_s = request_timeout_s
        self._admission = Admission(
            max_queue=config.max_queue, max_queue_tokens=config.max_queue_tokens, max_num_seqs=_RUNNING_REQUESTS
        )
        self._open_requests = 0
        self._upload_bytes = 0

    async def close_workers(self) -> None:
        """End the processes of this backend."""
        await self.workers.close()

    @asynccontextmanager
    async def admitted(self, upload_bytes: int) -> AsyncIterator[int]:
        """Count a request from its admission to its end, within the time limit. Yields its replica.

        Raises RequestError: 429 when the queue is full, 503, 504 after the time limit.
        """
        arrived_s = time.monotonic()
        replica = self._admit(upload_bytes)
        outcome: Literal["finished", "aborted", "failed"] = "aborted"
        try:
            async with asyncio.timeout(self.limit_s):
                yield replica
            outcome = "finished"
            self.stats.finish(
                "stop", prompt_tokens=0, arrived_s=arrived_s, first_token_s=None, now_s=time.monotonic(), times=None
            )
        except TimeoutError as error:
            message = f"the answer took longer than {self.limit_s:g} s (--request-timeout)"
            raise RequestError(message, status=504, code="request_timeout") from error
        except RequestError as error:
            outcome = "failed" if error.status >= 500 else "aborted"
            raise
        finally:
            self._open_requests -= 1
            self._upload_bytes -= upload_bytes
            self.stats.unassign(replica, upload_bytes)
            self.stats.add(outcome)
            self.stats.set("in_flight", self._open_requests)

    def _admit(self, upload_bytes: int) -> int:
        """Count a request that begins; returns its replica. Raises RequestError (429, 503)."""
        stats = self.stats
        with stats.shared.locked():  # the limits are those of all API servers together
            live = self._live_replicas()
            in_flight = round(stats.total("in_flight"))
            try:
                self._admission.check(requests=1, replicas=len(live), tokens=0, in_flight=in_flight, waiting_tokens=0)
                if self._upload_bytes and self._upload_bytes + upload_bytes > _MAX_UPLOADS_BYTES:
                    raise RequestError(
                        f"the queue is full: uploads of {self._upload_bytes + upload_bytes} bytes would wait, "
                        f"the limit is {_MAX_UPLOADS_BYTES}",
                        status=429,
                        code="queue_full",
                    )
            except RequestError:
                stats.add("rejected_queue_full")
                raise
            replica = min(live, key=stats.open_tokens)
            stats.assign(replica, upload_bytes)
            stats.add("accepted")
            self._open_requests += 1
            self._upload_bytes += upload_bytes
            stats.set_in_flight(self._open_requests)
        return replica

    # --- the other routes

    async def submit(self, request: ChatRequest | CompletionRequest, generation: Generation) -> None:  # noqa: ARG002
        """Refuse to generate text."""
        raise self._no_text()

    def release(self, generation: Generation, error: RequestError | None = None) -> None:
        """Do nothing: there are no generations."""

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        """Refuse to tokenize."""
        raise self._no_text()

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        """Refuse to detokenize."""
        raise self._no_text()

    def _no_text(self) -> RequestError:
        return RequestError(f"the model {self.names[0]} {self.purpose}", param="model")


def check_audio_packages() -> None:
    """Raise ConfigError unless the packages that read uploads are installed."""
    packages = ("python_multipart", "regex", "sacremoses", "sentencepiece", "soundfile", "soxr", "yaml")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"speech models need {', '.join(missing)}: pip install 'meltcore[audio,engine]'")
