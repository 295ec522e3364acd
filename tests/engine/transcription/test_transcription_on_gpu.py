"""Transcription on a GPU: the CPU's tokens, graphs as eager launches, company as alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from parakeet_tools import CONFIG, build, nemo_names, reference_ctc, reference_rnnt, speech
from torch.nn import functional

from meltcore.engine.transcription.ctc import Emissions, ctc_greedy
from meltcore.engine.transcription.speech_encoding import EncoderGraphs, encode_samples
from meltcore.engine.transcription.transducer import TransducerGraphs, transducer_greedy
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.models.tasks.indicconformer import IndicConformer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LANGUAGES = [1, 0, 2, 1]
# Of half precision: the relative distance of the encoder's output from float32's. Its rounding is 5e-4, over 3 layers
# with peaked attention.
NOISE = 2e-2


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """Without the ten-bit float32 (TF32) that cuDNN uses otherwise."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@cache
def weights() -> Any:
    rnnts = [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    ctc = reference_ctc()
    ctc.encoder.load_state_dict(rnnts[0].encoder.state_dict())
    return nemo_names(ctc, rnnts)


@cache
def model_on(device: str, dtype: torch.dtype = torch.float32) -> IndicConformer:
    model = build(weights()).to(device, dtype)
    model.prepare(250)
    return model


def clips(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four clips as a batch of int16, and their lengths."""
    found = [(clip.clamp(-1, 1) * 32767).to(torch.int16) for clip in speech(1.0, 2.3, 0.61, 3.17, seed=seed)]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True), torch.tensor([len(clip) for clip in found])


def transcribed(
    model: IndicConformer,
    samples: torch.Tensor,
    lengths: torch.Tensor,
    languages: list[int],
    graphs: tuple[EncoderGraphs, TransducerGraphs] | None = None,
) -> tuple[torch.Tensor, list[Emissions], list[Emissions]]:
    """The encoder's output, and what CTC (of the first language) and RNN-T find."""
    device = model.device
    encode = graphs[0].encode if graphs else lambda *inputs: encode_samples(model, *inputs)
    with torch.inference_mode():
        encoded, frames = encode(samples.to(device), lengths.to(device))
        ctc = ctc_greedy(model.ctc_logits(encoded, languages[0]), frames, CONFIG.blank)
        chosen = torch.tensor(languages, device=device)
        rnnt = transducer_greedy(model, encoded, frames, chosen, graphs=graphs[1] if graphs else None)
        return encoded.clone(), ctc, rnnt


def graphs_of(model: IndicConformer) -> tuple[EncoderGraphs, TransducerGraphs]:
    """Graphs, one of them of the shape of `clips`."""
    samples, _ = clips()
    size = model.encoded_frames(samples.shape[1])
    graphs = EncoderGraphs(model, [(1, size), (4, size), (4, 2 * size)]), TransducerGraphs(model)
    capturer = GraphCapturer()
    graphs[0].capture(capturer, lambda _stage, _part: None)
    graphs[1].capture(capturer, (1, 4), 2 * size)
    return graphs


def test_tokens_are_the_cpu_s() -> None:
    model, inputs = model_on("cuda"), clips()
    expected, *expected_tokens = transcribed(model_on("cpu"), *inputs, LANGUAGES)
    encoded, *tokens = transcribed(model, *inputs, LANGUAGES, graphs_of(model))
    assert tokens == expected_tokens
    assert sum(len(each.tokens) for each in tokens[1]) > 20
    counts = [model.encoded_frames(length) for length in inputs[1].tolist()]
    for row, count in enumerate(counts):
        torch.testing.assert_close(encoded[row, :count].cpu(), expected[row, :count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_graphs_compute_what_eager_launches_do(dtype: torch.dtype) -> None:
    """Batches of one shape, the samples of its longest clip, so that a graph has no other padding."""
    model = model_on("cuda", dtype)
    graphs = graphs_of(model)
    size = graphs[0]._sizes[0]
    first, second = (
        (functional.pad(samples, (0, size - samples.shape[1])), lengths) for samples, lengths in (clips(), clips(3))
    )
    found = [transcribed(model, *inputs, LANGUAGES, graphs) for inputs in (first, second, first)]
    for inputs, (encoded, *tokens) in zip((first, second, first), found, strict=True):
        expected, *expected_tokens = transcribed(model, *inputs, LANGUAGES)
        assert torch.equal(encoded, expected)
        assert tokens == expected_tokens
    assert found[0][2] != found[1][2]


def test_company_never_changes_the_tokens() -> None:
    model = model_on("cuda")
    samples, lengths = clips()
    graphs = graphs_of(model)
    together = transcribed(model, samples, lengths, LANGUAGES, graphs)[2]
    for row, length in enumerate(lengths.tolist()):
        alone = samples[row : row + 1, :length], lengths[row : row + 1], LANGUAGES[row : row + 1]
        assert transcribed(model, *alone, graphs)[2] == [together[row]]


def test_half_precision_is_within_its_noise() -> None:
    inputs = clips()
    expected = transcribed(model_on("cpu"), *inputs, LANGUAGES)[0]
    model = model_on("cuda", torch.float16)
    encoded = transcribed(model, *inputs, LANGUAGES, graphs_of(model))[0].float().cpu()
    for row, length in enumerate(inputs[1].tolist()):
        count = model.encoded_frames(length)
        distance = (encoded[row, :count] - expected[row, :count]).norm() / expected[row, :count].norm()
        assert 0 < distance < NOISE
