"""Matrix products of every type on random normal data: zeros draw less power and would flatter a GPU by 13 %."""

from collections.abc import Callable

import torch

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp8": torch.bfloat16}
# Inputs of one product after another come from buffers that together exceed every L2 cache (50 to 126 MB).
_ROTATED_BYTES = 256 * 2**20
_MOST_BUFFERS = 16


def random_matrix(rows: int, columns: int, dtype: str, device: int, seed: int) -> torch.Tensor:
    """[rows, columns], from the device's counter-based generator: the same on all GPUs of a product."""
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)
    values = torch.randn(rows, columns, device=f"cuda:{device}", dtype=torch.float32, generator=generator)
    return values.to(_TYPES[dtype])


def products(dtype: str, m: int, n: int, k: int, device: int) -> Callable[[], torch.Tensor]:
    """A function that enqueues [m, k] x [k, n] once, on the next of its buffers, and returns where the result goes.

    It allocates nothing. fp8 takes e4m3 inputs with one scale each and writes bf16.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    pair_bytes = (m * k + k * n) * (4 if dtype == "tf32" else 1 if dtype == "fp8" else 2)
    count = max(1, min(_MOST_BUFFERS, -(-_ROTATED_BYTES // pair_bytes)))
    lefts = [random_matrix(m, k, dtype, device, seed) for seed in range(count)]
    rights = [random_matrix(n, k, dtype, device, 1000 + seed).t() for seed in range(count)]
    out = torch.empty(m, n, device=f"cuda:{device}", dtype=_TYPES[dtype])
    place = 0
    if dtype == "fp8":
        one = torch.ones((), device=f"cuda:{device}")
        lefts = [left.to(torch.float8_e4m3fn) for left in lefts]
        rights = [right.t().to(torch.float8_e4m3fn).t() for right in rights]

    def product() -> torch.Tensor:
        nonlocal place
        left, right = lefts[place], rights[place]
        place = (place + 1) % count
        if dtype == "fp8":
            torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)
        else:
            torch.mm(left, right, out=out)
        return out

    return product
