"""Holds the certificate of a server that serves https, and reads its files again when they change."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from meltcore.common.errors import ConfigError

CHECK_S = 1.0  # between two looks at the files, which connections cause
_FORM = "--ssl-certfile takes the certificate and its chain in PEM, --ssl-keyfile its private key without a password"


class TlsCertificate:
    """A certificate with its private key, as a TLS context for connections.

    The files are watched, instead of a signal or `meltcore reload`: programs that renew certificates only replace
    files, and `meltcore serve` has no reload.
    """

    def __init__(self, certfile: str, keyfile: str | None, on_unusable: Callable[[str], None] | None = None) -> None:
        """Read the files. Raises ConfigError if they cannot be used.

        Args:
            certfile: file with the certificate, its chain, and the private key if there is no `keyfile`.
            keyfile: file with the private key.
            on_unusable: is called with the reason if changed files cannot be used. The old ones stay in use.
        """
        self._files = (certfile, keyfile or certfile)
        self._on_unusable = on_unusable
        self._versions = self._read_versions()
        self._context = self._load()
        self._checked_s = time.monotonic()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection. Connections that are open keep theirs."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            try:
                self._read_changed()
            except ConfigError as error:
                if self._on_unusable is not None:
                    self._on_unusable(str(error))
        return self._context

    def _read_changed(self) -> None:
        if (versions := self._read_versions()) != self._versions:
            self._versions = versions  # unusable files are reported once, until they change again
            self._context = self._load()

    def _read_versions(self) -> list[tuple[int, int, int] | None]:
        """Return what changes when a file is replaced or written: its inode, time and size. A lost file gives None."""
        versions: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = Path(file).stat()
                versions.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                versions.append(None)
        return versions

    def _load(self) -> ssl.SSLContext:
        for flag, file in zip(("--ssl-certfile", "--ssl-keyfile"), self._files, strict=True):
            try:
                # Reading a pipe may never end, and OpenSSL reads the file once more.
                if Path(file).is_fifo() or Path(file).is_char_device() or Path(file).is_socket():
                    raise ConfigError(f"{flag}: {file} is a pipe or a device; it takes a file")
                Path(file).read_bytes()  # errors of OpenSSL do not say which file
            except OSError as error:
                raise ConfigError(f"{flag}: {file} cannot be read: {error.strerror}") from error
        certfile, keyfile = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a function for the password, OpenSSL would ask for it on the terminal.
            context.load_cert_chain(certfile, keyfile, password=self._refuse_password)
        except OSError as error:  # also ssl.SSLError
            mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
            reason = "the key is not the certificate's" if mismatch else str(error)
            raise ConfigError(f"the certificate {certfile} with the key {keyfile}: {reason}; {_FORM}") from error
        return context

    def _refuse_password(self) -> str:
        raise ConfigError(f"--ssl-keyfile: the key in {self._files[1]} has a password; {_FORM}")
