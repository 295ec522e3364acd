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

    `fields["model"]` of the exchange names the model; None is the default model of the chat routes. If fleet.yaml names
    a language for prompts of this model, the prompt and the answer are translated. Raises RequestError (400, 404, 429,
    500, 503, 504).
    """
    source, target = (
        english_name(language, name) for language, name in zip(languages, ("src_lang", "tgt_lang"), strict=True)
    )
    backend, route = choices.chat_model(exchange.fields["model"]), choices.routes.chat
    exchange.fields["model"] = backend.names[0]
    prompt_language = route.language
    prompt_language_name = target if prompt_language is None else english_name(prompt_language, "chat_language")

    async def translated(text: str, source: str, target: str) -> str:
        model, request = translator(choices, TranslateRequest([text], source, target))
        return (await model.translate(request)).texts[0]

    if prompt_language is not None and source != prompt_language_name:
        prompt = await translated(prompt, languages[0], prompt_language)
    answer = (await ask(backend, route.system_message.format(language=prompt_language_name), prompt)).text
    if prompt_language is not None and target != prompt_language_name:
        answer = await translated(answer, prompt_language, languages[1])
    return answer
