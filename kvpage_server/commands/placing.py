"""Which keys belong to this server, if several servers share a map of slots, and the replies for keys that do not.

If a new map gives a key to another server, clients ask for it there. It is not deleted here, but left to eviction, and
counted until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kvpage_server.commands.table.spec import Spec
from kvpage_server.core import Argument
from kvpage_server.resp.reply import ReplyError
from kvpage_server.slot_map import MappedNode, StaticMap, read_map, slot_of
from kvpage_server.store.listing import Listing

_COUNTED = 1024  # keys in a step


class Placing:
    """The map in use, and which of its nodes this server is."""

    def __init__(self, path: Path, name: str) -> None:
        """`name` is this node's id or address. Raises MapError, OSError."""
        self._path, self._name = path, name
        self.map = read_map(path)
        self.me: MappedNode = self.map.node(name)
        self.keys_elsewhere = 0  # keys that lie here and belong elsewhere, when they were counted last

    def __str__(self) -> str:
        return f"version {self.map.version} of the map {self._path} ({len(self.map.nodes)} nodes)"

    def read_again(self) -> tuple[StaticMap, MappedNode] | None:
        """The map in the file and this server's node in it; None if that map is in use already. `use` puts it to use.
        Raises MapError, OSError."""
        found = read_map(self._path)
        return (found, found.node(self._name)) if self.map.follow(found) else None

    def use(self, new: StaticMap, me: MappedNode) -> None:
        """Use another map from now on."""
        self.map, self.me = new, me

    def slot(self, spec: Spec, args: Sequence[Argument]) -> int | None:
        """The slot of a command's keys; None if it has no keys. Raises ReplyError if they have several slots."""
        slots = set[int | None]()
        for key, _ in spec.uses_of(args):
            slots.add(slot_of(key))
            if spec.group == "page" and not _is_tagged(key):
                raise ReplyError(
                    "ERR where slots have servers, a request's pages are together only if its name has braces, "
                    f"such as {{chat-7}}: got '{key.split(b':')[1].decode(errors='replace'):.64}'"
                )
        return _only(slots)

    def check(self, slots: Collection[int | None]) -> None:
        """Raises ReplyError if the keys have several slots, or belong to another server."""
        slot = _only(slots)
        if slot is not None and (owner := self.map.owners[slot]) is not self.me:
            raise ReplyError(f"MOVED {slot} {owner.host}:{owner.port}")

    def count(self, listing: Listing) -> Iterator[None]:
        """Steps that count the keys that belong elsewhere."""
        owners, found, looked = self.map.owners, 0, 0
        for place in listing.places():
            keys = listing.living([place])
            found += sum(owners[slot_of(key)] is not self.me for key in keys)
            looked += 1 + len(keys)
            if looked >= _COUNTED:
                looked = 0
                yield
        self.keys_elsewhere = found


def _only(slots: Collection[int | None]) -> int | None:
    if len(slots) > 1:
        raise ReplyError("CROSSSLOT Keys in request don't hash to the same slot")
    return next(iter(slots), None)


def _is_tagged(key: bytes) -> bool:
    """Whether all keys of a page key's request have the same slot."""
    req_id = key.split(b":")[1]
    start = req_id.find(b"{") + 1
    return start > 0 and req_id.find(b"}", start) > start
