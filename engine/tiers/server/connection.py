"""The connection to a page server, used on the engine's event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

from redis.driver_info import DriverInfo

from kvpage_server import __version__
from kvpage_server.address import shown, user_of
from kvpage_server.client import (
    AsyncPageClient,
    DeadlineExceeded,
    Disconnected,
    PageClientError,
    Refused,
    WrongReply,
    names_several,
)
from kvpage_server.client.cluster.nodes import SILENCE
from kvpage_server.client.cluster.plan import GONE, RAISES
from kvpage_server.client.cluster.topology import SCHEMES
from kvpage_server.client.commands import Coding
from kvpage_server.client.raw_commands import RawCommand, Word, key_of, ok, scanned, text, texts
from kvpage_server.page import segment_of

from ...event_loop import EventLoop
from .restore_planner import Rates

# -- The circuit breaker: after repeated failures, no request is sent for a while, so that no caller waits -------------

FAILURES = 3  # in a row at which it opens
SHORTEST, LONGEST = 0.5, 30.0  # seconds for which it stays open; doubled by each failed probe


class State(StrEnum):
    """State of a circuit breaker. `CLOSED` permits all requests, and `OPEN` none. `HALF_OPEN` permits one, the probe;
    its result determines the next state."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Circuit breaker: permits or rejects requests to a server, according to the results so far. Thread-safe.

    The caller of a permitted request calls `succeeded` or `failed` afterwards. A cancelled request calls neither: if it
    was the probe, the first request after another pause is the next probe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a closed breaker. `clock` returns seconds."""
        self.opened = 0  # how often it has opened
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._pause = SHORTEST  # seconds from a failure to the next probe
        self._probe_at: float | None = None  # time of `clock` from which a probe is permitted; None if it is closed
        self._probing = False  # a probe is in progress

    @property
    def state(self) -> State:
        if self._probe_at is None:
            return State.CLOSED
        return State.HALF_OPEN if self._probing or self._clock() >= self._probe_at else State.OPEN

    def allows(self) -> bool:
        """Return whether a request may be sent. If the breaker is open, the first request after the pause is the
        probe."""
        with self._lock:
            if self._probe_at is None:
                return True
            if self._clock() < self._probe_at:
                return False
            self._probing = True
            self._probe_at = self._clock() + self._pause
            return True

    def retry(self) -> None:
        """End the pause: the next request is the probe."""
        with self._lock:
            if self._probe_at is not None:
                self._probe_at = self._clock()

    def succeeded(self) -> None:
        """Note that the server has answered correctly, and close the breaker."""
        with self._lock:
            self._failures = 0
            self._pause = SHORTEST
            self._probe_at = None
            self._probing = False

    def failed(self) -> None:
        """Note that the server has not answered in time or not correctly. Open the breaker after FAILURES of these in a
        row."""
        with self._lock:
            self._failures += 1
            if self._probing:
                self._pause = min(2 * self._pause, LONGEST)
            elif self._probe_at is not None or self._failures < FAILURES:
                return  # the request was sent before the breaker opened, or too few have failed
            else:
                self.opened += 1
            self._probing = False
            self._probe_at = self._clock() + self._pause


log = logging.getLogger(__name__)

T = TypeVar("T")
OUTAGES = (PageClientError, OSError, TimeoutError)  # exceptions of a server that fails or is absent
FAILING = frozenset({"slow", "down", "garbled"})  # reasons that the breaker counts as failures
_attempt_timeout: ContextVar[asyncio.Timeout] = ContextVar("attempt_timeout")  # of the current attempt
SCAN_COUNT = 5000  # keys that one call of SCAN examines
CONCURRENT_ATTEMPTS = 16  # concurrent attempts, each with up to CONNECTIONS connections
CONNECTIONS = 2  # that a load uses in parallel


def reason(error: BaseException) -> str:
    """Return the name under which an outage is counted: ``slow`` no reply in time; ``down`` no connection; ``garbled``
    a reply that does not fit the command; ``full`` the server has no memory left; ``refused`` another error reply."""
    if isinstance(error, TimeoutError | DeadlineExceeded):
        return "slow"
    if isinstance(error, WrongReply):
        return "garbled"
    if isinstance(error, Refused) and error.code == "OOM":
        return "full"
    return "down" if isinstance(error, Disconnected | OSError) else "refused"


def refuses(error: BaseException) -> bool:
    """Return whether an error is the reply of a server to which the engine is logged in. One of several servers with
    another login is unavailable, as one that does not answer."""
    return isinstance(error, Refused) and not error.of_login


@dataclass(frozen=True, slots=True)
class Outage:
    """Period in which the page server does not answer."""

    reason: str  # of the last failure
    begun: float  # time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun


class Reachability:
    """Log of outages of the page server, with one line for the begin, one for each other reason that it has later, and
    one for the end of each.

    An outage begins with the last of FAILURES failures in a row, and ends with the next answer. This is counted apart
    from the breaker, which stays closed for login errors and with several servers. A process has a connection for each
    model, and one for responses: the first one that notices the begin or the end of an outage of their server logs it.

    Each of several servers has one, which counts the heartbeats alone.

    `failed` and `answered` are called on the loop's thread. `outage` may be read on any thread; it is None without an
    outage.
    """

    _lock = threading.Lock()
    # By address: the connections that notice the logged outage, with the reasons that each has noticed.
    _noticed: ClassVar[dict[str, dict[Reachability, set[str]]]] = {}

    def __init__(self, address: str) -> None:
        self.outage: Outage | None = None
        self._address = address
        self._failures = 0  # in a row
        self.connected = False  # whether the server has ever answered

    def failed(self, reason: str, error: BaseException) -> None:
        """Count a failure of the server."""
        self._failures += 1
        before = self.outage
        if self._failures < FAILURES or (before and before.reason == reason):
            return
        self.outage = Outage(reason, before.begun if before else time.monotonic())
        with self._lock:
            noticed = self._noticed.setdefault(self._address, {})
            goes_on = bool(before or noticed)
            is_logged = any(reason in reasons for reasons in noticed.values())
            noticed.setdefault(self, set()).add(reason)
        if not is_logged:
            begins = "lost connection" if self.connected else "cannot connect"
            event = "still no connection" if goes_on else begins
            text = str(error) or "no answer in time"
            log.warning("%s to the page server at %s (%s): %s", event, self._address, reason, text)

    def answered(self) -> None:
        """Note that the server has answered, even with an error."""
        if self.outage:
            with self._lock:
                is_logged = not self._noticed.pop(self._address, None)
            if not is_logged:
                event = "connected again" if self.connected else "connected"
                log.warning("%s to the page server at %s after %.0f s", event, self._address, self.outage.seconds)
        self.outage, self._failures, self.connected = None, 0, True

    @property
    def in_doubt(self) -> bool:
        """Whether the last requests failed, and so few that no outage has begun."""
        return 0 < self._failures < FAILURES

    def close(self) -> None:
        """Stop noticing: another connection may log the next outage."""
        with self._lock:
            self._noticed.get(self._address, {}).pop(self, None)


class ServerConnection:
    """Connection to a page server, with an event loop. `server`, the client, may be used only on this loop."""

    def __init__(self, url: str, owner: str, deadline: float, code: Coding = "auto") -> None:
        """Start the loop for `owner`. `deadline` is in seconds, for a request or a chunk of blocks. `code` is as for
        PageClient.

        Raises ValueError for an invalid URL.
        """
        self.user = user_of(url)
        self.several = names_several(url)
        self.deadline = deadline
        more: dict[str, Any] = {"driver_info": DriverInfo("kvpage-engine", __version__)}  # shown by CLIENT LIST
        if self.several:
            more["node_deadline"] = min(SILENCE, deadline / 4)
        self.server = AsyncPageClient(
            url, deadline=self.answer_within, verify=False, code=code, **more
        )  # seals verify blocks
        self._failing = frozenset() if self.several else FAILING  # with several servers, the client skips failing ones
        self.connections = CONNECTIONS
        self.breaker = CircuitBreaker()
        self.reachability = Reachability(shown(url))  # of several servers: whether the client knows them
        self._nodes: dict[Hashable, Reachability] = {}  # of each of several servers
        self.rates = Rates()
        # False after a refusal of CLIENT NO-TOUCH, and for a cluster, which may not answer on the same connection
        self._may_use_no_touch = urlsplit(url).scheme not in SCHEMES
        self._turns = asyncio.Semaphore(CONCURRENT_ATTEMPTS)
        self.loop = EventLoop(owner)

    @property
    def answer_within(self) -> float:
        """Seconds for a reply. With several servers it is half the deadline, so that the rest is left for the others if
        one does not answer."""
        return self.deadline / 2 if self.several else self.deadline

    @property
    def outage(self) -> Outage | None:
        """The outage of the server, or of one of several, that lasts now: the longest; None if all answer."""
        outages = [one.outage for one in (self.reachability, *list(self._nodes.values()))]
        return min(filter(None, outages), key=lambda outage: outage.begun, default=None)

    @property
    def connected(self) -> bool:
        """Whether the server, or each of several, has ever answered."""
        return all(one.connected for one in (self.reachability, *list(self._nodes.values())))

    @property
    def in_doubt(self) -> bool:
        """Whether the next heartbeat should follow soon, because one of several servers did not answer the last one."""
        return any(one.in_doubt for one in self._nodes.values())

    def begin(
        self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]
    ) -> Callable[[], object]:
        """Start `work` on the loop, and return a function that cancels it. `on_end` is called on the loop when `work`
        has ended in any way."""
        task: asyncio.Task[None] | None = None

        def start() -> None:
            nonlocal task
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(on_end)

        def cancel() -> None:
            assert task is not None  # calls of the loop keep their order
            task.cancel()

        if not self.loop.call(start):
            work.close()
            raise RuntimeError("the connection to the page server is closed")
        return lambda: self.loop.call(cancel)

    async def attempt(
        self, work: Coroutine[Any, Any, T], on_failure: Callable[[str], object], within: float | None = None
    ) -> T | None:
        """Run `work`, at most CONCURRENT_ATTEMPTS at the same time, unless the breaker is open.

        After an outage, call `on_failure` with the reason and return None.

        The deadline starts when `work` starts, and again at each call of `progressed`. `within` limits the whole time
        in seconds, including the wait for a turn. The reason of exceeding it is ``late``, which is no failure of the
        server.
        """
        try:
            async with asyncio.timeout(within) as whole, self._turns:
                if not self.breaker.allows():
                    on_failure("open")
                    return None
                async with asyncio.timeout(self.deadline) as limit:
                    _attempt_timeout.set(limit)
                    done = await work
        except OUTAGES as error:
            late = whole.expired()
            why = "late" if late else reason(error)
            on_failure(why)
            if not (late or self.several):
                _note(self.reachability, error)
            if why in self._failing:
                self.breaker.failed()
            elif not late:
                self.breaker.succeeded()
            return None
        finally:
            work.close()
        if not self.several:
            self.reachability.answered()
        self.breaker.succeeded()
        return done

    def progressed(self) -> None:
        """Restart the deadline of the current attempt, because a part of it is done."""
        limit = _attempt_timeout.get()
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + self.deadline)

    async def ask(self, raw_commands: Iterable[RawCommand], *, gone: Any = RAISES, of: Hashable = None) -> list[Any]:
        """Send several commands together, and return their parsed replies. Raises the first error reply. The client
        documents `gone` and `of`."""
        answers = await self.server.ask(list(raw_commands), gone=gone, of=of, deadline=self.answer_within)
        self.progressed()
        return answers

    async def ask_untouched(self, raw_commands: Iterable[RawCommand], *, gone: Any = RAISES) -> list[Any]:
        """Send commands that do not count as uses of their keys, if the server permits CLIENT NO-TOUCH to the user. On
        a cluster, they count."""
        raw_commands = list(raw_commands)
        if self._may_use_no_touch:
            asked, places = list[RawCommand](), list[int]()
            for key, some in groupby(raw_commands, _segment) if self.several else [(b"", iter(raw_commands))]:
                on, off = (RawCommand(["CLIENT", "NO-TOUCH", word], ok, key) for word in ("ON", "OFF"))
                asked.append(on)
                for one in some:
                    places.append(len(asked))
                    asked.append(one)
                asked.append(off)
            try:
                answers = await self.ask(asked, gone=gone)
            except Refused as error:
                if error.code not in ("NOPERM", "ERR"):
                    raise
                self._may_use_no_touch = False
            else:
                return [answers[place] for place in places]
        return await self.ask(raw_commands, gone=gone)

    async def ask_one(self, read: Callable[[Any], T], *words: Word) -> T:
        """Send one command, and return its reply, which `read` parses."""
        (answer,) = await self.ask([RawCommand(words, read)])
        return cast(T, answer)

    async def read(self, keys: Sequence[str], on_miss: Callable[[str], object] = lambda _: None) -> list[bytes | None]:
        """Read strings; None for missing keys. If one of several servers does not answer, call `on_miss` with
        ``gone``."""
        if not self.several:
            return await self.ask_one(texts(len(keys)), "MGET", *keys)
        nothing = object()
        found = await self.ask([RawCommand(["GET", key], text) for key in keys], gone=nothing)
        if nothing in found:
            on_miss(GONE)
        return [None if value is nothing else value for value in found]

    async def write(self, values: Mapping[str, str]) -> None:
        if self.several:
            await self.ask(RawCommand(["SET", *item], ok) for item in values.items())
        elif values:
            await self.ask_one(ok, "MSET", *chain.from_iterable(values.items()))

    async def check(self) -> None:
        """Raise an outage if no server answers."""
        nodes = await self.server.nodes(deadline=self.answer_within)
        for left in range(len(nodes) - 1, -1, -1):
            try:
                await self.ask([RawCommand(["PING"], lambda _: None)], of=nodes[left])
                return
            except OUTAGES:
                if not left:
                    raise

    async def ask_every(self, command: RawCommand) -> None:
        """Send a command to every server, one after another, and note which of several answer. Raises Refused if one
        refuses it, and an outage if none answers."""
        try:
            nodes = await self.server.nodes(deadline=self.answer_within)
        except OUTAGES as error:
            if self.several:
                _note(self.reachability, error)
            raise
        if self.several:
            self.reachability.answered()
            for node in self._nodes.keys() - set(nodes):  # which a cluster has replaced
                self._nodes.pop(node).close()
        outages: list[Exception] = []
        for node in nodes:
            known = self._nodes.setdefault(node, Reachability(f"{node}")) if self.several else None
            try:
                await self.ask([command], of=node)
                if known:
                    known.answered()
            except OUTAGES as error:
                if known:
                    _note(known, error)
                if refuses(error):
                    raise
                outages.append(error)
                self.progressed()
        if outages and len(outages) == len(nodes):
            try:
                raise outages[0]
            finally:
                outages.clear()  # its traceback has this frame: break the cycle

    async def scan(self, pattern: str, *, all_of_them: bool = False) -> set[str]:
        """Return the keys that match. Failing servers are left out. Their error is raised if no key was found, or with
        `all_of_them`."""
        found, failure, nodes = set[str](), None, await self.server.nodes(deadline=self.answer_within)
        for node in nodes:
            try:
                found |= await self._scan(pattern, node)
            except OUTAGES as error:
                failure = error
                if all_of_them or refuses(error) or len(nodes) == 1:
                    raise
        if failure and not found:
            try:
                raise failure
            finally:
                del failure  # its traceback has this frame: break the cycle
        return found

    async def _scan(self, pattern: str, node: Hashable) -> set[str]:
        cursor, found = b"0", set[str]()
        while True:
            raw_command = RawCommand(["SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT], scanned)
            ((cursor, keys),) = await self.ask([raw_command], of=node)
            found.update(key.decode(errors="replace") for key in keys)
            if cursor == b"0":
                return found

    async def transaction(
        self, keys: Sequence[Word], raw_command: RawCommand, change: Callable[[Any], Sequence[RawCommand]]
    ) -> list[Any]:
        """Send `raw_command`, and the commands that `change` makes of its reply, in a transaction. If one of the `keys`
        has changed meanwhile, do it again. Return the replies to the commands."""
        answers = await self.server.transaction(keys, raw_command, change, deadline=self.answer_within)
        self.progressed()
        return answers

    def close(self) -> None:
        """Cancel operations in progress, close the connections, and close the loop. It may be called again."""
        self.loop.close(self.server.close())
        for one in (self.reachability, *self._nodes.values()):
            one.close()


def _segment(raw_command: RawCommand) -> bytes:
    return segment_of(key_of(raw_command))


def _note(server: Reachability, error: Exception) -> None:
    """Count a failed request of a server, which is an answer if its reply is an error, except one of a login."""
    why = reason(error)
    if why in FAILING or (isinstance(error, Refused) and error.of_login):
        server.failed(why, error)
    else:
        server.answered()
