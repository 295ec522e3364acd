"""Makes tensor maps, by which the tensor memory accelerator (TMA) of Hopper GPUs copies boxes of a matrix."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cuda.bindings.driver import CUtensorMap

_MAX_BOX_COLUMNS = 256


def tensor_map(matrix: torch.Tensor, columns: int, rows: int, *, swizzled: bool = False) -> CUtensorMap:
    """Return the map of a matrix of bfloat16 or of bytes, which is copied in boxes of `rows` by `columns`.

    A column of the map is one number, or two numbers if a box would otherwise have more than 256 columns. A `swizzled`
    box has rows of 128 bytes, as matrix instructions read them.
    """
    shape, size = tuple(matrix.shape), matrix.element_size()
    return _encode(matrix.data_ptr(), shape, matrix.stride(0), columns, rows, swizzled, size)


def row_group_map(matrix: torch.Tensor, columns: int, groups: int, *, gated: bool) -> CUtensorMap:
    """Return the map of bytes [rows, columns], copied in swizzled boxes of `groups` x 16 rows.

    A box has `columns` columns: 32, 64 or 128. A group is 16 neighboring rows of the matrix. If the matrix is `gated`,
    a group is 8 rows of its first half and the same 8 rows of its second half. A box is addressed by the coordinates
    (column, 0, 0, group).
    """
    return _encode_groups(matrix.data_ptr(), tuple(matrix.shape), matrix.stride(0), columns, groups, gated)


@lru_cache(maxsize=4096)
def _encode_groups(
    address: int, shape: tuple[int, ...], stride: int, columns: int, groups: int, gated: bool
) -> CUtensorMap:
    from cuda.bindings import driver

    rows, size = shape
    swizzles, group_rows = driver.CUtensorMapSwizzle, 8 if gated else 16
    halves = rows // 2 if gated else 8
    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        4,
        address,
        [driver.cuuint64_t(each) for each in (size, 8, 2, rows // 16)],
        [driver.cuuint64_t(each * stride) for each in (1, halves, group_rows)],
        [driver.cuuint32_t(each) for each in (columns, 8, 2, groups)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{columns}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error.value:
        raise ValueError(f"no tensor map of {shape} bytes in boxes of {groups} x 16 rows by {columns}: {error.name}")
    return encoded


# A function of its arguments alone, so that one made for memory that has been freed is right for its next owner.
@lru_cache(maxsize=4096)
def _encode(
    address: int, shape: tuple[int, ...], stride: int, columns: int, rows: int, swizzled: bool, element_bytes: int
) -> CUtensorMap:
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    per_column = 2 if columns > _MAX_BOX_COLUMNS else 1
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element_bytes == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    error, encoded = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT32 if per_column == 2 else kind,
        2,
        address,
        [driver.cuuint64_t(shape[1] // per_column), driver.cuuint64_t(shape[0])],
        [driver.cuuint64_t(element_bytes * stride)],
        [driver.cuuint32_t(columns // per_column), driver.cuuint32_t(rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error.value:
        raise ValueError(f"no tensor map of {shape} in boxes of {rows} by {columns}: {error.name}")
    return encoded
