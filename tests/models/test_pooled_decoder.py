"""Decoders compute what transformers' Qwen3 computes for embeddings (last token) and for rerankers (yes and no)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from encoder_tools import write_decoder
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import Qwen3ForSequenceClassification

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.embedding.engine import EmbeddingTask
from meltcore.engine.embedding.memory import read_config
from meltcore.engine.memory.memory_needs import TaskMismatchError, engine_needs
from meltcore.models.checkpoints.checkpoint import find_task, open_checkpoint
from meltcore.models.tasks.pooled_decoder_config import GROUP_QUERIES, PooledDecoderConfig
from meltcore.protocol.embedding import Embed
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TOLERANCE = 1e-5
# Neighbors of equal lengths, ends of pages, and rows of several groups of queries.
LENGTHS = (1, 5, 5, 5, 64, 65, 130, GROUP_QUERIES + 70, 2 * GROUP_QUERIES, 70, 70, 3)


class Pair(NamedTuple):
    """A random model in `folder`, and transformers' model with the same weights."""

    folder: Path
    task: EmbeddingTask
    reference: Any


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(tmp_path_factory.mktemp("embedder"), is_reranker=False)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(tmp_path_factory.mktemp("reranker"), is_reranker=True)


def made(folder: Path, *, is_reranker: bool) -> Pair:
    reference = write_decoder(folder, is_reranker=is_reranker)
    return Pair(folder, EmbeddingTask(EngineConfig(model=str(folder), device="cpu")), reference)


