"""The offline API: an engine in this process, for scripts and tests."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from meltcore.config import EngineConfig
from meltcore.engine.engine import Engine
from meltcore.engine.loading import choose_device
from meltcore.engine.messages import AddRequest, FinishReason, SequenceOutput, TokenLogprobs
from meltcore.engine.request import TokenMask
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import RequestError
from meltcore.text.chat_template import ChatTemplate, Message, render_chat
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.thinking import ThoughtMarks, template_defaults
from meltcore.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# Tokens a step on a GPU. A server takes half as many, since who waits for the next token waits for the whole step; here
# nobody does. 400 requests of 128 to 1,024 tokens: 33,400 output tokens/s against 31,600 (H200, 2026-11-21).
GPU_BATCHED_TOKENS = 16_384
# Between two looks of the garbage collector at what is new: one takes as long as a step of few sequences.
_STEPS_A_ROUND = 1024


@dataclass
class Completion:
    """One answer. `token_ids` include the end token; `text` leaves special tokens and a matched stop string out.

    `thoughts`: what the model wrote in a chat before it answered; it is no part of `text`.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    thoughts: str = ""


class LLM:
    """`LLM("meltcore/sums").chat([[{"role": "user", "content": "What is 7 * 8?"}]])`.

    `model` is a local folder, a hub id or the bundled model; the settings are EngineConfig's fields.
    Raises ConfigError where the model or a setting cannot work.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        if config.max_num_batched_tokens is None and choose_device(config.device).type == "cuda":
            config = replace(config, max_num_batched_tokens=GPU_BATCHED_TOKENS)
        self.engine = Engine(config)
        self.engine.scheduler.long_prompt = self.engine.max_model_len  # nobody waits for the next token here
        folder = self.engine.checkpoint.folder
        has_tokenizer = (folder / "tokenizer.json").exists()
        synthetic = self.engine.config.load_format == "dummy" and not has_tokenizer
        self.tokenizer = (
            Tokenizer.synthetic_bytes(self.engine.vocab_size) if synthetic else Tokenizer.from_folder(folder)
        )
        published = self.engine.checkpoint.config
        self._template = ChatTemplate.from_folder(folder, template_defaults(published))
        self._thought_marks = ThoughtMarks.of(self.tokenizer, published)
        self._count = 0

    def close(self) -> None:
        """End the processes of other ranks, which `tp` has started; there is no answer after. Without, they end when
        this object is collected."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        token_masks: Sequence[TokenMask | None] | None = None,
    ) -> list[Completion]:
        """Answer every prompt (text or token ids), batched as the engine sees fit; answers in the order of prompts.

        `sampling`: one for all, or one each. `token_masks`: for each prompt a function from the generated token ids so
        far to the tokens allowed next ([vocab] bool, or None for all). Raises RequestError for a prompt or a setting
        that cannot be served; what was begun is dropped then.
        """
        many = _as_list(prompts)
        settings = _one_each(sampling or SamplingParams(), len(many))
        masks: list[TokenMask | None] = list(token_masks or [None] * len(many))
        if len(masks) != len(many):
            raise RequestError(f"{len(masks)} token_masks for {len(many)} prompts", param="token_masks")
        return self._run(map(self._encode, many), settings, masks, None)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer conversations (lists of {"role", "content"}) through the checkpoint's chat template."""
        many = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        texts = [render_chat(self._template, list(each), chat_template_kwargs) for each in many]  # type: ignore[arg-type]
        token_ids = (self.tokenizer.encode(text, add_special_tokens=False) for text in texts)
        settings = _one_each(sampling or SamplingParams(), len(texts))
        return self._run(token_ids, settings, [None] * len(texts), self._thought_marks)

    def _run(
        self,
        prompts: Iterable[list[int]],
        settings: list[SamplingParams],
        masks: list[TokenMask | None],
        marks: ThoughtMarks | None,
    ) -> list[Completion]:
        answers: dict[str, tuple[Completion, Detokenizer]] = {}
        left = zip(prompts, settings, masks, strict=True)
        try:
            with _spared_the_collector() as tidy:
                # Each time as much as a step can read: the device does not wait while the rest is encoded and checked.
                while self._add_some(left, marks, answers) or self.engine.has_work:
                    for output in self.engine.step().outputs:
                        self._take(output, *answers[output.request_id])
                    tidy()
        except BaseException:
            # A refused prompt, an error in a mask or Ctrl-C: leave an engine that can be used again.
            self.engine.abort(answers)
            while self.engine.has_work:
                self.engine.step()
            raise
        return [completion for completion, _ in answers.values()]

    def _add_some(
        self,
        left: Iterator[tuple[list[int], SamplingParams, TokenMask | None]],
        marks: ThoughtMarks | None,
        answers: dict[str, tuple[Completion, Detokenizer]],
    ) -> bool:
        """Queue the next of `left`, a step's tokens of them; False where none was left."""
        tokens = 0
        for token_ids, sampling, mask in left:
            self._count += 1
            request_id = str(self._count)
            self.engine.add(AddRequest(request_id, token_ids, sampling, arrived_s=time.monotonic()), mask)
            thinking = marks is not None and marks.left_open(token_ids)
            detokenizer = Detokenizer(self.tokenizer, sampling, marks, thinking=thinking)
            answers[request_id] = (Completion(token_ids), detokenizer)
            tokens += len(token_ids)
            if tokens >= self.engine.scheduler.max_num_batched_tokens:
                break
        return tokens > 0

    def _take(self, output: SequenceOutput, completion: Completion, detokenizer: Detokenizer) -> None:
        if detokenizer.stopped is not None:
            return  # tokens that were under way when the stop string was found
        before = detokenizer.token_count
        shown, stopped = detokenizer.add(output.token_ids)
        used = detokenizer.token_count - before
        completion.text += shown
        completion.token_ids += output.token_ids[:used]
        completion.logprobs += (output.logprobs or [])[:used]
        if stopped is not None:
            completion.finish_reason, completion.stop_reason = "stop", stopped
            if output.finish_reason is None:
                self.engine.abort([output.request_id])
        elif output.finish_reason is not None:
            completion.text += detokenizer.flush()
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_token_id
            completion.cached_tokens = output.cached_tokens
        completion.thoughts += "".join(detokenizer.thoughts)
        detokenizer.thoughts.clear()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)


@contextmanager
def _spared_the_collector() -> Iterator[Callable[[], None]]:
    """No full rounds of the garbage collector: looking at all that torch and the engine made keeps the device waiting
    for 0.1 to 0.3 s, three times in 1,000 requests. Gives what to call once a step, to look at new objects alone.
    """
    steps = itertools.count(1)

    def tidy() -> None:
        if next(steps) % _STEPS_A_ROUND == 0:
            gc.collect(generation=0)

    was_on = gc.isenabled()
    gc.disable()
    try:
        yield tidy
    finally:
        if was_on:
            gc.enable()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"{len(sampling)} sampling settings for {count} prompts", param="sampling")
    return list(sampling)
