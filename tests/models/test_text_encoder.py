"""Text encoders compute what transformers' BERT and XLM-RoBERTa compute: embeddings and rerankers' logits."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from encoder_tools import VOCAB, write_encoder, write_tokenizer, write_unigram_tokenizer
from torch.nn import functional

from meltcore.common.errors import ConfigError
from meltcore.engine.embedding.engine import EmbeddingTask, load_pooling_model
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.models.tasks.encoder import TextEncoder
from meltcore.protocol.embedding import Embed
from meltcore.serve.tasks.generation.servable import check_servable
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TOLERANCE = 1e-5
KINDS = [
    ("BertModel", "mean", True),
    ("BertModel", "cls", False),
    ("XLMRobertaModel", "cls", True),
    ("XLMRobertaModel", "mean", False),
    ("BertForSequenceClassification", "", False),
    ("XLMRobertaForSequenceClassification", "", False),
]


class Pair(NamedTuple):
    """A random model, and transformers' model with the same weights."""

    model: TextEncoder
    reference: Any


def load(folder: Path) -> TextEncoder:
    model = load_pooling_model(open_checkpoint(str(folder), files="all"), torch.float32, torch.device("cpu"))
    assert isinstance(model, TextEncoder)
    return model


@pytest.fixture(scope="module", params=KINDS, ids=["-".join(map(str, kind)) for kind in KINDS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, pooling, normalize = request.param
    folder = tmp_path_factory.mktemp("encoder")
    reference = write_encoder(folder, name, pooling=pooling, normalize=normalize)
    return Pair(load(folder), reference)


# bge-m3's dense embeddings, and multilingual-e5-small, whose network is BERT's with XLM-RoBERTa's tokenizer.
SENTENCEPIECE = [("XLMRobertaModel", "cls"), ("BertModel", "mean")]


@pytest.mark.parametrize(("name", "pooling"), SENTENCEPIECE, ids=["bge-m3", "multilingual-e5"])
def test_models_with_a_sentencepiece_tokenizer_are_served_in_float16(tmp_path: Path, name: str, pooling: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = write_encoder(tmp_path, name, pooling=pooling)
    write_unigram_tokenizer(tmp_path)
    if name == "XLMRobertaModel":  # bge-m3 is published as a pytorch_model.bin alone
        (tmp_path / "model.safetensors").unlink()
        positions = {"embeddings.position_ids": torch.arange(66)[None]}
        torch.save(positions | reference.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": false}')
    assert check_servable(ModelSection(checkpoint=str(tmp_path), device="cpu", dtype="float16")).name == "embedding"
    task = EmbeddingTask(EngineConfig(model=str(tmp_path), device="cpu", dtype="float16"))
    assert task.ready().max_tokens == 48
    texts, tokenizer = ["a cat", "reading a naïve text", "x"], Tokenizer.from_folder(tmp_path)
    encoded = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    published = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert encoded == [published(text).input_ids for text in texts]
    task.start([Embed(request_id=str(i), token_ids=np.array(ids, np.int32).tobytes())
                for i, ids in enumerate(encoded)], 0)  # fmt: skip
    for ids, result in zip(encoded, task.step(), strict=True):
        with torch.inference_mode():
            [states] = reference(torch.tensor([ids])).last_hidden_state
        pooled = states[0] if pooling == "cls" else states.mean(dim=0)
        found = torch.frombuffer(bytearray(result.values), dtype=torch.float32)
        assert functional.cosine_similarity(found, pooled, dim=0) > 0.999


def test_a_pair_says_where_its_second_text_begins(tmp_path: Path) -> None:
    write_unigram_tokenizer(tmp_path)  # all its tokens have one type, as XLM-RoBERTa's
    xlm = Tokenizer.from_folder(tmp_path)
    first = len(xlm.encode("a cat", add_special_tokens=False))
    assert xlm.encode_pair("a cat", "dog")[1:] == (0, 1 + first + 2)  # after <s> a cat </s> </s>
    assert xlm.encode_pair("a cat", "")[1:] == (0, 1 + first + 3)
    write_tokenizer(tmp_path)
    bert = Tokenizer.from_folder(tmp_path)
    assert bert.encode_pair("ab", "c d") == ([2, 4, 31, 3, 6, 7, 3], 4, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"embeddings.word_embeddings.weight": torch.zeros(4, 8).T}, "must be a contiguous tensor"),
        ([torch.zeros(2)], "must hold tensors by name"),
        ({"embeddings.word_embeddings.weight": torch.zeros(4, 8)}, "has shape"),
    ],
)
def test_a_pytorch_file_that_is_no_model_is_refused(folder: Path, tmp_path: Path, content: Any, message: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    torch.save(content, copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=message):
        load(copy)


def random_rows(seed: int, *, same: bool = False) -> list[tuple[list[int], int]]:
    """Token ids of each row, with the start of its second text."""
    rng = random.Random(seed)
    lengths = [7] * 4 if same else [1, 40, 64, 3, 17]
    rows = [[rng.randrange(4, len(VOCAB)) for _ in range(length)] for length in lengths]
    return [(row, rng.randint(1, len(row))) for row in rows]


def computed(model: TextEncoder, rows: list[tuple[list[int], int]]) -> torch.Tensor:
    lengths = torch.tensor([len(ids) for ids, _ in rows])
    flat = torch.tensor([token for ids, _ in rows for token in ids])
    with torch.inference_mode():
        return model(flat, lengths, torch.tensor([start for _, start in rows]), lengths.tolist())


def expected(pair: Pair, rows: list[tuple[list[int], int]]) -> torch.Tensor:
    """What transformers computes for each row alone."""
    found, config = [], pair.model.config
    for ids, start in rows:
        types = [int(position >= start and config.num_types > 1) for position in range(len(ids))]
        with torch.inference_mode():
            output = pair.reference(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        if config.is_reranker:
            found.append(output.logits[0])
            continue
        [states] = output.last_hidden_state
        pooled = states[0] if config.pooling == "cls" else states.mean(dim=0)
        found.append(functional.normalize(pooled, dim=0) if config.is_normalized else pooled)
    return torch.stack(found)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_it_computes_what_transformers_computes(pair: Pair, seed: int, same: bool) -> None:
    rows = random_rows(seed, same=same)
    torch.testing.assert_close(computed(pair.model, rows), expected(pair, rows), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_text_alone_has_the_values_that_it_has_in_company(pair: Pair) -> None:
    rows = random_rows(5)
    alone = torch.cat([computed(pair.model, [row]) for row in rows])
    torch.testing.assert_close(computed(pair.model, rows), alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_comparison_sees_wrong_positions_types_masks_and_pooling(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows = pair.model.config, random_rows(6)
    right = computed(pair.model, rows)
    changes: list[dict[str, Any]] = [{"first_position": 1 - config.first_position % 2}]
    if not config.is_reranker:
        changes += [
            {"pooling": "mean" if config.pooling == "cls" else "cls"},
            {"is_normalized": not config.is_normalized},
        ]
    if config.num_types > 1:
        assert (computed(pair.model, [(ids, 999) for ids, _ in rows]) - right).abs().max() > 10 * TOLERANCE
    for change in changes:
        monkeypatch.setattr(pair.model, "config", dataclasses.replace(config, **change))
        assert (computed(pair.model, rows) - right).abs().max() > 10 * TOLERANCE, change
    monkeypatch.setattr(pair.model, "config", config)
    attention = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *args, attn_mask=None: attention(*args))
    assert (computed(pair.model, rows) - right).abs().max() > 10 * TOLERANCE


REFUSED = [
    ({"hidden_act": "swish"}, "hidden_act"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"is_decoder": True}, "is_decoder"),
    ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
    ({"architectures": ["BertForMaskedLM"]}, "encoders are BertModel"),
    ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "id2label"),
    ({"type_vocab_size": None}, "type_vocab_size"),
    ({"matryoshka_dimensions": [8, 33]}, "matryoshka_dimensions must have numbers from 1 to hidden_size, 32"),
    ({"is_matryoshka": 1}, "is_matryoshka"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_encoder(folder, "BertModel")
    return folder


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_is_not_computed_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.read(values, folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", "{}", "must be a list"),
        ("modules.json", "[1]", "must be a list of objects"),
        ("modules.json", '[{"type": "a.Transformer"}]', "an encoder here has"),
        ("modules.json", '[{"type": "a.Pooling"}, {"type": "a.Dense"}]', "an encoder here has"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../.."}]', "lacks"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "known are"),
        ("sentence_bert_config.json", '{"max_seq_length": "long"}', "max_seq_length"),
    ],
)
def test_files_of_sentence_transformers_are_checked(
    folder: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    for each in ("modules.json", "1_Pooling/config.json"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text((folder / each).read_text())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.read(json.loads((folder / "config.json").read_text()), tmp_path)


def test_config_says_to_which_sizes_embeddings_may_be_cut(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    for change, sizes in (
        ({}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [16, 4]}, (16, 4)),
        ({"matryoshka_dimensions": [], "is_matryoshka": False}, None),
    ):
        assert EncoderConfig.read(values | change, folder).cut_sizes == sizes


def test_limits_come_from_the_files(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    assert EncoderConfig.read(values, tmp_path).pooling == "cls"
    assert EncoderConfig.read(values, folder).input_limit(None) == 66
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    config = EncoderConfig.read(values, tmp_path)
    assert (config.input_limit(None), config.input_limit(66)) == (20, 66)
    for limit in (1, 67):
        with pytest.raises(ConfigError, match=f"from 2 to the model's 66; got {limit}"):
            config.input_limit(limit)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.01), (torch.bfloat16, 0.05)])
def test_a_gpu_computes_what_a_cpu_computes(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    write_encoder(tmp_path, "BertModel")
    on_gpu = load_pooling_model(open_checkpoint(str(tmp_path), files="all"), dtype, torch.device("cuda"))
    for same in (False, True):
        rows = random_rows(9, same=same)
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        flat, starts = torch.tensor([token for ids, _ in rows for token in ids]), torch.tensor([at for _, at in rows])
        with torch.inference_mode():
            found = on_gpu(*(each.cuda() for each in (flat, lengths, starts)), lengths.tolist())
        torch.testing.assert_close(found.cpu(), computed(load(tmp_path), rows), atol=tolerance, rtol=0.0)
