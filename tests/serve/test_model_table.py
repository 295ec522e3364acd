"""The table of models: the default is the first of the file, whatever order models were added in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meltcore.serve.requests.backend import LANGUAGE_PATHS, ModelTable
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
