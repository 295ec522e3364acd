"""IndicConformer: transcription in 22 Indian languages with a CTC head and an RNN-T decoder on one encoder.

The published model is NeMo's hybrid model with a head per language ("multisoftmax"). Every language has 256 tokens of
its own and shares the blank. The CTC head is one linear layer over all of them: the rows of the language and of the
blank are used. The RNN-T joint network has a linear layer per language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from meltcore.common.errors import ConfigError
from meltcore.layers.embedding import make_embedding
from meltcore.models.configs.task_configs import IndicConformerConfig
from meltcore.models.tasks.conformer import ConformerEncoder
from meltcore.models.tasks.log_mel import LogMel

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
# Of the preprocessor and of training; and biases shared by all layers, which NeMo stores with each layer too.
_UNUSED_TENSORS = ("preprocessor.", "loss.", "wer.", "encoder.pos_bias_")
_BATCH_NORM_EPS = 1e-5
_MAX_NAMES_SHOWN = 5


class TranscriberFiles(Protocol):
    """The files of a checkpoint, in any of the layouts.

    Args:
        path: the path that the user gave.
        has_batch_norm: whether batch norms are separate tensors, not folded into the convolutions.
    """

    path: Path
    has_batch_norm: bool

    @property
    def model_config(self) -> IndicConformerConfig:
        """The sizes of the model. Raises ConfigError for sizes that are missing, invalid or unsupported."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the weights into host memory, by the names of a NeMo checkpoint.

        Raises ConfigError if a file is invalid.
        """
        ...

    def token_texts(self, config: IndicConformerConfig) -> dict[str, list[str]]:
        """Return the text of every token, by language. Raises ConfigError if a text is missing."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class PredictionNetwork(nn.Module):
    """Predicts the next token from the tokens so far: an embedding and an LSTM.

    Tokens are given by their ids within their language, as in NeMo's training and decoding, so languages share the
    first rows of the embedding. The first input is the global blank, whose row is zero in NeMo's checkpoints.
    """

    def __init__(self, config: IndicConformerConfig) -> None:
        super().__init__()
        size = config.prediction_size
        self.embed = make_embedding(config.vocab_size + 1, size)
        self.lstm = nn.LSTM(size, size, config.prediction_layers)

    def forward(
        self, tokens: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the predictions, [clips, prediction_size], and the new state.

        tokens: [clips] int64; state: two tensors, [layers, clips, prediction_size].
        """
        output, hidden, cell = self.embed(tokens), [], []
        # Cell by cell: of a single position cuDNN makes no faster launches, and these can be captured as a graph.
        for layer, weights in enumerate(self.lstm.all_weights):
            output, new_cell = torch.lstm_cell(output, [state[0][layer], state[1][layer]], *weights)
            hidden.append(output)
            cell.append(new_cell)
        return output, (torch.stack(hidden), torch.stack(cell))


class Joint(nn.Module):
    """Joins encoder frames and predictions to logits of one language's tokens and the blank."""

    def __init__(self, config: IndicConformerConfig) -> None:
        super().__init__()
        self.enc = nn.Linear(config.encoder.hidden_size, config.joint_size)
        self.pred = nn.Linear(config.prediction_size, config.joint_size)
        num_languages, tokens = len(config.languages), config.tokens_per_language + 1
        self.heads_weight = nn.Parameter(torch.empty(num_languages, tokens, config.joint_size))
        self.heads_bias = nn.Parameter(torch.empty(num_languages, tokens))
        self._activation = _ACTIVATIONS[config.joint_activation]

    def heads(self, languages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each clip's head: [clips, joint_size, tokens] and [clips, 1, tokens]. languages: [clips] int64."""
        return self.heads_weight[languages].transpose(1, 2), self.heads_bias[languages][:, None]

    def forward(
        self, encoded: torch.Tensor, predicted: torch.Tensor, heads: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return logits [clips, frames, tokens].

        encoded: [clips, frames, joint_size]; predicted: [clips, joint_size].
        """
        weight, bias = heads
        return torch.baddbmm(bias, self._activation(encoded + predicted[:, None]), weight)


class IndicConformer(nn.Module):
    """The whole model. `load` or `fill_dummy`, then `prepare`, must be called before it is used."""

    def __init__(self, config: IndicConformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = ConformerEncoder(config.encoder)
        self.ctc_head = nn.Linear(config.encoder.hidden_size, config.vocab_size + 1)
        self.prediction = PredictionNetwork(config)
        self.joint = Joint(config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.ctc_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.ctc_head.weight.device

    def prepare(self, max_frames: int) -> None:
        """Build computed tensors for clips of up to `max_frames` encoder frames. Weights must not change afterwards."""
        self.log_mel = LogMel(self.config.features, self.device)
        self.encoder.prepare(max_frames)
        self.requires_grad_(False).eval()

    def encoded_frames(self, samples: int) -> int:
        """Return the number of encoder frames of a clip of `samples` samples."""
        return self.config.encoder.encoded_frames(self.config.features.frames(samples))

    def encode(self, samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the encoded clips, [clips, encoded frames, hidden_size], and their frame counts, [clips] int64.

        samples: [clips, samples] float32 from -1 to 1; lengths: [clips] int64, samples per clip.
        """
        features, frames = self.log_mel(samples, lengths)
        encoded: tuple[torch.Tensor, torch.Tensor] = self.encoder(features.to(self.dtype), frames)
        return encoded

    def ctc_logits(self, encoded: torch.Tensor, language: int) -> torch.Tensor:
        """Return the CTC head's logits of one language's tokens and the blank: [..., tokens_per_language + 1]."""
        size = self.config.tokens_per_language
        rows = [slice(language * size, (language + 1) * size), slice(self.config.vocab_size, None)]
        weight = torch.cat([self.ctc_head.weight[row] for row in rows])
        bias = torch.cat([self.ctc_head.bias[row] for row in rows])
        return functional.linear(encoded, weight, bias)

    def load(self, tensors: Mapping[str, torch.Tensor], source: str, *, has_batch_norm: bool = True) -> None:
        """Copy the weights from a NeMo checkpoint, converting types.

        Args:
            tensors: the weights by NeMo's names.
            source: the file, for errors.
            has_batch_norm: whether batch norms are separate tensors, not folded into the convolutions.

        Raises ConfigError that names missing, unexpected and misshapen tensors.
        """
        converted = from_nemo(tensors, self.config, source, has_batch_norm=has_batch_norm)
        parameters = dict(self.named_parameters())
        _raise_for_names(source, "lacks", parameters.keys() - converted.keys())
        _raise_for_names(source, "has unexpected", converted.keys() - parameters.keys())
        for name, values in converted.items():
            if values.shape != parameters[name].shape:
                raise ConfigError(
                    f"{source}: {name} has shape {list(values.shape)}; "
                    f"the configuration asks for {list(parameters[name].shape)}"
                )
        with torch.no_grad():
            for name, values in converted.items():
                parameters[name].copy_(values)

    def fill_dummy(self, seed: int) -> None:
        """Fill the weights with random values of the scale that the model is initialized with."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.no_grad():
            for name, values in self.named_parameters():
                if values.dim() > 1:
                    # In proportion to the inputs, else a sum over thousands of them overflows float16.
                    values.normal_(0.0, values[0].numel() ** -0.5, generator=generator)
                else:
                    values.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            self.prediction.embed.weight[-1] = 0.0


def from_nemo(
    tensors: Mapping[str, torch.Tensor],
    config: IndicConformerConfig,
    source: str = "checkpoint",
    *,
    has_batch_norm: bool = True,
) -> dict[str, torch.Tensor]:
    """Convert a NeMo checkpoint's tensors to the tensors of this module.

    Query, key and value are merged. Batch norms are folded into their convolutions in float32. The heads of all
    languages are stacked. Raises ConfigError if parts of a merged tensor are missing.
    """
    missing: list[str] = []

    def take_tensor(name: str) -> torch.Tensor:
        if name not in remaining:
            missing.append(name)
            return torch.zeros(())
        return remaining.pop(name)

    remaining = {name: values for name, values in tensors.items() if not name.startswith(_UNUSED_TENSORS)}
    converted = {}
    for layer in range(config.encoder.num_layers):
        attention = f"encoder.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [take_tensor(f"{attention}linear_{part}.{kind}") for part in "qkv"]
            if not missing:
                converted[f"{attention}linear_qkv.{kind}"] = torch.cat(parts)
        if not has_batch_norm:
            continue
        convolution = f"encoder.layers.{layer}.conv."
        remaining.pop(f"{convolution}batch_norm.num_batches_tracked", None)
        names = ("weight", "bias", "running_mean", "running_var")
        scale, shift, mean, variance = (take_tensor(f"{convolution}batch_norm.{name}") for name in names)
        weight, bias = (take_tensor(f"{convolution}depthwise_conv.{kind}") for kind in ("weight", "bias"))
        if not missing:
            factor = scale.float() / (variance.float() + _BATCH_NORM_EPS).sqrt()
            converted[f"{convolution}depthwise_conv.weight"] = weight.float() * factor[:, None, None]
            converted[f"{convolution}depthwise_conv.bias"] = (bias.float() - mean.float()) * factor + shift.float()
    for kind in ("weight", "bias"):
        heads = [take_tensor(f"joint.joint_net.{_head_index(remaining)}.{lang}.{kind}") for lang in config.languages]
        if not missing:
            converted[f"joint.heads_{kind}"] = torch.stack(heads)
    _raise_for_names(source, "lacks", missing)
    for name, values in remaining.items():
        own_name = _own_name(name)
        is_pointwise = own_name.startswith(("encoder.layers.", "ctc_head.")) and values.dim() == 3
        converted[own_name] = values[..., 0] if is_pointwise and values.shape[-1] == 1 else values
    return converted


def _own_name(name: str) -> str:
    name = name.replace("ctc_decoder.decoder_layers.0.", "ctc_head.")
    name = name.replace("decoder.prediction.dec_rnn.lstm.", "prediction.lstm.")
    return name.replace("decoder.prediction.", "prediction.")


def _head_index(names: Mapping[str, torch.Tensor]) -> int:
    """Return the index of the heads in `joint_net`.

    The activation precedes them, and so does dropout if it was trained.
    """
    pattern = re.compile(r"joint\.joint_net\.(\d+)\.")
    return max((int(match[1]) for match in map(pattern.match, names) if match), default=1)


def _raise_for_names(source: str, problem: str, names: Sequence[str] | set[str]) -> None:
    if names:
        shown = sorted(names)[:_MAX_NAMES_SHOWN]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        raise ConfigError(f"{source} {problem} {len(names)} tensors: {', '.join(shown)}{more}")
