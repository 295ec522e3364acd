"""Serves POST /v1/embeddings (OpenAI's API), /v1/rerank (Cohere's and Jina's API) and /v1/score (vLLM's API).

The last two also have the paths at which vLLM and Cohere's clients find them.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.asgi import while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.embedding.backend import MAX_INPUTS, EmbeddingBackend, Scores
from meltcore.serve.tasks.endpoint import Endpoint

# Values that are written as JSON before other requests have their turn: about 5 ms.
_TURN_VALUES = 32_768


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of all three routes.

    Long inputs are cut to `truncate_prompt_tokens`, where -1 is the model's limit.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(_Common, kw_only=True):
    """The body of POST /v1/embeddings. The input is one text, several texts, or one or several lists of token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class _ScoringRequest(_Common, kw_only=True):
    """The fields of both routes that score pairs. Rerankers that follow instructions read `instruction`."""

    instruction: str | None = None


class RerankedDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object, as clients of Cohere and Jina send it."""

    text: str


class RerankRequest(_ScoringRequest, kw_only=True):
    """The body of POST /v1/rerank.

    The answer has the `top_n` best documents, with their texts if `return_documents` is true.
    """

    query: str
    documents: list[str | RerankedDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(_ScoringRequest, kw_only=True):
    """The body of POST /v1/score. It has pairs of texts, or one first text with several second texts."""

    text_1: str | list[str]
    text_2: str | list[str]


class EmbeddingsEndpoint(Endpoint):
    """Computes embeddings."""

    operations = (
        Operation("post", "/v1/embeddings", "Embed texts", EmbeddingRequest, example={"input": ["hello", "world"]}),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        form = await self.read(exchange, EmbeddingRequest)
        backend: EmbeddingBackend = self.find_model(exchange, form.model)
        async with exchange.timeout(self._config.timeouts.request_s):
            work = backend.embed(form.input, form.dimensions, form.truncate_prompt_tokens)
            found = await while_connected(exchange.scope, work)
        exchange.fields |= {"inputs": len(found.values), "prompt_tokens": found.num_tokens}
        entries: list[bytes] = []
        written = 0
        for index, values in enumerate(found.values):
            if form.encoding_format == "base64":
                embedding: str | list[float] = base64.b64encode(values).decode()
            else:
                embedding = array("f", values).tolist()
                written += len(embedding)
            entries.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": embedding}))
            if written > _TURN_VALUES:
                written = 0
                await asyncio.sleep(0)
        body = msgspec.json.encode({"model": backend.names[0], "usage": _usage(found.num_tokens), "object": "list"})
        await exchange.answer(body[:-1] + b',"data":[' + b",".join(entries) + b"]}", b"application/json")


class _ScoringEndpoint(Endpoint):
    """Computes the scores of a request's pairs of texts."""

    async def scores(
        self,
        exchange: Exchange,
        backend: EmbeddingBackend,
        form: _ScoringRequest,
        params: tuple[str, str],
        texts: tuple[Sequence[str], Sequence[str]],
    ) -> Scores:
        """Return the scores of 1 to MAX_INPUTS pairs within the time limit.

        `texts` are the first and the second texts, and `params` the fields that hold them. Raises RequestError if the
        number of second texts is out of range, or if the model cannot score the pairs.
        """
        num_pairs = len(texts[1])
        if not 1 <= num_pairs <= MAX_INPUTS:
            raise RequestError(f"{params[1]} must have 1 to {MAX_INPUTS} texts; got {num_pairs}", param=params[1])
        async with exchange.timeout(self._config.timeouts.request_s):
            work = backend.score(*texts, params, form.truncate_prompt_tokens, form.instruction)
            scores = await while_connected(exchange.scope, work)
        exchange.fields |= {"inputs": num_pairs, "prompt_tokens": scores.num_tokens}
        return scores


class RerankEndpoint(_ScoringEndpoint):
    """Sorts documents by their relevance for a query."""

    operations = tuple(
        Operation(
            *("post", path, "Sort documents by relevance", RerankRequest),
            tag="server",
            example={"query": "a cat", "documents": ["a dog", {"text": "a kitten"}]},
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        form = await self.read(exchange, RerankRequest)
        if form.top_n is not None and form.top_n < 1:
            raise RequestError(f"top_n is {form.top_n}; it must be at least 1", param="top_n")
        backend: EmbeddingBackend = self.find_model(exchange, form.model)
        documents = [each if isinstance(each, str) else each.text for each in form.documents]
        scores = await self.scores(exchange, backend, form, ("query", "documents"), ([form.query], documents))
        ranked = sorted(enumerate(scores.values), key=lambda each: -each[1])[: form.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
        if form.return_documents:
            results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
        answer = {"id": exchange.identity, "model": backend.names[0], "results": results}
        await exchange.answer_json(answer | {"usage": _usage(scores.num_tokens)})


class ScoreEndpoint(_ScoringEndpoint):
    """Scores pairs of texts in the order of the request."""

    operations = tuple(
        Operation(
            *("post", path, "Score pairs of texts", ScoreRequest),
            example={"text_1": "a cat", "text_2": ["a dog", "a kitten"]},
            tag="server",
        )
        for path in ("/v1/score", "/score")
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        form = await self.read(exchange, ScoreRequest)
        firsts, seconds = ([each] if isinstance(each, str) else each for each in (form.text_1, form.text_2))
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; text_1 must have 1 or as many",
                param="text_1",
            )
        backend: EmbeddingBackend = self.find_model(exchange, form.model)
        scores = await self.scores(exchange, backend, form, ("text_1", "text_2"), (firsts, seconds))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.values)]
        answer = {"id": exchange.identity, "object": "list", "model": backend.names[0], "data": data}
        await exchange.answer_json(answer | {"usage": _usage(scores.num_tokens)})


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
