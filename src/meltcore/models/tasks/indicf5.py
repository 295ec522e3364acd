"""IndicF5: speech from text and a reference, by flow matching. F5-TTS's first base model in 11 languages of India.

A diffusion transformer (DiT) predicts how noise moves towards a mel spectrogram, given the reference's spectrogram and
the characters of both texts. Vocos turns the result into samples. Paper: https://arxiv.org/abs/2410.06885.

- Rotary positions act on the first head alone, and the filler that lengthens a text to the duration is not masked.
  The model was trained like this. Under other settings weights load without an error, but the speech is nonsense.
- All modulations (AdaLN-zero) depend on the step alone: `prepare` computes them and frees their weights.
- The input projection of reference and text does not depend on the step: `condition` computes it, once per utterance.
- Every operation that mixes frames is masked, so that a row's result does not depend on the rows beside it. In the
  published code, the filler of a longer text changes the result of a shorter text in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meltcore.kernels.activation import linear_gelu
from meltcore.kernels.grouped_convolution import grouped_convolution, taps_first
from meltcore.kernels.layer_norm import add_modulated_layer_norm, modulated_layer_norm
from meltcore.kernels.rotary import rotate_pairs
from meltcore.layers.embedding import make_embedding
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.task_configs import POSITION_GROUPS, IndicF5Config
from meltcore.models.tasks.vocos import MelSpectrogram, Vocos, module_tensors

_NORM_EPS, _GRN_EPS = 1e-6, 1e-6
_TEXT_KERNEL = 7
_POSITION_KERNEL = 31
_TIME_SIZE, _TIME_SCALE = 256, 1000.0
_MAX_WAVELENGTH = 10_000.0
_MODULATIONS, _FINAL_MODULATIONS = 6, 2
GUIDANCE, SWAY = 2.0, -1.0
FILLER = 0  # lengthens a text to its duration; the vocabulary's ids begin after it
_ROTARY_HEAD = 0
# Of the published checkpoint: names that a compiled module and an average of weights add, in any combination.
_ADDED_NAMES = ("ema_model.", "_orig_mod.")
_UNUSED_TENSORS = ("mel_spec.", "vocoder.feature_extractor.", "vocoder.head.istft.", "transformer.rotary_embed.")


class TextLayer(nn.Module):
    """A ConvNeXt-V2 block, whose global response norm runs over the frames of a row."""

    def __init__(self, size: int, feed_forward_size: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(size, size, _TEXT_KERNEL, padding=_TEXT_KERNEL // 2, groups=size)
        self.norm = nn.LayerNorm(size, eps=_NORM_EPS)
        self.pwconv1 = nn.Linear(size, feed_forward_size)
        self.grn = nn.ParameterDict({name: torch.empty(1, 1, feed_forward_size) for name in ("gamma", "beta")})
        self.pwconv2 = nn.Linear(feed_forward_size, size)

    def forward(self, hidden: torch.Tensor, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Return the new hidden states [rows, frames, size]. is_padding: [rows, frames] bool."""
        convolved = self.dwconv(_without(hidden, is_padding).transpose(1, 2)).transpose(1, 2)
        expanded = functional.gelu(self.pwconv1(self.norm(convolved)))
        response = torch.linalg.vector_norm(_without(expanded, is_padding), dim=1, keepdim=True, dtype=torch.float32)
        response = (response / (response.mean(dim=-1, keepdim=True) + _GRN_EPS)).to(expanded.dtype)
        added: torch.Tensor = self.pwconv2(self.grn["gamma"] * (expanded * response) + self.grn["beta"] + expanded)
        return hidden + added


