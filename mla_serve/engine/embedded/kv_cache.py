"""Who holds which page of the latent cache, and which pages still hold a prefix that a later prompt may share.

Host-side accounting only: page ids, reference counts, content keys. The latents themselves belong to the runner.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def extend_page_keys(keys: list[bytes], token_ids: Sequence[int], page_size: int) -> None:
    """Appends to `keys` those of the full pages of `token_ids` that it lacks.

    A page's key digests the key of the page before it and its own tokens, so equal keys mean equal tokens from the start on:
    latents depend on everything to their left.
    """
    for start in range(len(keys) * page_size, len(token_ids) - page_size + 1, page_size):
        tokens = token_ids[start : start + page_size]
        parent = keys[-1] if keys else b""
        keys.append(blake2b(parent + struct.pack(f"<{page_size}q", *tokens), digest_size=16).digest())


class PageAllocator:
    """The pages 0 .. num_pages - 1, each free or held by one sequence or more.

    A free page whose content has a key can be shared again until it is handed out for other content, least recently used
    first. With `prefix_cache` off nothing gets a key, and every page has one holder at most.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._holders = [0] * num_pages
        # Free, content of no use; the last one freed goes out first, so that memory no request has needed yet stays untouched.
        self._blank = list(reversed(range(num_pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, content reusable; least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._suspect: set[int] = set()  # held, and to be zeroed before the next holder reads it

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages of unknown content, one holder each; asserts that as many are free."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def admit(self, keys: Sequence[bytes], count: int, spare: int) -> tuple[list[int], int] | None:
        """Pages for a new sequence: the longest run of kept content that `keys` names, then fresh ones up to `count`.

        Returns them and how many of them hold content already, or None (and nothing changes) if that would leave fewer than
        `spare` pages free.
        """
        shared: list[int] = []
        for key in keys[:count]:
            page = self._page_of.get(key)
            if page is None:
                break
            shared.append(page)
        idle = sum(page in self._kept for page in shared)
        if idle + count - len(shared) + spare > self.num_free:
            return None
        for page in shared:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return shared + self.allocate(count - len(shared)), len(shared)

    def publish(self, page: int, key: bytes) -> None:
        """Names the content of a held, full page. The first page with a key keeps it; a copy stays private."""
        assert self._holders[page] > 0, f"page {page} is free and cannot be named"
        if self.prefix_cache and page not in self._suspect and key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def free(self, pages: Iterable[int], *, suspect: bool = False) -> list[int]:
        """Drops one holder of each page, given in token order; returns the pages to be zeroed before they are used again.

        `suspect` pages may hold NaN. They are shared with nobody from now on, and count as to be zeroed once their last
        holder lets go.
        """
        zero = []
        # Last page first, so that a prefix is evicted from its end: a page is of no use without those before it.
        for page in reversed(list(pages)):
            assert self._holders[page] > 0, f"page {page} is freed twice"
            self._holders[page] -= 1
            if suspect:
                self._suspect.add(page)
                self._forget(page)
            if self._holders[page]:
                continue
            if page in self._suspect:
                self._suspect.remove(page)
                zero.append(page)
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._blank.append(page)
        return zero

    def check(self) -> None:
        """Asserts that every page is in exactly one place."""
        held = {page for page, holders in enumerate(self._holders) if holders}
        assert min(self._holders, default=0) >= 0
        assert sorted([*held, *self._blank, *self._kept]) == list(range(self.num_pages))
        assert {key: page for page, key in self._key_of.items()} == self._page_of
        assert self._kept.keys() <= self._key_of.keys()
        assert self._suspect <= held
        assert not self._suspect & self._key_of.keys()
        assert not self._key_of.keys() & set(self._blank)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
