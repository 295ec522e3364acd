"""Finding pages that already hold the beginning of a new prompt.

Each full page has a key: a keyed hash of the page before it and of its own tokens. Two sequences share a page exactly
when everything up to its end is equal. The hash is keyed per process, so that no prompt can be crafted to collide.
"""

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence

from meltcore.engine.page_pool import PAGE_SIZE, PagePool
from meltcore.engine.request import Request

_KEY_BYTES = 16


class PrefixCache:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self.on_forget: Callable[[bytes], None] = lambda key: None
        pool.on_evict = self._forget

    def match(self, request: Request) -> list[int]:
        """The longest run of cached pages that begins the sequence; at least one token is left to compute."""
        pages = []
        for key in self.keys(request, (len(request.token_ids) - 1) // PAGE_SIZE):
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, request: Request) -> None:
        """Make the full pages of a running sequence findable: those computed, whose tokens the host knows."""
        full = min(request.computed, len(request.token_ids)) // PAGE_SIZE
        if full <= request.registered_pages:
            return
        keys = self.keys(request, full)
        for index in range(request.registered_pages, full):
            key, page = keys[index], request.pages[index]
            if key not in self._page_of:  # else another sequence computed the same page first; one copy is enough
                self._page_of[key] = page
                self._key_of[page] = key
                self._pool.keep(page)
        request.registered_pages = full

    def keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of its first `count` pages, all of whose tokens the host knows."""
        keys = request.page_keys
        while len(keys) < count:
            start = len(keys) * PAGE_SIZE
            keys.append(self._hash(keys[-1] if keys else b"", request.token_ids[start : start + PAGE_SIZE]))
        return keys[:count]

    def knows(self, key: bytes) -> bool:
        return key in self._page_of

    def check(self) -> None:
        """Raise AssertionError where the two maps disagree; for tests and for an idle engine."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"
        assert set(self._key_of) == self._pool.kept, "the pool keeps other pages than the cache knows"

    def _hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        content = parent + array("I", token_ids).tobytes()
        return hashlib.blake2b(content, digest_size=_KEY_BYTES, key=self._secret).digest()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        self.on_forget(key)
