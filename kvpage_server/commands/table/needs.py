"""What has to be in memory for a command to run, when values may be on disk only: `needs=` in its row of the table.

Without `needs=`, a command needs everything that its arguments name: the values of its keys, the blocks that it writes
pages into, all blocks of its requests. So a new command may be slower than necessary, but never wrong. The result must
not depend on what is stored. Then the needs of all commands of a transaction can be found before the first one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from kvpage_server.commands.arguments import plain
from kvpage_server.commands.table.keys import READ, WRITE, KeyPrefix, Use
from kvpage_server.core import Argument
from kvpage_server.store.disk.needed import Needed
from kvpage_server.store.disk.tier import DiskTier


class Named(Protocol):
    """The part of a table row that is used here."""

    def uses_of(self, args: Sequence[Argument]) -> Iterator[Use]:
        """The keys that arguments name, and what is done to them."""


Needs = Callable[[DiskTier, Named, Sequence[Argument]], Iterable[Needed]]

_LONGEST_PAGE = 10  # digits of a page id


def everything(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Everything that the arguments name."""
    keys = [key for key, _ in spec.uses_of(args)]
    named = [key for key in keys if not isinstance(key, KeyPrefix)]
    requests = [key.split(b":")[1] for key in keys if isinstance(key, KeyPrefix)]
    blocks = ((req_id, block.page) for req_id in requests for block in tiered.needs.index.of(req_id))
    return chain(tiered.needs.values_of(named), tiered.needs.extents_of(named), tiered.needs.blocks_at(blocks))


def nothing(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Nothing: the command needs only the index, or replaces or removes values without reading them."""
    return ()


def values(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """The values of the keys."""
    return tiered.needs.values_of([key for key, _ in spec.uses_of(args)])


def extents(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """The blocks, stored as a whole, that have the keys' pages. The command writes into them."""
    return tiered.needs.extents_of([key for key, _ in spec.uses_of(args)])


def as_used(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Values or extents, depending on whether the arguments read or write the keys."""
    uses = list(spec.uses_of(args))
    read = tiered.needs.values_of(key for key, access in uses if access & READ)
    return chain(read, tiered.needs.extents_of(key for key, access in uses if access & WRITE))


def extents_of_pages(first: int, step: int = 0) -> Needs:
    """Extents for pages named by `req layer head page type`: one at `first`, or one every `step` from there on."""

    def needs(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
        stop = len(args) if step else first + 1
        reqs, pages = args[first : stop : step or 1], args[first + 3 : stop + 3 : step or 1]
        return tiered.needs.extents_at(dict.fromkeys(_names(reqs, pages)))

    return needs


def blocks(first: int) -> Needs:
    """The blocks that pairs of a request and a page id name, from `first` on."""

    def needs(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
        return tiered.needs.blocks_at(dict.fromkeys(_names(args[first::2], args[first + 1 :: 2])))

    return needs


def blocks_of_request(tiered: DiskTier, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """The blocks that `req [page ...]` names."""
    if len(args) == 1:
        return everything(tiered, spec, args)
    return tiered.needs.blocks_at(dict.fromkeys(_names([args[0]] * (len(args) - 1), args[1:])))


def _names(req_ids: Sequence[Argument], pages: Sequence[Argument]) -> Iterator[tuple[bytes, int]]:
    """The blocks whose names are well formed. The command itself reports the others."""
    for req_id, page in zip(map(plain, req_ids), map(plain, pages), strict=False):
        if page.isdigit() and len(page) <= _LONGEST_PAGE:
            yield req_id, int(page)