class TextEmbedding(nn.Module):
    """Embeds characters, one per frame from the first on, and filler after them."""

    def __init__(self, config: IndicF5Config) -> None:
        super().__init__()
        size = config.text_size
        self.text_embed = make_embedding(config.vocab_size + 1, size)
        self.text_blocks = nn.ModuleList(
            TextLayer(size, config.text_feed_forward_size) for _ in range(config.num_text_layers)
        )

    def prepare(self, max_frames: int) -> None:
        """Build the table of positions: cosines of all frequencies, then sines."""
        angles = _angles(max_frames, self.text_embed.weight.shape[1], self.text_embed.weight.device)
        self._positions = torch.cat([angles.cos(), angles.sin()], dim=1).to(self.text_embed.weight.dtype)

    def forward(self, token_ids: torch.Tensor, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Return the text's embeddings, [rows, frames, text_size].

        token_ids: [rows, frames] int64; is_padding: [rows, frames] bool.
        """
        hidden: torch.Tensor = self.text_embed(token_ids) + self._positions[: token_ids.shape[1]]
        for layer in self.text_blocks:
            hidden = layer(hidden, is_padding)
        return hidden


class DiTLayer(nn.Module):
    """Attention and feed-forward. The step determines the shift and scale of each norm and the gate of each output."""

    def __init__(self, config: IndicF5Config) -> None:
        super().__init__()
        size, inner_size = config.hidden_size, config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.modulation: nn.Linear | None = nn.Linear(size, _MODULATIONS * size)
        self.qkv = nn.Linear(size, 3 * inner_size)
        self.out = nn.Linear(inner_size, size)
        self.ff_in = nn.Linear(size, config.feed_forward_size)
        self.ff_out = nn.Linear(config.feed_forward_size, size)

    def attend(self, normed: torch.Tensor, rotary: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the attention's output for normed hidden states, [rows, frames, size].

        rotary: [2, frames, head_size / 2], cosines and sines; mask: [rows, 1, 1, frames] bool, the frames that
        attention reads.
        """
        qkv = self.qkv(normed).unflatten(-1, (3, self.num_heads, -1))
        rotate_pairs(qkv[:, :, :2, _ROTARY_HEAD], rotary)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, mask)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward's output for normed hidden states, [rows, frames, size]."""
        output: torch.Tensor = self.ff_out(linear_gelu(normed, self.ff_in.weight, self.ff_in.bias))
        return output


