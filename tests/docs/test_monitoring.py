"""docs/monitoring/: metrics of alerts and dashboards exist, and the page lists all metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_engines import start_engine, write_tiny
from browsing import TOKEN, SeenServer, start_seen_server
from servers import RunningServer, free_port
from waiting import until

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "monitoring"
ALERTS, DASHBOARD, PAGE = (MONITORING / name for name in ("alerts.yml", "grafana.json", "README.md"))
NAME = re.compile(r"\bkvpage_\w+")
PROMETHEUS, PROMTOOL = map(shutil.which, ("prometheus", "promtool"))
NO_PROMETHEUS = "prometheus is not installed (Debian: apt-get install prometheus)"
ENGINE = "kvpage_engine_"


@pytest.fixture(scope="module")
def metrics() -> Iterator[str]:
    with start_seen_server("--store", "tiered", "--quota", "kv:tenant.*", "1mb", "--maxmemory", "4mb") as seen:
        work(seen)
        with seen.browser() as browser:
            yield browser.get("/metrics").text


def work(seen: SeenServer) -> None:
    with seen.server.client() as client:
        for page in range(20):
            client.execute_command("KVPAGESET", "tenant.1", 0, 0, page, 0, 1, 64, 512, 0, bytes(1 << 16))
        client.execute_command("KVPAGEGET", "nobody", 0, 0, 0, 0)
        client.get("nothing")


def families(metrics: str) -> dict[str, str]:
    """The kind of each metric by its name, as a question may name it."""
    found = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", metrics, re.MULTILINE):
        found[name] = kind
        if kind == "histogram":
            found |= dict.fromkeys((f"{name}_bucket", f"{name}_sum", f"{name}_count"), kind)
    return found


def of_alerts() -> list[str]:
    return re.findall(r"^ +expr: (.*)$", ALERTS.read_text(encoding="utf-8"), re.MULTILINE)


def of_panels() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def expressions() -> list[str]:
    return of_alerts() + of_panels()


def test_alerts_and_dashboard_ask_for_metrics_that_exist(metrics: str) -> None:
    there = families(metrics)
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(asked) > 30
    assert {name for name in asked if not name.startswith(ENGINE)} - there.keys() == set()


@pytest.mark.parametrize("asked", [of_alerts, of_panels])
def test_dashboards_query_engine_statistics_of_the_store(asked: Callable[[], list[str]]) -> None:
    names = {name for expression in asked() for name in NAME.findall(expression)}
    assert names >= {"kvpage_engines", "kvpage_prompt_tokens_total"}


def test_queried_engine_metrics_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "engine" / "api").glob("*.py"))
    asked = {name for expression in expressions() for name in NAME.findall(expression) if name.startswith(ENGINE)}
    assert asked
    for name in asked:
        short = re.sub(r"_(total|bucket|sum|count)$", "", name.removeprefix(ENGINE))
        assert f'"{short}"' in source, name


def documented_metrics() -> set[str]:
    return set(NAME.findall(PAGE.read_text(encoding="utf-8").partition("## Metrics")[2]))


def test_the_page_lists_all_metrics_of_an_engine(server: RunningServer, tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        found = httpx.get(f"{engine.url}/metrics", timeout=60).text
    there = {name for name, kind in families(found).items() if not name.endswith(("_bucket", "_sum", "_count"))}
    documented = {name for name in documented_metrics() if name.startswith(ENGINE)}
    rates = {name for name in documented if re.search(r"page_server_.*_(second|seconds)$", name)}  # of later transfers
    assert len(rates) == 3
    assert documented - rates <= there <= documented


def test_the_page_lists_all_metrics_and_no_other(metrics: str) -> None:
    listed = {name for name in documented_metrics() if not name.startswith(ENGINE)}
    there = {name for name, kind in families(metrics).items() if not name.endswith(("_bucket", "_sum", "_count"))}
    assert listed == there


def test_labels_that_are_asked_for_exist(metrics: str) -> None:
    labels = set(re.findall(r'[{,](\w+)="', metrics)) | {"instance", "job", "le", "tier", "state"}
    for expression in expressions():
        by = re.findall(r"\bby \(([\w, ]+)\)", expression)
        assert {name for group in by for name in re.split(", *", group)} <= labels, expression
        assert set(re.findall(r"[{,](\w+)=", expression)) <= labels, expression


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    variables = {each["name"] for each in board["templating"]["list"]} | {"__rate_interval"}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        squares = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & squares, panel["title"]
        taken |= squares
        assert panel["type"] in ("row", "stat", "timeseries")
        for target in panel.get("targets", []):
            assert target["refId"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")
def test_the_dashboard_has_nothing_that_grafana_does_not_know() -> None:
    """Grafana ignores fields that its own types drop when they read and write the dashboard."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason="no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    misspelt = json.loads(DASHBOARD.read_text(encoding="utf-8").replace('"legendFormat"', '"legend"'))
    written, again = (json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(each))) for each in (board, misspelt))
    assert set(_unknown(board, written)) == set()
    assert set(_unknown(misspelt, again)) == {"panels targets legend"}


