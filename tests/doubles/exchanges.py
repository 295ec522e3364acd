"""Requests of clients that no HTTP server has received."""

from typing import Any

from meltcore.serve.requests.exchange import Exchange


async def _no_receive() -> Any:
    raise AssertionError("the request has no body")


async def _no_send(message: Any) -> None:
    raise AssertionError(f"the client gets no answer: {message}")


def new_exchange(**headers: str) -> Exchange:
    """An exchange whose answer is not looked at. An underscore in the name of a header stands for a hyphen."""
    items = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Exchange({"method": "POST", "path": "/v1/x", "headers": items}, _no_receive, _no_send)
