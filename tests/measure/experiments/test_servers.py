"""Command templates and what a started server reports of itself."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import free_port
from meltcore.measure.experiments.servers import parse_command, read_command, server_version


def test_port_and_arguments_replace_the_placeholders() -> None:
    command = parse_command("serve model --port {port} {args} --last")
    assert command.argv(81, ["--seqs", "4"]) == ["serve", "model", "--port", "81", "--seqs", "4", "--last"]
    assert parse_command("serve --port={port}").argv(81, ["-x"]) == ["serve", "--port=81", "-x"]
    assert parse_command("serve --port={port} {args}").argv(81) == ["serve", "--port=81"]


def test_command_file_may_hold_comments_line_breaks_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "A.cmd"
    file.write_text("# ours\nCUDA_VISIBLE_DEVICES=0 NAME=\"two words\" \\\n  serve 'a model'\n  --port {port}  # 0\n")
    command = read_command(file)
    assert command.template == ("serve", "a model", "--port", "{port}")
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "0", "NAME": "two words"}


def test_redacted_command_holds_no_secret_and_no_folder() -> None:
    command = parse_command("TOKEN=hush /opt/bin/serve --api-key secret --port {port} {args}")
    assert command.redacted == "TOKEN=... .../serve --api-key '***' --port {port} {args}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no program"),
        ("A=1 # only that", "names no program"),
        ("serve 'model --port {port}", "cannot be parsed"),
        ("serve model --port 8000", "has no {port}"),
    ],
)
def test_command_without_program_or_port_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_command(text)


def test_missing_command_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the command file .*none\.cmd"):
        read_command(tmp_path / "none.cmd")


def test_free_port_is_an_unprivileged_port() -> None:
    assert 1024 <= free_port() <= 65_535


@pytest.mark.parametrize(
    ("status", "body", "version"),
    [(200, b'{"version": "0.33.0"}', "0.33.0"), (404, b"{}", None), (200, b"[]", None), (200, b"not JSON", None)],
)
def test_server_version_is_read_where_the_server_reports_one(status: int, body: bytes, version: str | None) -> None:
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
    assert server_version(f"http://127.0.0.1:{server.server_port}") == version
    thread.join(WAIT_S)
    server.server_close()


def test_unreachable_server_has_no_version() -> None:
    assert server_version("http://127.0.0.1:9") is None
