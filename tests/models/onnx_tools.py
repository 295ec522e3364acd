"""Writes ONNX files without the package onnx, and a small transcriber in the published layout of such files.

A file has the nodes that lead to its weights, as torch.onnx writes them; test_onnx_export.py compares real exports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from nemo_modules import Preprocessor
from parakeet_tools import CONFIG
from torch.nn.utils.fusion import fuse_conv_bn_weights

from meltcore.models.configs.task_configs import LogMelConfig
from meltcore.models.tasks.log_mel import mel_filters

LINEARS = (
    "feed_forward1.linear1", "feed_forward1.linear2", "self_attn.linear_q", "self_attn.linear_k", "self_attn.linear_v",
    "self_attn.linear_pos", "self_attn.linear_out", "feed_forward2.linear1", "feed_forward2.linear2",
)  # fmt: skip


def varint(number: int) -> bytes:
    content = b""
    while number >= 0x80:
        content += bytes([number & 0x7F | 0x80])
        number >>= 7
    return content + bytes([number])


def entry(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: str, values: torch.Tensor, external: dict[str, str] | None = None) -> bytes:
    """A TensorProto of float32 values, in the file or in another one."""
    message = b"".join(entry(1, size) for size in values.shape) + entry(2, 1) + entry(8, name)
    if external is None:
        return message + entry(9, values.contiguous().numpy().tobytes())
    pairs = (entry(13, entry(1, key) + entry(2, value)) for key, value in external.items())
    return message + b"".join(pairs) + entry(14, 1)


def node(op: str, inputs: Iterable[str], output: str, name: str = "", **attributes: int | str | bytes) -> bytes:
    """A NodeProto. attributes: an int, a text, or a TensorProto."""
    message = b"".join(entry(1, value) for value in inputs) + entry(2, output) + entry(3, name) + entry(4, op)
    for key, value in attributes.items():
        kind = 3 if isinstance(value, int) else 4 if isinstance(value, str) else 5
        message += entry(5, entry(1, key) + entry(kind, value))
    return message


def model(nodes: Iterable[bytes], tensors: Iterable[bytes]) -> bytes:
    graph = b"".join(entry(1, each) for each in nodes) + entry(2, "main_graph")
    return entry(1, 8) + entry(7, graph + b"".join(entry(5, each) for each in tensors))


class Graph:
    """Collects nodes and tensors, and writes them. scoped: nodes have the names of their modules."""

    def __init__(self, *, scoped: bool = True, external: bool = False) -> None:
        self.nodes: list[bytes] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._scoped, self._external = scoped, external

    def name(self, module: str, op: str) -> str:
        path = module.split(".")
        for i in range(len(path) - 1, 0, -1):
            if path[i].isdecimal():  # torch writes layers.0 as one part
                path[i - 1 : i + 1] = [".".join(path[i - 1 : i + 1])]
        return "/" + "/".join([*path, op]) if self._scoped and module else f"{op}_{len(self.nodes)}"

    def add(self, name: str, values: torch.Tensor) -> str:
        self.tensors[name] = values
        return name

    def linear(self, source: str, module: str, weight: torch.Tensor, bias: torch.Tensor | None, named: str) -> str:
        number = f"onnx::MatMul_{900 + len(self.tensors)}"
        product = f"{module}_MatMul_output_{len(self.nodes)}"
        inputs = [source, self.add(number, weight.T)]
        self.nodes.append(node("MatMul", inputs, product, self.name(module, "MatMul")))
        if bias is None:
            return product
        result = f"{module}_Add_output_{len(self.nodes)}"
        self.nodes.append(node("Add", [self.add(named, bias), product], result, self.name(module, "Add")))
        return result

    def write(self, path: Path) -> None:
        written = []
        for name, values in self.tensors.items():
            external = None
            if self._external:
                location = name.replace("::", "__")
                (path.parent / location).write_bytes(values.contiguous().numpy().tobytes())
                external = {"location": location}
            written.append(tensor(name, values, external))
        path.write_bytes(model(self.nodes, written))


def write_encoder(path: Path, tensors: dict[str, torch.Tensor], *, scoped: bool = True, external: bool = True) -> None:
    """Write the encoder of a NeMo checkpoint. Its batch norms are folded into convolutions without a name."""
    graph = Graph(scoped=scoped, external=external)
    own = {name.removeprefix("encoder."): value for name, value in tensors.items() if name.startswith("encoder.")}
    skipped = tuple(f".{linear}.weight" for linear in LINEARS)
    for name, values in own.items():
        if not name.endswith(skipped) and not any(part in name for part in ("batch_norm", "depthwise_conv", ".out.")):
            graph.add(name, values)
    out = "pre_encode.out"
    hidden = graph.linear("frames", out, own[f"{out}.weight"], own[f"{out}.bias"], f"{out}.bias")
    scale = tensor("", torch.tensor(math.sqrt(CONFIG.encoder.hidden_size)))
    graph.nodes.append(node("Constant", [], "/pos_enc/Constant_output_0", value=scale))
    graph.nodes.append(node("Mul", [hidden, "/pos_enc/Constant_output_0"], "scaled", "/pos_enc/Mul"))
    for layer in range(CONFIG.encoder.num_layers):
        prefix = f"layers.{layer}"
        for linear in LINEARS:
            module = f"{prefix}.{linear}"
            graph.linear("x", module, own[f"{module}.weight"], own.get(f"{module}.bias"), f"{module}.bias")
        norm = [own[f"{prefix}.conv.batch_norm.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
        convolution = f"{prefix}.conv.depthwise_conv"
        folded = fuse_conv_bn_weights(
            own[f"{convolution}.weight"], own[f"{convolution}.bias"], norm[0], norm[1], 1e-5, norm[2], norm[3]
        )
        names = [graph.add(f"onnx::Conv_{len(graph.tensors)}", values.detach()) for values in folded]
        graph.nodes.append(node("Conv", ["x", *names], f"{module}_c", graph.name(convolution, "Conv"), group=64))
    graph.write(path)


def write_linear(path: Path, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Write a linear layer that was exported alone, so that its module has no name."""
    if path.suffix == ".ts":
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight.reshape(layer.weight.shape), "bias": bias})
        torch.jit.save(torch.jit.script(layer.eval()), path)
        return
    graph = Graph()
    if weight.dim() == 3:
        names = [graph.add("decoder_layers.0.weight", weight), graph.add("decoder_layers.0.bias", bias)]
        graph.nodes.append(node("Conv", ["encoder_output", *names], "logits", "/decoder_layers/decoder_layers.0/Conv"))
    else:
        graph.linear("input", "", weight, bias, "bias")
    graph.write(path)


