"""Lets clients chat in their languages with a language model that may be prompted in another language."""

from __future__ import annotations

from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.generation.chat import ask
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.serve.tasks.translation.choice import translator
from meltcore.serve.tasks.translation.forms import TranslateRequest
from meltcore.text.languages import english_name


async def answer_in(choices: ModelChoice, exchange: Exchange, prompt: str, languages: tuple[str, str]) -> str:
    """Return a language model's answer to a prompt. `languages` has two names: the prompt's and the answer's language.

    `fields["model"]` of the exchange names the model; None is the default model of the chat routes. If a language is
    configured in which the model is prompted, the prompt and the answer are translated. Raises RequestError (400, 404,
    429, 500, 503, 504).
    """
    source, target = (
        english_name(language, name) for language, name in zip(languages, ("src_lang", "tgt_lang"), strict=True)
    )
    backend, route = choices.chat_model(exchange.fields["model"]), choices.routes.chat
    exchange.fields["model"] = backend.names[0]
    own = route.language
    own_name = target if own is None else english_name(own, "chat_language")

    async def translated(text: str, source: str, target: str) -> str:
        model, request = translator(choices, TranslateRequest([text], source, target))
        return (await model.translate(request)).texts[0]

    if own is not None and source != own_name:
        prompt = await translated(prompt, languages[0], own)
    answer = (await ask(backend, route.system_message.format(language=own_name), prompt)).text
    if own is not None and target != own_name:
        answer = await translated(answer, own, languages[1])
    return answer
