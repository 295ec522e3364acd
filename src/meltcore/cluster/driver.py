"""The driver of a Ray cluster: `python -m meltcore.cluster.driver ADDRESS`; `protocol/cluster.py` has its lines."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from meltcore.cluster.nodes import connect, read_nodes
from meltcore.errors import ConfigError, MeltcoreError
from meltcore.protocol.cluster import ClusterFailed, FromDriver, Nodes, ToDriver


def main() -> int:
    """Answer the lines of the standard input. Returns the exit status: 1 where the cluster cannot be reached."""
    # Standard output carries answers only: what Ray prints goes to standard error.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends

    def answer(message: FromDriver) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    try:
        connect(sys.argv[1])
    except ConfigError as error:
        answer(ClusterFailed(str(error)))
        return 1
    decode = msgspec.json.Decoder(ToDriver).decode
    for line in sys.stdin.buffer:
        decode(line)
        try:
            answer(Nodes(read_nodes()))
        except MeltcoreError as error:
            answer(ClusterFailed(str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
