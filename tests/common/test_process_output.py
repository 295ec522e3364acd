"""The last lines of a program's output, as errors show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meltcore.common.process_output import log_tail, one_line


@pytest.mark.parametrize(
    ("output", "tail"),
    [
        (b"", ""),
        (b"\n \n\t\n", ""),
        (b"one\r\ntwo\r\n\r\n", "one\ntwo"),
        (b"\x1b[1;31mCUDA error\x1b[0m: out of \x1b]0;title\x07memory\x1b(B\n", "CUDA error: out of memory"),
        (b"loading 1 %\rloading 50 %\rloading 100 %\n", "loading 100 %"),
        (b"a\x00b\x07c\x7f\xe2\x80\xaed\xe2\x81\xa6e\n", "abcde"),
        ("कक्षा\ttab\n".encode(), "कक्षा\ttab"),
        (b"cut \xff\xfe\n", "cut \ufffd\ufffd"),
        (b"".join(b"%d\n" % line for line in range(20)), "\n".join(map(str, range(12, 20)))),
        (b"x" * 5000, "..." + "x" * 400),
    ],
)
def test_tail_has_the_lines_that_a_terminal_would_show(tmp_path: Path, output: bytes, tail: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(output)
    assert log_tail(log) == tail


def test_tail_of_a_large_log_reads_its_end_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**40)  # with a hole, which takes no space
        file.seek(0, 2)
        file.write(b"\nthe reason\n")
    assert log_tail(log).endswith("the reason")
    assert log_tail(tmp_path / "none") == ""
    assert log_tail(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("why", "why"),
        (
            "it ended (exit status 1):\nCUDA error: out of memory\n",
            "it ended (exit status 1): CUDA error: out of memory",
        ),
        ("it ended:\nfirst\n\n\x1b[31msecond\x1b[0m", "it ended: first | second"),
        ("it ended:\n" + "\n".join(each * 390 for each in "xyz"), f"it ended: ... | {'y' * 390} | {'z' * 390}"),
    ],
)
def test_reason_becomes_one_line_that_keeps_its_end(text: str, line: str) -> None:
    assert one_line(text) == line
    assert len(one_line(text)) < 1100
