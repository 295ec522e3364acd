"""IndicTrans2 computes what transformers' M2M100 computes, and its beam search finds what `generate` finds."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulated_graphs import EmulatedCapturer
from m2m100_tools import DISTILLED, SMALL, load_model, random_sources, reference_model, write_checkpoint
from safetensors.torch import load_file, save_file

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.translation import beam_state
from meltcore.engine.translation.beam_search import BeamSearch, Translation
from meltcore.engine.translation.beam_state import BeamOptions, BeamState
from meltcore.models.tasks import indictrans2
from meltcore.models.tasks.indictrans2 import DecodeStep, IndicTrans2

pytestmark = pytest.mark.usefixtures("one_thread")
NEW_TOKENS = 12


class Pair(NamedTuple):
    """A random model, and transformers' model with the same weights."""

    model: IndicTrans2
    reference: Any
    folder: Path


@pytest.fixture(scope="module", params=[SMALL, DISTILLED], ids=["1b", "distilled"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    reference = reference_model(request.param, seed=11)
    write_checkpoint(folder, request.param, reference)
    return Pair(load_model(folder), reference, folder)


def padded_left(sources: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, sources))
    token_ids = torch.tensor([[1] * (longest - len(source)) + source for source in sources])
    return token_ids, (token_ids != 1).long()


def forced_logits(model: IndicTrans2, sources: list[list[int]], prefix: list[int]) -> torch.Tensor:
    """The logits after each token of `prefix`: [sources, tokens, vocab]."""
    rows, longest = len(sources), max(map(len, sources))
    lengths = torch.tensor([len(source) for source in sources])
    token_ids = torch.tensor([source + [5] * (longest - len(source)) for source in sources])
    encoded = model.encode(token_ids, lengths)
    cross_kv = torch.stack([*model.cross_keys_values(encoded)]).contiguous()
    decoder, size = model.config.decoder, model.config.hidden_size
    self_kv = torch.zeros(decoder.num_layers, 2, rows, decoder.num_heads, len(prefix), 1, size // decoder.num_heads)
    logits = []
    for position, token in enumerate(prefix):
        step = DecodeStep(
            token_ids=torch.full((rows, 1), token),
            slots=torch.arange(rows),
            positions=torch.full((rows,), position),
            num_positions=position + 1,
            writers=torch.zeros(rows, 1, len(prefix), dtype=torch.int8),
            source_lengths=lengths,
            max_source=longest,
        )
        logits.append(model.decode(step, self_kv, cross_kv)[:, 0])
    return torch.stack(logits, dim=1)


def search(
    model: IndicTrans2, sources: list[list[int]], options: BeamOptions, slots: int | None = None
) -> dict[Any, Translation]:
    state = BeamSearch(model, options, slots=slots or len(sources), max_source=max(map(len, sources)))
    found: dict[Any, Translation] = {}
    waiting = list(enumerate(sources))
    while waiting or state.num_running:
        count = min(state.num_free, len(waiting))
        if count:
            state.add([key for key, _ in waiting[:count]], [source for _, source in waiting[:count]])
            waiting = waiting[count:]
        found |= {each.key: each for each in state.step()}
    return found


@cache
def generated(
    reference: Any, sources: tuple[tuple[int, ...], ...], options: BeamOptions
) -> list[tuple[list[int], float | None]]:
    """What transformers generates: tokens without the end token, and the score of a beam search."""
    token_ids, mask = padded_left([list(source) for source in sources])
    output = reference.generate(
        token_ids, attention_mask=mask, num_beams=options.num_beams, max_new_tokens=options.max_new_tokens,
        min_new_tokens=options.min_new_tokens or None, length_penalty=options.length_penalty,
        early_stopping=options.early_stopping, do_sample=False, decoder_start_token_id=2, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    scores = output.sequences_scores.tolist() if options.num_beams > 1 else [None] * len(sources)
    results = []
    for row, score in zip(output.sequences[:, 1:].tolist(), scores, strict=True):
        results.append((row[: row.index(2)] if 2 in row else row, score))
    return results


def mismatches(pair: Pair, sources: list[list[int]], options: BeamOptions, slots: int | None = None) -> list[int]:
    """The sources for which tokens or score differ from those of transformers."""
    found = search(pair.model, sources, options, slots)
    wrong = []
    for i, (tokens, score) in enumerate(generated(pair.reference, tuple(map(tuple, sources)), options)):
        length = len(tokens) + 1  # a sequence that was cut has padding or all of its tokens instead of an end token
        ours = found[i].token_ids
        differs = ours != tokens and not (length > options.max_new_tokens and ours == tokens)
        if differs or (score is not None and found[i].score != pytest.approx(score, rel=1e-5, abs=1e-4)):
            wrong.append(i)
    return wrong


def test_logits_are_those_of_transformers_for_any_source_under_one_prefix(pair: Pair) -> None:
    sources, prefix = random_sources(8, seed=3), [2, 9, 30, 4, 17, 22]
    token_ids, mask = padded_left(sources)
    with torch.no_grad():
        expected = pair.reference(
            input_ids=token_ids, attention_mask=mask, decoder_input_ids=torch.tensor([prefix] * len(sources)),
            decoder_attention_mask=torch.ones(len(sources), len(prefix), dtype=torch.int64),
        ).logits  # fmt: skip
        logits = forced_logits(pair.model, sources, prefix)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (expected[1:, -1] - expected[:-1, -1]).abs().amax(dim=1).min() > 0.1, "the source must matter"


OPTIONS = [
    BeamOptions(num_beams=5, max_new_tokens=NEW_TOKENS),
    BeamOptions(num_beams=1, max_new_tokens=NEW_TOKENS),
    BeamOptions(num_beams=8, max_new_tokens=NEW_TOKENS, length_penalty=0.5, early_stopping=True),
    BeamOptions(num_beams=2, max_new_tokens=NEW_TOKENS, length_penalty=2.0, early_stopping="never"),
    BeamOptions(num_beams=3, max_new_tokens=NEW_TOKENS, length_penalty=-1.0),
    BeamOptions(num_beams=4, max_new_tokens=NEW_TOKENS, length_penalty=0.0, min_new_tokens=4),
    BeamOptions(num_beams=3, max_new_tokens=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: f"{each.num_beams}-{each.length_penalty}")
def test_beams_are_those_of_transformers(pair: Pair, options: BeamOptions) -> None:
    sources = random_sources(10, seed=5)
    assert mismatches(pair, sources, options) == []


def test_some_searches_end_early_and_some_at_the_limit(pair: Pair) -> None:
    lengths = [
        len(tokens)
        for tokens, _ in generated(pair.reference, tuple(map(tuple, random_sources(10, seed=5))), OPTIONS[2])
    ]
    assert min(lengths) < NEW_TOKENS <= max(lengths)


FEW_SLOTS = BeamOptions(num_beams=5, max_new_tokens=NEW_TOKENS, early_stopping=True)


def test_results_in_few_slots_are_those_of_transformers(pair: Pair) -> None:
    """What the mutations below change."""
    assert mismatches(pair, random_sources(10, seed=5), FEW_SLOTS, slots=5) == []


def skip_reorder(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = BeamState._extend_beams

    def without_reorder(self: BeamState, *scores: torch.Tensor) -> torch.Tensor:
        writers = self._writers.clone()
        done = extend(self, *scores)
        self._writers.copy_(writers)
        return done

    monkeypatch.setattr(BeamState, "_extend_beams", without_reorder)


def use_cross_kv_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    cross = indictrans2.CrossAttention.keys_and_values
    monkeypatch.setattr(
        indictrans2.CrossAttention, "keys_and_values", lambda self, encoded: cross(self, encoded.roll(1, 0))
    )


def add_to_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = indictrans2.Embedding.forward
    monkeypatch.setattr(
        indictrans2.Embedding, "forward", lambda self, tokens, positions: forward(self, tokens, positions + 1)
    )


def turn_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BeamState, "_length_factor", lambda self, lengths: lengths.float() ** -self.options.length_penalty
    )


def attend_to_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    make = DecodeStep
    monkeypatch.setattr(
        beam_state, "DecodeStep", lambda **fields: make(**{**fields, "source_lengths": fields["source_lengths"] + 99})
    )


def read_first_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    make = DecodeStep
    monkeypatch.setattr(beam_state, "DecodeStep", lambda **fields: make(**{**fields, "writers": fields["writers"] * 0}))


def keep_scores_of_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source begins with the scores that the one before left."""
    begin = BeamState.begin

    def without_scores(self: BeamState, slots: torch.Tensor, *inputs: torch.Tensor) -> None:
        kept = self._scores[slots]
        begin(self, slots, *inputs)
        self._scores[slots] = kept

    monkeypatch.setattr(BeamState, "begin", without_scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        skip_reorder, use_cross_kv_of_another, add_to_positions, turn_penalty, attend_to_padding, read_first_beam,
        keep_scores_of_the_slot,
    ],
)  # fmt: skip
def test_mutation_changes_results(pair: Pair, monkeypatch: pytest.MonkeyPatch, mutate: Any) -> None:
    mutate(monkeypatch)
    assert mismatches(pair, random_sources(10, seed=5), FEW_SLOTS, slots=5) != []


@cache
def found_alone(model: IndicTrans2, source: tuple[int, ...], options: BeamOptions) -> Translation:
    [found] = search(model, [[*source]], options).values()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("num_beams", "overlap"), [(1, True), (5, False), (5, True)])
def test_company_never_changes_a_result(pair: Pair, num_beams: int, overlap: bool) -> None:
    """Sources arrive and end at random steps, in few slots, with the padding and the step ahead of a GPU or without."""
    options = BeamOptions(num_beams=num_beams, max_new_tokens=NEW_TOKENS, early_stopping=True)
    sources, chance = random_sources(10, seed=8), random.Random(8)
    state = BeamSearch(pair.model, options, slots=5, max_source=20, overlap=overlap)
    waiting, found = list(enumerate(sources)), {}
    while waiting or state.num_running:
        count = min(chance.randint(0, 3), state.num_free, len(waiting))
        if count:
            state.add([key for key, _ in waiting[:count]], [source for _, source in waiting[:count]])
            waiting = waiting[count:]
        if chance.random() < 0.1 and waiting and state.num_free:
            state.add(["unwanted"], [sources[0]])
            found |= {each.key: each for each in state.step()}
            state.cancel(["unwanted"])
        found |= {each.key: each for each in state.step()}
    for i, source in enumerate(sources):
        alone = found_alone(pair.model, tuple(source), options)
        assert found[i].token_ids == alone.token_ids
        assert found[i].score == pytest.approx(alone.score, rel=1e-5, abs=1e-5)
    encoded = pair.model.encode(torch.tensor([[7, 8, 2, 9, 9], [4, 5, 6, 7, 2]]), torch.tensor([3, 5]))
    alone_encoded = pair.model.encode(torch.tensor([[7, 8, 2]]), torch.tensor([3]))
    torch.testing.assert_close(encoded[:1, :3], alone_encoded, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_graphs_of_packed_sources_find_what_padded_sources_do(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any lengths, in graphs and beyond the largest one, in slots that others have left; alone as in company."""
    options, seed = BeamOptions(num_beams=3, max_new_tokens=NEW_TOKENS), random.randrange(2**31)
    sources = random_sources(26, seed=seed)
    padded = search(pair.model, sources, options, slots=26)
    monkeypatch.setattr(IndicTrans2, "is_packed", True)
    state = BeamSearch(pair.model, options, slots=13, max_source=20, encoder_tokens=24)
    assert state._encoder is not None
    state._encoder.capture(EmulatedCapturer(), lambda _stage, _part: None)  # type: ignore[arg-type]
    assert state._encoder._sizes == [64]
    state._encoder_tokens = 400  # more than the graph has
    found: dict[Any, Translation] = {}
    chance, waiting = random.Random(seed), list(enumerate(sources))
    while waiting or state.num_running:
        count = min(state.num_free, len(waiting), chance.choice([1, 2, 13]))
        batch, waiting = waiting[:count], waiting[count:]
        state.add([key for key, _ in batch], [source for _, source in batch])
        found |= {each.key: each for each in state.step()}
    for key, expected in padded.items():
        assert found[key].token_ids == expected.token_ids, seed
        assert found[key].score == pytest.approx(expected.score, rel=1e-5, abs=1e-5), seed


def test_a_step_ahead_leaves_what_is_done(pair: Pair) -> None:
    """A step that runs before the host has read the one before writes the rows that are done elsewhere."""
    options = BeamOptions(num_beams=3, max_new_tokens=NEW_TOKENS, early_stopping=True)
    sources = random_sources(10, seed=5)

    def ahead() -> dict[Any, Translation]:
        state, found = BeamSearch(pair.model, options, slots=10, max_source=20, overlap=True), []
        state.add(range(10), sources)
        assert state.step() == [], "the first step is read by the second"
        while state.num_running:
            found += state.step()
        return {each.key: each for each in found}

    expected = search(pair.model, sources, options)
    assert {key: each.token_ids for key, each in ahead().items()} == {
        key: each.token_ids for key, each in expected.items()
    }
    state = BeamState(pair.model, BeamOptions(num_beams=3, max_new_tokens=2), slots=1, max_source=20)
    slots, source = torch.tensor([0]), torch.tensor([sources[0]])
    with torch.inference_mode():
        state.begin(slots, source, torch.tensor([source.shape[1]]))
        assert [state.step(slots, 2, 20).item() for _ in range(2)] == [False, True]
        tables = state._tokens, state._scores, state._finished_tokens, state._finished_scores
        kept = [table[0].clone() for table in tables]
        assert state.step(slots, 2, 20).item(), "still done"
        assert all(torch.equal(table[0], each) for table, each in zip(tables, kept, strict=True))
        state._is_done.fill_(False)
        state.step(slots, 2, 20)
        assert not torch.equal(state._scores[0], kept[1]), "a row that is not done changes"


def test_cancelled_source_has_no_translation(pair: Pair) -> None:
    state = BeamSearch(pair.model, OPTIONS[0], slots=3, max_source=20)
    state.add(["a", "b", "c"], random_sources(3, seed=1))
    state.step()
    state.cancel(["a", "unknown"])
    assert state.num_free == 1
    found = []
    while state.num_running:
        found += state.step()
    assert {each.key for each in found} == {"b", "c"}
    assert state.step() == []


def test_refused_sources_leave_the_state_as_it_was(pair: Pair) -> None:
    state = BeamSearch(pair.model, OPTIONS[0], slots=2, max_source=20)
    for source in ([], [5] * 21):
        with pytest.raises(RequestError, match=f"{len(source)} tokens; the limit is 20"):
            state.add(["a", "b"], [[5, 2], source])
    assert state.num_running == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_finds_translations(pair: Pair, dtype: torch.dtype) -> None:
    model = load_model(pair.folder, dtype)
    found = search(model, random_sources(4, seed=2), OPTIONS[0])
    assert all(torch.isfinite(torch.tensor(each.score)) for each in found.values())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 9}, "num_beams must be from 1 to 8; got 9"),
        ({"num_beams": 0}, "num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 300}, "min_new_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
    ],
)
def test_setting_outside_its_range_is_an_error(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        BeamOptions(**settings)


def test_more_tokens_than_positions_are_an_error(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="max_target_positions, 48"):
        BeamSearch(pair.model, BeamOptions(max_new_tokens=49), slots=1, max_source=5)
    with pytest.raises(ConfigError, match="max_source_positions, 64"):
        BeamSearch(pair.model, OPTIONS[0], slots=1, max_source=65)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_normalize_before", False),
        ("encoder_normalize_before", None),
        ("activation_function", "swish"),
        ("decoder_embed_dim", 64),
        ("encoder_attention_heads", 3),
        ("decoder_vocab_size", None),
        ("max_source_positions", 0),
        ("layernorm_embedding", "yes"),
    ],
)
def test_configuration_that_is_not_computed_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.replace("encoder_attention_heads", "encoder_embed_dim")):
        IndicTrans2({**SMALL, name: value})


