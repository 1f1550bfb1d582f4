"""Batches of pages: words of a command become stored pages, and names become found pages.

A batch is processed in parts of a bounded number of pages. Each function does one step for all pages of a part: it
parses and checks them, stores them, or finds them. The store processes the pages that need a decision: pages whose key
has another kind of value, pages whose block is an extent, and absent pages.
"""

from __future__ import annotations

import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage, PageName, Word, page_name, page_shape
from kvpage_server.core.pieces import GROUPS, ROW_HEADS, TYPES, bit_of, row_of
from kvpage_server.core.python.slots import Arena, Slot
from kvpage_server.page import HEADER_SIZE, LAYOUT, MAGIC, VERSION, PageError, checksum

MOST_HASHED = 4 * 1024 * 1024  # bytes that are hashed in one step, in about 0.5 ms

BlockName = tuple[bytes, int]  # request and page id


# The result of `NewPages.put`. A plain tuple, because a named one costs half a microsecond for each write.
Put = tuple[
    int,  # stop: index after the last stored page
    list[Any],  # blocks of the stored pages; consecutive pages of one block have one item
    int,  # made: number of blocks that were created
    list[Any],  # those of these blocks whose request has the block before or after them
    int,  # grown: growth of the memory of all pages, in bytes
    int,  # stored: growth of headers and bodies of all pages, in bytes
    int,  # replaced: number of replaced pages that had an expiry
    int,  # key_bytes: sum of the lengths of the keys that had no value before
    int,  # name_bytes: sum of the lengths of the request ids of created blocks
]


class PageSet:
    """The set of pages of one block, as bits in rows (see `core.pieces`), and fields that the index stores for the
    block.

    Costs: O(1) for `add`, `discard` and `has`; O(rows log rows) for the other methods.
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
        self.pages = 0  # number of pages
        self.footprint = 0  # bytes of memory that the pages take
        self.soonest = 0  # no page expires before this time, in unix milliseconds; 0 if none has an expiry
        self.extent: Any = None  # the extent; None for single pages
        self.shape: Any = None  # the shape, if `shape_known` and the block is complete
        self.shape_known = False  # whether `shape` is up to date; False after each change of a page
        self.version = 0  # number of changes of pages so far
        self._rows: dict[int, int] = {}  # bits by row; a row may be 0

    def add(self, layer: int, head: int, kv_type: int) -> None:
        """Add a page if the set does not have it. Count a change in any case."""
        self.changed()
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        heads = self._rows.get(row, 0)
        if not heads & bit:
            self._rows[row] = heads | bit
            self.pages += 1

    def discard(self, layer: int, head: int, kv_type: int) -> None:
        """Remove a page if the set has it. Count a change in any case."""
        self.changed()
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        heads = self._rows.get(row, 0)
        if heads & bit:
            self._rows[row] = heads ^ bit
            self.pages -= 1

    def changed(self) -> None:
        """Count a change: a page was added, removed or replaced."""
        self.shape_known = False
        self.version += 1

    def has(self, layer: int, head: int, kv_type: int) -> bool:
        """Return whether the set has a page."""
        return bool(self._rows.get(row_of(layer, head, kv_type), 0) & bit_of(head))

    def each_row(self) -> Iterator[tuple[int, int]]:
        """Return (row, bits) of every row with pages, in the order of a block's body.

        Changes of the set after the call have no effect.
        """
        return iter([(row, heads) for row, heads in sorted(self._rows.items()) if heads])

    def outline(self) -> tuple[int, int, int]:
        """Return the last layer plus one, the last head plus one, and a bitmap of the planes (bit `kv_type`)."""
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
        """The bits of every row with pages, by row, in the order of a block's body."""
        return dict(self.each_row())

    @bits.setter
    def bits(self, rows: Mapping[int, int]) -> None:
        self._rows = dict(rows)
        self.pages = sum(heads.bit_count() for heads in rows.values())
        self.changed()


class PageNames:
    """The names of up to `most` pages of a batch, parsed from five words each, from word `first` on.

    The constructor raises BadPage for the first page with an invalid word.
    """

    width = NAME_WORDS  # words of a page

    def __init__(self, words: Sequence[Word], first: int, most: int) -> None:
        self._names: list[PageName] = []
        self._read(words, first, most, lambda words: self._names.append(page_name(words)))

    def _read(self, words: Sequence[Word], first: int, most: int, read: Callable[[Sequence[Word]], object]) -> None:
        """Call `read` with the words of each page, until it returns False. Raise BadPage if it raises PageError."""
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
        """The key of each page."""
        return [name.key for name in self._names]

    def name(self, i: int) -> PageName:
        """Return the key of page `i` with its parts."""
        return self._names[i]

    def block(self, i: int) -> BlockName:
        """Return the block of page `i`."""
        return self._names[i].req_id, self._names[i].page

    def blocks(self) -> list[BlockName]:
        """Return the blocks of the pages as (req_id, page id); consecutive pages of one block have one item."""
        return [block for block, _ in self.runs(range(len(self)))]

    def runs(self, places: Sequence[int]) -> list[tuple[BlockName, list[int]]]:
        """Group indexes of pages. Return (block, indexes) for each run of items of `places` with pages of one block."""
        return [(block, [*some]) for block, some in groupby(places, self.block)]


