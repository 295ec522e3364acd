"""https: one server process and its API servers, clients of others and ours, and certificates that change or fail."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop
from server_harness import MODEL, RunningServer, scripted_server
from waiting import WAIT_S, until, wait_until

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.serve.http import http_server, tls
from meltcore.serve.http.tls import TlsCertificate
from meltcore.serve.requests.asgi import read_body, send_bytes
from meltcore.serve.requests.stats import ServerStats

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes certificates, is missing")
ONE_CALL = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
NAMES = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]


def make(folder: Path, password: str | None = None) -> tuple[str, str]:
    """A certificate for this machine and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    locked = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command = ["openssl", *ONE_CALL, *NAMES, *locked, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files: tuple[str, str]) -> Iterator[RunningServer]:
    cert, key = files
    with scripted_server(wait=False, api_server_count=2, ssl_certfile=cert, ssl_keyfile=key) as running:
        running.tls = ssl.create_default_context(cafile=cert)
        running.wait_healthy()
        yield running
        running.check_no_leak()
        assert "Traceback" not in running.stderr


# threat: who reaches a server: with a certificate the server answers no plain HTTP
def test_the_server_prints_and_serves_https_alone(server: RunningServer) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as plain:
        plain.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_curl_trusts_the_certificate_and_keeps_its_connection(server: RunningServer, files: tuple[str, str]) -> None:
    command = ["curl", "--silent", "--show-error", "--max-time", str(WAIT_S), "--write-out", " %{num_connects}"]
    urls = [f"{server.url}/live", f"{server.url}/health"]
    done = subprocess.run([*command, "--cacert", files[0], *urls], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "0"  # connections made for the second URL
    distrustful = subprocess.run([*command, *urls[:1]], capture_output=True, text=True, check=False)
    assert distrustful.returncode == 60  # curl's status for a certificate of no known authority


def test_openai_client_streams_over_tls(server: RunningServer, files: tuple[str, str]) -> None:
    http_client = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=files[0]))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=WAIT_S, http_client=http_client) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=12, stream=True
        )
        texts = [event.choices[0].delta.content or "" for event in stream]
    assert "".join(texts) == "hellohellohe"


