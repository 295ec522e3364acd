"""The listening socket: bound before anything is loaded, and read by the first front for all of them."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable

from meltcore.errors import ConfigError

BACKLOG = 16_384  # 10,000 clients may connect in one burst; the kernel caps it at net.core.somaxconn
UNREAD_LIMIT_S = 120  # a peer that acknowledges nothing for this long is gone
ACCEPTS_A_TURN = 64  # of the event loop: streams have to go on while many connect
NO_ROOM_PAUSE_S = 0.5  # without file descriptors, accepting would fail at once, again and again
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ConfigError: a port in use is found out in no time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _notice_lost_peers(listener)
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
    """One file descriptor a connection: take all that the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _notice_lost_peers(listener: socket.socket) -> None:
    """Let the kernel end connections whose peer is gone without a word, or reads nothing of an answer already written.

    Accepted connections inherit these options (Linux). What is still being generated has its own, smaller bound.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_LIMIT_S * 1000)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREAD_LIMIT_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREAD_LIMIT_S // 4)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


class Acceptor:
    """Accepts, on the event loop, and gives each connection to `on_connection`."""

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._resume()

    def close(self) -> None:
        """Stop listening: who connects now is refused by the kernel."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # gone before its turn came
                continue
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                loop.call_later(NO_ROOM_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            self._on_connection(connection)
