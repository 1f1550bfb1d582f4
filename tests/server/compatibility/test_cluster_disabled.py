"""A client of Redis Cluster learns from a kvpage-server, as from a stand-alone Redis, that it is no cluster."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from servers import RunningServer

COMMANDS = ("INFO", "KEYSLOT a", "MYID", "NODES", "SHARDS", "SLOTS")


def test_cluster_commands_are_refused(either_server: RunningServer) -> None:
    with either_server.client() as client:
        for words in COMMANDS:
            with pytest.raises(redis.ResponseError, match=r"^This instance has cluster support disabled$"):
                client.execute_command("CLUSTER", *words.split())


def test_the_mode_is_standalone(either_server: RunningServer) -> None:
    with either_server.client() as client:
        assert client.info("server")["redis_mode"] == "standalone"
        assert client.info("cluster") == {"cluster_enabled": 0}
        hello: Any = client.execute_command("HELLO", "3")
        assert hello[b"mode"] == b"standalone"


def test_redis_py_names_the_disabled_cluster_mode(either_server: RunningServer) -> None:
    with pytest.raises(redis.RedisClusterException, match="Cluster mode is not enabled on this node"):
        redis.RedisCluster("127.0.0.1", either_server.port)


def test_messages_stay_on_their_server(server: RunningServer, second_server: RunningServer) -> None:
    with server.client() as client, second_server.client() as other, client.pubsub() as listening:
        listening.subscribe("side-by-side")
        assert listening.get_message(timeout=60)
        assert other.publish("side-by-side", "x") == 0
        assert client.publish("side-by-side", "x") == 1
