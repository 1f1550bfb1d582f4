"""INFO: sections of `name:value` lines, with the fields that Redis's clients and exporters read and some of our own."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable

from kvpage_server import __version__
from kvpage_server.commands.context import Server
from kvpage_server.commands.misses import REASONS
from kvpage_server.page import unix_ms

REDIS_VERSION = "7.4.0"  # the Redis whose behaviour clients may expect of us

Fields = dict[str, object]


def resident_memory() -> int:
    """Bytes of the process that lie in memory."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # macOS tells the peak only
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def human(size: float) -> str:
    """Bytes as Redis shows them to people: 1.50M."""
    for unit in "BKMGT":
        if size < 1024 or unit == "T":
            return f"{size:.0f}B" if unit == "B" else f"{size:.2f}{unit}"
        size /= 1024
    raise AssertionError


def _server(server: Server) -> Fields:
    uptime = (unix_ms() - server.started_ms) // 1000
    return {
        "redis_version": REDIS_VERSION,
        "kvpage_version": __version__,
        "redis_mode": "standalone",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "arch_bits": 64,
        "python_version": platform.python_version(),
        "process_id": os.getpid(),
        "run_id": server.run_id,
        "tcp_port": server.port,
        "server_time_usec": unix_ms() * 1000,
        "uptime_in_seconds": uptime,
        "uptime_in_days": uptime // 86400,
        "executable": sys.executable,
    }


def _clients(server: Server) -> Fields:
    return {"connected_clients": len(server.clients), "blocked_clients": 0}


def _memory(server: Server) -> Fields:
    keyspace = server.keyspace
    rss = resident_memory()
    return {
        "used_memory": keyspace.used_memory,
        "used_memory_human": human(keyspace.used_memory),
        "used_memory_rss": rss,
        "used_memory_rss_human": human(rss),
        "arena_used": keyspace.arena.used,
        "arena_held": keyspace.arena.held,
        "maxmemory": keyspace.maxmemory,
        "maxmemory_human": human(keyspace.maxmemory),
        "maxmemory_policy": keyspace.policy,
    }


def _stats(server: Server) -> Fields:
    stats, counters = server.stats, server.keyspace.counters
    return {
        "total_connections_received": stats.connections,
        "total_commands_processed": stats.commands,
        "total_net_input_bytes": stats.bytes_in,
        "total_net_output_bytes": stats.bytes_out,
        "rejected_connections": stats.rejected,
        "expired_keys": counters.expired,
        "evicted_keys": counters.evicted,
        "keyspace_hits": counters.hits,
        "keyspace_misses": counters.misses,
        "total_error_replies": stats.errors,
    }


def _replication(server: Server) -> Fields:
    return {"role": "master", "connected_slaves": 0, "master_replid": server.run_id, "master_repl_offset": 0}


def _cpu(server: Server) -> Fields:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"used_cpu_sys": f"{usage.ru_stime:.6f}", "used_cpu_user": f"{usage.ru_utime:.6f}"}


def _cluster(server: Server) -> Fields:
    return {"cluster_enabled": 0}


def _keyspace(server: Server) -> Fields:
    keys = len(server.keyspace)
    return {"db0": f"keys={keys},expires={server.keyspace.volatile},avg_ttl=0"} if keys else {}


def _kvpage(server: Server) -> Fields:
    index, guards, ghosts = server.keyspace.index, server.keyspace.guards, server.keyspace.ghosts
    guards.settle(unix_ms())
    misses = {f"page_misses_{reason.replace(' ', '_')}": server.stats.page_misses.get(reason, 0) for reason in REASONS}
    return {
        "requests": len(index),
        "blocks": index.blocks,
        "leased_or_pinned": len(guards),
        "leased_or_pinned_bytes": guards.bytes,
        "blocks_remembered": len(ghosts),
        **misses,
    }


SECTIONS: dict[str, Callable[[Server], Fields]] = {
    "server": _server,
    "clients": _clients,
    "memory": _memory,
    "stats": _stats,
    "replication": _replication,
    "cpu": _cpu,
    "cluster": _cluster,
    "keyspace": _keyspace,
    "kvpage": _kvpage,
}
_ALL = {"all", "default", "everything"}


def info_text(server: Server, wanted: Iterable[str]) -> str:
    """The sections named, every one when none is; those that do not exist are left out, as Redis does."""
    chosen = set(wanted)
    sections = []
    for name, fields_of in SECTIONS.items():
        if not chosen or chosen & _ALL or name in chosen:
            lines = [f"# {name.capitalize()}", *(f"{field}:{value}" for field, value in fields_of(server).items())]
            sections.append("".join(f"{line}\r\n" for line in lines))
    return "\r\n".join(sections)
