"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_tools import make_reference
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference() -> PreTrainedModel:
    return make_reference()


@pytest.fixture(scope="session")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder
