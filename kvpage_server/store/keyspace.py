"""The keyspace: pages and plain strings under one set of keys, as the commands use it.

Its parts:

    contents        every key and its value; it notifies the other parts of changes
      catalogue     keys and their entries, blocks by request and page, the order of scans
      eviction_order  the order of eviction: the policy, and one policy per quota
      expiry_order  keys by the second of their expiry
      leases        units that are protected from eviction
      ghosts        records of removed pages, with reasons
      lost          records of removed strings, with reasons
    memory          the accounts of memory and of the index
    disk            the account of the disk; without a disk it has no limit
    quotas          the accounts of quotas
    protection      the limits of leases, pins and lifetimes
    reader          lookups; counts uses, hits and misses
    listing         lists of keys and requests
    needs           lookups of the values that a command needs in memory
    tier            the disk below memory, if there is one

`Contents.expire` removes an expired key. It is called by `sweep`, and by every lookup that finds an expired key first.

**Many pages per call.** One call of the core stores or finds all pages of a batch that need no decision, and another
call passes their blocks to the policy. Plain Python stores the other pages one by one: if a listener exists, if a
string has the key, or if the block is an extent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap, tee
from operator import attrgetter
from typing import NamedTuple, TypeVar

from kvpage_server.core import NewPages
from kvpage_server.core.pieces import END, Piece, frame
from kvpage_server.page import HEADER_SIZE, MAX_BLOCK_PAGES, BlockShape, DType, Plane, header_fields, unix_ms
from kvpage_server.store.contents import BlockGrowth, Contents, Source, check_split, footprint_of
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.disk_full import DiskAccount
from kvpage_server.store.disk.fetching import BorrowedReads
from kvpage_server.store.disk.prefetch import Prefetcher
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.store.disk.usage import Stored
from kvpage_server.store.evict import (
    Account,
    MemoryAccount,
    OverLimit,
    PendingWrite,
    QuotaAccounts,
    Reservation,
    Sizes,
    in_room,
    units_of,
)
from kvpage_server.store.eviction.leases import NO_LIMIT, SHARE, Bytes
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import counted
from kvpage_server.store.memory.entry import Entry, Page, Text, has_bytes, is_page
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, OnDisk
from kvpage_server.store.reading import Listing, Reader
from kvpage_server.system.text import monotonic_ms

# -- protection --------------------------------------------------------------------------------------------------------
#
# Limits of leases, pins and lifetimes together: half of memory, half of the disk's space for values, and half of the
# index. A tenant's lifetimes have a share of that.
#
# Protected values cannot be evicted, so a part of memory and a part of the disk must stay unprotected. A limit on
# memory alone is not enough: right after a start all values are on disk only, so all of them could be protected, and
# the disk would refuse every write. Protected units of a quota may take half of it, other protected units half of the
# memory outside quotas.

EXISTS_LEASE_MS = 10_000  # milliseconds of the lease after a reply that a key exists


class Protection:
    """Leases, pins and lifetimes of units, within the limits above."""

    def __init__(self, contents: Contents, memory: MemoryAccount, disk: DiskAccount) -> None:
        self._contents = contents
        self._memory = memory
        self._disk = disk
        contents.leases.most = self.most

    def lease_after_exists(self, key: bytes, entry: Entry) -> None:
        """Lease a string for EXISTS_LEASE_MS, because a reply said that it exists, and the client will read it.

        An LMCache client that gets 1 from EXISTS, and then a miss from GET, waits for ever. Pages get no lease, because
        it would limit the growth of their block; nor do short strings.
        """
        if (self._memory.limit or self._disk.limit) and not (isinstance(entry, Text) or is_page(entry)):
            self.lease(key, EXISTS_LEASE_MS)

    def lease(self, unit: Unit, milliseconds: int) -> bool:
        """Lease a unit for `milliseconds`. Return False if protected units would exceed their limit."""
        until = monotonic_ms() + milliseconds
        return self._contents.leases.lease(unit, self.size_of(unit), until, self.most(unit))

    def pin(self, unit: Unit) -> bool:
        """Protect a unit until it is unpinned. Return False if protected units would exceed their limit."""
        return self._contents.leases.pin(unit, self.size_of(unit), self.most(unit))

    def keep(self, unit: Unit, seconds: int, tenant: bytes, tenants: int) -> str:
        """Give a unit a lifetime of `seconds`, which counts for a tenant, one of `tenants` with equal shares. If the
        tenant has given the unit a longer one, this begins anew. Return "", or the limit that would be exceeded:
        "limit" of all protected units, or "share".
        """
        leases = self._contents.leases
        if (known := leases.of(unit)).kept_until and known.tenant == tenant:
            seconds = max(seconds, known.seconds)
        size, most = self.size_of(unit), self.most(unit)
        if unit not in leases and not leases.have_room(unit, size, most):
            return "limit"
        share = Bytes(*(limit // tenants for limit in most))
        end = monotonic_ms() + 1000 * seconds, unix_ms() + 1000 * seconds
        return "" if leases.keep(unit, size, seconds, end, tenant, share) else "share"

    def restore(self, unit: Unit, seconds: int, tenant: bytes, ends: int) -> int:
        """Give a unit its lifetime of before a restart, also if it exceeds a limit that is lower now. Return its end.

        It ends at `ends`, in unix milliseconds, but after its whole length at the latest: the wall clock may have been
        set back.
        """
        now = unix_ms()
        ends = min(ends, now + 1000 * seconds)
        until = monotonic_ms() + max(ends - now, 0)
        self._contents.leases.keep(unit, self.size_of(unit), seconds, (until, ends), tenant, NO_LIMIT)
        return ends

    def size_of(self, unit: Unit) -> Bytes:
        """Return the size of a unit. On disk it is at least the size in memory, since it may not be written yet."""
        if isinstance(unit, Block):
            memory = unit.footprint
        else:
            memory = footprint_of(unit, self._contents.catalogue.entries[unit])
        costs = self._contents.catalogue.costs
        return Bytes(memory, max(memory, self._disk.size_of(unit)), costs.of_unit(unit))

    def most(self, unit: Unit) -> Bytes:
        """Return the bytes that leases, pins and lifetimes may protect in a unit's quota, or outside all quotas."""
        disk = self._disk.limit
        return Bytes(
            self._share(unit, self._memory.limit),
            self._share(unit, disk) if disk else sys.maxsize,
            self._share(unit, self._memory.index.limit),
        )

    def _share(self, unit: Unit, room: int) -> int:
        """Return the part of a limit `room` that may be protected in a unit's quota, or outside all quotas.

        `room` is in bytes, 0 for no limit. Quotas that exceed `room` together are scaled down to it.
        """
        quotas = self._contents.eviction_order.quotas
        quota, promised = self._contents.eviction_order.limit_of(unit), quotas.limits
        if not room:
            return int(quota.limit * SHARE) if quota is not None else sys.maxsize
        if quota is not None:
            return int(quota.limit * min(1, room / promised) * SHARE)
        return int((room - min(promised, room)) * SHARE)

    # -- growth of protected blocks --------------------------------------------------------------------------------

    def protects_any(self, pages: NewPages) -> bool:
        """Return whether a block of some of these pages is protected."""
        leases, index = self._contents.leases.by_unit, self._contents.index
        return any(index.block(*name) in leases for name in pages.blocks())

    def checked(self, sizes: Iterable[Sizes], parts: Iterable[Sequence[PendingWrite]]) -> Iterator[Sizes]:
        """Yield the sizes of each part of a batch. At the end, raise OverLimit if the new pages let protected blocks
        grow above their limit.
        """
        contents, growth, had = self._contents, Counter[Block](), dict[bytes, int]()
        for of_part, part in zip(sizes, parts, strict=True):
            for key, size, name in part:
                block = contents.index.block(*name) if name is not None else None
                if block is not None and block in contents.leases:
                    if key not in had:
                        had[key] = counted(key, contents.catalogue.get(key), as_page=True)
                    growth[block] += size - had[key]
                    had[key] = size  # a batch may name a page twice
            yield of_part
        self._admit_growth(growth)

    def admit_block(self, req_id: bytes, page: int, size: int) -> None:
        """Raise OverLimit if a new extent of `size` bytes lets its block, if protected, grow above the limit."""
        block = self._contents.index.block(req_id, page)
        if block is not None and block in self._contents.leases:
            if block.extent is not None:
                had = block.extent.slot.size
            elif self._contents.any_on_disk:  # a page on disk only has no footprint
                had = sum(self._contents.catalogue.entries[key].size for key in block.page_keys())
            else:
                had = block.footprint
            self._admit_growth({block: size - had})

    def _admit_growth(self, growth: Mapping[Block, int]) -> None:
        leases, now, together = self._contents.leases, monotonic_ms(), Counter[object]()
        for block, size in growth.items():
            if size > 0 and leases.spares(block, now):
                quota = self._contents.eviction_order.limit_of(block)
                together[quota] += size
                account = _ProtectedMemory(self._contents, self, block)
                if account.refuses(together[quota]):
                    raise OverLimit(account)


