"""The store's figures for Prometheus. docs/monitoring/ explains them, and has alerts and a dashboard.

Labels come from the server and have few values each. Those that an operator chooses are limited in number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvpage_server.observe.engines import EnginesSeen
from kvpage_server.observe.overview import BOUNDS, CallFigures, DiskFigures, Overview

MOST_LABELS = 100  # of quotas, and of codes of errors; the others are counted together
OTHERS = "(others)"


def exposition(overview: Overview, closed: Mapping[str, int], engines: EnginesSeen) -> bytes:
    """All of it; `closed` are connections of HTTP that were, by reason."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(overview, closed, engines))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, overview: Overview, closed: Mapping[str, int], engines: EnginesSeen) -> None:
        self._overview = overview
        self._closed = closed
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        overview = self._overview
        yield _info(overview)
        yield _gauge("uptime_seconds", "Since the server was started", overview.server.uptime)
        yield _counter("http_connections_closed", "HTTP connections closed on their clients", "reason", self._closed)
        yield _gauge("engines", "Engines that tell what they do", len(self._engines.connected))
        help = "Tokens of the engines' prompts, by the tier that had them; none: they were computed"
        yield _counter("prompt_tokens", help, "tier", self._engines.tokens)
        if not overview.everything:
            return
        yield from _memory(overview)
        yield from _contents(overview)
        yield from _traffic(overview)
        yield from _commands(overview)
        yield from _quotas(overview)
        if overview.disk is not None:
            yield from _disk(overview.disk)


def _info(overview: Overview) -> Metric:
    server = overview.server
    info = InfoMetricFamily("kvpage_server", "Which server this is")
    info.add_metric([], {"version": server.version, "core": server.core, "policy": overview.memory.policy})
    return info


def _memory(overview: Overview) -> Iterator[Metric]:
    memory = overview.memory
    yield _gauge("memory_used_bytes", "What counts against the limit", memory.used)
    yield _gauge("memory_limit_bytes", "maxmemory; 0 is none", memory.limit)
    yield _gauge("resident_memory_bytes", "What the process has of the machine's memory", memory.resident)
    yield _gauges(
        "memory_bytes",
        "Memory by what it is for: live is in use, spare is kept for the next values, fragmentation is free between "
        "values, in_flight is held by connections",
        "class",
        {
            "live": memory.live,
            "spare": memory.spare,
            "fragmentation": memory.fragmentation,
            "in_flight": memory.in_flight,
        },
    )


def _contents(overview: Overview) -> Iterator[Metric]:
    contents = overview.contents
    yield _gauge("requests", "Requests that have pages", contents.requests)
    yield _gauge("blocks", "Blocks of pages", contents.blocks)
    yield _gauge("keys", "Keys: pages and strings", contents.keys)
    yield _gauge("expiring_keys", "Keys with a time to live", contents.expiring)
    yield _gauge("protected_blocks", "Blocks leased or pinned", contents.protected)
    yield _gauge("protected_bytes", "Their bytes", contents.protected_bytes)


def _traffic(overview: Overview) -> Iterator[Metric]:
    traffic, connections = overview.traffic, overview.connections
    yield _counter("received_bytes", "Bytes from clients", "", {"": traffic.bytes_in})
    yield _counter("sent_bytes", "Bytes to clients", "", {"": traffic.bytes_out})
    yield _counter("reads", "Reads of keys", "result", {"hit": traffic.hits, "miss": traffic.misses})
    yield _counter(
        "misses", "Reads of pages, blocks and strings that found nothing, by reason", "reason", overview.misses
    )
    yield _counter("expired_keys", "Keys whose time had come", "", {"": traffic.expired})
    evicted = CounterMetricFamily(
        "kvpage_evicted_keys",
        "Keys that went for want of room, by policy and by what there was none of",
        labels=["policy", "reason"],
    )
    for eviction in overview.evictions:
        evicted.add_metric([eviction.policy, eviction.reason], eviction.keys)
    yield evicted
    yield _gauge("connected_clients", "Connections", connections.now)
    yield _gauge("max_clients", "How many there may be", connections.limit)
    yield _gauge("blocked_clients", "Connections that wait for the end of CLIENT PAUSE", connections.blocked)
    yield _counter("connections", "Connections taken", "", {"": connections.so_far})
    yield _counter("rejected_connections", "Connections turned away", "", {"": connections.rejected})
    yield _counter("closed_connections", "Connections ended by the server, by reason", "reason", connections.closed)
    yield _counter("denied", "What the ACL refused, by kind", "kind", connections.denied)
    yield _counter("errors", "Error replies, by code", "code", _few(overview.errors))


