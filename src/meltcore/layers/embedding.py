"""The token embedding and the output head, sharded over the vocabulary."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from meltcore.layers.quantization import UNQUANTIZED, EmbeddingWeight, QuantizationMethod
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import MatrixPart, WeightLoader


class ParallelLMHead(nn.Module):
    """Computes logits of the tokens that this rank keeps: the output head. weight: [local tokens, hidden_size]."""

    weight: EmbeddingWeight

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._checkpoint_shape, self._local_tokens = (vocab_size, hidden_size), range(vocab_size)
        self._group: TensorParallelGroup | None = None
        self.quantize(UNQUANTIZED)

    def tensors(self) -> dict[str, WeightLoader]:
        """Return the loaders of the tensors of the checkpoint's matrix [vocab_size, hidden_size].

        The keys are the last part of the tensors' names.
        """
        shape, rows = self._checkpoint_shape, range(len(self._local_tokens))
        return self.weight.tensors(MatrixPart(shape, (self._local_tokens,), range(shape[1]), rows))

    @property
    def local_vocab_size(self) -> int:
        """Number of tokens that this rank keeps."""
        return len(self._local_tokens)

    @property
    def hidden_size(self) -> int:
        """Number of inputs."""
        return self._checkpoint_shape[1]

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's rows of the vocabulary.

        Raises ConfigError if vocab_size is not divisible by the number of ranks.
        """
        self._group = group
        self._local_tokens = group.shard(self._checkpoint_shape[0], "tokens of the vocabulary (vocab_size)")
        self.quantize(self._method)

    def quantize(self, method: QuantizationMethod) -> None:
        """Allocate the weight in the format of `method`. Call this before weights are loaded.

        Raises ValueError if the method does not support embeddings.
        """
        if method.embedding is None:
            raise ValueError("this quantization method does not support embeddings")
        self._method = method
        self.weight = method.embedding((len(self._local_tokens),), self._checkpoint_shape[1])

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits of the tokens that this rank keeps.

        [rows, hidden_size] -> [rows, local tokens] float32: in 16 bits the distance between large logits is up to 1/16,
        so the best tokens of a step may tie. The result is written to `out`, contiguous memory that is new by default.
        """
        if out is None and hidden.dtype != torch.float32:
            out = hidden.new_empty(len(hidden), self.local_vocab_size, dtype=torch.float32)
        return self.weight.matmul(hidden, out=out)


class VocabParallelEmbedding(ParallelLMHead):
    """Looks up the embeddings of tokens. With tied embeddings it is the output head too.

    `scale` is a factor of the embeddings; None leaves them as they are. With `rounds_scale` the factor is rounded to
    the weights' type, as transformers does for Gemma.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, scale: float | None = None, *, rounds_scale: bool = False
    ) -> None:
        super().__init__(vocab_size, hidden_size)
        self._scale, self._rounds_scale = scale, rounds_scale

    def forward(self, token_ids: torch.Tensor) -> ResidualStream:
        """Look up the embeddings of tokens.

        token_ids: [tokens] int64. Returns the start of the residual stream.
        """
        # One rank has a token's row and all others zeros, so the all-reduce is exact in any type.
        embeddings = self.weight.embeddings(token_ids, self._local_tokens.start if self._group else None)
        if self._scale is not None:
            embeddings *= _round_to(self._scale, embeddings.dtype) if self._rounds_scale else self._scale
        return ResidualStream(embeddings, self._group)


@cache
def _round_to(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def make_embedding(num_embeddings: int, size: int) -> nn.Embedding:
    """Return an unsharded embedding. On the meta device its values are not drawn.

    To draw on that device, torch would import its compiler: 0.6 s of CPU time and 50 MB in each engine process.
    """
    if torch.get_default_device().type == "meta":
        empty: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(num_embeddings, size), freeze=False)
        return empty
    return nn.Embedding(num_embeddings, size)
