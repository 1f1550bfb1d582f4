"""Checks before a command runs, and the waits that they cause: for values to load from disk, for space to write, and
for checksums that a thread computes.

A command that reads values runs when they are in memory. A long reply in steps, and a batch of writes, load the values
of their next steps in advance. All other commands use the index only, which is always in memory.

*Touch*: a read by a client with CLIENT NO-TOUCH is no use of the value for the eviction policy. Arguments named
`touches` are False then. Values that are loaded for such a read are not put into the index; they are freed when no
command holds them any more (see `store.disk.fetching`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse, islice
from operator import attrgetter
from typing import Generic, TypeVar

from kvpage_server.commands.access.user import Denial
from kvpage_server.commands.context import Client
from kvpage_server.commands.specs import Spec, lower_name, named, spec_of
from kvpage_server.commands.steps import IN_THREAD_FROM, Steps, wait_for_thread
from kvpage_server.core import CallAgain, Command
from kvpage_server.core.pieces import Piece
from kvpage_server.resp import Reply, ReplyError, Wait, bare
from kvpage_server.store.contents import unit_on_disk
from kvpage_server.store.disk.fetching import BorrowedReads
from kvpage_server.store.disk.prefetch import Hold, Needed, Prefetcher, TooMuch
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.store.evict import Claim, OverLimit
from kvpage_server.store.memory.entry import Entry
from kvpage_server.store.memory.index import ExtentPage, OnDisk

T = TypeVar("T")

_MOST_AHEAD = 8 * 1024**2  # bytes that are loaded in advance, in addition to one step's
_COST_OF_A_HASH = 500  # bytes that are hashed in the time that a checksum costs in addition
_MOST_STEPS = 8  # steps of a reply whose values are loaded in advance
_SIZE, _UNIT, _HEADER = attrgetter("size"), attrgetter("unit"), attrgetter("header")


class Postponed(CallAgain):
    """The signal that a command cannot run yet: the session calls it once more after `wait`. `hold` keeps the values
    that were loaded for it in memory until it has run, `room` reserves space for it until it is called.
    """

    def __init__(self, wait: Wait, hold: Hold | None = None, room: Claim | None = None) -> None:
        super().__init__("the command has to wait")
        self.wait = wait
        self.hold = hold
        self.room = room


def prepare(client: Client, spec: Spec, words: Command) -> None:
    """Check whether the disk, if there is one, lets a command run now. The check itself does not wait.

    Raises Postponed if the command writes and the write-behind queue is full, or if values that it needs are still on
    disk; their load has then begun. Raises ReplyError if the command writes and the disk cannot be written to.
    """
    tiered = client.server.tiered
    if tiered is None:
        return
    if spec.runs_queued:
        _prepare_queued(client, tiered)
        return
    if spec.stores or spec.writes_keys:
        _check_write_behind(tiered, (spec,))
    if client.keyspace.contents.any_on_disk and spec.preloads:
        needed = spec.needs(client.keyspace.needs, spec, words[spec.words :])
        _require_in_memory(client, tiered, needed, touches=client.touches or spec.writes)
    if spec.writes:
        require_durable_state(client, tiered)


def require_durable_state(client: Client, tiered: DiskTier) -> None:
    """With `appendfsync always`, let the reply of a write wait until all changes before it are on disk, too.

    The write may change nothing, for example a DEL of a key that another client has just deleted. After its reply, a
    crash must not bring the key back.
    """
    behind = tiered.behind
    if behind.mode == "always" and behind.durable < behind.position:
        client.durable_before_reply = behind.position


def _prepare_queued(client: Client, tiered: DiskTier) -> None:
    """Check all commands that EXEC will run, as `prepare` does for one. Do nothing if EXEC will fail anyway."""
    transaction = client.transaction
    if transaction is None or transaction.refused or client.watched_changed:
        return
    _check_write_behind(tiered, [spec for spec, _ in transaction.commands])
    if client.keyspace.contents.any_on_disk:
        lookup = client.keyspace.needs
        needs = (spec.needs(lookup, spec, words[spec.words :]) for spec, words in transaction.commands)
        _require_in_memory(client, tiered, chain.from_iterable(needs), touches=True)
    if any(spec.writes for spec, _ in transaction.commands):
        require_durable_state(client, tiered)


def _check_write_behind(tiered: DiskTier, specs: Iterable[Spec]) -> None:
    """Raise Postponed if the write-behind queue is full. Raise ReplyError if the disk fails and `appendfsync` is
    `always`.

    Commands that only delete do not wait. A change of a page's expiry does, because it may write the page's whole
    block.
    """
    behind = tiered.behind
    if behind.refuses and any(spec.stores for spec in specs):
        raise ReplyError(f"MISCONF Errors writing to disk, and appendfsync is always: {behind.failing}")
    if behind.full and any(spec.stores or spec.writes_keys for spec in specs):
        raise Postponed(Wait(behind.when_not_full))


def _require_in_memory(client: Client, tiered: DiskTier, needed: Iterable[Needed], *, touches: bool) -> None:
    """Start to load those of the needed values that are only on disk, and raise Postponed. Return if all are in memory.

    With `touches`, a loaded value becomes an entry in memory like others. Without it, the value stays as it is on disk,
    and its bytes are kept temporarily, for the commands that hold it. Raises ReplyError if an earlier load of a value
    has failed, or if the values need too much memory.
    """
    bodies = dict.fromkeys(needed)
    if on_disk := _on_disk_of(tiered, bodies, touches=touches):
        raise Postponed(*_start_loading(client, tiered, bodies, on_disk, touches=touches))


def _on_disk_of(tiered: DiskTier, needed: Iterable[Needed], *, touches: bool) -> list[OnDisk]:
    """Return those of the needed values that have to be loaded: they are only on disk and, without `touches`, are not
    kept temporarily either.

    Raises ReplyError if the last load of one of them has failed. The next command then tries to load it again.
    """
    on_disk = [body for _, body in needed if type(body) is OnDisk and (touches or body.temporary_slot is None)]
    if on_disk and (failing := [value for value in on_disk if _failed(tiered, value)]):
        why = failing[0].failing
        for value in failing:
            value.failing = ""  # the next command tries again
        raise ReplyError(f"ERR reading from disk failed: {why}")
    return on_disk


def _failed(tiered: DiskTier, value: OnDisk) -> bool:
    """Return whether the last load of a value has failed, and the command that wanted it still holds the value.

    If no command holds it, the client of the failed load has disconnected. The value is then loaded as if there had
    been no error, because the disk may work now.
    """
    return bool(value.failing) and unit_on_disk(value) in tiered.fetching.holds


def wait_for_memory(tiered: DiskTier) -> None:
    """Raise Postponed, for a command that found memory full, while queued writes wait for their commit: values that are
    on disk can be dropped from memory after it. Return if all changes are on disk, or the disk fails.
    """
    behind = tiered.behind
    if not (behind.settled or behind.failing):
        raise Postponed(Wait(behind.when_not_full))


def wait_for_write_behind(client: Client) -> Iterator[Reply]:
    """Yield Waits for space in the write-behind queue while the queue is full: the steps of a disconnected client go on
    before the event. A transaction does not wait.
    """
    tiered = client.server.tiered
    while tiered is not None and tiered.behind.full and not client.in_exec:
        yield Wait(tiered.behind.when_not_full)


def _start_loading(
    client: Client, tiered: DiskTier, needed: Iterable[Needed], on_disk: Sequence[OnDisk], *, touches: bool
) -> tuple[Wait, Hold]:
    """Start to load the values `on_disk`, and hold all `needed` values in memory. Return the wait for the loads, and
    the hold.

    Raises ReplyError if the values are larger than maxmemory-clients, or if the system has no memory.
    """
    most = client.server.config.client_memory
    try:
        hold, start = tiered.fetching.load_and_hold(needed, on_disk, most, touches=touches)
    except TooMuch as error:
        raise ReplyError(
            f"OOM {error.size} bytes would have to be in memory at once, maxmemory-clients allows {most}: "
            "ask for less at a time"
        ) from None
    except MemoryError:
        raise ReplyError("OOM the system has no memory left for these values") from None
    return Wait(start), hold


def fetched(
    client: Client, find: Callable[[Prefetcher], Iterable[Needed]], *, touches: bool = True
) -> Steps[Hold | None]:
    """Load the values that `find(lookup)` returns, in steps of a reply, and return their hold; None if nothing was
    loaded.

    The values stay in memory until the caller drops the hold. Without a hold, they do so until the caller's next step.
    Raises ReplyError as `_require_in_memory`.
    """
    tiered, hold = client.server.tiered, None
    while tiered is not None and client.keyspace.contents.any_on_disk:
        needed = dict.fromkeys(find(client.keyspace.needs))
        on_disk = _on_disk_of(tiered, needed, touches=touches)
        if not on_disk:
            return hold if touches else tiered.fetching.holds.begin(unit for unit, _ in needed)
        wait, hold = _start_loading(client, tiered, needed, on_disk, touches=touches)
        yield wait
    return hold


class ReadAhead(Generic[T]):
    """Read-ahead of a long reply in steps: it loads values several steps before they are sent.

    `steps` yields an item for each step of the reply, and `find(lookup, step)` returns the values of a step that are
    only on disk. With `of_pages` they are pages, otherwise extents; only these are *borrowed*, which means that the
    reply sends their bytes without loading them into the store's memory. Other values, for example single pages of a
    block that is read as a whole, are loaded.
    """

    def __init__(
        self, client: Client, find: Callable[[Prefetcher, T], Sequence[OnDisk]], steps: Iterable[T], *, of_pages: bool
    ) -> None:
        self.lent: BorrowedReads = {}  # for the current step and the steps after it
        self._client = client
        self._tiered = client.server.tiered
        self._keyspace = client.keyspace
        self._touches = client.touches
        self._find = find
        self._of_pages = of_pages
        self._rest = iter(steps)  # the steps that were not looked at yet
        self._steps: deque[T] = deque()  # the current step, and the steps after it that were looked at
        self._fetched: deque[list[OnDisk]] = deque()  # loaded values of each of these steps
        self._sizes: deque[int] = deque()  # bytes of each of these lists
        self._borrowed: deque[int] = deque()  # bytes of each of these lists, 0 if they are loaded into the store
        self._sent: list[OnDisk] = []  # values that were loaded for the current step
        self._holds: list[Hold] = []  # the holds of the current step's values

    def next(self) -> Steps[T | None]:
        """Begin the next step: yield waits until its values are in memory or borrowed. Return it, or None if there is
        none. It must be called before each step, and `end_step` after it.

        A value that cannot be read stays on disk.
        """
        tiered = self._tiered
        if tiered is None or not (self._steps or self._keyspace.contents.any_on_disk):
            return next(self._rest, None)
        self._look_ahead(tiered)
        if not self._steps:
            return None
        here = self._steps.popleft()
        self._sent = self._fetched.popleft()
        self._sizes.popleft()
        self._borrowed.popleft()
        self._holds = []
        while lacking := [value for value in self._lacking(here) if not _failed(tiered, value)]:
            self._sent += lacking
            lent, hold = self._borrowed_reads_for(lacking), tiered.fetching.holds.begin(map(unit_on_disk, lacking))
            self._holds.append(hold)
            if lent is None and not self._touches:
                tiered.fetching.holds.grow(hold, sum(map(_SIZE, lacking)), stays=False)
            yield Wait(partial(tiered.fetching.fetch, lacking, lent=lent, touches=self._touches))
        if not self._touches:  # values that another command has loaded leave memory when that command ends
            loaded = (value for value in self._find(self._keyspace.needs, here) if value.temporary_slot is not None)
            self._holds.append(tiered.fetching.holds.begin(map(unit_on_disk, loaded)))
        for value in self._sent:
            value.failing = ""
        self._client.read_ahead = sum(self._borrowed)
        return here

    def end_step(self) -> None:
        """Drop the references to the step's borrowed values, so that their memory is freed when they are sent."""
        for value in self._sent:
            self.lent.pop(value, None)

    def borrowed_read_of(self, entries: Sequence[Entry | None]) -> tuple[Piece, ...] | None:
        """Return the encoded pieces of a step's entries if all of them are borrowed from one read in this order,
        otherwise None.
        """
        loan = self.lent.get(entries[0]) if type(entries[0]) is OnDisk else None
        return None if loan is None else loan.pieces(entries)

    def _lacking(self, step: T) -> list[OnDisk]:
        """Return the values of a step that are neither borrowed nor, without `touches`, kept temporarily."""
        found = filterfalse(self.lent.__contains__, self._find(self._keyspace.needs, step))
        return [value for value in found if self._touches or value.temporary_slot is None]

    def _look_ahead(self, tiered: DiskTier) -> None:
        """Begin to load the values of the current step and the steps after it, up to `_MOST_STEPS` steps or
        `_MOST_AHEAD` bytes, or `lookup_bytes` if that is less. Do nothing while more than half of these bytes are
        loaded in advance.
        """
        sizes, most = self._sizes, min(_MOST_AHEAD, self._client.server.lookup_bytes)
        if sum(sizes) > most // 2:
            return
        if not sizes and (first := self._look_at_one_more()) is not None:
            self._fetch(tiered, first)
        others: dict[OnDisk, None] = {}
        while len(sizes) < _MOST_STEPS and sum(sizes) < most and (some := self._look_at_one_more()) is not None:
            others.update(dict.fromkeys(some))
        self._fetch(tiered, list(others))
        self._client.read_ahead = sum(self._borrowed)

    def _look_at_one_more(self) -> list[OnDisk] | None:
        """Return the values to load for the next step, and append it to `_steps`; None if there is none."""
        step = next(self._rest, None)
        if step is None:
            return None
        values = self._lacking(step)
        self._steps.append(step)
        self._fetched.append(values)
        self._sizes.append(sum(map(_SIZE, values)))
        return values

    def _fetch(self, tiered: DiskTier, values: list[OnDisk]) -> None:
        """Begin to borrow the values of the last looked up steps, or to load them if they cannot be borrowed. Do
        nothing for values that cannot be borrowed if the client has CLIENT NO-TOUCH: these are loaded at their step,
        when a hold keeps them.
        """
        lent, borrowed = self._borrowed_reads_for(values), False
        if lent is not None or self._touches:  # without both, a value stays only as long as the hold of its step
            borrowed = tiered.fetching.fetch(values, _nothing, lent, touches=self._touches)
        sizes = islice(self._sizes, len(self._borrowed), None)
        self._borrowed.extend(sizes if borrowed else (0 for _ in sizes))

    def _borrowed_reads_for(self, values: Sequence[OnDisk]) -> BorrowedReads | None:
        """Return the map to which borrowed reads of these values are added; None if one of them cannot be borrowed."""
        pages = {*map(bool, map(_HEADER, values))}
        return self.lent if pages == {self._of_pages} and None not in map(_UNIT, values) else None


