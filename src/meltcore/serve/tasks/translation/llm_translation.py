"""Translates with a language model. Each text has a prompt of its own, so there are as many translations as texts."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.serve.requests.asgi import finish_all
from meltcore.serve.requests.backend import Backend
from meltcore.serve.tasks.generation.chat import ChatAnswer, ask
from meltcore.serve.tasks.translation.forms import TranslatedTexts, TranslateRequest
from meltcore.text.languages import english_name

_NOTHING = ChatAnswer("", 0, 0)


class LLMTranslator:
    """Asks a language model for each translation. All prompts of a request run concurrently."""

    translates = True

    def __init__(self, backend: Backend, prompt: str, stop: Sequence[str]) -> None:
        """Create a translator with a language model.

        `prompt` is the system message, which contains {source} and {target}. An answer ends before any text of `stop`.
        """
        self.names = backend.names
        self._backend = backend
        self._prompt = prompt
        self._stop = stop

    def has_pair(self, request: TranslateRequest) -> bool:  # noqa: ARG002 - as the protocol has it
        """Return True, because a language model can be asked for any pair of languages."""
        return True

    async def translate(self, request: TranslateRequest) -> TranslatedTexts:
        """Return one translation per text, in order. Cancelling the call ends the work.

        A text without a visible character is returned unchanged. Raises RequestError (400, 429, 500, 503, 504).
        """
        source, target = english_name(request.src_lang, "src_lang"), english_name(request.tgt_lang, "tgt_lang")
        if source == target:
            raise RequestError(f"src_lang and tgt_lang are both {source}", param="tgt_lang")
        system = self._prompt.format(source=source, target=target)

        async def translate_text(text: str) -> ChatAnswer:
            return await ask(self._backend, system, text, stop=self._stop) if is_visible(text) else _NOTHING

        texts = request.sentences
        answers = await finish_all(translate_text(text) for text in texts)
        return TranslatedTexts(
            [answer.text if is_visible(text) else text for answer, text in zip(answers, texts, strict=True)],
            sum(answer.prompt_tokens for answer in answers),
            sum(answer.completion_tokens for answer in answers),
        )
