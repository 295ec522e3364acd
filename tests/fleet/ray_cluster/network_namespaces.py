"""Two network namespaces with a switch between them, which can be cut: packets are dropped, and both links stay up."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_LIMIT_S = 10
_OWN = Path("/proc/thread-self/ns/net")


class Network:
    """The namespaces "near" and "far", each with an address; the ports of both are on a bridge in a third one."""

    near_address, far_address = "10.231.77.1", "10.231.77.2"

    def __init__(self) -> None:
        base = f"melt{os.getpid()}"
        self.near, self.far, self._switch = (f"{base}{part}" for part in ("near", "far", "switch"))

    def build(self) -> None:
        """Make all of it. Skips the test where that is not permitted."""
        for name in (self.near, self.far, self._switch):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {self._switch} link add bridge type bridge")
        _ip(f"-n {self._switch} link set bridge up")
        for name, port, address in ((self.near, "n", self.near_address), (self.far, "f", self.far_address)):
            _ip(f"-n {name} link add eth type veth peer name {port} netns {self._switch}")
            _ip(f"-n {name} addr add {address}/24 dev eth")
            _ip(f"-n {name} link set eth up")
            _ip(f"-n {self._switch} link set dev {port} up master bridge")

    def cut(self) -> None:
        """Drop all packets between the two from now on. Neither end is told."""
        _ip(f"-n {self._switch} link set dev f nomaster")

    def remove(self) -> None:
        """Remove the namespaces, and with them their links."""
        for name in (self.near, self.far, self._switch):
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_LIMIT_S, check=False)
        if Path("/run/netns").exists():
            assert not {self.near, self.far, self._switch} & {path.name for path in Path("/run/netns").iterdir()}


@contextmanager
def network() -> Iterator[Network]:
    """The network, with this thread in "near": what it starts, threads and processes, is there too."""
    made = Network()
    own = os.open(_OWN, os.O_RDONLY)
    try:
        made.build()
        near = os.open(f"/run/netns/{made.near}", os.O_RDONLY)
        _enter(near)
        os.close(near)
        yield made
    finally:
        _enter(own)
        os.close(own)
        made.remove()


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        pytest.skip("needs ip (iproute2)")
    if done.returncode:
        pytest.skip(f"needs network namespaces: ip {arguments}: {done.stderr.strip()}")
