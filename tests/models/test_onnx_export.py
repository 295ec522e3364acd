"""Networks that torch.onnx exports in the published layout: ours computes what onnxruntime does, batch 1.

onnx and onnxruntime are no dependencies of the tests: `pip install onnx onnxruntime` and run this file by hand.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nemo_modules import CTCDecoder, Encoder, RNNTDecoder, load
from onnx_tools import write_preprocessor, write_texts
from parakeet_tools import CONFIG, nemo_names, reference_ctc, reference_rnnt, speech

from meltcore.engine.transcription.ctc import ctc_greedy
from meltcore.engine.transcription.transducer import transducer_greedy
from meltcore.models.tasks.indicconformer import IndicConformer
from meltcore.models.tasks.transcriber_assets import PublishedAssets

onnx = pytest.importorskip("onnx", reason="not a dependency of the tests; run by hand")
onnxruntime = pytest.importorskip("onnxruntime", reason="not a dependency of the tests; run by hand")
STATES = ["states.1", "onnx::Slice_3"]


def export(module: Any, inputs: Any, path: Path, names: list[str], outputs: list[str], opset: int) -> None:
    """Export as the published files were, with a file for each tensor."""
    axes = {name: {0: "b", 1: "t"} if "audio" not in name else {0: "b", 2: "t"} for name in names if name not in STATES}
    axes = {name: dims if name not in ("length", "target_length") else {0: "b"} for name, dims in axes.items()}
    if names == ["encoder_output"]:
        axes = {"encoder_output": {0: "b", 2: "t"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, inputs, path, dynamo=False, opset_version=opset, input_names=names, output_names=outputs,
            dynamic_axes=axes,
        )  # fmt: skip
    written = onnx.load(path)
    onnx.save_model(written, path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)


class Embed(torch.nn.Module):
    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed = decoder.prediction["embed"]

    def forward(self, targets: torch.Tensor) -> torch.Tensor:
        return self.embed(targets)


@pytest.fixture(scope="module", params=[("whole", 17, False), ("two", 13, True)], ids=str)
def assets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published layout. The second has the decoder in two files, an older opset, and unscoped node names."""
    split, opset, unscoped = request.param
    folder = tmp_path_factory.mktemp("exported")
    path = folder / "assets"
    path.mkdir()
    ctc, rnnts = reference_ctc(), [reference_rnnt(language) for language in range(len(CONFIG.languages))]
    tensors = nemo_names(ctc, rnnts)
    frames = torch.tensor([121])
    export(load(Encoder(), tensors, "encoder."), (torch.randn(1, 80, 121), frames), path / "encoder.onnx",
           ["audio_signal", "length"], ["outputs", "encoded_lengths"], opset)  # fmt: skip
    export(load(CTCDecoder(), tensors, "ctc_decoder."), (torch.randn(1, 64, 9),), path / "ctc_decoder.onnx",
           ["encoder_output"], ["logprobs"], opset)  # fmt: skip
    decoder = load(RNNTDecoder(), tensors, "decoder.")
    state = torch.zeros(CONFIG.prediction_layers, 1, CONFIG.prediction_size)
    if split == "whole":
        targets, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        export(decoder, (targets, length, state, state), path / "rnnt_decoder.onnx",
               ["targets", "target_length", *STATES], ["outputs", "prednet_lengths", "states"], opset)  # fmt: skip
    else:
        export(Embed(decoder), (torch.zeros(1, 1, dtype=torch.int64),), path / "rnnt_decoder_embed.onnx", ["input"],
               ["output"], opset)  # fmt: skip
        export(decoder.prediction["dec_rnn"], (torch.randn(1, 1, CONFIG.prediction_size), state, state),
               path / "rnnt_decoder_rnn.onnx", ["input", "h_i", "c_i"], ["output", "h_o", "c_o"], opset)  # fmt: skip
    linears = {"joint_enc": "joint.enc", "joint_pred": "joint.pred"}
    linears |= {f"joint_post_net_{language}": f"joint.joint_net.2.{language}" for language in CONFIG.languages}
    for name, source in linears.items():
        weight = tensors[f"{source}.weight"]
        layer = load(torch.nn.Linear(weight.shape[1], weight.shape[0]), tensors, f"{source}.")
        export(layer, (torch.randn(1, 1, weight.shape[1]),), path / f"{name}.onnx", ["input"], ["output"], opset)
    export(torch.nn.ReLU(), (torch.randn(1, 1, 24),), path / "joint_pre_net.onnx", ["input"], ["output"], opset)
    write_preprocessor(path / "preprocessor.ts", traced=True, constant=False)
    write_texts(folder)
    if unscoped:
        encoder = onnx.load(path / "encoder.onnx", load_external_data=False)
        for i, node in enumerate(encoder.graph.node):
            node.name = f"{node.op_type}_{i}"
        onnx.save_model(encoder, path / "encoder.onnx")
    assert len(list(path.iterdir())) > 80, "a file for each tensor"
    return folder


