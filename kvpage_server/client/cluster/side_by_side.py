"""Several kvpage-servers that do not know each other. Each segment of a prompt, that is the tag of a request id,
belongs to one of them.

Rendezvous hashing chooses the server: each server has a hash with the segment, and the highest hash wins. So all
clients with the same list of servers, in any order, find the same server. A new server takes its share from all others.
While a server of the list is unavailable, reads of its segments are misses. They are not sent to the next server,
because the unavailable one may become available again with old values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import xxhash
from typing_extensions import Buffer

from kvpage_server.address import urls_of
from kvpage_server.client.calls import Call, Calls, count_misses
from kvpage_server.client.cluster.plan import GONE, Failed, NodeRequest, Plan, Round, lengths, timed
from kvpage_server.client.commands import BlobCommands, ask_dialect
from kvpage_server.client.errors import Disconnected, PageClientError, Refused
from kvpage_server.client.page import BlockBody, BlockName, Page, StateName, check_names
from kvpage_server.client.raw_commands import BlockCommands, Kept, RawCommand, ask, key_of
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.exchange import Request
from kvpage_server.page import BlockShape, PageKey, segment_of

T = TypeVar("T")
_TRIES = 2  # attempts, because the server may have closed an idle connection


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A server, by its URL."""

    url: str

    def __str__(self) -> str:
        """Return the URL without user and password, for error messages and for hashing. User and password may
        change.
        """
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def lists_several(url: str) -> bool:
    """Return whether a URL is a list of URLs with commas between them, or has a comma in its host."""
    return len(urls_of(url)) > 1 or "," in urlsplit(url).netloc.rpartition("@")[2]


def servers_of(urls: str) -> list[ServerUrl]:
    """Return the servers of a list of URLs such as ``redis://a:9221,redis://b:9221``.

    Raises ValueError for a server that is listed twice, and for a comma within a URL.
    """
    found = [ServerUrl(url) for url in urls_of(urls)]
    names = Counter(map(str, found))
    for name, times in names.items():
        if "," in name:
            raise ValueError(f"several servers are redis://host:port,redis://host:port, got {name}")
        if times > 1:
            raise ValueError(f"{name} is named {times} times")
    return found


class Rendezvous:
    """The choice of a server for each segment."""

    def __init__(self, servers: Sequence[ServerUrl]) -> None:
        self.servers = list(servers)
        self._seeds = [(server, xxhash.xxh3_64_intdigest(str(server).encode())) for server in servers]

    def server(self, segment: bytes) -> ServerUrl:
        """Return the server of a segment. It does not depend on the order of the servers."""
        return max(self._seeds, key=lambda each: (xxhash.xxh3_64_intdigest(segment, each[1]), str(each[0])))[0]


