"""The overview of a store: its state in numbers, from INFO.

>>> overview = ask(store, overview_of_store())
>>> overview.memory.used, overview.traffic.hit_ratio, overview.misses["evicted"]

Counts begin at the start of the server, or at CONFIG RESETSTAT. INFO returns few fields to a user without access to
every key. Then `everything` is False, and the other fields are 0 or empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from kvpage_server.observe.asking import Reading, refused, text
from kvpage_server.system.text import name_of_text, name_shown, printable

F = TypeVar("F")

STORES_NOTHING = "a gateway, which stores no values; kvpage with its cluster's URL shows the contents of the cluster"

FIRST_BOUND, LAST_BOUND = 12, 34  # powers of two of nanoseconds: 4 microseconds to 17 seconds
BOUNDS = tuple(float(f"{2**power / 1e9:.6g}") for power in range(FIRST_BOUND, LAST_BOUND + 1))  # seconds


class NotAStore(Exception):
    """Error: the server is no kvpage-server but another Redis. The message has its mode and version."""


_FULL = 0.95  # share of the space for values from which on the disk counts as full


def _of(name: str, default: Any = 0) -> Any:
    """Declare a dataclass field that `_read` fills from the INFO field `name`, converted to the type of `default`."""
    return field(default=default, metadata={"read": lambda received: type(default)(received.get(name) or default)})


def _read(kind: Callable[..., F], received: Mapping[str, str], **others: Any) -> F:
    """Return a record of the dataclass `kind`, from the fields of INFO in `received` and from `others`."""
    return kind(
        **{each.name: each.metadata["read"](received) for each in fields(cast(Any, kind)) if each.metadata}, **others
    )


def hit_ratio(hits: float, misses: float) -> float | None:
    """Return the share of reads that were hits, from 0 to 1; None if there were no reads."""
    return hits / (hits + misses) if hits + misses else None


@dataclass(frozen=True, slots=True)
class CallFigures:
    """The calls of a command or of a family of commands, or the commits or fetches of the disk tier.

    `within[i]` of them took at most BOUNDS[i] seconds. It is empty if INFO has no histogram.
    """

    count: int = 0
    seconds: float = 0.0
    failed: int = 0
    rejected: int = 0  # calls that were rejected before they ran; they are not in `count`
    within: tuple[int, ...] = ()

    def since(self, before: CallFigures) -> CallFigures:
        """Return the figures of the calls after an earlier overview, whose figures are `before`."""
        return CallFigures(
            self.count - before.count,
            self.seconds - before.seconds,
            self.failed - before.failed,
            self.rejected - before.rejected,
            tuple(new - old for new, old in zip(self.within, before.within, strict=False)),
        )

    def percentile(self, share: float) -> float:
        """Return the seconds within which a share of the calls ended, rounded up to one of BOUNDS.

        `share` is from 0 to 1. Return 0 if there were no calls.
        """
        rank = share * self.count
        found = next((bound for bound, calls in zip(BOUNDS, self.within, strict=False) if calls >= rank), BOUNDS[-1])
        return found if self.count else 0.0


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The server process."""

    version: str = _of("kvpage_version", "")
    core: str = _of("page_core", "")  # native or python
    uptime: int = _of("uptime_in_seconds")  # seconds since its start
    port: int = _of("tcp_port")
    pid: int = _of("process_id")
    store: str = _of("page_store", "")  # memory, tiered, or cluster for a gateway


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The memory of the store in bytes. `used` counts against `limit`, 0 for no limit.

    The arena is the sum of `live`, `spare` and `fragmentation`: slots in use, empty chunks for the next values, and
    free slots in chunks that are in use.
    """

    used: int = _of("used_memory")
    peak: int = _of("used_memory_peak")
    limit: int = _of("maxmemory")
    policy: str = _of("maxmemory_policy", "")
    live: int = _of("arena_used")
    spare: int = _of("arena_spare")
    fragmentation: int = 0
    in_flight: int = _of("mem_clients_normal")  # memory of connections: incomplete commands, unread replies
    resident: int = _of("used_memory_rss")  # resident memory of the process
    coded: int = _of("memory_coded_bytes", 0)  # bytes of the lossless codes of values in memory
    coded_raw: int = _of("memory_coded_raw_bytes", 0)  # bytes of the same values without the code


@dataclass(frozen=True, slots=True)
class ContentFigures:
    """The number of values in the store, and the protected ones."""

    requests: int = _of("requests")
    blocks: int = _of("blocks")
    keys: int = 0
    expiring: int = 0  # keys that have a time to live
    protected: int = _of("leased_or_pinned")  # values leased, pinned, or with a lifetime
    protected_bytes: int = _of("leased_or_pinned_bytes")
    kept: int = _of("kept")  # values with a lifetime
    kept_bytes: int = _of("kept_bytes")
    kept_by_tenant: Mapping[str, int] = field(default_factory=dict)  # bytes


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Commands, bytes and reads since the start of the server."""

    commands: int = _of("total_commands_processed")
    errors: int = _of("total_error_replies")
    bytes_in: int = _of("total_net_input_bytes")
    bytes_out: int = _of("total_net_output_bytes")
    hits: int = _of("keyspace_hits")
    misses: int = _of("keyspace_misses")
    expired: int = _of("expired_keys")  # keys
    evicted: int = _of("evicted_keys")  # keys
    commands_per_second: int = _of("instantaneous_ops_per_sec")  # rate in the last second, measured by the server

    @property
    def hit_ratio(self) -> float | None:
        """Share of reads that were hits; None if there were no reads."""
        return hit_ratio(self.hits, self.misses)


