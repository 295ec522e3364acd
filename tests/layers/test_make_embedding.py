"""Unsharded embeddings: values are drawn for training, not on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meltcore.layers.embedding import make_embedding


@pytest.mark.parametrize(("device", "draws"), [("cpu", 1), ("meta", 0)])
def test_values_are_not_drawn_on_the_meta_device(device: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[nn.Embedding] = []
    monkeypatch.setattr(nn.Embedding, "reset_parameters", lambda self: drawn.append(self))
    with torch.device(device):
        embedding = make_embedding(5, 3)
    assert len(drawn) == draws
    assert (embedding.weight.shape, embedding.weight.device.type) == ((5, 3), device)
    assert embedding.weight.requires_grad
