"""The backend of an embedding model or a reranker whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.protocol.embedding import Embed, EmbeddingReady
from meltcore.serve.engines.batch_backend import BatchBackend
from meltcore.serve.requests.admission import TOKENS
from meltcore.serve.tasks.generation.prompts import INLINE_CHARS, encode_all, encode_prompts
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


_Encode = Callable[[str, str], tuple[Any, ...]]


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
            ids = await encode_all(self._text, new_texts, param, add_special_tokens=True, context=context)
            token_ids.update(zip(new_texts, ids, strict=True))
        first_fields = [params[0]] if len(firsts) == 1 else [f"{params[0]}[{index}]" for index in range(len(firsts))]
        second_fields = [f"{params[1]}[{index}]" for index in range(len(seconds))]
        repeats = len(seconds) if len(firsts) == 1 else 1
        pairs = list(zip([*firsts] * repeats, seconds, strict=True))
        if ready.is_reranker:
            encode: _Encode = self._text.encode_pair
            if ready.has_pair_prompt:
                encode = partial(_encode_prompt, self._text, limit, instruction or _INSTRUCTION)
            encoded = await _encode_pairs(encode, pairs, has_prompt=ready.has_pair_prompt)
            fields = list(zip(first_fields * repeats, second_fields, strict=True))
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
        is too long, and for one of which a cut would leave nothing of its second text.
        """
        most = self._loaded().max_tokens
        messages, costs = [], []
        for (ids, second_start, num_first, num_last), names in zip(encoded, fields, strict=True):
            kept = ids
            if limit is not None and len(ids) > limit:
                if num_first and num_first + num_last >= limit:
                    raise RequestError(
                        f"{names[0]} and special tokens are {num_first + num_last} tokens, and inputs are cut to "
                        f"{limit}, which leaves nothing of {names[1]}; shorten {names[0]}",
                        param=_param(names[0]),
                        code="context_length_exceeded",
                    )
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
    head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
    ids = [*begin, *tokenizer.control_tokens.encode(f"{head} {document}", []), *end]
    is_cut = limit is not None and len(ids) > limit
    num_first = len(begin) + len(tokenizer.control_tokens.encode(head, [])) if is_cut else 0
    return _Encoded(ids, num_first=num_first, num_last=len(end))


async def _encode_pairs(encode: _Encode, pairs: Sequence[tuple[str, str]], *, has_prompt: bool) -> list[_Encoded]:
    """Return the tokens of each pair. Long texts are tokenized on a thread, and so are several prompts."""

    def work() -> list[_Encoded]:
        return [_Encoded(*encode(*pair)) for pair in pairs]

    prompt_chars = _MAX_INSTRUCTION if has_prompt else 0
    if sum(len(first) + len(second) + prompt_chars for first, second in pairs) <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)


def _cosine(first: array[float], second: array[float]) -> float:
    norms = math.hypot(*first) * math.hypot(*second)
    cosine = sum(map(mul, first, second)) / norms if norms else 0.0
    return max(-1.0, min(cosine, 1.0))  # rounding takes the cosine of equal vectors past 1
