"""API keys: sources, comparison, classes and rates; the gate in front of the application."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchanges import new_exchange
from server_harness import configure

from meltcore.common.errors import ConfigError, RequestError
from meltcore.serve.http.gate import RequestGate, check_headers
from meltcore.serve.http.origins import OriginCheck
from meltcore.serve.http.paths import DOCS_PATHS, OPEN_PATHS
from meltcore.serve.openapi import document
from meltcore.serve.requests import keys as keys_module
from meltcore.serve.requests.backend import ModelTable
from meltcore.serve.requests.exchange import Exchange, current_exchange
from meltcore.serve.requests.keys import ApiKeys, resolve_keys
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.routes import build_app
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.settings.fleet_file import parse_fleet
from meltcore.settings.fleet_spec import KeySection, ModelSection

MODELS = {"m": ModelSection(checkpoint="m")}


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def scope(method: str = "POST", path: str = "/v1/x", **headers: str) -> dict[str, Any]:
    items = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"headers": items, "method": method, "path": path}


def table(*configs: KeySection, stats: ServerStats | None = None) -> ApiKeys:
    return ApiKeys(configs, stats or ServerStats(keys=len(configs)))


def test_keys_come_from_flag_environment_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# name and key\nalice wonder\n\nbob builder\n")
    (tmp_path / "one").write_text("looking-glass\n")
    monkeypatch.setenv("TEAM_KEY", "team")
    config = configure(
        MODELS,
        api_key="flag",
        api_key_file=str(tmp_path / "keys"),
        keys=(KeySection(name="team", env="TEAM_KEY"), KeySection(name="carol", file=str(tmp_path / "one"))),
    )
    resolved = resolve_keys(config.spec)
    expected = {"default": "flag", "alice": "wonder", "bob": "builder", "team": "team", "carol": "looking-glass"}
    assert {key.name: key.sha256 for key in resolved.keys} == {name: sha256(key) for name, key in expected.items()}
    assert all(key not in repr(resolved) for key in ("wonder", "builder", "looking-glass", "'flag'"))
    monkeypatch.setenv("MELTCORE_API_KEY", "of the environment")
    (default,) = resolve_keys(configure(MODELS).spec).keys
    assert default.sha256 == sha256("of the environment")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((KeySection(name="a", env="NO_SUCH_VARIABLE"),), "a: the environment variable NO_SUCH_VARIABLE is not set"),
        ((KeySection(name="a", file="/no/such/file"),), "a: /no/such/file cannot be read"),
        ((KeySection(name="a", sha256="0" * 64), KeySection(name="a", sha256="1" * 64)), "same name: a and a"),
        ((KeySection(name="a", sha256="0" * 64), KeySection(name="b", sha256="0" * 64)), "same value: a and b"),
    ],
)
def test_wrong_keys_are_refused_at_the_start(keys: tuple[KeySection, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_keys(configure(MODELS, keys=keys).spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", r"keys\[0\]: give env, .* file or sha256: one of the three"),
        (", env: A, file: b", "one of the three"),
        (f", env: A, sha256: {'0a' * 32}", "one of the three"),
        (", sha256: '12'", r"keys\[0\].sha256: got a value that is not shown; must be 64 hexadecimal digits"),
        (", env: A, requests_per_minute: 0", "requests_per_minute: got 0"),
    ],
)
def test_a_key_has_one_source(fields: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_fleet(f"models: {{a: {{checkpoint: b}}}}\nkeys: [{{name: a{fields}}}]")


@pytest.mark.parametrize("name", ["a" * 65, "a\x07"])
def test_names_of_keys_are_short_and_printable(tmp_path: Path, name: str) -> None:
    (tmp_path / "keys").write_text(f"{name} secret\n")
    with pytest.raises(ConfigError, match=r"keys, line 1: got .*; must be a name of 1 to 64 printable characters"):
        resolve_keys(configure(MODELS, api_key_file=str(tmp_path / "keys")).spec)


def test_limits_of_the_file_are_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MELTCORE_API_KEY", "x")
    text = "models: {a: {checkpoint: b}}\nlimits: {tokens_per_minute: 900}\n"
    text += f"keys: [{{name: own, sha256: {'0a' * 32}, tokens_per_minute: 5}}, {{name: other, sha256: {'1a' * 32}}}]"
    found = {key.name: key.tokens_per_minute for key in resolve_keys(parse_fleet(text)).keys}
    assert found == {"default": None, "own": 5, "other": 900}


def test_a_key_is_accepted_in_both_headers_and_no_other() -> None:
    keys = table(KeySection(name="a", sha256=sha256("first")), KeySection(name="b", sha256=sha256("second")))
    for headers, name in (
        ({"authorization": "Bearer first"}, "a"),
        ({"authorization": "bearer second"}, "b"),
        ({"x_api_key": "second"}, "b"),
        ({"x_api_key": "second", "authorization": "Basic none"}, "b"),
    ):
        found = keys.find(scope(**headers))
        assert found is not None
        assert found.name == name
    with pytest.raises(RequestError, match="no API key") as missing:
        keys.find(scope())
    assert missing.value.status == 401
    for headers in ({"authorization": "Bearer "}, {"authorization": "first"}, {"x_api_key": sha256("first")}):
        with pytest.raises(RequestError, match="the API key is wrong"):
            keys.find(scope(**headers))
    assert ApiKeys((), ServerStats()).find(scope()) is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(keys_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


# threat: who reaches a server: one key's requests and tokens per minute are bounded over all API servers
def test_rate_limits_hold_over_all_processes(clock: SimpleNamespace) -> None:
    """A bucket of a minute's requests, refilled evenly, whichever process takes from it."""
    config = KeySection(name="a", sha256=sha256("x"), requests_per_minute=30)
    first = ServerStats(keys=1, num_processes=3)
    views = [ServerStats(keys=1, num_processes=3, process_index=row, fds=first.fds) for row in (1, 2)]
    found = [table(config, stats=view).find(scope(x_api_key="x")) for view in views]
    served, refusals = 0, list[RequestError]()
    for step in range(1200):  # two minutes, ten requests a second
        for key in found:
            assert key is not None
            try:
                key.admit()
                served += 1
            except RequestError as error:
                refusals.append(error)
        clock.s += 0.1
        assert served <= 30 + 30 * (step + 1) * 0.1 / 60 + 1
    assert served == pytest.approx(30 + 60, abs=1)
    assert first.total("key_0/refused") == len(refusals) == 2400 - served
    assert all(error.status == 429 and 0 < (error.retry_after_s or 0) <= 2 for error in refusals)