class Published:
    """Runs the published files, one clip at a time, as their card says: greedy CTC and RNN-T over onnxruntime."""

    def __init__(self, assets: Path) -> None:
        self._assets = assets / "assets"
        self._sessions: dict[str, Any] = {}
        self._preprocessor = torch.jit.load(self._assets / "preprocessor.ts")

    def run(self, name: str, **values: Any) -> list[Any]:
        if name not in self._sessions:
            self._sessions[name] = onnxruntime.InferenceSession(
                self._assets / f"{name}.onnx", providers=["CPUExecutionProvider"]
            )
        found: list[Any] = self._sessions[name].run(
            None, {key.replace("__", "::"): each for key, each in values.items()}
        )
        return found

    def encode(self, clip: torch.Tensor) -> tuple[Any, Any]:
        features, frames = self._preprocessor(clip[None], torch.tensor([len(clip)]))
        outputs, _ = self.run("encoder", audio_signal=features.numpy(), length=frames.numpy())
        return features, outputs

    def predict(self, token: int, state: list[Any]) -> tuple[Any, list[Any]]:
        if (self._assets / "rnnt_decoder.onnx").exists():
            values = {"targets": np.array([[token]], np.int32), "target_length": np.array([1], np.int32)}
            outputs, *new = self.run("rnnt_decoder", **values, **dict(zip(STATES, state, strict=True)))
            return outputs.transpose(0, 2, 1), new[-2:]
        embedded = self.run("rnnt_decoder_embed", input=np.array([[token]]))[0]
        output, *new = self.run("rnnt_decoder_rnn", input=embedded, h_i=state[0], c_i=state[1])
        return output, new

    def rnnt(self, outputs: Any, language: str) -> list[int]:
        projected = self.run("joint_enc", input=outputs.transpose(0, 2, 1))[0]
        tokens: list[int] = []
        zeros = np.zeros((CONFIG.prediction_layers, 1, CONFIG.prediction_size), np.float32)
        state = [zeros, zeros]
        for frame in range(projected.shape[1]):
            for _ in range(CONFIG.max_symbols):
                predicted, new = self.predict(tokens[-1] if tokens else CONFIG.vocab_size, state)
                joined = projected[:, frame : frame + 1] + self.run("joint_pred", input=predicted)[0]
                joined = self.run("joint_pre_net", input=joined)[0]
                token = int(self.run(f"joint_post_net_{language}", input=joined)[0].argmax())
                if token == CONFIG.blank:
                    break
                tokens.append(token)
                state = new
        return tokens


@pytest.mark.slow
def test_results_are_those_of_onnxruntime(assets: Path) -> None:
    files = PublishedAssets(assets)
    assert files.model_config.features.center_padding == "reflect"
    model = IndicConformer(files.model_config)
    model.load(files.tensors(), str(assets), has_batch_norm=files.has_batch_norm)
    assert not files.has_batch_norm
    model.prepare(200)
    published = Published(assets)
    kept = 0
    for clip in speech(1.0, 2.3, 0.61, 3.17):
        samples, lengths = clip[None], torch.tensor([len(clip)])
        with torch.inference_mode():
            features, outputs = published.encode(clip)
            torch.testing.assert_close(model.log_mel(samples, lengths)[0].transpose(1, 2), features, atol=1e-4, rtol=0)
            encoded, frames = model.encode(samples, lengths)
            torch.testing.assert_close(encoded[0].T, torch.from_numpy(outputs[0]), atol=1e-4, rtol=0)
            logits = published.run("ctc_decoder", encoder_output=outputs)[0]
            for language, name in enumerate(CONFIG.languages):
                size = CONFIG.tokens_per_language
                columns = [*range(language * size, (language + 1) * size), CONFIG.vocab_size]
                theirs = torch.from_numpy(logits[..., columns]).log_softmax(-1)
                ours = model.ctc_logits(encoded, language)
                torch.testing.assert_close(ours.log_softmax(-1), theirs, atol=1e-4, rtol=0)
                assert ctc_greedy(ours, frames, CONFIG.blank) == ctc_greedy(theirs, frames, CONFIG.blank)
                (found,) = transducer_greedy(model, encoded, frames, torch.tensor([language]))
                assert found.tokens == published.rnnt(outputs, name)
                kept += len(found.tokens)
    assert kept > 50
