"""One HTTP request being answered: its choices (one a prompt), what they have made, and what is not sent yet."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Literal

from meltcore.engine.messages import SequenceOutput, TokenLogprobs, packed
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import RequestError
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.thinking import ThoughtMarks
from meltcore.text.tokenizer import Tokenizer

MAX_UNSENT_CHARS = 256 * 1024  # a streaming client further behind than this is cut off; the sockets buffer more
LOGPROB_CHARS = 32  # of it, what one log-probability counts for: about its number and its token as they are sent

# No two choices of a server may have the same id, whichever front process they came through.
_ENGINE_IDS = (f"{os.getpid():x}-{number}" for number in itertools.count(1))

Outcome = Literal["finished", "aborted", "failed"]


class Choice:
    """One prompt and its answer. It is one request to the engine, and counts as one in the metrics."""

    __slots__ = (
        "cached_tokens",
        "detokenizer",
        "end_sent",
        "finish_reason",
        "first_token_s",
        "generation",
        "index",
        "last_token_s",
        "logprob_offset",
        "logprobs",
        "output_tokens",
        "params",
        "pieces",
        "prompt_token_ids",
        "prompt_tokens",
        "replica",
        "request_id",
        "role_sent",
        "thoughts",
        "tokens_sent",
    )

    def __init__(
        self,
        generation: Generation,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        marks: ThoughtMarks | None,
    ) -> None:
        self.generation = generation
        self.index = index
        # Not the client's x-request-id: two clients may send the same one, and the engine's ids must differ.
        self.request_id = next(_ENGINE_IDS)
        self.prompt_token_ids = packed(prompt)
        self.prompt_tokens = len(prompt)
        self.params = params
        self.replica = 0  # the one that works on it, from the moment it is given away
        thinking = marks is not None and marks.left_open(prompt)
        self.detokenizer = Detokenizer(tokenizer, params, marks, thinking=thinking)
        self.pieces: list[str] = []  # text not sent yet
        self.thoughts: list[str] = []  # likewise, of what comes before the answer
        self.logprobs: list[tuple[int, TokenLogprobs]] = []  # token id and its log-probabilities, not sent yet
        self.logprob_offset = 0  # characters of the answer before the next logprobs entry
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self.first_token_s: float | None = None
        self.last_token_s = generation.arrived_s
        self.role_sent = False
        self.tokens_sent = 0
        self.end_sent = False

    def accept(self, output: SequenceOutput) -> int:
        """Take the engine's new tokens. Returns how many count (those after a stop string do not).

        Sets `finish_reason` where the answer ends, whether the engine or a stop string ended it.
        """
        detokenizer = self.detokenizer
        ids = output.token_ids
        shown = ids
        if output.stop_token_id is not None and ids and not self.params.include_stop_str_in_output:
            shown = ids[:-1]  # the token that ends an answer is counted, but is no part of its text
        counted = len(ids)
        text, stopped = detokenizer.add(shown)
        if stopped is not None:
            counted = detokenizer.token_count - self.output_tokens
        elif output.finish_reason is not None:
            text += detokenizer.flush()
            stopped = detokenizer.stopped
        if stopped is not None:
            self.finish_reason = "stop"
        elif output.finish_reason == "stop" or output.finish_reason == "length":
            self.finish_reason = output.finish_reason
        self.output_tokens += counted
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        if output.logprobs:
            self.logprobs.extend(zip(ids[:counted], output.logprobs, strict=False))
            self.generation.unsent_chars += min(counted, len(output.logprobs)) * self._logprobs_a_token * LOGPROB_CHARS
        if text:
            self.pieces.append(text)
            self.generation.unsent_chars += len(text)
        if detokenizer.thoughts:
            self.thoughts += detokenizer.thoughts
            self.generation.unsent_chars += sum(map(len, detokenizer.thoughts))
            detokenizer.thoughts.clear()
        return counted

    @property
    def tokens_to_do(self) -> int:
        """The most that a replica may have to work through: the prompt and all of the answer that is allowed."""
        return self.prompt_tokens + self.params.max_tokens

    def take_news(self) -> bool:
        """Whether an event now would say anything new; asked once before each event."""
        if self.end_sent:
            return False
        self.end_sent = self.finish_reason is not None
        unseen = self.generation.every_token and self.output_tokens > self.tokens_sent
        self.tokens_sent = self.output_tokens
        return unseen or self.end_sent or bool(self.pieces or self.thoughts)

    def take_text(self) -> str:
        """The text not sent yet, now counted as sent."""
        return self._take(self.pieces)

    def take_thoughts(self) -> str:
        """The thoughts not sent yet, now counted as sent."""
        return self._take(self.thoughts)

    def take_logprobs(self) -> list[tuple[int, TokenLogprobs]]:
        """Token ids and their log-probabilities not sent yet, now counted as sent."""
        taken, self.logprobs = self.logprobs, []
        self.generation.unsent_chars -= len(taken) * self._logprobs_a_token * LOGPROB_CHARS
        return taken

    @property
    def unsent_logprobs(self) -> int:
        """How many numbers those are."""
        return len(self.logprobs) * self._logprobs_a_token

    @property
    def _logprobs_a_token(self) -> int:
        return 1 + (self.params.logprobs or 0)  # the chosen one's, and the likeliest ones'

    def _take(self, pieces: list[str]) -> str:
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        self.generation.unsent_chars -= len(text)
        return text


class Generation:
    """One HTTP request. The engine's side calls `wake` and `fail`; the handler waits in `news`."""

    def __init__(self, request_id: str, *, arrived_s: float, streaming: bool, every_token: bool = False) -> None:
        """`every_token`: an event even for tokens that show no text yet, for usage counted token by token."""
        self.request_id = request_id
        self.arrived_s = arrived_s  # time.monotonic()
        self.streaming = streaming
        self.every_token = every_token
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.unsent_chars = 0
        self.error: RequestError | None = None
        self.sending = False  # inside `await send(...)`: seen from outside, the client is not reading
        self.cut_off: Callable[[], None] | None = None  # drops the connection, and with it what was not read
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False

    def add_choice(
        self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer, marks: ThoughtMarks | None = None
    ) -> None:
        """marks: around thoughts, where these are to be kept apart from the answer."""
        self.choices.append(Choice(self, len(self.choices), prompt, params, tokenizer, marks))
        self.open_choices += 1

    @property
    def prompt_tokens(self) -> int:
        return sum(choice.prompt_tokens for choice in self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices)

    def wake(self) -> None:
        """Something new to send, or nothing more to come. Any number of calls is one wake-up of the handler."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait for the next `wake`; at once where it came already."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._has_news = False
