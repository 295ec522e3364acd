"""One GPU, one bench at a time: two scores measured at once on one GPU are scores of neither."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from meltcore.bench.device import Device
from meltcore.errors import ConfigError


@contextmanager
def claimed(devices: Sequence[Device]) -> Iterator[None]:
    """Hold the GPUs among `devices` against every other bench on this machine, whoever runs it.

    A claim is a name in Linux's abstract socket space: no file is left behind, and it ends with the process, however
    that ends. Containers with networks of their own do not see each other's. Raises ConfigError for a GPU that is held.
    """
    with ExitStack() as stack:
        for device in devices:
            if device.uuid is not None:
                _hold(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)), device)
        yield


def _hold(claim: socket.socket, device: Device) -> None:
    try:
        claim.bind(f"\0meltcore bench {device.uuid}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{device.label} is being measured by another meltcore bench; scores taken at once are scores of neither"
        ) from error
