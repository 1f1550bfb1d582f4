"""`kvpage bench` and the repository's benchmarks: they measure real servers, look at every byte, and leave nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import redis
from servers import RunningServer, start_redis, start_server

from kvpage_server.bench import (
    LLAMA3_16,
    SMOLLM2_16,
    SMOLLM2_256,
    Blocks,
    ClientStore,
    PageWork,
    Row,
    Store,
    Target,
    Work,
    measure_reads,
    measure_writes,
    start_raw,
    table,
)
from kvpage_server.client import PageClient
from kvpage_server.look.output import LookError

SECONDS = 0.02


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvpage_server.cli import main; main()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, check=False)


@pytest.fixture(scope="module")
def small_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """They hold two generations of 16 MiB, so little is moved; and have unix sockets."""
    where = tmp_path_factory.mktemp("bench")
    options = "--maxmemory", "80mb", "--unixsocket"
    with start_server(*options, str(where / "ours")) as ours, start_redis(*options, str(where / "theirs")) as theirs:
        yield [ours, theirs]


def test_two_servers_are_measured_in_turns_and_left_unchanged(
    small_servers: list[RunningServer], tmp_path: Path
) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    ours, theirs = small_servers
    for each in small_servers:
        with each.client() as client:
            client.set("mine", "kept")
    done = bench(
        "--url", ours.url, "--against", theirs.url, "--quick", "--seconds", str(SECONDS),
        "--json", str(figures), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "256 pages of 64 KiB, 4 connections" in done.stdout
    assert "256 pages of 64 KiB, unix socket" in done.stdout
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert [(row["work"], row["op"]) for row in rows[:2]] == [
        ("256 pages of 16 KiB", "write"),
        ("256 pages of 16 KiB", "read"),
    ]
    assert len(rows) == 10
    for row in rows:
        assert row["raw_gb_per_s"] > 0
        assert [name.split()[0] for name in row["figures"]] == ["kvpage-server", "Redis"]
        for found in row["figures"].values():
            assert found["gb_per_s"] > 0
            assert found["cpu_s_per_gb"] > 0
            assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for each in small_servers:
        with each.client() as client:
            assert client.keys() == [b"mine"]


def test_work_that_does_not_fit_is_left_out() -> None:
    with start_redis("--maxmemory", "30mb") as tiny:
        done = bench("--url", tiny.url, "--quick", "--seconds", str(SECONDS))
    assert done.returncode == 0, done.stderr
    assert "left out, as they need a larger maxmemory or maxdisk: 3 of 4 cases" in done.stdout
    with start_redis("--maxmemory", "10mb") as tiny:
        done = bench("--url", tiny.url, "--quick", "--seconds", str(SECONDS))
    expected = "kvpage: all cases need a larger maxmemory or maxdisk: half of the smaller one is 5 MiB\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_work_that_does_not_fit_on_disk_is_left_out(tmp_path: Path) -> None:
    with start_server("--store", "tiered", "--maxmemory", "1gb", "--maxdisk", "40mb", directory=tmp_path) as small:
        done = bench("--url", small.url, "--quick", "--seconds", str(SECONDS))
    assert done.returncode == 0, done.stderr
    assert re.search("left out, as they need a larger maxmemory or maxdisk: [34] of [45] cases", done.stdout)


def test_values_evicted_at_a_quota_are_an_error_in_one_line() -> None:
    with start_server("--store", "memory", "--quota", "kv:* 1mb") as server:
        done = bench("--url", server.url, "--quick", "--seconds", str(SECONDS))
    missing = "256 of 256 values that were just written are missing: evicted, at a quota or by other writers"
    assert (done.returncode, done.stderr.count("\n"), missing in done.stderr) == (1, 1, True)


def test_a_server_without_cpu_seconds_shows_them_as_unknown(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis.Redis, "info", lambda self, section: {"redis_version": "1"})
    work = PageWork(2, 4096, 1)
    with PageClient(server.url) as client, closing(Target(server.url)) as target:
        figures = measure_writes(ClientStore(client), work, SECONDS, target.cpu_seconds)
    assert figures.cpu_s_per_gb is None
    assert "unknown" in [*table([Row(work.name, "write", {"other": figures}, 1.0)]).columns[4].cells]


def test_a_missing_server_is_reported_in_one_line() -> None:
    done = bench("--url", "redis://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot reach redis://127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("make", [lambda: PageWork(20, 4096, 3), lambda: Blocks(2, SMOLLM2_16, 2)])
@pytest.mark.parametrize("connections", [1, 3])
def test_bare_sockets_move_the_same_bytes(make: Callable[[], Work], connections: int) -> None:
    work = make()
    with start_raw() as connect, closing(connect(connections)) as raw:
        assert measure_writes(raw, work, SECONDS).gb_per_s > 0
        assert measure_reads(raw, work, SECONDS).gb_per_s > 0
    assert all(np.array_equal(batch.written, batch.read) for batch in work.batches)


def test_wrong_bytes_are_found(server: RunningServer) -> None:
    work = PageWork(20, 4096, 2)
    with PageClient(server.url, verify=False) as client, server.client() as other:
        store: Store = ClientStore(client)
        measure_writes(store, work, SECONDS)
        measure_reads(store, work, SECONDS)
        page = work.pages[1][7]
        body = bytearray(memoryview(page.body))
        body[2000] ^= 1
        client.set_page(page._replace(body=body))
        with pytest.raises(LookError, match="not those that were written"):
            measure_reads(store, work, SECONDS)
        other.delete(bytes(page.key))
        with pytest.raises(LookError, match="1 of 20 values that were just written are missing"):
            measure_reads(store, work, SECONDS)


def test_blocks_have_the_sizes_of_models() -> None:
    assert (SMOLLM2_16.nbytes, LLAMA3_16.nbytes) == (360 << 10, 2 << 20)
    assert (LLAMA3_16.pages, SMOLLM2_256.nbytes) == (512, 5_898_240)
    assert Blocks(1, SMOLLM2_256, 1).name == "1 blocks of 5.6 MiB"
