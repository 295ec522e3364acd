"""Prepares the texts of a translation request: languages, sentences and tokens. Joins the translated sentences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meltcore.common.errors import RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.serve.tasks.translation.forms import TranslateRequest
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.languages import LANGUAGES, Language
from meltcore.text.translation.document import Document, finish, prepare
from meltcore.text.translation.indic_scripts import Normalizer
from meltcore.text.translation.languages import find_direction, find_language, needed_direction
from meltcore.text.translation.tokenizer import (
    SentencePieceTokenizer,
    SyntheticTokenizer,
    TranslationTokenizer,
    check_tags,
)


@dataclass(frozen=True)
class TranslationText:
    """Has the tokenizer of a translation checkpoint, and the direction that the checkpoint's name states.

    `direction` is en-indic, indic-en or indic-indic. None means any direction.
    """

    tokenizer: TranslationTokenizer
    is_synthetic: bool
    direction: str | None

    @property
    def languages(self) -> tuple[list[str], list[str]]:
        """Two lists of FLORES codes: the languages that the checkpoint translates from, and those it translates to."""
        codes = [each.code for each in LANGUAGES if each.code in self.tokenizer.tags]
        indic = [code for code in codes if code != "eng_Latn"]
        source, _, target = (self.direction or "").partition("-")
        codes_by_side = {"en": ["eng_Latn"], "indic": indic}
        return codes_by_side.get(source, codes), codes_by_side.get(target, codes)

    def pair(self, request: TranslateRequest, model: str) -> tuple[Language, Language]:
        """Return the source and the target language of a request.

        Raises RequestError (400) if the checkpoint does not translate this pair.
        """
        source, target = find_language(request.src_lang, "src_lang"), find_language(request.tgt_lang, "tgt_lang")
        if source == target:
            raise RequestError(f"src_lang and tgt_lang are both {source.code}", param="tgt_lang")
        direction = needed_direction(source, target)
        if self.direction not in (direction, None):
            raise RequestError(
                f"{model} translates {self.direction}; {source.code} to {target.code} is {direction}",
                param="tgt_lang",
            )
        check_tags(self.tokenizer.tags, source, target)
        return source, target

    def prepare(
        self, texts: Sequence[str], source: Language, target: Language, limit: int, normalizer: Normalizer
    ) -> list[Document]:
        """Divide texts into sentences of at most `limit` tokens."""
        return [prepare(text, self.tokenizer, source, target, limit, normalizer) for text in texts]

    def finish(self, documents: Sequence[Document], outputs: Sequence[list[int]], target: Language) -> list[str]:
        """Return one translation per text.

        `outputs` has the token ids of the translated sentences of all `documents`.
        """
        remaining_outputs = iter(outputs)
        return [
            finish(document, list(itertools.islice(remaining_outputs, len(document.sentences))), self.tokenizer, target)
            for document in documents
        ]


def load_translation_text(config: ModelSection, checkpoint: Checkpoint) -> TranslationText:
    """Load the tokenizer. Raises ConfigError if files are missing or broken."""
    sizes = Fields(checkpoint.config).required("encoder_vocab_size", "decoder_vocab_size")
    is_synthetic = config.load_format == "dummy" and not checkpoint.has_sentencepiece
    tokenizer: TranslationTokenizer = (
        SyntheticTokenizer(sizes["encoder_vocab_size"])
        if is_synthetic
        else SentencePieceTokenizer(checkpoint.folder, sizes["encoder_vocab_size"], sizes["decoder_vocab_size"])
    )
    return TranslationText(tokenizer, is_synthetic, find_direction(config.model))
