"""Checks API keys: where keys come from, what their clients may do, and at which rate.

Only the SHA-256 of a key is stored. It is compared in constant time, and never written anywhere. The rate limits of
keys are token buckets in the shared statistics, so they hold over all API server processes together.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from starlette.types import Scope

from meltcore.common.errors import ConfigError, RequestError
from meltcore.serve.requests.request_fields import header
from meltcore.serve.requests.stats import CLASSES, ServerStats
from meltcore.settings.config import PriorityClass
from meltcore.settings.field_types import KEY_NAME_FORM, KEY_NAME_PATTERN
from meltcore.settings.fleet_spec import FleetSpec, KeySection

ENVIRONMENT_KEY = "MELTCORE_API_KEY"
DEFAULT_NAME = "default"  # of the key of --api-key or the environment
WINDOW_S = 60.0  # of the limits per minute. A bucket holds as much


def resolve_keys(config: FleetSpec) -> FleetSpec:
    """Return the configuration in which each key is replaced by its hash.

    Raises ConfigError if a key is missing, and if two keys have the same name or value.
    """
    keys = tuple(_resolved(config))
    for field_name, values in (("name", [key.name for key in keys]), ("value", [str(key.sha256) for key in keys])):
        for index, value in enumerate(values):
            if value in values[:index]:
                first, second = keys[values.index(value)].name, keys[index].name
                raise ConfigError(f"two API keys have the same {field_name}: {first} and {second}")
    server = msgspec.structs.replace(config.server, api_key_file=None)
    return msgspec.structs.replace(config, server=server, keys=keys)


def _resolved(config: FleetSpec) -> Iterator[KeySection]:
    limits = {name: getattr(config.limits, name) for name in ("requests_per_minute", "tokens_per_minute")}
    # The flag --api-key stands here as a hash already, instead of the variable.
    has_flag = any(key.name == DEFAULT_NAME and key.sha256 is not None for key in config.keys)
    if not has_flag and (secret := os.environ.get(ENVIRONMENT_KEY)):
        yield KeySection(name=DEFAULT_NAME, sha256=hash_key(secret))
    if (path := config.server.api_key_file) is not None:
        for number, line in enumerate(_read(path, "--api-key-file").splitlines(), 1):
            parts = line.split()
            if not parts or line.startswith("#"):
                continue
            if len(parts) != 2:
                raise ConfigError(f"{path}, line {number}: write a name and a key, with a space between")
            if not re.match(KEY_NAME_PATTERN, parts[0]):
                raise ConfigError(f"{path}, line {number}: got {parts[0]!r}; must be {KEY_NAME_FORM}")
            yield KeySection(name=parts[0], sha256=hash_key(parts[1]), **limits)
    for key in config.keys:
        if key.sha256 is not None:
            digest = key.sha256.lower()
        elif key.env is not None:
            if not os.environ.get(key.env):
                raise ConfigError(f"the API key {key.name}: the environment variable {key.env} is not set or empty")
            digest = hash_key(os.environ[key.env])
        else:
            digest = hash_key(_read(str(key.file), f"the API key {key.name}"))
        own_limits = {name: getattr(key, name) or limit for name, limit in limits.items()}
        yield msgspec.structs.replace(key, sha256=digest, env=None, file=None, **own_limits)


def _read(path: str, subject: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{subject}: {path} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"{subject}: {path} is empty")
    return text


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal digits. Spaces at the ends of the key are ignored."""
    return hashlib.sha256(key.strip().encode()).hexdigest()