def _unknown(wanted: Any, known: Any, path: str = "") -> Iterator[str]:
    """The names in one that are not in the other, or have another value there."""
    if isinstance(wanted, dict) and isinstance(known, dict):
        for name, value in wanted.items():
            yield from _unknown(value, known.get(name, "nothing"), f"{path} {name}".strip())
    elif isinstance(wanted, list) and isinstance(known, list) and len(wanted) == len(known):
        for one, other in zip(wanted, known, strict=True):
            yield from _unknown(one, other, path)
    elif wanted != known:
        yield path


def _trial(directory: Path) -> Path:
    """A store whose engines end after eight hours, and begin to compute everything after six."""
    of = 'instance="kv1:9223"'
    spared, computed = (f'kvpage_prompt_tokens_total{{{of},tier="{tier}"}}' for tier in ("page", "none"))
    metrics = [
        (f"kvpage_engines{{{of}}}", "2x480 0x60"),
        (spared, "0+900x360 324000x180"),
        (computed, "0+100x360 36100+1000x180"),
    ]
    firing = {
        "350m": [],
        "460m": ["KvpagePromptsComputedAgain"],
        "490m": ["KvpageEnginesGone", "KvpagePromptsComputedAgain"],
    }
    questions = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": at,
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names],
        }
        for at, names in firing.items()
    ]
    series = [{"series": name, "values": values} for name, values in metrics]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": questions}
    trial = directory / "trial.yml"
    trial.write_text(
        json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}), encoding="utf-8"
    )
    return trial


@pytest.mark.skipif(not PROMTOOL, reason=NO_PROMETHEUS)
def test_prometheus_takes_them(metrics: str, tmp_path: Path) -> None:
    assert PROMTOOL
    checked = subprocess.run(
        [PROMTOOL, "check", "rules", str(ALERTS)], capture_output=True, encoding="utf-8", timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    linted = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=metrics, capture_output=True, encoding="utf-8", timeout=60
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
    checked = subprocess.run(
        [PROMTOOL, "test", "rules", _trial(tmp_path)], capture_output=True, encoding="utf-8", timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rules = {
        "groups": [
            {
                "name": "dashboard",
                "rules": [
                    {
                        "record": f"r{i}",
                        "expr": re.sub(r"\$__rate_interval", "5m", expression).replace("$instance", ".*"),
                    }
                    for i, expression in enumerate(expressions())
                ],
            }
        ]
    }
    asked = tmp_path / "asked.yml"
    asked.write_text(json.dumps(rules), encoding="utf-8")  # which is YAML, too
    checked = subprocess.run(
        [PROMTOOL, "check", "rules", str(asked)], capture_output=True, encoding="utf-8", timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@contextmanager
def prometheus(seen: SeenServer, directory: Path) -> Iterator[httpx.Client]:
    """A real one, with the alerts of docs/monitoring/, that asks the server every second."""
    asks = {"job_name": "kvpage", "static_configs": [{"targets": [f"127.0.0.1:{seen.http}"]}]}
    asks["authorization"] = {"credentials": TOKEN}
    often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config, port = directory / "prometheus.yml", free_port()
    config.write_text(
        json.dumps({"global": often, "rule_files": [str(ALERTS)], "scrape_configs": [asks]}), encoding="utf-8"
    )
    options = {
        "config.file": config,
        "storage.tsdb.path": directory / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [str(PROMETHEUS), *(f"--{name}={value}" for name, value in options.items())]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60) as asked,
    ):
        try:
            yield asked
        finally:
            process.kill()


@pytest.mark.skipif(not PROMETHEUS, reason=NO_PROMETHEUS)
def test_prometheus_scrapes_the_store_and_answers_the_queries(tmp_path: Path) -> None:
    def found(path: str, **asked: str) -> Any:
        with suppress(httpx.TransportError):  # it may just have been started
            answer = client.get(path, params=asked)
            if answer.status_code == 503:  # it reads its own data first
                return {}
            assert answer.is_success, answer.text
            return answer.json()["data"]
        return {}

    with start_seen_server() as seen, prometheus(seen, tmp_path) as client:
        until(lambda: [one["health"] for one in found("/targets").get("activeTargets", [])] == ["up"], "a scrape")

        def rules() -> dict[str, str]:
            return {rule["name"]: rule["health"] for group in found("/rules")["groups"] for rule in group["rules"]}

        until(lambda: set(rules().values()) == {"ok"}, "the alerts")
        assert len(rules()) == len(of_alerts())
        for expression in of_panels():
            asked = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
            assert found("/query", query=asked)["resultType"] == "vector"
        metrics = set(re.findall(r"^\w+", seen.browser().get("/metrics").text, re.MULTILINE))
        assert metrics <= set(found("/label/__name__/values"))
