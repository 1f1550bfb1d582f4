"""No request delays other clients, and its cost is linear in its size.

Measured in processor time of a server in this process, so that other load counts little; `python -m benchmarks stalls`
measures the latency of another client.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from turns import Cost, Turns, measured
from wire import encode_command

import kvpage_server.commands.families  # noqa: F401  fills the table
from benchmarks.worst import NOT_ASKED, Scene, scene_name, scenes
from kvpage_server.commands.specs import TABLE, subcommands

FEW, FOUR_TIMES = 1100, 4400
# Seconds of a turn that are ignored, because of other load and slow machines. A command that iterates over its
# arguments without steps takes much longer; `python -m benchmarks stalls` checks the limit of 10 ms.
AT_LEAST = 0.06
TRIES = 5  # a turn that is long is so each time; one in which this machine did something else is not
SHORT = frozenset(  # what `make test` looks at; `make soak` looks at all
    (
        *("FLUSHALL strings", "FLUSHALL blocks", "KVPAGEVERIFY whole", "KVPAGEINDEX many blocks"),
        *("DEL present", "EXISTS absent", "MGET present", "MSET new", "WATCH absent", "SUBSCRIBE many", "MGET cold"),
        *("KVPAGEMGET absent", "KVPAGEMGET in blocks", "KVPAGEMGET absent beside blocks", "KVPAGEMGET cold"),
        *(
            "KVPAGEMEXISTS absent",
            "KVPAGEMEXISTS in blocks",
            "KVPAGEMSET new",
            "KVPAGEDEL whole",
            "SMEMBERS many blocks",
        ),
        *("KVPAGEPREFIX present, of one request", "KVBLOCKMGET absent, of as many requests", "KVPAGEPIN by its blocks"),
        *(
            "SMEMBERS many blocks",
            "SSCAN many blocks",
            "SCAN strings",
            "SCAN blocks",
            "KEYS blocks",
            "PING ten times as many words",
        ),
        *("ACL SETUSER short patterns", "ACL SETUSER commands", "MGET who has short patterns, a thousand keys"),
        *("KEYS who has short patterns, all keys", "SET when maxmemory was lowered, strings", "PUBLISH many listen"),
        "SET when quota was lowered, strings",
        *("CLIENT LIST many connections", "CLIENT TRACKING prefixes", "SLOWLOG GET a long log"),
        "KVBLOCKSET a block of 8,000 pages whose events somebody hears",
        *("KVMAP MGET present, long", "KVMAP BLOCKMGET as many blocks as it may name", "KVMAP RELEASE unknown"),
        *("KVMAP COPY as many blocks as it may name", "KVMAP COPY a block of 8,192 single pages, many times"),
    )
)
BY_DESIGN = {  # nobody may see half of it; how much that is at most is bounded
    "EXEC as many SETs as may be queued",
    "EXEC ten KEYS of all there is",
}
ENDS = {"QUIT as it is"}  # and with it the connection that is measured


def cost(turns: Turns, scene: Scene) -> Cost:
    """Return the cost of a command on a store with only the scene's values."""
    before = [[b"FLUSHALL"], *scene.before, *([[b"SAVE"]] if scene.cold else [])]
    with ExitStack() as stack:
        for _ in range(scene.crowd):
            turns.join(stack, b"".join(map(encode_command, scene.they_say)))
        ending = b"".join(map(encode_command, [[b"RESET"], *scene.after]))
        local = scene.command.startswith("kvmap|")
        return turns.cost(b"".join(map(encode_command, before)), encode_command(scene.words) + ending, local=local)


def is_bad(little: Cost, much: Cost, name: str) -> bool:
    """Return whether one turn took much of the work, or the work grew more than the request, which is four times as
    large.
    """
    holds = much.longest > max(AT_LEAST, much.total / 4) and name not in BY_DESIGN
    return holds or much.total > 8 * little.total + AT_LEAST


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])
@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
def test_turns_are_short_and_work_is_linear(cold: bool, all_of_them: bool, tmp_path: Path) -> None:
    options = ("--unixsocket", str(tmp_path / "socket"), *(("--maxmemory", "1mb") if cold else ()))
    with measured(*options, directory=tmp_path if cold else None) as turns:
        pairs = [
            (small, large)
            for small, large in zip(scenes(FEW), scenes(FOUR_TIMES), strict=False)
            if small.cold == cold and scene_name(small) not in ENDS and (all_of_them or scene_name(small) in SHORT)
        ]
        assert pairs
        bad = []
        for small, large in pairs:
            tried = ((cost(turns, small), cost(turns, large)) for _ in range(TRIES))
            if all(is_bad(*(found := both), scene_name(large)) for both in tried):
                bad.append((scene_name(large), *found))
        assert not bad, "\n".join(map(str, bad))


def test_every_command_is_asked_with_its_worst_arguments() -> None:
    """A new command of the table needs its worst arguments: see `benchmarks/worst.py`."""
    received = {name for name in TABLE if not name.endswith("|help") and not subcommands(name)} | {"command"}
    assert {scene.command for scene in scenes(10)} | NOT_ASKED.keys() >= received


def test_short_forms_have_their_values() -> None:
    assert {scene_name(scene) for scene in scenes(10)} >= SHORT | BY_DESIGN | ENDS


def test_a_garbage_collection_visits_few_objects() -> None:
    """Each takes 0.2 us. A KVPAGEDEL of 100,000 blocks had collections of 60,000 objects, in 11 ms."""
    with measured():
        young, collections, old = gc.get_threshold()
    assert young * (collections + 1) <= 12_000
    assert old >= 1_000_000  # the objects of all values are never visited together


def test_a_flush_in_a_transaction_is_freed_in_steps() -> None:
    """EXEC replies after the last step, so that the next command finds the memory free."""
    keys = 20_000
    values = [word for number in range(keys) for word in (b"key:%d" % number, b"value")]
    with measured() as turns:
        contents = turns.server.keyspace.contents
        steps = list[int]()

        def free() -> bool:
            """Note the number of removed entries, and free some of them."""
            steps.append(contents.flushed)
            return type(contents).free_flushed(contents)

        turns.on_loop(lambda: setattr(contents, "free_flushed", free))
        transaction = b"".join(map(encode_command, [[b"MULTI"], [b"FLUSHALL"], [b"SET", b"a", b"b"], [b"EXEC"]]))
        turns.cost(encode_command([b"MSET", *values]), transaction)
        assert contents.flushed == 0
        assert len(steps) >= keys // 1000
        assert all(before - after <= 1000 for before, after in pairwise(steps))
        assert len(turns.server.keyspace) == 1