class IndicF5(nn.Module):
    """The whole model. Weights must be loaded and `prepare` called before it is used."""

    def __init__(self, config: IndicF5Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_SIZE, size), nn.SiLU(), nn.Linear(size, size))
        self.text = TextEmbedding(config)
        self.input_proj = nn.Linear(2 * config.mel.num_mels + config.text_size, size)
        self.position_convs = nn.ModuleList(
            nn.Conv1d(size, size, _POSITION_KERNEL, padding=_POSITION_KERNEL // 2, groups=POSITION_GROUPS)
            for _ in range(2)
        )
        self.layers = nn.ModuleList(DiTLayer(config) for _ in range(config.num_layers))
        self.final_modulation: nn.Linear | None = nn.Linear(size, _FINAL_MODULATIONS * size)
        self.out = nn.Linear(size, config.mel.num_mels)
        self.vocoder = Vocos(config.vocoder, config.mel)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations of the transformer. Noise, spectrograms and samples are float32."""
        return self.out.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.out.weight.device

    def prepare(self, steps: Sequence[int]) -> None:
        """Build computed tensors for utterances with these numbers of steps. Weights must not change afterwards.

        Each row of `modulations` and `step_sizes` belongs to one step. `first_step` has the first row for each number
        of steps.
        """
        self.text.prepare(self.config.max_frames)
        angles = _angles(self.config.max_frames, self.config.head_size, self.device)
        self._rotary = torch.stack([angles.cos(), angles.sin()])
        times = [step_times(num_steps) for num_steps in steps]
        self.first_step = {n: sum(len(each) - 1 for each in times[:i]) for i, n in enumerate(steps)}
        self.step_sizes = torch.cat([each.diff() for each in times]).to(self.device)
        with torch.inference_mode():
            self.modulations = self._modulations(torch.cat([each[:-1] for each in times]).to(self.device))
        # 40 % of the published weights
        self.final_modulation = None
        for layer in self.layers:
            layer.modulation = None  # type: ignore[assignment] # torch types an attribute as Tensor | Module
        self.mel_spectrogram = MelSpectrogram(self.config.mel, self.device)
        for conv in self.position_convs:
            assert isinstance(conv, nn.Conv1d)
            conv.weight.data = taps_first(conv.weight.data)
        self.vocoder.prepare()
        self.requires_grad_(False).eval()

    def condition(
        self, reference: torch.Tensor, token_ids: torch.Tensor, is_padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the part of the input projection that is the same in all steps.

        Classifier-free guidance needs it with reference and text, and without them.

        Args:
            reference: [rows, frames, num_mels] float32, zero after the reference's end.
            token_ids: [rows, frames] int64, filler after the text's end.
            is_padding: [rows, frames] bool, True for frames after a row's end. None means that no row has such frames.

        Returns [2 * rows, frames, hidden_size]: all rows with reference and text, then all rows without them.
        """
        both_padding = None if is_padding is None else is_padding.repeat(2, 1)
        text = self.text(torch.cat([token_ids, torch.full_like(token_ids, FILLER)]), both_padding)
        mels = torch.cat([reference, torch.zeros_like(reference)]).to(self.dtype)
        weight = self.input_proj.weight[:, self.config.mel.num_mels :]
        return functional.linear(torch.cat([mels, text], dim=-1), weight, self.input_proj.bias)

    def velocity(
        self,
        noisy: torch.Tensor,
        condition: torch.Tensor,
        modulations: torch.Tensor,
        is_padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the guided direction from noise to speech at one step of each row, [rows, frames, num_mels] float32.

        The method transfers nothing to the host, so it can be captured.

        Args:
            noisy: [rows, frames, num_mels] float32.
            condition: the result of the method `condition`.
            modulations: [rows or 1, modulations, hidden_size], rows of `self.modulations`.
            is_padding: see the method `condition`.
        """
        num_mels, frames = self.config.mel.num_mels, noisy.shape[1]
        projected = functional.linear(noisy.to(self.dtype), self.input_proj.weight[:, :num_mels])
        hidden = projected.repeat(2, 1, 1) + condition
        lengths, mask = None, None
        if is_padding is not None:
            is_frame = ~is_padding.repeat(2, 1)
            lengths, mask = is_frame.sum(1), is_frame[:, None, None]
        if modulations.shape[0] > 1:
            modulations = modulations.repeat(2, 1, 1)
        hidden = hidden + self._relative_positions(hidden, lengths)
        rotary = self._rotary[:, :frames]
        modulation = iter(modulations.unbind(1))
        shift, scale = next(modulation), next(modulation)
        normed = modulated_layer_norm(hidden, scale, shift, _NORM_EPS)
        for layer in self.layers:
            assert isinstance(layer, DiTLayer)
            gate, shift, scale = (next(modulation) for _ in range(3))
            normed = add_modulated_layer_norm(hidden, layer.attend(normed, rotary, mask), gate, scale, shift, _NORM_EPS)
            # The next layer's norm; at the end scale precedes shift.
            gate, shift, scale = (next(modulation) for _ in range(3))
            if layer is self.layers[-1]:
                shift, scale = scale, shift
            normed = add_modulated_layer_norm(hidden, layer.feed_forward(normed), gate, scale, shift, _NORM_EPS)
        with_condition, without = self.out(normed).float().chunk(2)
        return torch.lerp(without, with_condition, 1.0 + GUIDANCE)

    def _relative_positions(self, hidden: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        """Apply the two grouped convolutions through which frames receive information about their neighbors.

        Args:
            hidden: [rows, frames, size].
            lengths: [rows] int64, the number of frames before a row's end.
        """
        for conv in self.position_convs:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            hidden = grouped_convolution(hidden, conv.weight, conv.bias, lengths)
        return hidden

    @property
    def modulation_layers(self) -> list[nn.Linear]:
        """The layers that `prepare` replaces by their outputs, since these depend on the step alone."""
        layers = [*(layer.modulation for layer in self.layers), self.final_modulation]
        return [layer for layer in layers if isinstance(layer, nn.Linear)]

    def _modulations(self, times: torch.Tensor) -> torch.Tensor:
        """Return the modulations at times [steps]: [steps, 6 per layer and 2 at the end, hidden_size]."""
        half = _TIME_SIZE // 2
        # In the published order of operations: angles of up to 1,000 have an error of 6e-5.
        rate = -(math.log(_MAX_WAVELENGTH) / (half - 1))
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=self.device) * rate)
        angles = _TIME_SCALE * times[:, None] * frequencies
        first, last = (self.time_mlp[i] for i in (0, 2))
        embedded = _in_float32(first, torch.cat([angles.sin(), angles.cos()], dim=-1))
        embedded = functional.silu(_in_float32(last, functional.silu(embedded)))
        rows = [
            _in_float32(linear, embedded).unflatten(-1, (-1, self.config.hidden_size))
            for linear in self.modulation_layers
        ]
        return torch.cat(rows, dim=1).to(self.dtype)

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        modules: dict[str, nn.Module] = {
            "time_embed.time_mlp": self.time_mlp,
            "text_embed": self.text,
            "input_embed.proj": self.input_proj,
            **{f"input_embed.conv_pos_embed.conv1d.{2 * i}": conv for i, conv in enumerate(self.position_convs)},
            "proj_out": self.out,
        }
        assert self.final_modulation is not None
        modules["norm_out.linear"] = self.final_modulation
        qkv: dict[str, WeightLoader] = {}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DiTLayer)
            assert layer.modulation is not None
            prefix = f"transformer_blocks.{i}"
            modules[f"{prefix}.attn_norm.linear"] = layer.modulation
            modules |= {f"{prefix}.attn.to_out.0": layer.out, f"{prefix}.ff.ff.0.0": layer.ff_in}
            modules[f"{prefix}.ff.ff.2"] = layer.ff_out
            for kind, merged in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
                for part, values in zip("qkv", merged.data.chunk(3), strict=True):
                    qkv[f"transformer.{prefix}.attn.to_{part}.{kind}"] = values
        loaders = module_tensors({f"transformer.{name}": module for name, module in modules.items()})
        return loaders | qkv | self.vocoder.tensors("vocoder.")

    def fused_tensors(self) -> dict[str, Any]:
        """Return no tensors: no published checkpoint merges any."""
        return {}

    def canonical_name(self, name: str) -> str:
        """Return the name without the prefixes that copies of the checkpoint add.

        Vocos' own files do not have `vocoder`.
        """
        for added in _ADDED_NAMES:
            name = name.replace(added, "")
        return f"vocoder.{name}" if name.startswith(("backbone.", "head.", "feature_extractor.")) else name

    def ignored_tensor(self, name: str) -> bool:
        """Return whether the model computes a tensor itself, or the tensor counts training steps."""
        return name in ("initted", "step") or name.startswith(_UNUSED_TENSORS)


def step_times(num_steps: int) -> torch.Tensor:
    """Return the times of Euler's steps from 0 to 1, [num_steps + 1] float32.

    Sway sampling makes the first steps smaller.
    """
    times = torch.linspace(0, 1, num_steps + 1, dtype=torch.float32)
    return times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)


def _angles(positions: int, size: int, device: torch.device) -> torch.Tensor:
    """Return position times frequency, [positions, size / 2] float32."""
    frequencies = 1.0 / _MAX_WAVELENGTH ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    return torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)


def _in_float32(linear: nn.Module | torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer in float32. It runs once for all utterances, so the precision costs nothing."""
    assert isinstance(linear, nn.Linear), "modulations are computed already"
    return functional.linear(values, linear.weight.float(), linear.bias.float())


def _without(hidden: torch.Tensor, is_padding: torch.Tensor | None) -> torch.Tensor:
    """Return `hidden` [rows, frames, size] with zeros after the rows' ends."""
    return hidden if is_padding is None else hidden.masked_fill(is_padding[:, :, None], 0.0)
