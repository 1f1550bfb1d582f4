"""The keyspace against a dictionary, and the arena under it: nothing overlaps, leaks, or is counted wrong."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvpage_server.core import Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.page import BlockShape, DType, PageKey, Plane, checksum, encode_page, unix_ms
from kvpage_server.store.evict import OverLimit
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Text, is_page
from kvpage_server.store.memory.index import Extent, ExtentPage

MIB = 1024 * 1024


def set_page(keys: Keyspace, key: PageKey, body: bytes, expires: int = 0) -> bytes:
    blob = encode_page(key, body, dtype=DType.UINT8, page_size=1, head_dim=max(len(body), 1))
    name = PageName(bytes(key), key.req_id, key.layer, key.head, key.page, key.kv_type)
    keys.contents.set_page(name, blob[:64], keys.contents.slot_of(body), expires)
    return blob


def lies_in(key: bytes, req_id: bytes, page: int) -> bool:
    name = PageKey.parse(key)
    return (name.req_id, name.page) == (req_id, page)


def value_of(keys: Keyspace, key: bytes) -> bytes | None:
    entry = keys.contents.find(key)
    if entry is None or isinstance(entry, Text):
        return entry.data if entry else None
    return (bytes(entry.header) if is_page(entry) else b"") + bytes(entry.body)


# -- the keyspace against a dictionary -----------------------------------------------------------------------------

START = unix_ms() + 10_000_000  # nothing in the machine is due by the real clock

REQUESTS = [b"a", b"b"]
page_keys = st.builds(
    PageKey,
    st.sampled_from(REQUESTS),
    st.integers(0, 1),
    st.sampled_from([0, 1, 63, 64, 65535]),
    st.integers(0, 2),
    st.integers(0, 1),
)
plain_keys = st.sampled_from([b"x", b"y", b"kv:a:index", b"kv:a:0:0:0:9", b"\0"])
bodies = st.builds(
    lambda size, fill: bytes([fill]) * size,
    st.sampled_from([0, 1, 100, 1024, 1025, 4096, 70_000]),
    st.integers(0, 255),
)
expiries = st.just(0) | st.integers(1, 20_000).map(lambda ms: START + ms)


shapes = st.builds(
    lambda layers, heads, head_dim, types: BlockShape(
        layers, heads, 2, tuple(Plane(kv_type, DType.UINT8, head_dim) for kv_type in types)
    ),
    st.integers(1, 2),
    st.sampled_from([1, 2, 65]),
    st.integers(1, 3),
    st.sampled_from([(0,), (0, 1)]),
)


class KeyspaceMachine(RuleBasedStateMachine):
    """Every operation on the keyspace and on a dictionary: key -> (blob or string, expiry, whether it is a page)."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = Keyspace(policy="allkeys-lru")  # which evicts in the same order however often it is run
        self.model: dict[bytes, tuple[bytes, int, bool]] = {}
        self.now = START
        self.events: list[tuple[str, bytes]] = []
        self.keys.contents.on_event = lambda event, key: self.events.append((event, key))
        self.keys.contents.on_block = lambda _, events: self.events.extend(events)

    used = Bundle("used")

    @rule(key=page_keys, body=bodies, expires=expiries, target=used)
    def write_page(self, key: PageKey, body: bytes, expires: int) -> bytes:
        blob = set_page(self.keys, key, body, expires)
        self.model[bytes(key)] = (blob, expires, True)
        return bytes(key)

    @rule(key=plain_keys | page_keys.map(bytes) | used, text=bodies, expires=expiries, target=used)
    def write_string(self, key: bytes, text: bytes, expires: int) -> bytes:
        self.keys.contents.set_string(key, text, expires)
        self.model[key] = (text, expires, False)
        return key

    @rule(
        req_id=st.sampled_from(REQUESTS), page=st.integers(0, 2), shape=shapes, fill=st.binary(min_size=1, max_size=9)
    )
    def write_block(self, req_id: bytes, page: int, shape: BlockShape, fill: bytes) -> None:
        self.store_block(req_id, page, shape, fill, 0)

    @rule(page=st.integers(0, 2), shape=shapes, ttl=st.integers(1, 20), target=used)
    def write_block_for_a_while(self, page: int, shape: BlockShape, ttl: int) -> bytes:
        return self.store_block(b"a", page, shape, b"short life", ttl)

    def store_block(self, req_id: bytes, page: int, shape: BlockShape, fill: bytes, ttl: int) -> bytes:
        """The first of its page keys."""
        body = (fill * shape.nbytes)[: shape.nbytes]
        self.keys.set_block(req_id, page, Extent(shape, self.keys.contents.slot_of(body), checksum(body), START, ttl))
        old = [key for key, (_, _, is_page) in self.model.items() if is_page and lies_in(key, req_id, page)]
        for key in old:
            del self.model[key]
        names = [
            PageKey(req_id, layer, head, page, plane.kv_type)
            for layer in range(shape.layers)
            for plane in shape.planes
            for head in range(shape.heads)
        ]
        for name, span in zip(names, shape.page_spans(), strict=True):
            assert span == shape.page_span(name.layer, name.head, name.kv_type)
            self.model[bytes(name)] = (
                encode_page(
                    name,
                    body[span],
                    dtype=DType.UINT8,
                    page_size=2,
                    head_dim=shape.planes[0].head_dim,
                    created_ms=START,
                    ttl=ttl,
                ),
                START + 1000 * ttl if ttl else 0,
                True,
            )
        return bytes(names[0])

    @rule(key=used)
    def delete(self, key: bytes) -> None:
        assert self.keys.contents.delete(key) == (self.model.pop(key, None) is not None)

    @rule(key=used, expires=expiries)
    def expire(self, key: bytes, expires: int) -> None:
        if key in self.model:
            self.keys.contents.set_expiry(key, expires)
            value, _, is_page = self.model[key]
            self.model[key] = (value, expires, is_page)

    @rule(key=used)
    def expire_in_the_past(self, key: bytes) -> None:
        if self.model.pop(key, None):
            self.keys.contents.set_expiry(key, 1)

    @rule(key=used)
    def read(self, key: bytes) -> None:
        hits, misses = self.keys.counters.hits, self.keys.counters.misses
        there = key in self.model
        assert (self.keys.reader.read(key) is not None) == there
        assert (self.keys.counters.hits - hits, self.keys.counters.misses - misses) == (there, not there)

    @rule(ms=st.integers(0, 8000), most=st.integers(1, 3))
    def time_passes(self, ms: int, most: int) -> None:
        """Seconds that are over are swept, a few keys at a time."""
        self.now += ms
        expired = self.keys.counters.expired
        while (swept := self.keys.sweep(self.now, most)) == most:
            pass
        assert swept < most
        second, left = self.now // 1000 * 1000, set(self.keys.listing.names())
        due = {key for key, (_, expires, _) in self.model.items() if 0 < expires <= self.now}
        gone = due - left  # of this second's, those whose keys were due before
        assert gone >= {key for key in due if self.model[key][1] < second}
        for key in gone:
            del self.model[key]
        assert self.keys.counters.expired - expired == len(gone)

    @precondition(lambda self: self.model)
    @rule(share=st.floats(0.1, 0.9))
    def memory_gets_scarce(self, share: float) -> None:
        before = {block: block.pages for req in REQUESTS for block in self.keys.index.of(req)}
        evicted = self.keys.counters.evicted
        self.keys.memory.limit = limit = max(int(self.keys.memory.used * share), 1)
        while not self.keys.memory.shrink():  # much is evicted at a time, not all
            pass
        self.keys.memory.limit = 0
        assert self.keys.memory.used <= limit
        for block, pages in before.items():  # whole or not at all
            assert self.keys.reader.block(block.req_id, block.page) is None or block.pages == pages
        gone = [key for key in self.model if self.keys.contents.find(key) is None]
        assert self.keys.counters.evicted - evicted == len(gone)
        for key in gone:
            del self.model[key]

    @rule()
    def flush(self) -> None:
        self.keys.contents.flush()
        while self.keys.contents.free_flushed():
            pass
        self.model.clear()
        self.nothing_is_left()

    @rule()
    def scan(self) -> None:
        found: list[bytes] = []
        cursor = 0
        while True:
            cursor, places, _ = self.keys.listing.scan(cursor, 3)
            keys = self.keys.listing.existing_keys(places)
            found += keys
            if not cursor:
                break
        assert set(found) == set(self.model)

    @invariant()
    def values_are_what_was_written(self) -> None:
        assert len(self.keys) == len(self.model)
        assert set(self.keys.listing.keys()) == set(self.model)
        for key, (value, expires, page) in self.model.items():
            assert value_of(self.keys, key) == value
            assert self.keys.contents.expires_of(key) == expires
            assert is_page(self.keys.contents.find(key)) == page

    @invariant()
    def accounts_are_right(self) -> None:
        assert self.keys.contents.expiry_order.keys == sum(expires > 0 for _, expires, _ in self.model.values())
        entries = {key: self.keys.contents.find(key) for key in self.model}
        texts = sum(len(k) + e.size + TEXT_OVERHEAD for k, e in entries.items() if isinstance(e, Text))
        memory = {slot for e in entries.values() if (slot := e.extent.slot if isinstance(e, ExtentPage) else e)}
        slots = sum(slot.footprint for slot in memory if isinstance(slot, Slot))
        assert self.keys.arena.used == slots
        assert self.keys.memory.used == slots + texts
        assert self.keys.arena.held >= slots
        catalogue, index = self.keys.contents.catalogue, self.keys.index
        assert catalogue.key_bytes == sum(map(len, catalogue.entries))
        assert index.name_bytes == sum(len(block.req_id) for block in index)

    @invariant()
    def the_index_knows_every_page_and_no_other(self) -> None:
        index = self.keys.index
        pages = [PageKey.parse(key) for key, (_, _, is_page) in self.model.items() if is_page]
        assert len(index) == len({page.req_id for page in pages})
        blocks = [block for req in REQUESTS for block in index.of(req)]
        assert {(block.req_id, block.page) for block in blocks} == {(page.req_id, page.page) for page in pages}
        assert index.blocks == len(blocks)
        listed = [key for block in blocks for key in block.page_keys()]
        assert sorted(listed) == sorted(map(bytes, pages))
        for block in blocks:
            assert block.pages == len(list(block.page_keys()))
            shares = sum(page.footprint for page in self.keys.reader.pages_at(block.page_keys()))
            assert shares <= block.footprint
            if block.extent is not None:
                assert block.footprint == block.extent.slot.footprint
            elif not any(isinstance(page, ExtentPage) for page in self.keys.reader.pages_at(block.page_keys())):
                assert block.footprint - shares < 512  # overhead of a split: the frame and the rounding of its slot

    def nothing_is_left(self) -> None:
        keys = self.keys
        assert (len(keys), keys.contents.expiry_order.keys, keys.memory.used, keys.arena.used) == (0, 0, 0, 0)
        assert (len(keys.index), keys.index.blocks, keys.listing.keys()) == (0, 0, [])

    def teardown(self) -> None:
        """Deleting key by key leaves as little as a flush does.

        After a failure nothing is checked: the traceback refers to values, and the error would hide the failure.
        """
        if sys.exc_info()[0] is not None:
            return
        for key in list(self.model):
            assert self.keys.contents.delete(key)
        self.nothing_is_left()
        gone = [key for event, key in self.events if event in ("del", "expired", "evicted")]
        assert len(gone) >= len(set(self.model))


