"""Batches of pages on both cores: whatever the words are, both say, store and find the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import start_server
from wire import Wire

from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage
from kvpage_server.core.python import pages as plain_pages
from kvpage_server.core.python import slots as plain_slots
from kvpage_server.page import MAX_PAGE, MAX_TTL, MAX_U32, PageHeader

native_pages = pytest.importorskip("kvpage_server.core.native.pages", reason="the core is not compiled here")
native_slots = pytest.importorskip("kvpage_server.core.native.slots")

NOW = 1_700_000_000_000

few = st.integers(0, 2).map(b"%d".__mod__)
odd_numbers = [b"", b"-1", b"-0", b"+1", b"01", b" 1", b"1 ", b"1.0", b"\xff", b"7" * 30, b"1\0", b"9" * 600]
requests = st.sampled_from([b"r", b"s", b"{a}b", b"\xff\xfe", b"x" * 256])
names = st.tuples(requests, few, few | st.sampled_from([b"63", b"64", b"65535"]), few, st.sampled_from([b"0", b"5"]))
sizes = st.integers(0, 700) | st.sampled_from([512, 16384, 100_000])
shapes = st.tuples(
    st.integers(1, 15).map(b"%d".__mod__),
    st.sampled_from([b"1", b"64", b"%d" % MAX_U32]),
    st.sampled_from([b"1", b"128", b"%d" % MAX_U32]),
    st.sampled_from([b"0", b"0", b"0", b"1", b"3600", b"%d" % MAX_TTL]),
)
pages = st.tuples(names, shapes, sizes, st.booleans()).map(lambda page: [*page[0], *page[1], Body(*page[2:])])
mutations = st.sampled_from(
    [*odd_numbers, b"a:b", b"a b", b"x" * 257, b"6", b"0", b"16", b"65536", b"%d" % (MAX_PAGE + 1)]
)


class Body:
    """A page's body: in a slot, as a parser leaves it, when it is `long`."""

    def __init__(self, size: int, hashed: bool) -> None:
        self.data = bytes(i * 7 % 251 for i in range(min(size, 251))) * (size // 251 + 1)
        self.data = self.data[:size]
        self.hashed = hashed

    def __repr__(self) -> str:
        return f"Body({len(self.data)}, {self.hashed})"


class Core:
    """One of the two cores, with its stored values."""

    def __init__(self, pages: ModuleType, slots: ModuleType) -> None:
        self.pages = pages
        self.slot_type = slots.Slot
        self.arena = slots.Arena()
        self.entries: dict[bytes, Any] = {}
        self.requests: dict[bytes, dict[int, Any]] = {}

    def slot(self, data: bytes) -> Any:
        slot = self.arena.allocate(len(data))
        slot.body[:] = data
        return slot

    def words(self, page: list[Any]) -> list[Any]:
        """Return a page's words in a parser's form: long words are in slots."""
        made = []
        for word in page:
            data = word.data if isinstance(word, Body) else word
            if len(data) >= 512 or (isinstance(word, Body) and word.hashed):
                slot = self.slot(data)
                slot.digest = plain_pages.checksum(data) if isinstance(word, Body) and word.hashed else 0
                made.append(slot)
            else:
                made.append(data)
        return made

    def read(self, batch: list[list[Any]], strict: bool, hashes: bool) -> Any:
        """Return the pages, or the error of the first bad one."""
        words = [b"", *(word for page in batch for word in self.words(page))]
        try:
            return self.pages.NewPages(words, 1, len(batch), self.arena, NOW, strict, hashes)
        except BadPage as error:
            return str(error), error.place

    def put(self, new: Any) -> list[Any]:
        """Store pages as a store does; return the notifications."""
        received: list[Any] = []
        at = 0
        while at < len(new):
            fresh: list[bytes] = []
            one_block = len(new) % 2 == 0
            stop, blocks, made, beside, *sums = new.put(
                self.entries, self.requests, at, self.pages.PageSet, fresh, one_block=one_block
            )
            names = [[(block.req_id, block.page) for block in some] for some in (blocks, beside)]
            received.append((stop, made, *names, *sums, fresh))
            if stop == at:  # it replaces something that is no page
                del self.entries[new.keys[at]]
            at = stop
        return received

    @property
    def blocks(self) -> dict[tuple[bytes, int], Any]:
        return {(req_id, page): block for req_id, some in self.requests.items() for page, block in some.items()}

    def look(self, asked: list[tuple[bytes, ...]], most: int, now: int) -> Any:
        words = [word for name in asked for word in self.words(list(name))]
        try:
            names = self.pages.PageNames(words, 0, len(asked))
        except BadPage as error:
            return str(error), error.place
        found, blocks, absent, others = self.pages.look_up(self.entries, names.keys, 0, len(names), most, now)
        bodies = [None if slot is None else (bytes(slot.body), bytes(slot.header)) for slot in found]
        return bodies, [(one.req_id, one.page) for one in blocks], absent, others, names.runs(absent), names.blocks()

    def everything(self) -> Any:
        """Return the stored values, without the order of entries."""
        entries = {
            key: (bytes(value.header), bytes(value.view), value.expires, (value.unit.req_id, value.unit.page))
            if isinstance(value, self.slot_type)
            else value
            for key, value in self.entries.items()
        }
        blocks = {
            name: (block.bits, block.pages, block.footprint, block.soonest, block.shape_known)
            for name, block in self.blocks.items()
        }
        return entries, blocks


def described(new: Any) -> Any:
    if isinstance(new, tuple):
        return new
    each = range(len(new))
    bodies = [(bytes(slot.header), bytes(slot.view), slot.digest) for slot in new.slots]
    return new.keys, bodies, [(new.name(i), new.block(i), new.expires(i)) for i in each], new.blocks()


@given(st.data())
def test_both_cores_say_store_and_find_the_same(data: st.DataObject) -> None:
    cores = [Core(plain_pages, plain_slots), Core(native_pages, native_slots)]
    for _ in range(data.draw(st.integers(1, 4))):
        batch = data.draw(st.lists(pages, max_size=12))
        if batch and data.draw(st.integers(0, 3)) == 0:
            page = data.draw(st.integers(0, len(batch) - 1))
            batch[page][data.draw(st.integers(0, PAGE_WORDS - 2))] = data.draw(mutations)
        if batch and data.draw(st.booleans()):  # something else is under a page's key
            key = b"kv:" + b":".join(data.draw(st.sampled_from(batch))[:NAME_WORDS])
            for core in cores:
                core.entries[key] = "a string"
        strict, hashes = data.draw(st.booleans()), data.draw(st.booleans())
        read = [core.read(batch, strict, hashes) for core in cores]
        assert described(read[0]) == described(read[1])
        if not isinstance(read[0], tuple):
            assert all(PageHeader.parse(slot.header) for slot in read[1].slots)
            assert cores[0].put(read[0]) == cores[1].put(read[1])
        assert cores[0].everything() == cores[1].everything()
        asked = [*(tuple(page[:NAME_WORDS]) for page in batch), *data.draw(st.lists(names, max_size=6))]
        most, now = data.draw(st.sampled_from([1, 3000, 1 << 40])), data.draw(st.sampled_from([NOW, NOW + 2000]))
        assert cores[0].look(asked, most, now) == cores[1].look(asked, most, now)


rows = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 63, 64, 500, 65535]), st.integers(0, 5))


