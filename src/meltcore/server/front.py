"""A front: one process's state, and the way of a request through it. Routes call it; `run` starts and ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from meltcore.config import ServerConfig
from meltcore.engine.messages import (
    EngineFailed,
    EngineReady,
    FromEngine,
    Loading,
    Profile,
    ProfileDone,
    StepOutputs,
    ToEngine,
)
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import EngineDeadError, RequestError
from meltcore.server.admission import Admission
from meltcore.server.counts import Counts
from meltcore.server.generation import Generation
from meltcore.server.health import Health
from meltcore.server.log import Log
from meltcore.server.metrics import Metrics
from meltcore.server.model import Model, TextSide
from meltcore.server.open_requests import OpenRequests
from meltcore.server.prompts import chat_prompt, completion_prompts
from meltcore.server.protocol import ChatRequest, CompletionRequest
from meltcore.server.sampling import sampling_params
from meltcore.server.time_limit import TimeLimit

ENGINE_GONE = "the engine has died; the server is going down"
REPLICA_GONE = "the replica that worked on this has died; the others go on, so the request can be sent again"


class Front:
    """Holds the model and the open requests of one front process; health and limits are those of the whole server."""

    def __init__(self, config: ServerConfig, counts: Counts, send: Callable[[ToEngine, int], None]) -> None:
        """`send` takes messages to a replica's engine; what it answers to this front goes to `on_message`."""
        self.config = config
        self.names = config.served_model_names or (config.engine.model,)
        self.counts = counts
        self.metrics = Metrics(self.names[0], counts)
        self.health = Health(counts)
        self.log = Log(config.log_format, counts)
        self.requests = OpenRequests(counts, send)
        self.time_limit = TimeLimit(config.request_timeout_s, self._end_overdue)
        self.model: Model | None = None
        self._send = send
        self._admission: Admission | None = None
        self._last_words: dict[int, str] = {}  # what a replica's engine said of its own failure
        self._profiles: list[tuple[int, asyncio.Future[ProfileDone]]] = []  # by the replica that is asked

    def open(self, text: TextSide, engine: EngineReady, created: int) -> Model:
        """Everything is loaded: take requests from now on. `created`: Unix seconds, the same for every front."""
        self.model = Model(names=self.names, text=text, engine=engine, created=created)
        self._admission = Admission(
            max_queue=self.config.max_queue,
            max_queue_tokens=self.config.max_queue_tokens,
            max_num_seqs=engine.max_num_seqs * self.config.dp,
        )
        self.health.set("ready", "ready")
        return self.model

    def replica_died(self, replica: int, how: str) -> str:
        """Fail every open request of it at once; with the last replica, nothing is admitted any more.

        The board must know already. Returns why, in the engine's words if any.
        """
        words = self._last_words.get(replica)
        why = f"{words} ({how})" if words else how
        gone = REPLICA_GONE
        if not self.counts.living():
            gone = ENGINE_GONE
            self.health.set("dead", f"{ENGINE_GONE} ({why})")
        self.requests.end_all(RequestError(gone, status=500, code="engine_dead"), "failed", replica)
        for asked, waiting in self._profiles:
            if asked == replica and not waiting.done():
                waiting.set_exception(EngineDeadError(gone))
        self._profiles = [each for each in self._profiles if each[0] != replica]
        return why

    def ready_model(self, name: str | None) -> Model:
        """The model called `name` (None: the only one).

        Raises RequestError: 503 while it cannot serve, 404 with the known names where there is no such model.
        """
        if self.model is None or self.health.state != "ready":
            self.counts.add(f"rejected_{self.health.state}")
            raise RequestError(self.health.reason, status=503, code="not_ready")
        if name is not None and name not in self.names:
            raise RequestError(
                f"there is no model {name!r} here; this server has {', '.join(self.names)}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self.model

    async def prompts(self, model: Model, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Token ids of the request's prompts. Raises RequestError (400)."""
        if isinstance(request, ChatRequest):
            text = model.text
            chat = await chat_prompt(
                text.tokenizer,
                text.template,
                request.messages,
                request.chat_template_kwargs,
                model.engine.max_model_len,
            )
            return [chat]
        return await completion_prompts(
            model.text.tokenizer, model.engine.vocab_size, request, model.engine.max_model_len
        )

    def sampling(
        self, model: Model, request: ChatRequest | CompletionRequest, prompts: list[list[int]]
    ) -> list[SamplingParams]:
        """The sampling settings of each prompt. Raises RequestError (400) naming the field at fault."""
        return [
            sampling_params(
                request,
                prompt_tokens=len(prompt),
                max_model_len=model.engine.max_model_len,
                vocab_size=model.engine.vocab_size,
                defaults=model.text.sampling_defaults,
            )
            for prompt in prompts
        ]

    def admit(self, generation: Generation, priority: int) -> None:
        """Give the request to the engine; its time is limited until `time_limit.forget`.

        Raises RequestError (429, 503) where it cannot.
        """
        counts = self.counts
        if not counts.living():  # what the first front knows already, and we are to hear yet
            self.health.set("dead", ENGINE_GONE)
        if self._admission is None or self.health.state != "ready":  # it may have changed while tokenising
            counts.add(f"rejected_{self.health.state}")
            raise RequestError(self.health.reason, status=503, code="not_ready")
        with counts.board.locked():  # the limits are of all fronts together
            in_flight = round(counts.total("in_flight"))
            try:
                self._admission.check(
                    requests=len(generation.choices),
                    tokens=generation.prompt_tokens,
                    in_flight=in_flight,
                    waiting_tokens=round(counts.total("waiting_prompt_tokens")),
                )
            except RequestError:
                counts.add("rejected_queue_full")
                raise
            self.requests.add(generation, priority)
        self.time_limit.watch(generation)

    async def profile(self, action: Literal["start", "stop"]) -> ProfileDone:
        """Start or stop the engine's profiler, into --profile-dir: of the first replica alone, for all do the same.

        Raises EngineDeadError.
        """
        directory = self.config.profile_dir
        assert directory is not None
        replica = min(self.counts.living(), default=None)
        if replica is None:
            raise EngineDeadError(ENGINE_GONE)
        done: asyncio.Future[ProfileDone] = asyncio.get_running_loop().create_future()
        self._profiles.append((replica, done))
        self._send(Profile(action, directory), replica)
        return await done

    def _end_overdue(self, generation: Generation) -> None:
        limit_s = self.config.request_timeout_s
        error = RequestError(
            f"the answer took longer than {limit_s:g} s (--request-timeout)", status=504, code="request_timeout"
        )
        self.requests.end(generation, error, "aborted")

    def on_message(self, message: FromEngine, replica: int) -> None:
        """Take in what a replica's engine says to this front."""
        if isinstance(message, StepOutputs):
            self.requests.on_step(message, replica)
        elif isinstance(message, Loading):
            # All load the same; were each of them shown, their lines would only take turns.
            if replica == 0 and self.health.state == "loading":
                done = f" ({message.fraction:.0%})" if message.fraction else ""  # of many stages nobody knows
                self.health.set("loading", f"loading: {message.stage}{done}")
        elif isinstance(message, EngineFailed):
            self._last_words[replica] = message.message
        elif isinstance(message, ProfileDone):
            self._end_profile(message, replica)

    def _end_profile(self, done: ProfileDone, replica: int) -> None:
        for at, (asked, waiting) in enumerate(self._profiles):
            if asked == replica:
                del self._profiles[at]
                if not waiting.done():
                    waiting.set_result(done)
                return
