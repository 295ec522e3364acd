"""Runs a command on all nodes of a cluster through a driver process, and collects one answer per node."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.process import end_group, ended_within, start
from meltcore.protocol.cluster import (
    DRIVER_MODULE,
    ClusterFailed,
    CommandEnded,
    CommandStarted,
    FromDriver,
    RunOnNodes,
)

_CONNECT_LIMIT_S = 180.0
_SLACK_S = 240.0  # beyond the command: its start, its end at the limit, and the answers of many nodes
_KILL_LIMIT_S = 5.0
_EXIT_LIMIT_S = 40.0  # for the driver to end the commands


def run_on_nodes(address: str, request: RunOnNodes, on_node: Callable[[CommandEnded], None]) -> list[CommandEnded]:
    """Run a command on every node. Return one `CommandEnded` per node, in the order of the nodes' names.

    `on_node` is called for each node when its command ends. A node that does not answer is `late` or `failed`. Raises
    ConfigError if the cluster cannot be reached, and ProcessError if the driver process cannot be started.
    """
    process = start([sys.executable, "-m", DRIVER_MODULE, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        with suppress(BrokenPipeError):  # it says why before it ends
            process.stdin.write(msgspec.json.encode(request) + b"\n")
        names = _started(lines, address)
        ended = _collect(lines, names, time.monotonic() + request.limit_s + _SLACK_S, on_node)
        return [ended[name] for name in names]
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]
        ended_within(process, _EXIT_LIMIT_S)
        end_group(process, _KILL_LIMIT_S)


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Put each complete line of `stream` into `lines`, and an empty line at the end of the stream.

    The stream is an unbuffered pipe, whose own `readline` would make a system call per byte.
    """
    buffer = b""
    while block := stream.read(2**20):
        *whole, buffer = (buffer + block).split(b"\n")
        for line in whole:
            lines.put(line)
    lines.put(b"")


def _started(lines: queue.SimpleQueue[bytes], address: str) -> list[str]:
    try:
        line = lines.get(timeout=_CONNECT_LIMIT_S)
    except queue.Empty:
        raise ConfigError(f"--ray {address}: the cluster gave no answer within {_CONNECT_LIMIT_S:g} s") from None
    if not line:
        raise ConfigError(f"--ray {address}: the driver of the cluster ended before it answered")
    answer = msgspec.json.decode(line, type=FromDriver)
    if isinstance(answer, ClusterFailed):
        raise ConfigError(answer.message)
    assert isinstance(answer, CommandStarted)
    return answer.nodes


def _collect(
    lines: queue.SimpleQueue[bytes], names: list[str], deadline_s: float, on_node: Callable[[CommandEnded], None]
) -> dict[str, CommandEnded]:
    """Return the answers by node.

    After the deadline or the driver's end, a missing answer is replaced by the reason.
    """
    ended: dict[str, CommandEnded] = {}

    def add(answer: CommandEnded) -> None:
        ended[answer.node] = answer
        on_node(answer)

    while len(ended) < len(names):
        try:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            missing = CommandEnded("", "late", "it gave no answer in time")
        else:
            if line:
                answer = msgspec.json.decode(line, type=FromDriver)
                assert isinstance(answer, CommandEnded)
                add(answer)
                continue
            missing = CommandEnded("", "failed", "the driver of the cluster ended before the node answered")
        for name in names:
            if name not in ended:
                add(msgspec.structs.replace(missing, node=name))
    return ended