def hash_first(client: Client, entry: Entry | None) -> None:
    """Raise Postponed if the checksum of an entry, whose read was counted, has to be computed by a thread.

    The command is called again after it, and counts the hit then: it is not counted before.
    """
    if wait := wait_for_checksums([entry]):
        client.keyspace.counters.hits -= 1
        raise Postponed(wait)


def wait_for_checksums(entries: Iterable[Entry | None]) -> Wait | None:
    """Return a Wait until a thread has computed the checksums of all pages of the blocks that were stored whole, and
    that the entries belong to; None if the checksums are known, or few pages and bytes have to be hashed.
    """
    pages = (entry.extent for entry in entries if type(entry) is ExtentPage)
    extents = [extent for extent in dict.fromkeys(pages) if extent.is_not_hashed]
    hashed = sum(extent.slot.size + extent.shape.pages * _COST_OF_A_HASH for extent in extents)
    if hashed < IN_THREAD_FROM:
        return None
    bodies = [extent.slot.part(0, extent.slot.size) for extent in extents]  # a block may leave its memory meanwhile

    def work() -> None:
        for extent, body in zip(extents, bodies, strict=True):
            extent.hash_pages(body.view)

    return wait_for_thread(work, lambda: None)


def _nothing() -> None:
    """Do nothing: the callback of a load or wait after which no code has to run."""


