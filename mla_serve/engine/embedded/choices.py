"""One of several strings, token by token: a trie over the ids that the tokenizer cuts each string into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

__all__ = ["Trie", "TrieMatcher"]


class Trie:
    """A node: what may follow, and whether a string ends here."""

    __slots__ = ("ends", "next")

    def __init__(self) -> None:
        self.next: dict[int, Trie] = {}
        self.ends = False

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Trie:
        root = cls()
        for tokens in sequences:
            node = root
            for token in tokens:
                node = node.next.setdefault(token, cls())
            node.ends = True
        return root


class TrieMatcher:
    """A place in a trie; a Matcher. Where a string is whole, one of `end_token_ids` may follow and ends it.

    Of a model without end tokens the first string that is whole ends the output.
    """

    def __init__(self, root: Trie, end_token_ids: Iterable[int]) -> None:
        self._node = root
        self._end_token_ids = frozenset(end_token_ids)
        self._ended = False

    @property
    def terminated(self) -> bool:
        return self._ended or (self._node.ends and not self._end_token_ids)

    def fill(self, words: Tensor) -> None:
        tokens = np.array([*self._node.next, *(self._end_token_ids if self._node.ends else ())], dtype=np.int64)
        bits = words.numpy().view(np.uint32)
        bits[:] = 0
        np.bitwise_or.at(bits, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if (following := self._node.next.get(token)) is not None:
            self._node = following
            return True
        self._ended = self._node.ends and token in self._end_token_ids
        return self._ended
