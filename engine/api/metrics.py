"""Metrics of `kvpage-engine serve` for Prometheus: requests, answers, memory, tiers and the page server."""

from __future__ import annotations

import re
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
from .models import Models

disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX = "kvpage_engine_"
_NUMBERS = re.compile(r"( from token)? \d+.*")  # of lines and tokens, in reasons: each would be a time series
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _Answers:
    """Metrics of all answers, or of the answers of one tenant, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        self._answers = Counter(PREFIX + "answers", "Answers", ["model", "tier", "finish_reason"], **shared)
        self._prompt = Counter(PREFIX + "prompt_tokens", "Prompt tokens", ["model"], **shared)
        self._reused = Counter(PREFIX + "reused_tokens", "Prompt tokens that were reused", ["model", "tier"], **shared)
        self._generated = Counter(PREFIX + "generated_tokens", "Generated tokens", ["model"], **shared)
        self._first = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "Time from the request to the first token",
            ["model", "tier"],
            buckets=SECONDS,
            **shared,
        )
        self._restore = Histogram(
            PREFIX + "restore_seconds",
            "Duration of the lookup and the load of a context",
            ["model", "tier"],
            buckets=SECONDS,
            **shared,
        )
        help = "Prompts with a lifetime, by the part of the requested tokens that is kept: whole, part or none"
        self._kept = Counter(PREFIX + "lifetimes", help, ["model", "kept"], **shared)
        self._prewarmed = Counter(PREFIX + "prewarmed", "Prompts computed for later ones", ["model"], **shared)
        self._breakpoints = Counter(PREFIX + "breakpoints", "Breakpoints of prompts", ["model"], **shared)
        help = "Prompts that reused less than possible, by reason"
        self._misses = Counter(PREFIX + "misses", help, ["model", "reason"], **shared)

    def count(self, answer: Answer, model: str, breakpoints: int, *, prewarmed: bool) -> None:
        reuse, kept = answer.reuse, answer.kept
        if kept:
            self._kept.labels(model, "whole" if not kept.why else "part" if kept.tokens else "none").inc()
        self._prewarmed.labels(model).inc(prewarmed)
        self._breakpoints.labels(model).inc(breakpoints)
        self._answers.labels(model, reuse.tier, answer.finish_reason).inc()
        if not answer.shares_prompt:
            self._prompt.labels(model).inc(answer.prompt_tokens)
            self._reused.labels(model, reuse.tier).inc(reuse.tokens)
        self._generated.labels(model).inc(len(answer.tokens))
        self._first.labels(model, reuse.tier).observe(reuse.time_to_first_token)
        self._restore.labels(model, reuse.tier).observe(reuse.restore_seconds)
        if reuse.why:
            self._misses.labels(model, _NUMBERS.sub("", reuse.why)).inc()


class Metrics:
    """Metrics of one server with `models`. `pending` returns the number of unfinished answers."""

    def __init__(self, models: Models, pending: Callable[[], int]) -> None:
        self._answers = _Answers()
        self._of_tenants: defaultdict[str, _Answers] = defaultdict(_Answers)  # by tenant; tokens limit their number
        self._registry = self._answers.registry
        shared: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter(PREFIX + "requests", "HTTP requests", ["endpoint", "status"], **shared)
        self.cancelled = Counter(PREFIX + "cancelled", "Answers cancelled because the client disconnected", **shared)
        self.closed = Counter(
            PREFIX + "connections_closed", "Connections closed by the server, by reason", ["reason"], **shared
        )
        waiting = Gauge(PREFIX + "pending", "Requests that are running or waiting", **shared)
        waiting.set_function(pending)
        self._registry.register(_EngineCollector(models))

    def answered(self, answer: Answer, agent_id: str, model: str, breakpoints: int, *, prewarmed: bool) -> None:
        """Count a complete answer of a model, in the metrics of all answers and of the agent's tenant."""
        self._answers.count(answer, model, breakpoints, prewarmed=prewarmed)
        if tenant := tenant_of(agent_id):
            self._of_tenants[tenant].count(answer, model, breakpoints, prewarmed=prewarmed)

    def exposition(self, who: Tenant) -> bytes:
        """Return the metrics in Prometheus's text format: all of them for WATCHER and without tenants, otherwise the
        metrics of the tenant's answers.
        """
        everything = who.name in ("", WATCHER)
        return generate_latest(self._registry if everything else self._of_tenants[who.name].registry)