# -- Checks before a command runs: rights, the client's state, a pause, free memory ------------------------------------

log = logging.getLogger("kvpage")

_HTTP = (
    b"post",
    b"host:",
)  # the first words of HTTP requests: a website can make a browser send commands in them


class Paused(Exception):
    """The signal that a command has to wait for the end of a CLIENT PAUSE. The session runs it then."""


def is_unqueued(words: Command) -> bool:
    """Return whether a command is executed immediately even after MULTI, for example EXEC. False for an unknown
    command.
    """
    spec = named(words[0])
    return spec is not None and spec.unqueued


def queues(client: Client, spec: Spec) -> bool:
    """Return whether a command of a client in a transaction is queued for EXEC, and not executed."""
    return client.transaction is not None and not spec.unqueued


def check_state(client: Client, spec: Spec) -> None:
    """Raise ReplyError if the client's state does not allow the command (subscribed in RESP2, inside a transaction), or
    Paused if the command has to wait for the end of a CLIENT PAUSE.
    """
    if (client.channels or client.patterns) and client.protocol == 2 and not spec.while_subscribed:
        raise ReplyError(
            f"ERR Can't execute '{spec.name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET "
            "are allowed in this context"
        )
    if client.transaction is not None and "no_multi" in spec.flags:
        raise ReplyError(f"ERR Command '{spec.name}' not allowed inside a transaction")
    server = client.server
    if server.pause is not None and server.is_paused and (not server.pause.only_writes or _writes(client, spec)):
        raise Paused


