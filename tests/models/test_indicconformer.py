"""IndicConformer against transformers' Parakeet classes: encoder, CTC, RNN-T, batches; mutations of each trap fail."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from emulated_graphs import EmulatedCapturer
from parakeet_tools import CONFIG, build, feature_extractor, nemo_names, pad, reference_ctc, reference_rnnt, speech

from meltcore.common.errors import ConfigError
from meltcore.engine.transcription import transducer
from meltcore.engine.transcription.ctc import Emissions, ctc_greedy, make_emissions
from meltcore.engine.transcription.speech_encoding import EncoderGraphs, encode_samples
from meltcore.engine.transcription.transducer import TransducerGraphs, transducer_greedy
from meltcore.kernels import graph_capture
from meltcore.models.tasks import conformer, log_mel
from meltcore.models.tasks.indicconformer import IndicConformer

TOLERANCE = 1e-4
CLIPS = speech(1.0, 2.3, 0.61, 3.17)
BLANK = CONFIG.blank


@cache
def references() -> tuple[Any, list[Any], dict[str, torch.Tensor]]:
    rnnts = [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    ctc = reference_ctc()
    ctc.encoder.load_state_dict(rnnts[0].encoder.state_dict())
    return ctc, rnnts, nemo_names(ctc, rnnts)


@cache
def inputs() -> Any:
    return feature_extractor()([clip.numpy() for clip in CLIPS], sampling_rate=16_000, return_tensors="pt")


@cache
def expected_encoded() -> tuple[torch.Tensor, list[int]]:
    with torch.inference_mode():
        output = references()[1][0].encoder(inputs()["input_features"], inputs()["attention_mask"])
    return output.last_hidden_state, output.attention_mask.sum(1).tolist()


@cache
def expected_tokens(language: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and their frames of every clip, from transformers' generate."""
    output = references()[1][language].generate(
        input_features=inputs()["input_features"], attention_mask=inputs()["attention_mask"], max_new_tokens=2000
    )
    clips = []
    for ids, advances, frames in zip(
        output.sequences.tolist(), output.durations.tolist(), expected_encoded()[1], strict=True
    ):
        tokens, places, frame = [], [], 0
        for token, advance in zip(ids[1:], advances[1:], strict=False):
            if token != BLANK and frame < frames:
                tokens.append(token)
                places.append(frame)
            frame += advance
        clips.append((tokens, places))
    return clips


def ours() -> IndicConformer:
    return build(references()[2])


def encode(model: IndicConformer, clips: list[torch.Tensor], filler: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return model.encode(*pad(clips, filler))


def encoder_error() -> float:
    """The largest difference to transformers of any frame of any clip, in one batch."""
    theirs, counts = expected_encoded()
    encoded, frames = encode(ours(), CLIPS, filler=0.5)
    assert frames.tolist() == counts
    return max(float((theirs[i, :count] - encoded[i, :count]).abs().max()) for i, count in enumerate(counts))


def test_encoder_is_that_of_transformers() -> None:
    assert encoder_error() < TOLERANCE
    theirs, _ = expected_encoded()
    assert float(theirs.std()) > 0.5


def mutate(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convolve, sinusoids = conformer.ConvolutionModule.forward, conformer.sinusoids
    if mutation == "attention mask":
        monkeypatch.setattr(conformer.math, "inf", 0.0)
    elif mutation == "convolution mask":
        unmasked = lambda self, hidden, mask: convolve(self, hidden, torch.zeros_like(mask))  # noqa: E731
        monkeypatch.setattr(conformer.ConvolutionModule, "forward", unmasked)
    elif mutation == "position offset 1":
        monkeypatch.setattr(conformer, "sinusoids", lambda frames, size, _: sinusoids(frames + 1, size)[:-2])
    elif mutation == "pre-emphasis":
        monkeypatch.setattr(log_mel, "pre_emphasize", lambda samples, _lengths, _factor: samples)
    elif mutation == "input scale":
        monkeypatch.setattr(conformer.math, "sqrt", lambda _: 1.0)
    else:
        monkeypatch.setattr(conformer, "relative_shift", lambda scores: scores[..., : scores.shape[-2]])


@pytest.mark.parametrize(
    "mutation",
    ["attention mask", "convolution mask", "position offset 1", "pre-emphasis", "input scale", "relative shift"],
)
def test_encoder_parity_notices(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(mutation, monkeypatch)
    assert encoder_error() > 10 * TOLERANCE


def ctc_error(language: int, rows: int) -> float:
    ctc, _, tensors = references()
    with torch.inference_mode():
        logits = ctc(inputs()["input_features"], inputs()["attention_mask"]).logits
        model = build(tensors)
        encoded, frames = encode(model, CLIPS)
        found = model.ctc_logits(encoded, language)
    size = CONFIG.tokens_per_language
    chosen = torch.cat([logits[..., rows * size : (rows + 1) * size], logits[..., -1:]], -1)
    return max(float((chosen[i, :count] - found[i, :count]).abs().max()) for i, count in enumerate(frames))


def test_ctc_logits_are_those_of_the_language_and_the_blank() -> None:
    assert all(ctc_error(language, language) < TOLERANCE for language in range(len(CONFIG.languages)))
    assert ctc_error(0, 1) > 0.1


def test_ctc_greedy_merges_runs_and_drops_blanks() -> None:
    logprobs = -torch.arange(9) / 10
    found = make_emissions(torch.tensor([9, 3, 3, 9, 3, 4, 4, 4, 9]), logprobs, logprobs[:8] - 1, 9)
    assert found == Emissions([3, 3, 4], [1, 4, 5], [3, 5, 8])
    assert found.logprobs == pytest.approx([-0.1, -0.4, -0.5])
    assert found.blank_logprobs == pytest.approx([-1 - at / 10 for at in range(8)])
    assert make_emissions(torch.full((4,), 9), logprobs[:4], logprobs[:4], 9) == Emissions([], [], [])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 3, 3, 3], [2, 9, 1, 1]]), 10).float()
    assert ctc_greedy(logits, torch.tensor([2, 4]), 9) == [Emissions([3], [0], [2]), Emissions([2, 1], [0, 2], [1, 4])]


