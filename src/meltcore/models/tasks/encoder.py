"""A text encoder of BERT's kind (BERT, XLM-RoBERTa), which computes embeddings of texts or scores of pairs.

It is the post-norm transformer of https://arxiv.org/abs/1810.04805: learned positions, LayerNorms after each block,
biases in all linear layers. A reranker has a classification head above the first token's hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from meltcore.kernels.activation import gelu
from meltcore.kernels.attention.packed import MAX_HEAD_DIM, make_row_tiles, mean_of_rows, packed_attention
from meltcore.kernels.launch import use_triton, without_cudnn
from meltcore.kernels.layer_norm import add_layer_norm, embed_layer_norm
from meltcore.layers.embedding import make_embedding
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.models.tasks.indictrans2 import linear_tensors, norm_tensors
from meltcore.models.tasks.pooling_model import PoolingModel

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": gelu, "relu": functional.relu}
_PREFIXES = ("bert.", "roberta.")
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of LayerNorms in checkpoints converted from TensorFlow
_HEADS_OF_TRAINING = ("cls.", "lm_head.", "pooler.")


class RowBatch(NamedTuple):
    """The rows of a batch. Tokens lie one after another without padding.

    Args:
        indices: [3, tokens]: each token's id, its row in the table of positions, and its type.
        rows: [2, rows]: the first token and the number of tokens of each row.
        tiles: the tiles of queries from `make_row_tiles`. None means that attention needs padded rows.
        max_row_len: the number of tokens of the longest row, unless there are tiles.
        slots: [tokens] int64, each token's index in [rows * max_row_len]. None means that all rows are equally long.
        mask: [rows, 1, 1, max_row_len] bool, True for a token and False for padding. None means no padding.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor | None = None
    max_row_len: int = 0
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class TextEncoderLayer(nn.Module):
    """One layer: attention over all tokens of a text, then the feed-forward block, each followed by its norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self._activation = _ACTIVATIONS[config.activation]

    def forward(self, hidden: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """Return the hidden states after the layer, in the norms' type: [tokens, size] -> [tokens, size].

        `hidden` is overwritten.
        """
        dtype = self.fc1.weight.dtype
        attended = self._attention(self.qkv_proj(hidden.to(dtype)), batch)
        hidden = _add_norm(hidden, self.out_proj(attended), self.attention_norm)
        return _add_norm(hidden, self.fc2(self._activation(self.fc1(hidden.to(dtype)))), self.output_norm)

    def _attention(self, qkv: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """Return attended values [tokens, size] of queries, keys and values [tokens, 3 * size].

        Only attention computes padding. Linear layers compute tokens alone.
        """
        if batch.tiles is not None:
            return packed_attention(qkv, batch.tiles, self.num_heads)
        num_rows, max_row_len = batch.rows.shape[1], batch.max_row_len
        if batch.slots is not None:
            qkv = qkv.new_zeros(num_rows * max_row_len, qkv.shape[1]).index_copy_(0, batch.slots, qkv)
        split = qkv.view(num_rows, max_row_len, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        with without_cudnn():
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=batch.mask)
        flat = attended.transpose(1, 2).reshape(num_rows * max_row_len, -1)
        return flat if batch.slots is None else flat.index_select(0, batch.slots)

    def tensors(self, prefix: str) -> dict[str, WeightLoader]:
        """Return the weight loaders by the tensors' published names."""
        return {
            **linear_tensors([f"{prefix}attention.self.{part}" for part in ("query", "key", "value")], self.qkv_proj),
            **linear_tensors([f"{prefix}attention.output.dense"], self.out_proj),
            **norm_tensors(f"{prefix}attention.output.LayerNorm", self.attention_norm),
            **linear_tensors([f"{prefix}intermediate.dense"], self.fc1),
            **linear_tensors([f"{prefix}output.dense"], self.fc2),
            **norm_tensors(f"{prefix}output.LayerNorm", self.output_norm),
        }