def check_rights(client: Client, spec: Spec, words: Command) -> None:
    """Raise ReplyError if the client has not authenticated, or its user lacks a right for the command with these words.
    A lacking right is added to the ACL log.
    """
    user = client.user
    if "no_auth" in spec.flags:
        return
    if user is None:
        raise ReplyError("NOAUTH Authentication required.")
    if user.unrestricted:
        return
    denial = user.denial(spec, words[spec.words :])
    if denial is not None:
        raise refused(client, denial)


def refused(client: Client, denial: Denial) -> ReplyError:
    """Add a lacking right of a client to the ACL log, and return the error for it."""
    client.server.refuse(client, denial.kind, denial.what)
    return ReplyError(denial.message)


def takes_memory(client: Client, spec: Spec) -> bool:
    """Return whether a command is refused when memory is full: it stores a value, is queued, or is EXEC with a command
    that stores a value.
    """
    if client.transaction is None:
        return spec.stores
    if spec.runs_queued:
        return any(queued.stores for queued, _ in client.transaction.commands)
    return not spec.unqueued


def free_memory(client: Client) -> None:
    """Evict units (blocks and strings) until memory is below its limit.

    It is called before a command runs, so that no command or transaction evicts for memory. For disk, quotas and the
    index of a split block, a command evicts itself, before it stores its value (`Reservation.make_room`). Raises
    Postponed if more has to be evicted than in one step, or if queued writes have to reach the disk first; ReplyError
    (OOM) if nothing more may be evicted.
    """
    memory, tiered = client.server.keyspace.memory, client.server.tiered
    try:
        if not memory.shrink():
            raise Postponed(Wait(asyncio.get_running_loop().call_soon))
        # Memory exceeds its limit by more than the queue may have: by parts of large blocks. A part that is on disk
        # stays in memory until all parts of its block are.
        if tiered is not None and memory.limit and memory.used > memory.evicts_above(-tiered.behind.limit):
            wait_for_memory(tiered)
    except OverLimit as full:
        if tiered is not None:
            wait_for_memory(tiered)
        raise ReplyError(f"OOM {full}") from None