class _ProtectedMemory(Account):
    """The memory that leases, pins and lifetimes protect in a block's quota, or outside all quotas."""

    def __init__(self, contents: Contents, protection: Protection, block: Block) -> None:
        super().__init__(contents)
        self._protection = protection
        self._block = block

    @property
    def limit(self) -> int:
        return self._protection.most(self._block).memory

    most = limit

    @property
    def used(self) -> int:
        return self.contents.leases.protected_bytes(self._block).memory

    def sources(self, _: int) -> Iterator[Source]:
        return iter(())

    def refusal(self, _: int) -> str:
        return f"leased, pinned and kept values take more than {self.limit} bytes, and the block is one of them"


_SIZE = attrgetter("size")


class Keyspace:
    """Every key and value. `maxmemory` and `maxdisk` are in bytes, 0 for no limit. With `shared`, other processes can
    map the memory of values. See the module.
    """

    def __init__(
        self,
        *,
        maxmemory: int = 0,
        policy: str = "allkeys-prefix",
        disk: Disk | None = None,
        maxdisk: int = 0,
        shared: bool = False,
    ) -> None:
        contents = self.contents = Contents(policy, shared=shared)
        self.memory = MemoryAccount(contents, maxmemory)
        self.quotas = QuotaAccounts(contents, self.memory)
        self.listing = Listing(contents)
        self.needs = Prefetcher(contents)
        self.tier = DiskTier(disk, contents, self.memory, maxdisk) if disk is not None else None
        self.disk = self.tier.account if self.tier is not None else DiskAccount(contents, Stored(0))
        self.protection = Protection(contents, self.memory, self.disk)
        self.reader = Reader(contents)
        self._catalogue = contents.catalogue

        self.arena, self.index, self.eviction_order = contents.arena, contents.index, contents.eviction_order
        self.leases, self.ghosts, self.counters = contents.leases, contents.ghosts, contents.counters
        self.lost = contents.lost
        contents.admit_split = lambda block: self._admit_split(block, self.disk.sizes_of_split(block))

    def __len__(self) -> int:
        return len(self._catalogue)

    # -- before something is stored --------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """Return whether a limit other than maxmemory applies."""
        return self.eviction_order.has_quotas or self.disk.stored.maxdisk > 0

    def admit(self, coming: Iterable[PendingWrite]) -> None:
        """Evict values until the disk and the quotas have space for new values.

        Raise OverLimit if the policy may not evict enough, MoreRoom if the write has to be admitted again in its next
        step; the new values must not be stored then.
        """
        writes = [*coming]
        bound = 3 * sum(value.size for value in writes)  # a short string takes three times its bytes on disk
        if (
            self.leases.by_unit
            or self.eviction_order.has_quotas
            or self._catalogue.in_extents
            or not self.disk.has_space(len(writes), bound)
        ):
            self._admit(writes)

    def _admit(self, writes: list[PendingWrite]) -> None:
        """Evict values until the disk and the quotas have space for new values, as `admit` does. Memory is not
        checked.
        """
        extended = set[Account]()
        Reservation(self._sizes([writes], extended), extended).make_room(lambda: units_of(self.contents, writes))

    def _sizes(self, parts: Iterable[list[PendingWrite]], extended: set[Account]) -> Iterator[Sizes]:
        """Yield the sizes of each part of a batch. Add the accounts of units that the batch extends to `extended`. At
        the end, raise OverLimit if protected blocks would exceed their limit.
        """
        on_disk, in_quotas, protected = tee(parts, 3)
        sizes = self.disk.sizes(on_disk) if self.disk.stored.maxdisk else (Sizes() for _ in on_disk)
        if self.eviction_order.has_quotas:
            sizes = self.quotas.add_sizes(sizes, in_quotas, extended)
        return self.protection.checked(sizes, protected) if self.leases.by_unit else sizes

    def admit_batch(self, pages: NewPages) -> None:
        """Evict values until disk and quotas have space for pages that are stored in this step. Memory was checked
        before the command, by `free_memory` of the dispatcher. `admit_in_steps` is for batches of several steps.

        Raise OverLimit and MoreRoom as `admit`, and TooManyPages if a block would get too many pages.
        """
        slots, disk = pages.slots, self.disk
        if self.contents.has_large_blocks:
            BlockGrowth(self.contents).add(pages)
        protected = self.leases.by_unit and self.protection.protects_any(pages)
        if not (protected or self.eviction_order.has_quotas):
            if not disk.stored.maxdisk:
                return
            size = slots[0].size if len(slots) == 1 else sum(map(_SIZE, slots))
            splits = self._catalogue.in_extents and self.has_extents(pages)
            if not splits and disk.has_space(len(slots), size):
                return
        self._admit(self._pending(pages))

    def has_extents(self, pages: NewPages) -> bool:
        """Return whether some of these pages belong to blocks that were stored whole, which have to be split."""
        if not self._catalogue.in_extents:
            return False
        blocks = (self.index.block(*name) for name in pages.blocks())
        return any(block is not None and block.extent is not None for block in blocks)

    def _pending(self, pages: NewPages) -> list[PendingWrite]:
        runs = pages.runs(range(len(pages)))
        return [
            PendingWrite(pages.keys[i], HEADER_SIZE + pages.slots[i].size, block)
            for block, places in runs
            for i in places
        ]

    def admit_in_steps(self, batches: Collection[NewPages]) -> Generator[tuple[()], None, Reservation]:
        """Evict values until disk and quotas have space for all pages of some batches, each of which is stored in a
        step of its own later. The sizes of each batch are computed in a step.

        Return the reservation of the space, with a part for each batch. Raise OverLimit if the policy may not evict
        enough; none of the pages must be stored then.
        """
        if not (self.is_limited or self.leases.by_unit):
            return Reservation()
        if not self.eviction_order.has_quotas:
            most = yield from self._counted(batches)
            if most and self.disk.has_space(sum(count for count, _ in most), sum(size for _, size in most)):
                return Reservation(starmap(self.disk.most_for, most))
        found, extended, units = list[Sizes](), set[Account](), set[Unit]()
        for sizes in self._sizes(map(self._pending, batches), extended):
            found.append(sizes)
            yield ()
        for batch in batches:
            units |= units_of(self.contents, self._pending(batch))
            yield ()
        return (yield from in_room(lambda: Reservation(found, extended).make_room(lambda: units)))

    def _counted(self, batches: Collection[NewPages]) -> Generator[tuple[()], None, list[tuple[int, int]]]:
        """Return the number of pages of each batch and the bytes of their bodies, in steps; an empty list if some of
        their blocks are protected, or have to be split.
        """
        found = list[tuple[int, int]]()
        for pages in batches:
            if self.has_extents(pages) or (self.leases.by_unit and self.protection.protects_any(pages)):
                return []
            found.append((len(pages), sum(map(_SIZE, pages.slots))))
            yield ()
        return found

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Admit and store a block as an extent, see `Contents.set_block`. Raise OverLimit and MoreRoom as `admit`."""
        self.protection.admit_block(req_id, page, extent.shape.nbytes)
        of_block = (part.sizes_of_block(req_id, page, extent.shape) for part in (self.disk, self.quotas))
        block = self.index.block(req_id, page)
        Reservation(of_block).make_room(lambda: [block] if block is not None else [])
        self.contents.set_block(req_id, page, extent)

    def split_block(self, req_id: bytes, page: int) -> None:
        """Replace an extent by single pages if it is in memory, before some of its pages are replaced. The space on
        disk was admitted with these pages; the memory of the index is admitted here. Raise OverLimit as `admit`, and
        TooManyPages.
        """
        block = self.index.block(req_id, page)
        if block is not None and block.extent is not None and type(block.extent.slot) is not OnDisk:
            check_split(block)
            self._admit_split(block, {})
            self.contents.split(block)

    def _admit_split(self, block: Block, on_disk: Sizes) -> None:
        """Evict units until there is space for the pages of an extent: `on_disk`, and in the index. Raise OverLimit as
        `admit` does.
        """
        in_index: Sizes = {self.memory.index: self._catalogue.costs.of_pages(block)}
        parts = [on_disk, self.quotas.sizes_of_split(block), in_index]
        Reservation(parts).make_room(lambda: {block}, in_steps=False)

    def chain(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it, without which an engine cannot use it."""
        self.eviction_order.chain(blocks)
        self.contents.tier.follows(blocks)

    # -- pages -----------------------------------------------------------------------------------------------------

    @property
    def stores_together(self) -> bool:
        """Whether the core can store and find a batch of pages in one call, without a decision for each page."""
        return self.contents.on_event is None and not self.eviction_order.has_quotas and self._catalogue.has_all_entries

    # -- all keys --------------------------------------------------------------------------------------------------

    def sweep(self, now: int, most: int, *, expires: bool = True) -> int:
        """Do a step of the work that is done periodically.

        With `expires`, up to `most` keys that have expired at `now`, in unix milliseconds, are removed. Other parts of
        the store continue counts, changes of the policy, and the return of memory. Return `most` if there is more work
        to do soon, and the number of removed keys otherwise.
        """
        self.contents.tier.sweep()
        elapsed = monotonic_ms()
        self.eviction_order.units.now = elapsed // 1000
        self.leases.settle(elapsed)
        self._catalogue.drop_idle_scans(elapsed)
        self.arena.trim()
        removed = self.contents.expiry_order.remove_due(now, most, self.contents.expire) if expires else 0
        corrects = self.leases.follow_wall_clock(unix_ms() - elapsed)
        goes_on = self.quotas.go_on(), self.eviction_order.hand_over(), self.contents.reunite(), corrects
        return most if any(goes_on) else removed


