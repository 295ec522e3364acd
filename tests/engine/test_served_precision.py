"""What a loaded engine says of the precision it computes in, which results record."""

import pytest

from meltcore.engine.generation.engine import GenerationEngine
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL
from meltcore.settings.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "weights", "cache"),
    [
        ({"dtype": "bfloat16"}, ["bfloat16"], "bfloat16"),
        ({}, ["float16", "float32"], "float32"),
        ({"quantization": "fp8"}, ["float16", "float32", "float8_e4m3fn"], "float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, ["bfloat16"], "float8_e4m3fn"),
    ],
    ids=str,
)
def test_ready_names_the_types_of_weights_and_cache(settings: dict[str, str], weights: list[str], cache: str) -> None:
    config = EngineConfig(model=BUNDLED_MODEL, device="cpu", max_num_seqs=2, memory_bytes=2**26, **settings)  # type: ignore[arg-type]
    engine = GenerationEngine(config)
    try:
        ready = engine.ready()
    finally:
        engine.close()
    assert (ready.weight_dtypes, ready.kv_cache_dtype) == (weights, cache)
    assert ready.speculative_decoding == "none"


def test_ready_names_the_method_of_speculative_decoding() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineConfig(
        model=BUNDLED_MODEL, device="cpu", max_num_seqs=2, memory_bytes=2**26, speculative_config=speculation
    )
    engine = GenerationEngine(config)
    engine.close()
    assert engine.ready().speculative_decoding == "ngram"
