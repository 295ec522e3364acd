"""IndicF5 and Vocos against the published formulas, one utterance at a time, and against the published packages."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from f5_tools import (
    CHARACTERS,
    SMALL,
    Tensors,
    load_model,
    random_tensors,
    reference_sample,
    reference_vocoder,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from meltcore.common.errors import ConfigError
from meltcore.engine.synthesis import synthesis
from meltcore.engine.synthesis.synthesis import SpeechSampler, Utterance
from meltcore.engine.synthesis.synthesis_graphs import StepGraphs
from meltcore.kernels import graph_capture
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.configs.task_configs import IndicF5Config, MelConfig
from meltcore.models.tasks import indicf5
from meltcore.models.tasks.indicf5 import IndicF5
from meltcore.models.tasks.vocos import MelSpectrogram, Vocos

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 8
NUM_MELS = SMALL["mel_spec"]["n_mel_channels"]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(SMALL, seed=3)


@pytest.fixture(scope="module")
def folder(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, SMALL, tensors)
    return path


@pytest.fixture
def model(folder: Path) -> IndicF5:
    return load_model(folder, (STEPS, 4))


def utterance(key: str, frames: int, reference_frames: int, characters: int, seed: int, **changes: Any) -> Utterance:
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {
        "key": key,
        "due": (0.0,),
        "reference": torch.randn(reference_frames, NUM_MELS, generator=generator),
        "token_ids": torch.randint(1, len(CHARACTERS) + 1, (characters,), generator=generator).tolist(),
        "frames": frames,
        "first_frame": reference_frames - 1,
        "noise": torch.randn(frames, NUM_MELS, generator=generator),
        "num_steps": STEPS,
    }
    return Utterance(**fields | changes)


def run(model: IndicF5, utterances: list[Utterance], max_batch_frames: int = 10_000) -> dict[str, torch.Tensor]:
    sampler = SpeechSampler(model, max_batch_frames)
    for each in utterances:
        sampler.add(each)
    found = {}
    while not sampler.is_idle:
        found |= {key: torch.from_numpy(samples) for key, samples in sampler.step()}
    return found


def expected(tensors: Tensors, each: Utterance) -> torch.Tensor:
    mel = reference_sample(tensors, SMALL, each.noise, each.reference, torch.tensor(each.token_ids), each.num_steps)[
        each.first_frame :
    ]
    return reference_vocoder(tensors, SMALL, mel)


COMPANY = [
    utterance("short", 50, 20, 18, seed=1),
    utterance("long", 71, 30, 40, seed=2),
    utterance("few steps", 60, 12, 25, seed=3, num_steps=4),
    utterance("middle", 64, 25, 64, seed=4),
]


def test_speech_is_that_of_the_published_formulas(model: IndicF5, tensors: Tensors) -> None:
    for each in COMPANY[1:3]:
        samples = run(model, [each])[each.key]
        reference = expected(tensors, each)
        assert samples.shape == reference.shape == ((each.frames - each.first_frame - 1) * 32,)
        assert reference.abs().max() > 1e-3
        torch.testing.assert_close(samples, reference, atol=1e-4, rtol=1e-4)


def test_company_never_changes_a_result(model: IndicF5) -> None:
    together = run(model, COMPANY)
    for each in COMPANY:
        alone = run(model, [each])[each.key]
        torch.testing.assert_close(together[each.key], alone, atol=1e-5, rtol=1e-5)


def test_half_precision_is_close_to_single(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), files="all")
    half = synthesis.load_synthesis_model(
        checkpoint, torch.bfloat16, torch.device("cpu"), len(CHARACTERS), steps=(STEPS,)
    )
    assert (half.dtype, half.vocoder.out.weight.dtype) == (torch.bfloat16, torch.float32)
    each = COMPANY[1]
    samples, reference = run(half, [each])[each.key], run(load_model(folder), [each])[each.key]
    assert (samples - reference).square().mean() < 0.01 * reference.square().mean()


@pytest.fixture
def mutation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    rotate, angles, attention = indicf5.rotate_pairs, indicf5._angles, torch.nn.functional.scaled_dot_product_attention
    if name == "rotary positions on all heads":
        monkeypatch.setattr(indicf5, "_ROTARY_HEAD", slice(None))
        monkeypatch.setattr(
            indicf5, "rotate_pairs", lambda heads, rotary: [rotate(each, rotary) for each in heads.unbind(3)]
        )
    elif name == "no rotary positions":
        monkeypatch.setattr(indicf5, "rotate_pairs", lambda heads, rotary: None)
    elif name == "positions from 1":
        monkeypatch.setattr(indicf5, "_angles", lambda positions, size, device: angles(positions + 1, size, device)[1:])
    elif name == "sign of guidance":
        monkeypatch.setattr(indicf5, "GUIDANCE", -indicf5.GUIDANCE)
    elif name == "order of steps":
        times = indicf5.step_times
        monkeypatch.setattr(indicf5, "step_times", lambda n: (1 - times(n)).flip(0))
    elif name == "no mask of text":
        forward_text = indicf5.TextEmbedding.forward
        monkeypatch.setattr(indicf5.TextEmbedding, "forward", lambda self, ids, mask: forward_text(self, ids, None))
    elif name == "no mask of attention":
        monkeypatch.setattr(
            torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, mask=None: attention(q, k, v)
        )
    elif name == "no mask of convolutions":
        positions = indicf5.IndicF5._relative_positions
        monkeypatch.setattr(
            indicf5.IndicF5, "_relative_positions", lambda self, hidden, lengths: positions(self, hidden, None)
        )
    elif name == "no mask of the vocoder":
        vocoder = Vocos.forward
        whole = torch.full_like
        monkeypatch.setattr(
            Vocos, "forward", lambda self, mels, frames: vocoder(self, mels, whole(frames, mels.shape[1]))
        )
    return name


@pytest.mark.parametrize(
    "mutation",
    ["rotary positions on all heads", "no rotary positions", "positions from 1", "sign of guidance", "order of steps"],
    indirect=True,
)
def test_a_wrong_formula_changes_speech(mutation: str, folder: Path, tensors: Tensors) -> None:
    each = COMPANY[1]
    reference = expected(tensors, each)
    difference = (run(load_model(folder), [each])[each.key] - reference).abs().max()
    assert difference > 100 * 1e-4 * reference.abs().max(), mutation


@pytest.mark.parametrize(
    "mutation",
    ["no mask of text", "no mask of attention", "no mask of convolutions", "no mask of the vocoder"],
    indirect=True,
)
def test_a_missing_mask_lets_company_change_a_result(mutation: str, model: IndicF5) -> None:
    short = COMPANY[0]
    alone, together = run(model, [short])[short.key], run(model, COMPANY)[short.key]
    assert (alone - together).abs().max() > 100 * 1e-5 * alone.abs().max(), mutation


def test_the_earliest_due_batch_is_computed_first(model: IndicF5) -> None:
    sampler = SpeechSampler(model, 200)
    slow, urgent = utterance("slow", 60, 20, 10, 1, due=(0.0, 5.0)), utterance("urgent", 60, 20, 10, 2, due=(-1.0, 9.0))
    sampler.add(slow)
    sampler.step()
    sampler.add(urgent)
    order = [key for _ in range(2 * STEPS) for key, _ in sampler.step()]
    assert order == ["urgent", "slow"]


def test_batches_are_bounded_and_of_similar_lengths(model: IndicF5) -> None:
    sampler = SpeechSampler(model, 130)
    for i, frames in enumerate((60, 120, 60, 60, 40)):
        sampler.add(utterance(f"u{i}", frames, 20, 10, i, due=(float(i),)))
    batches = []
    while not sampler.is_idle:
        sampler.step()
        batches += [keys for batch in sampler._batches if (keys := [u.key for u in batch.utterances]) not in batches]
    assert batches == [["u0", "u2"], ["u1"], ["u3", "u4"]]


def test_cancelled_utterances_leave_their_batch(model: IndicF5) -> None:
    sampler = SpeechSampler(model, 10_000)
    for each in (*COMPANY, utterance("waiting", 900, 20, 10, 9)):
        sampler.add(each)
    sampler.step()
    sampler.cancel(["short", "middle", "waiting", "unknown"])
    found: dict[str, Any] = {}
    while not sampler.is_idle:
        found |= dict(sampler.step())
    assert sorted(found) == ["few steps", "long"]
    alone = run(model, [COMPANY[1]])["long"]
    torch.testing.assert_close(torch.from_numpy(found["long"]), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [({}, True), ({"power": 2.0}, False), ({"mel_scale": "slaney"}, False), ({"norm": "slaney"}, False),
     ({"hop": 255}, False)],
)  # fmt: skip
def test_spectrograms_are_those_of_transformers(changes: dict[str, Any], is_same: bool) -> None:
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    settings = {"power": 1.0, "mel_scale": "htk", "norm": None, "hop": 256} | changes
    samples = torch.randn(12_000, generator=torch.Generator().manual_seed(2)) * 0.1
    filters = mel_filter_bank(513, 100, 0.0, 12_000.0, 24_000, norm=settings["norm"], mel_scale=settings["mel_scale"])
    reference = spectrogram(
        samples.numpy().astype("float64"), window_function(1024, "hann"), 1024, settings["hop"],
        power=settings["power"], mel_filters=filters, mel_floor=1e-5, log_mel="log",
    ).T  # fmt: skip
    found = MelSpectrogram(MelConfig())(samples).double()
    assert (found.shape == reference.shape and (found - torch.from_numpy(reference)).abs().max() < 1e-4) == is_same


class HostCapturer:
    """Captures for tests without a GPU: a replay computes the step anew from the same tensors, into the same output."""

    def capture(self, step: Any) -> tuple[Any, torch.Tensor]:
        output = step()
        return types.SimpleNamespace(replay=lambda: output.copy_(step())), output


def test_graphs_read_the_batch_that_they_replay_for(model: IndicF5, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "GraphCapturer", HostCapturer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sampler = SpeechSampler(model, 10_000)
    sampler._graphs = StepGraphs(model, (250, 8))
    # Batches of one shape, with padding and without, that take turns; and one too large for a graph.
    rounds = [COMPANY[:1], COMPANY[:3], [COMPANY[0]._replace(noise=COMPANY[0].noise.flip(0))], [*COMPANY, *COMPANY[:1]]]
    for number, company in enumerate(rounds):
        named = [each._replace(key=f"{number}-{i}", due=(float(number),)) for i, each in enumerate(company)]
        expected_samples, found = run(model, named), dict[str, Any]()
        for each in named:
            sampler.add(each)
        urgent = named[0]._replace(key="urgent", due=(-1.0,), noise=named[0].noise * 0.5)
        sampler.step()
        sampler.add(urgent)
        while not sampler.is_idle:
            found |= dict(sampler.step())
        expected_samples |= run(model, [urgent])
        assert found.keys() == expected_samples.keys()
        for name, samples in found.items():
            torch.testing.assert_close(torch.from_numpy(samples), expected_samples[name], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_gpu_speaks_as_the_host_does_with_graphs_and_without(folder: Path, model: IndicF5) -> None:
    checkpoint, device = open_checkpoint(str(folder), files="all"), torch.device("cuda")
    on_gpu = synthesis.load_synthesis_model(checkpoint, torch.float32, device, len(CHARACTERS), steps=(STEPS, 4))
    for company in (COMPANY[:1], COMPANY, [*COMPANY, utterance("fifth", 66, 22, 30, seed=6)]):
        expected_samples = run(model, company)
        moved = [each._replace(reference=each.reference.to(device)) for each in company]
        for _ in range(2):  # the second time, graphs are replayed for other noise and texts
            found = run(on_gpu, moved)
            for name, samples in found.items():
                torch.testing.assert_close(samples, expected_samples[name], atol=1e-3, rtol=1e-3)
            company = [each._replace(noise=each.noise.flip(0), token_ids=each.token_ids[::-1]) for each in company]
            expected_samples = run(model, company)
            moved = [each._replace(reference=each.reference.to(device)) for each in company]


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", ["", "ema_model.", "ema_model._orig_mod."])
def test_names_of_every_copy_are_read(
    added: str, tensors: Tensors, folder: Path, tmp_path: Path, model: IndicF5
) -> None:
    write_checkpoint(tmp_path, SMALL, tensors)
    vocoder = "" if not added else "vocoder."  # Vocos' own file has no name before its modules'
    stored = {
        added + name if name.startswith("transformer.") else name.replace("vocoder.", vocoder): values
        for name, values in tensors.items()
    }
    steps = {"initted": torch.ones(1), "step": torch.ones(1)}
    save_file({name: values.contiguous() for name, values in (stored | steps).items()}, tmp_path / "model.safetensors")
    other = load_model(tmp_path)
    for mine, values in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, values)


def test_missing_and_misshapen_tensors_are_named(folder: Path, tmp_path: Path, tensors: Tensors) -> None:
    write_checkpoint(tmp_path, SMALL, {name: values for name, values in tensors.items() if "proj_out" not in name})
    with pytest.raises(ConfigError, match=r"2 missing tensors: transformer\.proj_out\.bias"):
        load_model(tmp_path)
    (tmp_path / "checkpoints" / "vocab.txt").write_text(" \na\n")
    stored = load_file(folder / "model.safetensors")
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path), files="all")
    with pytest.raises(
        ConfigError, match=r"text_embed\.weight has shape \[43, 24\]; the configuration asks for \[3, 24\]"
    ):
        synthesis.load_synthesis_model(checkpoint, torch.float32, torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("arch", "pe_attn_head", 2), ("arch", "text_mask_padding", True), ("arch", "qk_norm", "rms_norm"),
     ("arch", "dim", 40), ("mel_spec", "win_length", 64)],
)  # fmt: skip
def test_settings_of_other_models_are_refused_by_name(part: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{part}\.{name}"):
        IndicF5Config.read({**SMALL, part: {**SMALL[part], name: value}}, 10)


def test_published_configuration_has_the_published_size() -> None:
    checkpoint = open_checkpoint("ai4bharat/IndicF5", files="config")
    with torch.device("meta"):
        published = IndicF5(IndicF5Config.read(checkpoint.config, 2545))
    assert published.config == IndicF5Config(2545)
    count = sum(values.numel() for values in published.parameters())
    vocoder = sum(values.numel() for values in published.vocoder.parameters())
    assert (round(count / 1e6, 1), round(vocoder / 1e6, 1)) == (350.6, 13.5)


# --- the published packages: large, so installed by hand (docs/synthesis.md) ------------------------------------------


@pytest.fixture
def f5_dit() -> Any:
    """f5-tts's transformer. Its package imports what training needs, so the package is entered beside its __init__."""
    package = pytest.importorskip("f5_tts")
    pytest.importorskip("x_transformers")
    inner = types.ModuleType("f5_tts.model")
    inner.__path__ = [f"{path}/model" for path in package.__path__]
    sys.modules.setdefault("f5_tts.model", inner)
    from f5_tts.model.backbones.dit import DiT

    return DiT


