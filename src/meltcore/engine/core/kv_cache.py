"""Allocates the pages of the KV cache, and finds pages of earlier sequences in the prefix cache.

A page is free (its content is unused), referenced (by one or more sequences), or cached: unreferenced, but its content
is kept for the prefix cache until its memory is needed.

A sequence's tokens are divided into columns of PAGE_SIZE tokens. In each column every sub-group of layers has its own
page, and the pages of a cache group's sub-groups are its page set. A model with a single cache group has one page per
column. A sliding group keeps pages only for the columns that its window still reaches.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meltcore.engine.core.request import Request
from meltcore.models.decoders.kv_cache_specs import KVCacheGroups

PAGE_SIZE = 64  # tokens; equals the chunk of Gated DeltaNet, so that pages, recurrent states and hashes share one grid
_HASH_BYTES = 16


def pages_for(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens need."""
    return -(-tokens // PAGE_SIZE)


class PageGroup(NamedTuple):
    """A cache group's pages in one column: `pages` pages, which begin at index `first`.

    `window` is the sliding window in tokens. None means full attention.
    """

    first: int
    pages: int
    window: int | None

    def first_column(self, tokens: int) -> int:
        """Return the first column that a query at position `tokens`, or a later one, reads."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // PAGE_SIZE

    def max_columns(self, tokens: int, chunk: int) -> int:
        """Return the maximum number of columns that hold pages of this group in one sequence.

        The sequence has `tokens` tokens, which are computed in chunks of at most `chunk`.
        """
        if self.window is None:
            return pages_for(tokens)
        span = self.window - 1 + chunk  # tokens that the queries of a chunk see; it may start anywhere in a page
        return min(pages_for(tokens), (span + PAGE_SIZE - 2) // PAGE_SIZE + 1)


class PageLayout(NamedTuple):
    """The cache groups of a model. Groups of full attention come first.

    A sequence's pages are a flat list: column by column, and within a column group by group. The null page, 0, stands
    for pages that slid out of a window.
    """

    groups: tuple[PageGroup, ...]

    @classmethod
    def of(cls, caches: KVCacheGroups) -> PageLayout:
        """Return the layout of a model's caches."""
        groups: list[PageGroup] = []
        for group in caches.attention:
            first = groups[-1].first + groups[-1].pages if groups else 0
            groups.append(PageGroup(first, len(group.layers) // caches.layers_per_page, group.window))
        return cls(tuple(groups))

    @property
    def column_pages(self) -> int:
        """The number of pages in a column, summed over all groups. It is the number of sub-groups."""
        return self.groups[-1].first + self.groups[-1].pages

    @property
    def sliding_groups(self) -> tuple[PageGroup, ...]:
        """The groups that have a sliding window."""
        return tuple(group for group in self.groups if group.window is not None)

    def table_rows(self, max_num_seqs: int) -> int:
        """Return the number of rows of the page table per sub-group: one for padding, and one per sequence.

        With several sub-groups the number is even. Then each sub-group starts at a multiple of 16 bytes, for which
        kernels are compiled.
        """
        rows = max_num_seqs + 1
        return rows if self.column_pages == 1 else rows + rows % 2

    def max_pages(self, tokens: int, chunk: int) -> int:
        """Return the maximum number of pages of a sequence of `tokens`, computed in chunks of at most `chunk`."""
        return sum(group.pages * group.max_columns(tokens, chunk) for group in self.groups)

    def pages_together(self, seqs: int, tokens: int, chunk: int) -> int:
        """Return the number of pages with which `seqs` sequences of `tokens` tokens can run together.

        A step has at most `chunk` tokens, which all sequences share. So only one sequence holds a whole chunk beyond
        its window. Each other sequence holds the pages that its window reaches, and the page that it fills.
        """
        pages = 0
        for group in self.groups:
            group_columns = group.max_columns(tokens, chunk)
            decoding = group.max_columns(tokens, PAGE_SIZE)
            pages += group.pages * min(seqs * group_columns, max(group_columns, seqs * decoding + pages_for(chunk) + 1))
        return pages

    def missing_pages(self, tokens: int, hit_columns: int, chunk: int) -> int:
        """Return how many more pages a sequence may allocate after a prefix-cache hit of `hit_columns`.

        The sequence has `tokens` tokens, of which one step computes at most `chunk`.
        """
        missing = 0
        for group in self.groups:
            held_columns = hit_columns - group.first_column(hit_columns * PAGE_SIZE)
            new_columns = pages_for(tokens) - hit_columns + held_columns
            missing += group.pages * (min(new_columns, group.max_columns(tokens, chunk)) - held_columns)
        return missing

    def max_sequence_tokens(self, pages: int, tokens: int, chunk: int) -> int:
        """Return the number of tokens of the longest sequence that fits into `pages` pages.

        The number is a multiple of the tokens of a column, and less than `tokens`.
        """
        fitting_columns, excess_columns = 0, pages_for(tokens)
        while excess_columns - fitting_columns > 1:
            columns = (fitting_columns + excess_columns) // 2
            if self.max_pages(columns * PAGE_SIZE, chunk) <= pages:
                fitting_columns = columns
            else:
                excess_columns = columns
        return fitting_columns * PAGE_SIZE


FULL_ATTENTION = PageLayout((PageGroup(0, 1, None),))


class PagePool:
    """Allocates the page numbers 1 to `pages`. Page 0 is never allocated, because padding writes to it."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self._references = [0] * (pages + 1)
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._registered: set[int] = set()
        self.on_evict: Callable[[int], None] = lambda _: None

    @property
    def num_available(self) -> int:
        """The number of pages that `allocate` could return now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """The number of referenced pages."""
        return self.total - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages and return their numbers. If too few are free, the oldest cached pages are evicted.

        The caller must have checked that enough pages are available.
        """
        if count > self.num_available:
            raise RuntimeError(f"asked for {count} pages, {self.num_available} available")
        return [self._allocate_page() for _ in range(count)]

    def add_references(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. A page may be referenced or cached before."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def is_cached(self, page: int) -> bool:
        """Return whether the page is unreferenced and its content is kept for the prefix cache."""
        return page in self._cached

    @property
    def registered_pages(self) -> set[int]:
        """The pages whose content the prefix cache can find."""
        return self._registered

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. An unreferenced page is cached when it is registered, else free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] < 0:
                raise RuntimeError(f"page {page} released more often than referenced")
            if self._references[page] == 0:
                if page in self._registered:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int) -> None:
        """Mark a referenced page, so that its content is kept after its last release."""
        self._registered.add(page)

    def unregister(self, page: int) -> None:
        """Free a cached page."""
        self._registered.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def drop_cached(self) -> None:
        """Free all cached pages. Their content is lost."""
        while self._cached:
            page = next(iter(self._cached))
            self.unregister(page)
            self.on_evict(page)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. Tests and an idle engine call this."""
        referenced = {page for page in range(1, self.total + 1) if self._references[page] > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert referenced.isdisjoint(free | cached), "a referenced page can be allocated"
        assert free.isdisjoint(cached), "a page is free and cached"
        assert len(referenced) + len(free) + len(cached) == self.total, "a page is lost"
        assert cached <= self._registered, "a cached page that the prefix cache does not know"

    def _allocate_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._registered.discard(page)
            self.on_evict(page)
        self._references[page] = 1
        return page


class PrefixCache:
    """Finds pages that already hold the prefix of a new prompt.

    Each full column has a keyed hash of the previous column's hash and of its own tokens. So two sequences share a page
    exactly when all tokens up to its end are equal. The key is random per process: no prompt can be crafted to collide.

    The page set of a cache group in a column is kept or lost as a whole, independently of other groups. A prefix needs
    the page sets of all its columns in groups of full attention. In sliding groups it needs the page sets that the next
    token's window reaches.
    """

    def __init__(self, pool: PagePool, layout: PageLayout = FULL_ATTENTION) -> None:
        self._pool = pool
        self._layout = layout
        self._page_sets: list[dict[bytes, list[int]]] = [{} for _ in layout.groups]
        self._entry_by_page: dict[int, tuple[int, bytes]] = {}  # index of the group, and hash
        self._secret = secrets.token_bytes(_HASH_BYTES)
        self.on_forget: Callable[[bytes], None] = lambda _: None
        pool.on_evict = self._forget

    def hits(self, request: Request) -> Sequence[int]:
        """Return the lengths in columns of all cached prefixes of a sequence, ascending.

        A prefix leaves at least one token to compute.
        """
        hashes = self.page_hashes(request, (len(request.token_ids) - 1) // PAGE_SIZE)
        sliding = []
        for group, page_sets in zip(self._layout.groups, self._page_sets, strict=True):
            if group.window is None:
                del hashes[_num_known_columns(hashes, page_sets) :]
            else:
                sliding.append((group, page_sets))
        if not sliding:
            return range(1, len(hashes) + 1)
        hits = []
        starts = [0] * len(sliding)  # of each group's known columns that end at the current one
        for length, page_hash in enumerate(hashes, 1):
            for index, (_, page_sets) in enumerate(sliding):
                if page_hash not in page_sets:
                    starts[index] = length
            if all(
                start <= group.first_column(length * PAGE_SIZE)
                for start, (group, _) in zip(starts, sliding, strict=True)
            ):
                hits.append(length)
        return hits

    def prefix_pages(self, request: Request, hit_columns: int) -> list[int]:
        """Return the pages of a cached prefix of `hit_columns` columns.

        A column that no window reaches has the null page.
        """
        group_page_sets = [
            (group.first_column(hit_columns * PAGE_SIZE), [0] * group.pages, page_sets)
            for group, page_sets in zip(self._layout.groups, self._page_sets, strict=True)
        ]
        pages: list[int] = []
        for column, page_hash in enumerate(self.page_hashes(request, hit_columns)):
            for first_column, null_pages, page_sets in group_page_sets:
                pages += page_sets[page_hash] if column >= first_column else null_pages
        return pages

    def register(self, request: Request) -> None:
        """Register the full columns of a running sequence. Their tokens are computed, and the host knows them."""
        num_full_columns = min(request.num_computed_tokens, len(request.token_ids)) // PAGE_SIZE
        if num_full_columns <= request.registered_columns:
            return
        hashes = self.page_hashes(request, num_full_columns)
        for column in range(request.registered_columns, num_full_columns):
            page_hash, column_start = hashes[column], column * self._layout.column_pages
            for index, (group, page_sets) in enumerate(zip(self._layout.groups, self._page_sets, strict=True)):
                if page_hash in page_sets:  # another sequence computed it first, and one copy is enough
                    continue
                first_page = column_start + group.first
                page_sets[page_hash] = page_set = request.pages[first_page : first_page + group.pages]
                for page in page_set:
                    self._entry_by_page[page] = index, page_hash
                    self._pool.register(page)
        request.registered_columns = num_full_columns

    def page_hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the first `count` columns of a sequence.

        The host must know all tokens of these columns.
        """
        hashes = request.page_hashes
        while len(hashes) < count:
            start = len(hashes) * PAGE_SIZE
            hashes.append(self._hash(hashes[-1] if hashes else b"", request.token_ids[start : start + PAGE_SIZE]))
        return hashes[:count]

    def is_known(self, page_hash: bytes) -> bool:
        """Return whether the column with this hash is registered in every group."""
        return all(page_hash in page_sets for page_sets in self._page_sets)

    def check(self) -> None:
        """Raise AssertionError if the two maps disagree. Tests and an idle engine call this."""
        pages = {
            page: (index, page_hash)
            for index, page_sets in enumerate(self._page_sets)
            for page_hash, page_set in page_sets.items()
            for page in page_set
        }
        assert pages == self._entry_by_page, "maps disagree"
        assert set(self._entry_by_page) == self._pool.registered_pages, "the pool registers other pages than the cache"

    def _hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        content = parent + array("I", token_ids).tobytes()
        return hashlib.blake2b(content, digest_size=_HASH_BYTES, key=self._secret).digest()

    def _forget(self, page: int) -> None:
        """Remove the page set of an evicted page, and free its other pages."""
        index, page_hash = self._entry_by_page.pop(page)
        for other_page in self._page_sets[index].pop(page_hash):
            if other_page != page:
                del self._entry_by_page[other_page]
                self._pool.unregister(other_page)
        self.on_forget(page_hash)


def _num_known_columns(hashes: list[bytes], page_sets: dict[bytes, list[int]]) -> int:
    """Return the number of leading hashes that are known."""
    for column, page_hash in enumerate(hashes):
        if page_hash not in page_sets:
            return column
    return len(hashes)
