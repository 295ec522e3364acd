"""IndicConformer from its published ONNX and TorchScript files: the same weights and transcripts as from NeMo."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_tools import entry, model, node, tensor, write_assets, write_linear, write_preprocessor, write_texts
from parakeet_tools import CONFIG, build, nemo_names, reference_ctc, reference_rnnt, speech

from meltcore.common.errors import ConfigError
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.engine.transcription.engine import TranscriptionTask
from meltcore.models.checkpoints import onnx_file
from meltcore.models.checkpoints.checkpoint import find_transcriber, is_transcription_model
from meltcore.models.checkpoints.onnx_file import OnnxGraph
from meltcore.models.tasks.indicconformer import IndicConformer
from meltcore.models.tasks.transcriber_assets import PublishedAssets
from meltcore.protocol.transcription import Transcribe
from meltcore.settings.config import EngineConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def nemo_tensors() -> dict[str, torch.Tensor]:
    return nemo_names(reference_ctc(), [reference_rnnt(language) for language in range(len(CONFIG.languages))])


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_assets(folder / "whole", nemo_tensors())
    return folder / "whole"


def loaded(folder: Path) -> IndicConformer:
    files = PublishedAssets(folder)
    network = IndicConformer(files.model_config)
    network.load(files.tensors(), str(folder), has_batch_norm=files.has_batch_norm)
    files.token_texts(network.config)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [{"split": "whole"}, {"split": "two", "external": False}, {"split": "ts", "scoped": False}], ids=str
)
def test_every_form_has_the_weights_of_nemo(form: dict[str, Any], tmp_path: Path) -> None:
    """scoped: False is an export of an older torch, whose nodes do not name their modules."""
    texts = write_assets(tmp_path / "published", nemo_tensors(), **form)
    files = PublishedAssets(tmp_path / "published")
    assert files.model_config == CONFIG
    assert files.token_texts(CONFIG) == texts
    expected = dict(build(nemo_tensors()).named_parameters())
    found = dict(loaded(tmp_path / "published").named_parameters())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6, msg=name)


def test_transcripts_are_those_of_the_weights(assets: Path) -> None:
    task = TranscriptionTask(EngineConfig(model=str(assets), device="cpu", memory_bytes=2**30))
    task.model.load_state_dict(build(nemo_tensors()).state_dict())
    expected = transcripts(task)
    assert transcripts(TranscriptionTask(EngineConfig(model=str(assets), device="cpu", memory_bytes=2**30))) == expected
    assert all(len(text.split()) > 3 for text in expected)
    assert is_transcription_model(str(assets))
    assert find_transcriber(str(assets)) == assets


def transcripts(task: TranscriptionTask) -> list[str]:
    engine = BatchEngine(task)
    pcm = (speech(2.0)[0].clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes()
    for decoder in ("ctc", "rnnt"):
        engine.add(Transcribe(request_id=decoder, samples=pcm, language="kn", decoder=decoder))  # type: ignore[arg-type]
    found: list[Any] = []
    while engine.has_work:
        found += engine.step().outputs
    return [each.text for each in sorted(found, key=lambda each: each.request_id)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_features_follow_the_code_of_the_preprocessor(
    traced: bool, constant: bool, assets: Path, tmp_path: Path
) -> None:
    copy = copied(assets, tmp_path / "copy")
    (copy / "assets" / "preprocessor.ts").unlink()
    write_preprocessor(copy / "assets" / "preprocessor.ts", traced=traced, constant=constant)
    features = PublishedAssets(copy).model_config.features
    assert (features.center_padding, features.drops_last_frame) == ("constant" if constant else "reflect", constant)


def copied(source: Path, target: Path) -> Path:
    """A copy of a folder whose files are links, as those in the hub's cache are."""
    (target / "assets").mkdir(parents=True)
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).symlink_to(path)
    return target


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vocab.json", "vocab.json cannot be read"),
        ("language_masks.json", "language_masks.json cannot be read"),
        ("ctc_decoder.onnx", "assets lacks ctc_decoder.onnx or ctc_decoder.ts"),
        (
            "rnnt_decoder.onnx",
            "has neither rnnt_decoder nor rnnt_decoder_embed and rnnt_decoder_rnn .*no other decoder",
        ),
        ("joint_post_net_kn.onnx", "lacks joint_post_net_kn.onnx or joint_post_net_kn.ts"),
        ("joint_pre_net.onnx", "lacks joint_pre_net.onnx"),
        ("preprocessor.ts", "lacks preprocessor.onnx or preprocessor.ts"),
        ("onnx__MatMul_900", "encoder.onnx .*is in onnx__MatMul_[0-9]+, which is missing"),
    ],
)
def test_missing_part_is_named(name: str, message: str, assets: Path, tmp_path: Path) -> None:
    copy = copied(assets, tmp_path / "copy")
    path = copy / "assets" / name
    if name.startswith("onnx__"):
        path = min((copy / "assets").glob("onnx__MatMul_*"))
    path.unlink()
    with pytest.raises(ConfigError, match=message):
        PublishedAssets(copy).token_texts(CONFIG)