def _add_norm(hidden: torch.Tensor, added: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Return the norm of the sum in the type of `hidden`, which is overwritten."""
    return add_layer_norm(hidden, added, norm.weight, norm.bias, norm.eps, keeps_sum=False)


class TextEncoder(PoolingModel):
    """The whole model. Weights must be loaded and `prepare` called before it is used."""

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.tokens = make_embedding(config.vocab_size, size)
        self.positions = make_embedding(config.num_positions, size)
        self.types = make_embedding(config.num_types, size)
        self.norm = nn.LayerNorm(size, config.norm_eps)
        self.layers = nn.ModuleList(TextEncoderLayer(config) for _ in range(config.num_layers))
        # A dense layer with tanh precedes a reranker's score, in BERT and in XLM-RoBERTa under different names.
        self.dense = nn.Linear(size, size) if config.is_reranker else None
        self.head = nn.Linear(size, 1) if config.is_reranker else None

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.norm.weight.device

    @property
    def is_packed(self) -> bool:
        """Whether kernels compute rows of different lengths without padding, in shapes that depend on no length."""
        head_dim = self.config.hidden_size // self.config.num_heads
        return use_triton(self.norm.weight) and self.dtype.itemsize == 2 and head_dim <= MAX_HEAD_DIM

    def set_dtype(self, dtype: torch.dtype) -> TextEncoder:
        """Convert the weights to `dtype` and return the model.

        With bfloat16, norms and hidden states between layers stay float32, since 8 bits would lose the fourth digit of
        an embedding.
        """
        self.to(dtype)
        if dtype == torch.bfloat16:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.float()
        return self

    def forward(
        self, token_ids: torch.Tensor, lengths: torch.Tensor, second_starts: torch.Tensor, row_lens: Sequence[int]
    ) -> torch.Tensor:
        """See `PoolingModel.forward`."""
        config, num_tokens, max_row_len = self.config, len(token_ids), max(row_lens)
        starts = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(lengths, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self.device) - starts[rows]
        types = (positions >= second_starts[rows]).long().clamp(max=config.num_types - 1)
        indices = torch.stack([token_ids, positions + config.first_position, types])
        batch = RowBatch(indices, torch.stack([starts, lengths]), max_row_len=max_row_len)
        if self.is_packed:
            tiles = torch.from_numpy(make_row_tiles(np.array(row_lens, np.int32)))
            batch = batch._replace(tiles=tiles.to(self.device))
        elif num_tokens < len(lengths) * max_row_len:
            mask = torch.arange(max_row_len, device=self.device) < lengths[:, None]
            batch = batch._replace(slots=rows * max_row_len + positions, mask=mask[:, None, None])
        return self.compute(batch)

    def compute(self, batch: RowBatch) -> torch.Tensor:
        """Return what `forward` returns. A row without tokens gets any value."""
        tables = self.tokens.weight, self.positions.weight, self.types.weight
        hidden = embed_layer_norm(tables, batch.indices, self.norm.weight, self.norm.bias, self.norm.eps)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        if self.dense is not None and self.head is not None:
            scores: torch.Tensor = self.head(torch.tanh(self.dense(hidden[batch.rows[0]].to(self.dtype))))
            return scores.float()
        pooled = hidden[batch.rows[0]].float() if self.config.pooling == "cls" else mean_of_rows(hidden, batch.rows)
        return functional.normalize(pooled, dim=-1) if self.config.is_normalized else pooled

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        loaders: dict[str, WeightLoader] = {
            "embeddings.word_embeddings.weight": self.tokens.weight.data,
            "embeddings.position_embeddings.weight": self.positions.weight.data,
            "embeddings.token_type_embeddings.weight": self.types.weight.data,
            **norm_tensors("embeddings.LayerNorm", self.norm),
        }
        for i, layer in enumerate(self.layers):
            loaders |= layer.tensors(f"encoder.layer.{i}.")  # type: ignore[operator]
        if self.dense is not None and self.head is not None:
            is_bert = self.config.has_pooler
            loaders |= linear_tensors(["pooler.dense" if is_bert else "classifier.dense"], self.dense)
            loaders |= linear_tensors(["classifier" if is_bert else "classifier.out_proj"], self.head)
        return loaders

    def fused_tensors(self) -> dict[str, Any]:
        """Return no tensors: no published checkpoint merges any."""
        return {}

    def canonical_name(self, name: str) -> str:
        """Return the name of a tensor without the prefix of the base model, with the newer names of norms."""
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        stem, _, last = name.rpartition(".")
        return f"{stem}.{_OLD_NAMES[last]}" if stem.endswith("LayerNorm") and last in _OLD_NAMES else name

    def ignored_tensor(self, name: str) -> bool:
        """Return whether a tensor is a table of positions, or belongs to a head that only training uses."""
        return name == "embeddings.position_ids" or name.startswith(_HEADS_OF_TRAINING)
