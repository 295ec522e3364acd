"""The table of models: the default is the first of the file, whatever order models were added in."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meltcore.serve.requests.backend import LANGUAGE_PATHS, Health, ModelTable
from meltcore.serve.requests.exchange import Exchange, set_exchange
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.settings.fleet_spec import FleetSpec
from meltcore.settings.routes_section import ChatRoute, LanguagesSection, RoutesSection


def backend(*names: str) -> Any:
    health = SimpleNamespace(status="ready")
    return SimpleNamespace(names=names, paths=LANGUAGE_PATHS, health=health, check_ready=lambda: None)


def order(table: ModelTable) -> list[str]:
    return [each.names[0] for each in table.backends]


def test_default_follows_the_file_and_survives_replacements() -> None:
    table = ModelTable()
    table.change_routes(("a", "b", "c"), table.languages, table.routes)
    b, a, c = backend("b"), backend("a", "alias"), backend("c")
    for each in (b, c, a):
        table.add(each)
    assert order(table) == ["a", "b", "c"]
    assert table.find(None) is a
    successor = backend("a", "alias")
    table.add(successor)  # while the first one drains
    assert table.find(None) is successor
    table.remove(a)
    assert table.find(None) is table.find("alias") is successor
    table.add(backend("new"))
    assert order(table) == ["a", "b", "c", "new"]
    table.change_routes(("new", "c", "b", "a"), table.languages, table.routes)
    assert order(table) == ["new", "c", "b", "a"]


def test_default_of_a_path_is_the_first_model_that_serves_it() -> None:
    def forwarding(name: str, *paths: str) -> Any:
        return SimpleNamespace(names=(name,), paths=paths, forward=None)

    chat, completions = LANGUAGE_PATHS
    table = ModelTable([forwarding("embed", "/v1/embeddings"), forwarding("far", chat), backend("own", "alias")])
    found = [table.default(path) for path in (chat, completions, "/v1/embeddings", "/v1/rerank")]
    assert found == ["far", "own", "embed", None]
    for model in ("alias", "own"):
        table.change_routes((), LanguagesSection(), RoutesSection(chat=ChatRoute(model=model)))
        assert table.default(chat) == model
    assert table.default("/v1/embeddings") == "embed"


def test_without_an_order_models_stay_as_they_were_added() -> None:
    table = ModelTable([backend("b"), backend("a")])
    assert order(table) == ["b", "a"]


class _Named(Endpoint):
    """Looks up the model that the query names, by its path or by its task."""

    async def respond(self, exchange: Exchange) -> None:
        name = exchange.query.get("model")
        if "chat" in exchange.query:
            self.choices.chat_model(name)
        self.find_model(exchange, name)


@pytest.mark.parametrize(
    ("query", "statuses", "status", "logged"),
    [
        ("model=alias", ("loading", "ready"), 503, "a"),
        ("chat", ("loading", "ready"), 503, "a"),
        ("", ("loading", "ready"), 503, "a"),
        ("model=b", ("ready", "failed"), 503, "b"),
        ("model=" + "c" * 1000, ("ready", "ready"), 404, "c" * 256),
        ("", ("failed",), 503, "a"),
        ("", ("failed", "failed"), 503, None),
    ],
)
def test_log_line_of_a_refused_request_names_the_model(
    query: str, statuses: tuple[str, ...], status: int, logged: str | None
) -> None:
    """A model that could not serve, or was not there, was missing in the line."""
    models = [backend(*names) for names in (("a", "alias"), ("b",))[: len(statuses)]]
    for each, state in zip(models, statuses, strict=True):
        stats = ServerStats()
        each.health, each.chats = Health(stats.models[0], model=each.names[0]), True
        each.health.set(state, state)
        each.check_ready = lambda health=each.health: refuse(health)

    def refuse(health: Health) -> None:
        if health.status != "ready":
            raise health.not_ready(health.reason)

    async def send(_message: object) -> None:
        """Read no answer."""

    async def request() -> None:
        scope = {"type": "http", "path": LANGUAGE_PATHS[0], "headers": [], "query_string": query.encode()}
        set_exchange(Exchange(scope, None, send))  # type: ignore[arg-type]
        await _Named(ModelTable(models), FleetSpec(models={}), log)(scope, None, send)  # type: ignore[arg-type]

    stream = io.StringIO()
    log = Log("json", ServerStats(), stream)
    asyncio.run(request())
    log.close()
    line = msgspec.json.decode(stream.getvalue())
    assert (line["status"], line["model"]) == (status, logged)
