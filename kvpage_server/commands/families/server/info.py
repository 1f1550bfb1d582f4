"""INFO's sections of `name:value` lines. They have the fields that Redis's clients and exporters read, and others.

Each function named after a section returns its fields; see `SECTIONS`.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice

from kvpage_server import __version__, core
from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.families.pages.request import OF_STRINGS, REASONS
from kvpage_server.commands.measure import CallCounts
from kvpage_server.commands.specs import TABLE
from kvpage_server.page import unix_ms
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.system.text import monotonic_ms, printable, text_of_field, within

REDIS_VERSION = "7.4.0"  # the Redis version whose behaviour clients may expect

_MOST_TENANTS = 100  # tenants whose lifetimes INFO lists

Fields = dict[str, object]


def resident_memory() -> int:
    """Return the resident memory of the process in bytes."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # macOS reports only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def human(size: float) -> str:
    """Return a number of bytes as text in Redis's format, for example 1.50M."""
    for unit in "BKMGT":
        if size < 1024 or unit == "T":
            return f"{size:.0f}B" if unit == "B" else f"{size:.2f}{unit}"
        size /= 1024
    raise AssertionError


def _server(server: Server) -> Fields:
    """Return the fields of the section server."""
    uptime = int(time.monotonic() - server.started)
    return {
        "redis_version": REDIS_VERSION,
        "redis_git_sha1": "00000000",
        "redis_git_dirty": 0,
        "redis_build_id": 0,
        "redis_mode": "standalone",
        "kvpage_version": __version__,
        "page_core": core.NAME,
        "page_store": server.config.store,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "arch_bits": 64,
        "monotonic_clock": "POSIX clock_gettime",
        "multiplexing_api": "epoll" if sys.platform == "linux" else "kqueue",
        "python_version": platform.python_version(),
        "process_id": os.getpid(),
        "process_supervised": "no",
        "run_id": server.run_id,
        "tcp_port": server.port,
        "server_time_usec": unix_ms() * 1000,
        "uptime_in_seconds": uptime,
        "uptime_in_days": uptime // 86400,
        "executable": sys.executable,
        "config_file": server.config.file or "",
        "io_threads_active": 0,
    }


def _clients(server: Server) -> Fields:
    """Return the fields of the section clients. Sums over connections are those of the last count."""
    totals = server.totals
    return {
        "connected_clients": totals.connections + len(server.handshakes),
        "cluster_connections": 0,
        "maxclients": server.config.maxclients,
        "client_recent_max_input_buffer": totals.most_incoming,
        "client_recent_max_output_buffer": totals.most_outgoing,
        "blocked_clients": totals.paused,
        "tracking_clients": len(server.events.tracking.clients),
        "pubsub_clients": totals.listening,
        "watching_clients": totals.watching,
        "clients_in_timeout_table": 0,
        "total_watched_keys": totals.watched,
    }


def _memory(server: Server) -> Fields:
    """Return the fields of the section memory, and update the peak."""
    keyspace = server.keyspace
    rss, used = resident_memory(), keyspace.memory.used
    server.peak_memory = max(server.peak_memory, used)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "used_memory": used,
        "used_memory_human": human(used),
        "used_memory_rss": rss,
        "used_memory_rss_human": human(rss),
        "used_memory_peak": server.peak_memory,
        "used_memory_peak_human": human(server.peak_memory),
        "used_memory_overhead": server.in_flight,
        "used_memory_startup": 0,
        "used_memory_dataset": max(used - server.in_flight, 0),
        "used_memory_index": keyspace.memory.index.used,
        "total_system_memory": total,
        "total_system_memory_human": human(total),
        **_maxmemory(server),
        "mem_fragmentation_ratio": f"{rss / used if used else 0:.2f}",
        "mem_fragmentation_bytes": rss - used,
        "mem_clients_normal": server.in_flight,
        "mem_allocator": "arena",
        "arena_used": keyspace.arena.used,
        "arena_held": keyspace.arena.held,
        "arena_spare": keyspace.arena.spare,
    }


