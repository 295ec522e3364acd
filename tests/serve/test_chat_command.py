"""`meltcore chat` streams answers, keeps the history, and survives interrupted answers and errors."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from server_harness import RunningServer, scripted_server
from waiting import WAIT_S, wait_until

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "meltcore.cli.main", "chat"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server("--step-s", "0.02", engine={"max_model_len": 4096}) as running:
        yield running
        running.check_no_leak()


def ask(server: RunningServer, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, server.url, "--max-tokens", "6", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_each_line_is_a_question_that_follows_the_earlier_ones(server: RunningServer) -> None:
    done = ask(server, "abc\n\nxyz\n/new\nxyz\n")
    # The scripted engine repeats its prompt, which is all messages joined.
    assert (done.returncode, done.stdout.splitlines()) == (0, ["abcabc", "abcabc", "xyzxyz"])
    assert ask(server, "abc\n", "--system", "S-").stdout == "S-abcS\n"


def test_bytes_that_are_no_text_are_replaced(server: RunningServer) -> None:
    command = [*COMMAND, server.url, "--max-tokens", "20"]
    done = subprocess.run(command, input=b"\xff\xfe bad\n", capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith("\ufffd\ufffd bad")


def test_errors_are_printed_and_the_chat_goes_on(server: RunningServer) -> None:
    done = ask(server, "boom\nab\n")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["", "ababab"])
    assert "meltcore chat: http 400: " in done.stderr
    assert "no booms" in done.stderr
    refused = ask(server, "ab\n", "--model", "other")
    assert refused.returncode == 1
    assert "there is no model 'other' here" in refused.stderr
    command = [*COMMAND, "http://127.0.0.1:9"]
    lost = subprocess.run(command, input="a\n", capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert lost.returncode == 2
    assert "http://127.0.0.1:9 does not answer: connect refused" in lost.stderr


def test_an_interrupt_stops_the_answer_and_not_the_chat(server: RunningServer) -> None:
    parent, child = pty.openpty()
    command = [*COMMAND, server.url, "--max-tokens", "2000"]
    shown = bytearray()
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True) as process:
        os.close(child)
        try:
            with closing(os.fdopen(parent, "rb+", buffering=0)) as terminal:

                def read_until(text: bytes, times: int = 1) -> None:
                    while shown.count(text) < times:
                        shown.extend(terminal.read(65_536))

                # The end of input that is typed before a prompt is lost, so each prompt is waited for.
                read_until(b"> ")
                terminal.write(b"abc\n")
                read_until(b"abc", 3)  # typed, and twice in the answer
                process.send_signal(signal.SIGINT)
                read_until(b"> ", 2)
                wait_until(lambda: server.metrics()["requests_in_flight"] == 0, "the stopped answer to end")
                process.send_signal(signal.SIGINT)  # at the prompt
                read_until(b"Ctrl-D ends the chat", 2)
                read_until(b"> ", 3)
                terminal.write(b"xyz\n")
                read_until(b"xyz", 2)
                process.send_signal(signal.SIGINT)
                read_until(b"> ", 4)
                terminal.write(b"\x04")
                assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
