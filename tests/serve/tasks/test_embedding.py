"""Embeddings, reranking and scores over HTTP, with real engines of small random models, and the openai client."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import subprocess
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from encoder_tools import write_decoder, write_encoder
from server_harness import RunningServer, running, serve_command, server_config
from waiting import WAIT_S, until

from meltcore.common.errors import RequestError
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.protocol.embedding import EmbeddingReady
from meltcore.serve.tasks.embedding.backend import EmbeddingBackend, _cosine, _PairEncoder
from meltcore.serve.tasks.generation import prompts
from meltcore.serve.tasks.generation.prompts import encode_each
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
MAX_TOKENS = 66


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("embedder", "reranker", "decoder")}
    write_encoder(made["embedder"], "BertModel")
    config = json.loads((made["embedder"] / "config.json").read_text())
    (made["embedder"] / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 4]}))
    write_encoder(made["reranker"], "BertForSequenceClassification")
    write_decoder(made["decoder"], is_reranker=True)
    return made


def served(folder: Path, log: Path) -> Iterator[RunningServer]:
    config = server_config(ModelSection(checkpoint=str(folder), device="cpu"), api_server_count=1)
    with running(serve_command(config, engine=ENGINE_COMMAND), log) as server:
        server.wait_healthy()
        yield server
        server.check_no_leak()


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(folders["embedder"], tmp_path_factory.mktemp("log") / "stderr")


@pytest.fixture(scope="module")
def reranker(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(folders["reranker"], tmp_path_factory.mktemp("log") / "stderr")


@pytest.fixture(scope="module")
def decoder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(folders["decoder"], tmp_path_factory.mktemp("log") / "stderr")


def vectors(server: RunningServer, inputs: Any, **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": inputs, **fields})
    assert answer.status == 200, answer.body
    assert [entry["index"] for entry in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [entry["embedding"] for entry in answer.json["data"]]


def test_the_openai_client_reads_embeddings(embedder: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
        texts = ["abc", "bca cab", "abc"]
        decoded = client.embeddings.create(model="scripted", input=texts)  # which asks for base64
        written = client.embeddings.create(model="scripted", input=texts, encoding_format="float")
        short = client.embeddings.create(model="scripted", input="abc", dimensions=4)
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens == 5 + 8 + 5
    rows = [entry.embedding for entry in decoded.data]
    assert rows == [entry.embedding for entry in written.data]
    assert rows[0] == pytest.approx(rows[2], abs=1e-6)
    assert math.hypot(*rows[0]) == pytest.approx(1.0, abs=1e-5)
    norm = math.hypot(*rows[0][:4])
    assert short.data[0].embedding == pytest.approx([value / norm for value in rows[0][:4]], abs=1e-5)


def test_only_models_trained_for_it_cut_embeddings() -> None:
    backend: Any = EmbeddingBackend.__new__(EmbeddingBackend)
    backend.names = ("minilm",)
    limits: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weights": "real", "memory": [], "load_s": 0.0}
    ready = EmbeddingReady(**limits, max_cost=64, max_tokens=66, size=32, vocab_size=40, is_reranker=False)
    backend._check_dimensions(32, ready)
    with pytest.raises(RequestError, match=r"minilm is not known to be trained for shorter embeddings.*must be 32 or"):
        backend._check_dimensions(16, ready)
    backend._check_dimensions(5, msgspec.structs.replace(ready, cut_sizes=()))


class CountingTokenizer(Tokenizer):
    """A tokenizer of bytes that counts the characters it encodes. A pair is the two texts, with a byte after each."""

    num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int, int]:
        ids, begin = self.encode(second, add_special_tokens=False), self.encode(first, add_special_tokens=False)
        return [*begin, 0, *ids, 0], 0, len(begin) + 1


def unloaded_backend(monkeypatch: pytest.MonkeyPatch, *, is_reranker: bool) -> Any:
    """A backend without engines whose results are the tokens of its inputs."""
    limits: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weights": "real", "memory": [], "load_s": 0.0}
    ready = EmbeddingReady(**limits, max_cost=64, max_tokens=66, size=32, vocab_size=300, is_reranker=is_reranker)
    backend: Any = EmbeddingBackend.__new__(EmbeddingBackend)
    backend.names, backend._text = ("m",), CountingTokenizer(Tokenizer.synthetic_bytes(300)._backend)
    monkeypatch.setattr(backend, "_loaded", lambda: ready)

    async def results(messages: list[Any], costs: list[int], _units: int) -> list[Any]:
        made = [message(request_id="", priority=0, arrived_s=0.0) for message in messages]
        return [SimpleNamespace(values=array("i", array("i", each.token_ids)).tobytes()) for each in made]

    monkeypatch.setattr(backend, "results", results)
    return backend


@pytest.mark.parametrize(("num_words", "found"), [(40, "are 82 tokens"), (20_000, "are more than 66 tokens")])
def test_a_query_that_leaves_nothing_of_documents_is_refused_at_the_first(
    num_words: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = unloaded_backend(monkeypatch, is_reranker=True)
    query = "a " * num_words
    with pytest.raises(RequestError, match=f"{found}.*leaves nothing of documents.0.; shorten query"):
        asyncio.run(backend.score([query], ["a"] * 200, ("query", "documents"), -1, None))
    assert backend._text.num_chars < 66 * 64


@pytest.mark.parametrize("text", ["ab " * 30_000, " " * 60_000 + "ab" * 30_000])
def test_far_longer_texts_are_cut_before_they_are_tokenized(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut keeps the first tokens and the last one."""
    backend = unloaded_backend(monkeypatch, is_reranker=False)
    found = asyncio.run(backend.embed([text], None, -1))
    assert array("i", found.values[0]).tolist() == [*text[:65].encode(), text.encode()[-1]]
    assert backend._text.num_chars < 66 * 64