def _maxmemory(server: Server) -> Fields:
    """Return the limits of memory and of commands, which users without access to every key see, too."""
    keyspace = server.keyspace
    return {
        "maxmemory": keyspace.memory.limit,
        "maxmemory_human": human(keyspace.memory.limit),
        "maxmemory_policy": keyspace.eviction_order.policy,
        "largest_command_bytes": server.config.largest_command,
    }


def _persistence(server: Server) -> Fields:
    """Return the fields of the section persistence."""
    tiered = server.tiered
    fields: Fields = {"loading": 0, "async_loading": 0, "aof_enabled": 0}
    if tiered is None:
        return fields
    behind = tiered.behind
    return fields | {
        "rdb_changes_since_last_save": tiered.unsaved,
        "rdb_bgsave_in_progress": int(behind.busy),
        "rdb_last_save_time": behind.last_commit // 1000,
        "rdb_last_bgsave_status": "err" if behind.failing else "ok",
        "rdb_saves": behind.commits,
        "aof_last_write_status": "err" if behind.failing else "ok",
    }


def _disk(tiered: DiskTier) -> Fields:
    """Return the fields about the disk tier, a part of the section kvpage."""
    behind, counts, coded, coded_in_memory = tiered.behind, tiered.stored.counts, tiered.disk.coded, tiered.coder.counts
    return {
        "disk_values": tiered.values_on_disk,
        "disk_bytes": tiered.stored.usage.used,
        "disk_file_bytes": tiered.disk.size,
        "disk_coded_bytes": coded.stored,
        "disk_coded_raw_bytes": coded.raw,
        "disk_coded_ratio": f"{coded.raw / coded.stored if coded.stored else 1:.2f}",
        "disk_format": tiered.disk.format,
        "memory_coded_values": coded_in_memory.values,
        "memory_coded_bytes": coded_in_memory.stored,
        "memory_coded_raw_bytes": coded_in_memory.raw,
        "memory_coded_ratio": f"{coded_in_memory.raw / coded_in_memory.stored if coded_in_memory.stored else 1:.2f}",
        "memory_decoded_values": counts.decoded,
        "maxdisk": tiered.stored.maxdisk,
        "maxdisk_for_values": tiered.account.limit,
        "disk_waiting_bytes": behind.size,
        "disk_commits": behind.commits,
        "disk_write_errors": behind.errors,
        "disk_failing": behind.failing,
        "disk_fetched": counts.fetched,
        "disk_dropped_from_memory": counts.dropped,
        "disk_evicted": counts.evicted,
        "disk_corrupt": counts.corrupt,
        "disk_repaired": counts.repaired,
        "disk_quarantined": tiered.disk.quarantined,
        "scrubbed_bytes": tiered.scrubber.checked,
        "scrub_rounds": tiered.scrubber.rounds,
        "disk_commit_times": behind.times.as_text(),
        "disk_fetch_times": tiered.fetching.times.as_text(),
    }


def _stats(server: Server) -> Fields:
    """Return the fields of the section stats."""
    stats, counters, refused = server.stats, server.keyspace.counters, server.refusals.total
    tracking = server.events.tracking
    ops, bytes_in, bytes_out = server.rates
    return {
        "total_connections_received": stats.connections,
        "total_commands_processed": stats.commands,
        "instantaneous_ops_per_sec": ops,
        "total_net_input_bytes": stats.bytes_in,
        "total_net_output_bytes": stats.bytes_out + server.totals.sent,
        "instantaneous_input_kbps": f"{bytes_in / 1024:.2f}",
        "instantaneous_output_kbps": f"{bytes_out / 1024:.2f}",
        "rejected_connections": stats.rejected,
        "sync_full": 0,
        "sync_partial_ok": 0,
        "sync_partial_err": 0,
        "expired_keys": counters.expired,
        "evicted_keys": counters.evicted,
        "evicted_clients": stats.evicted_clients,
        "keyspace_hits": counters.hits,
        "keyspace_misses": counters.misses,
        "pubsub_channels": len(server.channels.by_name),
        "pubsub_patterns": len(server.channels.by_pattern),
        "tracking_total_keys": tracking.keys,
        "tracking_total_items": tracking.items,
        "tracking_total_prefixes": tracking.prefixes,
        "tracking_total_bytes": tracking.nbytes,
        "latest_fork_usec": 0,
        "total_forks": 0,
        "total_error_replies": stats.errors,
        "client_query_buffer_limit_disconnections": stats.overflown_inputs,
        "client_output_buffer_limit_disconnections": stats.overflown_outputs,
        "idle_disconnections": stats.idle_closed,
        **{f"acl_access_denied_{kind}": count for kind, count in refused.items()},
    }


