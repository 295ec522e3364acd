"""Tests of models that need a whole engine have the engine's tools, those of translation have those of its text."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch with one thread: several only wait for each other at the sizes of tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
