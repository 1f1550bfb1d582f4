"""All names of one command together have a limit in bytes, so that no command takes long for its names."""

from __future__ import annotations

import pytest
import redis
from servers import start_server

LONG = "a" * (3 << 20)


@pytest.mark.parametrize("user", ["default", "tenant"])
def test_the_names_of_one_command_have_a_limit_together(user: str) -> None:
    options = ("--user", "tenant", "on", ">password", "~a*", "&a*", "+@all")
    with (
        start_server(*options) as server,
        server.client(username=user, password="password" if user == "tenant" else None) as client,
    ):
        assert client.set(LONG, "value")
        assert client.exists(LONG) == 1
        assert client.mget(LONG, "a") == [b"value", None]
        for words in (
            ["EXISTS"],
            ["MGET"],
            ["DEL"],
            ["WATCH"],
            ["SUBSCRIBE"],
            ["COMMAND", "INFO"],
            ["PUBSUB", "NUMSUB"],
        ):
            with pytest.raises(redis.ResponseError, match="the names of a command have at most 4194304 bytes"):
                client.execute_command(*words, *[LONG] * 6)
        with pytest.raises(redis.ResponseError, match="at most 4194304 bytes, got 18874368"):
            client.mset({LONG[1:] + f"{number}": "value" for number in range(6)})
        assert client.mset({"a": LONG, "ab": LONG})
