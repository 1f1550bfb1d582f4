"""The cluster that tests, benchmarks and `make cluster` use: it is a real one, and nothing of it stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import redis
from servers import answers

from benchmarks import valkey_cluster


def test_a_cluster_has_three_masters_with_replicas_and_stops() -> None:
    with valkey_cluster.run() as cluster:
        assert len(cluster.masters) == len(cluster.replicas) == 3
        assert {cluster.master_of(slot).port for slot in (0, 8000, 16383)} == {node.port for node in cluster.masters}
        with redis.RedisCluster("127.0.0.1", cluster.nodes[0].port) as client:
            assert client.set("kv:a", "1", px=100_000)
            assert client.get("kv:a") == b"1"
        assert [node.info_of("INFO", "replication")["role"] for node in cluster.nodes] == ["master"] * 3 + ["slave"] * 3
    assert not any(answers(node.port) for node in cluster.nodes)
    assert all(node.process.poll() is not None for node in cluster.nodes)


def test_a_cluster_started_from_the_shell_runs_until_stopped(tmp_path: Path) -> None:
    port = random.randrange(17000, 22000, 6)  # below the system's ephemeral ports, as are the ports 10000 above
    directory = tmp_path / "cluster"

    def do(command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "benchmarks.valkey_cluster", command, "--dir", str(directory), "--port"]
        return subprocess.run([*words, str(port)], capture_output=True, encoding="utf-8", timeout=100)

    started = do("start")
    try:
        assert f"valkey-cluster://127.0.0.1:{port}" in started.stdout, started.stderr
        with redis.RedisCluster("127.0.0.1", port) as client:
            assert client.set("kv:a", "1")
        assert "make cluster-stop" in do("start").stderr
        os.kill(
            int((directory / str(port + 1) / "pid").read_text(encoding="utf-8")), signal.SIGSTOP
        )  # it answers nobody
    finally:
        stopped = do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not any(map(answers, range(port, port + 6)))
    assert "no cluster runs" in do("stop").stderr