@given(st.lists(st.tuples(st.booleans(), rows), max_size=60), st.lists(rows, max_size=20))
def test_both_cores_know_the_same_pages_of_a_block(changes: list[tuple[bool, Any]], asked: list[Any]) -> None:
    sets = [core.PageSet(b"r", 7) for core in (plain_pages, native_pages)]
    for comes, page in changes:
        for one in sets:
            (one.add if comes else one.discard)(*page)
    model = {page for page in {page for _, page in changes} if [comes for comes, one in changes if one == page][-1]}
    for one in sets:
        assert one.pages == len(model)
        assert [one.has(*page) for page in asked] == [page in model for page in asked]
    assert list(sets[0].each_row()) == list(sets[1].each_row()) == list(sets[0].bits.items())
    ends = [1 + max((page[axis] for page in model), default=-1) for axis in (0, 1)]
    outline = (*ends, sum(1 << kind for kind in {kind for _, _, kind in model}))
    assert sets[0].outline() == sets[1].outline() == outline
    for one in sets:
        one.bits = sets[0].bits
    assert sets[0].bits == sets[1].bits
    assert sets[0].pages == sets[1].pages == len(model)


@pytest.mark.parametrize("core", [plain_pages, native_pages], ids=["python", "native"])
def test_a_block_may_have_any_number_of_rows_in_any_order(core: ModuleType) -> None:
    block = core.PageSet(b"r", 0)
    for layer in reversed(range(40_000)):
        block.add(layer, layer * 64 % 65536, 3)
    assert block.pages == len(block.bits) == 40_000
    assert list(block.bits) == sorted(block.bits)
    for layer in range(40_000):
        block.discard(layer, layer * 64 % 65536, 3)
    assert (block.pages, block.bits) == (0, {})