class FailingMachine(KeyspaceMachine):
    """An invariant fails while it refers to a value."""

    @invariant()
    def no_key_exists(self) -> None:
        entries = [self.keys.contents.find(key) for key in self.model]
        assert entries == [], "the failure"


def test_the_teardown_does_not_hide_a_failure() -> None:
    with pytest.raises(AssertionError, match="the failure"):
        run_state_machine_as_test(FailingMachine, settings=settings(max_examples=20, stateful_step_count=3))  # type: ignore[no-untyped-call]


TestKeyspace = KeyspaceMachine.TestCase
TestKeyspace.settings = settings(stateful_step_count=30)


# -- expiry by the real clock --------------------------------------------------------------------------------------


def test_a_key_that_is_due_is_not_found_before_it_is_swept() -> None:
    keys = Keyspace()
    set_page(keys, PageKey(b"r", 0, 0, 0, 0), b"page", expires=(soon := unix_ms() + 500))
    keys.contents.set_string(b"text", b"text", soon)
    assert len(keys.listing.keys()) == 2
    time.sleep(0.51)
    assert len(keys) == 2
    assert keys.listing.keys() == []
    assert keys.reader.read(b"kv:r:0:0:0:0") is None
    assert keys.contents.find(b"text") is None
    assert not keys.contents.delete(b"text")
    assert (len(keys), len(keys.index), keys.memory.used) == (0, 0, 0)
    assert keys.counters.expired == 2


