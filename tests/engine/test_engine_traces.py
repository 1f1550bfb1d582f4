"""Spans for OpenTelemetry: a request is a trace from its lookup to its first token, with bytes, tokens and reasons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from api_engines import start_engine, write_tiny
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from servers import RunningServer
from test_agent_engine import SYSTEM, TOKENS, Bench

from engine.generation.tokens import PromptTooLongError
from kvpage_server import tracing
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType, PageKey, decode_page

PAGE = Path(__file__).parents[2] / "docs" / "monitoring" / "traces.md"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Spans:
    """Exported spans."""

    def __init__(self, found: list[ReadableSpan]) -> None:
        self.found = found

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.found if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def below(self, parent: ReadableSpan) -> list[str]:
        """The names of its children, in the order in which they began."""
        its = [span for span in self.found if span.parent and span.parent.span_id == parent.context.span_id]
        return [span.name for span in sorted(its, key=lambda span: span.start_time or 0)]


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("kvpage."): value for name, value in (span.attributes or {}).items()}


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """It gets the spans of this module's tests."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield exporter


def ask(url: str, exporter: InMemorySpanExporter, headers: Mapping[str, str]) -> Spans:
    """The spans of an engine that knows nothing and answers one prompt, and saves."""
    exporter.clear()
    bench = Bench(url)
    with tracing.continued([(name.encode(), value.encode()) for name, value in headers.items()]):
        bench.submit("alice", SYSTEM)
    bench.run()
    bench.store.flush_dirty()
    bench.store.close()
    return Spans(list(exporter.get_finished_spans()))


@pytest.fixture(scope="module")
def computed(server: RunningServer, exporter: InMemorySpanExporter) -> Spans:
    with server.client() as client:
        client.flushall()
    return ask(server.url, exporter, {})


@pytest.fixture(scope="module")
def restored(computed: Spans, server: RunningServer, exporter: InMemorySpanExporter) -> Spans:
    return ask(server.url, exporter, {"Traceparent": TRACEPARENT})


def test_a_request_has_spans_of_all_its_phases(restored: Spans) -> None:
    request = restored.one("kvpage.request")
    assert restored.below(request) == ["kvpage.load", "kvpage.assemble", "kvpage.first_token"]
    assert restored.below(restored.one("kvpage.load")) == ["kvpage.lookup", "kvpage.fetch"]
    below = restored.below(restored.one("kvpage.fetch"))
    assert set(below) == {"kvpage.client.fetch_blocks_into", "kvpage.verify"}
    assert {span.context.trace_id for span in restored.found if span.name != "kvpage.save"} >= {
        request.context.trace_id
    }
    order = ["kvpage.lookup", "kvpage.fetch", "kvpage.assemble", "kvpage.first_token"]
    times = [(restored.one(name).start_time, restored.one(name).end_time) for name in order]
    for (_, ended), (began, _) in pairwise(times):
        assert ended <= began


def test_a_callers_trace_is_continued(restored: Spans, computed: Spans) -> None:
    request = restored.one("kvpage.request")
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == CALLER
    assert computed.one("kvpage.request").parent is None


def test_spans_say_how_many_bytes_and_tokens(restored: Spans, computed: Spans) -> None:
    request, load, fetch = (attributes_of(restored.one(f"kvpage.{name}")) for name in ("request", "load", "fetch"))
    reused = request["reused_tokens"]
    assert (request["prompt_tokens"], request["tier"], request["finish_reason"]) == (len(SYSTEM), "page", "length")
    assert reused == load["tokens"] == fetch["tokens"] == len(SYSTEM) - 1
    assert attributes_of(restored.one("kvpage.assemble"))["tokens"] == reused
    assert attributes_of(restored.one("kvpage.first_token"))["tokens"] == 1
    assert attributes_of(computed.one("kvpage.first_token"))["tokens"] == len(SYSTEM)
    lookup = attributes_of(restored.one("kvpage.lookup"))
    assert lookup["blocks"] == 3
    written = sum(attributes_of(span)["bytes"] for span in computed.named("kvpage.save"))
    verified = [attributes_of(span)["bytes"] for span in restored.named("kvpage.verify")]
    received = [attributes_of(span)["bytes"] for span in restored.named("kvpage.client.fetch_blocks_into")]
    assert sum(verified) == sum(received) == fetch["bytes"] == lookup["bytes"]
    assert written == load["bytes"] == fetch["bytes"]