@pytest.mark.parametrize(("pages", "slots"), [(plain_pages, plain_slots), (native_pages, native_slots)])
def test_bytes_hashed_in_one_step_are_bounded(pages: ModuleType, slots: ModuleType) -> None:
    core = Core(pages, slots)
    batch = [[b"r", b"0", b"0", b"%d" % i, b"0", b"3", b"1", b"1", b"0", Body(1024**2, False)] for i in range(9)]
    assert len(core.read(batch, False, True)) == 4
    assert len(core.read(batch, False, False)) == 9


@pytest.mark.parametrize(("pages", "slots"), [(plain_pages, plain_slots), (native_pages, native_slots)])
def test_slots_go_back_when_pages_are_replaced(pages: ModuleType, slots: ModuleType) -> None:
    core = Core(pages, slots)
    page = [b"r", b"0", b"0", b"0", b"0", b"3", b"1", b"1", b"0", Body(5000, False)]
    core.put(core.read([page], False, True))
    used = core.arena.used
    for _ in range(1000):
        core.put(core.read([page] * 3, False, True))
    assert core.arena.used == used
    core.entries.clear()
    assert core.arena.used == 0


@pytest.mark.parametrize(
    ("pages", "slots", "allocations"),
    [(plain_pages, plain_slots, range(0, 450, 9)), (native_pages, native_slots, range(50))],
)
def test_put_without_memory_stores_no_page(pages: ModuleType, slots: ModuleType, allocations: range) -> None:
    """In each turn, another allocation of a batch fails."""
    testing = pytest.importorskip("_testcapi", reason="this Python has no allocator that fails")
    body, failures, switch = Body(700, True), 0, sys.getswitchinterval()

    def read(core: Core, names: Sequence[tuple[int, ...]]) -> Any:
        return core.read(
            [[*(b"%d" % part for part in name), b"3", b"1", b"1", b"0", body] for name in names], False, True
        )

    for allocation in allocations:
        core = Core(pages, slots)
        core.put(read(core, [(1, 0, head, 0, 0) for head in range(5)] + [(2, 0, 0, page, 0) for page in range(2)]))
        before = core.everything()
        names = [(1, layer, head, 0, 0) for layer in range(3) for head in range(4)]
        names += [(2, 0, 0, page, 0) for page in range(1, 4)] + [(3, 0, head, 0, 0) for head in range(20)]
        batch = read(core, [*names, names[0], names[0]])
        try:
            sys.setswitchinterval(60)  # so that no other thread allocates meanwhile
            testing.set_nomemory(allocation, allocation + 1)
            batch.put(core.entries, core.requests, 0, pages.PageSet, [], one_block=False)
        except MemoryError:
            testing.remove_mem_hooks()
            failures += 1
            assert core.everything() == before
            assert core.put(batch)
        finally:
            testing.remove_mem_hooks()
            sys.setswitchinterval(switch)
    assert failures > 10


endings = st.sampled_from(
    [b"", b".", b"ab" * 8, b"ab" * 7 + b"a", b"AB" * 8, b"0" * 64, b"ab" * 8 + b".", b"\0" + b"ab" * 8, b"ab" * 128]
)
beginnings = st.sampled_from([b"", b"a.", b"a.b.", b".", b"a..", b"\xff.", b"a", b"kvpage:x."])
changed = st.tuples(st.builds(bytes.__add__, beginnings, endings), st.sampled_from([0, 1, MAX_PAGE]), st.booleans())