@dataclass(frozen=True, slots=True)
class ConnectionFigures:
    """Connections now and since the start of the server."""

    now: int = _of("connected_clients")
    limit: int = _of("maxclients")
    so_far: int = _of("total_connections_received")
    rejected: int = _of("rejected_connections")
    blocked: int = _of("blocked_clients")
    closed: Mapping[str, int] = field(default_factory=dict)  # connections that the server has closed, by reason
    denied: Mapping[str, int] = field(default_factory=dict)  # denials by the ACL, by kind: auth, cmd, key, channel


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """State of the disk tier. Sizes are in bytes."""

    values: int = _of("disk_values")
    bytes: int = _of("disk_bytes")
    file_bytes: int = _of("disk_file_bytes")
    coded_bytes: int = _of("disk_coded_bytes", 0)  # of the lossless codes of values
    coded_raw_bytes: int = _of("disk_coded_raw_bytes", 0)  # of the same values without the code
    limit: int = _of("maxdisk")
    for_values: int = _of("maxdisk_for_values", 0)  # bytes of the limit that values may take; 0 is no limit
    waiting_bytes: int = _of("disk_waiting_bytes")
    unsaved: int = _of("rdb_changes_since_last_save")  # changes that a crash now would lose
    write_errors: int = _of("disk_write_errors")
    failing: str = _of("disk_failing", "")  # the error, if writes fail now
    fetched: int = _of("disk_fetched")
    dropped: int = _of("disk_dropped_from_memory")  # values that were demoted
    evicted: int = _of("disk_evicted")
    corrupt: int = _of("disk_corrupt")
    repaired: int = _of("disk_repaired")
    quarantined: int = _of("disk_quarantined")
    scrubbed_bytes: int = _of("scrubbed_bytes")
    scrub_rounds: int = _of("scrub_rounds")
    commits: CallFigures = CallFigures()
    fetches: CallFigures = CallFigures()

    @property
    def is_full(self) -> bool:
        """Whether values use nearly all of their space on disk."""
        return self.bytes >= _FULL * self.for_values > 0


@dataclass(frozen=True, slots=True)
class QuotaFigures:
    """A quota and its use."""

    pattern: str
    limit: int  # bytes; 0 for no limit
    bytes: int
    evicted: int  # keys


