"""Provides the offline API of translation: checkpoints in this process, for scripts and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from meltcore.common.errors import ConfigError, RequestError
from meltcore.common.sizes import size_text
from meltcore.common.tasks import task_of_part
from meltcore.engine.host.device import byte_budget, choose_device
from meltcore.engine.translation import engine
from meltcore.engine.translation.beam_search import BeamSearch
from meltcore.engine.translation.beam_state import BeamOptions
from meltcore.engine.translation.translation import (
    load_translation_model,
    translate_all,
)
from meltcore.models.checkpoints.checkpoint import open_task_checkpoint
from meltcore.models.loader import task_dtype
from meltcore.models.tasks.indictrans2 import IndicTrans2
from meltcore.settings.config import DType, EngineConfig, LoadFormat
from meltcore.text.languages import Language
from meltcore.text.translation.document import finish, prepare
from meltcore.text.translation.indic_scripts import Normalizer
from meltcore.text.translation.languages import find_direction, find_language, needed_direction
from meltcore.text.translation.tokenizer import SentencePieceTokenizer, SyntheticTokenizer, TranslationTokenizer

# Of the memory beside the weights: the rest is for activations and for what torch keeps
_CACHE_FRACTION = 0.8
_GPU_SLOTS, _CPU_SLOTS = 512, 32


class _LoadedModel:
    """One checkpoint: its model and tokenizer. `direction` is None if its name states no direction."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Load the checkpoint.

        Raises ConfigError if the checkpoint or a setting cannot work, or if the memory is too small.
        """
        self.name, self.direction = config.model, find_direction(config.model)
        is_dummy = config.load_format == "dummy"
        checkpoint = open_task_checkpoint(config.model, task_of_part(engine.__name__), is_dummy=is_dummy)
        dtype = task_dtype(config.dtype, device, on_gpu=torch.float16)
        self.model: IndicTrans2 = load_translation_model(
            checkpoint, dtype, device, dummy_seed=config.seed if is_dummy else None
        )
        sizes = self.model.config.encoder.vocab_size, self.model.config.decoder.vocab_size
        has_tokenizer = not is_dummy or checkpoint.has_sentencepiece
        self.tokenizer: TranslationTokenizer = (
            SentencePieceTokenizer(checkpoint.folder, *sizes) if has_tokenizer else SyntheticTokenizer(sizes[0])
        )


class Translator:
    """Translates texts offline: `Translator("ai4bharat/indictrans2-en-indic-1B").translate("Hello.", "en", "hi")`."""

    def __init__(
        self,
        models: str | Sequence[str],
        *,
        device: str = "auto",
        dtype: DType = "auto",
        load_format: LoadFormat = "auto",
        memory_bytes: int | None = None,
        seed: int = 0,
        normalizer: Normalizer = "itt",
    ) -> None:
        """Load one checkpoint of IndicTrans2, or several of different directions, from local folders or hub ids.

        The direction is read from the name: en-indic, indic-en or indic-indic. `memory_bytes` is the limit for all
        checkpoints and their caches together. The normalizer "itt" prepares texts as IndicTransToolkit does. "original"
        does the same without two faults of IndicTransToolkit. The other parameters are fields of EngineConfig. The
        default dtype is float16 on a GPU and float32 on a CPU. Raises ConfigError for a setting that cannot work.
        """
        names = [models] if isinstance(models, str) else list(models)
        directions = [find_direction(name) for name in names]
        if not names or (len(names) > 1 and (None in directions or len(set(directions)) < len(names))):
            raise ConfigError(
                "Translator needs one checkpoint, or several with different directions in their names (en-indic, "
                f"indic-en, indic-indic); got {', '.join(names) or 'none'}"
            )
        self._device = choose_device(device)
        configs = [
            EngineConfig(
                model=name, device=device, dtype=dtype, load_format=load_format, memory_bytes=memory_bytes, seed=seed
            )
            for name in names
        ]
        self._config = configs[0]
        if normalizer not in get_args(Normalizer):
            raise ConfigError(f"normalizer must be {' or '.join(get_args(Normalizer))}; got {normalizer!r}")
        self._normalizer: Normalizer = normalizer
        self._loaded = [_LoadedModel(config, self._device) for config in configs]

    def translate(
        self,
        texts: str | Sequence[str],
        src_lang: str,
        tgt_lang: str,
        *,
        pivot: bool = False,
        num_beams: int = 5,
        max_new_tokens: int = 256,
        min_new_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> str | list[str]:
        """Return one translation per text, in order. A single text returns a single string.

        The sentences of all texts are translated in one batch. Line breaks stay where they were, and empty text has an
        empty translation. `src_lang` and `tgt_lang` are FLORES codes, English names or ISO 639 codes. With `pivot`, a
        direction without a checkpoint is translated through English. The other parameters are fields of BeamOptions.

        Raises RequestError for unknown or equal languages, a direction that is not loaded, a text in another script and
        a sentence that is too long. Raises ConfigError for an option outside its range.
        """
        is_dummy = self._config.load_format == "dummy"
        options = BeamOptions(num_beams, max_new_tokens, min_new_tokens, length_penalty, early_stopping, is_dummy)
        source, target = find_language(src_lang, "src_lang"), find_language(tgt_lang, "tgt_lang")
        if source == target:
            raise RequestError(f"src_lang and tgt_lang are both {source.code}", param="tgt_lang")
        results = [texts] if isinstance(texts, str) else list(texts)
        for text in results:
            if not isinstance(text, str):
                raise RequestError(f"a text must be a string; got {type(text).__name__}", param="texts")
        for loaded, from_language, to_language in self._route(source, target, pivot):
            results = self._translate(loaded, results, from_language, to_language, options)
        return results[0] if isinstance(texts, str) else results

    def _route(self, source: Language, target: Language, pivot: bool) -> list[tuple[_LoadedModel, Language, Language]]:
        """Return the checkpoints that translate from `source` to `target` in turn, each with its two languages."""
        direct = self._find_model(source, target)
        if direct is not None:
            return [(direct, source, target)]
        english = find_language("eng_Latn", "src_lang")
        first, second = self._find_model(source, english), self._find_model(english, target)
        names = ", ".join(each.name for each in self._loaded)
        problem = f"no loaded checkpoint translates {source.code} to {target.code} (loaded: {names})"
        if english in (source, target) or first is None or second is None:
            raise RequestError(problem, param="tgt_lang")
        if not pivot:
            raise RequestError(f"{problem}; pivot=True translates through English", param="pivot")
        return [(first, source, english), (second, english, target)]

    def _find_model(self, source: Language, target: Language) -> _LoadedModel | None:
        direction = needed_direction(source, target)
        return next((each for each in self._loaded if each.direction in (direction, None)), None)

    def _translate(
        self, loaded: _LoadedModel, texts: list[str], source: Language, target: Language, options: BeamOptions
    ) -> list[str]:
        limit = loaded.model.config.max_source_positions
        documents = [prepare(text, loaded.tokenizer, source, target, limit, self._normalizer) for text in texts]
        sources = [sentence.token_ids for document in documents for sentence in document.sentences]
        slots = self._num_slots(loaded.model, options, max(map(len, sources), default=1))
        outputs = iter(translate_all(loaded.model, sources, options, slots=slots))
        return [
            finish(document, [next(outputs) for _ in document.sentences], loaded.tokenizer, target)
            for document in documents
        ]

    def _num_slots(self, model: IndicTrans2, options: BeamOptions, longest: int) -> int:
        """Return the number of sentences that are decoded together.

        Raises ConfigError if memory is too small for one sentence.
        """
        weight_bytes = sum(weight.nbytes for each in self._loaded for weight in each.model.parameters())
        budget = byte_budget(self._config, self._device, weight_bytes)
        free_bytes = int((budget - weight_bytes) * _CACHE_FRACTION)
        slot_bytes = BeamSearch.slot_bytes(model, options, longest)
        if free_bytes < 2 * slot_bytes:
            raise ConfigError(
                f"a sentence of {longest} tokens takes {size_text(slot_bytes)} for {options.num_beams} beams of "
                f"{options.max_new_tokens} tokens, and a spare slot as much; "
                f"{size_text(max(free_bytes, 0))} are left beside the weights"
            )
        return min(free_bytes // slot_bytes - 1, _GPU_SLOTS if self._device.type == "cuda" else _CPU_SLOTS)
