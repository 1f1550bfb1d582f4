"""Batches of pages: from words to stored pages, and from names to found pages. The specification.

A batch is read in parts of a bounded number of pages, and each part does one thing with all of its pages: it checks
them, enters them, or finds them. Decisions (the block of a page, the replacement of another kind of value, absent
pages) are left to the owner of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage, PageName, Word, page_name, page_shape
from kvpage_server.core.pieces import GROUPS, ROW_HEADS, TYPES, bit_of, row_of
from kvpage_server.core.python.slots import Arena, Slot
from kvpage_server.page import HEADER_SIZE, LAYOUT, MAGIC, VERSION, PageError, checksum

MOST_HASHED = 4 * 1024 * 1024  # bytes that are hashed or copied at once: some 0.5 ms

BlockName = tuple[bytes, int]  # request and page id


class Put(NamedTuple):
    """Result of inserting pages: the index where it ended, and the blocks of the pages, once for consecutive pages.

    `made` counts new blocks; `beside` counts those in requests that have other blocks. The pages take so many bytes
    more, of memory and of headers and bodies; and so many that expired were replaced.
    """

    stop: int
    blocks: list[Any]
    made: int
    beside: list[Any]
    grown: int
    stored: int
    replaced: int


class PageSet:
    """The pages of one block, as rows of bits (see `rows`), and its owner's fields.

    Costs: add, discard and `has` O(1); all else O(rows).
    """

    __slots__ = (
        "_rows",
        "extent",
        "footprint",
        "page",
        "pages",
        "req_id",
        "shape",
        "shape_known",
        "soonest",
        "version",
    )

    def __init__(self, req_id: bytes, page: int) -> None:
        self.req_id = req_id
        self.page = page
        self.pages = 0  # how many there are
        self.footprint = 0  # bytes of memory they occupy
        self.soonest = 0  # none expires before: unix milliseconds, 0 when none expires at all
        self.extent: Any = None  # the memory of a block that was stored whole
        self.shape: Any = None  # of the block, when it is complete and `shape_known`
        self.shape_known = False  # valid until a page is added or removed
        self.version = 0  # increases with each added or removed page
        self._rows: dict[int, int] = {}

    def add(self, layer: int, head: int, kv_type: int) -> None:
        """Have a page."""
        self.changed()
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        heads = self._rows.get(row, 0)
        if not heads & bit:
            self._rows[row] = heads | bit
            self.pages += 1

    def discard(self, layer: int, head: int, kv_type: int) -> None:
        """Have a page no more."""
        self.changed()
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        heads = self._rows.get(row, 0)
        if heads & bit:
            self._rows[row] = heads ^ bit
            self.pages -= 1

    def changed(self) -> None:
        """Note that a page was added, removed or replaced."""
        self.shape_known = False
        self.version += 1

    def has(self, layer: int, head: int, kv_type: int) -> bool:
        """Return whether there is a page."""
        return bool(self._rows.get(row_of(layer, head, kv_type), 0) & bit_of(head))

    def each_row(self) -> Iterator[tuple[int, int]]:
        """Yield every row that has heads, and these, in the order of a block's body, as they are now."""
        return iter([(row, heads) for row, heads in sorted(self._rows.items()) if heads])

    def outline(self) -> tuple[int, int, int]:
        """Return one more than the last layer, one more than the last head, and the planes, a bit each."""
        layers = heads_end = planes = 0
        for row, heads in self._rows.items():
            if heads:
                plane, group = divmod(row, GROUPS)
                layers = max(layers, plane // TYPES + 1)
                heads_end = max(heads_end, group * ROW_HEADS + heads.bit_length())
                planes |= 1 << plane % TYPES
        return layers, heads_end, planes

    @property
    def bits(self) -> dict[int, int]:
        """The heads of every row that has any, in the order of a block's body."""
        return dict(self.each_row())

    @bits.setter
    def bits(self, rows: Mapping[int, int]) -> None:
        self._rows = dict(rows)
        self.pages = sum(heads.bit_count() for heads in rows.values())
        self.changed()


class PageNames:
    """The names of pages, five words each: up to `most` of them, from the word `first` on.

    Raises BadPage for the first that breaks the contract.
    """

    width = NAME_WORDS

    def __init__(self, words: Sequence[Word], first: int, most: int) -> None:
        self._names: list[PageName] = []
        self._read(words, first, most, lambda words: self._names.append(page_name(words)))

    def _read(self, words: Sequence[Word], first: int, most: int, read: Callable[[Sequence[Word]], object]) -> None:
        stop = min(first + most * self.width, len(words))
        for start in range(first, stop, self.width):
            try:
                if read(words[start : start + self.width]) is False:
                    break
            except PageError as error:
                raise BadPage(str(error), (start - first) // self.width) from None

    def __len__(self) -> int:
        return len(self._names)

    @property
    def keys(self) -> list[bytes]:
        """Their keys."""
        return [name.key for name in self._names]

    def name(self, i: int) -> PageName:
        """Return one of them."""
        return self._names[i]

    def block(self, i: int) -> BlockName:
        """Return the block of one of them."""
        return self._names[i].req_id, self._names[i].page

    def blocks(self) -> list[BlockName]:
        """Their blocks, once for those in a row."""
        return [block for block, _ in self.runs(range(len(self)))]

    def runs(self, places: Sequence[int]) -> list[tuple[BlockName, list[int]]]:
        """Some of them, those of one block in a row together."""
        return [(block, [*some]) for block, some in groupby(places, self.block)]


class NewPages(PageNames):
    """Pages to be stored, ten words each, as for `PageNames`: their slots have headers.

    There are fewer of them when there is much to hash. `now` is in unix milliseconds. `strict`: a body has to fill its
    shape. `hashes`: headers have checksums.
    """

    width = PAGE_WORDS

    def __init__(
        self, words: Sequence[Word], first: int, most: int, arena: Arena, now: int, strict: bool, hashes: bool
    ) -> None:
        self._names = []
        self.slots: list[Slot] = []
        self._expires: list[int] = []
        self._left = MOST_HASHED
        self._read(words, first, most, lambda words: self._describe(words, arena, now, strict, hashes))

    def _describe(self, words: Sequence[Word], arena: Arena, now: int, strict: bool, hashes: bool) -> bool:
        """Read one; whether there is time for the next."""
        name, body = page_name(words), words[-1]
        size = body.size if type(body) is Slot else len(body)
        dtype, rows, columns, ttl = page_shape(words[NAME_WORDS:-1], size, strict=strict)
        if type(body) is not Slot:
            data, body = body, arena.allocate(size)
            body.body[:] = data
        digest = body.digest if hashes else 0
        if hashes and not digest:
            digest = checksum(body.body)
            self._left -= size
        body.digest = 0
        place = (rows, columns, name.layer, name.head, name.page, now, ttl, size, 0, digest)
        body.header[:] = LAYOUT.pack(MAGIC, VERSION, dtype, name.kv_type, 0, *place)
        self._names.append(name)
        self.slots.append(body)
        self._expires.append(now + ttl * 1000 if ttl else 0)
        return self._left > 0

    @classmethod
    def one(cls, name: PageName, slot: Slot, expires: int) -> NewPages:
        """Return a page whose slot has its header."""
        pages = cls.__new__(cls)
        pages._names, pages.slots, pages._expires = [name], [slot], [expires]
        return pages

    def expires(self, i: int) -> int:
        """When one of them expires: unix milliseconds, 0 for never."""
        return self._expires[i]

    def put(
        self,
        entries: dict[bytes, Any],
        requests: dict[bytes, dict[int, Any]],
        at: int,
        make: type[PageSet],
        fresh: list[bytes] | None,
        *,
        one_block: bool,
    ) -> Put:
        """Enter pages from `at` on, as long as they expire as the first does; those of `one_block`, if so asked.

        Blocks that are not there are made. Ends before a page whose key has another value than a page of its block in
        a slot, and before a block that is something else than a `make` with its pages by themselves. Keys that had no
        value are appended to `fresh`, if that is given.
        """
        block, name, expires = PageSet(b"", 0), None, self._expires[at]
        blocks: list[PageSet] = []
        beside: list[PageSet] = []
        made = grown = stored = replaced = 0
        i = at
        while i < len(self) and self._expires[i] == expires:
            slot, (key, req_id, layer, head, page, kv_type) = self.slots[i], self._names[i]
            old = entries.get(key)
            if old is not None and (type(old) is not Slot or type(old.unit) is not make):
                break
            if name != (req_id, page):
                if one_block and blocks:
                    break
                known = requests.get(req_id, {}).get(page)
                if known is not None and (type(known) is not make or known.extent is not None):
                    break
                if known is None:
                    known = requests.setdefault(req_id, {})[page] = make(req_id, page)
                    made += 1
                name, block = (req_id, page), known
                blocks.append(block)
                if requests[req_id].keys() & {page - 1, page + 1}:
                    beside.append(block)
            if old is None:
                block.add(layer, head, kv_type)
                size, footprint = HEADER_SIZE + slot.size, slot.footprint
                if fresh is not None:
                    fresh.append(key)
            else:
                size, footprint = slot.size - old.size, slot.footprint - old.footprint
                replaced += bool(old.expires)
                block.changed()
            grown += footprint
            stored += size
            block.footprint += footprint
            if expires and not 0 < block.soonest < expires:
                block.soonest = expires
            slot.unit, slot.expires = block, expires
            entries[key] = slot
            i += 1
        return Put(i, blocks, made, beside, grown, stored, replaced)


def look_up(
    entries: Mapping[bytes, Any], keys: Sequence[bytes], first: int, stop: int, most: int, now: int
) -> tuple[list[Slot | None], list[PageSet], list[int], list[int]]:
    """Find living pages in slots, from the key `first` to before `stop`, or until they are `most` bytes.

    Return the found values in order; their blocks, once for consecutive pages; and the keys without an entry, and with
    an entry of another kind, whose value is None.
    """
    found: list[Slot | None] = []
    blocks: list[PageSet] = []
    absent: list[int] = []
    others: list[int] = []
    last: object = None
    for i in range(first, min(stop, len(keys))):
        entry = entries.get(keys[i])
        if type(entry) is Slot and isinstance(entry.unit, PageSet) and not 0 < entry.expires <= now:
            found.append(entry)
            most -= entry.size
            if entry.unit is not last:
                last = entry.unit
                blocks.append(entry.unit)
            if most <= 0:
                break
        else:
            found.append(None)
            (absent if entry is None else others).append(i)
    return found, blocks, absent, others


def filled(found: list[Any], filler: Any) -> tuple[Any, ...]:
    """Return the items, with `filler` in place of each None."""
    return tuple([filler if thing is None else thing for thing in found])