class _EngineCollector(Collector):
    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield which models are loaded, and the metrics of each loaded one with the label `model`."""
        loaded = {name: float(model.loaded) for name, model in self._models.by_name.items()}
        yield _labelled(GaugeMetricFamily, "model_loaded", "1 if the model is in memory", "model", loaded)
        found: dict[str, Metric] = {}
        for model in self._models.loaded:
            for metric in _metrics(model.engine, model.weights):
                whole = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [one._replace(labels={"model": model.name, **one.labels}) for one in metric.samples]
        yield from found.values()


def _metrics(engine: Engine, weights: int) -> Iterator[Metric]:
    """Yield the metrics of an engine's memory and tiers."""
    pool, store = engine.pool, engine.store.metrics()
    yield _gauge("weights_bytes", "Bytes of the model's weights", weights)
    yield _gauge("pool_used_bytes", "Bytes of contexts in memory", pool.used_bytes)
    yield _gauge("pool_bytes", "Limit of the bytes of contexts in memory", pool.total_bytes)
    yield _gauge("pool_used_blocks", "Blocks of contexts in memory", pool.used_blocks)
    yield _gauge("hot_agents", "Agents whose contexts are in memory", store.hot_agents)
    yield _gauge("dirty_agents", "Agents with dirty contexts, which are not saved yet", store.dirty_agents)
    yield _gauge("dirty_bytes", "Bytes of dirty contexts", store.dirty_bytes)
    yield _gauge("prefix_bytes", "Bytes of shared prefixes in memory", store.prefix_bytes)
    yield _gauge("kept_bytes", "Bytes of contexts in memory that have a lifetime", store.kept_bytes)
    tiers = {"hot": store.hot, "prefix": store.prefix, "page": store.page, "cold": store.cold}
    for what, help in (
        ("hits", "Loads of contexts from a tier"),
        ("loaded_bytes", "Bytes loaded from a tier"),
        ("load_seconds", "Duration of loads from a tier"),
        ("saves", "Contexts saved to a tier"),
        ("saved_bytes", "Bytes saved to a tier"),
        ("save_seconds", "Duration of saves to a tier"),
    ):
        yield _counter(f"tier_{what}", help, "tier", {name: getattr(tier, what) for name, tier in tiers.items()})
    if store.server is not None:
        yield from _page_server(store.server)
    yield _counter("store_misses", "Loads without a result, by reason", "reason", store.misses)
    yield _counter("store_unsaved", "Failed saves, by tier", "tier", store.unsaved)
    unnamed = {"written": store.unnamed_written, "left": store.unnamed_left}
    help = "Contexts without an agent id: written to the page server, or left out as not worth storing"
    yield _counter("unnamed", help, "what", unnamed)
    yield _counter("evictions", "Contexts evicted from memory", "", {"": store.evictions})
    yield _counter("flushes", "Dirty contexts saved to all their tiers", "", {"": store.dirty_flushes})
    yield _counter("lost", "Contexts lost because no tier could be written", "", {"": store.lost})


def _page_server(server: PageServer) -> Iterator[Metric]:
    """Yield the metrics of the page server's tier."""
    breaker = GaugeMetricFamily(
        PREFIX + "page_server_breaker", "Circuit breaker of the page server: 1 for its state", labels=["state"]
    )
    for state in ("closed", "half-open", "open"):
        breaker.add_metric([state], server.breaker == state)
    yield breaker
    yield _gauge(
        "page_server_up",
        "1 if the page server answers, 0 during an outage and before its first answer",
        server.reachable,
    )
    yield _gauge("page_server_saving", "1 if the last context was saved, 0 if its save failed", server.saving)
    yield _counter("page_server_opened", "Times that the circuit breaker has opened", "", {"": server.opened})
    yield _counter("page_server_misses", "Incomplete or missed loads, by reason", "reason", server.misses)
    yield _counter("page_server_unsaved", "Failed saves, by reason", "reason", server.unsaved)
    yield _counter("page_server_unasked", "Other failed requests, by reason", "reason", server.unasked)
    decided = {"fetched": server.fetched, "computed": server.recomputed}
    yield _counter("page_server_decisions", "Loads by the estimated faster way: fetched or computed", "what", decided)
    for name, help, value in (
        ("bytes_per_second", "Recent rate of the link to the page server", server.link_rate),
        ("latency_seconds", "Recent latency of a request to the page server", server.latency),
        ("prefill_tokens_per_second", "Recent rate of the prefill of one prompt", server.prefill_rate),
    ):
        if value is not None:
            yield _gauge(f"page_server_{name}", help, value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value)


def _counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with `values` by value of the label. Without a label, `label` and the only key are ""."""
    return _labelled(CounterMetricFamily, name, help, label, values)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help: str, label: str, values: Mapping[str, float]
) -> Metric:
    family = kind(PREFIX + name, help, labels=[label] if label else [])
    for value in values:
        family.add_metric([value] if label else [], values[value])
    return family