class NewPages(PageNames):
    """Up to `most` pages to store, parsed from ten words each, from word `first` on, with their headers and bodies in
    slots.

    The batch ends early after MOST_HASHED bytes were hashed. `now` is the time of creation in unix milliseconds. With
    `strict`, a body must have exactly the bytes of its shape. With `hashes`, headers get checksums. The constructor
    raises BadPage for the first page with an invalid word, MemoryError if there is no memory for the slot of a short
    body.
    """

    width = PAGE_WORDS  # words of a page

    def __init__(
        self, words: Sequence[Word], first: int, most: int, arena: Arena, now: int, strict: bool, hashes: bool
    ) -> None:
        self._names = []
        self.slots: list[Slot] = []
        self._expires: list[int] = []
        self._left = MOST_HASHED
        self._read(words, first, most, lambda words: self._describe(words, arena, now, strict, hashes))

    def _describe(self, words: Sequence[Word], arena: Arena, now: int, strict: bool, hashes: bool) -> bool:
        """Parse the words of a page, and write its header into its slot.

        Return False after MOST_HASHED bytes were hashed.
        """
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
        """Return a batch of one page. `slot` has its header; `expires` is in unix milliseconds, 0 for never."""
        pages = cls.__new__(cls)
        pages._names, pages.slots, pages._expires = [name], [slot], [expires]
        return pages

    def expires(self, i: int) -> int:
        """Return the expiry of page `i` in unix milliseconds, 0 for never."""
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
        """Store consecutive pages from index `at` on that have the same expiry, until one needs a decision of the
        store.

        `entries` are the values by key. `requests` are the blocks by request and page id; missing ones are created with
        `make`. Keys that had no value are appended to `fresh`, unless that is None.

        A page needs a decision if its key has another value than a single page in memory, or if its block is not of
        type `make` or is an extent. With `one_block`, the pages of a second block are not stored either. Return `Put`,
        whose `stop` is the index of the first page that was not stored; that may be page `at`. O(1) for each page.

        Raises MemoryError if the system has no memory for the index. Then no page is stored, and no block created.
        """
        block, name, expires = PageSet(b"", 0), None, self._expires[at]
        blocks: list[PageSet] = []
        made: list[PageSet] = []
        beside: list[PageSet] = []
        olds: list[tuple[Slot | None, int]] = []
        grown = stored = replaced = key_bytes = name_bytes = 0
        i = at
        try:
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
                        known = make(req_id, page)
                        made.append(known)
                        requests.setdefault(req_id, {})[page] = known
                        name_bytes += len(req_id)
                    name, block = (req_id, page), known
                    blocks.append(block)
                    if requests[req_id].keys() & {page - 1, page + 1}:
                        beside.append(block)
                olds.append((old, block.footprint))
                slot.unit, slot.expires = block, expires
                if old is None:
                    key_bytes += len(key)
                    size, footprint = HEADER_SIZE + slot.size, slot.footprint
                else:
                    size, footprint = slot.size - old.size, slot.footprint - old.footprint
                    replaced += bool(old.expires)
                    block.changed()
                grown += footprint
                stored += size
                block.footprint += footprint
                if old is None:
                    block.add(layer, head, kv_type)
                    if fresh is not None:
                        fresh.append(key)
                if expires and not 0 < block.soonest < expires:
                    block.soonest = expires
                entries[key] = slot
                i += 1
            return i, blocks, len(made), beside, grown, stored, replaced, key_bytes, name_bytes
        except MemoryError:
            self._take_back(entries, requests, at, olds, made)
            raise

    def _take_back(
        self,
        entries: dict[bytes, Any],
        requests: dict[bytes, dict[int, Any]],
        at: int,
        olds: list[tuple[Slot | None, int]],
        made: list[PageSet],
    ) -> None:
        """Undo the changes of a `put` that failed. `olds` has the value that each page from index `at` on was to
        replace, or None, and the footprint of its block before; `made` has the created blocks.
        """
        for i in reversed(range(at, at + len(olds))):
            block, (old, footprint), name = cast(PageSet, self.slots[i].unit), olds[i - at], self._names[i]
            block.footprint = footprint
            if old is None:
                entries.pop(name.key, None)
                block.discard(name.layer, name.head, name.kv_type)
            else:
                entries[name.key] = old
        for block in made:
            request = requests.get(block.req_id)
            if request is not None:
                request.pop(block.page, None)
                if not request:
                    del requests[block.req_id]