def test_unknown_split_is_named(assets: Path, tmp_path: Path) -> None:
    copy = copied(assets, tmp_path / "copy") / "assets"
    (copy / "rnnt_decoder.onnx").rename(copy / "rnnt_decoder_lstm.onnx")
    with pytest.raises(ConfigError, match=r"has neither rnnt_decoder nor .*; it has rnnt_decoder_lstm.onnx"):
        PublishedAssets(copy.parent)
    (copy / "rnnt_decoder_lstm.onnx").rename(copy / "rnnt_decoder_rnn.onnx")
    with pytest.raises(ConfigError, match=r"lacks rnnt_decoder_embed.onnx or"):
        PublishedAssets(copy.parent)


def replace(folder: Path, name: str, content: bytes | str) -> None:
    path = folder / "assets" / name
    path.unlink()
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_wrong_shapes_and_operations_are_named(assets: Path, tmp_path: Path) -> None:
    def refused(name: str, content: bytes | str, message: str) -> None:
        copy = copied(assets, tmp_path / str(len(list(tmp_path.iterdir()))))
        replace(copy, name, content)
        with pytest.raises(ConfigError, match=message) as error:
            loaded(copy)
        assert name in str(error.value)

    write_linear(tmp_path / "a.onnx", torch.zeros(5, 24), torch.zeros(5))
    refused("joint_post_net_ta.onnx", (tmp_path / "a.onnx").read_bytes(), r"weight has shape \[5, 24\]; .*\[13, 24\]")
    refused("joint_enc.onnx", model([node("Relu", ["x"], "y")], []), "must have one linear layer with a bias; it has 0")
    refused("joint_pre_net.onnx", model([node("Gelu", ["x"], "y")], []), "one of relu, tanh, sigmoid; it computes Gelu")
    refused("rnnt_decoder.onnx", model([node("Relu", ["x"], "y")], []), "must have one embedding; it has 0")
    convolution = node("Conv", ["x", "w", "b"], "y")
    refused("ctc_decoder.onnx", model([convolution], [tensor("w", torch.zeros(37, 64, 1))]), "has no tensor b, which")
    gather = node("Gather", ["e", "targets"], "y")
    table = tensor("e", torch.zeros(37, 24))
    refused("rnnt_decoder.onnx", model([gather], [table]), "must have an LSTM; it has none")
    lstm = node("LSTM", ["x", "w", "r", "b"], "y", "/lstm/LSTM")
    refused(
        "rnnt_decoder.onnx", model([gather, lstm], [table]), "the LSTM /lstm/LSTM cannot be read: its weight 'w' is"
    )
    backward = node("LSTM", ["x", "e", "e", "e"], "y", "/lstm/LSTM", direction="reverse")
    refused("rnnt_decoder.onnx", model([gather, backward], [table]), "cannot be read: it is not a plain one")
    texts = json.loads((assets / "assets" / "vocab.json").read_text())
    refused("vocab.json", json.dumps(texts | {"kn": texts["kn"][:5]}), "kn must have 12 texts, or one more .* has 5")
    refused("vocab.json", json.dumps(texts | {"kn": {"a": 1}}), "kn must be a list of texts")
    masks = json.loads((assets / "assets" / "language_masks.json").read_text())
    refused("language_masks.json", json.dumps(masks | {"kn": masks["ta"]}), "3 languages share tokens")
    refused("language_masks.json", json.dumps(masks | {"kn": [0, 1]}), "kn must be a list of true and false")
    shifted = [False, *masks["kn"][:-2], True]
    refused("language_masks.json", json.dumps(masks | {"kn": shifted}), "kn must be true for the blank and one of 3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemph": 0.95}, "preprocessor.ts sets preemph to 0.95; the features computed here have 0.97"),
        ({"normalize": "all_features"}, "sets normalize to 'all_features'"),
        ({"hop_length": 200}, "sets hop_length to 200; .* have 160"),
        ({"hop_length": 200, "traced": True}, "sets hop_length to 200; .* have 160"),
        ({"log_zero_guard_value": 1e-9}, "sets log_zero_guard_value to 1e-09"),
        ({"window": torch.hann_window(400)}, "featurizer.window differs by"),
        ({"fb": torch.zeros(1, 80, 257)}, "featurizer.fb differs by"),
    ],
)
def test_other_features_are_refused(changes: dict[str, Any], message: str, assets: Path, tmp_path: Path) -> None:
    copy = copied(assets, tmp_path / "copy")
    (copy / "assets" / "preprocessor.ts").unlink()
    write_preprocessor(copy / "assets" / "preprocessor.ts", **changes)
    with pytest.raises(ConfigError, match=message):
        PublishedAssets(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BLANK_ID": 11}, "config.json: BLANK_ID must be 12, as the files in assets are; got 11"),
        ({"SOS": 5}, "SOS must be 12 or 36"),
        ({"PRED_RNN_LAYERS": 3}, "PRED_RNN_LAYERS must be 2"),
        ({"RNNT_MAX_SYMBOLS": 0}, "RNNT_MAX_SYMBOLS must be a whole number from 1"),
    ],
)
def test_contradicting_configuration_is_refused(
    changes: dict[str, Any], message: str, assets: Path, tmp_path: Path
) -> None:
    copy = copied(assets, tmp_path / "copy")
    for name in ("config.json", "assets/vocab.json", "assets/language_masks.json"):
        (copy / name).unlink()
    write_texts(copy, **changes)
    with pytest.raises(ConfigError, match=message):
        PublishedAssets(copy)