def test_a_sweep_is_bounded_and_takes_each_key_once() -> None:
    keys = Keyspace()
    past = unix_ms() - 5000
    for i in range(2500):
        keys.contents.set_string(b"%d" % i, b"", past + i % 7)
    assert [keys.sweep(unix_ms(), 1000) for _ in range(4)] == [1000, 1000, 500, 0]
    assert len(keys) == 0


def test_prolonging_a_life_again_and_again_costs_no_memory() -> None:
    keys = Keyspace()
    keys.contents.set_string(b"session", b"", START)
    tracemalloc.start()
    try:
        for i in range(30_000):
            keys.contents.set_expiry(b"session", START + i * 1000)
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()
    assert keys.sweep(START + 29_000_000, 10) == 0
    assert keys.sweep(START + 30_001_000, 10) == 1


# -- eviction ------------------------------------------------------------------------------------------------------


def fill(keys: Keyspace, blocks: int, heads: int = 4) -> None:
    for block in range(blocks):
        for head in range(heads):
            set_page(keys, PageKey(b"r", 0, head, block, 0), bytes(4096))


def blocks_left(keys: Keyspace) -> list[int]:
    return [block.page for block in keys.listing.blocks_of(b"r")]


def squeeze(keys: Keyspace, share: float) -> None:
    keys.memory.limit = int(keys.memory.used * share)
    keys.memory.shrink()


