"""The store's state in numbers, from INFO.

>>> overview = ask(store, overview_of_store())
>>> overview.memory.used, overview.traffic.hit_ratio, overview.misses["evicted"]

Counts begin at the start of the server, or at CONFIG RESETSTAT. INFO tells little to a user who may not read every key.
`everything` is false then, and what INFO leaves out is 0 or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from kvpage_server.observe.asking import Reading, refused, text

FIRST_BOUND, LAST_BOUND = 12, 34  # powers of two of nanoseconds: 4 microseconds to 17 seconds
BOUNDS = tuple(float(f"{2**power / 1e9:.6g}") for power in range(FIRST_BOUND, LAST_BOUND + 1))  # seconds


class NotAStore(Exception):
    """The server is another Redis; the message says which."""


def hit_ratio(hits: float, misses: float) -> float | None:
    """The share of reads that found something; None if there were no reads."""
    return hits / (hits + misses) if hits + misses else None


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Calls of a command or of a family of commands, or commits and fetches of the disk.

    `within[i]` of them took at most BOUNDS[i] seconds. It is empty if INFO does not say.
    """

    count: int = 0
    seconds: float = 0.0
    failed: int = 0
    rejected: int = 0  # before they ran: not counted in `count`
    within: tuple[int, ...] = ()

    def since(self, before: CallFigures) -> CallFigures:
        """The calls since an earlier overview."""
        return CallFigures(
            self.count - before.count,
            self.seconds - before.seconds,
            self.failed - before.failed,
            self.rejected - before.rejected,
            tuple(new - old for new, old in zip(self.within, before.within, strict=False)),
        )

    def percentile(self, share: float) -> float:
        """The seconds within which a share (0 to 1) of the calls ended, rounded up to a bound. 0 without calls."""
        wanted = share * self.count
        found = next((bound for bound, calls in zip(BOUNDS, self.within, strict=False) if calls >= wanted), BOUNDS[-1])
        return found if self.count else 0.0


@dataclass(frozen=True, slots=True)
class ServerFigures:
    version: str = ""
    core: str = ""  # native or python
    uptime: int = 0  # seconds
    port: int = 0
    pid: int = 0
    store: str = ""  # memory, tiered, or cluster for a gateway


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes. `used` counts against `limit` (0: none). `live`, `spare` and `fragmentation` together are the arena: slots
    in use, chunks kept for the next values, and free slots between those in use."""

    used: int = 0
    peak: int = 0
    limit: int = 0
    policy: str = ""
    live: int = 0
    spare: int = 0
    fragmentation: int = 0
    in_flight: int = 0  # held by connections: incomplete commands, unread replies
    resident: int = 0  # of the process


@dataclass(frozen=True, slots=True)
class ContentFigures:
    requests: int = 0
    blocks: int = 0
    keys: int = 0
    expiring: int = 0  # keys that have a time to live
    protected: int = 0  # blocks leased or pinned
    protected_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Commands, bytes and reads so far."""

    commands: int = 0
    errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    hits: int = 0
    misses: int = 0
    expired: int = 0  # keys
    evicted: int = 0  # keys
    commands_per_second: int = 0  # of the last second, as the server measures it

    @property
    def hit_ratio(self) -> float | None:
        """The share of reads that found something; None if there were no reads."""
        return hit_ratio(self.hits, self.misses)


@dataclass(frozen=True, slots=True)
class ConnectionFigures:
    now: int = 0
    limit: int = 0
    so_far: int = 0
    rejected: int = 0
    blocked: int = 0
    closed: Mapping[str, int] = field(default_factory=dict)  # by the server, by reason
    denied: Mapping[str, int] = field(default_factory=dict)  # by the ACL, by kind: auth, cmd, key, channel


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """The tier below memory."""

    values: int = 0
    bytes: int = 0
    file_bytes: int = 0
    limit: int = 0
    waiting_bytes: int = 0
    unsaved: int = 0  # changes that a crash would cost
    write_errors: int = 0
    failing: str = ""  # why writes fail now
    fetched: int = 0
    dropped: int = 0  # values that left memory and stay on disk
    evicted: int = 0
    corrupt: int = 0
    repaired: int = 0
    quarantined: int = 0
    scrubbed_bytes: int = 0
    scrub_rounds: int = 0
    commits: CallFigures = CallFigures()
    fetches: CallFigures = CallFigures()


@dataclass(frozen=True, slots=True)
class QuotaFigures:
    """A quota and how much of it is used."""

    pattern: str
    limit: int  # 0: none
    bytes: int
    evicted: int  # keys


@dataclass(frozen=True, slots=True)
class EvictionFigures:
    """Evicted keys, by policy and by what was full."""

    policy: str
    reason: str  # memory, disk or quota
    keys: int


@dataclass(frozen=True, slots=True)
class Overview:
    at: float  # unix seconds, by the server's clock
    everything: bool  # whether the user may read every key
    server: ServerFigures
    memory: MemoryFigures
    contents: ContentFigures
    traffic: TrafficFigures
    connections: ConnectionFigures
    misses: Mapping[str, int]  # missed reads of pages and blocks, by reason: "never stored", "evicted" ...
    evictions: tuple[EvictionFigures, ...]
    families: Mapping[str, CallFigures]  # by group of commands: "page", "string" ...; with histograms
    commands: Mapping[str, CallFigures]  # by command, without histograms
    errors: Mapping[str, int]  # error replies by code
    quotas: tuple[QuotaFigures, ...]
    disk: DiskFigures | None  # None for a store in memory alone


