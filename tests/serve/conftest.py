"""Backends serve the request of their task: tests that call them without an HTTP server have one too."""

from __future__ import annotations

import pytest
from exchanges import new_exchange

from meltcore.serve.requests.exchange import set_exchange


@pytest.fixture(autouse=True)
def _exchange() -> None:
    set_exchange(new_exchange())
