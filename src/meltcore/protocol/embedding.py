"""Defines the messages about embeddings and scores between an API server and an engine (msgpack over ZeroMQ)."""

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs


class Embed(TaskRequest, tag="embed", array_like=True, frozen=True, kw_only=True):
    """Asks for the embedding of one text, or for a reranker's score of one pair of texts.

    Args:
        token_ids: the token ids of the text or the pair, including special tokens, as int32 in this machine's byte
            order.
        second_start: the position of the first token of a pair's second text; 0 for one text.
        dimensions: the number of values to which an embedding is cut before it is normalized again; 0 keeps all.
    """

    token_ids: bytes
    second_start: int = 0
    dimensions: int = 0


class EmbeddingResult(TaskResult, tag="embedding", array_like=True, frozen=True, kw_only=True):
    """Holds the float32 values of an embedding in this machine's byte order, or one value: a reranker's logit."""

    values: bytes = b""


class EmbeddingOutputs(EngineOutputs[EmbeddingResult, BatchStats], tag="embeddings", array_like=True, frozen=True):
    """Holds the results of one step, one per request."""


class EmbeddingReady(BatchReady, tag="embedding_ready", array_like=True, frozen=True):
    """Reports that an embedding engine can serve.

    An input has at most `max_tokens` tokens, including special tokens. `size` is the number of values of an embedding.
    With `has_pair_prompt` a reranker reads pairs in the prompt of Qwen3-Reranker. `cut_sizes` has the numbers of values
    to which embeddings may be cut; empty allows any, and None allows no cut.
    """

    max_tokens: int
    size: int
    vocab_size: int
    is_reranker: bool
    has_pair_prompt: bool = False
    cut_sizes: tuple[int, ...] | None = None

    def describe_limits(self) -> str:
        """Return a text with the limits of requests."""
        kind = "scores of pairs" if self.is_reranker else f"embeddings of {self.size} values"
        return f"{kind}, inputs of up to {self.max_tokens} tokens, {self.max_cost:,} tokens together"

    def probe(self, request_id: str) -> Embed:
        """Return a request of one token."""
        return Embed(request_id=request_id, token_ids=bytes(4))


ToEngine = Embed | CommonToEngine
FromEngine = EmbeddingOutputs | EmbeddingReady | CommonFromEngine