@given(st.lists(st.none() | changed | st.lists(changed, max_size=4), max_size=40), st.integers(1, 30), st.data())
def test_both_cores_queue_and_group_the_same_changes(changes: list[Any], most: int, data: st.DataObject) -> None:
    cores, woken = (plain_pages, native_pages), [0, 0]

    def wake(which: int) -> None:
        woken[which] += 1

    queues = [core.BlockChanges(most, partial(wake, which)) for which, core in enumerate(cores)]
    for change in changes:
        for core, queue in zip(cores, queues, strict=True):
            if change is None:
                queue.clear()
            elif isinstance(change, list):
                queue.add_all([core.PageSet(req_id, page) for req_id, page, _ in change])
            else:
                queue.note(*change)
        assert len(queues[0]) == len(queues[1]) <= most
        if data.draw(st.integers(0, 4)) == 0:
            count = data.draw(st.integers(0, most + 1))
            (number, records), other = (queue.take(count) for queue in queues)
            assert (number, records) == other
            assert plain_pages.changed_blocks(records) == native_pages.changed_blocks(records)
            if records:
                for core in cores:
                    with pytest.raises(ValueError, match="end within one"):
                        core.changed_blocks(records[:-1])
        assert (queues[0].nbytes, queues[0].dropped) == (queues[1].nbytes, queues[1].dropped)
    assert woken[0] == woken[1]


@pytest.mark.parametrize("pages", [plain_pages, native_pages])
def test_the_queue_of_changes_keeps_the_newest(pages: ModuleType) -> None:
    woken: list[None] = []
    queue = pages.BlockChanges(1000, lambda: woken.append(None))
    for number in range(50_000):
        queue.note(b"%064x" % number, 7, True)
    assert (len(queue), queue.dropped, len(woken)) == (1000, 49_000, 1)
    assert queue.nbytes == 1000 * (64 + 7)
    count, records = queue.take(2000)
    hashes = b"".join(b"\xcf" + number.to_bytes(8, "big") for number in range(49_000, 50_000))
    assert count == 1000
    assert pages.changed_blocks(records) == (False, [(b"", 7, b"", b"\xdd\0\0\x03\xe8" + hashes)], {})
    assert (len(queue), queue.nbytes, queue.take(1)) == (0, 0, (0, b""))
    queue.clear()
    assert len(woken) == 2


def some_command(chance: random.Random) -> list[bytes]:
    """Return a command of the page family, or one that changes the value under a page's key."""

    def name() -> list[bytes]:
        word = [b"r%d" % chance.randrange(2), *(b"%d" % chance.randrange(2) for _ in range(4))]
        if chance.random() < 0.01:
            word[chance.randrange(NAME_WORDS)] = chance.choice([*odd_numbers, b"a:b", b"x" * 257, b"99999999999"])
        return word

    def page() -> list[bytes]:
        ttl = chance.choice([b"0", b"0", b"100", b"x" if chance.random() < 0.02 else b"5"])
        size = chance.choice([0, 1, 100, 511, 512, 513, 4096, 70_000, 1_000_000])
        return [*name(), b"%d" % chance.randrange(1, 16), b"1", b"2", ttl, chance.randbytes(size)]

    many = chance.randrange(1, 9)
    key = b"kv:" + b":".join(name())
    shape = [b"2", b"2", b"1", b"0", b"2", b"0", b"3", b"5", b"1", b"3", b"5"]
    return chance.choice(
        [
            [b"KVPAGESET", *page()],
            [b"KVPAGEGET", *name()],
            [b"KVPAGEMSET", b"%d" % many, *(word for _ in range(many) for word in page())],
            [b"KVPAGEMGET", b"%d" % (4 * many), *(word for _ in range(4 * many) for word in name())],
            [b"KVPAGEMEXISTS", b"%d" % many, *(word for _ in range(many) for word in name())],
            [b"KVPAGEINDEX", b"r%d" % chance.randrange(2), b"WITHSIZES"],
            [b"KVPAGEEXISTS", *name()],
            [b"KVBLOCKSET", b"r0", b"%d" % chance.randrange(2), *shape, bytes(40)],
            [b"KVBLOCKGET", b"r%d" % chance.randrange(2), b"0"],
            [b"SET", key, chance.randbytes(chance.choice([3, 600, 3000]))],
            [b"DEL", key],
            [b"PEXPIREAT", key, b"1"],
            [b"DBSIZE"],
            [b"KVPAGEDEL", b"r1", b"%d" % chance.randrange(2)],
        ]
    )


def test_servers_on_both_cores_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(21)
    monkeypatch.delenv("KVPAGE_CORE", raising=False)
    with start_server() as native:
        monkeypatch.setenv("KVPAGE_CORE", "python")
        with start_server() as plain, Wire(native.port) as one, Wire(plain.port) as other:
            assert b"page_core:native" in one.ask(b"INFO", b"server")
            assert b"page_core:python" in other.ask(b"INFO", b"server")
            for _ in range(1500):
                words = some_command(chance)
                assert one.ask(*words) == other.ask(*words), words
