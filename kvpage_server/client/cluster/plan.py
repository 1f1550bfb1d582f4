"""A plan: the requests of a method to each node. It is a generator, which yields rounds and is sent their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvpage_server.client.errors import PageClientError
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.exchange import Request

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Self = TypeVar("Self")
P = ParamSpec("P")


GONE = "gone"  # the reason of a miss: nobody answered


@dataclass(frozen=True, slots=True)
class Errand:
    """One question, which may be of many commands, to one node."""

    node: Hashable  # its text is its name for people
    request: Request[Any]
    replica: bool = False  # whether it is asked as a replica, which then answers reads


@dataclass(frozen=True, slots=True)
class Round:
    """Errands that are done at the same time, after a pause in seconds."""

    errands: list[Errand]
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """An errand that failed."""

    error: PageClientError

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.error.again())


RAISES: Any = object()  # in place of a value for missing answers: raise their error instead


def present(answers: Sequence[Any], gone: Any) -> list[Any]:
    """Return replies; `gone` replaces failures. If `gone` is RAISES, raise the first failure instead."""
    failed = next((answer.error for answer in answers if isinstance(answer, Failed)), None)
    if failed and gone is RAISES:
        raise failed.again()
    return [gone if isinstance(answer, Failed) else answer for answer in answers]


Outcome = Any | Failed
Plan = Generator[Round, list[Outcome], T]


@dataclass(frozen=True, slots=True)
class Timed(Generic[T_co]):
    """A plan that waits for its deadline."""

    what: str  # the method of the client
    begin: Callable[[Deadline], Plan[T_co]]

    def __call__(self, end: Deadline) -> Plan[T_co]:
        return self.begin(end)


def timed(method: Callable[Concatenate[Self, Deadline, P], Plan[T]]) -> Callable[Concatenate[Self, P], Timed[T]]:
    """Turns a method that takes a deadline into one that returns a function of the deadline."""

    def without(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> Timed[T]:
        return Timed(method.__name__, lambda end: method(self, end, *args, **kwargs))

    return without