@dataclass
class SideBySideCalls:
    """The methods of a client on servers side by side, as plans. Each sends the same call to every server, with the
    server's part of the batch.
    """

    rendezvous: Rendezvous
    calls: Calls  # for one connection
    words: ClassVar[type[BlockCommands]] = BlockCommands
    _dialects: dict[ServerUrl, BlobCommands] = field(default_factory=dict)

    @property
    def misses(self) -> Counter[str]:
        return self.calls.misses

    # -- pages -------------------------------------------------------------------------------------------------------

    @timed
    def mset(self, end: Deadline, pages: Sequence[Page], ttl: int) -> Plan[None]:
        self.calls.mset(pages, ttl)  # checks them as a whole
        parts = self._parts([page.key.req_id for page in pages], lambda some: self.calls.mset(_of(pages, some), ttl))
        _all_done((yield from self._ask(parts)))

    @timed
    def mget(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Page | None]]:
        parts = self._parts([key.req_id for key in keys], lambda some: self.calls.mget(_of(keys, some)))
        return self._gathered(len(keys), None, (yield from self._ask(parts)))

    @timed
    def mget_into(self, end: Deadline, keys: Sequence[PageKey], buffers: Sequence[Buffer]) -> Plan[list[bool]]:
        self.calls.mget_into(keys, buffers)  # checks them as a whole
        parts = self._parts(
            [key.req_id for key in keys], lambda some: self.calls.mget_into(_of(keys, some), _of(buffers, some))
        )
        return self._gathered(len(keys), False, (yield from self._ask(parts)))

    @timed
    def mexists(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[bool]]:
        parts = self._parts([key.req_id for key in keys], lambda some: self.calls.mexists(_of(keys, some)))
        return self._gathered(len(keys), False, (yield from self._ask(parts)))

    @timed
    def delete(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[int]:
        parts = self._parts([key.req_id for key in keys], lambda some: self.calls.delete(_of(keys, some)))
        return sum(_all_done((yield from self._ask(parts))))

    @timed
    def delete_request(self, end: Deadline, req_id: bytes, pages: Sequence[int]) -> Plan[int]:
        parts = self._parts([req_id], lambda _: self.calls.delete_request(req_id, pages))
        return sum(_all_done((yield from self._ask(parts))))

    # -- blocks ------------------------------------------------------------------------------------------------------

    @timed
    def mset_blocks(
        self, end: Deadline, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[BlockBody], ttl: int
    ) -> Plan[None]:
        self.calls.mset_blocks(names, shape, bodies, ttl)  # checks them as a whole
        parts = self._parts(
            [req_id for req_id, _ in names],
            lambda some: self.calls.mset_blocks(_of(names, some), shape, _of(bodies, some), ttl),
        )
        _all_done((yield from self._ask(parts)))

    @timed
    def fetch_blocks_into(
        self, end: Deadline, names: Sequence[BlockName], shape: BlockShape, buffers: Sequence[Buffer]
    ) -> Plan[list[str | None]]:
        self.calls.fetch_blocks_into(names, shape, buffers)  # checks them as a whole
        parts = self._parts(
            [req_id for req_id, _ in names],
            lambda some: self.calls.fetch_blocks_into(_of(names, some), shape, _of(buffers, some)),
        )
        return self._gathered(len(names), GONE, (yield from self._ask(parts)))

    @timed
    def prefix(self, end: Deadline, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Plan[int]:
        """Return the number of complete blocks from the first name on. Each server leases its blocks up to its first
        incomplete one.

        So blocks after the first incomplete one may be leased as well.
        """
        check_names(names)
        parts = self._parts(
            [req_id for req_id, _ in names],
            lambda some: self.calls.prefix(_of(names, some), pages_per_block, lease_ms),
        )
        first = len(names)
        for part, answer in (yield from self._ask(parts)):
            complete = 0 if isinstance(answer, Failed) else answer
            if complete < len(part.items):
                first = min(first, part.items[complete])
        return first

    lengths = lengths

    @timed
    def examine(
        self,
        end: Deadline,
        names: Sequence[BlockName],
        states: Sequence[StateName],
        pages_per_block: int,
        lease_ms: int,
    ) -> Plan[tuple[int, list[bool]]]:
        """Return as `Examines.examine`. Each server leases its blocks up to its first incomplete one, and its states.

        If the room for leases of one server ends, the leases of the others stay until they end.
        """
        every = [*names, *((req_id, page) for req_id, page, _ in states)]

        def call(some: list[int]) -> Call[tuple[int, list[bool]]]:
            cut = bisect_left(some, len(names))
            parts = _of(every, some[:cut]), _of(every, some[cut:])
            return Call("examine", [slice(None)], lambda to, _: to.examine(*parts, pages_per_block, lease_ms), _one)

        blocks, complete = len(names), [False] * len(states)
        for part, answer in (yield from self._ask(self._parts([req_id for req_id, _ in every], call))):
            count, answers = (0, ()) if isinstance(answer, Failed) else answer
            cut = bisect_left(part.items, len(names))
            if count < cut:
                blocks = min(blocks, part.items[count])
            for i, is_complete in zip(part.items[cut:], answers, strict=False):
                complete[i - len(names)] = is_complete
        return blocks, complete

    @timed
    def lease(self, end: Deadline, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Plan[int]:
        parts = self._parts([req_id], lambda _: self.calls.lease(req_id, lease_ms, pages))
        return sum(_all_done((yield from self._ask(parts))))

    @timed
    def keep(self, end: Deadline, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Plan[Kept]:
        """Return the number of keys before the first one that is not kept. Each server keeps those of its keys that are
        before the first one that it cannot keep.
        """
        parts = self._parts(
            [key.split(b":")[1] if key.startswith(b"kv:") else key for key in keys],
            lambda some: self.calls.keep(_of(keys, some), seconds, tenant, tenants),
        )
        first, ends, why = len(keys), list[int](), ""
        for part, answer in (yield from self._ask(parts)):
            kept = Kept(0, 0, GONE) if isinstance(answer, Failed) else answer
            if kept.keys < len(part.items) and part.items[kept.keys] < first:
                first, why = part.items[kept.keys], kept.why
            if kept.keys:
                ends.append(kept.until)
        return Kept(first, min(ends, default=0), why)

    # -- anything else -----------------------------------------------------------------------------------------------

    @timed
    def ask(self, end: Deadline, raw_commands: Sequence[RawCommand], again: bool) -> Plan[list[Any]]:
        """Send each command to the server of its key. Return the decoded replies, with Failed for servers that do not
        answer.

        With `again`, a command is sent a second time after a broken connection. Raises Refused for the first error
        reply, except that of a login: such a server counts as one that does not answer.
        """
        left: dict[ServerUrl, list[int]] = defaultdict(list)
        for i, raw_command in enumerate(raw_commands):
            left[self.rendezvous.server(segment_of(key_of(raw_command)))].append(i)
        answers: list[Any] = [None] * len(raw_commands)
        for _ in range(_TRIES if again else 1):
            asked = [NodeRequest(server, ask(_of(raw_commands, some))) for server, some in left.items()]
            for (server, some), outcome in zip(list(left.items()), (yield Round(asked)), strict=True):
                if isinstance(outcome, Failed) and _refuses(outcome.error):
                    raise outcome.error.again()
                for i, answer in zip(some, repeat(outcome) if isinstance(outcome, Failed) else outcome, strict=False):
                    answers[i] = answer
                if not _is_retryable(outcome):
                    del left[server]
            if not left:
                break
        return answers

    @timed
    def home(self, end: Deadline, key: bytes) -> Plan[ServerUrl]:
        """Return the server that a key belongs to."""
        yield from ()
        return self.rendezvous.server(segment_of(key))

    @timed
    def nodes(self, end: Deadline) -> Plan[list[ServerUrl]]:
        yield from ()
        return self.rendezvous.servers

    def strayed(self, error: PageClientError) -> bool:
        """Return False: a retry after an error is useless, because no other server has the keys of the failed one."""
        return False

    # -- how ---------------------------------------------------------------------------------------------------------

    def _parts(self, req_ids: Sequence[bytes], call: Callable[[list[int]], Call[Any]]) -> list[_Part]:
        """Return each server's part of a batch. `call` makes the call for a list of indexes; its errors for invalid
        arguments are raised.
        """
        items: dict[ServerUrl, list[int]] = defaultdict(list)
        servers: dict[bytes, ServerUrl] = {}
        for i, req_id in enumerate(req_ids):
            segment = segment_of(req_id)
            if segment not in servers:
                servers[segment] = self.rendezvous.server(segment)
            items[servers[segment]].append(i)
        return [_Part(server, some, call(some)) for server, some in items.items()]

    def _ask(self, parts: Sequence[_Part]) -> Plan[list[tuple[_Part, Any]]]:
        """Send each part to its server, twice if the connection breaks. Return each part with its result, or with
        Failed.

        Raises Refused for an error reply, except that of a login, and the first error if all servers fail.
        """
        answers: dict[ServerUrl, Any] = {}
        for _ in range(_TRIES):
            left = [p for p in parts if p.server not in answers or _is_retryable(answers[p.server])]
            strange = [part for part in left if part.server not in self._dialects]
            if strange:
                received = yield Round([NodeRequest(part.server, ask_dialect()) for part in strange])
                for part, dialect in zip(strange, received, strict=True):
                    if isinstance(dialect, Failed):
                        answers[part.server] = dialect
                    else:
                        self._dialects[part.server] = dialect
            known = [part for part in left if part.server in self._dialects]
            if known:
                outcomes = yield Round([NodeRequest(p.server, p.request(self._dialects[p.server])) for p in known])
                answers |= {part.server: outcome for part, outcome in zip(known, outcomes, strict=True)}
        for server, answer in answers.items():
            if isinstance(answer, Failed) and isinstance(answer.error, Refused) and answer.error.code == "ERR":
                self._dialects.pop(server, None)  # it may be an older one since a restart
        failed = [answer.error for answer in answers.values() if isinstance(answer, Failed)]
        for error in failed:
            if _refuses(error) or len(failed) == len(parts):
                raise error.again()
        return [(part, part.read(answers[part.server])) for part in parts]

    def _gathered(self, count: int, nothing: Any, answers: Sequence[tuple[_Part, Any]]) -> list[Any]:
        """Return the results of all `count` items in the caller's order, with `nothing` for items of servers that did
        not answer.

        These items are counted as misses.
        """
        found = [nothing] * count
        for part, answer in answers:
            if isinstance(answer, Failed):
                count_misses(self.misses, [GONE] * len(part.items), list)
                continue
            for i, value in zip(part.items, answer, strict=True):
                found[i] = value
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """One server's part of a call."""

    server: ServerUrl
    items: list[int]  # positions in the batch
    call: Call[Any]

    def request(self, to: BlobCommands) -> Request[Any]:
        """Return the request, in the commands that the server supports."""
        (part,) = self.call.parts
        request = self.call.ask(to, part)
        assert isinstance(request, Request)  # several servers have no maps
        return request

    def read(self, answer: Any) -> Any:
        """Return the method's result for these items."""
        return answer if isinstance(answer, Failed) else self.call.read([answer])


def _of(items: Sequence[T], some: Sequence[int]) -> list[T]:
    return [items[i] for i in some]


def _refuses(error: PageClientError) -> bool:
    """Return whether an error is the reply of a server to which the client is logged in."""
    return isinstance(error, Refused) and not error.of_login


def _is_retryable(answer: Any) -> bool:
    return isinstance(answer, Failed) and isinstance(answer.error, Disconnected)


def _all_done(answers: Sequence[tuple[_Part, Any]]) -> list[Any]:
    """Return the results of all parts. Raises the error of the first server that failed."""
    for _, answer in answers:
        if isinstance(answer, Failed):
            raise answer.error.again()
    return [answer for _, answer in answers]


def _one(results: list[T]) -> T:
    (result,) = results
    return result
