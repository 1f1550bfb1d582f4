"""Plans: client methods on several nodes, without I/O. A plan is a generator: it yields rounds of requests, and is sent
the list of their outcomes.

Its return value is the result of the method.
"""

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


GONE = "gone"  # the reason of a miss: no server answered


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """One request to one node, as a part of a round. The request may consist of many commands."""

    node: Hashable  # str() of it is its name in error messages
    request: Request[Any]
    replica: bool = False  # whether the request is sent on a connection for reads from a replica


@dataclass(frozen=True, slots=True)
class Round:
    """Requests to nodes, sent at the same time, after a pause of `pause` seconds."""

    requests: list[NodeRequest]
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """Outcome of a failed request to a node. It has a copy of the error without a traceback."""

    error: PageClientError

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.error.again())


RAISES: Any = object()  # as a replacement of missing replies: raise their error instead


def present(answers: Sequence[Any], gone: Any) -> list[Any]:
    """Return replies, with `gone` in place of each Failed. If `gone` is RAISES, raise the error of the first Failed
    instead.
    """
    failed = next((answer.error for answer in answers if isinstance(answer, Failed)), None)
    if failed and gone is RAISES:
        raise failed.again()
    return [gone if isinstance(answer, Failed) else answer for answer in answers]


Outcome = Any | Failed
Plan = Generator[Round, list[Outcome], T]


@dataclass(frozen=True, slots=True)
class Timed(Generic[T_co]):
    """A plan without its deadline. A call with a `Deadline` returns the plan."""

    what: str  # the method of the client
    begin: Callable[[Deadline], Plan[T_co]]

    def __call__(self, end: Deadline) -> Plan[T_co]:
        return self.begin(end)


def timed(method: Callable[Concatenate[Self, Deadline, P], Plan[T]]) -> Callable[Concatenate[Self, P], Timed[T]]:
    """Decorate a method whose first argument is a deadline: it takes the other arguments, and returns a `Timed`."""

    def without(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> Timed[T]:
        return Timed(method.__name__, lambda end: method(self, end, *args, **kwargs))

    return without
