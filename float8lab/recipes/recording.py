"""Record the calls of FP8 modules in a checkpointed function, so its recomputation repeats them.

A function that is recomputed inside the recomputation of another function is recorded while the
other function is replayed.
"""

from __future__ import annotations

import threading
import weakref
from types import FrameType
from typing import ClassVar, Generic, TypeVar

__all__ = ["CHECKPOINTS", "NO_BACKWARD", "Recording", "has_ended"]

NO_BACKWARD = -1
"""The number that torch gives a thread's backward pass where none runs."""

Module = TypeVar("Module")
Call = TypeVar("Call")


class Recording(Generic[Module, Call]):
    """The calls of FP8 modules during one run of a function, in order for each module."""

    def __init__(self, frame: FrameType | None = None) -> None:
        self.frame = frame  # given if an interrupt of the run would leave the recording open
        self.calls: dict[Module, list[Call | None]] = {}
        self._position: dict[Module, int] = {}
        self._run: object = None  # the recomputation that ``_position`` belongs to

    def add(self, module: Module, call: Call | None) -> None:
        """Record how a call of ``module`` runs; None is high precision."""
        if self.frame is not None and has_ended(self.frame):
            CHECKPOINTS.recordings = tuple(r for r in CHECKPOINTS.recordings if r is not self)
        self.calls.setdefault(module, []).append(call)

    def follow(self, run: object) -> None:
        """Restart with the first call of every module if ``run`` is a new recomputation."""
        if run != self._run:
            self._run = run
            self._position.clear()

    def has_next(self, module: Module) -> bool:
        """Whether ``module`` was called more often than the recomputation has called it so far."""
        return self._position.get(module, 0) < len(self.calls.get(module, ()))

    def next(self, module: Module) -> Call | None:
        """Return how the next call of ``module`` ran.

        Raises:
            RuntimeError: the function calls a module more often than it did at first.
        """
        position = self._position.get(module, 0)
        calls = self.calls.get(module, ())
        if position >= len(calls):
            raise RuntimeError(
                f"function must call the same modules when it is recomputed; got call "
                f"{position + 1} of one that it called {len(calls)} times in forward. Make what "
                "it does depend on its arguments alone."
            )
        self._position[module] = position + 1
        return calls[position]


class _Checkpoints(threading.local):
    """The checkpointed functions that run on a thread."""

    of_torch: ClassVar[weakref.WeakKeyDictionary[object, Recording]] = weakref.WeakKeyDictionary()
    """The recordings of torch's checkpoints by their frame or ctx; all threads share this table."""
    recordings: tuple[Recording, ...] = ()
    """The recordings in progress, the innermost last."""
    replay: Recording | None = None
    """The recording that a recomputation follows."""


CHECKPOINTS = _Checkpoints()


def has_ended(frame: FrameType) -> bool:
    """Whether a call has ended whose hooks may not say so: torch calls none after an interrupt."""
    try:
        frame.clear()  # raises while the frame runs, on any thread
    except RuntimeError:
        return False
    return True
