"""Stopping on a signal: the loop finishes its step, saves and exits with code 3."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Remembers that a signal came.

    A repeated SIGTERM changes nothing: under Slurm a process gets it from the scheduler and again from its
    launcher, and must not die while it saves. A second Ctrl-C ends the process at once.

    Attributes:
        requested: whether a signal came.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def restore(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
