"""Translates sentences for the batch engine. Sentences and translations are lists of token ids.

A step computes one token per beam of every running sentence. Sentences begin and end at any step, each in a slot of
the beam search, so that none waits for a batch to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from meltcore.common.errors import RequestError
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.host.device import byte_budget, has_budget
from meltcore.engine.tasks.batch_engine import BatchEngine, BatchTask
from meltcore.engine.tasks.device_task import DeviceTask
from meltcore.engine.translation.beam_search import BeamSearch
from meltcore.engine.translation.beam_state import BeamOptions
from meltcore.engine.translation.memory import (
    BUDGET_ENCODER_TOKENS,
    MAX_SLOTS,
    plan_slots,
    translation_graph_bytes,
    translation_workspace,
)
from meltcore.engine.translation.translation import load_translation_model
from meltcore.protocol.shell import MemoryRow
from meltcore.protocol.translation import Translate, Translated, TranslationOutputs, TranslationReady
from meltcore.settings.config import EngineConfig


class TranslationTask(DeviceTask, BatchTask[Translate, Translated]):
    """Translates sentences with an IndicTrans2 checkpoint on one device."""

    result, message = Translated, TranslationOutputs

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda _stage, _part: None
    ) -> None:
        """Load the model, and allocate as many slots as fit into the memory.

        Raises ConfigError if the checkpoint or a setting cannot work, or if memory is not enough for one slot.
        """
        super().__init__(config)
        checkpoint = self._open_checkpoint(config)
        self._has_tokenizer = checkpoint.has_sentencepiece
        self.model = self._keep_model(
            partial(
                load_translation_model,
                checkpoint,
                self._dtype,
                self._device,
                dummy_seed=config.seed if self._is_dummy else None,
            ),
            progress,
        )
        sizes = self.model.config
        self.max_source, max_new_tokens = sizes.sentence_limits(config.max_model_len)
        self.options = BeamOptions(max_new_tokens=max_new_tokens, has_synthetic_lengths=self._is_dummy)
        weight_bytes = sum(weight.nbytes for weight in self.model.parameters())
        slot_bytes = BeamSearch.slot_bytes(self.model, self.options, self.max_source)
        is_exact, memory_bytes = has_budget(config, self._device), byte_budget(config, self._device, weight_bytes)
        workspace = partial(translation_workspace, sizes, self.model.dtype.itemsize, num_beams=self.options.num_beams)
        self.slots = plan_slots(
            weight_bytes, slot_bytes, memory_bytes, MAX_SLOTS[self._device.type], workspace if is_exact else None
        )
        self.memory = [
            MemoryRow("weights", weight_bytes),
            MemoryRow(
                "slots",
                (self.slots + 1) * slot_bytes,
                f"of {self.slots} sentences and a spare: {self.max_source} tokens, {self.options.num_beams} beams of "
                f"{self.options.max_new_tokens}",
            ),
            *self._sleep_rows(),
        ]
        self.outside_bytes = translation_graph_bytes(sizes, self.slots) if is_exact else 0
        if is_exact:
            self.memory.append(MemoryRow("workspace", workspace(self.slots), "of the encoder, graphs and libraries"))
        with self._building():
            self._search = BeamSearch(
                self.model,
                self.options,
                slots=self.slots,
                max_source=self.max_source,
                encoder_tokens=BUDGET_ENCODER_TOKENS if is_exact else None,
            )
            self._search.capture(progress)
        self._caches = [self._search.state.self_kv, self._search.state.cross_kv]
        # A sentence holds its slot for as long as it runs, whatever its length: all cost the same.
        positions = self.max_source + self.options.num_beams * self.options.max_new_tokens
        self._slot_cost = next(bucket for bucket in cost_buckets(2 * positions) if bucket >= positions)
        self.max_cost = self.slots * self._slot_cost
        self._load_s = time.monotonic() - self._start_s

    def cost(self, request: Translate) -> int:
        """Return the number of positions of a slot. Raises RequestError if the source cannot be translated."""
        length, vocab_size = len(request.token_ids), self.model.config.encoder.vocab_size
        if not 1 <= length <= self.max_source:
            raise RequestError(f"a sentence has {length} tokens; it must have 1 to {self.max_source}")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
            raise RequestError(f"a sentence has token ids outside the model's, 0 to {vocab_size - 1}")
        return self._slot_cost

    def start(self, requests: Sequence[Translate], padded_cost: int) -> None:  # noqa: ARG002 - all slots have one shape
        """Encode sentences and begin to decode them."""
        self._search.add([request.request_id for request in requests], [request.token_ids for request in requests])

    def step(self) -> list[Translated]:
        """Compute one token per beam of all sentences. Returns the translations that are complete."""
        return [
            Translated(request_id=str(key), finish_reason="stop", token_ids=tuple(token_ids), score=score)
            for key, token_ids, score in self._search.step()
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Free the slots of sentences."""
        self._search.cancel(request_ids)

    def ready(self) -> TranslationReady:
        """Return the limits of requests."""
        return TranslationReady(
            **self._ready_fields(),
            slots=self.slots,
            max_source=self.max_source,
            vocab_size=self.model.config.encoder.vocab_size,
            num_beams=self.options.num_beams,
            max_new_tokens=self.options.max_new_tokens,
            tokens="real" if self._has_tokenizer else "synthetic",
        )


def translation_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> BatchEngine[Translate, Translated]:
    """Load a translation checkpoint and return its engine. Raises ConfigError if the checkpoint cannot be loaded."""
    return BatchEngine(TranslationTask(config, progress))
