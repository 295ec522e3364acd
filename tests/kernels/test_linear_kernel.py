"""The few-token product's Triton body against the torch one, and which products it takes."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too

from meltcore.kernels import linear


def random_product(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs have unit variance."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, input_size).to(dtype)
    return hidden, (torch.randn(output_size, input_size) * input_size**-0.5).to(dtype)


def assert_rounded_once(result: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Both bodies lie within one rounding of the float64 product: one step of the type, and the float32 sum's error."""
    exact = hidden.double() @ weight.double().T
    step = torch.finfo(hidden.dtype).eps
    for body in (result.cpu(), linear._linear_torch(hidden, weight)):
        assert body.dtype == hidden.dtype
        torch.testing.assert_close(body.double(), exact, rtol=step, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("seed", "tokens", "output_size", "input_size"),
    [
        (0, 1, 40, 1024),
        (1, 1, 37, 192),
        (2, 1, 2051, 64),
        (3, 2, 24, 1024),
        (4, 3, 37, 192),
        (5, 5, 2051, 64),
        (6, 7, 19, 3072),
        (7, 13, 1, 128),
        (8, 15, 33, 512),
        (9, 16, 64, 2048),
        (10, 4, 32801, 64),
    ],
)
def test_linear_agrees_with_its_reference(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    result = linear._linear_triton(hidden.to(device), weight.to(device))
    assert result.shape == (tokens, output_size)
    assert_rounded_once(result, hidden, weight)


@pytest.mark.parametrize("tokens", [*range(1, 18)])
def test_the_public_function_serves_every_count_of_tokens(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "use_triton", lambda tensor: True)
    taken: list[int] = []
    body = linear._linear_triton
    monkeypatch.setattr(linear, "_linear_triton", lambda *args: taken.append(tokens) or body(*args))
    hidden, weight = random_product(tokens, tokens, 21, 256, torch.bfloat16)
    assert_rounded_once(linear.linear(hidden.to(device), weight.to(device)), hidden, weight)
    assert taken == ([tokens] if tokens <= linear.MAX_TOKENS else [])


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_past_the_end_are_not_written(tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and outputs are both padded inside; what lies behind the result must survive."""
    hidden, weight = random_product(0, tokens, 21, 64, torch.bfloat16)
    kept = torch.full((tokens * 21 + 64,), 7.0, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: kept[: tokens * 21].view(tokens, 21))
    linear._linear_triton(hidden.to(device), weight.to(device))
    assert (kept[tokens * 21 :] == 7.0).all()


def test_what_does_not_suit_goes_to_torch() -> None:
    hidden, weight = random_product(0, 4, 8, 128, torch.bfloat16)
    assert linear._suits(hidden, weight)
    assert not linear._suits(hidden[:0], weight)
    wide = weight.repeat(linear.FEW_OUTPUTS // 8 + 1, 1)
    assert linear._suits(hidden[:1], wide)
    assert not linear._suits(hidden, wide)
    assert not linear._suits(hidden.repeat(5, 1), weight)
    assert not linear._suits(hidden.float(), weight.float())
    assert not linear._suits(hidden[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not linear._suits(hidden[:, :64], weight[:, :64].contiguous())
    assert not linear._suits(hidden[:, :64].contiguous(), weight[:, :64])
