"""Markers in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class Scanner:
    """Holds what was pushed and not yet taken. No marker that is waited for may hold another one inside."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> None:
        self._held += text

    def take(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """The text before the first complete marker, and that marker; else what can be no part of one, and None.

        Of two that begin at one place the longer wins.
        """
        found = [(start, -len(marker), marker) for marker in markers if (start := self._held.find(marker)) >= 0]
        if found:
            start, _, marker = min(found)
            before, self._held = self._held[:start], self._held[start + len(marker) :]
            return before, marker
        keep = max((self._overlap(marker) for marker in markers), default=0)
        cut = len(self._held) - keep
        before, self._held = self._held[:cut], self._held[cut:]
        return before, None

    def take_whole(self, markers: Sequence[str]) -> tuple[str, str] | None:
        """As `take`, but the text before stays held until a marker is complete: for names, which are of no use in part."""
        found = [(start, -len(marker), marker) for marker in markers if (start := self._held.find(marker)) >= 0]
        if not found:
            return None
        start, _, marker = min(found)
        before, self._held = self._held[:start], self._held[start + len(marker) :]
        return before, marker

    def rest(self) -> str:
        """All that is held, once nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, marker: str) -> int:
        """The length of the longest end of what is held that begins `marker`."""
        for length in range(min(len(marker) - 1, len(self._held)), 0, -1):
            if self._held.endswith(marker[:length]):
                return length
        return 0
