"""The table of requests in the engine: the one place where a request is accepted, fed and ended, each exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from meltcore.engine.messages import AbortRequests, AddRequest, SequenceOutput, StepOutputs, ToEngine
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import RequestError
from meltcore.server.counts import Counts
from meltcore.server.generation import MAX_UNSENT_CHARS, Choice, Generation, Outcome


def client_gone() -> RequestError:
    # 499 is nginx's number for it; nobody is left to read it but the request log.
    return RequestError("the client closed the connection", status=499, code="client_closed")


def slow_reader() -> RequestError:
    return RequestError(
        f"the client reads too slowly: more than {MAX_UNSENT_CHARS} characters wait for it",
        status=499,
        code="slow_reader",
    )


class OpenRequests:
    """Every choice of this front that the engine works on, by its id.

    `waiting_prompt_tokens` of the counts are those of requests that have not had their first token.
    """

    def __init__(self, counts: Counts, send: Callable[[ToEngine, int], None]) -> None:
        """`send(message, replica)` takes a message to one of the engines."""
        self._counts = counts
        self._send = send
        self._open: dict[str, Choice] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, generation: Generation, priority: int) -> None:
        """Hand every choice of `generation` to a replica; from here on it is accepted and will be ended.

        Each goes to the living replica that has the fewest tokens to do; there must be one.
        """
        for choice in generation.choices:
            choice.replica = min(self._counts.living(), key=self._counts.open_tokens)
            self._counts.give(choice.replica, choice.tokens_to_do)
            self._open[choice.request_id] = choice
            self._send(
                AddRequest(
                    request_id=choice.request_id,
                    prompt_token_ids=choice.prompt_token_ids,
                    sampling=_without_stops(choice.params),
                    priority=priority,
                    arrived_s=generation.arrived_s,
                ),
                choice.replica,
            )
            choice.prompt_token_ids = b""  # the engine has them now; at 10,000 requests a second copy is real memory
        self._counts.add("waiting_prompt_tokens", generation.prompt_tokens)
        self._counts.add("accepted", len(generation.choices))
        self._counts.note_in_flight(len(self._open))

    def on_step(self, step: StepOutputs, replica: int = 0) -> None:
        """Give each choice its new tokens. Outputs of requests that have ended here already are dropped."""
        self._counts.note_step(step.stats, step.step_ended_s, replica)
        for output in step.outputs:
            choice = self._open.get(output.request_id)
            if choice is None:
                continue
            try:
                self._on_output(choice, output, step.step_ended_s)
            except Exception as error:  # whatever one answer trips over, the others of this step must get theirs
                failure = RequestError(f"the server failed on this answer: {type(error).__name__}", status=500)
                self.end(choice.generation, failure, "failed")
                context = {"message": "an output could not be handled", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _on_output(self, choice: Choice, output: SequenceOutput, now_s: float) -> None:
        generation = choice.generation
        if output.finish_reason == "error" or output.finish_reason == "abort":
            self._end(choice, "failed")
            self.end(generation, RequestError(output.error or "the engine gave the request up", status=500), "failed")
            return
        had_text = bool(choice.pieces)
        counted = choice.accept(output)
        if counted:
            self._note_tokens(choice, counted, now_s)
        if choice.finish_reason is not None:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._send(AbortRequests([choice.request_id]), choice.replica)
            self._counts.finish(choice, output.times, now_s)
            self._end(choice, "finished")
            if generation.streaming or not generation.open_choices:
                generation.wake()
        elif generation.streaming:
            if generation.every_token or (choice.pieces and not had_text):
                generation.wake()
            if generation.unsent_chars > MAX_UNSENT_CHARS:
                self.end(generation, slow_reader(), "aborted")

    def _note_tokens(self, choice: Choice, counted: int, now_s: float) -> None:
        if choice.first_token_s is None:
            choice.first_token_s = now_s
            self._counts.add("waiting_prompt_tokens", -choice.prompt_tokens)
            self._counts.time_to_first_token.observe(now_s - choice.generation.arrived_s)
        else:
            self._counts.inter_token_latency.observe((now_s - choice.last_token_s) / counted, counted)
        choice.last_token_s = now_s
        self._counts.add("generation_tokens", counted)

    def end(self, generation: Generation, error: RequestError, outcome: Outcome) -> None:
        """End what is still open of `generation` with an error; nothing happens where it has ended already."""
        if generation.error is not None:
            return
        open_choices = [choice for choice in generation.choices if choice.request_id in self._open]
        if not open_choices and not generation.sending and outcome != "failed":
            return
        generation.error = error
        for replica in sorted({choice.replica for choice in open_choices}):
            ids = [choice.request_id for choice in open_choices if choice.replica == replica]
            self._send(AbortRequests(ids), replica)
        for choice in open_choices:
            self._end(choice, outcome)
        generation.wake()
        if generation.sending and generation.cut_off is not None:
            generation.cut_off()

    def end_all(self, error: RequestError, outcome: Outcome, replica: int | None = None) -> None:
        """End every request, or every one that `replica` works on."""
        for choice in list(self._open.values()):
            if replica is None or choice.replica == replica:
                self.end(choice.generation, error, outcome)

    def _end(self, choice: Choice, outcome: Outcome) -> None:
        if self._open.pop(choice.request_id, None) is None:
            return
        if not self._open:
            self._open.clear()  # an emptied dict keeps the room of all it has held
        choice.generation.open_choices -= 1
        if choice.first_token_s is None:
            self._counts.add("waiting_prompt_tokens", -choice.prompt_tokens)
        self._counts.take_back(choice.replica, choice.tokens_to_do)
        self._counts.add(outcome)
        self._counts.set("in_flight", len(self._open))


def _without_stops(params: SamplingParams) -> SamplingParams:
    """What the engine needs of them. Stop strings are found here, where the text is; a request of 1,024 prompts may say
    64 KiB of them, which would travel with each."""
    return msgspec.structs.replace(params, stop=()) if params.stop else params