def test_a_query_is_not_tokenized_for_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = unloaded_backend(monkeypatch, is_reranker=True)
    encoder = _PairEncoder(backend._text, None, None, is_one_first=True)
    for index in range(100):
        encoder.encode((("q" * 50, f"d{index}"), ("query", f"documents[{index}]")))
    assert backend._text.num_chars < 100 * 3 + 5 * 50


@pytest.mark.parametrize("kind", ["reranker", "decoder"])
@pytest.mark.parametrize("limit", [None, 300, 1600])
@pytest.mark.parametrize("query", ["cab", "what? <|im_end|>\n"])
def test_pairs_have_the_same_tokens_wherever_the_query_was_tokenized(
    kind: str, limit: int | None, query: str, folders: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.from_folder(folders[kind])
    instruction = "Find" if kind == "decoder" else None
    encoder = _PairEncoder(tokenizer, limit, instruction, is_one_first=True)
    for second in ("abc", "", " ", "\n\nab", "?!", "<|im_start|>", "e\u0301 中文", "a b " * 400, "ab" * 9000):
        item = (query, second), ("query", "documents[0]")
        alone = _PairEncoder(tokenizer, limit, instruction, is_one_first=False).encode(item)
        whole = _PairEncoder(tokenizer, None, instruction, is_one_first=False).encode(item)
        found = encoder.encode(item)
        assert (found.token_ids, found.second_start) == (alone.token_ids, alone.second_start)
        most = limit or len(whole.token_ids)
        assert found.token_ids[: most - found.num_last] == whole.token_ids[: most - found.num_last]
        assert found.token_ids[-found.num_last :] == whole.token_ids[-found.num_last :]
    assert encoder._frame is not None


def test_tokenizing_ends_when_its_request_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends after the item that it has begun."""
    begun, release = list[int](), Event()
    monkeypatch.setattr(prompts, "_THREADS", ThreadPoolExecutor(1))

    def encode(item: int) -> None:
        begun.append(item)
        assert release.wait(WAIT_S)

    async def scenario() -> None:
        task = asyncio.create_task(encode_each(encode, range(50), 2**20))
        await until(lambda: begun == [0], "the first item to begin")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        assert await encode_each(abs, [-1], 2**20) == [1]  # in the same thread

    try:
        asyncio.run(scenario())
    finally:
        release.set()
    assert begun == [0]


def test_texts_and_token_ids_are_the_same_inputs(embedder: RunningServer) -> None:
    [text] = vectors(embedder, "abc")
    ids = [2, 4, 31, 32, 3]  # [CLS] a ##b ##c [SEP]
    assert vectors(embedder, [ids, ids]) == [pytest.approx(text, abs=1e-6)] * 2
    assert vectors(embedder, ids) == [pytest.approx(text, abs=1e-6)]
    answer = embedder.post("/v1/embeddings", {"input": "abc", "encoding_format": "base64"})
    values = array("f", base64.b64decode(answer.json["data"][0]["embedding"])).tolist()
    assert values == pytest.approx(text, abs=1e-6)


def test_long_inputs_are_refused_or_cut(embedder: RunningServer) -> None:
    long = "a " * 80
    answer = embedder.post("/v1/embeddings", {"input": ["a", long]})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 66 tokens; input[1] has 82 tokens" in answer.error["message"]
    cut = vectors(embedder, long, truncate_prompt_tokens=-1)
    assert cut == [pytest.approx(vectors(embedder, "a " * (MAX_TOKENS - 2))[0], abs=1e-5)]
    far = embedder.post("/v1/embeddings", {"input": "a " * 100_000})
    assert (far.status, far.error["code"]) == (400, "context_length_exceeded")


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": []}, "input", "is empty"),
    ("/v1/embeddings", {"input": [[]]}, "input", "no tokens"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input", "mixes"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2049 prompts; the limit is 2048"),
    ("/v1/embeddings", {"input": [99_999]}, "input", "outside the vocabulary"),
    ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions", "must be 1 to 32"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "must be 1 to 32"),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions", "dimensions is 8; it must be one of 4, 16, 32"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 67}, "truncate_prompt_tokens", "-1 or 2 to 66"),
    ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "not known"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1 to 2048"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1"),
    ("/v1/rerank", {"query": "a", "documents": ["b", "b " * 99]}, "documents", "documents[1] has 101 tokens"),
    ("/v1/rerank", {"query": "a " * 99, "documents": ["b"]}, "query", "query has 101 tokens; truncate_prompt_tokens"),
    ("/v1/rerank", {"query": "a " * 9999, "documents": ["b"]}, "query", "maximum context length is 66"),
    ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].title", "not known"),
    ("/rerank", {"query": "a", "documents": ["b", 5]}, "documents[1]", "int"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc", "not known"),
    ("/score", {"text_1": ["a", "a " * 99], "text_2": ["b", "c"]}, "text_1", "text_1[1] has 101 tokens"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "must have 1 or as many"),
    ("/v1/score", {"text_1": [], "text_2": []}, "text_2", "1 to 2048"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "reads no instruction"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD)
def test_bad_requests_are_named(
    embedder: RunningServer, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = embedder.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert message in answer.error["message"]


def test_no_cosine_is_past_one() -> None:
    vectors = [array("f", (math.sin(seed * place) for place in range(1, 65))) for seed in range(1, 200)]
    products = [sum(value * value for value in each) / math.hypot(*each) ** 2 for each in vectors]
    assert max(products) > 1, "rounding is no matter here"
    assert {_cosine(each, each) for each in vectors} <= {1.0, *(value for value in products if value < 1)}


def test_an_embedding_model_ranks_by_the_cosine(embedder: RunningServer) -> None:
    documents = ["abc", "xyz zyx", "abd"]
    objects = [{"text": documents[0]}, *documents[1:]]
    query, *others = vectors(embedder, ["abc", *documents])
    cosines = [sum(map(lambda a, b: a * b, query, other)) for other in others]
    absent = embedder.post("/v1/rerank", {"query": "abc", "documents": documents, "return_documents": None}).json
    assert all("document" not in result for result in absent["results"])
    best = sorted(range(3), key=lambda index: -cosines[index])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = embedder.post(path, {"query": "abc", "documents": objects, "return_documents": True}).json
        assert [result["index"] for result in answer["results"]] == best
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-5)
            assert result["document"] == {"text": documents[result["index"]]}
    for path in ("/v1/score", "/score"):
        scores = embedder.post(path, {"text_1": "abc", "text_2": documents}).json["data"]
        assert [entry["score"] for entry in scores] == pytest.approx(cosines, abs=1e-5)
    top = embedder.post("/v1/rerank", {"query": "abc", "documents": documents, "top_n": 1}).json["results"]
    assert top == [{"index": best[0], "relevance_score": pytest.approx(max(cosines), abs=1e-5)}]


def test_a_reranker_scores_pairs_as_transformers_does(reranker: RunningServer, folders: dict[str, Path]) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import BertForSequenceClassification

    reference = BertForSequenceClassification.from_pretrained(folders["reranker"]).eval()
    tokenizer = Tokenizer.from_file(str(folders["reranker"] / "tokenizer.json"))
    documents = ["abc", "xyz zyx", "abd efg"]
    expected = []
    for document in documents:
        encoding = tokenizer.encode("cab", document)
        with torch.inference_mode():
            output = reference(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids]))
        expected.append(torch.sigmoid(output.logits)[0, 0].item())
    answer = reranker.post("/v1/score", {"text_1": "cab", "text_2": documents}).json
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode("cab", each).ids) for each in documents)
    long = {"query": "cab", "documents": ["a " * 99]}
    refused = reranker.post("/v1/rerank", long)
    assert (refused.error["param"], refused.error["code"]) == ("documents", "context_length_exceeded")
    assert "maximum context length is 66 tokens; query with documents[0] has 105 tokens" in refused.error["message"]
    cut = reranker.post("/v1/rerank", {**long, "truncate_prompt_tokens": -1})
    assert (cut.status, cut.json["usage"]["prompt_tokens"]) == (200, MAX_TOKENS)
    # A cut never drops a whole document: [CLS] c ##a ##b [SEP] are 5 tokens, and another [SEP] ends the pair.
    assert reranker.post("/v1/rerank", {**long, "truncate_prompt_tokens": 7}).status == 200
    refused = reranker.post("/v1/rerank", {**long, "truncate_prompt_tokens": 6})
    assert (refused.status, refused.error["param"]) == (400, "query")
    assert "query and special tokens are 6 tokens, and inputs are cut to 6" in refused.error["message"]
    refused = reranker.post("/v1/embeddings", {"input": "a"})
    assert (refused.status, refused.error["param"]) == (400, "model")
    assert "scripted is a reranker" in refused.error["message"]


PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def published_scores(folder: Path, instruction: str, query: str, documents: list[str], most: int) -> list[float]:
    """What the model card of Qwen3-Reranker computes with transformers, with at most `most` tokens of each prompt."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    begin, end = (tokenizer.encode(part, add_special_tokens=False) for part in PROMPT)
    scores = []
    for document in documents:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = begin + tokenizer.encode(text)[: most - len(begin) - len(end)] + end
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, answers]
        scores.append(torch.log_softmax(logits, dim=0)[1].exp().item())
    return scores


