"""The backend of a language model whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

from typing import Any

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import GenerationReady, StepOutputs, pack_token_ids
from meltcore.protocol.sampling_params import Grammar
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.admission import TOKENS
from meltcore.serve.requests.backend import Backend, other_task
from meltcore.serve.requests.open_tickets import RequestTimeLimit
from meltcore.serve.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.tasks.generation.call_grammar import limit_reasoning
from meltcore.serve.tasks.generation.generation_ticket import BestOf, Choice, Echo, GenerationTicket
from meltcore.serve.tasks.generation.open_requests import OpenRequests, client_disconnected
from meltcore.serve.tasks.generation.prompts import chat_prompt, decode, encode_all, encode_prompts, prompt_texts
from meltcore.serve.tasks.generation.sampling import is_echo_only, num_answers, params_of_answer, sampling_params
from meltcore.serve.tasks.generation.structured import (
    MAX_MESSAGE_CHARS,
    check_beside_grammar,
    grammar_of_answer,
    requested_grammar,
)
from meltcore.serve.tasks.generation.text_model import TextModel, load_text_model
from meltcore.serve.tasks.generation.tools import requested_tools, template_variables, tool_grammar
from meltcore.settings.fleet_spec import ModelSection


def local_engine(backend: Backend) -> LocalEngine:
    """Return the backend if it generates text in this server. Raises RequestError (400) if it does not."""
    if not isinstance(backend, LocalEngine):
        raise other_task(backend)
    return backend


class LocalEngine(EngineBackend):
    """Tokenizes and admits requests, sends each to the replica with the least work, and distributes the new tokens."""

    purpose = "generates text: POST /v1/chat/completions and /v1/completions"
    unit = TOKENS
    tickets: OpenRequests | None = None

    def __init__(
        self, name: str, config: ModelSection, server: ServerStats, stats: ModelStats, **settings: Any
    ) -> None:
        super().__init__(name, config, server, stats, **settings)
        self._time_limit: RequestTimeLimit[GenerationTicket] = RequestTimeLimit(self._limit_s, self._end_overdue)

    # --- life cycle

    def load(self) -> TextModel:
        """Return the tokenizer and the chat template. This may take seconds.

        Raises ConfigError if one of them is invalid.
        """
        return load_text_model(self.config)

    def open(self, text: TextModel, engine: GenerationReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        super().open(text, engine, created)
        queue = self._new_queue(engine.max_num_seqs, lambda: self.stats.total("waiting_prompt_tokens"))
        self.tickets = OpenRequests(self.stats, self._send, queue, self._time_limit.limit_s)

    def on_step(self, step: StepOutputs, replica: int) -> None:
        """Add the new tokens of a step to their choices."""
        assert self.tickets is not None
        self.tickets.on_step(step, replica)

    # --- requests

    @property
    def chats(self) -> bool:
        """Whether the model accepts chats: it has a chat template, or is still loading."""
        return self._text is None or self._text.template.is_usable

    async def submit(self, request: ChatRequest | CompletionRequest, ticket: GenerationTicket) -> None:
        """Tokenize, check and admit a request.

        If it is refused, raise RequestError (400, 429, 503) and start nothing.
        """
        ready: GenerationReady = self._loaded()
        text, limit = self._text, ready.max_model_len
        answer_format = tools = None
        if isinstance(request, ChatRequest):
            answer_format = text.answer_format
            tools = requested_tools(request, answer_format, text.template, is_streamed=ticket.streams_calls)
            prompts = [await self._chat_prompt(request, limit, is_only_counted=False)]
        else:
            prompts = await encode_prompts(text.tokenizer, ready.vocab_size, request.prompt, context=limit)
        answers_per_prompt = num_answers(request, len(prompts))
        grammars = await self._grammars(request, ticket, prompts, answers_per_prompt)
        params = [
            sampling_params(
                request,
                prompt_tokens=len(prompt),
                max_model_len=limit,
                vocab_size=ready.vocab_size,
                defaults=text.sampling_defaults,
                grammar=grammar,
            )
            for prompt, grammar in zip(prompts, grammars, strict=True)
        ]
        echoes = await self._echoes(request, prompts)
        if isinstance(request, CompletionRequest) and answers_per_prompt > (request.n or 1):
            ticket.best_of = BestOf(answers_per_prompt, request.n or 1)
        for prompt, settings, echo in zip(prompts, params, echoes, strict=True):
            leader = None
            for index in range(answers_per_prompt):
                choice = Choice(
                    *(ticket, prompt, params_of_answer(settings, index), text.tokenizer, answer_format, echo),
                    tools=tools,
                    continues_prompt=isinstance(request, CompletionRequest) or bool(request.continue_final_message),
                    leader=leader,
                )
                leader = leader or choice
        self._admit(ticket, request.priority or 0)

    def release(self, ticket: GenerationTicket, error: RequestError | None = None) -> None:
        """End the open choices of `ticket`. Without an `error`, the client has disconnected."""
        self._time_limit.forget(ticket)
        assert self.tickets is not None
        self.tickets.end(ticket, error or client_disconnected(), "aborted")

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a text or of a chat."""
        limit = self._loaded().max_model_len
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            chat = ChatRequest(
                messages=request.messages,
                chat_template_kwargs=request.chat_template_kwargs,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            )
            requested_tools(chat, self._text.answer_format, self._text.template)
            tokens = await self._chat_prompt(chat, limit, is_only_counted=True)
        else:
            (tokens,) = await encode_all(
                *(self._text.tokenizer, [request.prompt or ""], "prompt"),
                add_special_tokens=request.add_special_tokens,
                context=limit,
                is_only_counted=True,
            )
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a chat's prompt, its tools included. Raises RequestError (400, 503)."""
        limit = self._loaded().max_model_len
        requested_tools(request, self._text.answer_format, self._text.template)
        return len(await self._chat_prompt(request, limit, is_only_counted=True))

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids."""
        vocab_size = self._loaded().vocab_size
        return {"prompt": await decode(self._text.tokenizer, request.tokens, vocab_size)}

    def facts(self, ready: GenerationReady) -> dict[str, Any]:
        """Return the fields that the model card has for clients and measurements, such as the context length."""
        text: TextModel = self._text
        return {
            "max_model_len": ready.max_model_len,
            "vocab_size": ready.vocab_size,
            "chat": text.template.is_usable,
            "special_tokens_in_messages": self.config.special_tokens_in_messages,
            "tokenizer": "synthetic" if text.tokenizer.is_synthetic else "real",
            "weight_dtypes": ready.weight_dtypes,
            "kv_cache_dtype": ready.kv_cache_dtype,
            "speculative_decoding": ready.speculative_decoding,
            "debug": list(self.config.debug_options),
            "hf_overrides": self.config.hf_overrides,
        }

    async def _chat_prompt(self, request: ChatRequest, context: int, *, is_only_counted: bool) -> list[int]:
        return await chat_prompt(
            self._text.tokenizer,
            self._text.template,
            request.messages,
            template_variables(request, self._text.template),
            context,
            special_tokens_in_messages=self.config.special_tokens_in_messages,
            is_only_counted=is_only_counted,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )

    async def _grammars(
        self,
        request: ChatRequest | CompletionRequest,
        ticket: GenerationTicket,
        prompts: list[list[int]],
        answers_per_prompt: int,
    ) -> list[Grammar | None]:
        """Return the grammar that the request asks for, or None, per prompt.

        The response says what the grammar does not enforce.
        """
        requested, num_choices = requested_grammar(request), len(prompts) * answers_per_prompt
        answer_format = None
        if isinstance(request, ChatRequest):
            answer_format = self._text.answer_format
            requested = tool_grammar(request, answer_format, requested)
            limited = limit_reasoning(request, answer_format, requested, prompts[0])
            if limited is not None:  # it has the reasoning, too
                requested, answer_format = limited, None
        if requested is None:
            return [None] * len(prompts)
        check_beside_grammar(request, requested.param)
        checked = await self._text.grammars.check(requested, self.stats)
        if num_choices * len(checked.text) > MAX_MESSAGE_CHARS:
            raise RequestError(
                f"{num_choices} answers with a grammar of {len(checked.text)} characters are too much for one request; "
                f"the limit of both, multiplied, is {MAX_MESSAGE_CHARS}",
                param=requested.param,
            )
        ticket.weakened = checked.weakened
        if checked.weakened:
            text = "; ".join(checked.weakened).encode("ascii", "replace")
            ticket.exchange.headers.append((b"x-weakened-schema", text))
        return [grammar_of_answer(checked.text, answer_format, prompt) for prompt in prompts]

    async def _echoes(self, request: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> list[Echo | None]:
        """Return one Echo per prompt, which repeats it in the answer.

        Without `echo` in the request, return None per prompt.
        """
        if not isinstance(request, CompletionRequest) or not request.echo:
            return [None] * len(prompts)
        if request.stream and request.logprobs is not None:
            raise RequestError(
                "echo with logprobs is not supported in a stream; leave out one of the three", param="echo"
            )
        texts = await prompt_texts(self._text.tokenizer, request, prompts)
        is_echo_only_request = is_echo_only(request)
        return [
            Echo(text, pack_token_ids(prompt), is_echo_only_request)
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _admit(self, ticket: GenerationTicket, priority: int) -> None:
        """Send the request to the engines, or let it wait for its turn. The time limit applies until `release`.

        Raises RequestError: 429 if the queue is full, and 503 while the model cannot serve.
        """
        self._loaded()  # the status may have changed while tokenizing
        self._live_replicas()
        assert self.tickets is not None
        usual_tokens = self.tickets.usual_output_tokens
        allowed_tokens = sum(min(choice.params.max_tokens, usual_tokens) for choice in ticket.choices)
        prompt_tokens = ticket.prompt_tokens
        self.tickets.admit(
            *(ticket, self.config.priority),
            units=prompt_tokens,
            cost=prompt_tokens + allowed_tokens,
            priority=priority,
        )
        self._time_limit.watch(ticket)
        ticket.exchange.charge(prompt_tokens)

    def _end_overdue(self, ticket: GenerationTicket) -> None:
        assert self.tickets is not None
        self.tickets.end(ticket, self.tickets.overdue(ticket), "aborted")
