"""The requests in progress: each is accepted, receives its output, and is ended here exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import AddRequest, SequenceOutput, StepOutputs, ToEngine
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests
from meltcore.serve.requests.generation import MAX_UNSENT_CHARS, Choice, Generation, Outcome
from meltcore.serve.requests.request_queue import EXPECTED_OUTPUT_TOKENS
from meltcore.serve.requests.stats import ModelStats

# Beside its own tokens a request counts as these for the choice of a replica. Without, replicas of equal tokens
# differ by 6 % in requests, and so in the time of steps; with many more, long prompts would meet at one replica.
REQUEST_TOKENS = 1024


def client_disconnected() -> RequestError:
    """Return the error of a request whose client has left: 499 is nginx's number for it, seen only in the log."""
    return RequestError("the client closed the connection", status=499, code="client_closed")


def slow_reader() -> RequestError:
    """Return the error of a request whose client leaves too much output unread."""
    return RequestError(
        f"the client reads too slowly: more than {MAX_UNSENT_CHARS} characters wait for it",
        status=499,
        code="slow_reader",
    )


class OpenRequests:
    """Every choice of one model that waits or that an engine works on for this API server, by its id.

    `waiting_prompt_tokens` of the statistics counts the prompts without a first token.
    """

    def __init__(
        self,
        stats: ModelStats,
        send: Callable[[ToEngine, int], None],
        on_end: Callable[[Generation], None] = lambda _generation: None,
    ) -> None:
        """Create an empty table.

        `send(message, replica)` sends a message to one of the engines. `on_end` is called at the end of each choice.
        """
        self._stats = stats
        self._send = send
        self._on_end = on_end
        self._open: dict[str, Choice] = {}
        self.usual_output_tokens = EXPECTED_OUTPUT_TOKENS  # of an answer; LocalEngine keeps the average of past ones

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, generation: Generation) -> None:
        """Count every choice of `generation` as in flight; each will be ended once."""
        for choice in generation.choices:
            self._open[choice.request_id] = choice
        self._stats.add("waiting_prompt_tokens", generation.prompt_tokens)
        self._stats.add("accepted", len(generation.choices))
        self._stats.set_in_flight(len(self._open))

    def start(self, generation: Generation, priority: int) -> None:
        """Send every choice of an accepted generation to an engine: to the living replica with the fewest open tokens.

        An answer counts with its limit, at most with the usual length: clients often set no limit. Counted with all
        that the model allows, one of these would keep dozens of shorter requests away from its replica. A request
        also counts as REQUEST_TOKENS, as it takes part in every step.
        Without a living one, to the first: the message of its death, which is on its way, ends the request.
        """
        generation.priority = priority
        for choice in generation.choices:
            self._send_to(choice, self._stats.live_replicas() or [0])

    def _send_to(self, choice: Choice, replicas: Sequence[int]) -> None:
        generation, prompt_token_ids = choice.generation, choice.prompt_token_ids
        choice.replica = min(replicas, key=self._stats.open_tokens)
        choice.is_started = True
        answer_tokens = min(choice.params.max_tokens, round(self.usual_output_tokens))
        choice.cost = REQUEST_TOKENS + choice.prompt_tokens + answer_tokens
        self._stats.assign(choice.replica, choice.cost)
        self._send(
            AddRequest(
                request_id=choice.request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=_without_stop_strings(choice.params),
                priority=generation.priority,
                arrived_s=generation.arrived_s,
            ),
            choice.replica,
        )
        if self._stats.replicas == 1 or generation.is_retried:
            choice.prompt_token_ids = b""  # the engine has them; for 10,000 requests a second copy takes much memory

    def retry(self, replica: int, others: Sequence[int]) -> None:
        """Send requests of a lost replica to others: those that have sent no output to their clients, once each."""
        lost: dict[Generation, list[Choice]] = {}
        for choice in self._open.values():
            generation = choice.generation
            if choice.is_started and choice.replica == replica and not (generation.has_sent or generation.is_retried):
                lost.setdefault(generation, []).append(choice)
        for generation, choices in lost.items():
            generation.is_retried = True
            generation.terms.retries += 1
            self._send(AbortRequests([choice.request_id for choice in choices]), replica)  # it may be out of reach only
            for choice in choices:
                self._stats.unassign(replica, choice.cost)
                self._stats.add("retried")
                choice.restart()
                self._send_to(choice, others)

    def on_step(self, step: StepOutputs, replica: int = 0) -> None:
        """Give each choice its new tokens. Outputs of requests that have ended here already are dropped."""
        self._stats.record_step(step.stats, step.step_ended_s, replica)
        for output in step.outputs:
            choice = self._open.get(output.request_id)
            if choice is None or choice.replica != replica:  # also of one that was lost, and is within reach again
                continue
            try:
                self._on_output(choice, output, step.step_ended_s)
            except Exception as error:  # one answer that fails must not cost the others of this step theirs
                failure = RequestError(f"the server failed on this answer: {type(error).__name__}", status=500)
                self.end(choice.generation, failure, "failed")
                context = {"message": "an output could not be handled", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _on_output(self, choice: Choice, output: SequenceOutput, now_s: float) -> None:
        generation = choice.generation
        if output.finish_reason == "error" or output.finish_reason == "abort":
            self._end(choice, "failed")
            self.end(generation, RequestError(output.error or "the engine ended the request", status=500), "failed")
            return
        received_text = bool(choice.text)
        num_new_tokens = choice.accept(output)
        if num_new_tokens:
            self._note_tokens(choice, num_new_tokens, now_s)
        if choice.finish_reason is not None:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._send(AbortRequests([choice.request_id]), choice.replica)
            self._stats.finish(
                choice.finish_reason,
                prompt_tokens=choice.prompt_tokens,
                arrived_s=generation.arrived_s,
                first_token_s=choice.first_token_s,
                now_s=now_s,
                times=output.times,
            )
            self._end(choice, "finished")
            if generation.streaming or not generation.open_choices:
                generation.wake()
        elif generation.streaming:
            if generation.every_token or (choice.text and not received_text):
                generation.wake()
            if generation.unsent_chars > generation.max_unsent_chars:
                self.end(generation, slow_reader(), "aborted")

    def _note_tokens(self, choice: Choice, num_new_tokens: int, now_s: float) -> None:
        if choice.first_token_s is None:
            choice.first_token_s = now_s
            self._stats.add("waiting_prompt_tokens", -choice.prompt_tokens)
            self._stats.time_to_first_token.observe(now_s - choice.generation.arrived_s)
        else:
            self._stats.inter_token_latency.observe((now_s - choice.last_token_s) / num_new_tokens, num_new_tokens)
        choice.last_token_s = now_s
        self._stats.add("generation_tokens", num_new_tokens)

    def end(self, generation: Generation, error: RequestError, outcome: Outcome) -> None:
        """End the open choices of `generation` with an error. No effect on a generation that has ended."""
        if generation.error is not None:
            return
        open_choices = [choice for choice in generation.choices if choice.request_id in self._open]
        if not open_choices and not generation.sending and outcome != "failed":
            return
        generation.error = error
        started = [choice for choice in open_choices if choice.is_started]
        for replica in sorted({choice.replica for choice in started}):
            ids = [choice.request_id for choice in started if choice.replica == replica]
            self._send(AbortRequests(ids), replica)
        for choice in open_choices:
            self._end(choice, outcome)
        generation.wake()
        if generation.sending and generation.disconnect is not None:
            generation.disconnect()

    def end_all(self, error: RequestError, outcome: Outcome, replica: int | None = None) -> None:
        """End every request, or every request of `replica`, which those that wait are not."""
        for choice in list(self._open.values()):
            if replica is None or (choice.is_started and choice.replica == replica):
                self.end(choice.generation, error, outcome)

    def _end(self, choice: Choice, outcome: Outcome) -> None:
        if self._open.pop(choice.request_id, None) is None:
            return
        if not self._open:
            self._open.clear()  # an emptied dict keeps the memory of its largest size
        choice.generation.open_choices -= 1
        if choice.first_token_s is None:
            self._stats.add("waiting_prompt_tokens", -choice.prompt_tokens)
        if choice.is_started:
            self._stats.unassign(choice.replica, choice.cost)
        self._stats.add(outcome)
        self._stats.set("in_flight", len(self._open))
        self._on_end(choice.generation)


def _without_stop_strings(params: SamplingParams) -> SamplingParams:
    """Return the settings that an engine needs. Stop strings are found here, where the text is.

    A request of 1,024 prompts may have 64 KiB of them, which would be sent with each.
    """
    return msgspec.structs.replace(params, stop=()) if params.stop else params