def test_our_own_client_trusts_what_the_environment_names(
    server: RunningServer, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", server.url]) == 2
    assert "certificate verify failed" in capsys.readouterr().err
    monkeypatch.setenv("SSL_CERT_FILE", files[0])
    assert main(["chat", server.url, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_all_api_servers_serve_and_each_connection_goes_on(server: RunningServer) -> None:
    clients = [server.connect() for _ in range(6)]
    for _ in range(2):  # on the same connections
        for client in clients:
            client.request("GET", "/v1/models")
            answer = client.getresponse()
            assert answer.status == 200
            assert answer.read()
    for client in clients:
        client.close()


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    cert, key = make(tmp_path / "served")
    with scripted_server(wait=False, ssl_certfile=cert, ssl_keyfile=key) as server:
        server.tls = ssl.create_default_context(cafile=cert)
        server.wait_healthy()
        old = server.connect()
        old.request("GET", "/live")
        assert old.getresponse().read()
        Path(key).write_text("no key")
        first = shown(server)
        wait_until(lambda: shown(server) and "event=certificate_unusable" in server.stderr, "a line about the key")
        assert shown(server) == first
        renewed_cert, renewed_key = make(tmp_path / "renewed")
        Path(renewed_cert).replace(cert)
        Path(renewed_key).replace(key)
        wait_until(lambda: shown(server) != first, "the renewed certificate")
        assert ssl.DER_cert_to_PEM_cert(shown(server)) == Path(cert).read_text()
        old.request("GET", "/live")  # a connection of before goes on
        assert old.getresponse().status == 200
        old.close()
        assert "Traceback" not in server.stderr


def shown(server: RunningServer) -> bytes:
    """The certificate that a new connection is shown, in DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection,
        context.wrap_socket(connection) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def test_uploads_refused_handshakes_and_lost_clients_are_counted(files: tuple[str, str]) -> None:
    """Each connection ends as one, whichever way, and a body of megabytes arrives whole."""
    body = os.urandom(3 * 2**20)
    ends: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            await read_body(scope, receive, 0)
            ends.append((await receive())["type"])
        else:
            assert scope["scheme"] == "https"
            await send_bytes(send, await read_body(scope, receive, len(body)), b"text/plain")

    async def run() -> bytes:
        stats = ServerStats()
        server = http_server.HttpServer(application, stats, TlsCertificate(*files))
        serving = asyncio.create_task(server.serve())

        async def connect(context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            server.add_connection(theirs)
            return await asyncio.open_connection(sock=ours, ssl=context, server_hostname="localhost")

        trusting = ssl.create_default_context(cafile=files[0])
        async with asyncio.timeout(WAIT_S):
            for _ in range(20):
                with pytest.raises(ssl.SSLError):
                    await connect(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            reader, writer = await connect(trusting)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            received = await reader.readexactly(len(body))
            _, lost = await connect(trusting)
            lost.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: len(server._connections()) == 2, "both connections")
            lost.transport.abort()
            await until(lambda: ends, "the end of the lost client's request")
            writer.close()
            await until(lambda: stats.closed_connections() == [22], "every connection is counted once")
        server.stop()
        await serving
        return received

    assert uvloop.run(run()) == body
    assert ends == ["http.disconnect"]


def test_the_files_are_read_once_per_second_and_change(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s, reasons = [0.0], []
    monkeypatch.setattr(tls.time, "monotonic", lambda: clock_s[0])
    cert, key = (shutil.copy(each, tmp_path) for each in files)
    certificate = TlsCertificate(cert, key, reasons.append)
    first = certificate.context()
    Path(cert).unlink()
    clock_s[0] = tls.CHECK_S / 2
    assert (certificate.context(), reasons) == (first, [])
    clock_s[0] = tls.CHECK_S
    assert certificate.context() is first
    clock_s[0] *= 2
    assert certificate.context() is first
    assert reasons == [f"--ssl-certfile: {cert} cannot be read: No such file or directory"]
    shutil.copy(files[0], cert)
    clock_s[0] *= 2
    assert certificate.context() is not first
    assert len(reasons) == 1


def test_unusable_files_are_named_before_the_start(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = files
    locked, other = make(tmp_path / "locked", "secret"), make(tmp_path / "other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for pair, expected in (
        ((cert, str(tmp_path / "none")), f"--ssl-keyfile: {tmp_path / 'none'} cannot be read: No such file"),
        ((str(tmp_path), key), f"--ssl-certfile: {tmp_path} cannot be read: Is a directory"),
        ((cert, other[1]), f"the certificate {cert} with the key {other[1]}: the key is not the certificate's"),
        ((cert, str(pipe)), f"--ssl-keyfile: {pipe} is a pipe or a device"),
        ((cert, "/dev/zero"), "--ssl-keyfile: /dev/zero is a pipe or a device"),
        ((cert, None), "--ssl-keyfile its private key without a password"),  # the file has no key
        ((str(text), key), "--ssl-certfile takes the certificate and its chain in PEM"),
        (locked, f"--ssl-keyfile: the key in {locked[1]} has a password"),
    ):
        with pytest.raises(ConfigError) as error:
            TlsCertificate(*pair)
        assert expected in str(error.value)
    serve = ["serve", "meltcore/sums", "--port", "0"]
    assert main([*serve, "--ssl-certfile", cert, "--ssl-keyfile", other[1]]) == 2
    assert main([*serve, "--ssl-keyfile", key]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    mismatch = f"the certificate {cert} with the key {other[1]}: the key is not the certificate's; {tls._FORM}"
    lonely = f"--ssl-keyfile: got {key}, and no certificate; add --ssl-certfile"
    assert printed.err.splitlines() == [f"meltcore serve: {mismatch}", f"meltcore serve: {lonely}"]
