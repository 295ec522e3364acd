"""A batch of embeddings through the prefill kernel: its tiles, pages and slots give what the reference gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_tools import write_decoder

from meltcore.engine.embedding.engine import load_pooling_model
from meltcore.kernels.attention import kv_cache, paged, prefill
from meltcore.models.checkpoints.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow
LENGTHS = [1, 5, 70, 64, 130]


def test_prefill_kernel_computes_what_the_reference_computes(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_decoder(tmp_path, is_reranker=False)
    checkpoint = open_checkpoint(str(tmp_path), files="all")
    lengths = torch.tensor(LENGTHS)
    token_ids = torch.randint(0, 300, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))

    def embeddings(on: torch.device) -> torch.Tensor:
        model = load_pooling_model(checkpoint, torch.float32, on)
        with torch.inference_mode():
            return model(token_ids.to(on), lengths.to(on), lengths.to(on), LENGTHS).cpu()

    expected = embeddings(torch.device("cpu"))
    launches: list[Any] = []
    launch = paged.prefill_attention

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        launches.append(args)
        return launch(*args, **options)

    monkeypatch.setattr(paged, "prefill_attention", counted)
    for module in (paged, prefill, kv_cache):
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    torch.testing.assert_close(embeddings(device), expected, atol=1e-4 if device.type == "cuda" else 1e-5, rtol=0.0)
    assert len(launches) == 3, "one for each layer"