VALUES = torch.arange(6.0).view(2, 3)
USE = node("MatMul", ["x", "w"], "y", "/a/MatMul")


def external_file(folder: Path, *tensors: bytes) -> Path:
    (folder / "data").write_bytes(VALUES.numpy().tobytes() * 2)
    path = folder / "a.onnx"
    path.write_bytes(model([USE], tensors))
    return path


def test_external_tensors_are_read_from_their_places(tmp_path: Path) -> None:
    first = tensor("w", VALUES, {"location": "data", "offset": "24", "length": "24"})
    other = tensor("v", VALUES[:1], {"location": "data", "offset": "12", "length": "12"})
    graph = OnnxGraph.read(external_file(tmp_path, first, other))
    assert torch.equal(graph.tensors["w"].read(), VALUES)
    assert torch.equal(graph.tensors["v"].read(), VALUES[1:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "/etc/passwd"}, "w is in '/etc/passwd', which must be a file beside it"),
        ({"location": "../data"}, "which must be a file beside it"),
        ({"location": "a/../../data"}, "which must be a file beside it"),
        ({}, "w is in ''"),
        ({"location": "none"}, "w is in none, which is missing"),
        ({"location": "pipe"}, "w is in pipe, which is missing"),
        ({"location": "data", "offset": "30"}, r"takes 24 bytes; it has 24 from 30 on in data, a file of 48"),
        ({"location": "data", "offset": "-1"}, "the offset '-1'"),
        ({"location": "data", "offset": "9" * 30}, "the offset '999"),
        ({"location": "data", "length": "8"}, "takes 24 bytes; it has 8"),
    ],
)
def test_hostile_external_tensor_is_refused(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=rf"a\.onnx .*{message}"):
        OnnxGraph.read(external_file(tmp_path, tensor("w", VALUES, fields)))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    first = tensor("w", VALUES, {"location": "data", "offset": "0"})
    other = tensor("v", VALUES, {"location": "data", "offset": "20"})
    with pytest.raises(ConfigError, match=r"a\.onnx: v and w overlap in data"):
        OnnxGraph.read(external_file(tmp_path, first, other))
    with pytest.raises(ConfigError, match="two tensors named w"):
        OnnxGraph.read(external_file(tmp_path, first, first))


def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model([USE], [tensor("w", VALUES)])
    path = tmp_path / "a.onnx"
    for content, message in (
        (b"", "it has 0 bytes"),
        (whole[:-1], "begins a field of wire type 2"),
        (b"\xff" * 20, "is not in a number"),
        (b"\x0b" + whole, "begins a field of wire type 3"),
        (whole + whole, "it has 2 graphs"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "begins a field of wire type 2"),
        (b"\x38\x01", "a number is where a message must be"),
        (model([], []), "its graph is empty"),
        (model([entry(4, "MatMul") + entry(3, "/a/MatMul")], []), "its node '/a/MatMul' has no output"),
        (model([USE], [tensor("w", VALUES).replace(b"\x08\x03", b"\x08\x04", 1)]), "w has 24 of 32 bytes"),
        (model([node("a", [b"\xff".decode("latin1")], "y").replace("ÿ".encode(), b"\xff\xff")], []), "decode"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"a.onnx.*{message}"):
            OnnxGraph.read(path).tensors["w"].read()
    path.write_bytes(whole)
    monkeypatch.setattr(onnx_file, "_MAX_FIELDS", 5)
    with pytest.raises(ConfigError, match="more than 5 fields"):
        OnnxGraph.read(path)


def test_merged_equal_tensors_are_named_by_identities(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(model([USE, node("Identity", ["w"], "layers.1.norm.weight")], [tensor("w", VALUES)]))
    assert torch.equal(OnnxGraph.read(path).tensors["layers.1.norm.weight"].read(), VALUES)


def test_hub_id_downloads_the_assets(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    hub_id = "ai4bharat/indic-conformer-600m-multilingual"

    def download(model: str, patterns: list[str]) -> Path:
        asked.append((model, patterns))
        return assets

    monkeypatch.setattr("meltcore.models.checkpoints.checkpoint.download_folder", download)
    assert is_transcription_model(hub_id)
    assert asked == []
    assert find_transcriber(hub_id) == assets
    assert asked == [(hub_id, ["config.json", "assets/*"])]
    assert is_transcription_model("Qwen/Qwen3-0.6B") is False
