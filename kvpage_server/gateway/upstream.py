"""The cluster behind a gateway: calls of the client as steps of commands, and the errors when the cluster fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from kvpage_server.client import (
    AsyncPageClient,
    BadBuffer,
    DeadlineExceeded,
    Disconnected,
    PageClientError,
    Refused,
    Unsupported,
    WrongReply,
)
from kvpage_server.client.cluster.commands import simple
from kvpage_server.client.cluster.plan import GONE, Timed
from kvpage_server.client.cluster.topology import SCHEMES, Address
from kvpage_server.commands.context import Client
from kvpage_server.commands.steps import Steps
from kvpage_server.gateway.plans import Plans, Value
from kvpage_server.page import PageError
from kvpage_server.resp.reply import Raw, Reply, ReplyError, Wait
from kvpage_server.system import malloc

T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger("kvpage")

_CALLS = 64  # at once; each may use a connection to every node
FIRST, MOST = 8, 256  # items of a batch that are asked for at once: for a start, and at most
_KEPT = 64 * 1024**2  # bytes of freed memory that glibc keeps
_OUR_RIGHTS = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
_OF_THE_CLUSTER = frozenset({"NOAUTH", "WRONGPASS", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})


def keep_memory() -> None:
    """Make glibc keep freed memory for the next allocations. Fresh pages from the system cost a third of a second of
    CPU time a GB."""
    malloc.tune({malloc.MMAP_THRESHOLD: _KEPT // 2, malloc.TRIM_THRESHOLD: _KEPT})


def cluster_url(nodes: str) -> str:
    """The URL for `cluster-nodes`, which is a URL or a list of nodes. Raises ValueError."""
    url = nodes if "://" in nodes else f"{next(iter(SCHEMES))}://{nodes}"
    Address(url)
    return url


class _Counted:
    """Bytes that count against a client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.nbytes = 0

    def set(self, nbytes: int) -> None:
        self.client.keep(nbytes - self.nbytes)
        self.nbytes = nbytes


class _Coming(_Counted):
    """The batch of values that was asked for. It counts with the size that is expected, later with its own."""

    task: asyncio.Task[list[Value | None]] | None = None
    count = 0  # of the values

    def begin(self, task: asyncio.Task[list[Value | None]], count: int, nbytes: int) -> None:
        self.task, self.count = task, count
        self.set(nbytes)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[list[Value | None]]) -> None:
        if task is self.task and not task.cancelled() and not task.exception():
            self.set(sum(map(_size, task.result())))

    def end(self) -> None:
        """The values were taken, or nobody wants them any more."""
        if self.task is not None:
            _cancel(self.task)
        self.task = None
        self.set(0)


