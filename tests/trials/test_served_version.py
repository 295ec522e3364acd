import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from meltcore.trials.server import served_version


@pytest.mark.parametrize(
    ("status", "body", "version"),
    [(200, b'{"version": "0.33.0"}', "0.33.0"), (404, b"{}", None), (200, b"[]", None), (200, b"not JSON", None)],
)
def test_a_servers_version_is_kept_where_it_tells_one(status: int, body: bytes, version: str | None) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request, daemon=True)
    thread.start()
    assert served_version(f"http://127.0.0.1:{server.server_port}") == version
    thread.join(10)
    server.server_close()


def test_a_server_that_is_gone_has_no_version() -> None:
    assert served_version("http://127.0.0.1:9") is None
