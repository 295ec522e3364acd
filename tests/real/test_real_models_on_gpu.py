"""Models with real weights on a GPU: the perplexities of transformers in float32, within 0.1 %.

SmolLM2 in Q4_1 and Q4_0 and Gemma 3 270M miss it today, by bfloat16 activations and logits (docs/real-models.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model_parity import AS_IS, TOLERANCE, measure
from real_models import FORMATS, SAFETENSORS, store

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("format_name", [AS_IS, *FORMATS, SAFETENSORS])
def test_perplexities_are_those_of_transformers(smollm2: Path, format_name: str, tmp_path: Path) -> None:
    suffix = "" if format_name == SAFETENSORS else ".gguf"
    path = smollm2 if format_name == AS_IS else store(smollm2, format_name, tmp_path / f"smollm2-{format_name}{suffix}")
    check_perplexities(path)


def test_gemma3_is_within_the_tolerance_as_it_comes(gemma3: Path) -> None:
    check_perplexities(gemma3)


def check_perplexities(path: Path) -> None:
    parity = measure(path, "cuda")
    for text, perplexity in parity.perplexities.items():
        assert perplexity.relative_difference < TOLERANCE["cuda"], (text, perplexity)
