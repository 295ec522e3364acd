"""Every Triton kernel compiles for sm_80 and sm_86; a file of its own, because `pytest -n` deals out whole files."""

from __future__ import annotations

import pytest
from compile_tools import CompilePool, Task
from test_kernel_compile import AMPERE, assert_compiles, cases_of, named


@pytest.mark.slow
@pytest.mark.parametrize("task", cases_of(*AMPERE), ids=named)
def test_every_kernel_compiles_within_the_shared_memory_of(task: Task, pool: CompilePool) -> None:
    assert_compiles(task, pool)