def test_the_least_recently_used_block_is_evicted_as_a_whole() -> None:
    keys = Keyspace(policy="allkeys-lru")
    fill(keys, 10)
    keys.reader.read(b"kv:r:0:3:0:0")  # any page of block 0 is a use of the block
    set_page(keys, PageKey(b"r", 0, 0, 1, 0), bytes(4096))  # and so is a write
    squeeze(keys, 0.5)
    assert blocks_left(keys) == [0, 1, 7, 8, 9]
    assert keys.counters.evicted == 20


def test_an_exists_is_no_use_of_a_page() -> None:
    keys = Keyspace(policy="allkeys-lru")
    fill(keys, 4)
    keys.contents.find(b"kv:r:0:0:0:0")
    squeeze(keys, 0.5)
    assert blocks_left(keys) == [2, 3]


def test_strings_and_blocks_are_evicted_in_one_order() -> None:
    keys = Keyspace(policy="allkeys-lru")
    keys.contents.set_string(b"old", bytes(100))
    fill(keys, 1)
    keys.contents.set_string(b"new", bytes(5000))
    squeeze(keys, 0.99)
    assert set(keys.listing.keys()) == {b"new", *(b"kv:r:0:%d:0:0" % head for head in range(4))}
    squeeze(keys, 0.5)
    assert keys.listing.keys() == [b"new"]


def test_noeviction_refuses_and_removes_nothing() -> None:
    keys = Keyspace(policy="noeviction")
    fill(keys, 4)
    with pytest.raises(OverLimit):
        squeeze(keys, 0.5)
    assert len(keys) == 16


def test_uploads_count_towards_the_limit() -> None:
    keys = Keyspace(policy="allkeys-lru")
    fill(keys, 10)
    keys.memory.limit = keys.memory.used + 4096
    uploads = [keys.arena.allocate(4096) for _ in range(8)]
    keys.memory.shrink()
    assert len(blocks_left(keys)) < 10
    assert keys.memory.used <= keys.memory.limit
    del uploads


# -- its memory --------------------------------------------------------------------------------------------------------


def test_a_slot_in_flight_is_not_recycled() -> None:
    """Overwriting a value while an older one is still being sent gives the new one other memory."""
    keys = Keyspace()
    keys.contents.set_string(b"key", b"a" * 5000)
    sending = keys.contents.find(b"key")
    assert isinstance(sending, Slot)
    view = sending.view
    for letter in (b"b", b"c", b"d"):
        keys.contents.set_string(b"key", letter * 5000)
        assert bytes(view) == b"$5000\r\n" + b"a" * 5000 + b"\r\n"
    keys.contents.flush()
    while keys.contents.free_flushed():
        pass
    assert bytes(view) == b"$5000\r\n" + b"a" * 5000 + b"\r\n"
    assert keys.arena.used == sending.footprint
    del view, sending
    assert keys.arena.used == 0


def test_random_sizes_over_a_long_time_do_not_fragment() -> None:
    """20,000 values of changing sizes through a bounded store: held memory stays near used memory."""
    keys, noise = Keyspace(maxmemory=16 * MIB), random.Random(6)
    for i in range(20_000):
        keys.memory.shrink()
        keys.contents.set_string(b"%d" % (i % 3000), bytes(noise.choice((1100, 2048, 4096, 9000, 16384, 40_000))))
    assert keys.memory.used <= 16 * MIB + 65536
    assert keys.arena.held <= 1.5 * keys.arena.used + 24 * MIB
