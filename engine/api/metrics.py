"""Metrics of the server, for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..agent_engine import Answer
from ..startup import Engine
from ..tiers.metrics import PageServer
from .auth import WATCHER, Tenant, tenant_of

disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX = "kvpage_engine_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _Answers:
    """Metrics of all answers, or of the answers of one tenant, with a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        self._answers = Counter(PREFIX + "answers", "Answers", ["tier", "finish_reason"], **shared)
        self._prompt = Counter(PREFIX + "prompt_tokens", "Tokens of prompts", **shared)
        self._reused = Counter(PREFIX + "reused_tokens", "Those that were not computed", ["tier"], **shared)
        self._generated = Counter(PREFIX + "generated_tokens", "Tokens of answers", **shared)
        self._first = Histogram(
            PREFIX + "time_to_first_token_seconds", "Since the prompt came", ["tier"], buckets=SECONDS, **shared
        )
        self._restore = Histogram(
            PREFIX + "restore_seconds", "To look for a context and fetch it", ["tier"], buckets=SECONDS, **shared
        )
        self._misses = Counter(PREFIX + "misses", "Prompts of which less was found, by reason", ["reason"], **shared)

    def count(self, answer: Answer) -> None:
        reuse = answer.reuse
        self._answers.labels(reuse.tier, answer.finish_reason).inc()
        self._prompt.inc(answer.prompt_tokens)
        self._reused.labels(reuse.tier).inc(reuse.tokens)
        self._generated.inc(len(answer.tokens))
        self._first.labels(reuse.tier).observe(reuse.time_to_first_token)
        self._restore.labels(reuse.tier).observe(reuse.restore_seconds)
        if reuse.why:
            self._misses.labels(reuse.why).inc()


class Metrics:
    """Metrics of one server. `pending` returns the number of unfinished answers."""

    def __init__(self, pending: Callable[[], int]) -> None:
        self._answers = _Answers()
        self._of_tenants: defaultdict[str, _Answers] = defaultdict(_Answers)  # by tenant; tokens limit their number
        self._registry = self._answers.registry
        shared: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter(PREFIX + "requests", "HTTP requests", ["endpoint", "status"], **shared)
        self.cancelled = Counter(PREFIX + "cancelled", "Answers that their clients did not wait for", **shared)
        self.closed = Counter(
            PREFIX + "connections_closed", "Connections that were closed on their clients", ["reason"], **shared
        )
        waiting = Gauge(PREFIX + "pending", "Answers that are on their way or wait for their turn", **shared)
        waiting.set_function(pending)

    def watch(self, engine: Engine) -> None:
        """Add the metrics of the engine's memory and tiers."""
        self._registry.register(_EngineCollector(engine))

    def answered(self, answer: Answer, agent_id: str) -> None:
        """Count an agent's answer."""
        self._answers.count(answer)
        if tenant := tenant_of(agent_id):
            self._of_tenants[tenant].count(answer)

    def exposition(self, who: Tenant) -> bytes:
        """Return the metrics in Prometheus' text format. A tenant gets only the metrics of its own answers."""
        everything = who.name in ("", WATCHER)
        return generate_latest(self._registry if everything else self._of_tenants[who.name].registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        pool, store = self._engine.pool, self._engine.store.metrics()
        yield _gauge("pool_used_bytes", "Bytes of contexts in memory", pool.used_bytes)
        yield _gauge("pool_bytes", "Bytes that contexts may take", pool.total_bytes)
        yield _gauge("pool_used_blocks", "Blocks of contexts in memory", pool.used_blocks)
        yield _gauge("hot_agents", "Agents whose contexts are in memory", store.hot_agents)
        yield _gauge("dirty_agents", "Agents whose contexts wait to be written", store.dirty_agents)
        yield _gauge("dirty_bytes", "Bytes that wait to be written", store.dirty_bytes)
        yield _gauge("prefix_bytes", "Bytes of beginnings in memory, for whoever has them", store.prefix_bytes)
        tiers = {"hot": store.hot, "prefix": store.prefix, "page": store.page, "cold": store.cold}
        for what, help in (
            ("hits", "Loads that a tier answered"),
            ("loaded_bytes", "Bytes that came from a tier"),
            ("load_seconds", "Seconds that they took"),
            ("saves", "Contexts written to a tier"),
            ("saved_bytes", "Bytes written to a tier"),
            ("save_seconds", "Seconds that they took"),
        ):
            yield _counter(f"tier_{what}", help, "tier", {name: getattr(tier, what) for name, tier in tiers.items()})
        if store.server is not None:
            yield from _page_server(store.server)
        yield _counter("store_misses", "Loads that found nothing, by reason", "reason", store.misses)
        yield _counter("store_unsaved", "Writes that failed, by tier", "tier", store.unsaved)
        unnamed = {"written": store.unnamed_written, "left": store.unnamed_left}
        yield _counter("unnamed", "Contexts without a name, by whether they were worth storing", "what", unnamed)
        yield _counter("evictions", "Contexts that left memory", "", {"": store.evictions})
        yield _counter("flushes", "Contexts written to all tiers they were owed", "", {"": store.dirty_flushes})
        yield _counter("lost", "Contexts dropped because no tier could be written to", "", {"": store.lost})


def _page_server(server: PageServer) -> Iterator[Metric]:
    """Yield the metrics of the page server's tier."""
    breaker = GaugeMetricFamily(
        PREFIX + "page_server_breaker", "Whether it is asked: 1 for the state that it is in", labels=["state"]
    )
    for state in ("closed", "half-open", "open"):
        breaker.add_metric([state], server.breaker == state)
    yield breaker
    yield _gauge("page_server_up", "1 if the page server answers, 0 during an outage", server.reachable)
    yield _gauge("page_server_saving", "1 if the last context was saved, 0 if its save failed", server.saving)
    yield _counter("page_server_opened", "Times that it was not asked any more", "", {"": server.opened})
    yield _counter("page_server_misses", "Loads that found less than they might have", "reason", server.misses)
    yield _counter("page_server_unsaved", "Writes that failed", "reason", server.unsaved)
    yield _counter("page_server_unasked", "Other questions without an answer", "reason", server.unasked)
    decided = {"fetched": server.fetched, "computed": server.recomputed}
    yield _counter("page_server_decisions", "Loads by what was expected to be sooner", "what", decided)
    for name, help, value in (
        ("bytes_per_second", "Measured lately: of the link", server.link_rate),
        ("latency_seconds", "Measured lately: of a question", server.latency),
        ("prefill_tokens_per_second", "Measured lately: of computing prompts", server.prefill_rate),
    ):
        if value is not None:
            yield _gauge(f"page_server_{name}", help, value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value)


def _counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with a number for each value of a label. Without a label, `label` and the only key of `values`
    are "".
    """
    family = CounterMetricFamily(PREFIX + name, help, labels=[label] if label else [])
    for value in values:
        family.add_metric([value] if label else [], values[value])
    return family