class ApiKey:
    """One key: its name, its limits, and how much of each limit is used."""

    def __init__(self, config: KeySection, stats: ServerStats, index: int) -> None:
        self.name = config.name
        self._highest_class: PriorityClass = config.priority
        self._stats = stats
        self._requests = _Bucket(stats, f"key_{index}/requests_s", config.requests_per_minute)
        self._tokens = _Bucket(stats, f"key_{index}/tokens_s", config.tokens_per_minute)
        self._refused = f"key_{index}/refused"

    def at_most(self, requested: PriorityClass) -> PriorityClass:
        """Return the lower one of two classes: the requested class, and the class of the key."""
        return max(requested, self._highest_class, key=CLASSES.index)

    def admit(self) -> None:
        """Count a request. If the key is past a limit, count nothing and raise RequestError (429)."""
        wait_s, limit_name = self._tokens.wait_s(0), "tokens_per_minute"
        if not wait_s:
            wait_s, limit_name = self._requests.take(), "requests_per_minute"
        if wait_s:
            self._stats.add(self._refused)
            limit = (self._tokens if limit_name == "tokens_per_minute" else self._requests).limit
            raise RequestError(
                f"the API key {self.name} has used up its {limit_name} ({limit}); try again in {wait_s:.1f} s",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def charge(self, tokens: int) -> None:
        """Count the tokens of an admitted request. If they exceed the limit, later requests are refused."""
        self._tokens.add(tokens)


class _Bucket:
    """A token bucket of a rate limit. It is stored in shared memory as the time at which it will be full again."""

    def __init__(self, stats: ServerStats, column: str, limit: int | None) -> None:
        self.limit = limit
        self._shared = stats.shared
        self._row, self._column = stats.shared.rows[0], stats.column(column)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until the bucket has `amount`.

        For an amount of 0 these are the seconds until its debt is paid.
        """
        if self.limit is None:
            return 0.0
        return max(0.0, self._row[self._column] - time.monotonic() + (amount / self.limit - 1) * WINDOW_S)

    def take(self) -> float:
        """Take 1 from the bucket and return 0. If the bucket has less than 1, return the seconds until it has 1."""
        if self.limit is None:
            return 0.0
        with self._shared.locked():
            if wait_s := self.wait_s(1):
                return wait_s
            self._add(1)
        return 0.0

    def add(self, amount: float) -> None:
        """Take `amount` from the bucket, even if it has less. The bucket is in debt then."""
        if self.limit is not None:
            with self._shared.locked():
                self._add(amount)

    def _add(self, amount: float) -> None:
        assert self.limit is not None
        full_s = max(self._row[self._column], time.monotonic())
        self._row[self._column] = full_s + amount * WINDOW_S / self.limit


class ApiKeys:
    """Finds the key of a request among the keys of a server."""

    def __init__(self, configs: Sequence[KeySection], stats: ServerStats) -> None:
        """Create the table. `configs` is what `resolve_keys` has returned.

        `stats` must have been created for the same number of keys.
        """
        self._keys = [
            (bytes.fromhex(config.sha256 or ""), ApiKey(config, stats, index)) for index, config in enumerate(configs)
        ]

    def find(self, scope: Scope) -> ApiKey | None:
        """Return the key of a request, from its bearer token or x-api-key. Returns None if the server needs no key.

        Clients of dwani.ai's API send x-api-key. Raises RequestError (401) if the key is missing or wrong.
        """
        if not self._keys:
            return None
        presented_keys = [key for key in (header(scope, b"x-api-key"), _bearer(scope)) if key is not None]
        if not presented_keys:
            raise RequestError(
                "no API key; send it as the header 'Authorization: Bearer KEY'", status=401, code="invalid_api_key"
            )
        digests = [hashlib.sha256(key.strip()).digest() for key in presented_keys]
        found = None
        for expected, key in self._keys:  # to the end: the time must not tell which one is right
            for digest in digests:
                if hmac.compare_digest(digest, expected):
                    found = key
        if found is None:
            raise RequestError("the API key is wrong", status=401, code="invalid_api_key")
        return found


def _bearer(scope: Scope) -> bytes | None:
    """Return the bearer token of a request. Another authentication scheme counts as a wrong key."""
    value = header(scope, b"authorization")
    if value is None:
        return None
    scheme, _, token = value.partition(b" ")
    return token if scheme.lower() == b"bearer" else b""