@dataclass(frozen=True, slots=True)
class EvictionFigures:
    """Evicted keys, by policy and exceeded limit."""

    policy: str
    reason: str  # memory, disk, quota or filesystem
    keys: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a store at one time."""

    at: float  # unix seconds, by the server's clock
    everything: bool  # whether the user may read every key
    server: ServerFigures
    memory: MemoryFigures
    contents: ContentFigures
    traffic: TrafficFigures
    connections: ConnectionFigures
    misses: Mapping[str, int]  # missed reads of pages, blocks and strings, by reason: "never stored", "evicted" ...
    evictions: tuple[EvictionFigures, ...]
    families: Mapping[str, CallFigures]  # calls by group of commands ("page", "string" ...), with histograms
    commands: Mapping[str, CallFigures]  # calls by command, without histograms
    errors: Mapping[str, int]  # error replies by code
    quotas: tuple[QuotaFigures, ...]
    disk: DiskFigures | None  # None for a store in memory only
    read: float = field(default_factory=time.monotonic, compare=False)  # time of the reply, in monotonic seconds


def overview_of_store() -> Reading[Overview]:
    """Return the overview from INFO.

    Raises NotAStore if the server is no kvpage-server, ResponseError if the user may not call INFO.
    """
    (answer,) = yield [[b"INFO", b"EVERYTHING"]]
    if refused(answer):
        raise answer
    return parse(text(answer))


def parse(info: str) -> Overview:
    """Parse the reply to INFO EVERYTHING. Raises NotAStore if it is not from kvpage-server."""
    received = dict(line.split(":", 1) for line in info.split("\r\n") if ":" in line)
    if "kvpage_version" not in received:
        raise NotAStore(f"{received.get('redis_mode', 'some')} Redis {received.get('redis_version', '')}".strip())

    def number(name: str) -> int:
        return int(received.get(name) or 0)

    def numbers(prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): int(value) for name, value in received.items() if name.startswith(prefix)}

    def groups(prefix: str) -> dict[str, dict[str, str]]:
        return {
            name.removeprefix(prefix): _fields(value) for name, value in received.items() if name.startswith(prefix)
        }

    keys = _fields(received.get("db0", ""))
    return Overview(
        at=number("server_time_usec") / 1e6,
        everything="used_memory" in received,
        server=_read(ServerFigures, received),
        memory=_read(
            MemoryFigures,
            received,
            fragmentation=number("arena_held") - number("arena_used") - number("arena_spare"),
        ),
        contents=_read(
            ContentFigures,
            received,
            keys=int(keys.get("keys", 0)),
            expiring=int(keys.get("expires", 0)),
            kept_by_tenant={
                _name(tenant): int(_fields(counts)["bytes"])
                for counts, is_tenant, tenant in (
                    value.partition(",tenant=") for name, value in received.items() if name.startswith("kept")
                )
                if is_tenant
            },
        ),
        traffic=_read(TrafficFigures, received),
        connections=_read(
            ConnectionFigures,
            received,
            closed={reason: number(name) for reason, name in _CLOSED.items()},
            denied=numbers("acl_access_denied_"),
        ),
        misses=_misses(numbers("page_misses_"), numbers("string_misses_")),
        evictions=tuple(
            EvictionFigures(*name.rpartition("_")[::2], count) for name, count in numbers("evictions_").items()
        ),
        families={name: _calls(found) for name, found in groups("familystat_").items()},
        commands={name: _calls(found) for name, found in groups("cmdstat_").items()},
        errors={name: int(found["count"]) for name, found in groups("errorstat_").items()},
        quotas=tuple(
            QuotaFigures(
                _pattern(found["pattern"]), int(found["limit"]), int(found["bytes"]), int(found["evicted_keys"])
            )
            for found in groups("quota").values()
        ),
        disk=_read(
            DiskFigures,
            received,
            commits=_calls(_fields(received.get("disk_commit_times", ""))),
            fetches=_calls(_fields(received.get("disk_fetch_times", ""))),
        )
        if "disk_values" in received
        else None,
    )


def _misses(*counts: Mapping[str, int]) -> dict[str, int]:
    """Add misses of pages and of strings. Return the sums by reason, with spaces for underscores."""
    reasons = dict.fromkeys(reason for some in counts for reason in some)
    return {reason.replace("_", " "): sum(some.get(reason, 0) for some in counts) for reason in reasons}


_CLOSED = {
    "idle": "idle_disconnections",
    "unread": "client_output_buffer_limit_disconnections",
    "too long a command": "client_query_buffer_limit_disconnections",
    "memory": "evicted_clients",
}


def _fields(value: str) -> dict[str, str]:
    """Parse `a=1,b=2` into a dict."""
    return dict(item.split("=", 1) for item in value.split(",") if "=" in item)


def _pattern(value: str) -> str:
    """Return a pattern in a field as the configuration has it, with escapes for unprintable characters only."""
    return printable(name_of_text(value).decode("utf-8", "surrogateescape"))


def _name(value: str) -> str:
    """Return a name in a field as `name_shown` does. An older server did not escape names."""
    try:
        return name_shown(name_of_text(value))
    except ValueError:
        return value


def _calls(found: Mapping[str, str]) -> CallFigures:
    return CallFigures(
        count=int(found.get("calls", 0)),
        seconds=int(found.get("usec", 0)) / 1e6,
        failed=int(found.get("failed_calls", 0)),
        rejected=int(found.get("rejected_calls", 0)),
        within=tuple(map(int, found["within"].split("/"))) if found.get("within") else (),
    )
