"""Folders of models with real weights, which `make test-real` fetches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_models import MODELS, SAFETENSORS, store


def fetched(name: str) -> Path:
    """Return the file of a model of MODELS, as it comes from its packages.

    Without it the test is skipped, or fails where REQUIRE_REAL is set.
    """
    path = Path(os.environ.get("REAL_MODELS", ".")) / MODELS[name].file
    if not path.exists():
        reason = f"{MODELS[name].title} is not there (make test-real REAL_NAMES={name})"
        if os.environ.get("REQUIRE_REAL"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct: a GGUF file in Q4_1."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Return Gemma 3 270M, a base model: a GGUF file in Q4_K_M, which holds Q4_K, Q5_0, Q6_K and Q8_0."""
    return fetched("gemma3")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model as a safetensors folder, whose tokenizer is rebuilt from the file by transformers."""
    return store(smollm2, SAFETENSORS, tmp_path_factory.mktemp("real") / "smollm2")
