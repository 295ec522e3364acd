"""Models with real weights on a GPU: the perplexities of transformers in float32, within what bfloat16 holds.

The goal is 0.1 %, which all rows miss on an H200, by 0.12 to 0.47 % (docs/real-models.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model_parity import AS_IS, measure
from real_models import FORMATS, SAFETENSORS, store

# Bfloat16 activations and dequantized weights change a token's log-probability by 0.059 (root mean square, Gemma in
# Hindi; docs/decisions/small-batch-gemm.md). Over the 236 tokens of that text this is 0.4 % of a perplexity, and 1 %
# is two and a half times that. A wrong mask, position or block is far beyond it.
BFLOAT16_LIMIT = 1e-2

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
        assert perplexity.relative_difference < BFLOAT16_LIMIT, (text, perplexity)