def wait_for_messages(client: Client, spec: Spec) -> None:
    """Raise Postponed if so many messages wait to be sent that a command which may cause others has to wait."""
    channels = client.server.channels
    if channels.is_full and _writes(client, spec):
        raise Postponed(Wait(channels.when_sent))


def rejected(client: Client, spec: Spec | None, words: Command, error: ReplyError) -> ReplyError:
    """Count the error of a command that did not run, and return the error as its reply.

    A refused EXEC ends its transaction, and another refused command makes its EXEC fail. The connection of an HTTP
    client is closed. `spec` is None for an unknown command.
    """
    stats = client.server.stats
    stats.note_error(str(error))
    if spec is not None:
        stats.calls[spec.name].rejected += 1
    elif isinstance(words[0], bytes) and lower_name(words[0]) in _HTTP:
        message = "%s speaks HTTP: its connection ends, the rest of it may be commands"
        client.server.seldom.log(logging.WARNING, message, client.address)
        client.connection.abort()
    row = spec_of(words)
    if row is not None and row.runs_queued:
        client.end_transaction()
        error = ReplyError(f"EXECABORT Transaction discarded because of: {str(error).removeprefix('ERR ')}")
    elif client.transaction is not None:
        client.transaction.refused = True
    end_caching(client, row)
    return bare(error)


def end_caching(client: Client, spec: Spec | None) -> None:
    """End the effect of CLIENT CACHING, which is for one command or one transaction. Inside a transaction, and for
    commands with `keeps_caching`, do nothing.
    """
    if client.tracking is not None and client.transaction is None and not (spec is not None and spec.keeps_caching):
        client.tracking.caching_called = False


def _writes(client: Client, spec: Spec) -> bool:
    """Return whether the command may write, so that a CLIENT PAUSE of writes delays it; for EXEC, whether a queued
    command may.
    """
    if spec.runs_queued and client.transaction is not None:
        return any(spec.flags & {"write", "may_replicate"} for spec, _ in client.transaction.commands)
    return bool(spec.flags & {"write", "may_replicate"})