def look_up(
    entries: Mapping[bytes, Any], keys: Sequence[bytes], first: int, stop: int, most: int, now: int
) -> tuple[list[Slot | None], list[PageSet], list[int], list[int]]:
    """Find single pages in memory that have not expired at `now`, in unix milliseconds.

    `entries` are the values by key. The search covers the keys from index `first` to before `stop`, but ends after the
    page that reaches `most` bytes in total. Return four lists: the slot of each key, or None; the blocks of these
    slots, where consecutive slots of one block have one item; the indexes of keys without a value; and the indexes of
    keys with another value, including expired pages. O(1) for each key.
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
    """Return the items as a tuple, with `filler` in place of each None."""
    return tuple([filler if thing is None else thing for thing in found])


# -- changes of blocks -------------------------------------------------------------------------------------------------

_REMOVED, _ADDED, _CLEARED = range(3)
_RECORD = struct.Struct("<BHI")  # before the request id: one of these, the length of the request id, the page id
_HASH = re.compile(rb"[0-9a-f]{16,}")
_FLAGS = {False: _REMOVED, True: _ADDED}


class BlockChanges:
    """Blocks that were added and removed, in their order, until a reader takes them: the queue of KV events.

    If more than `most` changes wait, the oldest are dropped, and counted in `dropped`. Each time the queue is not empty
    any more, `wake` is called, in the thread that adds. Thread-safe. Costs: O(1) for each change.
    """

    def __init__(self, most: int, wake: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._records: deque[bytes] = deque()
        self._most = most
        self._wake = wake
        self.dropped = 0
        self.nbytes = 0  # of the records

    def __len__(self) -> int:
        return len(self._records)

    def note(self, req_id: bytes, page: int, was_added: bool) -> None:
        """Append one block that was added, or removed."""
        self._append([_RECORD.pack(_FLAGS[was_added], len(req_id), page) + req_id])

    def add_all(self, blocks: Sequence[PageSet]) -> None:
        """Append blocks that were added."""
        self._append([_RECORD.pack(_ADDED, len(block.req_id), block.page) + block.req_id for block in blocks])

    def clear(self) -> None:
        """Append that all blocks were removed."""
        self._append([_RECORD.pack(_CLEARED, 0, 0)])

    def take(self, most: int) -> tuple[int, bytes]:
        """Remove the oldest changes, at most `most`. Return their number, and their records for `changed_blocks`."""
        with self._lock:
            some = [self._records.popleft() for _ in range(min(most, len(self._records)))]
            records = b"".join(some)
            self.nbytes -= len(records)
        return len(some), records

    def _append(self, records: list[bytes]) -> None:
        with self._lock:
            was_empty = not self._records
            for record in records:
                self._records.append(record)
                self.nbytes += len(record)
                if len(self._records) > self._most:
                    self.nbytes -= len(self._records.popleft())
                    self.dropped += 1
            is_awake = not was_empty or not self._records
        if not is_awake:
            self._wake()


HashedBlocks = tuple[bytes, int, bytes, bytes]  # name before the hash, page id, removed and added hashes


def changed_blocks(records: bytes) -> tuple[bool, list[HashedBlocks], dict[BlockName, bool]]:
    """Return the state of each block after the last of its changes. `records` are those of `BlockChanges.take`.

    The result has three parts: whether all blocks were removed, before the changes of the other parts; the blocks whose
    request id ends with a hash, by the name before the hash and its dot and by page id; and whether each other block
    was added. A hash has 16 hexadecimal digits or more, of which the last 16 are used. The removed and the added hashes
    are arrays of MessagePack, or nothing if there are none. Raise ValueError if `records` end within one.
    """
    was_cleared = False
    groups: dict[tuple[bytes, int], dict[bytes, bool]] = {}
    others: dict[BlockName, bool] = {}
    at = 0
    while at < len(records):
        begin = at + _RECORD.size
        flag, size, page = _RECORD.unpack_from(records, at) if begin <= len(records) else (0, len(records), 0)
        at = begin + size
        if at > len(records):
            raise ValueError("the records of changes end within one")
        req_id = records[begin:at]
        if flag == _CLEARED:
            was_cleared, groups, others = True, {}, {}
            continue
        space, _, digits = req_id.rpartition(b".")
        if _HASH.fullmatch(digits):
            groups.setdefault((space, page), {})[digits[-16:]] = flag == _ADDED
        else:
            others[req_id, page] = flag == _ADDED
    found = []
    for (space, page), blocks in groups.items():
        gone, new = ([digits for digits, was_added in blocks.items() if was_added == flag] for flag in (False, True))
        found.append((space, page, _packed(gone), _packed(new)))
    return was_cleared, found, others


def _packed(hashes: list[bytes]) -> bytes:
    """Return an array of MessagePack with 64-bit integers, of which the hexadecimal digits are given."""
    numbers = b"".join([b"\xcf" + bytes.fromhex(digits.decode()) for digits in hashes])
    return b"\xdd" + len(hashes).to_bytes(4, "big") + numbers if hashes else b""