def test_tokens_are_counted_when_known_and_refuse_later_requests(clock: SimpleNamespace) -> None:
    key = table(KeySection(name="a", sha256=sha256("x"), tokens_per_minute=600)).find(scope(x_api_key="x"))
    assert key is not None
    key.admit()
    key.charge(600 + 100)  # a minute's and 100 more, which take 10 s
    with pytest.raises(RequestError, match=r"tokens_per_minute \(600\)") as refused:
        key.admit()
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.s += 10
    key.admit()


def checked(keys: ApiKeys, **headers: str) -> Exchange:
    """A request whose headers the gate has checked."""
    exchange = new_exchange(**headers)
    check_headers(exchange, keys)
    return exchange


def test_class_and_time_limit_are_read_from_headers() -> None:
    keys = table(KeySection(name="a", sha256=sha256("x"), priority="standard"))
    exchange = checked(keys, x_api_key="x", x_priority_class="Interactive", x_request_timeout="2.5")
    assert (exchange.class_of("batch"), exchange.limit_s(600), exchange.limit_s(1)) == ("standard", 2.5, 1)
    assert checked(keys, x_api_key="x").class_of("interactive") == "standard"
    without_key = checked(ApiKeys((), ServerStats()))
    classes = [without_key.class_of("standard", priority) for priority in (None, 0, -1, 7)]
    assert classes == ["standard", "standard", "interactive", "batch"]
    for name, value in (("x_request_timeout", "soon"), ("x_request_timeout", "0"), ("x_request_timeout", "nan")):
        with pytest.raises(RequestError, match="X-Request-Timeout must be a number of seconds above 0"):
            checked(ApiKeys((), ServerStats()), **{name: value})
    with pytest.raises(RequestError, match="one of interactive, standard, batch; got 'urgent'"):
        checked(ApiKeys((), ServerStats()), x_priority_class="urgent")


# threat: who reaches a server: where keys are set, only pages and health answer without; `/metrics` does not
def test_every_route_needs_a_key_but_the_open_ones() -> None:
    """No route checks keys itself: the gate stands before all of them, also before paths that do not exist."""
    stats, statuses = ServerStats(keys=1), dict[str, int]()
    log: Any = SimpleNamespace(write=lambda event, **fields: None)
    config = configure(MODELS, profile_dir="x").spec
    app: Any = build_app(
        ModelTable(), config, Metrics(stats, dict), log, table(KeySection(name="a", sha256=sha256("x")), stats=stats)
    )
    methods = {route.path: method for route in app._app._app.routes for method in route.methods}
    assert len(methods) > 30
    described = set(document()["paths"]) | {"/", *DOCS_PATHS, "/start_profile", "/stop_profile"}
    of_no_task = [route.path for route in app._app._app.routes if not isinstance(route.endpoint, Endpoint)]
    assert {path.replace(":path", "") for path in of_no_task} <= described, "/openapi.json has every route"
    assert {"/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/start_profile"} <= set(methods)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def ask(path: str, method: str) -> None:
        async def send(message: Any) -> None:
            statuses.setdefault(path, message.get("status"))

        await app(scope(method, path) | {"type": "http", "query_string": b"", "root_path": ""}, receive, send)

    async def scenario() -> None:
        for path, method in [*methods.items(), ("/none", "POST")]:
            await ask(path, method)

    asyncio.run(scenario())
    assert {path for path, status in statuses.items() if status != 401} == OPEN_PATHS


# threat: who reaches a server: keys are in no log line, and refused requests reach no route
def test_the_gate_stops_what_has_no_key_and_logs_no_key() -> None:
    lines: list[dict[str, Any]] = []
    sent: list[Any] = []
    names: list[str | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        key = current_exchange().key
        names.append(None if key is None else key.name)

    async def send(message: Any) -> None:
        sent.append(message)

    log: Any = SimpleNamespace(write=lambda event, **fields: lines.append(fields))
    gate = RequestGate(app, table(KeySection(name="a", sha256=sha256("secret"))), log, OriginCheck("127.0.0.1"))

    async def scenario() -> None:
        await gate(scope(x_api_key="secret"), None, send)  # type: ignore[arg-type]
        await gate(scope("GET", "/health"), None, send)  # type: ignore[arg-type]
        await gate(scope(x_api_key="wrong-one", x_request_id="r1"), None, send)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert names[0] == "a"
    assert len(names) == 2
    (refusal,) = lines
    assert (refusal["status"], refusal["request_id"], refusal["error"]) == (401, "r1", "invalid_api_key")
    assert sent[0]["status"] == 401
    assert "wrong-one" not in repr((lines, sent))
