"""Lifetimes of contexts: how long the beginnings of a context are kept at least, and how much of it is kept.

A client requests a lifetime with the `ttl` of a breakpoint. The page server keeps the blocks, see its command
KVPAGEKEEP. The engine's memory keeps them, too, as far as there is room: see `ContextTree.keep`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPORT_SECONDS = 10.0  # longest wait of an answer for the page server, which keeps its context


@dataclass(frozen=True, slots=True)
class KeptContext:
    """The part of a context that is kept."""

    tokens: int  # its first tokens
    until: int  # the end of the first lifetime that ends, in unix milliseconds; 0 if nothing is kept
    why: str = ""  # the reason why not more is kept; empty if all is


NOT_WRITTEN = KeptContext(0, 0, "the page server has not stored the context")


class Lifetimes:
    """The lifetimes of a context, and the report of the kept part."""

    def __init__(self, requested: Sequence[tuple[int, int]], tenant: str = "", tenants: int = 1) -> None:
        """Keep the first tokens of a context for some seconds: `requested` has pairs of tokens and seconds. They count
        for `tenant`, one of `tenants` with equal shares.
        """
        self.requested = [pair for pair in requested if pair[0]]
        self._inherited: Sequence[tuple[int, int]] = ()
        self.tenant = tenant
        self.tenants = tenants
        self._on_report: Callable[[KeptContext], object] | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether any tokens are to be kept."""
        return bool(self.requested or self._inherited)

    def inherit(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Keep the first tokens of the context for the lifetimes that they have from earlier requests, too."""
        self._inherited = pairs

    def of_context(self, pairs: Sequence[tuple[int, int]]) -> Lifetimes:
        """Return lifetimes for the same tenant: `pairs` of tokens and seconds that a context has already."""
        found = Lifetimes((), self.tenant, self.tenants)
        found.inherit(pairs)
        return found

    @property
    def tokens(self) -> int:
        """The number of tokens for which the request wants a lifetime. The report is about these."""
        return max((tokens for tokens, _ in self.requested), default=0)

    def seconds(self, start: int) -> int:
        """Return how long a block is kept whose first token has the position `start`; 0 if it is not."""
        return max((seconds for tokens, seconds in self._all if tokens > start), default=0)

    def end(self, seconds: int) -> int:
        """Return how many of the first tokens are kept for these `seconds` or longer."""
        return max((tokens for tokens, longer in self._all if longer >= seconds), default=0)

    @property
    def _all(self) -> list[tuple[int, int]]:
        return [*self.requested, *self._inherited]

    def on_report(self, receive: Callable[[KeptContext], object]) -> None:
        """Call `receive` once, when the kept part is known, or after REPORT_SECONDS."""
        self._on_report = receive
        late = KeptContext(0, 0, "not known yet: the context is still being written")
        self._timer = threading.Timer(REPORT_SECONDS, self.report, [late])
        self._timer.daemon = True
        self._timer.start()

    def report(self, kept: KeptContext) -> None:
        """Report the kept part. Only the first report counts. Thread-safe."""
        with self._lock:
            receive, self._on_report = self._on_report, None
        if receive:
            if self._timer:
                self._timer.cancel()
            receive(kept)
