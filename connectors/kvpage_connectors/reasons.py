"""Why a connector missed blocks: counted, and logged now and then.

An engine ends if its connector raises. So every error is a miss with a reason.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvpage_server.client import Closed, DeadlineExceeded, Disconnected, Refused, Unsupported, WrongReply

_SILENCE = 10.0  # seconds between two log lines with the same reason


class Reasons:
    """Counts of missed blocks, by job and reason. Threads can share it."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._log = log
        self._lock = threading.Lock()
        self._silent_until: dict[tuple[str, str], float] = {}

    def count(self, job: str, reason: str, blocks: int = 1, detail: object = "") -> None:
        """Add missed blocks of a job (lookup, load, save or the name of a method). Log them, unless the last seconds
        have a line with the same job and reason.
        """
        now = time.monotonic()
        with self._lock:
            self.counts += Counter({(job, reason): blocks})  # keeps no zero
            if now < self._silent_until.get((job, reason), 0.0):
                return
            self._silent_until[job, reason] = now + _SILENCE
        noun = "block" if blocks == 1 else "blocks"
        self._log.warning("kvpage: %s missed %d %s, reason: %s %s", job, blocks, noun, reason, detail)


class Late(Exception):
    """Error: the deadline of a job passed before it began."""


class Away(Exception):
    """Error: the server did not answer an earlier job, and the pause after it has not ended."""


_REASONS: dict[type[Exception], str] = {  # the first class that matches
    Late: "deadline",
    Away: "away",
    Closed: "closed",
    DeadlineExceeded: "deadline",
    Disconnected: "away",
    WrongReply: "reply",
    Unsupported: "unsupported",
}


def reason_of(error: Exception) -> str:
    """Return the word that counts an error: oom, noauth and so on for an error reply."""
    if isinstance(error, Refused):
        return error.code.lower()
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), type(error).__name__)


class _Guarded(Protocol):
    @property
    def reasons(self) -> Reasons:
        """Return the counts that a guarded method adds to."""


T = TypeVar("T")
P = ParamSpec("P")
G = TypeVar("G", bound=_Guarded)


def guarded(answer: Callable[[], T]) -> Callable[[Callable[Concatenate[G, P], T]], Callable[Concatenate[G, P], T]]:
    """Return a decorator of methods that an engine calls: an exception is counted, and `answer()` is returned."""

    def decorate(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
        @functools.wraps(method)
        def call(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - any exception would end the engine
                self.reasons.count(method.__name__, reason_of(error), 1, repr(error))
                return answer()

        return call

    return decorate