def ctc_tokens(model: IndicConformer, clips: list[torch.Tensor], language: int) -> list[Emissions]:
    encoded, frames = encode(model, clips)
    with torch.inference_mode():
        return ctc_greedy(model.ctc_logits(encoded, language), frames, BLANK)


def rnnt_tokens(
    model: IndicConformer, clips: list[torch.Tensor], languages: list[int], start_token: int | None = None
) -> list[Emissions]:
    encoded, frames = encode(model, clips)
    with torch.inference_mode():
        return transducer_greedy(model, encoded, frames, torch.tensor(languages), start_token)


def rnnt_agrees(language: int, model: IndicConformer | None = None, **changes: Any) -> bool:
    found = rnnt_tokens(model or ours(), CLIPS, [language] * len(CLIPS), **changes)
    return [(clip.tokens, clip.first_frames) for clip in found] == expected_tokens(language)


@pytest.mark.slow
@pytest.mark.parametrize("language", range(len(CONFIG.languages)))
def test_rnnt_emits_the_tokens_of_transformers_at_its_frames(language: int) -> None:
    assert rnnt_agrees(language)
    # Some frames have no token, others several.
    frames = expected_tokens(language)[3][1]
    per_frame = [frames.count(frame) for frame in range(expected_encoded()[1][3])]
    assert 0 in per_frame
    assert max(per_frame) > 1


