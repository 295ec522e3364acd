"""Every Triton kernel compiles for sm_89, sm_100 and sm_120; apart, because `pytest -n` deals out whole files."""

from __future__ import annotations

import pytest
from compile_tools import CompilePool, Task
from test_kernel_compile import ADA_AND_BLACKWELL, assert_compiles, cases_of, named


@pytest.mark.slow
@pytest.mark.parametrize("task", cases_of(*ADA_AND_BLACKWELL), ids=named)
def test_every_kernel_compiles_within_the_shared_memory_of(task: Task, pool: CompilePool) -> None:
    assert_compiles(task, pool)
