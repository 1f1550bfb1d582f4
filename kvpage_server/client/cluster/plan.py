"""Plans: client methods on several nodes, without I/O. A plan is a generator: it yields rounds of requests, and is sent
the list of their outcomes.

Its return value is the result of the method.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from kvpage_server.client.errors import PageClientError
from kvpage_server.client.page import BlockName, StateName, check_states
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.exchange import Request

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Self = TypeVar("Self")
P = ParamSpec("P")


GONE = "gone"  # the reason for a miss: no server answered


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


# -- Long work, as a plan for each chunk, so that other tasks have their turn in between -------------------------------

TOGETHER = 256  # names of blocks that are sent together, at most
Y = TypeVar("Y")
Chunks = Generator[Timed[Any], Any, T]  # yields the plan of each chunk, and is sent its result


def carried_out(chunks: Chunks[T], do: Callable[[Timed[Any]], Generator[Y, Any, Any]]) -> Generator[Y, Any, T]:
    """Carry out the plan of each chunk with `do`, one after the other. Return the result of all."""
    result: Any = None
    while True:
        try:
            plan = chunks.send(result)
        except StopIteration as over:
            found: T = over.value
            return found
        result = yield from do(plan)


class Examines(Protocol):
    """The part of a client's methods that `restorable_lengths` needs."""

    def examine(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int, /
    ) -> Timed[tuple[int, list[bool]]]:
        """Return the number of complete blocks from the first name on, and for each state whether it is complete.

        With `lease_ms`, a block or state counts only if it is leased for so many milliseconds.
        """


def restorable_lengths(
    calls: Examines, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
) -> Chunks[list[int]]:
    """Return the lengths of which all blocks and states are complete, in ascending order.

    With `lease_ms`, the longest is leased, in a second pass over its blocks and states alone. A length of which a block
    or a state has changed since the first pass, or cannot be leased, is omitted.
    """
    marks = bytearray(len(names) + 1)  # by length: 1 if states are complete, 2 if states are incomplete, 3 for both
    of_length: dict[int, list[StateName]] = defaultdict(list)

    def note(some: Sequence[StateName], complete: Sequence[bool]) -> None:
        for state, is_complete in zip(some, complete, strict=True):
            if state[2] < len(marks):
                marks[state[2]] |= 1 if is_complete else 2
                of_length[state[2]].append(state)

    blocks = yield from _examined(calls, names, states, pages_per_block, 0, note)
    lengths: list[int] = np.flatnonzero(np.frombuffer(marks, np.uint8)[: blocks + 1] == 1).tolist()
    leased = 0
    while lease_ms and lengths:
        longest, lost = lengths.pop(), Counter[bool]()
        count = partial(_count, lost)
        own = of_length[longest]
        leased = yield from _examined(calls, names[:longest], own, pages_per_block, lease_ms, count, leased)
        if leased >= longest and not lost[False]:
            return [*lengths, longest]
        del lengths[bisect_right(lengths, leased) :]
    return lengths


@timed
def lengths(
    calls: Examines,
    end: Deadline,
    names: Sequence[BlockName],
    states: Sequence[StateName],
    pages_per_block: int,
    lease_ms: int,
) -> Plan[list[int]]:
    """Return as `restorable_lengths`. This is a method of clients that have `examine`."""
    check_states(names, states)
    chunks = restorable_lengths(calls, names, states, pages_per_block, lease_ms)
    return (yield from carried_out(chunks, lambda plan: plan(end)))


def _count(answers: Counter[bool], _: Sequence[StateName], complete: Sequence[bool]) -> None:
    answers.update(complete)


def _examined(
    calls: Examines,
    names: Sequence[BlockName],
    states: Sequence[StateName],
    pages_per_block: int,
    lease_ms: int,
    note: Callable[[Sequence[StateName], Sequence[bool]], None],
    blocks: int = 0,
) -> Chunks[int]:
    """Examine the blocks after the first `blocks`, up to the first incomplete one, and then states, TOGETHER at a time.

    Return the number of complete blocks. `note` is called with some states, and whether each is complete. States that
    need more blocks are left out, as soon as the number is known.
    """
    at, counting = 0, blocks < len(names)
    while counting or at < len(states):
        some = names[blocks : blocks + TOGETHER] if counting else ()
        few = states[at : at + TOGETHER - len(some)]
        at += len(few)
        if not counting:
            few = [state for state in few if state[2] <= blocks]
        complete, answers = yield calls.examine(some, few, pages_per_block, lease_ms)
        blocks += complete
        counting = counting and complete == len(some) and blocks < len(names)
        note(few, answers)
    return blocks
