"""The Conformer encoder of NeMo: convolutional subsampling, then blocks of attention, convolution and feed-forward.

A batch is padded to its longest clip. Every operation that mixes frames is masked, so that a clip's result does not
depend on the clips beside it. Modules have the names in NeMo's checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from meltcore.kernels.launch import without_cudnn
from meltcore.models.configs.task_configs import MAX_SUBSAMPLING_ELEMENTS, ConformerConfig

_SUBSAMPLING_KERNEL, _SUBSAMPLING_STRIDE = 3, 2


class Subsampling(nn.Module):
    """Shortens the features by `subsampling_factor` with convolutions of stride 2, then projects to `hidden_size`."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        channels, mels = config.subsampling_channels, config.num_mels
        self._channels = channels
        self.max_elements = MAX_SUBSAMPLING_ELEMENTS
        layers: list[nn.Module] = []
        for stage in range(round(math.log2(config.subsampling_factor))):
            is_depthwise = stage > 0 and config.subsampling == "dw_striding"
            layers.append(
                nn.Conv2d(
                    channels if stage else 1,
                    channels,
                    _SUBSAMPLING_KERNEL,
                    _SUBSAMPLING_STRIDE,
                    padding=_SUBSAMPLING_KERNEL // 2,
                    groups=channels if is_depthwise else 1,
                )
            )
            if is_depthwise:
                layers.append(nn.Conv2d(channels, channels, 1))
            layers.append(nn.ReLU())
            mels = -(-mels // _SUBSAMPLING_STRIDE)
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * mels, config.hidden_size)

    def forward(self, features: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shortened features [clips, encoded frames, hidden_size] and the clips' encoded frame counts.s.

        features: [clips, frames, num_mels], frames: [clips] int64.
        """
        clip_elements = self._channels * features.shape[1] * features.shape[2] // _SUBSAMPLING_STRIDE**2
        rows = max(1, self.max_elements // max(1, clip_elements))
        parts = [
            self._subsample(features[start : start + rows], frames[start : start + rows])
            for start in range(0, len(features), rows)
        ]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        for layer in self.conv:
            if isinstance(layer, nn.Conv2d) and layer.stride[0] > 1:
                frames = subsampled_frames(frames)
        return hidden, frames

    def _subsample(self, features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        hidden = features[:, None]
        for layer in self.conv:
            hidden = convolve(layer, hidden) if isinstance(layer, nn.Conv2d) and hidden.is_cuda else layer(hidden)
            if isinstance(layer, nn.Conv2d) and layer.stride[0] > 1:
                frames = subsampled_frames(frames)
            elif isinstance(layer, nn.ReLU):  # the next convolution reads a frame beyond a clip's last one
                is_padding = padding_mask(frames, hidden.shape[2])
                hidden = hidden.masked_fill_(is_padding[:, None, :, None], 0.0)
        subsampled: torch.Tensor = self.out(hidden.transpose(1, 2).flatten(2))
        return subsampled


class ConformerFeedForward(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_size, config.feed_forward_size)
        self.linear2 = nn.Linear(config.feed_forward_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output, [..., hidden_size], of the two layers."""
        output: torch.Tensor = self.linear2(functional.silu(self.linear1(hidden)))
        return output


class RelativeAttention(nn.Module):
    """Full attention in which a learned projection of the distance between two frames adds to their score.

    The score is computed as in Transformer-XL (Dai et al., 2019): score = ((query + u) key + (query + v) position) /
    sqrt(head size).
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_heads
        self.linear_qkv = nn.Linear(size, 3 * size)
        self.linear_out = nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(self.num_heads, size // self.num_heads))
        self.pos_bias_v = nn.Parameter(torch.empty(self.num_heads, size // self.num_heads))

    def project_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the keys of relative positions: [positions, hidden_size] -> [num_heads, head size, positions]."""
        keys: torch.Tensor = self.linear_pos(positions).unflatten(-1, (self.num_heads, -1))
        return keys.permute(1, 2, 0).contiguous()

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Attend over the frames of each clip and return the attention's output.

        Args:
            hidden: [clips, frames, hidden_size].
            positions: [num_heads, head size, 2 * frames - 1], ordered from the largest positive distance to the largest
                negative distance.
            is_padding: [clips, frames] bool.

        Returns [clips, frames, hidden_size].
        """
        query, key, value = self.linear_qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scale = query.shape[-1] ** -0.5
        by_position = (query + self.pos_bias_v[:, None]) @ positions
        bias = (relative_shift(by_position) * scale).masked_fill(is_padding[:, None, None], -math.inf)
        attended = functional.scaled_dot_product_attention(
            query + self.pos_bias_u[:, None], key, value, attn_mask=bias, scale=scale
        )
        output: torch.Tensor = self.linear_out(attended.transpose(1, 2).flatten(2))
        return output


class ConvolutionModule(nn.Module):
    """A gated depthwise convolution over time. Its batch norm is folded into it when weights are loaded."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel
        self.pointwise_conv1 = nn.Linear(size, 2 * size)
        self.depthwise_conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=size)
        self.pointwise_conv2 = nn.Linear(size, size)

    def forward(self, hidden: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Return [clips, frames, hidden_size]."""
        gated = functional.glu(self.pointwise_conv1(hidden), dim=-1).masked_fill(is_padding[:, :, None], 0.0)
        mixed = self.depthwise_conv(gated.transpose(1, 2)).transpose(1, 2)
        output: torch.Tensor = self.pointwise_conv2(functional.silu(mixed))
        return output


class ConformerLayer(nn.Module):
    """One block: half a feed-forward, attention, convolution, another half of a feed-forward, and a norm."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_feed_forward1, self.feed_forward1 = nn.LayerNorm(size), ConformerFeedForward(config)
        self.norm_self_att, self.self_attn = nn.LayerNorm(size), RelativeAttention(config)
        self.norm_conv, self.conv = nn.LayerNorm(size), ConvolutionModule(config)
        self.norm_feed_forward2, self.feed_forward2 = nn.LayerNorm(size), ConformerFeedForward(config)
        self.norm_out = nn.LayerNorm(size)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Return [clips, frames, hidden_size]."""
        hidden = hidden + 0.5 * self.feed_forward1(self.norm_feed_forward1(hidden))
        hidden = hidden + self.self_attn(self.norm_self_att(hidden), positions, is_padding)
        hidden = hidden + self.conv(self.norm_conv(hidden), is_padding)
        hidden = hidden + 0.5 * self.feed_forward2(self.norm_feed_forward2(hidden))
        output: torch.Tensor = self.norm_out(hidden)
        return output


class ConformerEncoder(nn.Module):
    """The whole encoder. `prepare` must be called once the weights are loaded."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_encode = Subsampling(config)
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.num_layers))
        self.max_frames = 0
        self._positions: list[torch.Tensor] = []  # per layer, of distances below max_frames

    def prepare(self, max_frames: int) -> None:
        """Project the relative positions of clips of up to `max_frames` encoded frames, once for all batches."""
        weight = self.pre_encode.out.weight
        positions = sinusoids(max_frames, self.config.hidden_size, weight.device).to(weight.dtype)
        with torch.inference_mode():
            self._positions = [layer.self_attn.project_positions(positions) for layer in self.layers]  # type: ignore[union-attr, operator]
        self.max_frames = max_frames

    def forward(self, features: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the features of clips.

        Args:
            features: [clips, frames, num_mels] in the encoder's type.
            frames: [clips] int64, the number of frames of each clip.

        Returns [clips, encoded frames, hidden_size] and the clips' encoded frame counts. Frames of the result after a
        clip's end are undefined.
        """
        with without_cudnn():
            hidden, encoded_frames = self.pre_encode(features, frames)
            if self.config.scales_input:
                hidden = hidden * math.sqrt(self.config.hidden_size)
            size = hidden.shape[1]
            assert size <= self.max_frames, f"{size} frames, prepared for {self.max_frames}"
            is_padding = padding_mask(encoded_frames, size)
            first = self.max_frames - size
            for layer, positions in zip(self.layers, self._positions, strict=True):
                hidden = layer(hidden, positions[..., first : first + 2 * size - 1], is_padding)
        return hidden, encoded_frames


def convolve(layer: nn.Conv2d, hidden: torch.Tensor) -> torch.Tensor:
    """Return the layer's output. Convolutions of one channel or one pixel are a GEMM of all clips.

    Without cuDNN torch would compute them clip by clip. hidden: [clips, channels, rows, columns].
    """
    size, stride = layer.kernel_size[0], layer.stride[0]
    if layer.groups > 1 or (size > 1 and layer.in_channels > 1):
        convolved: torch.Tensor = layer(hidden)
        return convolved
    assert layer.bias is not None
    padding = int(layer.padding[0])
    windows = functional.pad(hidden, [padding] * 4).unfold(2, size, stride).unfold(3, size, stride)
    clips, channels, rows, columns = windows.shape[:4]
    pixels = windows.permute(0, 1, 4, 5, 2, 3).reshape(clips, channels * size**2, rows * columns)
    weight = layer.weight.flatten(1).expand(clips, -1, -1)
    return torch.baddbmm(layer.bias[:, None], weight, pixels).view(clips, -1, rows, columns)


def sinusoids(max_frames: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the embeddings of the distances from max_frames - 1 down to 1 - max_frames.

    Returns [2 * max_frames - 1, size] float32. Sine and cosine of a frequency are in neighboring columns.
    """
    distances = torch.arange(max_frames - 1, -max_frames, -1, dtype=torch.float32, device=device)
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    angles = distances[:, None] / 10000.0**exponents
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def relative_shift(scores: torch.Tensor) -> torch.Tensor:
    """Return a view [..., frames, frames] of scores by distance, [..., frames, 2 * frames - 1].

    Entry (i, j) of the result is the score of distance i - j, which is in column j - i + frames - 1.
    """
    scores = scores.contiguous()
    *batch_strides, row_stride, column_stride = scores.stride()
    frames = scores.shape[-2]
    shape = (*scores.shape[:-1], frames)
    strides = (*batch_strides, row_stride - column_stride, column_stride)
    return scores.as_strided(shape, strides, scores.storage_offset() + frames - 1)


def subsampled_frames(frames: torch.Tensor) -> torch.Tensor:
    """Return the frame counts after one convolution of stride 2."""
    return torch.div(frames - 1, _SUBSAMPLING_STRIDE, rounding_mode="floor") + 1


def padding_mask(frames: torch.Tensor, size: int) -> torch.Tensor:
    """Return [clips, size] bool, which is True for a frame after the end of its clip."""
    return torch.arange(size, device=frames.device) >= frames[:, None]