def test_spans_say_why_less_was_found(
    computed: Spans, restored: Spans, server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    assert attributes_of(computed.one("kvpage.request"))["reason"] == "absent"
    assert attributes_of(computed.one("kvpage.lookup"))["reason"] == "absent"
    assert "reason" not in attributes_of(restored.one("kvpage.request"))
    with server.client() as client:
        (name, *_) = json.loads(client.get(client.keys("manifest:alice:*")[0])[17:])["chain"]
        damage(client, name)
    damaged = ask(server.url, exporter, {})
    reasons = {attributes_of(span).get("reason") for span in damaged.named("kvpage.verify")}
    assert "checksum" in reasons
    assert attributes_of(damaged.one("kvpage.fetch"))["reason"] == "checksum"
    assert attributes_of(damaged.one("kvpage.request"))["reason"] == "checksum"


def damage(client: redis.Redis, name: str) -> None:
    """Overwrite bytes of a page, as any client with write access can."""
    (key, *_) = client.smembers(f"kv:{name}:index")
    _, req_id, layer, head, page, kv_type = key.split(b":")
    header, body = decode_page(client.get(key))
    words = [req_id, layer, head, page, kv_type, int(header.dtype), header.page_size, header.head_dim, 0]
    client.execute_command("KVPAGESET", *words, bytes(len(body)))


def test_a_failed_span_ends_with_its_error(exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    bench = Bench()
    bench.submit("alice", TOKENS * 3, max_tokens=1)
    bench.run()
    (error,) = bench.errors.values()
    assert isinstance(error, PromptTooLongError)
    cancelled = bench.submit("bob", TOKENS[:5])
    bench.engine.cancel(cancelled)
    spans = Spans(list(exporter.get_finished_spans()))
    failed, given_up = spans.named("kvpage.request")
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert str(error) in str(failed.status.description)
    assert (given_up.status.is_ok, attributes_of(given_up)["finish_reason"]) == (True, "cancelled")


def test_client_spans_have_bytes_and_misses(server: RunningServer, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    keys = [PageKey(b"traced", 0, head, 0, 0) for head in range(3)]
    body = np.zeros((16, 8), np.float16)
    received = np.empty((3, 16, 8), np.float16)
    with PageClient(server.url, connections=2) as client:
        client.mset([Page(key, body, DType.FLOAT16, 16, 8) for key in keys[:2]])
        assert client.mget_into(keys, list(received)) == [True, True, False]
        assert client.mget(keys[2:]) == [None]
    spans = Spans(list(exporter.get_finished_spans()))
    assert [span.name for span in spans.found] == [f"kvpage.client.{name}" for name in ("mset", "mget_into", "mget")]
    assert {span.kind for span in spans.found} == {trace.SpanKind.CLIENT}
    assert [attributes_of(span) for span in spans.found] == [
        {"bytes": 512},
        {"bytes": 512, "missed": 1, "reason": "absent"},
        {"bytes": 0, "missed": 1, "reason": "absent"},
    ]


def test_a_batch_for_several_servers_is_one_span(
    server: RunningServer, second_server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    keys = [PageKey(b"spread-%d" % i, 0, 0, 0, 0) for i in range(40)]
    body = np.zeros((16, 8), np.float16)
    with PageClient(f"{server.url},{second_server.url}") as client:
        client.mset([Page(key, body, DType.FLOAT16, 16, 8) for key in keys])
        exporter.clear()
        absent = PageKey(b"absent", 0, 0, 0, 0)
        found = client.mget_into([*keys, absent], list(np.empty((41, 16, 8), np.float16)))
    assert found == [True] * 40 + [False]
    (span,) = exporter.get_finished_spans()
    assert attributes_of(span) == {"bytes": 40 * 256, "missed": 1, "reason": "absent"}


def test_the_page_names_every_span_and_attribute(computed: Spans, restored: Spans) -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## What is told")[2]
    listed = {name for name in re.findall(r"`(kvpage\.[\w.]+)`", page) if not name.startswith("kvpage.client")}
    spans = [span for span in (*computed.found, *restored.found) if not span.name.startswith("kvpage.client.")]
    assert listed == {span.name for span in spans} | {name for span in spans for name in span.attributes or {}} | {
        "kvpage.missed"
    }
    assert "`fetch_blocks_into`" in page


def test_environment_variables_enable_the_export_of_spans(server: RunningServer, tmp_path: Path) -> None:
    how = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    instrument = str(Path(sys.executable).with_name("opentelemetry-instrument"))

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([instrument, *command], env=os.environ | how, **options)

    body = {"model": "tiny", "agent_id": "alice", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url, start=start) as engine:
        post = partial(httpx.post, f"{engine.url}/v1/chat/completions", json=body, timeout=60)
        assert post(headers={"traceparent": TRACEPARENT}).status_code == 200
        assert post(headers={"traceparent": "nonsense"}).status_code == 200
        engine.stop()
        log = engine.log
    found = [json.loads(text) for text in re.findall(r"^\{$.*?^\}$", log, re.MULTILINE | re.DOTALL)]
    requests = [span for span in found if span["name"] == "kvpage.request"]
    assert [span["parent_id"] for span in requests] == [f"0x{CALLER}", None]
    assert requests[0]["context"]["trace_id"] == f"0x{TRACE}"
    assert "kvpage.first_token" in {span["name"] for span in found}


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from kvpage_server import tracing
from kvpage_server.client import PageClient
with tracing.span("kvpage.fetch") as seen, tracing.continued([(b"traceparent", b"anything")]):
    assert seen is tracing.UNSEEN and not tracing.is_seen(seen)
with PageClient(sys.argv[1]) as client:
    assert client.mexists([]) == []
tracing.flush()
"""


def test_without_the_package_nothing_is_missing(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, server.url], capture_output=True, encoding="utf-8", timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_an_exporter_no_span_is_made() -> None:
    """Without this module's exporter: OpenTelemetry is installed, and nothing is configured."""
    program = "from kvpage_server import tracing as t; assert t.INSTALLED; assert t.span('a') is t.UNSEEN"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
