"""The commands of a gateway: the rows of the command table, with other functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from kvpage_server.commands.context import Client
from kvpage_server.commands.table.needs import nothing
from kvpage_server.commands.table.spec import TABLE, Spec
from kvpage_server.core import Argument, Command
from kvpage_server.gateway.overlap import OVERLAP, Overlap
from kvpage_server.gateway.pages import PagesBehind
from kvpage_server.gateway.strings import COUNTED, PASSED, StringsBehind
from kvpage_server.gateway.upstream import Upstream
from kvpage_server.resp.reply import Reply, ReplyError, Stream

_Steps = Callable[[Client, list[Argument]], Iterator[Reply]]
_OF_THE_STORE = frozenset({"page", "set", "string", "generic"})  # groups of commands about stored values
_ALSO = frozenset({"dbsize", "flushall", "flushdb", "client|tracking", "save", "bgsave", "watch"})
_TRANSACTION = frozenset({"multi", "exec", "discard"})


class Rows:
    """Gives a command its row on a gateway."""

    def __init__(self, upstream: Upstream) -> None:
        self._overlap = Overlap(upstream)
        pages, strings = PagesBehind(upstream, self._overlap), StringsBehind(upstream)
        done: dict[str, _Steps] = {
            name: getattr(pages, name) for name in TABLE if TABLE[name].group == "page" and hasattr(pages, name)
        }
        for names, steps in (
            (("get",), strings.get),
            (("mget",), strings.mget),
            (COUNTED, strings.counted),
            (PASSED, strings.passed),
        ):
            done |= {name: partial(steps, TABLE[name]) for name in names if name in TABLE}
        self._rows = {name: _row(TABLE[name], steps) for name, steps in done.items()}

    def __call__(self, client: Client, spec: Spec, words: Command) -> Spec:
        """Raises ReplyError for a command that a cluster can't do, Postponed for one that has to wait."""
        self._overlap.check(client, spec, words)
        return self.row(spec)

    def row(self, spec: Spec) -> Spec:
        """The row of a command for any client. Raises ReplyError."""
        if spec.name in _TRANSACTION:
            raise ReplyError(
                f"ERR '{spec.name}': a gateway has no transactions, since each node of a cluster works by itself"
            )
        row = self._rows.get(spec.name)
        if row is None and (spec.group in _OF_THE_STORE or spec.keys[0] or spec.name in _ALSO):
            shown = spec.name.replace("|", " ")
            raise ReplyError(f"ERR a gateway does not support '{shown}': each node of a cluster has a part of the keys")
        return row or spec


def _row(spec: Spec, steps: _Steps) -> Spec:
    """The command waits for the cluster, so it can't be part of a transaction. A long write is done as a whole. A block
    has other digests in a cluster than that of its body."""
    overlaps = spec.name in OVERLAP

    def handler(client: Client, args: list[Argument]) -> Stream:
        return Stream(None, steps(client, args), whole=spec.writes, aside=overlaps)

    return replace(
        spec,
        handler=handler,
        flags=spec.flags | {"no_multi"},
        stores=False,
        hashed=spec.hashed and not overlaps,
        needs=nothing,
        waits=False,
        parts=replace(spec.parts, joined="") if spec.parts else None,
    )