# -- blocks ------------------------------------------------------------------------------------------------------------
#
# A block as one value: all pages of one (req_id, page_id), written and read together.
#
# An extent is sent as one borrowed piece of a reply. A block of single pages is put together when it is read. It is
# complete if every layer up to its last has every plane and head up to the last, all pages have the same number of
# rows, and the pages of each plane have the same dtype and dimension. The result of this check is kept until one of the
# block's pages changes. Costs: O(1) for an extent, O(pages of the block) otherwise.

BLOCK_PAGES_PER_STEP = 256  # pages that are examined before other clients get their turn
_TRIES = 4  # attempts to read all pages while other clients add or remove some
_GEOMETRY = header_fields("dtype", "kv_type", "page_size", "head_dim")
_Geometry = tuple[int, int, int, int]  # dtype, page_size, head_dim, bytes
_NONE: _Geometry = (0, 0, 0, 0)  # pages of one plane differ

T = TypeVar("T")


class Gathered(NamedTuple):
    """The pages of a block in the order of its body, and its shape if it is complete."""

    pages: list[Page]
    shape: BlockShape | None


Steps = Generator[tuple[()], None, T]  # other clients get their turn after each step


def read_block(keyspace: Keyspace, block: Block | None, lent: BorrowedReads) -> Steps[tuple[Piece, ...] | None]:
    """Return a complete block's bulk string in pieces, in steps; None if the block is not complete.

    Counts as a hit and a use, or as a miss. The block must be in memory or loaded temporarily, or its extent in `lent`,
    the values that the reply borrows from the disk. Return None also for a block that could not be read from the disk.
    """
    found = None if block is None else (yield from gathered(keyspace, block))
    if block is None or found is None or found.shape is None:
        keyspace.counters.misses += 1
        return None
    if block.extent is not None:
        slot = block.extent.slot
        if isinstance(slot, OnDisk) and slot not in lent:
            if slot.temporary_slot is None:
                keyspace.counters.misses += 1
                return None
            slot = slot.temporary_slot
        keyspace.reader.use_block(block)
        return lent[slot].pieces([slot]) if isinstance(slot, OnDisk) else (slot,)
    keyspace.reader.use_block(block)
    pieces: list[Piece] = [frame(found.shape.nbytes)]
    for start in range(0, len(found.pages), BLOCK_PAGES_PER_STEP):
        some = found.pages[start : start + BLOCK_PAGES_PER_STEP]
        if not all(map(has_bytes, some)):
            return None
        pieces += [page.part(0, page.size) for page in some]
        yield ()
    pieces.append(END)
    return (*pieces,)


