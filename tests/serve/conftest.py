"""What tests of servers share: the request of their task for backends without an HTTP server, and a client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from exchanges import new_exchange
from server_harness import RunningServer
from waiting import WAIT_S

from meltcore.serve.requests.exchange import set_exchange


@pytest.fixture(autouse=True)
def _exchange() -> None:
    set_exchange(new_exchange())


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The unmodified client of OpenAI for the `server` of a test's file."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=WAIT_S, max_retries=0) as made:
        yield made
