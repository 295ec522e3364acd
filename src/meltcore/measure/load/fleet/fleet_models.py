"""Finds the models of a server by its address, and chooses what is sent to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.fleet_load import FleetTask
from meltcore.measure.load.config import RANDOM_HIGH_ID, IntRange
from meltcore.measure.load.wire.connection import HttpRequestError, Target, request
from meltcore.measure.load.wire.probe import PROBE_TIMEOUT_S
from meltcore.measure.load.wire.response import BadJsonError, decode_json

_TASK_WORDS = {"text": "generation"}  # of cards of other servers
_PREFERRED = ("kan_Knda", "hin_Deva")
# Of models on a CPU and of bundled ones, whose contexts are small. Words are those of one sentence.
_SMALL = {"generation": ("8-64", "16"), "translation": "3-8", "transcription": "2-4", "synthesis": "2-4"}
_WORDS = {"translation": "8-40", "synthesis": "8-16"}
_SMALL_CLIPS, _CLIPS = 16, 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of requests to models that are not small: tokens of generation, seconds of a clip."""

    input_len: IntRange
    output_len: IntRange
    clip_s: IntRange


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of /v1/models: a name, a task, and what else the server tells."""

    name: str
    task: FleetTask
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """Whether the model runs on a CPU, where long requests would take minutes."""
        return self.card.get("device") == "CPU"


async def find_models(target: Target, names: Sequence[str] = ()) -> list[ServedModel]:
    """Return the models of /v1/models, or the models named in `names`, in the server's order. Aliases are left out.

    Raises ConfigError where the server does not answer, lists no model, or lacks one of `names`.
    """
    try:
        response = await request(target, "GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
    except HttpRequestError as error:
        raise ConfigError(f"{target.url} does not answer: {error}") from error
    try:
        cards = decode_json(msgspec.json.Decoder(), response.body)["data"] if response.status == 200 else []
        ids = {str(card["id"]) for card in cards}
    except (BadJsonError, KeyError, TypeError) as error:
        raise ConfigError(f"/v1/models of {target.url} is no list of models: {response.body[:80]!r}") from error
    unknown = [name for name in names if name not in ids]
    if unknown:
        raise ConfigError(f"--models: {unknown[0]} is not served; {target.url} has {', '.join(sorted(ids)) or 'none'}")
    if not cards:
        raise ConfigError(f"/v1/models of {target.url} names no model (status {response.status})")
    if names:
        return [_served(card) for card in cards if card["id"] in names]
    return [_served(card) for card in cards if card.get("root", card["id"]) == card["id"] or card["root"] not in ids]


def _served(card: Mapping[str, Any]) -> ServedModel:
    word = str(card.get("task") or "generation")
    task = _TASK_WORDS.get(word, word)
    if task not in get_args(FleetTask):
        raise ConfigError(f"/v1/models: {card['id']} has the task {word!r}; known are {', '.join(get_args(FleetTask))}")
    return ServedModel(name=str(card["id"]), task=cast(FleetTask, task), card=card)


def default_workload(model: ServedModel, sizes: Sizes) -> str:
    """Return the workload for a model as `meltcore load --workload` takes it: short for a small model."""
    if model.task == "generation":
        return _generation(model, sizes)
    if model.task == "translation":
        source, target = _pair(model.card)
        words = _SMALL["translation"] if model.is_small else _WORDS["translation"]
        return f"translate:src={source},tgt={target},words={words}"
    languages = [str(each) for each in model.card.get("languages") or []]
    if model.task == "transcription":
        language = "kn" if "kn" in languages or not languages else languages[0]
        seconds, clips = (_SMALL["transcription"], _SMALL_CLIPS) if model.is_small else (_text(sizes.clip_s), _CLIPS)
        return f"transcribe:language={language},seconds={seconds},clips={clips}"
    if model.is_small:
        return f"speak:words={_SMALL['synthesis']}"
    spoken = "language=kan_Knda," if "kn" in languages else ""
    return f"speak:{spoken}words={_WORDS['synthesis']}"


def _generation(model: ServedModel, sizes: Sizes) -> str:
    """Return random prompts, or problems for a small model with real weights: they are short, and graded."""
    context, vocab = model.card.get("max_model_len"), model.card.get("vocab_size") or RANDOM_HIGH_ID
    if model.is_small and model.card.get("weights") != "dummy":
        return "problems:short"
    inputs, outputs = _SMALL["generation"] if model.is_small else (_text(sizes.input_len), _text(sizes.output_len))
    needed = 0 if model.is_small else sizes.input_len.high + sizes.output_len.high
    if context and context < needed:
        raise ConfigError(
            f"{model.name} has a context of {context} tokens, and a request has up to {needed}; set --input-len and "
            f"--output-len"
        )
    return f"random:in={inputs},out={outputs}" + (f",vocab={vocab}" if vocab < RANDOM_HIGH_ID else "")


def _pair(card: Mapping[str, Any]) -> tuple[str, str]:
    """Return a direction of translation: from English where the model knows it, else into English, else neither."""
    sources, targets = (list(card.get(key) or []) for key in ("source_languages", "target_languages"))
    if not sources or not targets:
        return "eng_Latn", _PREFERRED[0]
    source = next((each for each in ("eng_Latn", *_PREFERRED) if each in sources), sources[0])
    others = [each for each in targets if each != source]
    wanted = _PREFERRED if source == "eng_Latn" else ("eng_Latn", *_PREFERRED)
    return source, next((each for each in wanted if each in others), others[0])


def _text(bounds: IntRange) -> str:
    return str(bounds.low) if bounds.low == bounds.high else f"{bounds.low}-{bounds.high}"