class Upstream:
    """To be used in one event loop."""

    def __init__(self, nodes: str) -> None:
        """`nodes` is the value of `cluster-nodes`. Raises ValueError."""
        self.client = AsyncPageClient(cluster_url(nodes))
        self.plans = Plans(self.client.cluster)
        self._turns = asyncio.Semaphore(_CALLS)
        self._failing = ""  # the last error, if the last call failed
        self._usual_size = 1  # bytes of a value in the last batch

    async def begin(self) -> None:
        """Log whether the cluster can be used. If not, commands fail until it can."""
        try:
            await self._done(self.plans.ask([simple(b"EXISTS", b"kv:")]))
        except ReplyError as error:
            logger.warning("the cluster can't be used yet: %s", error)

    def do(self, plan: Timed[T]) -> Steps[T]:
        """Steps until a plan is carried out, and its result. Raises ReplyError."""
        return waited_for(self.start(plan))

    def each(self, items: Sequence[T], plan: Callable[[Sequence[T]], Timed[list[U]]]) -> Steps[list[U]]:
        """Steps until a plan is carried out for all items, some at a time. Raises ReplyError."""
        found: list[U] = []
        for start in range(0, len(items), MOST):
            found += yield from self.do(plan(items[start : start + MOST]))
        return found

    def fetch(
        self,
        client: Client,
        items: Sequence[T],
        plan: Callable[[Sequence[T]], Timed[list[Value | None]]],
        spell: Callable[[Value | None], Reply],
    ) -> Iterator[Reply]:
        """Steps that make an array of the values of all items. The next values are fetched while these are sent, as
        long as clients do not hold much. Values count against the client until they are handed over.

        Raises ReplyError as long as nothing was sent. After that, values that can't be fetched are missing."""
        coming, here, at = _Coming(client), _Counted(client), 0
        try:
            while at < len(items):
                if coming.task is None:
                    self._begin(coming, items, at, plan)
                assert coming.task is not None
                try:
                    found = yield from waited_for(coming.task)
                except ReplyError:
                    if not at:
                        raise
                    found = [None] * coming.count
                    self.plans.calls.misses[GONE] += coming.count
                if not at:
                    yield Raw(b"*%d\r\n" % len(items))
                at += coming.count
                here.set(sum(map(_size, found)))
                self._usual_size = max(here.nbytes // len(found), 1)
                coming.end()
                if at < len(items) and not client.server.is_tight:
                    self._begin(coming, items, at, plan)
                for i, value in enumerate(found):
                    found[i] = None
                    here.set(here.nbytes - _size(value))
                    yield spell(value)
        finally:
            coming.end()
            here.set(0)

    def _begin(
        self, coming: _Coming, items: Sequence[T], at: int, plan: Callable[[Sequence[T]], Timed[list[Value | None]]]
    ) -> None:
        """Ask for the next values, as many as there may be room for."""
        room = coming.client.server.found_at_once // self._usual_size
        some = items[at : at + min(max(room, 1), MOST if at else FIRST)]
        coming.begin(self.start(plan(some)), len(some), self._usual_size * len(some))

    def start(self, plan: Timed[T]) -> asyncio.Task[T]:
        """Begin to carry out a plan. Its task raises ReplyError."""
        return asyncio.get_running_loop().create_task(self._done(plan))

    async def _done(self, plan: Timed[T]) -> T:
        """The result of a plan. Raises ReplyError."""
        try:
            async with self._turns:
                found = await self.client.carry_out(plan)
        except (BadBuffer, PageError) as error:
            raise ReplyError(f"ERR {error}") from None
        except PageClientError as error:
            raise self._refusal(error) from None
        self._note("")
        return found

    def _refusal(self, error: PageClientError) -> ReplyError:
        """The error that a client gets for it, which has to be no variable of a frame that it is raised through."""
        refusal = _told(error)
        if _is_of_the_cluster(error):
            self._note(str(refusal))
        elif isinstance(error, Refused):
            self._note("")
        return refusal

    def _note(self, failing: str) -> None:
        """Log when the cluster begins to fail, and when it works again."""
        if failing and not self._failing:
            logger.warning("the cluster fails: %s", failing)
        elif self._failing and not failing:
            logger.warning("the cluster answers again")
        self._failing = failing


def _is_of_the_cluster(error: PageClientError) -> bool:
    """Whether the cluster has failed, and not just one command."""
    if isinstance(error, Refused):
        return error.code in _OF_THE_CLUSTER
    return isinstance(error, Disconnected | DeadlineExceeded | WrongReply)


def _told(error: PageClientError) -> ReplyError:
    """The error that a client of the gateway gets."""
    if isinstance(error, Refused) and error.code in _OUR_RIGHTS:
        return ReplyError(f"ERR the cluster refuses this gateway's user: {error}")
    if isinstance(error, Refused):
        return ReplyError(str(error))
    if isinstance(error, Disconnected | DeadlineExceeded):
        return ReplyError(f"CLUSTERDOWN {error}")
    return ReplyError(f"ERR {error}" if isinstance(error, Unsupported) else f"ERR the cluster: {error}")


def _size(value: Value | None) -> int:
    return sum(map(len, value or ()))


def waited_for(task: asyncio.Future[T]) -> Steps[T]:
    """Steps until a task is done, and its result or exception. The task is cancelled when nobody waits any more."""
    try:
        while not task.done():
            yield Wait(partial(_when_done, task))
        return task.result()
    finally:
        _cancel(task)
        del task  # its error has this frame


def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.get_loop().is_closed():  # as it is when the gateway has ended
        task.cancel()


def _when_done(task: asyncio.Future[Any], then: Callable[[], None]) -> None:
    task.add_done_callback(lambda _: then())
