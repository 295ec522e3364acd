"""Holds the requests for generated text that are in progress. Each is accepted, receives output, and is ended once."""

from __future__ import annotations

import asyncio

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import SequenceOutput, StepOutputs
from meltcore.serve.requests.open_tickets import OpenTickets
from meltcore.serve.requests.request_queue import EXPECTED_OUTPUT_TOKENS, OUTPUT_TOKENS_WEIGHT
from meltcore.serve.requests.ticket import Ticket
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket

# Beside its own tokens a request counts as these for the choice of a replica. Without, replicas of equal tokens
# differ by 6 % in requests, and so in the time of steps; with many more, long prompts would meet at one replica.
REQUEST_TOKENS = 1024


def client_disconnected() -> RequestError:
    """Return the error of a request whose client has disconnected.

    Its status is 499, as in nginx, and appears only in the log.
    """
    return RequestError("the client closed the connection", status=499, code="client_closed")


def slow_reader(max_unsent_chars: int) -> RequestError:
    """Return the error of a request whose client leaves too much output unread."""
    return RequestError(
        f"the client reads too slowly: more than {max_unsent_chars} characters wait for it",
        status=499,
        code="slow_reader",
    )


class OpenRequests(OpenTickets[Choice]):
    """Holds the open choices of one model by id. A choice waits in the queue, or an engine works on it.

    `waiting_prompt_tokens` in the statistics counts the prompts without a first token.
    """

    usual_output_tokens = EXPECTED_OUTPUT_TOKENS  # of an answer: the average of past ones

    def place(self, child: Choice, replica: int) -> None:
        """Send a choice to a replica, and set its cost there in tokens. It follows the first answer to its prompt.

        An answer costs its limit of tokens, or the average length of past answers if that is lower, because clients
        often set no limit. The longest length of the model would keep dozens of shorter requests away from the replica.
        REQUEST_TOKENS are added, because each request takes part in every step.
        """
        answer_tokens = min(child.params.max_tokens, round(self.usual_output_tokens))
        child.cost = REQUEST_TOKENS + answer_tokens
        if child.leader is None:
            child.cost += child.prompt_tokens
        elif child.leader.replica is not None:
            replica = child.leader.replica  # whose prefix cache has the prompt
        super().place(child, replica)
        if self._stats.replicas == 1 or child.ticket.is_retried:
            child.prompt_token_ids = b""  # the engine has them; for 10,000 requests a second copy takes much memory

    def settle(self, ticket: Ticket[Choice]) -> float:
        """Return the cost of an ended request, which is the number of its prompt and output tokens.

        The output tokens change the average length of answers, and are charged to the API key of the request.
        """
        assert isinstance(ticket, GenerationTicket)
        output_tokens = ticket.output_tokens
        mean = output_tokens / len(ticket.children)
        self.usual_output_tokens += (mean - self.usual_output_tokens) * OUTPUT_TOKENS_WEIGHT
        ticket.exchange.charge(output_tokens)
        return ticket.prompt_tokens + output_tokens

    def on_step(self, step: StepOutputs, replica: int = 0) -> None:
        """Add the new tokens of a step to their choices.

        Outputs of choices that have already ended here are dropped.
        """
        self._stats.record_step(step.stats, step.step_ended_s, replica)
        for output in step.outputs:
            choice = self._open.get(output.request_id)
            if choice is None or choice.replica != replica:  # also of one that was lost, and is within reach again
                continue
            try:
                self._on_output(choice, output, step.step_ended_s)
            except Exception as error:  # one answer that fails must not cost the others of this step theirs
                failure = RequestError(f"the server failed on this answer: {type(error).__name__}", status=500)
                self.end(choice.ticket, failure, "failed")
                context = {"message": "an output could not be handled", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _on_output(self, choice: Choice, output: SequenceOutput, now_s: float) -> None:
        ticket = choice.ticket
        if output.finish_reason == "error" or output.finish_reason == "abort":
            self.close(choice, "failed")
            status = 500 if output.error_code is None else 400
            error = RequestError(output.error or "the engine ended the request", status=status, code=output.error_code)
            self.end(ticket, error, "failed")
            return
        had_output = choice.has_unsent_output
        num_new_tokens = choice.accept(output)
        if num_new_tokens:
            self._note_tokens(choice, num_new_tokens, now_s)
        if choice.finish_reason is not None:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._abort([choice])
            self._stats.finish(
                choice.finish_reason,
                prompt_tokens=choice.prompt_tokens,
                arrived_s=ticket.arrived_s,
                first_token_s=choice.first_token_s,
                now_s=now_s,
                times=output.times,
            )
            self.close(choice, "finished")
            if ticket.streaming or not ticket.open_children:
                ticket.wake()
        elif ticket.streaming:
            if ticket.every_token or (choice.has_unsent_output and not had_output):
                ticket.wake()
            if ticket.unsent_chars > ticket.max_unsent_chars:
                self.end(ticket, slow_reader(ticket.max_unsent_chars), "aborted")

    def _note_tokens(self, choice: Choice, num_new_tokens: int, now_s: float) -> None:
        if choice.first_token_s is None:
            choice.first_token_s = now_s
            self._stats.add("waiting_prompt_tokens", -choice.waiting_tokens)
            choice.waiting_tokens = 0
            self._stats.time_to_first_token.observe(now_s - choice.ticket.arrived_s)
        else:
            self._stats.inter_token_latency.observe((now_s - choice.last_token_s) / num_new_tokens, num_new_tokens)
        choice.last_token_s = now_s
        self._stats.add("generation_tokens", num_new_tokens)
