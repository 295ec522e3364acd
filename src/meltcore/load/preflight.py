"""What the operating system must allow before a level may start: open files and local ports."""

from __future__ import annotations

import resource
from pathlib import Path

from meltcore.errors import ConfigError

# Standard streams, the event loop, pipes to workers, records, control connections.
SPARE_FILES = 64
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_limits(connections: int, *, per_process: int, port_range: Path = _PORT_RANGE) -> None:
    """Raise this process's soft file limit to the hard one; ConfigError says what to change where that is too low.

    `connections` in all go to one address and port, `per_process` of them from one process (workers inherit limits).
    """
    _check_files(per_process + SPARE_FILES)
    _check_ports(connections, port_range)


def _check_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{needed} open files are needed and the hard limit is {hard}: raise it (ulimit -Hn {needed}, "
            f"LimitNOFILE= of a service, --ulimit nofile={needed} of a container) or spread the load with --processes"
        )


def _check_ports(connections: int, port_range: Path) -> None:
    try:
        low, high = map(int, port_range.read_text().split())
    except OSError:
        return  # not Linux: no such limit to read, and connect errors will name it
    available = high - low + 1
    if connections > available:
        raise ConfigError(
            f"{connections} connections to one address need as many local ports and there are {available} "
            f"({low}-{high}): sysctl -w net.ipv4.ip_local_port_range='1024 65535'"
        )
