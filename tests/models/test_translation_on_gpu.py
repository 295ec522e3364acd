"""Translation on a GPU: the CPU's tokens, graphs as eager steps, company as alone, and steps that wait for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from m2m100_tools import SMALL, load_model, random_sources, reference_model, write_checkpoint

from meltcore.engine.translation.beam_search import BeamSearch, Translation
from meltcore.engine.translation.beam_state import BeamOptions
from meltcore.models.tasks.indictrans2 import DecodeStep, IndicTrans2

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
# Heads of 64, as the published sizes have, and several chunks of the vocabulary
WIDE = {
    **SMALL, "encoder_embed_dim": 256, "decoder_embed_dim": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
    "decoder_vocab_size": 9000,
}  # fmt: skip
OPTIONS = [
    BeamOptions(num_beams=5, max_new_tokens=20),
    BeamOptions(num_beams=1, max_new_tokens=20),
    BeamOptions(num_beams=4, max_new_tokens=20, min_new_tokens=6, length_penalty=0.5, early_stopping=True),
]
# Of half precision: how far its logits may be from float32's, in units of how far those of a CPU are.
SLACK = 1.5


@pytest.fixture(scope="module", params=[SMALL, WIDE], ids=["small", "wide"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, request.param, reference_model(request.param, seed=11))
    return path


def on_gpu(folder: Path, dtype: torch.dtype = torch.float32) -> IndicTrans2:
    model = load_model(folder, dtype).to(DEVICE)
    model.prepare()
    return model


def search(
    model: IndicTrans2, sources: list[list[int]], options: BeamOptions, slots: int = 7, **settings: Any
) -> dict[Any, Translation]:
    """Translates with fewer slots than sources, so that slots are used again while others run."""
    state = BeamSearch(model, options, slots=min(slots, len(sources)), max_source=20, **settings)
    found: dict[Any, Translation] = {}
    waiting = list(enumerate(sources))
    while waiting or state.num_running:
        count = min(state.num_free, len(waiting), 3)
        state.add([key for key, _ in waiting[:count]], [source for _, source in waiting[:count]])
        waiting = waiting[count:]
        found |= {each.key: each for each in state.step()}
    return found


def tokens(found: dict[Any, Translation]) -> dict[Any, list[int]]:
    return {key: each.token_ids for key, each in found.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: f"{each.num_beams}")
def test_tokens_and_scores_are_the_cpu_s(folder: Path, options: BeamOptions) -> None:
    sources = random_sources(15, seed=5)
    expected = search(load_model(folder), sources, options)
    found = search(on_gpu(folder), sources, options)
    assert tokens(found) == tokens(expected)
    assert all(found[key].score == pytest.approx(each.score, rel=1e-4, abs=1e-4) for key, each in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_graphs_compute_what_eager_steps_do(folder: Path, dtype: torch.dtype) -> None:
    """The same padding in both: the same bits, scores included."""
    model, sources = on_gpu(folder, dtype), random_sources(15, seed=6)
    expected = search(model, sources, OPTIONS[0], graphs=False)
    found = search(model, sources, OPTIONS[0])
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_graphs_of_packed_sources_encode_what_padded_sources_do(folder: Path, dtype: torch.dtype) -> None:
    """Keys and values in the slots of sources: as near to float32's as those of padded rows, alone as in company."""
    model, sources = on_gpu(folder, dtype), random_sources(30, seed=random.randrange(2**31))
    state = BeamSearch(model, OPTIONS[0], slots=30, max_source=20, encoder_tokens=64)
    state.capture()
    assert state._encoder is not None
    assert state._encoder._graphs

    def values(encode: Callable[[list[int], list[Sequence[int]]], None], alone: bool) -> list[torch.Tensor]:
        state.state.cross_kv.fill_(torch.nan)
        slots = [*range(30)]
        with torch.inference_mode():
            for part in [[slot] for slot in slots] if alone else [slots]:
                encode(part, [sources[slot] for slot in part])
        return [state.state.cross_kv[:, :, slot, :, : len(sources[slot])].float().cpu() for slot in slots]

    found, alone = values(state._encode, False), values(state._encode, True)
    state._encoder = None
    padded = values(state._encode, False)
    exact_state = BeamSearch(on_gpu(folder), OPTIONS[0], slots=30, max_source=20)
    with torch.inference_mode():
        exact_state._encode([*range(30)], sources)
    exact = [exact_state.state.cross_kv[:, :, slot, :, : len(each)].cpu() for slot, each in enumerate(sources)]

    def error(rows: list[torch.Tensor]) -> float:
        return sum(float((row - each).norm() ** 2) for row, each in zip(rows, exact, strict=True)) ** 0.5

    assert 0 < error(found) <= SLACK * error(padded)
    assert error(alone) <= SLACK * error(padded)


def test_company_never_changes_the_tokens(folder: Path) -> None:
    model, sources = on_gpu(folder), random_sources(12, seed=8)
    together = search(model, sources, OPTIONS[0], slots=12)
    for i, source in enumerate(sources):
        [alone] = search(model, [source], OPTIONS[0]).values()
        assert alone.token_ids == together[i].token_ids
        assert alone.score == pytest.approx(together[i].score, rel=1e-5, abs=1e-5)


def logits_after(model: IndicTrans2, sources: list[list[int]], prefix: list[int]) -> torch.Tensor:
    """The logits after each token of a prefix, for every source: [sources, tokens, vocab] on the CPU."""
    rows, longest, device = len(sources), max(map(len, sources)), model.device
    lengths = torch.tensor([len(source) for source in sources], device=device)
    token_ids = torch.tensor([source + [5] * (longest - len(source)) for source in sources], device=device)
    decoder, size = model.config.decoder, model.config.hidden_size
    shape = decoder.num_layers, 2, rows, decoder.num_heads, len(prefix), 1, size // decoder.num_heads
    self_kv, logits = torch.zeros(shape, dtype=model.dtype, device=device), []
    with torch.inference_mode():
        cross_kv = torch.stack([*model.cross_keys_values(model.encode(token_ids, lengths))]).contiguous()
        for position, token in enumerate(prefix):
            step = DecodeStep(
                token_ids=torch.full((rows, 1), token, device=device),
                slots=torch.arange(rows, device=device),
                positions=torch.full((rows,), position, device=device),
                num_positions=position + 1,
                writers=torch.zeros(rows, 1, len(prefix), dtype=torch.int8, device=device),
                source_lengths=lengths,
                max_source=longest,
            )
            logits.append(model.decode(step, self_kv, cross_kv)[:, 0].float().cpu())
    return torch.stack(logits, dim=1)


def test_half_precision_is_as_near_to_float32_as_a_cpu_s(folder: Path) -> None:
    sources, prefix = random_sources(8, seed=3), [2, 9, 30, 4, 17, 22]
    expected = logits_after(load_model(folder), sources, prefix)
    noise = (logits_after(load_model(folder, torch.float16), sources, prefix) - expected).norm()
    found = (logits_after(on_gpu(folder, torch.float16), sources, prefix) - expected).norm()
    assert 0 < found <= SLACK * noise
    exact = (logits_after(on_gpu(folder), sources, prefix) - expected).norm()
    assert exact <= 1e-4 * expected.norm()


def test_steps_do_not_wait_for_the_device(folder: Path) -> None:
    options = BeamOptions(num_beams=5, max_new_tokens=40, min_new_tokens=40)
    state = BeamSearch(on_gpu(folder), options, slots=9, max_source=20)
    state.add(range(9), random_sources(9, seed=2))
    state.step()  # captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            assert state.step() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
