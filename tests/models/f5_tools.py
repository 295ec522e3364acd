"""Random IndicF5 checkpoints in the published layout, and the published formulas for one utterance, written anew.

Functions of the reference take the checkpoint's tensors by their published names. None of it knows batches or masks.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from meltcore.engine.synthesis.synthesis import load_synthesis_model
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.tasks.indicf5 import IndicF5

Tensors = dict[str, torch.Tensor]
HEADS, HEAD_SIZE = 4, 8
CHARACTERS = " abcdefghijklmnopqrstuvwxyz.,!?'नमसतेकखगा।"
SMALL: dict[str, Any] = {
    "architectures": ["INF5Model"],
    "model_type": "inf5",
    "arch": {
        "dim": 32, "depth": 3, "heads": HEADS, "dim_head": HEAD_SIZE, "ff_mult": 2, "text_dim": 24, "conv_layers": 2,
    },
    "mel_spec": {"target_sample_rate": 24000, "n_fft": 128, "hop_length": 32, "win_length": 128, "n_mel_channels": 12},
    "vocoder": {"dim": 16, "intermediate_dim": 40, "num_layers": 2},
}  # fmt: skip
# Queries and keys are larger than trained ones, so that attention has peaks: a wrong mask or position changes results.
_WEIGHT_STD, _PEAK = 0.15, 1.5


def published_shapes(values: dict[str, Any], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, named as training names them."""
    arch, mel, vocoder = values["arch"], values["mel_spec"], values["vocoder"]
    dim, text, mels, inner = arch["dim"], arch["text_dim"], mel["n_mel_channels"], arch["heads"] * arch["dim_head"]
    linears = {
        "time_embed.time_mlp.0": (dim, 256), "time_embed.time_mlp.2": (dim, dim),
        "input_embed.proj": (dim, 2 * mels + text), "norm_out.linear": (2 * dim, dim), "proj_out": (mels, dim),
    }  # fmt: skip
    for i in range(2):
        linears[f"input_embed.conv_pos_embed.conv1d.{2 * i}"] = (dim, dim // 16, 31)
    norms = {}
    shapes: dict[str, tuple[int, ...]] = {"text_embed.text_embed.weight": (vocab_size + 1, text)}
    for i in range(arch["conv_layers"]):
        block = f"text_embed.text_blocks.{i}."
        linears |= {
            block + "dwconv": (text, 1, 7),
            block + "pwconv1": (2 * text, text),
            block + "pwconv2": (text, 2 * text),
        }
        norms[block + "norm"] = text
        shapes |= {block + "grn.gamma": (1, 1, 2 * text), block + "grn.beta": (1, 1, 2 * text)}
    for i in range(arch["depth"]):
        block = f"transformer_blocks.{i}."
        linears |= {block + f"attn.to_{part}": (inner, dim) for part in "qkv"}
        linears |= {block + "attn.to_out.0": (dim, inner), block + "attn_norm.linear": (6 * dim, dim)}
        linears |= {block + "ff.ff.0.0": (2 * dim, dim), block + "ff.ff.2": (dim, 2 * dim)}
    linears = {f"transformer.{name}": shape for name, shape in linears.items()}
    norms, shapes = ({f"transformer.{name}": shape for name, shape in each.items()} for each in (norms, shapes))
    size, wide = vocoder["dim"], vocoder["intermediate_dim"]
    linears |= {"vocoder.backbone.embed": (size, mels, 7), "vocoder.head.out": (mel["n_fft"] + 2, size)}
    norms |= {"vocoder.backbone.norm": size, "vocoder.backbone.final_layer_norm": size}
    for i in range(vocoder["num_layers"]):
        block = f"vocoder.backbone.convnext.{i}."
        linears |= {block + "dwconv": (size, 1, 7), block + "pwconv1": (wide, size), block + "pwconv2": (size, wide)}
        norms[block + "norm"] = size
        shapes[block + "gamma"] = (size,)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, norm_size in norms.items():
        shapes |= {f"{name}.weight": (norm_size,), f"{name}.bias": (norm_size,)}
    return shapes


def random_tensors(values: dict[str, Any], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(published_shapes(values, len(CHARACTERS)).items()):
        is_norm = "norm" in name and "linear" not in name and name.endswith("weight")
        tensors[name] = torch.randn(shape, generator=generator) * _WEIGHT_STD + float(is_norm)
        if "to_q" in name or "to_k" in name:
            tensors[name] *= _PEAK
    tensors["transformer.text_embed.text_embed.weight"] *= 4  # else positions drown the characters
    return tensors


def published_name(name: str) -> str:
    """The name in IndicF5's file: an average of weights, of modules that were compiled."""
    if name.startswith("vocoder."):
        return name.replace("vocoder.", "vocoder._orig_mod.", 1)
    return f"ema_model._orig_mod.{name}"


def write_checkpoint(folder: Path, values: dict[str, Any], tensors: Tensors) -> None:
    computed = ("ema_model._orig_mod.mel_spec.mel_stft.spectrogram.window", "vocoder._orig_mod.head.istft.window")
    stored = {published_name(name): tensor for name, tensor in tensors.items()}
    folder.mkdir(exist_ok=True)
    save_file(stored | {name: torch.ones(4) for name in computed}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "vocab.txt").write_text("".join(f"{character}\n" for character in CHARACTERS))


def load_model(folder: Path, steps: tuple[int, ...] = (8,)) -> IndicF5:
    checkpoint, device = open_checkpoint(str(folder), files="all"), torch.device("cpu")
    return load_synthesis_model(checkpoint, torch.float32, device, len(CHARACTERS), steps=steps)


# --- the published formulas, for one utterance ----------------------------------------------------------------------


def linear(tensors: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def conv(tensors: Tensors, name: str, hidden: torch.Tensor, groups: int = 1) -> torch.Tensor:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return functional.conv1d(hidden.T[None], weight, bias, padding=weight.shape[2] // 2, groups=groups)[0].T


def norm(hidden: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps=1e-6)


def named_norm(tensors: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
    return norm(hidden, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def reference_text(tensors: Tensors, ids: torch.Tensor, layers: int) -> torch.Tensor:
    hidden = tensors["transformer.text_embed.text_embed.weight"][ids]
    frequencies = 1 / 10_000 ** (torch.arange(0, hidden.shape[1], 2) / hidden.shape[1])
    angles = torch.arange(len(ids))[:, None] * frequencies
    hidden = hidden + torch.cat([angles.cos(), angles.sin()], 1)
    for i in range(layers):
        block = f"transformer.text_embed.text_blocks.{i}"
        wide = conv(tensors, f"{block}.dwconv", hidden, groups=hidden.shape[1])
        wide = functional.gelu(linear(tensors, f"{block}.pwconv1", named_norm(tensors, f"{block}.norm", wide)))
        response = wide.square().sum(0).sqrt()
        response = response / (response.mean() + 1e-6)
        wide = tensors[f"{block}.grn.gamma"][0] * (wide * response) + tensors[f"{block}.grn.beta"][0] + wide
        hidden = hidden + linear(tensors, f"{block}.pwconv2", wide)
    return hidden


def reference_attention(tensors: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in "qkv":
        projected = linear(tensors, f"{name}.to_{part}", hidden)
        if part != "v":  # rotary positions on the first head alone, as complex numbers
            frequencies = 1 / 10_000 ** (torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
            angles = torch.arange(len(hidden))[:, None] * frequencies
            first = torch.view_as_complex(projected[:, :HEAD_SIZE].reshape(len(hidden), -1, 2).contiguous())
            first = torch.view_as_real(first * torch.polar(torch.ones_like(angles), angles)).reshape(len(hidden), -1)
            projected = torch.cat([first, projected[:, HEAD_SIZE:]], 1)
        parts.append(projected.reshape(len(hidden), HEADS, HEAD_SIZE).transpose(0, 1))
    query, key, value = parts
    attended = (query @ key.transpose(1, 2) / math.sqrt(HEAD_SIZE)).softmax(-1) @ value
    return linear(tensors, f"{name}.to_out.0", attended.transpose(0, 1).reshape(len(hidden), -1))


def reference_flow(
    tensors: Tensors, values: dict[str, Any], x: torch.Tensor, cond: torch.Tensor, ids: torch.Tensor, time: torch.Tensor
) -> torch.Tensor:
    """The predicted direction at one time. x, cond: [frames, mels]; ids: [frames], filler 0 after the text's end."""
    frequencies = torch.exp(torch.arange(128) * -(math.log(10_000) / 127))
    angles = 1000 * time * frequencies
    step = linear(tensors, "transformer.time_embed.time_mlp.0", torch.cat([angles.sin(), angles.cos()]))
    step = functional.silu(linear(tensors, "transformer.time_embed.time_mlp.2", functional.silu(step)))
    text = reference_text(tensors, ids, values["arch"]["conv_layers"])
    hidden = linear(tensors, "transformer.input_embed.proj", torch.cat([x, cond, text], 1))
    position = hidden
    for i in (0, 2):
        position = functional.mish(
            conv(tensors, f"transformer.input_embed.conv_pos_embed.conv1d.{i}", position, groups=16)
        )
    hidden = hidden + position
    for i in range(values["arch"]["depth"]):
        block = f"transformer.transformer_blocks.{i}"
        shift, scale, gate, ff_shift, ff_scale, ff_gate = linear(tensors, f"{block}.attn_norm.linear", step).chunk(6)
        hidden = hidden + gate * reference_attention(tensors, f"{block}.attn", norm(hidden) * (1 + scale) + shift)
        wide = linear(tensors, f"{block}.ff.ff.0.0", norm(hidden) * (1 + ff_scale) + ff_shift)
        hidden = hidden + ff_gate * linear(tensors, f"{block}.ff.ff.2", functional.gelu(wide, approximate="tanh"))
    scale, shift = linear(tensors, "transformer.norm_out.linear", step).chunk(2)
    return linear(tensors, "transformer.proj_out", norm(hidden) * (1 + scale) + shift)


def reference_sample(
    tensors: Tensors, values: dict[str, Any], noise: torch.Tensor, cond: torch.Tensor, ids: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """The spectrogram after all steps, of which the reference's frames are replaced by the reference."""
    frames = len(noise)
    padded = functional.pad(cond, (0, 0, 0, frames - len(cond)))
    padded_ids = functional.pad(ids[:frames], (0, max(0, frames - len(ids))))
    times = torch.linspace(0, 1, num_steps + 1)
    times = times - (torch.cos(torch.pi / 2 * times) - 1 + times)
    x = noise
    for time, next_time in pairwise(times):
        flow = reference_flow(tensors, values, x, padded, padded_ids, time)
        null = reference_flow(tensors, values, x, torch.zeros_like(padded), torch.zeros_like(padded_ids), time)
        x = x + (next_time - time) * (flow + 2 * (flow - null))
    return torch.cat([cond, x[len(cond) :]])


def reference_vocoder(tensors: Tensors, values: dict[str, Any], mel: torch.Tensor) -> torch.Tensor:
    """Samples of a spectrogram [frames, mels]."""
    hidden = named_norm(tensors, "vocoder.backbone.norm", conv(tensors, "vocoder.backbone.embed", mel))
    for i in range(values["vocoder"]["num_layers"]):
        block = f"vocoder.backbone.convnext.{i}"
        wide = named_norm(tensors, f"{block}.norm", conv(tensors, f"{block}.dwconv", hidden, groups=hidden.shape[1]))
        wide = functional.gelu(linear(tensors, f"{block}.pwconv1", wide))
        hidden = hidden + tensors[f"{block}.gamma"] * linear(tensors, f"{block}.pwconv2", wide)
    spectrum = linear(tensors, "vocoder.head.out", named_norm(tensors, "vocoder.backbone.final_layer_norm", hidden))
    magnitude, phase = spectrum.T.chunk(2)
    n_fft, hop = values["mel_spec"]["n_fft"], values["mel_spec"]["hop_length"]
    spectrum = magnitude.exp().clamp(max=100) * torch.exp(1j * phase)
    return torch.istft(spectrum, n_fft, hop, window=torch.hann_window(n_fft), center=True)
