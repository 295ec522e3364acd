"""Provides the offline API: an engine in this process, for scripts and tests."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from meltcore.common.errors import RequestError
from meltcore.engine.core.request import TokenMask
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.host.device import choose_device, default_batched_tokens
from meltcore.protocol.generation import AddRequest, FinishReason, SequenceOutput, TokenLogprobs
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.settings.config import EngineConfig
from meltcore.text.answer_format import answer_format, template_defaults
from meltcore.text.chat_prompt import render_chat
from meltcore.text.chat_template import ChatTemplate, Message
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# Steps between two collections of new objects, which take as long as a step of few sequences.
_STEPS_PER_COLLECTION = 1024


@dataclass
class Completion:
    """Holds the answer to one prompt.

    `token_ids` include the end token. `text` excludes special tokens and a matched stop string. `reasoning` is the
    model's reasoning before the answer of a chat; `text` does not include it.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt tokens after the first
    cached_tokens: int = 0
    reasoning: str = ""


class LLM:
    """Runs an engine for offline use: `LLM("meltcore/sums").chat([{"role": "user", "content": "What is 7 * 8?"}])`."""

    def __init__(self, model: str, **settings: Any) -> None:
        """Load a model from a local folder or a hub id, or the bundled model. `settings` are fields of EngineConfig.

        Raises ConfigError if the model or a setting cannot work.
        """
        config = EngineConfig(model=model, **settings)
        if config.max_num_batched_tokens is None:
            tokens = default_batched_tokens(choose_device(config.device), is_offline=True)
            config = msgspec.structs.replace(config, max_num_batched_tokens=tokens)
        self.engine = GenerationEngine(config)
        self.engine.scheduler.long_prompt = self.engine.max_model_len  # offline, no prompt is paced
        checkpoint, hf_config = self.engine.checkpoint, self.engine.checkpoint.config
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint, allow_missing=config.load_format == "dummy")
        self._template = ChatTemplate.from_checkpoint(checkpoint, template_defaults(hf_config), config.chat_template)
        self._special_tokens_in_messages = config.special_tokens_in_messages
        self._answer_format = answer_format(self.tokenizer, hf_config, self._template)
        self._num_requests = 0

    def close(self) -> None:
        """End the processes of the other tensor-parallel ranks. No request may follow.

        The processes also end when this object is collected.
        """
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        token_masks: Sequence[TokenMask | None] | None = None,
    ) -> list[Completion]:
        """Answer every prompt (text or token ids), batched by the engine, and return the answers in the same order.

        `sampling` is one value for all prompts, or one per prompt. `token_masks` has a function or None per prompt. The
        function takes the token ids that were generated so far, and returns the tokens that are allowed next: [vocab]
        bool, or None for all tokens. Raises RequestError if a prompt or a setting cannot be served. Answers that have
        started are then dropped.
        """
        prompt_list = _as_list(prompts)
        sampling_params = _params_per_prompt(sampling or SamplingParams(), len(prompt_list))
        masks_per_prompt: list[TokenMask | None] = list(token_masks or [None] * len(prompt_list))
        if len(masks_per_prompt) != len(prompt_list):
            raise RequestError(
                f"{len(masks_per_prompt)} token_masks for {len(prompt_list)} prompts", param="token_masks"
            )
        detokenizer = partial(Detokenizer, self.tokenizer, continues_prompt=True)
        return self._run(map(self._encode, prompt_list), sampling_params, masks_per_prompt, detokenizer)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer conversations (lists of {"role", "content"}) through the checkpoint's chat template."""
        prompt_list = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        prompts = [
            render_chat(
                self.tokenizer,
                self._template,
                list(conversation),  # type: ignore[arg-type]
                chat_template_kwargs,
                special_tokens_in_messages=self._special_tokens_in_messages,
            )
            for conversation in prompt_list
        ]
        token_ids = (prompt.encode(self.tokenizer) for prompt in prompts)
        sampling_params = _params_per_prompt(sampling or SamplingParams(), len(prompts))
        detokenizer = partial(Detokenizer, self.tokenizer, answer_format=self._answer_format)
        return self._run(token_ids, sampling_params, [None] * len(prompts), detokenizer)

    def _run(
        self,
        prompts: Iterable[list[int]],
        sampling_params: list[SamplingParams],
        masks: list[TokenMask | None],
        new_detokenizer: Callable[..., Detokenizer],
    ) -> list[Completion]:
        answers: dict[str, tuple[Completion, Detokenizer]] = {}
        pending = zip(prompts, sampling_params, masks, strict=True)
        try:
            with _without_full_gc() as collect:
                # Add prompts for one step at a time: the device does not wait while the others are encoded.
                while self._add_prompts(pending, new_detokenizer, answers) or self.engine.has_work:
                    for output in self.engine.step().outputs:
                        self._append_output(output, *answers[output.request_id])
                    collect()
        except BaseException:
            # After a refused prompt, an error in a mask or Ctrl-C the engine must be usable again.
            self.engine.abort(answers)
            while self.engine.has_work:
                self.engine.step()
            raise
        return [completion for completion, _ in answers.values()]

    def _add_prompts(
        self,
        pending: Iterator[tuple[list[int], SamplingParams, TokenMask | None]],
        new_detokenizer: Callable[..., Detokenizer],
        answers: dict[str, tuple[Completion, Detokenizer]],
    ) -> bool:
        """Queue the next prompts of `pending`, up to the tokens of one step. Returns False if no prompt was left."""
        num_tokens = 0
        for token_ids, sampling, mask in pending:
            self._num_requests += 1
            request_id = str(self._num_requests)
            self.engine.add(AddRequest(request_id, token_ids, sampling, arrived_s=time.monotonic()), mask)
            answers[request_id] = (Completion(token_ids), new_detokenizer(sampling, prompt=token_ids))
            num_tokens += len(token_ids)
            if num_tokens >= self.engine.scheduler.max_num_batched_tokens:
                break
        return num_tokens > 0

    def _append_output(self, output: SequenceOutput, completion: Completion, detokenizer: Detokenizer) -> None:
        if detokenizer.matched_stop is not None:
            return  # tokens that were in flight when the stop string was found
        num_tokens_before = detokenizer.token_count
        new_text, matched_stop = detokenizer.add(output.token_ids)
        num_used = detokenizer.token_count - num_tokens_before
        completion.text += new_text
        completion.token_ids += output.token_ids[:num_used]
        completion.logprobs += (output.logprobs or [])[:num_used]
        completion.prompt_logprobs += output.prompt_logprobs or []
        if matched_stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", matched_stop
            if output.finish_reason is None:
                self.engine.abort([output.request_id])
        elif output.finish_reason is not None:
            completion.text += detokenizer.flush()
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_token_id
            completion.cached_tokens = output.cached_tokens
        if detokenizer.parser is not None:
            completion.reasoning += "".join(detokenizer.parser.take()[0])

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)


@contextmanager
def _without_full_gc() -> Iterator[Callable[[], None]]:
    """Suspend full garbage collections. Yields a function that collects only new objects, to call once per step.

    A full collection traverses all objects of torch and the engine: the device would wait for 0.1 to 0.3 s, three times
    per 1,000 requests.
    """
    step_counter = itertools.count(1)

    def collect() -> None:
        if next(step_counter) % _STEPS_PER_COLLECTION == 0:
            gc.collect(generation=0)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_per_prompt(sampling: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise RequestError(f"{len(sampling)} sampling settings for {num_prompts} prompts", param="sampling")
    return list(sampling)
