"""Where engines keep contexts: a page server, several side by side, or a Valkey Cluster, each asked by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from contexts import SPEC
from servers import RunningServer

from benchmarks.valkey_cluster import Cluster
from engine.memory.blocks import block_names
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier
from kvpage_server.page import SEGMENT, tag_of


@dataclass
class Home:
    """Its URL, a client of each of its servers, and how many blocks of a prompt it keeps together."""

    url: str
    clients: Sequence[redis.Redis]
    together: int
    cluster: Cluster | None = None

    def flush(self) -> None:
        for client in self.clients:
            client.flushall()

    def keys(self, pattern: str = "*") -> set[str]:
        found = {key.decode() for client in self.clients for key in client.scan_iter(pattern, count=10_000)}
        return {key for key in found if not key.endswith(":index")}

    def having(self, key: str) -> Sequence[redis.Redis]:
        return [client for client in self.clients if self._has(client, key)]

    def _has(self, client: redis.Redis, key: str) -> bool:
        try:
            return bool(client.exists(key))
        except redis.exceptions.MovedError:
            return False

    def ask(self, key: str, *words: Any) -> Any:
        (client,) = self.having(key)
        return client.execute_command(*words)

    def tagged(self, tokens: tuple[int, ...], spec: ModelCacheSpec, agent_id: str = "") -> list[str]:
        """The blocks of a context, as they stand in keys."""
        names = block_names(tokens, spec, agent_id)
        return [tag_of(names, i, self.together) + name for i, name in enumerate(names)]

    def blocks(self) -> set[str]:
        return {key.split(":")[1] for key in self.keys() if key.split(":")[0] in ("kv", "seal", "state")}

    def turn_a_bit(self, block: str) -> None:
        if self.cluster:
            key = f"kv:{block}:block:0"
            value = self.ask(key, "GETRANGE", key, -5, -5)
            self.ask(key, "SETRANGE", key, self.ask(key, "STRLEN", key) - 5, bytes([value[0] ^ 1]))
            return
        key = min(self.keys(f"kv:{block}:*"))
        _, *name = key.split(":")
        about = {field.decode(): value for field, value in self.ask(key, "KVPAGESTAT", *name).items()}
        body = bytearray(self.ask(key, "KVPAGEGET", *name))
        body[3] ^= 1
        given = about["dtype"], about["page_size"], about["head_dim"], 0, bytes(body)
        self.ask(key, "KVPAGESET", *name, *given)


@contextmanager
def home_of(servers: Sequence[RunningServer] = (), cluster: Cluster | None = None) -> Iterator[Home]:
    with ExitStack() as stack:
        ports: Sequence[Callable[..., redis.Redis]] = [one.client for one in (cluster.masters if cluster else servers)]
        clients = [stack.enter_context(make()) for make in ports]
        url = cluster.url if cluster else ",".join(server.url for server in servers)
        yield Home(url, clients, SEGMENT if len(clients) > 1 else 0, cluster)


def homes_and_tiers() -> tuple[Any, Any, Any]:
    """The fixtures `home`, each of the three kinds in turn, emptied, and `tier` and `other`, the page tiers of two
    engines there. They need the fixture `pool`, whose contexts are those of `SPEC`."""

    @pytest.fixture(name="home", params=["one server", "side by side", "cluster"])
    def home(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Home]:
        def second() -> RunningServer:
            found: RunningServer = request.getfixturevalue("second_server")
            return found

        which = {"one server": lambda: {"servers": [server]}, "side by side": lambda: {"servers": [server, second()]}}
        found: Any = which.get(request.param, lambda: {"cluster": request.getfixturevalue("masters")})()
        with home_of(**found) as home:
            home.flush()
            yield home

    def tier(home: Home, pool: BlockPool) -> Iterator[PageTier]:
        tier = PageTier(home.url, SPEC, pool, deadline=40)
        yield tier
        tier.close()

    return home, pytest.fixture(name="tier")(tier), pytest.fixture(name="other")(tier)