def test_speech_is_that_of_f5_tts(f5_dit: Any, model: IndicF5, tensors: Tensors) -> None:
    from f5_tts.model.cfm import CFM

    arch = SMALL["arch"]
    transformer = f5_dit(
        **arch, text_num_embeds=len(CHARACTERS), mel_dim=NUM_MELS, pe_attn_head=1, text_mask_padding=False,
        attn_mask_enabled=False,
    )  # fmt: skip
    published = {
        name.removeprefix("transformer."): values for name, values in tensors.items() if "transformer." in name
    }
    problems = transformer.load_state_dict(published, strict=False)
    assert problems.unexpected_keys == []
    assert problems.missing_keys == ["rotary_embed.inv_freq"]
    flow = CFM(transformer, mel_spec_kwargs={"n_mel_channels": NUM_MELS})
    for each in COMPANY[:3]:
        torch.manual_seed(5)
        noise = torch.randn(each.frames, NUM_MELS)
        cond, text = each.reference[None], torch.tensor(each.token_ids)[None] - 1
        out, _ = flow.sample(
            cond, text, each.frames, steps=each.num_steps, cfg_strength=2.0, sway_sampling_coef=-1.0, seed=5,
            use_epss=False,
        )  # fmt: skip
        samples = run(model, [each._replace(noise=noise)])[each.key]
        mel = torch.cat([each.reference, out[0, len(each.reference) :]])[each.first_frame :]
        reference = reference_vocoder(tensors, SMALL, mel)
        torch.testing.assert_close(samples, reference, atol=1e-4, rtol=1e-4)


