"""Chooses the model of a translation by its languages."""

from __future__ import annotations

from itertools import product
from typing import TypeGuard

import msgspec

from meltcore.serve.requests.backend import Backend
from meltcore.serve.tasks.model_choice import ModelChoice, refuse
from meltcore.serve.tasks.translation.forms import TranslateRequest, TranslationBackend
from meltcore.serve.tasks.translation.llm_translation import LLMTranslator
from meltcore.settings.field_types import ANY_LANGUAGE
from meltcore.text.languages import code_among


def translator(choices: ModelChoice, request: TranslateRequest) -> tuple[TranslationBackend, TranslateRequest]:
    """Return a model that translates, and the request with the names of the languages for this model.

    Raises RequestError (400, 404, 503).
    """
    first_backend = _translator(choices, request)
    if code_among(request.src_lang, [request.tgt_lang]) is not None:
        return first_backend, request  # no substitute makes two languages out of one
    for source, target in product(choices.meanings(request.src_lang), choices.meanings(request.tgt_lang)):
        substituted_request = msgspec.structs.replace(request, src_lang=source, tgt_lang=target)
        backend = _translator(choices, substituted_request)
        if backend.has_pair(substituted_request):
            return backend, substituted_request
    return first_backend, request  # whose error says what it translates


def can_translate(choices: ModelChoice) -> bool:
    """Return whether any model of the server can answer POST /v1/translate."""
    backends = choices.backends
    is_llm = choices.routes.translate.backend == "llm" and any(backend.chats for backend in backends)
    return is_llm or any(map(_translates, backends))


def _translator(choices: ModelChoice, request: TranslateRequest) -> TranslationBackend:
    name, route = request.model, choices.routes.translate
    for rule in choices.languages.translation:
        if name is None and _matches(rule.source, request.src_lang) and _matches(rule.target, request.tgt_lang):
            name = rule.model
    if name is None and route.backend == "llm":
        return _llm_translator(choices, route.model)
    candidates = choices.candidates(name)
    found = [backend for backend in candidates if _translates(backend)]
    if found:  # without the pair, the first one's error says what it translates
        return next((backend for backend in found if backend.has_pair(request)), found[0])
    if name is not None and (request.model is None or route.backend == "llm"):
        return _llm_translator(choices, name)
    return refuse(candidates, "translate; serve an IndicTrans2 checkpoint")


def _llm_translator(choices: ModelChoice, model: str | None) -> LLMTranslator:
    route = choices.routes.translate
    return LLMTranslator(choices.chat_model(model), route.system_message, route.stop)


def _matches(configured: str, language: str) -> bool:
    return configured == ANY_LANGUAGE or code_among(language, [configured]) is not None


def _translates(backend: Backend) -> TypeGuard[TranslationBackend]:
    return isinstance(backend, TranslationBackend) and backend.translates
