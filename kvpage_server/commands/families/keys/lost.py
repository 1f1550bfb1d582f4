"""KVLOST: lists removed strings, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer_in, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.keys.keyspace import matcher
from kvpage_server.commands.registry import command
from kvpage_server.core import Argument
from kvpage_server.glob import literal
from kvpage_server.resp.reply import Reply, ReplyError, Stream
from kvpage_server.store.contents import OVER_QUOTA
from kvpage_server.store.lost_strings import Loss

MOST_LOST = 1000  # strings in a reply
_STEP = 1000  # keys that are compared before others have their turn


@command(
    "kvlost pattern [COUNT count]",
    flags="readonly filtered",
    complexity="O(1) for a key without wildcards, O(N) with N removals that are remembered",
    reply="map",
    summary="Lists removed strings, with the reasons.",
    group="string",
)
def kvlost(client: Client, args: list[Argument]) -> Reply:
    """A map. `strings` has a map for each removed string whose key matches, the latest first, at most COUNT (1 to
    1000, by default 100): its `key`, the `reason` (expired, evicted, over quota, deleted, overwritten or
    corrupt), `at`, when it was removed (unix milliseconds), and the `policy` or the pattern of the `quota` that evicted
    it. A pattern does not find keys of more than 512 bytes; such a key is found by its whole name.

    `since` says from when on the server remembers all removals (unix milliseconds): a restart forgets them, and the
    oldest are dropped when all take more than 16 MB.
    """
    pattern, count = plain(args[0]), _count(plain_all(args[1:]))
    keyspace, key = client.keyspace, literal(pattern)
    matches = matcher(pattern) if key is None else None

    def removed(some: Iterable[bytes]) -> Iterator[dict[str, Reply]]:
        for name in client.visible(some if matches is None else filter(matches, some)):
            loss = keyspace.lost.of(name)
            if loss is not None and keyspace.find(name) is None:
                yield _described(name, loss)

    def steps() -> Iterator[Reply]:
        names = [key] if key is not None else [*keyspace.lost.latest()]
        step, found = max(_STEP // client.cost_of_a_key, 1), list[dict[str, Reply]]()
        for start in range(0, len(names), step):
            found += removed(names[start : start + step])
            if len(found) >= count:
                break
            yield ()
        yield {"since": keyspace.lost.since, "strings": found[:count]}

    return Stream(None, steps())


def _count(words: list[bytes]) -> int:
    if not words:
        return 100
    if len(words) != 2 or words[0].upper() != b"COUNT":
        raise ReplyError(SYNTAX_ERROR)
    return integer_in("count", words[1], 1, MOST_LOST)


def _described(key: bytes, loss: Loss) -> dict[str, Reply]:
    by: dict[str, Reply] = {"quota" if loss.reason == OVER_QUOTA else "policy": loss.by} if loss.by else {}
    return {"key": key, "reason": loss.reason, "at": loss.at, **by}
