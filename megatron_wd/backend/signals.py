"""Stopping on a signal: the loop finishes its step, saves and exits with code 3."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Remembers that a signal came; a second one ends the process at once.

    Attributes:
        requested: whether a signal came.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