def overview_of_store() -> Reading[Overview]:
    """Asks for INFO. Raises NotAStore."""
    (answer,) = yield [[b"INFO", b"EVERYTHING"]]
    if refused(answer):
        raise answer
    return parse(text(answer))


def parse(info: str) -> Overview:
    """The reply to INFO EVERYTHING. Raises NotAStore."""
    told = dict(line.split(":", 1) for line in info.split("\r\n") if ":" in line)
    if "kvpage_version" not in told:
        raise NotAStore(f"{told.get('redis_mode', 'some')} Redis {told.get('redis_version', '')}".strip())
    number = partial(_number, told)

    def numbers(prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): int(value) for name, value in told.items() if name.startswith(prefix)}

    def fields(prefix: str) -> dict[str, dict[str, str]]:
        return {name.removeprefix(prefix): _fields(value) for name, value in told.items() if name.startswith(prefix)}

    keys = _fields(told.get("db0", ""))
    return Overview(
        at=number("server_time_usec") / 1e6,
        everything="used_memory" in told,
        server=ServerFigures(
            told["kvpage_version"],
            told.get("page_core", ""),
            number("uptime_in_seconds"),
            number("tcp_port"),
            number("process_id"),
            told.get("page_store", ""),
        ),
        memory=MemoryFigures(
            used=number("used_memory"),
            peak=number("used_memory_peak"),
            limit=number("maxmemory"),
            policy=told.get("maxmemory_policy", ""),
            live=number("arena_used"),
            spare=number("arena_spare"),
            fragmentation=number("arena_held") - number("arena_used") - number("arena_spare"),
            in_flight=number("mem_clients_normal"),
            resident=number("used_memory_rss"),
        ),
        contents=ContentFigures(
            number("requests"),
            number("blocks"),
            int(keys.get("keys", 0)),
            int(keys.get("expires", 0)),
            number("leased_or_pinned"),
            number("leased_or_pinned_bytes"),
        ),
        traffic=TrafficFigures(
            commands=number("total_commands_processed"),
            errors=number("total_error_replies"),
            bytes_in=number("total_net_input_bytes"),
            bytes_out=number("total_net_output_bytes"),
            hits=number("keyspace_hits"),
            misses=number("keyspace_misses"),
            expired=number("expired_keys"),
            evicted=number("evicted_keys"),
            commands_per_second=number("instantaneous_ops_per_sec"),
        ),
        connections=ConnectionFigures(
            number("connected_clients"),
            number("maxclients"),
            number("total_connections_received"),
            number("rejected_connections"),
            number("blocked_clients"),
            closed={reason: number(name) for reason, name in _CLOSED.items()},
            denied=numbers("acl_access_denied_"),
        ),
        misses={reason.replace("_", " "): count for reason, count in numbers("page_misses_").items()},
        evictions=tuple(
            EvictionFigures(*name.rpartition("_")[::2], count) for name, count in numbers("evictions_").items()
        ),
        families={name: _calls(found) for name, found in fields("familystat_").items()},
        commands={name: _calls(found) for name, found in fields("cmdstat_").items()},
        errors={name: int(found["count"]) for name, found in fields("errorstat_").items()},
        quotas=tuple(
            QuotaFigures(found["pattern"], int(found["limit"]), int(found["bytes"]), int(found["evicted_keys"]))
            for found in fields("quota").values()
        ),
        disk=_disk(told) if "disk_values" in told else None,
    )


_CLOSED = {
    "idle": "idle_disconnections",
    "unread": "client_output_buffer_limit_disconnections",
    "too long a command": "client_query_buffer_limit_disconnections",
    "memory": "evicted_clients",
}


def _fields(value: str) -> dict[str, str]:
    """Parses `a=1,b=2`. A pattern comes last, since it may have commas."""
    before, pattern, rest = value.partition("pattern=")
    found = dict(item.split("=", 1) for item in before.split(",") if "=" in item)
    return found | ({"pattern": rest} if pattern else {})


def _calls(found: Mapping[str, str]) -> CallFigures:
    return CallFigures(
        count=int(found.get("calls", 0)),
        seconds=int(found.get("usec", 0)) / 1e6,
        failed=int(found.get("failed_calls", 0)),
        rejected=int(found.get("rejected_calls", 0)),
        within=tuple(map(int, found["within"].split("/"))) if found.get("within") else (),
    )


def _number(told: Mapping[str, str], name: str) -> int:
    return int(told.get(name) or 0)


def _disk(told: Mapping[str, str]) -> DiskFigures:
    number = partial(_number, told)
    return DiskFigures(
        values=number("disk_values"),
        bytes=number("disk_bytes"),
        file_bytes=number("disk_file_bytes"),
        limit=number("maxdisk"),
        waiting_bytes=number("disk_waiting_bytes"),
        unsaved=number("rdb_changes_since_last_save"),
        write_errors=number("disk_write_errors"),
        failing=told.get("disk_failing", ""),
        fetched=number("disk_fetched"),
        dropped=number("disk_dropped_from_memory"),
        evicted=number("disk_evicted"),
        corrupt=number("disk_corrupt"),
        repaired=number("disk_repaired"),
        quarantined=number("disk_quarantined"),
        scrubbed_bytes=number("scrubbed_bytes"),
        scrub_rounds=number("scrub_rounds"),
        commits=_calls(_fields(told.get("disk_commit_times", ""))),
        fetches=_calls(_fields(told.get("disk_fetch_times", ""))),
    )