def stored_shape(keyspace: Keyspace, block: Block | None) -> Steps[BlockShape | None]:
    """Return the shape of a block, None if it is not complete, without counting a use. O(1) if none of its pages has
    changed since the last check.
    """
    if block is None or block.shape_known:
        return None if block is None else block.shape
    return (yield from gathered(keyspace, block)).shape


def gathered(keyspace: Keyspace, block: Block) -> Steps[Gathered]:
    """Return the pages of a block, collected in steps, and its shape; no pages for an extent.

    Expired pages must have been removed before. If the block changes between two steps, the collection starts again.
    The last of `_TRIES` attempts is one step, because nothing can change within it.
    """
    for left in reversed(range(_TRIES)):
        version, pages, planes = block.version, list[Page](), dict[int, _Geometry]()
        keys = block.page_keys() if block.extent is None else iter(())
        while (some := keyspace.reader.pages_at(islice(keys, BLOCK_PAGES_PER_STEP))) and block.version == version:
            pages += some
            if not block.shape_known:
                _note_geometries(some, planes)
            if left:
                yield ()
                if keyspace.index.block(block.req_id, block.page) is not block:
                    return Gathered([], None)
        if block.version == version:
            break
    if not block.shape_known:
        block.shape = _shape_of(block, planes) if block.is_full else None
        block.shape_known = True
    return Gathered(pages, block.shape)


