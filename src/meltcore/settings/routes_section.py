"""Defines which models answer requests that name a language or no model, in two sections of fleet.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from meltcore.common.tasks import tasks
from meltcore.settings.field_types import ANY_LANGUAGE, FleetSection, Language, LanguageCode, Name, Text

# What the prompts of routes may name in braces.
PROMPT_FIELDS = {"translate": ("source", "target"), "chat": ("language",)}


def language_models(languages: LanguagesSection) -> Iterator[tuple[str, str, str]]:
    """Yield the task, the key and the name of every model that answers for a language or a direction."""
    for task in tasks():
        entries = getattr(languages, task, ())
        if isinstance(entries, dict):
            yield from ((task, f"{task}.{language}", name) for language, name in entries.items())
        else:
            yield from ((task, f"{task}[{index}].model", rule.model) for index, rule in enumerate(entries))


class TranslationRule(FleetSection, frozen=True, kw_only=True):
    """Names the model for a direction of translation. The first rule that matches a request decides."""

    source: Annotated[Language, Meta(description='FLORES code of the text, such as eng_Latn, or "*".')]
    target: Annotated[Language, Meta(description='FLORES code of the translation, or "*".')]
    model: Annotated[Name, Meta(description="Name or alias of a translation model.")]

    def matches(self, source: str, target: str) -> bool:
        """Return whether the rule applies to a translation from `source` to `target`."""
        return self.source in (source, ANY_LANGUAGE) and self.target in (target, ANY_LANGUAGE)


class LanguagesSection(FleetSection, frozen=True, kw_only=True):
    """The models that serve each language, for requests that name a language and no model."""

    translation: Annotated[
        tuple[TranslationRule, ...], Meta(description="Directions; the first rule that matches decides.")
    ] = ()
    transcription: Annotated[
        dict[Language, Name], Meta(description='Language of speech to model; "*" is every other language.')
    ] = msgspec.field(default_factory=dict)
    synthesis: Annotated[
        dict[Language, Name], Meta(description='Language of text to model; "*" is every other language.')
    ] = msgspec.field(default_factory=dict)
    substitute: Annotated[
        dict[LanguageCode, LanguageCode | Annotated[tuple[LanguageCode, ...], Meta(min_length=1)]],
        Meta(description="Languages that a model may not know: the one, or the first of a list, that it gets instead."),
    ] = msgspec.field(default_factory=dict)

    @property
    def substitute_lists(self) -> dict[str, tuple[str, ...]]:
        """The substitutes of each language, in the order of `substitute`. A single substitute is a tuple of one."""
        return {name: (each,) if isinstance(each, str) else each for name, each in self.substitute.items()}


class TranslateRoute(FleetSection, frozen=True, kw_only=True):
    """The model that answers `/v1/translate`."""

    backend: Annotated[
        Literal["indictrans2", "llm"],
        Meta(description="indictrans2: the models of `languages.translation`; llm: a language model by prompt."),
    ] = "indictrans2"
    model: Annotated[Name | None, Meta(description="The language model, where backend is llm.")] = None
    prompt: Annotated[
        Text | None, Meta(description="Its system message, with {source} and {target} (default: asks to translate).")
    ] = None
    stop: Annotated[tuple[Text, ...], Meta(description="Texts that end its translation.")] = ()

    @property
    def system_message(self) -> str:
        """The system message: `prompt`, or a default message that asks for a translation."""
        return self.prompt or (
            "You are a translation model. Translate the following text from {source} to {target}. "
            "Answer with the translation alone."
        )


class ChatRoute(FleetSection, frozen=True, kw_only=True):
    """The model that answers the chat routes whose requests name no model."""

    model: Annotated[Name | None, Meta(description="A generation model (default: the first of the file).")] = None
    prompt: Annotated[
        str | None,
        Meta(description='System message, with {language}; "": none (default: asks for one short sentence).'),
    ] = None
    language: Annotated[
        LanguageCode | None,
        Meta(description="Language in which the model is asked: prompts are translated into it, answers from it."),
    ] = None

    @property
    def system_message(self) -> str:
        """The system message: `prompt`, or a default message that asks for one short sentence."""
        if self.prompt is not None:
            return self.prompt
        return (
            "You are a helpful assistant. Answer in one short sentence, without explanations. "
            "Write the answer in {language} only."
        )


class RoutesSection(FleetSection, frozen=True, kw_only=True):
    """The models of routes whose requests do not name a model."""

    translate: Annotated[TranslateRoute, Meta(description="`/v1/translate` and `/translate`.")] = TranslateRoute()
    chat: Annotated[ChatRoute, Meta(description="`/v1/indic_chat`, `/v1/chat_direct` and `/v1/speech_to_speech`.")] = (
        ChatRoute()
    )