def test_a_decoder_reranks_as_its_model_card_does(decoder: RunningServer, folders: dict[str, Path]) -> None:
    documents = ["a dog", "Ein Text über Katzen, no, yes", "x " * 700]
    body = {"query": "what is a cat?", "documents": documents[:2], "return_documents": True}
    expected = published_scores(folders["decoder"], INSTRUCTION, body["query"], documents, 1600)
    answer = decoder.post("/v1/rerank", body).json
    assert {each["document"]["text"]: each["relevance_score"] for each in answer["results"]} == {
        text: pytest.approx(score, abs=1e-5) for text, score in zip(documents[:2], expected, strict=False)
    }
    pairs = {"text_1": body["query"], "text_2": documents}
    assert "maximum context length is 1600" in decoder.post("/v1/score", pairs).error["message"]
    asked = {"instruction": "Find texts about cats", "truncate_prompt_tokens": 500}
    other = published_scores(folders["decoder"], asked["instruction"], body["query"], documents, 500)
    found = [entry["score"] for entry in decoder.post("/v1/score", {**pairs, **asked}).json["data"]]
    assert found == pytest.approx(other, abs=1e-5)
    assert abs(other[0] - expected[0]) > 1e-4
    refused = decoder.post("/v1/score", {**pairs, "truncate_prompt_tokens": 260})
    assert (refused.status, refused.error["param"]) == (400, "text_1")
    assert "and inputs are cut to 260, which leaves nothing of text_2[0]" in refused.error["message"]
    refused = decoder.post("/v1/score", {**pairs, "instruction": "x" * 4097})
    assert (refused.status, refused.error["param"]) == (400, "instruction")


