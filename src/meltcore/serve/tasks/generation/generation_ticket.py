"""Represents one HTTP request for generated text, with one choice per answer. A choice has the output not sent yet."""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

import msgspec

from meltcore.protocol.generation import AddRequest, SequenceOutput, TokenLogprobs, pack_token_ids, unpack_token_ids
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.text.answer_format import AnswerFormat
from meltcore.text.call_scanners import Piece, ToolSet
from meltcore.text.detokenizer import REPLACEMENT_CHAR, Detokenizer, incremental_decoder
from meltcore.text.tokenizer import Tokenizer

# A streaming client further behind than this is cut off, however many answers it gets; the sockets buffer more.
MAX_UNSENT_CHARS = 256 * 1024
LOGPROB_CHARS = 32  # that one log-probability counts for: about its number and its token as they are sent
BURST_TOKENS = 8  # of each answer, which may come together: a client that reads well finds them waiting


class Echo(NamedTuple):
    """A prompt that the answer repeats at its beginning, as text and as `token_ids` packed by pack_token_ids.

    If `echo_only` is true, the answer has no generated tokens.
    """

    text: str
    token_ids: bytes
    echo_only: bool


class BestOf(NamedTuple):
    """The numbers of answers to each prompt that are made, and of the most probable ones that are returned."""

    made: int
    returned: int


