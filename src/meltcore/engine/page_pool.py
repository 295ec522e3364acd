"""Pages of the key-value cache: who holds which, and which may be taken back.

A page is free (content worthless), held (by one or more sequences), or retained (held by nobody, its content kept for
the prefix cache until the room is needed).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

PAGE_SIZE = 64  # tokens; equals the chunk of Gated DeltaNet, so that one grid serves pages, states and hashing


class PagePool:
    """Hands out page numbers 1..pages; page 0 is never handed out, padding may write there."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._keep: set[int] = set()
        self.on_evict: Callable[[int], None] = lambda page: None

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._retained)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting the longest-retained where free ones run out. The caller checked `available`."""
        if count > self.available:
            raise RuntimeError(f"asked for {count} pages, {self.available} available")
        return [self._take() for _ in range(count)]

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more: held ones or retained ones."""
        for page in pages:
            if self._holders[page] == 0:
                del self._retained[page]
            self._holders[page] += 1

    def is_retained(self, page: int) -> bool:
        return page in self._retained

    @property
    def kept(self) -> set[int]:
        """Pages marked by `keep` whose content has not been given up."""
        return self._keep

    def release(self, pages: Iterable[int]) -> None:
        """Let go of each page once. One that nobody holds is retained if the prefix cache knows it, else free."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise RuntimeError(f"page {page} released more often than held")
            if self._holders[page] == 0:
                if page in self._keep:
                    self._retained[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Mark a held page as worth retaining after its last holder lets go."""
        self._keep.add(page)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance; for tests and for an idle engine."""
        held = {page for page in range(1, self.total + 1) if self._holders[page] > 0}
        free, retained = set(self._free), set(self._retained)
        assert len(free) == len(self._free), "a page is free twice"
        assert held.isdisjoint(free | retained), "a held page is up for grabs"
        assert free.isdisjoint(retained), "a page is free and retained"
        assert len(held) + len(free) + len(retained) == self.total, "a page is lost"
        assert retained <= self._keep, "a retained page that nothing refers to"

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._retained.popitem(last=False)
            self._keep.discard(page)
            self.on_evict(page)
        self._holders[page] = 1
        return page