def _note_geometries(pages: Iterable[Page], planes: dict[int, _Geometry]) -> None:
    """Note each plane's common geometry, or `_NONE` if its pages differ."""
    for page in pages:
        header = page.header_with(0) if type(page) is ExtentPage else page.header  # without the cost of its checksum
        dtype, kv_type, rows, columns = _GEOMETRY.unpack_from(header)
        geometry = dtype, rows, columns, page.size
        if planes.setdefault(kv_type, geometry) != geometry:
            planes[kv_type] = _NONE


def _shape_of(block: Block, planes: Mapping[int, _Geometry]) -> BlockShape | None:
    """Return the shape of a full block; None if its pages differ, or are too many for an extent."""
    if _NONE in planes.values() or len({rows for _, rows, _, _ in planes.values()}) > 1:
        return None
    if block.pages > MAX_BLOCK_PAGES:
        return None
    layers, heads, _ = block.measure()
    shape = BlockShape(
        layers=layers,
        heads=heads,
        page_size=next(iter(planes.values()))[1],
        planes=tuple(Plane(kind, DType(dtype), columns) for kind, (dtype, _, columns, _) in sorted(planes.items())),
    )
    as_declared = all(planes[plane.kv_type][-1] == shape.page_nbytes(plane) for plane in shape.planes)
    return shape if as_declared else None