class Choice(Child):
    """One answer to a prompt. A choice is one request to the engine, and counts as one request in the metrics."""

    __slots__ = (
        "_text_is_ahead",
        "answer_format",
        "cached_tokens",
        "continues_prompt",
        "detokenizer",
        "echo",
        "end_sent",
        "finish_reason",
        "first_token_s",
        "index",
        "last_token_s",
        "leader",
        "logprob_offset",
        "logprob_sum",
        "logprobs",
        "offset_decoder",
        "output_tokens",
        "params",
        "pieces",
        "prompt_token_ids",
        "prompt_tokens",
        "requested_echo",
        "role_sent",
        "sent_chars",
        "text",
        "tokenizer",
        "tokens_sent",
        "tools",
    )
    ticket: GenerationTicket

    def __init__(
        self,
        ticket: GenerationTicket,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
        echo: Echo | None = None,
        *,
        tools: ToolSet | None = None,
        continues_prompt: bool = False,
        leader: Choice | None = None,
    ) -> None:
        """Add an answer to a ticket.

        Args:
            ticket: the request.
            prompt: the token ids of the prompt.
            params: how tokens are chosen, and where the answer ends.
            tokenizer: the tokenizer of the model.
            answer_format: how the model writes reasoning and tool calls; None takes all as text.
            echo: the prompt as the beginning of the answer.
            tools: the tools that the model may call. None takes calls as text.
            continues_prompt: whether the text of the answer continues the text of the prompt, as in a completion.
            leader: the first answer to the same prompt, with which this one shares the prompt's pages.
        """
        self.index = len(ticket.children)
        super().__init__(ticket, waiting_tokens=len(prompt) if leader is None else 0)
        self.leader = leader
        self.prompt_token_ids: bytes = pack_token_ids(prompt) if leader is None else leader.prompt_token_ids
        self.prompt_tokens = len(prompt)
        self.params = params
        ticket.max_unsent_chars += BURST_TOKENS * self._logprobs_per_token * LOGPROB_CHARS
        self.tokenizer = tokenizer
        self.answer_format = answer_format
        self.tools = tools
        self.requested_echo = echo
        self.continues_prompt = continues_prompt
        self.first_token_s: float | None = None
        self.last_token_s = ticket.arrived_s
        self.role_sent = False
        self.tokens_sent = 0
        self.end_sent = False
        self._begin(prompt)

    def _begin(self, prompt: Sequence[int]) -> None:
        """Reset the fields that depend on the answer so far."""
        params, tokenizer = self.params, self.tokenizer
        continues_prompt = self.continues_prompt
        self.detokenizer = Detokenizer(
            *(tokenizer, params, self.answer_format, prompt), tools=self.tools, continues_prompt=continues_prompt
        )
        self.text: list[str] = []  # not sent yet
        self.pieces: list[Piece] = []  # likewise: reasoning, and parts of calls
        self.sent_chars = 0  # of the text
        # Token id and its log-probabilities, not sent yet; a prompt's first token has none.
        self.logprobs: list[tuple[int, TokenLogprobs | None]] = []
        self.logprob_sum = 0.0  # of the tokens so far
        self.logprob_offset = 0  # characters of the answer before the next logprobs entry
        # It reads an echoed prompt itself.
        context = prompt if continues_prompt and self.requested_echo is None else ()
        self.offset_decoder = (
            None if params.logprobs is None else incremental_decoder(tokenizer, params.skip_special_tokens, context)
        )
        # No text has come before the next logprobs entry, neither of the answer nor of a prompt that it continues.
        is_bare = not continues_prompt or all(map(self.detokenizer.is_hidden, prompt))
        self._text_is_ahead = params.logprobs is not None and (self.requested_echo is not None or is_bare)
        self.echo = self.requested_echo  # until the first output has come
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None

    @property
    def can_retry(self) -> bool:
        """Whether no output was sent to the client yet."""
        return not self.ticket.has_sent

    def messages(self) -> Sequence[AddRequest]:
        """Return one message with the prompt and its sampling settings. Stop strings are checked in this process.

        A request of 1,024 prompts may have 64 KiB of stop strings, which would be sent with each prompt. The prompt of
        several answers is sent once.
        """
        params, ticket, leader = self.params, self.ticket, self.leader
        is_prompt_sent = leader is not None and leader.replica == self.replica
        if params.stop:
            params = msgspec.structs.replace(params, stop=())
        if ticket.best_of is not None and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)  # of the answer's own tokens, which rank it
        return [
            AddRequest(
                request_id=self.request_id,
                prompt_token_ids=b"" if is_prompt_sent else self.prompt_token_ids,
                sampling=params,
                priority=ticket.priority,
                arrived_s=ticket.arrived_s,
                leader_id=None if leader is None else leader.request_id,
            )
        ]

    def open_ids(self) -> Sequence[str]:
        """Return the id of the choice."""
        return [self.request_id]

    def restart(self) -> None:
        """Discard the answer so far, of which the client has received nothing. The time of the first token is kept."""
        self.take_pieces()
        self.ticket.unsent_chars -= sum(map(len, self.text)) + self.num_unsent_logprobs * LOGPROB_CHARS
        self._begin(unpack_token_ids(self.prompt_token_ids))

    def accept(self, output: SequenceOutput) -> int:
        """Add the engine's new tokens to the answer. Return how many of them belong to it: those up to a stop string.

        Sets `finish_reason` if the engine or a stop string ends the answer.
        """
        if self.echo is not None:
            output = self._emit_echo(self.echo, output)
        detokenizer = self.detokenizer
        ids = output.token_ids
        visible_ids = ids
        if output.stop_token_id is not None and ids and not self.params.include_stop_str_in_output:
            visible_ids = ids[:-1]  # the token that ends an answer is counted, but is no part of its text
        num_counted = len(ids)
        text, stopped = detokenizer.add(visible_ids)
        if stopped is not None:
            num_counted = detokenizer.token_count - self.output_tokens
        elif output.finish_reason is not None:
            text += detokenizer.flush()
            stopped = detokenizer.matched_stop
        if stopped is not None:
            self.finish_reason = "stop"
        elif output.finish_reason == "stop" or output.finish_reason == "length":
            self.finish_reason = output.finish_reason
        self.output_tokens += num_counted
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        if output.logprobs:
            self.logprob_sum += sum(token.logprob for token in output.logprobs[:num_counted])
        if output.logprobs and self.params.logprobs is not None:
            self.logprobs.extend(zip(ids[:num_counted], output.logprobs, strict=False))
            self.ticket.unsent_chars += (
                min(num_counted, len(output.logprobs)) * self._logprobs_per_token * LOGPROB_CHARS
            )
        if text:
            self.text.append(text)
            self.ticket.unsent_chars += len(text)
        if detokenizer.parser is not None:
            pieces = detokenizer.parser.take_pieces()
            self.pieces += pieces
            self.ticket.unsent_chars += _num_chars(pieces)
        return num_counted

    def _emit_echo(self, echo: Echo, output: SequenceOutput) -> SequenceOutput:
        """Put the prompt before the answer. Return the part of the engine's first output that belongs to the answer.

        With `echo_only` this part has no tokens.
        """
        self.echo = None
        if output.prompt_logprobs is not None:
            self.logprobs.extend(zip(unpack_token_ids(echo.token_ids), [None, *output.prompt_logprobs], strict=True))
        self.text.append(echo.text)
        # The client asked for this much: it is not a sign of one that reads too slowly.
        size = len(echo.text) + self.num_unsent_logprobs * LOGPROB_CHARS
        self.ticket.unsent_chars += size
        self.ticket.max_unsent_chars += size
        if not echo.echo_only:
            return output
        return msgspec.structs.replace(output, token_ids=[], finish_reason="length", stop_token_id=None, logprobs=None)

    def begins_text(self, token_id: int) -> bool:
        """Return whether the next logprobs entry begins the text of the answer. Call this method once per entry.

        In a completion the prompt is before the answer, so no entry begins the text. In a chat the first visible token
        does.
        """
        if not self._text_is_ahead or self.detokenizer.is_hidden(token_id):
            return False
        self._text_is_ahead = False
        return True

    def logprob_text_offset(self, token_id: int) -> int:
        """Return the text_offset of the next logprobs entry in characters. Call this method once per entry.

        It advances the offset by the text of `token_id`.
        """
        offset = self.logprob_offset
        if self.offset_decoder is None or self.detokenizer.is_hidden(token_id):
            return offset
        text = self.offset_decoder.add(token_id)
        self.logprob_offset += len(text)
        if self.tokenizer.token_bytes(token_id).decode(errors="replace").startswith(REPLACEMENT_CHAR):
            return offset
        # The parts of characters that this token shows to be broken come before its own text.
        return offset + len(text) - len(text.lstrip(REPLACEMENT_CHAR))

    def take_update(self) -> bool:
        """Return whether the next event would have new output, and count this output as sent.

        Call it once before each event.
        """
        if self.end_sent:
            return False
        self.end_sent = self.finish_reason is not None
        has_unseen_tokens = self.ticket.every_token and self.output_tokens > self.tokens_sent
        self.tokens_sent = self.output_tokens
        return has_unseen_tokens or self.end_sent or self.has_unsent_output

    @property
    def has_unsent_output(self) -> bool:
        """Whether text, reasoning or a part of a call waits to be sent."""
        return bool(self.text or self.pieces)

    def take_text(self) -> str:
        """Return the text that was not sent yet, and count it as sent.

        Every event to the client has a text, possibly "".
        """
        self.ticket.note_sent()
        text = self.text[0] if len(self.text) == 1 else "".join(self.text)
        self.text.clear()
        self.sent_chars += len(text)
        self.ticket.unsent_chars -= len(text)
        return text

    def take_pieces(self, end: int | None = None) -> list[Piece]:
        """Return the reasoning and the parts of calls that were not sent yet, and count them as sent.

        With `end`, those after more than this many characters of the text stay: the text before them is held back,
        since it may begin a stop string.
        """
        count = len(self.pieces) if end is None else bisect_right(self.pieces, end, key=itemgetter(0))
        pieces, self.pieces = self.pieces[:count], self.pieces[count:]
        self.ticket.unsent_chars -= _num_chars(pieces)
        return pieces

    def new_call_id(self) -> str:
        """Return an id for a tool call, in the form that the chat template accepts.

        Templates of Mistral accept nine letters.
        """
        form = None if self.answer_format is None else self.answer_format.calls
        if form is not None and form.id_letters is not None:
            return secrets.token_hex(form.id_letters)[: form.id_letters]
        return f"call_{secrets.token_hex(12)}"

    @property
    def shown_finish_reason(self) -> str | None:
        """The reason why the answer ended, as OpenAI's API says it."""
        parser = self.detokenizer.parser
        return "tool_calls" if self.finish_reason == "stop" and parser and parser.has_calls else self.finish_reason

    @property
    def reasoning_tokens(self) -> int:
        """The number of generated tokens that are reasoning, without the marks around it."""
        return self.detokenizer.reasoning_tokens

    def mean_logprob(self) -> float:
        """Return the mean log-probability of the answer's tokens."""
        return self.logprob_sum / max(1, self.output_tokens)

    def take_logprobs(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Return the token ids and log-probabilities that were not sent yet, and count them as sent."""
        unsent_logprobs_list, self.logprobs = self.logprobs, []
        self.ticket.unsent_chars -= len(unsent_logprobs_list) * self._logprobs_per_token * LOGPROB_CHARS
        return unsent_logprobs_list

    @property
    def num_unsent_logprobs(self) -> int:
        """The number of log-probabilities that were not sent yet."""
        return len(self.logprobs) * self._logprobs_per_token

    @property
    def _logprobs_per_token(self) -> int:
        return 1 + (self.params.logprobs or 0)  # that of the chosen token, and the highest ones


def _num_chars(pieces: Sequence[Piece]) -> int:
    return sum(len(piece) if isinstance(piece, str) else piece.size for _, piece in pieces)


class GenerationTicket(Ticket[Choice]):
    """Represents one HTTP request. The backend calls `wake`; the request handler waits in `wait_for_change`."""

    def __init__(
        self,
        *,
        arrived_s: float,
        streaming: bool,
        every_token: bool = False,
        streams_calls: bool = True,
    ) -> None:
        """Create the state of one request.

        With `every_token`, tokens that have no text yet get an event too, for clients that count usage by token.
        Without `streams_calls`, a stream has whole calls only.
        """
        super().__init__(arrived_s)
        self.choices = self.children
        self.streaming = streaming
        self.every_token = every_token
        self.streams_calls = streaming and streams_calls
        self.best_of: BestOf | None = None  # None returns all answers
        self.weakened: tuple[str, ...] = ()  # what the grammar of the answer does not enforce of its schema
        self.has_sent = False  # output to its client
        self.unsent_chars = 0
        self.max_unsent_chars = MAX_UNSENT_CHARS
        self.disconnect: Callable[[], None] | None = None  # drops the connection, and with it what is not read
        self._waiter: asyncio.Future[None] | None = None
        self._is_changed = False

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts, each counted once."""
        return sum(choice.prompt_tokens for choice in self.choices if choice.leader is None)

    @property
    def output_tokens(self) -> int:
        """The number of generated tokens of all choices."""
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """The number of generated tokens of all choices that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens of all prompts, each counted once, that were in the prefix cache."""
        return sum(choice.cached_tokens for choice in self.choices if choice.leader is None)

    def answers(self) -> list[Choice]:
        """Return the choices of a complete response, in order, and number them.

        With `best_of` these are the answers to each prompt that are most probable per token, the best one first.
        """
        if self.best_of is None:
            return self.choices
        made, returned = self.best_of
        found: list[Choice] = []
        for first in range(0, len(self.choices), made):
            found += sorted(self.choices[first : first + made], key=Choice.mean_logprob, reverse=True)[:returned]
        for index, choice in enumerate(found):
            choice.index = index
        return found

    def note_sent(self) -> None:
        """Note that output is sent to the client.

        The request cannot be retried afterwards, so its prompts are freed.
        """
        if not self.has_sent:
            self.has_sent = True
            for choice in self.choices:
                choice.prompt_token_ids = b""

    def fail(self) -> None:
        """Let the request handler send the error. If the client does not read, drop the connection."""
        self.wake()
        if self.is_sending and self.disconnect is not None:
            self.disconnect()

    def wake(self) -> None:
        """Wake the request handler, because the request has new output or has ended. Several calls wake it once."""
        self._is_changed = True
        self._end_wait()

    async def wait_for_change(self, limit_s: float | None = None) -> bool:
        """Wait until `wake` was called since the last call of this method, for at most `limit_s` seconds.

        Return whether it was called.
        """
        if not self._is_changed:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if limit_s is None else loop.call_later(limit_s, self._end_wait)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        has_changed, self._is_changed = self._is_changed, False
        return has_changed

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