def random_rows(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def computed(task: EmbeddingTask, rows: list[list[int]], dimensions: int = 0) -> torch.Tensor:
    requests = [
        Embed(request_id=str(i), token_ids=torch.tensor(row).int().numpy().tobytes(), dimensions=dimensions)
        for i, row in enumerate(rows)
    ]
    assert all(task.cost(request) % 64 == 0 for request in requests)
    task.start(requests, 0)
    results = []
    while len(results) < len(rows):
        results += task.step()
    return torch.stack([torch.frombuffer(bytearray(each.values), dtype=torch.float32) for each in results])


def last_states(pair: Pair, rows: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([pair.reference(torch.tensor([row])).last_hidden_state[0, -1] for row in rows])


def test_embeddings_are_the_last_tokens_of_transformers(embedder: Pair) -> None:
    rows = random_rows(1)
    expected = functional.normalize(last_states(embedder, rows), dim=1)
    torch.testing.assert_close(computed(embedder.task, rows), expected, atol=TOLERANCE, rtol=0.0)
    short = functional.normalize(expected[:, :8], dim=1)
    torch.testing.assert_close(computed(embedder.task, rows, dimensions=8), short, atol=TOLERANCE, rtol=0.0)


def test_scores_compare_yes_with_no(reranker: Pair) -> None:
    rows = random_rows(2)
    answers = json.loads((reranker.folder / "1_Logit" / "config.json").read_text())
    with torch.inference_mode():
        logits = torch.stack([reranker.reference(torch.tensor([row])).logits[0, -1] for row in rows])
    expected = logits[:, [answers["true_token_id"]]] - logits[:, [answers["false_token_id"]]]
    torch.testing.assert_close(computed(reranker.task, rows), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_checkpoint_converted_to_sequence_classification_has_the_same_scores(reranker: Pair, tmp_path: Path) -> None:
    folder, rows = shutil.copytree(reranker.folder, tmp_path / "copy"), random_rows(6, (7, 66))
    answers = json.loads((folder / "1_Logit" / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    tensors["score.weight"] = head[[answers["true_token_id"]]] - head[[answers["false_token_id"]]]
    save_file(tensors, folder / "model.safetensors")
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    task = EmbeddingTask(EngineConfig(model=str(folder), device="cpu"))
    assert (task.ready().is_reranker, task.ready().has_pair_prompt) == (True, False)
    torch.testing.assert_close(computed(task, rows), computed(reranker.task, rows), atol=TOLERANCE, rtol=TOLERANCE)
    reference = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = torch.cat([reference(torch.tensor([row])).logits for row in rows])
    torch.testing.assert_close(computed(task, rows), expected, atol=TOLERANCE, rtol=TOLERANCE)
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ConfigError, match="id2label must name one label"):
        read_config(open_checkpoint(str(folder), files="config"))


def test_an_input_alone_has_the_values_that_it_has_in_company(embedder: Pair, reranker: Pair) -> None:
    rows = random_rows(3)
    for pair in (embedder, reranker):
        alone = torch.cat([computed(pair.task, [row]) for row in rows])
        torch.testing.assert_close(computed(pair.task, rows), alone, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_have_nearly_the_same_direction(embedder: Pair, dtype: Any) -> None:
    rows = random_rows(4, (3, 60, 200))
    task = EmbeddingTask(EngineConfig(model=str(embedder.folder), device="cpu", dtype=dtype))
    cosines = functional.cosine_similarity(computed(task, rows), last_states(embedder, rows))
    assert cosines.min() > 0.999


def test_files_of_sentence_transformers_decide_the_task(embedder: Pair, reranker: Pair, tmp_path: Path) -> None:
    assert [find_task(str(pair.folder)).name for pair in (embedder, reranker)] == ["embedding", "embedding"]
    assert [pair.task.ready().has_pair_prompt for pair in (embedder, reranker)] == [False, True]
    shutil.copy(embedder.folder / "config.json", tmp_path)
    assert find_task(str(tmp_path)).name == "generation"
    with pytest.raises(TaskMismatchError, match=r"write `task: generation`, or fetch its modules\.json, which shows"):
        engine_needs(ModelSection(checkpoint=str(tmp_path), task="embedding", device="cpu"), on_cpu=True)
    with pytest.raises(ConfigError, match=r"embedding runs BertFor.*, Qwen3ForCausalLM with modules\.json"):
        EmbeddingTask(EngineConfig(model=str(tmp_path), device="cpu"))
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_task(str(tmp_path)).name == "embedding"
    with pytest.raises(ConfigError, match="a decoder here has Transformer, Pooling"):
        read_config(open_checkpoint(str(tmp_path), files="config"))


def test_published_embeddings_may_be_cut(embedder: Pair, reranker: Pair) -> None:
    """The published config.json does not say that the model is trained for it. One that is trained on is another."""
    assert (embedder.task.ready().cut_sizes, reranker.task.model.config.is_reranker) == ((), True)
    config = json.loads((embedder.folder / "config.json").read_text())
    for change, sizes in (
        ({"architectures": ["Qwen3Model"]}, None),
        ({"architectures": ["Qwen3Model"], "is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"matryoshka_dimensions": [8, 16]}, (8, 16)),
    ):
        assert PooledDecoderConfig.read(config | change, embedder.folder).cut_sizes == sizes


def test_a_head_of_generation_is_not_read(embedder: Pair, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder.folder, tmp_path / "copy")
    tensors = {f"model.{name}": values for name, values in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"lm_head.weight": torch.ones(300, 32)}, folder / "model.safetensors")
    task = EmbeddingTask(EngineConfig(model=str(folder), device="cpu"))
    rows = random_rows(5, (7, 20))
    torch.testing.assert_close(computed(task, rows), computed(embedder.task, rows), atol=0.0, rtol=0.0)


REFUSED = [
    ("1_Logit/config.json", {"true_token_id": 257}, "false_token_id"),
    ("1_Logit/config.json", {"true_token_id": 257, "false_token_id": None}, "false_token_id"),
    ("1_Logit/config.json", {"true_token_id": 300, "false_token_id": 258}, "names token 300 of 300"),
    ("1_Logit/config.json", {"true_token_id": 258, "false_token_id": 257}, "the tokens of no and yes are"),
    ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Dense"}], "lists Transformer, Dense; a decoder here"),
    ("modules.json", [{"type": "x.Pooling"}, {"type": "x.LogitScore"}], "a decoder here has"),
    ("modules.json", [{"type": "x.Pooling", "path": "1_Logit"}], "sets no mode; known are pooling_mode_lasttoken"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_what_is_not_computed_is_refused(reranker: Pair, tmp_path: Path, name: str, content: Any, message: str) -> None:
    folder = shutil.copytree(reranker.folder, tmp_path / "copy")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        EmbeddingTask(EngineConfig(model=str(folder), device="cpu"))


def test_the_context_is_the_longest_input(embedder: Pair) -> None:
    too_long = Embed(request_id="a", token_ids=bytes(4 * 1601))
    with pytest.raises(RequestError, match="it must have 1 to 1600"):
        embedder.task.cost(too_long)
    assert embedder.task.cost(Embed(request_id="a", token_ids=bytes(4 * 1600))) <= embedder.task.max_cost