def onnx_gates(values: torch.Tensor) -> torch.Tensor:
    """An LSTM's gates (input, forget, cell, output) in ONNX's order: input, output, forget, cell."""
    return torch.cat([values.chunk(4)[gate] for gate in (0, 3, 1, 2)])


def add_lstm(graph: Graph, weights: dict[str, torch.Tensor]) -> None:
    for layer in range(CONFIG.prediction_layers):
        w, r, *biases = (
            onnx_gates(weights[f"{kind}_l{layer}"]) for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        values = [w[None], r[None], torch.cat(biases)[None]]
        names = [graph.add(f"onnx::LSTM_{10 * layer + i}", each) for i, each in enumerate(values)]
        inputs = ["x", *names, "", "h", "c"]
        name = f"/dec_rnn/lstm/LSTM_{layer}"
        graph.nodes.append(node("LSTM", inputs, f"y{layer}", name, hidden_size=CONFIG.prediction_size))


def write_decoder(folder: Path, tensors: dict[str, torch.Tensor], split: str) -> None:
    """Write the prediction network: split is "whole" (one ONNX file), "two" or "ts" (TorchScript)."""
    embedding = tensors["decoder.prediction.embed.weight"]
    prefix = "decoder.prediction.dec_rnn.lstm."
    weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if split == "ts":
        from nemo_modules import RNNTDecoder, load

        torch.jit.save(
            torch.jit.script(_Prediction(load(RNNTDecoder(), tensors, "decoder."))), folder / "rnnt_decoder.ts"
        )
        return
    embed, rnn = Graph(), Graph()
    for part in {"whole": (rnn,), "two": (embed,)}[split]:
        part.nodes.append(node("Gather", [part.add("prediction.embed.weight", embedding), "targets"], "embedded"))
    add_lstm(rnn, weights)
    rnn.write(folder / ("rnnt_decoder.onnx" if split == "whole" else "rnnt_decoder_rnn.onnx"))
    if split == "two":
        embed.write(folder / "rnnt_decoder_embed.onnx")


class _Prediction(torch.nn.Module):
    """A prediction network with typed calls, which TorchScript needs."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed, self.lstm = decoder.prediction["embed"], decoder.prediction["dec_rnn"].lstm

    def forward(self, targets: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.embed(targets))[0]


def write_texts(folder: Path, **config: int) -> dict[str, list[str]]:
    """Write config.json, vocab.json and language_masks.json. Returns the texts of tokens."""
    tokens, languages = CONFIG.tokens_per_language, CONFIG.languages
    texts = {
        language: [f"{'▁' if i % 3 == 0 else ''}{language}{i}" for i in range(tokens)] for language in sorted(languages)
    }
    masks = {
        language: [
            i // tokens == languages.index(language) or i == CONFIG.vocab_size for i in range(CONFIG.vocab_size + 1)
        ]
        for language in sorted(languages)
    }
    values = {"model_type": "iasr", "BLANK_ID": CONFIG.blank, "SOS": CONFIG.vocab_size, "RNNT_MAX_SYMBOLS": 10,
              "PRED_RNN_LAYERS": 2, "PRED_RNN_HIDDEN_DIM": 24, **config}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "assets" / "vocab.json").write_text(json.dumps({name: [*each, "|"] for name, each in texts.items()}))
    (folder / "assets" / "language_masks.json").write_text(json.dumps(masks))
    return texts


def write_preprocessor(path: Path, *, traced: bool = False, constant: bool = True, **changes: Any) -> None:
    """Write preprocessor.ts. changes: attributes of the features."""
    preprocessor = Preprocessor(mel_filters(LogMelConfig()), constant).eval()
    for name, value in changes.items():
        setattr(preprocessor.featurizer, name, value)
    example = (torch.randn(1, 16_000), torch.tensor([16_000]))
    script = torch.jit.trace(preprocessor, example) if traced else torch.jit.script(preprocessor)
    torch.jit.save(script, path)


def write_assets(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    split: str = "whole",
    scoped: bool = True,
    external: bool = True,
) -> dict[str, list[str]]:
    """Write a transcriber as it is published. tensors: by NeMo's names. Returns the texts of tokens by language."""
    assets = folder / "assets"
    assets.mkdir(parents=True)
    write_preprocessor(assets / "preprocessor.ts", traced=not scoped)
    write_encoder(assets / "encoder.onnx", tensors, scoped=scoped, external=external)
    end = "ts" if split == "ts" else "onnx"
    parts = {"ctc_decoder": "ctc_decoder.decoder_layers.0", "joint_enc": "joint.enc", "joint_pred": "joint.pred"}
    parts |= {f"joint_post_net_{language}": f"joint.joint_net.2.{language}" for language in CONFIG.languages}
    for name, source in parts.items():
        write_linear(assets / f"{name}.{end}", tensors[f"{source}.weight"], tensors[f"{source}.bias"])
    write_decoder(assets, tensors, split)
    if split == "ts":
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), assets / "joint_pre_net.ts")
    else:
        (assets / "joint_pre_net.onnx").write_bytes(model([node("Relu", ["input"], "output")], []))
    return write_texts(folder)