def rewrite(folder: Path, target: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def test_missing_and_misshapen_tensors_are_named(pair: Pair, tmp_path: Path) -> None:
    name = "model.decoder.layers.0.encoder_attn.v_proj.weight"
    with pytest.raises(ConfigError, match=f"missing tensors: {name}"):
        load_model(rewrite(pair.folder, tmp_path, lambda tensors: tensors.pop(name)))
    with pytest.raises(ConfigError, match=rf"{name} has shape \[32, 31\]; the configuration asks for \[32, 32\]"):
        load_model(
            rewrite(pair.folder, tmp_path, lambda tensors: tensors.update({name: tensors[name][:, :31].contiguous()}))
        )


def test_copies_and_tables_in_a_checkpoint_are_ignored(pair: Pair, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.encoder.embed_positions.weights"] = torch.zeros(3, 3)
        tensors.setdefault("lm_head.weight", tensors["model.decoder.embed_tokens.weight"].clone())

    model = load_model(rewrite(pair.folder, tmp_path, add))
    sources = random_sources(3, seed=6)
    assert search(model, sources, OPTIONS[0]) == search(pair.model, sources, OPTIONS[0])
    tied = json.loads((pair.folder / "config.json").read_text())["share_decoder_input_output_embed"]
    assert (model.lm_head is None) == tied
