import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.errors import ConfigError
from meltcore.tune.arithmetic import cache_bytes_per_token, reported_capacity, sequences_that_fit
from meltcore.tune.search import largest

QWEN3 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@given(
    limit=st.integers(0, 3000), least=st.integers(1, 500), room=st.integers(0, 2000), step=st.sampled_from([1, 7, 64])
)
def test_the_largest_value_that_works_is_found(limit: int, least: int, room: int, step: int) -> None:
    values = [value for value in range(least, least + room + 1) if value % step == 0]
    if not values:
        with pytest.raises(ValueError, match="no multiple"):
            largest(lambda value: value <= limit, least, least + room, step)
        return
    tried: list[int] = []

    def works(value: int) -> bool:
        tried.append(value)
        return value <= limit

    expected = max((value for value in values if value <= limit), default=None)
    assert largest(works, least, least + room, step) == expected
    assert len(tried) == len(set(tried)), "a start is too dear to try a value twice"
    assert len(tried) <= 2 + 2 * len(values).bit_length()


def test_the_cache_by_hand() -> None:
    """Qwen3-0.6B: 28 layers of 8 heads of 128, keys and values, two bytes each: 112 KiB a token."""
    assert cache_bytes_per_token(QWEN3, 2) == 114_688
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 7
    assert cache_bytes_per_token({**QWEN3, "layer_types": kinds}, 2) == 114_688 // 4
    assert cache_bytes_per_token({"text_config": QWEN3}, 1) == 57_344
    with pytest.raises(ConfigError, match="no num_hidden_layers"):
        cache_bytes_per_token({}, 2)


@pytest.mark.parametrize(
    ("log", "capacity"),
    [
        ("  context 2048 tokens, 256 sequences a step, 8,192 KV pages of 64 tokens, loaded", (524_288, 64)),
        ("  8192 KV pages of 64 tokens", (524_288, 64)),
        ("INFO GPU KV cache size: 1,234,567 tokens", (1_234_567, 1)),
        ("nothing of the kind", None),
    ],
)
def test_what_a_server_says_of_its_cache_is_read_from_its_log(log: str, capacity: tuple[int, int] | None) -> None:
    assert reported_capacity(log) == capacity


def test_a_sequence_takes_whole_pages() -> None:
    assert sequences_that_fit(3712, 256, 64) == 14
    assert sequences_that_fit(3712, 257, 64) == 11
