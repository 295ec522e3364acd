import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.common.errors import ConfigError
from meltcore.measure.experiments.tune.context import (
    find_largest_fitting,
    kv_bytes_per_token,
    max_sequences,
    reported_capacity,
)

QWEN3 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@given(
    limit=st.integers(0, 3000), low=st.integers(1, 500), extra=st.integers(0, 2000), step=st.sampled_from([1, 7, 64])
)
def test_search_finds_the_largest_working_value_in_few_tries(limit: int, low: int, extra: int, step: int) -> None:
    values = [value for value in range(low, low + extra + 1) if value % step == 0]
    if not values:
        with pytest.raises(ValueError, match="no multiple"):
            find_largest_fitting(lambda value: value <= limit, low, low + extra, step)
        return
    tried: list[int] = []

    def works(value: int) -> bool:
        tried.append(value)
        return value <= limit

    expected = max((value for value in values if value <= limit), default=None)
    assert find_largest_fitting(works, low, low + extra, step) == expected
    assert len(tried) == len(set(tried)), "a start is too expensive to try a value twice"
    assert len(tried) <= 2 + 2 * len(values).bit_length()


def test_kv_cache_bytes_of_qwen3() -> None:
    """Qwen3-0.6B: 28 layers of 8 heads of 128, keys and values, two bytes each: 112 KiB per token."""
    assert kv_bytes_per_token(QWEN3, 2) == 114_688
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 7
    assert kv_bytes_per_token({**QWEN3, "layer_types": types}, 2) == 114_688 // 4
    assert kv_bytes_per_token({"text_config": QWEN3}, 1) == 57_344
    with pytest.raises(ConfigError, match="no num_hidden_layers"):
        kv_bytes_per_token({}, 2)


@pytest.mark.parametrize(
    ("log", "capacity"),
    [
        ("  context 2048 tokens, 256 sequences a step, 8,192 KV pages of 64 tokens, loaded", (524_288, 64)),
        ("  8192 KV pages of 64 tokens", (524_288, 64)),
        ("INFO GPU KV cache size: 1,234,567 tokens", (1_234_567, 1)),
        ("nothing of the kind", None),
    ],
)
def test_kv_cache_capacity_is_read_from_the_log(log: str, capacity: tuple[int, int] | None) -> None:
    assert reported_capacity(log) == capacity


def test_sequences_take_whole_pages() -> None:
    assert max_sequences(3712, 256, 64) == 14
    assert max_sequences(3712, 257, 64) == 11
