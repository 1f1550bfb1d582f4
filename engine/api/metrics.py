"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.agent_engine import Answer
from engine.assembly import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Of one server."""

    def __init__(self, pending: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        name = "kvpage_engine_"
        shared: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(name + "requests", "HTTP requests", ["endpoint", "status"], **shared)
        self.cancelled = Counter(name + "cancelled", "Answers that their clients did not wait for", **shared)
        self._answers = Counter(name + "answers", "Answers", ["tier", "finish_reason"], **shared)
        self._prompt = Counter(name + "prompt_tokens", "Tokens of prompts", **shared)
        self._reused = Counter(name + "reused_tokens", "Those that were not computed", ["tier"], **shared)
        self._generated = Counter(name + "generated_tokens", "Tokens of answers", **shared)
        self._first = Histogram(
            name + "time_to_first_token_seconds", "Since the prompt came", ["tier"], buckets=SECONDS, **shared
        )
        self._restore = Histogram(
            name + "restore_seconds", "To look for a context and fetch it", ["tier"], buckets=SECONDS, **shared
        )
        self._misses = Counter(name + "misses", "Prompts of which less was found, by reason", ["reason"], **shared)
        waiting = Gauge(name + "pending", "Answers that are on their way or wait for their turn", **shared)
        waiting.set_function(pending)

    def watch(self, engine: Engine) -> None:
        """Tell of its memory and its tiers, too."""
        self.registry.register(_EngineCollector(engine))

    def answered(self, answer: Answer) -> None:
        """Count an answer."""
        reuse = answer.reuse
        self._answers.labels(reuse.tier, answer.finish_reason).inc()
        self._prompt.inc(answer.prompt_tokens)
        self._reused.labels(reuse.tier).inc(reuse.tokens)
        self._generated.inc(len(answer.tokens))
        self._first.labels(reuse.tier).observe(reuse.time_to_first_token)
        self._restore.labels(reuse.tier).observe(reuse.restore_seconds)
        if reuse.why:
            self._misses.labels(reuse.why).inc()

    def exposition(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        pool = self._engine.pool
        yield GaugeMetricFamily("kvpage_engine_pool_used_bytes", "Bytes of contexts in memory", pool.used_bytes)
        yield GaugeMetricFamily("kvpage_engine_pool_bytes", "Bytes that contexts may take", pool.total_bytes)
        yield GaugeMetricFamily("kvpage_engine_pool_used_blocks", "Blocks of contexts in memory", pool.used_blocks)
