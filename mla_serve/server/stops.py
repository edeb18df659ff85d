"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until the first stop string is complete, and holds back what may still become one.

    The result does not depend on how the text was cut: the stop string that ends first wins, the longest of those that end
    together. A stop string is never shown in part; with `include` the one that matched is shown whole.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show now. Once `matched` is set, nothing more may be pushed."""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What is still held back when the text has ended."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
