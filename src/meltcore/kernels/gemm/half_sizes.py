"""Sizes of weights that a CPU holds in float16 (half_weight.py), for memory plans. No torch."""

from __future__ import annotations

import platform
from collections.abc import Collection

_HALF_TYPES = {"F16", "BF16", "float16", "bfloat16"}  # of safetensors and GGUF, and of config.json
_PACKED_ROWS = 16  # of a weight, which FBGEMM packs together
_PACKED_COLUMNS = 512  # a shorter last block is padded, and the padding is written too


def processor_packs_half() -> bool:
    """Return whether torch has FBGEMM for this processor. The engine asks torch itself, which also wants AVX2."""
    return platform.machine() in ("x86_64", "AMD64")


def stores_half(dtype_names: Collection[str]) -> bool:
    """Return whether a checkpoint stores unquantized matrices, all of them in types of 16 bits.

    `dtype_names` are the types.
    """
    return bool(dtype_names) and _HALF_TYPES.issuperset(dtype_names)


def describe_host_weights(*, in_half: bool, in_two_parts: bool) -> str:
    """Describe for the user the form in which a CPU holds converted weights."""
    form = "float32" if not in_half else "float16 in two parts" if in_two_parts else "float16"
    return f"held in {form} for the CPU"


def packed_half_bytes(rows: int, columns: int, *, in_two_parts: bool) -> int:
    """Return the bytes of a packed weight [rows, columns]."""
    padded_rows, padded_columns = (
        -(-rows // _PACKED_ROWS) * _PACKED_ROWS,
        -(-columns // _PACKED_COLUMNS) * _PACKED_COLUMNS,
    )
    return (1 + in_two_parts) * 2 * padded_columns * padded_rows


def converted_bytes(
    rows: int, columns: int, *, in_half: bool, in_blocks: bool, is_embedding: bool = False, loaded_bytes: int = 0
) -> int:
    """Return the bytes of a weight [rows, columns] that a CPU has converted.

    Args:
        rows: the rows of the weight.
        columns: the columns of the weight.
        in_half: whether the weight is converted to float16. False converts it to float32.
        in_blocks: whether it is loaded as quantized blocks, whose values need a second part of float16.
        is_embedding: whether its rows are looked up too. Blocks are kept for that, and 16-bit values unpacked.
        loaded_bytes: the bytes of an embedding's blocks.
    """
    if not in_half:
        return 4 * rows * columns
    table_bytes = loaded_bytes if in_blocks else 2 * rows * columns
    return packed_half_bytes(rows, columns, in_two_parts=in_blocks) + (table_bytes if is_embedding else 0)
