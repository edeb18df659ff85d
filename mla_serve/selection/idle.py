"""Probing beside an engine: only while it rests, in a process that is stopped the moment a request arrives."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mla_serve.errors import UserError
from mla_serve.selection.decision import Decision
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.probe import probe
from mla_serve.selection.selector import Selector
from mla_serve.selection.workshop import Closed
from mla_serve.shapes import AttentionShape

logger = logging.getLogger(__name__)

REST = 1.0  # seconds without a request until probing goes on


class IdleProbe:
    """Measures `shapes` on a thread that only waits for a worker process. All methods belong to the engine's own thread.

    `measurer` holds the worker, and `make` builds the Selector whose table gets the decisions, on this object's thread and once
    the engine has first rested. The thread has a Selector and a table of its own: the engine's changes only by what `rest`
    returns. What the table already holds is not measured again, so whatever ends this process costs one bucket at most.
    """

    def __init__(self, measurer: Isolated, make: Callable[[], Selector], shapes: Sequence[AttentionShape]) -> None:
        self._shop, self._make, self._shapes = measurer.shop, make, shapes
        self._thread: threading.Thread | None = None
        self._finished: deque[Decision] = deque()
        self._busy_at = time.monotonic()
        self._paused = True
        self._shop.pause()

    @property
    def done(self) -> bool:
        """Whether all is measured, or nothing more can be, and `rest` has returned it all."""
        return self._thread is not None and not self._thread.is_alive() and not self._finished

    def pause(self) -> None:
        """A request is there: the worker stops at once, and stays stopped until the engine has rested for a while."""
        self._busy_at = time.monotonic()
        if not self._paused:
            self._paused = True
            self._shop.pause()

    def rest(self) -> list[Decision]:
        """The engine has nothing to do: the decisions made since the last call. Lets the probe go on after a while."""
        if self._paused and time.monotonic() - self._busy_at >= REST:
            self._paused = False
            self._shop.resume()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="idle-probe", daemon=True)
                self._thread.start()
        decisions = []
        while self._finished:
            decisions.append(self._finished.popleft())
        return decisions

    def stop(self) -> None:
        """Ends the worker, whatever it is doing, and then the thread."""
        self._shop.stop()
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            selector = self._make()
            try:
                decisions = probe(selector, self._shapes, again=False, progress=self._progress)
            finally:
                selector.close()
            logger.info("%d buckets are measured, %.0f s after the first rest", len(decisions), time.monotonic() - began)
        except Closed:
            logger.debug("the idle probe was stopped")
        except UserError as error:
            logger.warning("the idle probe ends: %s", error)
        except Exception:
            logger.exception("the idle probe ends by a fault of its own; the kernels in force stay")

    def _progress(self, done: int, total: int, decision: Decision | None) -> None:
        logger.debug("measured while idle: %d of %d", done, total)
        if decision is not None:
            self._finished.append(decision)
