"""Chooses the model of a request by its task and its language."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol, TypeGuard, TypeVar

from meltcore.common.errors import RequestError
from meltcore.serve.requests.backend import LANGUAGE_PATHS, Backend, ModelTable
from meltcore.settings.field_types import ANY_LANGUAGE
from meltcore.settings.routes_section import LanguagesSection, RoutesSection
from meltcore.text.languages import code_among


class SpokenBackend(Protocol):
    """Describes a backend whose model transcribes or speaks certain languages."""

    names: tuple[str, ...]

    @property
    def languages(self) -> Sequence[str]:
        """The model's languages by code. The mapping is empty before the model is loaded."""

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""


_Backend = TypeVar("_Backend", bound=SpokenBackend)
_Language = TypeVar("_Language", str, str | None)


class ModelChoice:
    """Chooses the model for a request.

    The choice is the model that the request names. Without a name it is the configured model of the request's language,
    or else the first model that knows the language.
    """

    def __init__(self, models: ModelTable) -> None:
        self._models = models

    @property
    def languages(self) -> LanguagesSection:
        """The section of fleet.yaml that names models of languages. It may change while the server runs."""
        return self._models.languages

    @property
    def routes(self) -> RoutesSection:
        """The section of fleet.yaml that names models of routes. It may change while the server runs."""
        return self._models.routes

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends of all models of the server."""
        return self._models.backends

    def by_language(
        self,
        has_task: Callable[[object], TypeGuard[_Backend]],
        purpose: str,
        models: Mapping[str, str],
        language: str | None,
        model: str | None,
    ) -> tuple[_Backend, str | None]:
        """Return a model for the request's language, and the name of the language for this model.

        If no model knows the language or a substitute of it, the returned language is None. The model then refuses the
        request with an error that lists its languages. Raises RequestError (400, 404, 503).

        Args:
            has_task: returns whether a backend belongs to the task.
            purpose: what models of the task do, for the error if there is no such model.
            models: the configured model of each language.
            language: the language of the request.
            model: the model that the request names.
        """
        backends_in_order = []
        for meaning in self.meanings(language):
            candidates = self.candidates(model or _configured(models, meaning))
            found = [backend for backend in candidates if has_task(backend)]
            backend = _of_language(found, meaning) or refuse(candidates, purpose)
            if _knows(backend, meaning):
                return backend, meaning
            backends_in_order.append(backend)
        return backends_in_order[0], None

    def chat_model(self, model: str | None = None) -> Backend:
        """Return a language model, if possible one that accepts chats. Raises RequestError (400, 404, 503).

        A model without a chat template refuses the chat with an error that says how to configure a template.
        """
        candidates = self.candidates(model or self.routes.chat.model)
        for backend in sorted(candidates, key=lambda backend: not backend.chats):
            if LANGUAGE_PATHS[0] in backend.paths:
                backend.check_ready()
                return backend
        return refuse(candidates, "chat; serve a language model")

    def candidates(self, model: str | None) -> list[Backend]:
        """Return the backend that a request names, or all backends if it names none. Raises RequestError (404, 503)."""
        return self._models.backends if model is None else [self._models.find(model)]

    def meanings(self, language: _Language) -> Sequence[_Language]:
        """Return a language, followed by its substitutes, which models that do not know the language get instead."""
        return [language, *self._substitutes(language)]

    def _substitutes(self, language: str | None) -> Sequence[str]:
        substitute = self.languages.substitute_lists
        name = None if language is None else code_among(language, list(substitute))
        return () if name is None else substitute[name]


def _configured(models: Mapping[str, str], language: str | None) -> str | None:
    """Return the name of the model that is configured for a language in any spelling, or for all other languages."""
    name = None if language is None else code_among(language, list(models))
    return models.get(ANY_LANGUAGE if name is None else name)


def _of_language(found: Sequence[_Backend], language: str | None) -> _Backend | None:
    """Return the first backend that knows a language. If none does, return the first backend.

    Returns None if there are no backends. Raises RequestError (503) if the backend cannot serve now.
    """
    for backend in found:
        if _knows(backend, language):
            backend.check_ready()
            return backend
    if found:
        found[0].check_ready()
    return found[0] if found else None


def _knows(backend: SpokenBackend, language: str | None) -> bool:
    return language is not None and code_among(language, backend.languages) is not None


def refuse(candidates: Sequence[Backend], task: str) -> NoReturn:
    """Raise RequestError (400), because none of the candidates can do what the request asks for."""
    if len(candidates) == 1:
        [backend] = candidates
        routes = ", ".join(backend.paths)
        raise RequestError(f"{backend.names[0]} cannot {task} here; it serves {routes}", param="model")
    names = " and ".join(backend.names[0] for backend in candidates)
    raise RequestError(f"{names} cannot {task}", param="model")
