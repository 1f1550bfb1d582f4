"""Spans of OpenTelemetry, if it is installed. docs/monitoring/traces.md has their names.

>>> with span("kvpage.fetch") as seen:
...     seen.set(bytes=1024)

Without the package, and while no provider is configured, every span is the same object, which does nothing.
"""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from threading import Thread
from typing import Any, Self

try:
    from opentelemetry import context, propagate, trace
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

FLUSH_SECONDS = 2.0  # limit of `flush`; without a collector, exporters retry for longer
PREFIX = "kvpage."  # of all names of attributes
Value = str | int | float | None
_ENDS = (CancelledError, GeneratorExit)  # exceptions that end a span without being an error


class TraceSpan:
    """Span of a trace, which records nothing. As a context manager, it is the parent of spans that start within, and
    ends at exit.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager in which new spans are children of this one. The span continues after it, until
        `end`.
        """
        return nullcontext()

    def set(self, **attributes: Value) -> None:
        """Set attributes. A None sets nothing."""

    def add(self, **counts: int) -> None:
        """Add to counters, each of which is an attribute."""

    def end(self, error: BaseException | None = None, *, at: float | None = None) -> None:
        """End the span now, or `at` a time of `time.perf_counter()`. Only the first call has an effect. `error` marks
        it as failed.
        """


UNSEEN = TraceSpan()
_inner: ContextVar[TraceSpan] = ContextVar("span", default=UNSEEN)


def span(name: str, *, client: bool = False, began: float | None = None) -> TraceSpan:
    """Start a span, now or at the time `began` of `time.perf_counter()`. `client` marks a request to another
    process.
    """
    tracer = _tracer() if INSTALLED else None
    if tracer is None:
        return UNSEEN
    kind = trace.SpanKind.CLIENT if client else trace.SpanKind.INTERNAL
    return _Seen(tracer.start_span(name, kind=kind, start_time=None if began is None else _wall(began)))


def current() -> TraceSpan:
    """Return the innermost span that is active as a context manager."""
    return _inner.get()


def is_seen(some: TraceSpan) -> bool:
    """Return whether a span is recorded. If not, the caller need not compute its attributes."""
    return isinstance(some, _Seen) and some.is_recording


def continued(headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[object]:
    """Return a context manager in which new spans belong to the trace that HTTP `headers` name, unless a span is
    active.
    """
    if not INSTALLED or _tracer() is None or trace.get_current_span().get_span_context().is_valid:
        return nullcontext()
    carrier = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return _attached(propagate.extract(carrier))


def flush() -> None:
    """Export all spans that have ended, in at most `FLUSH_SECONDS`. Called before a process exits."""
    if INSTALLED and hasattr(provider := trace.get_tracer_provider(), "force_flush"):
        flushing = Thread(target=provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


class _Seen(TraceSpan):
    """Span of a configured provider."""

    __slots__ = ("_counts", "_made", "_tokens")

    def __init__(self, made: trace.Span) -> None:
        self._made = made
        self._counts: Counter[str] = Counter()
        self._tokens: tuple[Token[context.Context], Token[TraceSpan]] | None = None

    @property
    def is_recording(self) -> bool:
        return self._made.is_recording()

    def __enter__(self) -> Self:
        self._tokens = context.attach(trace.set_span_in_context(self._made)), _inner.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._tokens:
            attached, inner = self._tokens
            _inner.reset(inner)
            context.detach(attached)
        self.end(error)

    def current(self) -> AbstractContextManager[object]:
        return _attached(trace.set_span_in_context(self._made))

    def set(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._made.set_attribute(PREFIX + name, value)

    def add(self, **counts: int) -> None:
        self._counts.update(counts)
        self.set(**{name: self._counts[name] for name in counts})

    def end(self, error: BaseException | None = None, *, at: float | None = None) -> None:
        if error is not None and not isinstance(error, _ENDS):
            self._made.record_exception(error)
            self._made.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        self._made.end(None if at is None else _wall(at))


_known: tuple[Any, trace.Tracer] | None = None  # a provider and its tracer


def _tracer() -> trace.Tracer | None:
    global _known
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None  # no provider is configured
    if _known is None or _known[0] is not provider:
        _known = provider, provider.get_tracer("kvpage")
    return _known[1]


@contextmanager
def _attached(to: context.Context) -> Iterator[None]:
    token = context.attach(to)
    try:
        yield
    finally:
        context.detach(token)


def _wall(moment: float) -> int:
    """Return the unix nanoseconds of a time of `time.perf_counter()`."""
    return time.time_ns() + round((moment - time.perf_counter()) * 1e9)
