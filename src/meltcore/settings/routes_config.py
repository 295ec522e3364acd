"""Defines which models answer requests that name a language and no model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from meltcore.common.errors import ConfigError
from meltcore.common.options import braces_fault
from meltcore.common.tasks import tasks

PROMPT_FIELDS = {"translate_prompt": ("source", "target"), "chat_prompt": ("language",)}  # in braces


def language_models(languages: object) -> Iterator[tuple[str, str, str]]:
    """Yield the task, the key and the name of every model that answers for a language or a direction.

    languages: has a mapping from languages or a list of rules by the name of each task that chooses so.
    """
    for task in tasks():
        entries = getattr(languages, task, ())
        if isinstance(entries, dict):
            yield from ((task, f"{task}.{language}", name) for language, name in entries.items())
        else:
            yield from ((task, f"{task}[{index}].model", rule.model) for index, rule in enumerate(entries))


@dataclass(frozen=True)
class TranslationRoute:
    """Names the model for a direction of translation, by language codes or names. "*" is every language."""

    source: str
    target: str
    model: str


@dataclass(frozen=True, kw_only=True)
class RoutesConfig:
    """Holds the choice of models for requests that name a language and no model.

    Languages are FLORES codes, English names or ISO 639 codes. Without an entry, and for "*" without one, the first
    model of the task that has the language answers.
    """

    order: tuple[str, ...] = ()  # first names of models, as fleet.yaml has them; others follow in the order of adding

    translation: tuple[TranslationRoute, ...] = ()  # the first that matches decides
    transcription: dict[str, str] = field(default_factory=dict)  # language to model; "*" is every other language
    synthesis: dict[str, str] = field(default_factory=dict)
    # Languages that models may not know: what they get instead, the first of these that the model knows.
    substitute: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # "llm": a language model translates what no rule matches: translate_model, or the first.
    translate_backend: Literal["indictrans2", "llm"] = "indictrans2"
    translate_model: str | None = None
    translate_prompt: str = (  # the system message
        "You are a translation model. Translate the following text from {source} to {target}. "
        "Answer with the translation alone."
    )
    translate_stop: tuple[str, ...] = ()  # strings that end a language model's translation
    chat_model: str | None = None  # of chat routes whose requests name none; None: the first language model
    chat_prompt: str = (  # the system message of /v1/indic_chat and /v1/speech_to_speech; "": none
        "You are a helpful assistant. Answer in one short sentence, without explanations. "
        "Write the answer in {language} only."
    )
    # The language in which these routes ask a language model: prompts are translated into it, and answers from it.
    # None: it is asked in the request's languages.
    chat_language: str | None = None

    def __post_init__(self) -> None:
        for name, fields_of_prompt in PROMPT_FIELDS.items():
            if fault := braces_fault(getattr(self, name), fields_of_prompt):
                raise ConfigError(f"routes.{name}: {fault}")

    def named_models(self) -> Iterator[tuple[str, str]]:
        """Yield every name of a model with the key that has it."""
        yield from ((key, name) for _, key, name in language_models(self))
        for key in ("translate_model", "chat_model"):
            if (name := getattr(self, key)) is not None:
                yield key, name