def _replication(server: Server) -> Fields:
    """Return the fields of the section replication: those of a master without replicas."""
    return {
        "role": "master",
        "connected_slaves": 0,
        "master_failover_state": "no-failover",
        "master_replid": server.run_id,
        "master_repl_offset": 0,
        "repl_backlog_active": 0,
        "repl_backlog_size": 0,
    }


def _cpu(server: Server) -> Fields:
    """Return the fields of the section cpu, in seconds."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "used_cpu_sys": f"{own.ru_stime:.6f}",
        "used_cpu_user": f"{own.ru_utime:.6f}",
        "used_cpu_sys_children": f"{children.ru_stime:.6f}",
        "used_cpu_user_children": f"{children.ru_utime:.6f}",
    }


def _modules(server: Server) -> Fields:
    """Return no fields: there are no modules."""
    return {}


def _commandstats(server: Server) -> Fields:
    """Return a field for each command with calls."""
    return {
        f"cmdstat_{name}": f"calls={calls.count},usec={calls.nanoseconds // 1000},"
        f"usec_per_call={calls.nanoseconds / 1000 / max(calls.count, 1):.2f},"
        f"rejected_calls={calls.rejected},failed_calls={calls.failed}"
        for name, calls in server.stats.calls.items()
    }


def _familystats(server: Server) -> Fields:
    """Return a field for each group of commands with calls. Its part `within` has a histogram of times, see
    `system.text.within`.
    """
    families: defaultdict[str, list[CallCounts]] = defaultdict(list)
    for name, calls in server.stats.calls.items():
        families[TABLE[name].group].append(calls)
    return {
        f"familystat_{group}": f"calls={sum(calls.count for calls in some)},"
        f"usec={sum(calls.nanoseconds for calls in some) // 1000},"
        f"failed_calls={sum(calls.failed for calls in some)},rejected_calls={sum(calls.rejected for calls in some)},"
        f"within={within([*map(sum, zip(*(calls.histogram for calls in some), strict=True))])}"
        for group, some in families.items()
    }


def _errorstats(server: Server) -> Fields:
    """Return a field for each code of error replies."""
    return {f"errorstat_{code}": f"count={count}" for code, count in server.stats.error_codes.items()}


def _latencystats(server: Server) -> Fields:
    """Return a field with percentiles of the time, in microseconds, for each command with calls."""
    return {
        f"latency_percentiles_usec_{name}": ",".join(
            f"p{100 * share:g}={calls.percentile(share):.3f}" for share in (0.5, 0.99, 0.999)
        )
        for name, calls in server.stats.calls.items()
        if calls.count
    }


def _cluster(server: Server) -> Fields:
    """Return the field of the section cluster."""
    return {"cluster_enabled": 0}


def _keyspace(server: Server) -> Fields:
    """Return the field of the section keyspace; none if there are no keys."""
    keys = len(server.keyspace)
    return {"db0": f"keys={keys},expires={server.keyspace.contents.expiry_order.keys},avg_ttl=0"} if keys else {}


def _kvpage(server: Server) -> Fields:
    """Return the fields of the section kvpage: index, leases, misses by reason, evictions, disk tier."""
    index, guards, ghosts = server.keyspace.index, server.keyspace.leases, server.keyspace.ghosts
    guards.settle(monotonic_ms())
    counters = server.keyspace.counters
    misses = {f"page_misses_{_field(reason)}": counters.page_misses[reason] for reason in REASONS}
    misses |= {f"string_misses_{_field(reason)}": counters.string_misses[reason] for reason in OF_STRINGS}
    events_dropped, events_bytes = (0, 0) if server.kv_events is None else server.kv_events()
    return {
        "requests": len(index),
        "blocks": index.blocks,
        "leased_or_pinned": len(guards),
        "leased_or_pinned_bytes": guards.bytes,
        "kept": guards.kept.units,
        "kept_bytes": guards.kept.nbytes,
        **{
            f"kept{number}": f"values={kept.units},bytes={kept.nbytes},tenant={text_of_field(tenant)}"
            for number, (tenant, kept) in enumerate(sorted(islice(guards.tenants.items(), _MOST_TENANTS)))
        },
        "blocks_remembered": len(ghosts),
        "blocks_remembered_bytes": ghosts.nbytes,
        "strings_remembered": len(server.keyspace.lost),
        "strings_remembered_bytes": server.keyspace.lost.bytes,
        **misses,
        **{f"evictions_{policy}_{room}": keys for (policy, room), keys in counters.evictions.items()},
        "kv_events_dropped": events_dropped,
        "kv_events_bytes": events_bytes,
        **(_disk(server.tiered) if server.tiered is not None else {}),
    }


def _field(reason: str) -> str:
    """Return the name of a reason in field names."""
    return reason.replace(" ", "_")


def _quotas(server: Server) -> Fields:
    """Return INFO's fields `quota0`, `quota1` ...: the limit, use, evictions and pattern of each quota, in bytes and
    keys.
    """
    return {
        f"quota{number}": f"limit={quota.limit},bytes={quota.bytes},evicted_keys={quota.evicted},"
        f"index_bytes={quota.index},pattern={text_of_field(quota.pattern)}"
        for number, quota in enumerate(server.keyspace.eviction_order.quotas.all)
    }


SECTIONS: dict[str, Callable[[Server], Fields]] = {
    "server": _server,
    "clients": _clients,
    "memory": _memory,
    "persistence": _persistence,
    "stats": _stats,
    "replication": _replication,
    "cpu": _cpu,
    "modules": _modules,
    "commandstats": _commandstats,
    "familystats": _familystats,
    "errorstats": _errorstats,
    "latencystats": _latencystats,
    "cluster": _cluster,
    "keyspace": _keyspace,
    "kvpage": _kvpage,
    "quotas": _quotas,
}
_DEFAULT = SECTIONS.keys() - {"commandstats", "familystats", "latencystats"}

# Sections for users without access to every key. No value depends on keys of other users.
_TENANT = {"server": _server, "memory": _maxmemory, "replication": _replication, "cluster": _cluster}


def info_text(client: Client, names: set[str]) -> str:
    """Return the text of the sections named in `names`, in lower case; of the default ones if it is empty. Unknown
    sections are ignored, as in Redis.

    A client that may not read every key gets only the sections in `_TENANT`. Sums over all connections are those of the
    last count, see `Server.totals`.
    """
    chosen = set(names)
    if not names or "default" in names:
        chosen |= _DEFAULT
    if names & {"all", "everything"}:
        chosen |= SECTIONS.keys()
    sections = []
    for name, fields_of in (SECTIONS if client.sees_all else _TENANT).items():
        if name in chosen:
            fields = fields_of(client.server)
            title = "CPU" if name == "cpu" else name.capitalize()
            lines = [f"# {title}", *(printable(f"{field}:{value}") for field, value in fields.items())]
            sections.append("".join(f"{line}\r\n" for line in lines))
    return "\r\n".join(sections)
