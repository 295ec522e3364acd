"""How bundled models of other tasks are trained: as they are decoded, and into folders that load."""

from __future__ import annotations

import importlib
import json
import math
import random
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from places import ROOT
from torch.nn.functional import log_softmax

pytest.importorskip("sentencepiece", reason="the extras audio and translate have sentencepiece")
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_a_whole_target_gives_the_logits_of_decoding_it_token_by_token() -> None:
    from make_bundled_translation import Tokenizers, forward, model_config, new_model

    from meltcore.engine.translation.beam_search import BeamOptions
    from meltcore.engine.translation.translation import translate_all
    from meltcore.measure.problems.phrases import generate_phrases

    torch.manual_seed(0)
    tokenizers = Tokenizers.train(seed=1, sentences=500)
    model = new_model(model_config(tokenizers, size=32, layers=2), torch.device("cpu"))
    sentences = generate_phrases("train", num_phrases=3, seed=5)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("weight") and values.dim() > 1:
                values.mul_(3)  # so that the best token is a clear one
    sources = [tokenizers.source_ids(each) for each in sentences]
    outputs = translate_all(model, sources, BeamOptions(num_beams=1, max_new_tokens=12), slots=3)
    batch = tokenizers.batch(sentences)
    batch.given = torch.tensor([[2, *output, *[1] * (12 - len(output))][:12] for output in outputs])
    best = forward(model, batch).argmax(-1)
    for row, output in zip(best.tolist(), outputs, strict=True):
        assert row[: len(output)] == output
    assert max(map(len, outputs)) > 4


@pytest.mark.usefixtures("scripts")
def test_a_transcriber_learns_the_likelihood_of_the_path_that_greedy_decoding_walks(tmp_path: Path) -> None:
    from make_bundled_transcriber import (
        ALPHABETS,
        Trainee,
        archive_config,
        batch_of,
        nemo_tensors,
        token_ids,
        train_tokenizers,
    )

    from meltcore.measure.problems.tones import render, tone_clip
    from meltcore.models.tasks.indicconformer import IndicConformer

    torch.manual_seed(0)
    trainee = Trainee(archive_config(size=32, layers=2), torch.device("cpu"))
    ids = token_ids(train_tokenizers()["hi"])
    rng = random.Random(1)
    clips = [tone_clip(rng, "train", seconds) for seconds in (1.2, 2.5)]
    batch = batch_of(clips, "hi", list(ALPHABETS).index("hi"), ids)
    batch.sounds.noise.zero_()
    size = int(batch.samples.max())
    loss = float(trainee.losses(batch, size)["rnnt"])

    # The same weights, read from NeMo's layout, and the path node by node
    model = IndicConformer(trainee.config)
    model.load({name: values.float() for name, values in nemo_tensors(trainee.model).items()}, "test")
    model.prepare(200)
    samples = batch.sounds.rendered(size, 16_000)
    assert samples[0, : int(batch.samples[0])].numpy() == pytest.approx(
        render(clips[0], 16_000), abs=clips[0].noise * 6
    )
    encoded, frames = model.encode(samples, batch.samples)
    with torch.no_grad():
        trained, trained_frames = trainee.encode(samples, batch.samples)
    assert frames.tolist() == trained_frames.tolist()
    assert torch.allclose(encoded[0, : frames[0]], trained[0, : frames[0]], atol=0.02)  # weights were float16
    total, nodes = 0.0, 0
    for row, clip in enumerate(clips):
        state = tuple(torch.zeros(1, 1, 32) for _ in range(2))
        predicted, state = model.prediction(torch.tensor([model.config.vocab_size]), state)
        heads = model.joint.heads(batch.language)
        middles = [(clip.starts_s[slot] + clip.starts_s[slot + 1]) / 2 for slot in clip.spoken]
        waiting = [(math.floor(at / 0.04), int(token)) for at, token in zip(middles, batch.tokens[row], strict=False)]
        for frame in range(int(frames[row])):
            while True:
                projected = model.joint.enc(encoded[row, frame])[None, None]
                scores = log_softmax(model.joint(projected, model.joint.pred(predicted), heads)[0, 0], -1)
                is_token = bool(waiting) and waiting[0][0] == frame
                token = waiting.pop(0)[1] if is_token else model.config.blank
                total, nodes = total - float(scores[token]), nodes + 1
                if not is_token:
                    break
                predicted, state = model.prediction(torch.tensor([token]), state)
        assert not waiting
    assert loss == pytest.approx(total / nodes, rel=0.01)


@pytest.mark.usefixtures("scripts")
def test_a_synthesizer_learns_the_velocity_that_it_is_sampled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from make_bundled_synthesizer import Trainee, config_values

    from meltcore.models.configs.task_configs import IndicF5Config
    from meltcore.models.tasks import indicf5

    torch.manual_seed(0)
    config = IndicF5Config.read(config_values(size=32, layers=2, longest=30), vocab_size=9)
    trainee = Trainee(config, torch.device("cpu"))
    model = indicf5.IndicF5(config)
    with torch.no_grad():
        for name, values in trainee.model.named_parameters():
            if "modulation" in name or "grn" in name:
                values.normal_(std=0.5)  # training begins with zeros
        for name, values in trainee.model.checkpoint_tensors().items():
            model.checkpoint_tensors()[name].copy_(values)
    model.prepare([8])
    noisy, reference = torch.randn(2, 2, 40, config.mel.num_mels)
    token_ids = torch.randint(1, 10, (2, 40)).index_fill(1, torch.arange(25, 40), indicf5.FILLER)
    times = indicf5.step_times(8)[[2, 5]]
    wanted = trainee.velocity(noisy, reference, token_ids, times)
    monkeypatch.setattr(indicf5, "GUIDANCE", 0.0)
    with torch.inference_mode():
        found = model.velocity(noisy, model.condition(reference, token_ids), model.modulations[[2, 5]])
    assert torch.allclose(found, wanted, atol=1e-4)
    assert float(wanted.detach().std()) > 0.1
    wanted.square().mean().backward()
    assert all(each.grad is not None for each in trainee.transformer_parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("make_bundled_translation", ("--rows=16", "--size=32", "--layers=1", "--sentences=4")),
        ("make_bundled_transcriber", ("--seconds=8", "--max-clip=3", "--size=32", "--layers=1", "--clips=16")),
        ("make_bundled_synthesizer", ("--frames=1000", "--size=32", "--layers=1", "--texts=4")),
    ],
)
def test_a_second_of_training_leaves_a_measured_checkpoint(
    script: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported torch. Tokenizers learn from fewer sentences than the bundled ones."""
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, "--minutes=0.02", "--workers=1", f"--out={tmp_path}", *options])
    if script == "make_bundled_translation":
        monkeypatch.setattr(module.Tokenizers, "train", partial(module.Tokenizers.train, sentences=500))
    assert module.main() == 0
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["parameters"] > 10_000
    assert all(found["problems"] in (4, 16) for found in evaluation["kinds"].values())
    assert evaluation["command"].endswith(shlex.join(["--workers=1", *options])), "without --out=PATH"
    assert "0.02 minutes" in (tmp_path / "README.md").read_text()