def test_control_tokens_in_texts_are_text(decoder: RunningServer) -> None:
    begin, end = "<|im_end|>", "<|im_start|>"
    usage = [decoder.post("/v1/score", {"text_1": "a", "text_2": text}).json["usage"] for text in ("", begin, end)]
    empty, *others = (each["prompt_tokens"] for each in usage)
    assert [each - empty for each in others] == [len(begin), len(end)]


def test_it_is_described_and_loaded(embedder: RunningServer, reranker: RunningServer, tmp_path: Path) -> None:
    paths = embedder.request("GET", "/openapi.json").json["paths"]
    assert {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"} <= set(paths)
    for server, dimensions, workload, work in (
        (embedder, 32, "embed:words=2", 6.0),
        (reranker, None, "embed:words=2,documents=8", 48.0),
    ):
        [card] = server.request("GET", "/v1/models").json["data"]
        assert (card["task"], card["max_model_len"], card["dimensions"]) == ("embedding", MAX_TOKENS, dimensions)
        command = [sys.executable, "-m", "meltcore.cli.main", "load", server.url, "--num-prompts", "6", "--json"]
        options = ["--workload", workload, "--concurrency", "2", "--out", str(tmp_path / str(dimensions))]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr
        [level] = json.loads(done.stdout)["levels"]
        assert (level["succeeded"], level["task"]["task"], level["task"]["work"]) == (6, "embedding", work)


def test_a_fleet_plans_its_memory(folders: dict[str, Path], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    model = {"checkpoint": str(folders["embedder"]), "task": "embedding", "device": "cpu", "max_model_len": 40}
    fleet.write_text(json.dumps({"models": {"texts": model}}))
    command = [sys.executable, "-m", "meltcore.cli.main", "plan", str(fleet)]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert planned.returncode == 0, planned.stderr
    assert "texts" in planned.stdout
    fleet.write_text(json.dumps({"models": {"texts": {**model, "max_model_len": 99}}}))
    refused = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert refused.returncode == 2
    assert "must be from 2 to the model's 66; got 99" in " ".join(refused.stderr.split())
