"""Creates the listening socket before anything is loaded. The supervisor accepts connections from this socket."""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import socket
from collections.abc import Callable

from meltcore.common.errors import ConfigError

BACKLOG = 16_384  # 10,000 clients may connect in one burst; the kernel caps it at net.core.somaxconn
UNACKNOWLEDGED_LIMIT_S = 120  # a peer that acknowledges nothing for this long is gone
# A silent connection is probed first after one of these seconds, drawn for each, then until the limit. Probes get lost:
# where thousands of connections fell silent together, probes of one moment overflow the loopback's queue (1,000 on a
# stock Linux). So they are spread, and the last chance is not the first one.
FIRST_PROBES_S = range(30, 90)
PROBE_INTERVAL_S = 10
ACCEPTS_PER_CALL = 64  # other events have to be handled while many clients connect
EXHAUSTED_PAUSE_S = 0.5  # without file descriptors, accepting would fail again immediately
_EXHAUSTION_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes any free port. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _detect_lost_peers(listener)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit permits, because each connection takes one descriptor."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _detect_lost_peers(listener: socket.socket) -> None:
    """Let the kernel close connections whose peer has vanished, or does not read a response that was already written.

    Accepted connections inherit these options of the listening socket on Linux. The time of the first probe is set when
    a connection is accepted. Responses in progress have a lower limit of their own.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_LIMIT_S * 1000)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL_S)


class Acceptor:
    """Accepts connections on the event loop. Each connection is passed to `on_connection`."""

    def __init__(
        self,
        listener: socket.socket,
        on_connection: Callable[[socket.socket], None],
        on_exhausted: Callable[[OSError], None],
    ) -> None:
        """Listen on a socket.

        `on_exhausted` is called each time a connection cannot be accepted for lack of file descriptors.
        """
        self._listener = listener
        self._on_connection = on_connection
        self._on_exhausted = on_exhausted
        self._resume()

    def close(self) -> None:
        """Stop listening. The kernel then refuses new connections."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_CALL):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client left before it was accepted
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTION_ERRORS:
                    raise
                self._on_exhausted(error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                loop.call_later(EXHAUSTED_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            first_probe_s = random.choice(FIRST_PROBES_S)  # noqa: S311 - no secret
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first_probe_s)
            self._on_connection(connection)
