"""Prepares a text for a translation model, and joins the model's outputs to the translation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.text.languages import Language
from meltcore.text.translation.indic_processor import postprocess, preprocess
from meltcore.text.translation.indic_scripts import Normalizer
from meltcore.text.translation.languages import check_script
from meltcore.text.translation.sentences import join_sentences, split_sentences
from meltcore.text.translation.tokenizer import TranslationTokenizer

_SHOWN_CHARS = 60


class Sentence(NamedTuple):
    """A sentence in the form that a model reads, and the texts for which its placeholders stand."""

    token_ids: list[int]
    placeholders: dict[str, str]


class Document(NamedTuple):
    """The sentences of a text, and the strings before, between and after them."""

    sentences: list[Sentence]
    separators: list[str]


def prepare(
    text: str,
    tokenizer: TranslationTokenizer,
    source: Language,
    target: Language,
    limit: int,
    normalizer: Normalizer = "itt",
) -> Document:
    """Split a text into sentences and prepare each sentence for the model. Empty text has no sentences.

    The model reads at most `limit` tokens of a sentence; `preprocess` explains `normalizer`. Raises RequestError if the
    text is in another script than the language's, or if a sentence is too long.
    """
    if is_visible(text):  # fillers belong to a script too
        check_script(text, source, "src_lang")
    texts, separators = split_sentences(text, source)
    sentences = []
    for sentence in texts:
        prepared = preprocess(sentence, source, normalizer=normalizer)
        token_ids = tokenizer.encode(prepared.text, source, target)
        if len(token_ids) > limit:
            raise RequestError(
                f"a sentence has {len(token_ids)} tokens, of at most {limit}; split it: {sentence[:_SHOWN_CHARS]!r}..."
            )
        sentences.append(Sentence(token_ids, prepared.placeholders))
    return Document(sentences, separators)


def finish(document: Document, outputs: Iterable[list[int]], tokenizer: TranslationTokenizer, target: Language) -> str:
    """Return the translation of a text. `outputs` are the token ids of each translated sentence, in order."""
    translations = [
        postprocess(tokenizer.decode(output), target, sentence.placeholders)
        for output, sentence in zip(outputs, document.sentences, strict=True)
    ]
    return join_sentences(translations, document.separators)