@pytest.mark.parametrize("sizes", [(1, 6, 3, 2, 1), (5, 6, 1, 1, 0)])
def test_convolutions_are_gemms(sizes: tuple[int, int, int, int, int]) -> None:
    layer, hidden = torch.nn.Conv2d(*sizes), torch.randn(3, sizes[0], 11, 8)
    with torch.inference_mode():
        torch.testing.assert_close(conformer.convolve(layer, hidden), layer(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_graphs_of_more_and_longer_clips_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in company, in graphs and loops that others have used, and in batches that no graph has."""
    monkeypatch.setattr(graph_capture, "GraphCapturer", EmulatedCapturer)
    model, seed, capturer = ours(), random.randrange(2**31), EmulatedCapturer()
    encoder = EncoderGraphs(model, [(1, 12), (1, 40), (4, 40)])
    loops = TransducerGraphs(model, limit=2)
    encoder.capture(capturer, lambda _stage, _part: None)  # type: ignore[arg-type]
    loops.capture(capturer, (1, 4), 40)  # type: ignore[arg-type]
    chance = random.Random(seed)
    clips = speech(*(chance.uniform(0.3, 2.9) for _ in range(6)), seed=seed)
    samples = [(clip.clamp(-1, 1) * 32767).to(torch.int16) for clip in clips]
    languages = [chance.randrange(len(CONFIG.languages)) for _ in samples]

    def found(rows: list[int]) -> tuple[list[torch.Tensor], list[Emissions]]:
        batch, lengths = pad([samples[row] for row in rows])
        with torch.inference_mode():
            encoded, frames = encoder.encode(batch, lengths)
            chosen = torch.tensor([languages[row] for row in rows])
            emissions = transducer_greedy(model, encoded, frames, chosen, graphs=loops)
            return [each[:count].clone() for each, count in zip(encoded, frames.tolist(), strict=True)], emissions

    for rows in ([0], [1, 2, 3], [4, 5], [2], [*range(6)], [3]):
        for row, encoded, emissions in zip(rows, *found(rows), strict=True):
            with torch.inference_mode():
                alone, frames = encode_samples(model, samples[row][None], torch.tensor([len(samples[row])]))
                [expected] = transducer_greedy(model, alone, frames, torch.tensor([languages[row]]))
            torch.testing.assert_close(encoded, alone[0, : len(encoded)], rtol=0, atol=TOLERANCE)
            assert emissions == expected, seed
            assert emissions.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
            assert emissions.blank_logprobs == pytest.approx(expected.blank_logprobs, abs=TOLERANCE)
    assert len(loops._cache._kept) == 1, "six clips have a loop of their own"
    assert capturer.count == 3 + 2 + 1, "which shares the memory of the others"


@pytest.mark.parametrize("window", [1, 3, 64])
def test_window_of_frames_does_not_change_the_tokens(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transducer, "WINDOW_FRAMES", window)
    assert rnnt_agrees(2)


def scores_one_by_one(clip: int, language: int) -> tuple[list[float], list[float]]:
    """Log-probabilities of the tokens, and of the blank where each frame begins, of an RNN-T that steps alone."""
    model, start = ours(), CONFIG.vocab_size
    encoded, frames = encode(model, CLIPS)
    heads = model.joint.heads(torch.tensor([language]))
    projected = model.joint.enc(encoded[clip : clip + 1])
    zeros = torch.zeros(CONFIG.prediction_layers, 1, CONFIG.prediction_size)
    state = transducer._State(torch.zeros(1, CONFIG.joint_size), zeros, zeros)
    state = transducer._advance(model, torch.tensor([start]), state)
    tokens, blanks = list[float](), list[float]()
    for frame in range(frames[clip]):
        for symbol in range(CONFIG.max_symbols):
            logprobs = model.joint(projected[:, frame : frame + 1], state.predicted, heads)[0, 0].log_softmax(-1)
            if symbol == 0:
                blanks.append(float(logprobs[BLANK]))
            token = int(logprobs.argmax())
            if token == BLANK:
                break
            tokens.append(float(logprobs[token]))
            state = transducer._advance(model, torch.tensor([token]), state)
    return tokens, blanks


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "language"), [(0, 1), (3, 2)])
@pytest.mark.parametrize("window", [1, 4])
def test_tokens_have_the_probabilities_of_a_loop_that_steps_alone(
    clip: int, language: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transducer, "WINDOW_FRAMES", window)
    found = rnnt_tokens(ours(), CLIPS, [language] * len(CLIPS))[clip]
    with torch.inference_mode():
        tokens, blanks = scores_one_by_one(clip, language)
    assert len(tokens) == len(found.tokens) > 3
    assert found.logprobs == pytest.approx(tokens, abs=1e-4)
    assert found.blank_logprobs == pytest.approx(blanks, abs=1e-4)


@pytest.mark.parametrize("clip", [1, 3])
def test_ctc_tokens_have_their_probabilities(clip: int) -> None:
    model = ours()
    encoded, frames = encode(model, CLIPS)
    with torch.inference_mode():
        logits = model.ctc_logits(encoded, 2)
    found = ctc_greedy(logits, frames, BLANK)[clip]
    logprobs = logits[clip, : frames[clip]].log_softmax(-1)
    spans = zip(found.tokens, found.first_frames, found.end_frames, strict=True)
    assert found.logprobs == pytest.approx([float(logprobs[first:end, token].max()) for token, first, end in spans])
    assert found.blank_logprobs == pytest.approx(logprobs[:, BLANK].tolist())


@pytest.mark.slow
def test_rnnt_parity_notices_other_settings() -> None:
    """The blank's id, the limit of symbols, the first input and the language's head all matter."""
    # The blank's id within the language is another row of the embedding than the global one.
    assert not all(rnnt_agrees(language, start_token=BLANK) for language in range(3))
    for changes in ({"max_symbols": 3}, {"tokens_per_language": BLANK - 1}):
        model = ours()
        model.config = replace(CONFIG, **changes)
        assert not all(rnnt_agrees(language, model, start_token=CONFIG.vocab_size) for language in range(3))
    other_head = rnnt_tokens(ours(), CLIPS, [0] * len(CLIPS))
    assert [clip.tokens for clip in other_head] != [tokens for tokens, _ in expected_tokens(1)]


def test_rnnt_parity_notices_a_state_that_advances_on_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transducer, "WINDOW_FRAMES", 1)
    monkeypatch.setattr(transducer._State, "updated", lambda _self, new, _rows: new)
    assert not rnnt_agrees(2)


@pytest.mark.slow
def test_batch_never_changes_a_result() -> None:
    """Alone against in company, with other languages beside it: hidden states within 1e-5, the same tokens."""
    model = ours()
    languages = [1, 0, 2, 1]
    encoded, frames = encode(model, CLIPS, filler=0.9)
    together_rnnt = rnnt_tokens(model, CLIPS, languages)
    together_ctc = ctc_tokens(model, CLIPS, 2)
    for i, clip in enumerate(CLIPS):
        alone, alone_frames = encode(model, [clip])
        assert alone_frames.tolist() == [frames[i]]
        torch.testing.assert_close(encoded[i, : frames[i]], alone[0], atol=1e-5, rtol=0)
        assert rnnt_tokens(model, [clip], languages[i : i + 1]) == [together_rnnt[i]]
        assert ctc_tokens(model, [clip], 2) == [together_ctc[i]]


def test_subsampling_in_parts_has_the_same_result() -> None:
    model = ours()
    whole, _ = encode(model, CLIPS)
    model.encoder.pre_encode.max_elements = 1
    torch.testing.assert_close(encode(model, CLIPS)[0], whole, atol=1e-5, rtol=0)


def test_striding_subsampling_runs_alone_as_in_company() -> None:
    """The smaller published models have full convolutions, 4x. Without a reference class: alone against in company."""
    config = conformer.ConformerConfig(
        num_layers=1, hidden_size=32, num_heads=2, feed_forward_size=32, subsampling="striding", subsampling_factor=4
    )
    torch.manual_seed(0)
    encoder = conformer.ConformerEncoder(config)
    with torch.inference_mode():
        for values in encoder.parameters():
            values.normal_(0, 0.05)
        encoder.prepare(60)
        features, counts = torch.randn(2, 201, 80), torch.tensor([150, 201])
        features[0, 150:] = 0
        together, frames = encoder(features, counts)
        assert frames.tolist() == [config.encoded_frames(150), config.encoded_frames(201)] == [38, 51]
        alone, _ = encoder(features[:1, :150], counts[:1])
    torch.testing.assert_close(together[0, :38], alone[0], atol=1e-5, rtol=0)


def test_published_sizes_have_600_million_parameters() -> None:
    """multimodel facts: 607.7 M with the batch norms folded; 5,633 CTC outputs; 80 ms per frame."""
    languages = tuple(f"l{i}" for i in range(22))
    with torch.device("meta"):
        model = IndicConformer(CONFIG.__class__(languages))
    count = sum(values.numel() for values in model.encoder.parameters())
    assert 606e6 < count < 610e6
    assert model.ctc_head.weight.shape == (5633, 1024)
    assert math.isclose(model.config.frame_s, 0.08)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"joint.enc.bias": None}, "test lacks 1 tensors: joint.enc.bias"),
        ({"encoder.layers.1.self_attn.linear_k.weight": None}, "lacks 1 tensors: encoder.layers.1.self_attn.linear_k"),
        ({"joint.joint_net.2.kn.bias": None}, "lacks 1 tensors: joint.joint_net.2.kn.bias"),
        ({"encoder.extra": torch.zeros(1)}, "has unexpected 1 tensors: encoder.extra"),
        ({"joint.enc.bias": torch.zeros(3)}, r"joint.enc.bias has shape \[3\]; the configuration asks for \[24\]"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, Any], message: str) -> None:
    tensors = {name: values for name, values in {**references()[2], **change}.items() if values is not None}
    with pytest.raises(ConfigError, match=message):
        IndicConformer(CONFIG).load(tensors, "test")
