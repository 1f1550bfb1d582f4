"""Servers that share a static map of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from servers import RunningServer, free_port, start_server

IDS = [f"{i:040x}" for i in range(1, 5)]
HALVES = (["0-8191"], ["8192-16383"])


def map_text(ports: Sequence[int], slots: Sequence[Sequence[str]] = HALVES, version: int = 1) -> str:
    """A map of servers on the loopback."""
    nodes = "".join(
        f'\n[[nodes]]\nid = "{name}"\nhost = "127.0.0.1"\nport = {port}\nslots = {[*some]}\n'
        for name, port, some in zip(IDS, ports, slots, strict=False)
    )
    return f"version = {version}\n{nodes}"


@dataclass(frozen=True)
class MappedServers:
    """Servers, and the file of their map."""

    servers: list[RunningServer]
    file: Path

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self.servers]

    @property
    def url(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)


@contextmanager
def start_mapped(*options: str, slots: Sequence[Sequence[str]] = HALVES) -> Iterator[MappedServers]:
    """As many servers as there are lists of slots."""
    ports = [free_port() for _ in slots]
    with ExitStack() as stack:
        file = Path(stack.enter_context(TemporaryDirectory()), "slots.toml")
        file.write_text(map_text(ports, slots))
        mapped = ("--cluster-config", str(file), *options)
        servers = [
            stack.enter_context(start_server("--cluster-node", f"127.0.0.1:{port}", *mapped, port=port))
            for port in ports
        ]
        yield MappedServers(servers, file)