def test_samples_are_those_of_vocos(model: IndicF5, tensors: Tensors) -> None:
    vocos = pytest.importorskip("vocos.models")
    heads = pytest.importorskip("vocos.heads")
    mel, sizes = SMALL["mel_spec"], SMALL["vocoder"]
    backbone = vocos.VocosBackbone(mel["n_mel_channels"], sizes["dim"], sizes["intermediate_dim"], sizes["num_layers"])
    head = heads.ISTFTHead(sizes["dim"], mel["n_fft"], mel["hop_length"], padding="center")
    for part, module in (("backbone", backbone), ("head", head)):
        prefix = f"vocoder.{part}."
        published = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        assert module.load_state_dict(published, strict=False).missing_keys == (
            [] if part == "backbone" else ["istft.window"]
        )
    mels = torch.randn(2, 30, NUM_MELS, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = model.vocoder(mels, torch.tensor([30, 21]))
        for row, frames in enumerate((30, 21)):
            reference = head(backbone(mels[row : row + 1, :frames].transpose(1, 2)))[0]
            torch.testing.assert_close(found[row, : len(reference)], reference, atol=1e-4, rtol=1e-4)


def test_spectrograms_are_those_of_torchaudio() -> None:
    transforms = pytest.importorskip("torchaudio.transforms")
    samples = torch.randn(24_000, generator=torch.Generator().manual_seed(2)) * 0.1
    reference = transforms.MelSpectrogram(24_000, 1024, 1024, 256, n_mels=100, power=1, center=True, norm=None)(samples)
    found = MelSpectrogram(MelConfig())(samples)
    torch.testing.assert_close(found, reference.clamp(min=1e-5).log().T, atol=1e-4, rtol=1e-4)
