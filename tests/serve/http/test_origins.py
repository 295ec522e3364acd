"""Which web pages may use a server: Host against DNS rebinding, Origin against pages of other sites."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from meltcore.common.errors import RequestError
from meltcore.common.options import add_options
from meltcore.serve.http.origins import OriginCheck
from meltcore.settings.fleet_spec import ServerSection

OWN = ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "[::1]")
FOREIGN = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "[::2]"),
    *("[::1", "", "localhost@evil.example", "\xff"),
)


def outcome(check: OriginCheck, method: str = "POST", **headers: str) -> str:
    """The error's code, "" where the request passes."""
    scope: Any = {
        "method": method,
        "headers": [(name.encode(), each.encode("latin-1")) for name, each in headers.items()],
    }
    try:
        check.check(scope)
    except RequestError as error:
        refused = error
    else:
        return ""
    assert refused.status == 403
    assert "(--allowed-origins, or server.allowed_origins of a fleet)" in refused.message
    return str(refused.code)


# threat: a web page: DNS rebinding: a server on loopback answers hosts of its own machine alone
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_loopback_server_takes_hosts_of_its_own_machine_alone(method: str) -> None:
    for address in ("127.0.0.1", "localhost", "::1"):
        check = OriginCheck(address)
        assert {host: outcome(check, method, host=host) for host in OWN} == dict.fromkeys(OWN, "")
        assert {outcome(check, method, host=host) for host in FOREIGN} == {"host_not_allowed"}
        assert outcome(check, method) == "", "HTTP/1.0 without Host is no browser"
    for address in ("0.0.0.0", "::", "10.0.0.1"):
        assert {outcome(OriginCheck(address), method, host=host) for host in (*OWN, *FOREIGN)} == {""}


# threat: a web page: a page of another site cannot act: POST with its `Origin` is 403
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_pages_of_other_sites_may_not_act(address: str) -> None:
    check = OriginCheck(address)
    for origin in (
        "https://evil.example",
        "null",
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "localhost:8000",
        "",
    ):
        assert outcome(check, host="localhost:8000", origin=origin) == "origin_not_allowed", origin
        for method in ("PUT", "DELETE", "PATCH"):
            assert outcome(check, method, host="localhost:8000", origin=origin) == "origin_not_allowed"
        assert outcome(check, "GET", host="localhost:8000", origin=origin) == "", "its answer is kept from the page"
    assert outcome(check, host="localhost:8000", origin="http://localhost:8000") == ""
    assert outcome(check, origin="http://localhost:8000") == "origin_not_allowed", "no Host to compare with"


# threat: a web page: CORS answers go to allowed origins alone
def test_allowed_origins_and_their_hosts_pass() -> None:
    check = OriginCheck("127.0.0.1", ("https://app.example", "http://[fd00::1]:3000", "null"))
    assert outcome(check, host="localhost:8000", origin="https://app.example") == ""
    assert outcome(check, host="localhost:8000", origin="null") == ""
    assert outcome(check, host="localhost:8000", origin="http://app.example") == "origin_not_allowed"
    assert outcome(check, host="localhost:8000", origin="https://app.example.evil.example") == "origin_not_allowed"
    # A reverse proxy that keeps Host, and the page that the server itself has at this name.
    assert outcome(check, host="app.example", origin="https://app.example") == ""
    assert outcome(check, host="[fd00::1]:3000") == ""
    assert outcome(check, host="evil.example") == "host_not_allowed"
    everything = OriginCheck("127.0.0.1", ("*",))
    assert outcome(everything, host="evil.example", origin="null") == ""


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://App.example", "https://*.example", "", "https://"]
)
def test_origin_that_no_browser_sends_is_refused_at_the_start(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServerSection)
    with pytest.raises(SystemExit):
        parser.parse_args(["--allowed-origins", origin])
    assert "argument --allowed-origins: must be a scheme and a host" in capsys.readouterr().err


def test_values_of_host_do_not_pile_up() -> None:
    check = OriginCheck("127.0.0.1")
    for port in range(5000):
        assert outcome(check, host=f"localhost:{port}") == ""
    assert len(check._accepted_hosts) <= 256