def _commands(overview: Overview) -> Iterator[Metric]:
    families = overview.families
    yield _histogram("command_duration_seconds", "Time that commands took, by family", "family", families)
    failed = {name: calls.failed for name, calls in families.items()}
    rejected = {name: calls.rejected for name, calls in families.items()}
    yield _counter("commands_failed", "Commands answered with an error", "family", failed)
    yield _counter("commands_rejected", "Commands refused before they ran", "family", rejected)


def _quotas(overview: Overview) -> Iterator[Metric]:
    for name, help, of in (
        ("bytes", "Bytes that the keys of a quota hold", {quota.pattern: quota.bytes for quota in overview.quotas}),
        ("limit_bytes", "Bytes that they may hold; 0 is no limit", {q.pattern: q.limit for q in overview.quotas}),
    ):
        yield _gauges(f"quota_{name}", help, "quota", _few(of))
    evicted = {quota.pattern: quota.evicted for quota in overview.quotas}
    yield _counter("quota_evicted_keys", "Keys that went to keep a quota", "quota", _few(evicted))


def _disk(disk: DiskFigures) -> Iterator[Metric]:
    yield _gauge("disk_values", "Values on disk", disk.values)
    yield _gauge("disk_used_bytes", "Their bytes", disk.bytes)
    yield _gauge("disk_file_bytes", "Bytes of the database's file", disk.file_bytes)
    yield _gauge("disk_limit_bytes", "maxdisk; 0 is none", disk.limit)
    yield _gauge("disk_full", "1 while values take nearly all that maxdisk has for them", disk.is_full)
    yield _gauge("disk_queue_bytes", "Bytes that wait to be written", disk.waiting_bytes)
    yield _gauge("disk_unsaved_changes", "Changes that a crash would cost", disk.unsaved)
    yield _gauge("disk_failing", "1 while writes fail", bool(disk.failing))
    yield _histogram("disk_commit_seconds", "Time that commits took", "", {"": disk.commits})
    yield _histogram(
        "disk_fetch_seconds", "Time from asking the disk for values to having them", "", {"": disk.fetches}
    )
    for name, help, count in (
        ("write_errors", "Writes that failed", disk.write_errors),
        ("fetched_values", "Values read from disk", disk.fetched),
        ("dropped_values", "Values that left memory and stay on disk", disk.dropped),
        ("evicted_values", "Values evicted from disk", disk.evicted),
        ("corrupt_values", "Values found damaged", disk.corrupt),
        ("repaired_values", "Damaged values that memory still had", disk.repaired),
        ("quarantined_records", "Records that made no sense", disk.quarantined),
        ("scrubbed_bytes", "Bytes looked through for damage", disk.scrubbed_bytes),
        ("scrub_rounds", "Times that all of it was looked through", disk.scrub_rounds),
    ):
        yield _counter(f"disk_{name}", help, "", {"": count})


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvpage_{name}", help, value)


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvpage_{name}", help, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Without a label, `label` and the only key of `values` are ""."""
    family = CounterMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, value in values.items():
        family.add_metric(_labels(each), value)
    return family


def _histogram(name: str, help: str, label: str, values: Mapping[str, CallFigures]) -> Metric:
    family = HistogramMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, calls in values.items():
        if calls.within:
            family.add_metric(_labels(each), [*_buckets(calls)], calls.seconds)
    return family


def _buckets(calls: CallFigures) -> Iterable[tuple[str, float]]:
    yield from ((str(bound), count) for bound, count in zip(BOUNDS, calls.within, strict=True))
    yield "+Inf", calls.count


def _labels(label: str) -> list[str]:
    return [label] if label else []


def _few(counts: Mapping[str, int]) -> Mapping[str, int]:
    """The largest values, and the sum of the others."""
    if len(counts) <= MOST_LABELS:
        return counts
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return dict(ordered[:MOST_LABELS]) | {OTHERS: sum(count for _, count in ordered[MOST_LABELS:])}
