"""The backend of an embedding model or a reranker whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.protocol.embedding import Embed, EmbeddingReady
from meltcore.serve.engines.batch_backend import BatchBackend
from meltcore.serve.requests.admission import TOKENS
from meltcore.serve.tasks.generation.prompts import encode_all, encode_each, encode_prompts, without_middle
from meltcore.serve.tasks.generation.text_model import find_checkpoint
from meltcore.text.tokenizer import Tokenizer

MAX_INPUTS = 2048  # of one request, as OpenAI's API has it
# Messages of a replica that the queue lets through: enough short ones for a batch of the engine.
_SLOT_TOKENS, _MIN_SLOTS = 32, 64
# The prompt of Qwen3-Reranker, from its model card.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_MAX_INSTRUCTION = 4096  # characters
_PROMPT_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_DOCUMENT = "<Document>:"
_PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Embedded(NamedTuple):
    """The values of each input as bytes of float32, and the number of tokens of all inputs."""

    values: list[bytes]
    num_tokens: int


class Scores(NamedTuple):
    """One score per pair of texts, and the number of tokens of all inputs.

    A reranker scores from 0 to 1. Cosines of embeddings are from -1 to 1.
    """

    values: list[float]
    num_tokens: int


class _Encoded(NamedTuple):
    """The tokens of one text or of one pair of texts.

    Args:
        token_ids: the token ids, including special tokens.
        second_start: the position of the first token of type 1; 0 if all tokens have one type.
        num_first: the number of tokens before a pair's second text, which a cut keeps; 0 for one text.
        num_last: the number of tokens at the end that a cut keeps.
    """

    token_ids: list[int]
    second_start: int = 0
    num_first: int = 0
    num_last: int = 1


class EmbeddingBackend(BatchBackend):
    """Tokenizes inputs and sends each input to a replica. An input of a reranker is a pair of texts."""

    purpose = "computes embeddings or scores: POST /v1/embeddings, /v1/rerank and /v1/score"
    unit = TOKENS

    def load(self) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError if its files are missing or invalid."""
        return Tokenizer.from_checkpoint(find_checkpoint(self.config), allow_missing=self.config.load_format == "dummy")

    def open(self, text: Tokenizer, engine: EmbeddingReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        self.slots = max(_MIN_SLOTS, engine.max_cost // _SLOT_TOKENS)
        super().open(text, engine, created)

    def facts(self, ready: EmbeddingReady) -> Mapping[str, Any]:
        """Return the maximum number of tokens of an input, and the dimensions of an embedding (None for a reranker)."""
        return {"max_model_len": ready.max_tokens, "dimensions": None if ready.is_reranker else ready.size}

    async def embed(
        self, inputs: str | list[str | int | list[int]], dimensions: int | None, truncate: int | None
    ) -> Embedded:
        """Return the embedding of each input. Each has only its first `dimensions` values, if this is given.

        Inputs with more than `truncate` tokens are cut to this number, where -1 is the model's limit. None refuses
        inputs that exceed the model's limit. Raises RequestError (400, 429, 500, 503, 504).
        """
        ready: EmbeddingReady = self._loaded()
        if ready.is_reranker:
            raise RequestError(f"{self.names[0]} is a reranker; it answers /v1/rerank and /v1/score", param="model")
        if dimensions is not None:
            self._check_dimensions(dimensions, ready)
        limit = _truncation(truncate, ready.max_tokens)
        ids = await encode_prompts(
            *(self._text, ready.vocab_size, inputs, "input"),
            context=None if limit else ready.max_tokens,
            num_kept=limit,
            most=MAX_INPUTS,
        )
        fields = [(f"input[{index}]",) for index in range(len(ids))]
        return await self._results([_Encoded(each) for each in ids], fields, limit, dimensions or 0)

    def _check_dimensions(self, dimensions: int, ready: EmbeddingReady) -> None:
        """Raise RequestError (400) if embeddings may not be cut to a number of values."""
        if not 1 <= dimensions <= ready.size:
            raise RequestError(f"dimensions is {dimensions}; it must be 1 to {ready.size}", param="dimensions")
        if dimensions == ready.size or ready.cut_sizes == () or dimensions in (ready.cut_sizes or ()):
            return
        if ready.cut_sizes is None:
            reason = (
                f"{self.names[0]} is not known to be trained for shorter embeddings (Matryoshka), so it must be "
                f"{ready.size} or left out. is_matryoshka: true in its config.json allows others"
            )
        else:
            reason = f"it must be one of {', '.join(map(str, sorted({*ready.cut_sizes, ready.size})))}"
        raise RequestError(f"dimensions is {dimensions}; {reason}", param="dimensions")

    async def score(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        params: tuple[str, str],
        truncate: int | None,
        instruction: str | None,
    ) -> Scores:
        """Return a score for each pair of a first and a second text. One first text belongs to all second texts.

        `params` are the request's fields with these texts, for errors. For an embedding model the score is the cosine
        of the two embeddings, and equal texts are embedded once. Inputs are cut to `truncate` tokens as in `embed`; of
        a reranker's pairs only the second texts are cut. Raises RequestError (400, 429, 500, 503, 504).
        """
        ready: EmbeddingReady = self._loaded()
        if instruction is not None and not ready.has_pair_prompt:
            raise RequestError(f"{self.names[0]} reads no instruction; leave it out", param="instruction")
        if instruction is not None and len(instruction) > _MAX_INSTRUCTION:
            raise RequestError(
                f"instruction has {len(instruction)} characters; at most {_MAX_INSTRUCTION} are read with each pair",
                param="instruction",
            )
        limit = _truncation(truncate, ready.max_tokens)
        # Texts that are far too long are refused before any pair is tokenized.
        token_ids: dict[str, list[int]] = {}
        for param, texts in zip(params, (firsts, seconds), strict=True):
            if ready.is_reranker and limit:
                break
            new_texts = [text for text in dict.fromkeys(texts) if text not in token_ids]
            context = None if limit else ready.max_tokens
            ids = await encode_all(
                self._text, new_texts, param, add_special_tokens=True, context=context, num_kept=limit
            )
            token_ids.update(zip(new_texts, ids, strict=True))
        first_fields = [params[0]] if len(firsts) == 1 else [f"{params[0]}[{index}]" for index in range(len(firsts))]
        second_fields = [f"{params[1]}[{index}]" for index in range(len(seconds))]
        repeats = len(seconds) if len(firsts) == 1 else 1
        pairs = list(zip([*firsts] * repeats, seconds, strict=True))
        if ready.is_reranker:
            prompt = (instruction or _INSTRUCTION) if ready.has_pair_prompt else None
            encoder = _PairEncoder(self._text, limit, prompt, is_one_first=repeats > 1)
            fields = list(zip(first_fields * repeats, second_fields, strict=True))
            num_chars = sum(len(first) + len(second) + len(prompt or "") for first, second in pairs)
            encoded = await encode_each(encoder.encode, list(zip(pairs, fields, strict=True)), num_chars)
            found = await self._results(encoded, fields, limit, 0)
            logits = [array("f", values)[0] for values in found.values]
            return Scores([0.5 * (1 + math.tanh(logit / 2)) for logit in logits], found.num_tokens)
        field_by_text = dict(zip([*seconds, *firsts], second_fields + first_fields, strict=True))
        inputs = [_Encoded(ids) for ids in token_ids.values()]
        found = await self._results(inputs, [(field_by_text[text],) for text in token_ids], limit, 0)
        vectors = dict(zip(token_ids, (array("f", values) for values in found.values), strict=True))
        return Scores([_cosine(vectors[first], vectors[second]) for first, second in pairs], found.num_tokens)

    async def _results(
        self, encoded: Sequence[_Encoded], fields: Sequence[tuple[str, ...]], limit: int | None, dimensions: int
    ) -> Embedded:
        """Return the values of each input, cut to `limit` tokens if this is not None.

        `fields` has the fields of the request that each input comes from. Raises RequestError (400) for an input that
        is too long.
        """
        most = self._loaded().max_tokens
        messages, costs = [], []
        for (ids, second_start, _, num_last), names in zip(encoded, fields, strict=True):
            kept = ids
            if limit is not None and len(ids) > limit:
                kept = [*ids[: limit - num_last], *ids[-num_last:]]
            if len(kept) > most:
                raise RequestError(
                    f"this model's maximum context length is {most} tokens; {' with '.join(names)} has {len(ids)} "
                    "tokens; truncate_prompt_tokens: -1 cuts inputs to the limit",
                    param=_param(names[-1]),
                    code="context_length_exceeded",
                )
            token_ids = array("i", kept).tobytes()
            messages.append(partial(Embed, token_ids=token_ids, second_start=second_start, dimensions=dimensions))
            costs.append(len(kept))
        results = await self.results(messages, costs, sum(costs))
        return Embedded([result.values for result in results], sum(costs))


def _param(field: str) -> str:
    return field.partition("[")[0]


def _truncation(truncate: int | None, most: int) -> int | None:
    """Return the number of tokens to which inputs are cut, or None if they are not cut.

    Raises RequestError (400) if `truncate` is neither -1 nor a number of tokens that the model accepts.
    """
    if truncate is None:
        return None
    if truncate != -1 and not 2 <= truncate <= most:
        raise RequestError(
            f"truncate_prompt_tokens is {truncate}; it must be -1 or 2 to {most}", param="truncate_prompt_tokens"
        )
    return most if truncate == -1 else truncate


def _encode_prompt(tokenizer: Tokenizer, limit: int | None, instruction: str, query: str, document: str) -> _Encoded:
    """Return Qwen3-Reranker's prompt for a pair. The length before the document is 0 if `limit` does not cut it.

    The three parts are tokenized apart, as the model card does. Control tokens in the texts are plain text.
    """
    begin, end = (tokenizer.encode(part, add_special_tokens=False) for part in (_PROMPT_BEGIN, _PROMPT_END))
    head = f"<Instruct>: {instruction}\n<Query>: {query}\n{_DOCUMENT}"
    ids = [*begin, *tokenizer.control_tokens.encode(f"{head} {document}", []), *end]
    is_cut = limit is not None and len(ids) > limit
    num_first = len(begin) + len(tokenizer.control_tokens.encode(head, [])) if is_cut else 0
    return _Encoded(ids, num_first=num_first, num_last=len(end))


class _PairEncoder:
    """Encodes the pairs of one request. A first text that belongs to all pairs is tokenized for the first pair only."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None, instruction: str | None, *, is_one_first: bool) -> None:
        """Create the encoder. Pairs are cut to `limit` tokens. A reranker without a prompt has no `instruction`."""
        self._tokenizer, self._limit, self._instruction = tokenizer, limit, instruction
        self._is_one_first = is_one_first
        self._frame: tuple[list[int], list[int], _Encoded] | None = None  # the tokens around the second text

    def encode(self, item: tuple[tuple[str, str], tuple[str, str]]) -> _Encoded:
        """Return the tokens of a pair, which comes with its fields of the request.

        Raises RequestError (400) if the cut to `limit` tokens would leave nothing of the second text.
        """
        (first, second), names = item
        second = without_middle(self._tokenizer, second, self._limit)
        if self._frame is not None:
            begin, end, pair = self._frame
            encoded = pair._replace(token_ids=[*begin, *self._encode_second(second), *end])
        else:
            if without_middle(self._tokenizer, first, self._limit) != first:
                raise self._refusal(names, f"more than {self._limit}")
            encoded = self._encode_whole(first, second)
        num_fixed = encoded.num_first + encoded.num_last
        if self._limit and len(encoded.token_ids) > self._limit and encoded.num_first and num_fixed >= self._limit:
            raise self._refusal(names, str(num_fixed))
        if self._is_one_first and self._frame is None:
            self._learn_frame(first, second)
        return encoded

    def _refusal(self, names: tuple[str, str], num_tokens: str) -> RequestError:
        return RequestError(
            f"{names[0]} and special tokens are {num_tokens} tokens, and inputs are cut to {self._limit}, which leaves "
            f"nothing of {names[1]}; shorten {names[0]}",
            param=_param(names[0]),
            code="context_length_exceeded",
        )

    def _encode_whole(self, first: str, second: str, *, has_first: bool = False) -> _Encoded:
        if self._instruction is None:
            return _Encoded(*self._tokenizer.encode_pair(first, second))
        return _encode_prompt(self._tokenizer, 0 if has_first else self._limit, self._instruction, first, second)

    def _encode_second(self, second: str) -> list[int]:
        """Return the tokens of a second text, in a prompt after those of _DOCUMENT."""
        if self._instruction is None:
            return self._tokenizer.encode(second, add_special_tokens=False)
        return self._tokenizer.control_tokens.encode(f"{_DOCUMENT} {second}", [])

    def _learn_frame(self, first: str, second: str) -> None:
        """Keep the tokens around the second text for the next pairs, if its tokens alone are those in the pair."""
        pair = self._encode_whole(first, second, has_first=True)
        ids, tokens = pair.token_ids, self._encode_second(second)
        has_prompt = self._instruction is not None
        start = pair.num_first - (len(self._tokenizer.control_tokens.encode(_DOCUMENT, [])) if has_prompt else 0)
        end = start + len(tokens)
        if tokens and ids[start:end] == tokens and (not has_prompt or len(ids) - end == pair.num_last):
            self._frame = ids[:start], ids[end:], pair


def _cosine(first: array[float], second: array[float]) -> float:
    norms = math.hypot(*first) * math.hypot(*second)
    cosine = sum(map(mul, first, second)) / norms if norms else 0.0
    return max(-1.0, min(cosine, 1.0))  # rounding takes the cosine of equal vectors past 1
