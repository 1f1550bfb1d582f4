"""Slots: none overlaps another, counters are right, and unreferenced slots are freed, on each core."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cores import CORES, on_each_core
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from servers import resident
from waiting import until

from kvpage_server.core import regions as of_regions
from kvpage_server.core.regions import (
    HUGE,
    SPARE_FOR,
    Area,
    Region,
    Regions,
    Spans,
    capacity_for,
    chunk_shape,
    round_up,
    slot_shape,
)

MIB = 1 << 20
SIZES = [0, 1, 9, 10, 99, 100, 1024, 4096, 5000, 9999, 10_000, 16384, 65536, 99_999, 100_000, 3_000_000]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return spare memory earlier."""
    monkeypatch.setattr("kvpage_server.core.regions.SPARE_FOR", 0.3)


def span_of(slot: Any) -> tuple[int, int]:
    """Where a slot's memory begins, header and all, and where it ends."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(slot.header))
    return start, start + len(slot.header) + len(slot.view)


class ArenaMachine(RuleBasedStateMachine):
    """Slots are filled with a pattern of their own, header and all; no other slot may ever change it."""

    core: Any
    slots = Bundle("slots")

    @initialize()
    def begin(self) -> None:
        self.arena = self.core.Arena()
        self.living: dict[int, tuple[Any, int]] = {}
        self.views: dict[int, memoryview] = {}  # of slots that nobody else refers to
        self.numbers = 0

    @rule(size=st.integers(0, 300) | st.sampled_from(SIZES), target=slots)
    def allocate(self, size: int) -> int:
        slot = self.arena.allocate(size)
        self.numbers += 1
        pattern = self.numbers % 251
        np.frombuffer(slot.body, np.uint8)[:] = pattern
        np.frombuffer(slot.header, np.uint8)[:] = pattern
        self.living[self.numbers] = (slot, size)
        return self.numbers

    @rule(number=consumes(slots))
    def release(self, number: int) -> None:
        del self.living[number]

    @rule(number=consumes(slots), kind=st.sampled_from(["body", "room", "view", "header", "part"]))
    def keep_a_view(self, number: int, kind: str) -> None:
        slot, size = self.living.pop(number)
        self.views[number] = slot.part(size // 2, size).view if kind == "part" else getattr(slot, kind)

    @rule()
    def drop_views(self) -> None:
        self.views.clear()

    @rule()
    def trim(self) -> None:
        self.arena.trim()

    @invariant()
    def every_slot_holds_what_was_written_into_it(self) -> None:
        for number, (slot, size) in self.living.items():
            body = bytes([number % 251]) * size
            assert slot.size == size
            assert bytes(slot.body) == body
            assert bytes(slot.room) == body + b"\r\n"
            assert bytes(slot.view) == b"$%d\r\n%b\r\n" % (size, body)
            assert bytes(slot.part(size // 2, size).view) == body[size // 2 :]
            assert bytes(slot.header) == bytes([number % 251]) * 64
        for number, view in self.views.items():
            assert set(bytes(view)) <= {number % 251, *b"\r\n$0123456789"}

    @invariant()
    def no_two_overlap(self) -> None:
        spans = sorted(span_of(slot) for slot, _ in self.living.values())
        assert all(before[1] <= after[0] for before, after in pairwise(spans))

    @invariant()
    def what_is_used_is_what_the_slots_occupy(self) -> None:
        occupied = sum(slot.footprint for slot, _ in self.living.values())
        assert occupied <= self.arena.used
        assert self.views or occupied == self.arena.used
        assert self.arena.used <= self.arena.held - self.arena.spare
        assert all(slot.footprint <= max(1.3 * size + 256, 512) for slot, size in self.living.values())

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.living.clear()
            self.views.clear()
            assert self.arena.used == 0
            assert self.arena.spare == self.arena.held


class PythonMachine(ArenaMachine):
    core = CORES[0]


class NativeMachine(ArenaMachine):
    core = CORES[-1]


TestPython, TestNative = PythonMachine.TestCase, NativeMachine.TestCase
TestPython.settings = TestNative.settings = settings(stateful_step_count=40)


@given(st.integers(0, 2**33))
def test_powers_of_two_fit_without_waste(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity <= max(1.25 * size, 64)
    if size >= 64 and size & (size - 1) == 0:
        assert capacity == size
        assert slot_shape(capacity).pitch <= 64 + size + (32 if size < 32768 else 64)  # with its header


@given(st.integers(0, 2**33), st.integers(0, 2**40))
def test_a_chunk_has_space_for_its_slots_and_starts_small(size: int, held: int) -> None:
    shape = slot_shape(capacity_for(size))
    chunk = chunk_shape(shape, held)
    assert shape.lead + chunk.slots * shape.pitch <= chunk.nbytes
    assert 1 <= chunk.slots <= 65536
    assert chunk.nbytes <= max(held, 65536, shape.lead + shape.pitch) + 4096


@pytest.mark.skipif(len(CORES) < 2, reason="the compiled core was not built")
@given(st.integers(0, 200_000) | st.sampled_from(SIZES))
def test_a_slot_of_one_core_is_as_large_as_one_of_the_other(size: int) -> None:
    slots = [core.Arena().allocate(size) for core in CORES]
    for slot in slots:
        slot.body[:] = bytes(size)
    assert len({slot.footprint for slot in slots}) == 1
    assert len({bytes(slot.view) for slot in slots}) == 1


@on_each_core
def test_a_slot_keeps_its_attributes(core: Any) -> None:
    slot, unit = core.Arena().allocate(5), object()
    assert (slot.digest, slot.expires, slot.unit) == (0, 0, None)
    slot.digest, slot.expires, slot.unit = 2**64 - 1, 2**62, unit
    assert (slot.digest, slot.expires, slot.unit) == (2**64 - 1, 2**62, unit)
    known = sys.getrefcount(unit)
    del slot
    assert sys.getrefcount(unit) == known - 1


@on_each_core
def test_an_impossible_slot_is_refused(core: Any) -> None:
    arena = core.Arena()
    with pytest.raises(ValueError, match="a slot has 0 bytes or more, got -1"):
        arena.allocate(-1)
    for size in (2**46, 2**47, 2**48, 2**62):
        with pytest.raises(MemoryError, match=r"the system has no \d+ bytes more"):
            arena.allocate(size)
    slot = arena.allocate(10)
    for start, stop in ((-1, 5), (3, 2), (0, 11)):
        with pytest.raises(ValueError, match=f"a part is within the 10 bytes of its slot, got {start} to {stop}"):
            slot.part(start, stop)
    with pytest.raises(TypeError):
        b"".join([b"before", slot])  # it is a bulk string where it is sent, and its body elsewhere: nobody guesses
    del slot
    assert (arena.used, arena.spare) == (0, arena.held)


@pytest.mark.usefixtures("soon")
@on_each_core
def test_a_value_of_half_a_gigabyte_and_more(core: Any) -> None:
    arena = core.Arena()
    for size in (512 * MIB, 600 * MIB + 1):
        slot = arena.allocate(size)
        slot.body[-1], slot.body[0] = 7, 8
        assert (slot.room[-3:], slot.view[:13]) == (b"\7\r\n", b"$%d\r\n\x08" % size)
        assert arena.held >= arena.used >= size
    del slot
    until(partial(holds_nothing, arena), "the memory being given back")


def holds_nothing(arena: Any) -> bool:
    """Whether it has given back everything, once it has rested."""
    arena.trim()
    return bool(arena.used == arena.held == 0)


def is_below(limit: int) -> bool:
    """Whether this process has less memory."""
    return resident(os.getpid()) < limit


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@on_each_core
def test_spare_memory_is_returned_to_the_system(core: Any, shared: bool) -> None:
    """After it was unused for a while; later allocations of any size do not map it again."""
    gc.collect()
    arena, held = core.Arena(shared=shared), 0
    for _ in range(3):
        slots = [arena.allocate(size * MIB) for size in (1, 2, 3, 5, 7, 8, 12, 16, 24, 32, 48, 64)]
        slots += [arena.allocate(16384) for _ in range(2000)]
        for slot in slots:
            np.frombuffer(slot.body, np.uint8)[:] = 1
        full = resident(os.getpid())
        assert arena.held >= arena.used >= 222 * MIB
        assert not held or arena.held <= held + 64 * MIB
        held = arena.held
        del slots, slot
        arena.trim()
        assert (arena.used, arena.spare) == (0, arena.held)
    until(partial(holds_nothing, arena), "the memory being given back")
    until(partial(is_below, full - 200 * MIB), "the system having it")


@pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")
@pytest.mark.usefixtures("soon")
@on_each_core
def test_sealed_memory_is_returned_region_by_region(core: Any) -> None:
    """The system returns no part of it, but all of a region when nothing is left in it."""
    arena = core.Arena(shared=True)
    slots = [arena.allocate(8 * MIB) for _ in range(40)]
    for slot in slots:
        np.frombuffer(slot.body, np.uint8)[:] = 1
    for region in arena.regions.shared.values():
        assert os.fstat(region.descriptor_to_read()).st_size == region.file_size
    full, left = resident(os.getpid()), slots[0].place[0]
    assert len(arena.regions.shared) > 2
    del slots[1:], slot, region

    def has_one_region() -> bool:
        arena.trim()
        return list(arena.regions.shared) == [left.number]

    until(has_one_region, "the other regions being unmapped")
    assert resident(os.getpid()) < full - 200 * MIB
    assert bytes(slots[0].body[:3]) == b"\1\1\1"
    assert arena.held <= left.size
    again = arena.allocate(8 * MIB)
    again.body[0] = 2


@pytest.fixture(params=["sealed", "unlinked"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Shared memory as on Linux, or as on macOS. Both systems have the latter."""
    if request.param == "sealed" and sys.platform != "linux":
        pytest.skip("needs sealed shared memory of Linux")
    monkeypatch.setattr("kvpage_server.core.regions._open_shared", getattr(of_regions, f"_open_{request.param}"))
    return str(request.param)


@on_each_core
def test_a_slot_is_found_in_the_mapping_of_its_region(core: Any, memory: str) -> None:
    arena = core.Arena(shared=True)
    slots = [arena.allocate(size) for size in (1, 100, 5000, 40_000, 3 * MIB, 80 * MIB)]
    for number, slot in enumerate(slots):
        slot.body[-1], slot.body[0] = number + 1, number + 1
        region, offset = slot.place
        descriptor = region.descriptor_to_read()
        with mmap.mmap(descriptor, region.file_size, mmap.MAP_SHARED, mmap.PROT_READ) as other:
            assert other[offset] == other[offset + slot.size - 1] == number + 1
        with pytest.raises(OSError, match="Permission denied"):
            mmap.mmap(descriptor, region.file_size)
    private = core.Arena().allocate(5)
    assert private.place[0].number == 0


def has_no_name(descriptor: int) -> bool:
    """Whether nobody can open the memory by a name. Only Linux says so."""
    return sys.platform != "linux" or os.fstat(descriptor).st_nlink == 0


def test_shared_memory_has_neither_a_name_nor_a_writer(memory: str) -> None:
    region = Region(HUGE, shared=True)
    descriptor = region.descriptor_to_read()
    assert region.number
    assert region.is_sealed
    assert region.descriptor_to_read() == descriptor
    assert has_no_name(descriptor)
    assert not os.get_inheritable(descriptor)
    for change in (lambda: os.ftruncate(descriptor, 0), lambda: os.pwrite(descriptor, b"x", 0)):
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
            change()
    region.memory[0] = 1
    with mmap.mmap(descriptor, region.file_size, mmap.MAP_SHARED, mmap.PROT_READ) as other:
        del region
        assert other[HUGE - 1] + sum(other[:: mmap.PAGESIZE]) == 1


def test_shared_memory_keeps_no_descriptor_open(memory: str) -> None:
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        Region(HUGE, shared=True)
        Area(4096).close()
    assert len(os.listdir("/dev/fd")) <= before


def test_an_area_is_read_through_its_descriptor(memory: str) -> None:
    area = Area(5000)
    assert area.size == round_up(5000, mmap.PAGESIZE)
    area.copy(memoryview(b"abc"), area.size - 3)
    with mmap.mmap(area.descriptor, area.size, mmap.MAP_SHARED, mmap.PROT_READ) as other:
        with pytest.raises(OSError, match="Permission denied"):
            mmap.mmap(area.descriptor, area.size)
        assert has_no_name(area.descriptor)
        area.close()
        area.copy(memoryview(b"x"), 0)
        assert (other[0], other[-3:]) == (b"x"[0], b"abc")
        del area
        if sys.platform == "linux":
            assert not any(other[:])


@pytest.mark.usefixtures("soon")
def test_an_unlinked_region_is_returned_as_a_whole(memory: str) -> None:
    """The system returns no part of it, as of a sealed one."""
    regions = Regions(shared=True)
    stretches = [regions.take(40 * MIB) for _ in range(3)]
    for region in regions.shared.values():
        region.descriptor_to_read()
    del region
    assert len(regions.shared) == 3
    for stretch in stretches:
        regions.put(stretch)

    def is_left() -> int:
        regions.trim()
        return len(regions.shared)

    until(lambda: is_left() == 1, "the end of the other regions")


@pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")
@pytest.mark.parametrize("reason", ["descriptors", "overcommit"])
@on_each_core
def test_memory_is_private_if_the_system_refuses_to_share_it(
    core: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """With vm.overcommit_memory 2, Linux would end the process when it writes to shared memory beyond the limit."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    if reason == "descriptors":
        monkeypatch.setattr("os.memfd_create", fail)
    else:
        monkeypatch.setattr("kvpage_server.core.regions._never_overcommits", lambda: True)
    arena = core.Arena(shared=True)
    slot = arena.allocate(5000)
    slot.body[0] = 1
    assert arena.regions.shared == {}


@on_each_core
def test_briefly_spare_memory_is_kept(core: Any) -> None:
    """However much it is: who flushes a store and fills it again has no memory made ready twice."""
    arena = core.Arena()
    slots = [arena.allocate(256 << 10) for _ in range(1200)]
    began, held = time.monotonic(), arena.held
    del slots
    for _ in range(10):
        arena.trim()
    kept, again = arena.held, [arena.allocate(100 << 10) for _ in range(2500)]
    if time.monotonic() - began < SPARE_FOR:  # or this machine was away
        assert (kept, arena.held) == (held, held)
    assert len(again) == 2500


@on_each_core
def test_spare_memory_is_bounded_without_the_cleaning_thread(core: Any) -> None:
    arena = core.Arena()
    for size in range(8, 60):
        arena.allocate(size * MIB)
        assert arena.held <= 3 * size * MIB


def test_returned_memory_is_allocated_again() -> None:
    """For any size, and adjacent to the memory that it was taken from."""
    regions = Regions()
    region = regions.take(4096).region
    for size in (65536, 3 * MIB, 4096, 12 * MIB):
        stretches = [regions.take(size) for _ in range(48 * MIB // size)]
        spans = sorted((stretch.address, stretch.address + stretch.size) for stretch in stretches)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert {stretch.region for stretch in stretches} == {region}
        for stretch in stretches[::2] + stretches[1::2]:
            regions.put(stretch)
        assert next(iter(region.spare))[0] == 4096
        assert sum(stop - start for start, stop in region.spare) == regions.spare


@pytest.mark.usefixtures("soon")
def test_memory_is_taken_and_handed_back_in_whole_huge_pages() -> None:
    """A huge page that is returned in part would be split, and return as small pages, each zeroed separately."""
    regions = Regions()
    stretches = [regions.take(size * 4096) for size in (1, 700, 1030, 5, 4000)]
    region = stretches[0].region
    assert region.address % HUGE == 0
    assert all(start % HUGE == stop % HUGE == 0 for start, stop in region.fresh)
    for stretch in stretches[1:]:
        regions.put(stretch)

    def is_left() -> list[tuple[int, int]]:
        regions.trim()
        return [*region.spare]

    until(lambda: is_left() == [(4096, HUGE)], "all other pages being handed back")
    regions.put(stretches[0])
    until(lambda: is_left() == [] and regions.spare == 0, "that one, too")


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_free_parts_are_ordered_and_not_adjacent(steps: list[tuple[int, bool]]) -> None:
    spans, cut = Spans((0, 16)), list[tuple[int, int]]()
    for size, gives in steps:
        if gives and cut:
            spans.add(*cut.pop(size % len(cut)))
        elif (start := spans.cut(size)) is not None:
            cut.append((start, start + size))
        parts = sorted([*cut, *spans])
        assert [parts[0][0], parts[-1][1]] == [0, 16]
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        assert all(before[1] < after[0] for before, after in pairwise(spans))


FULL = """
import importlib, resource, sys
core = importlib.import_module(sys.argv[1])
arena = core.Arena()
before = arena.allocate(1000)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (120 << 20), resource.RLIM_INFINITY))
for each in map(int, sys.argv[2:]):
    slots = []
    try:
        while len(slots) < 1 << 20:
            slots.append(arena.allocate(each))
    except MemoryError:
        pass
    else:
        sys.exit("there was no end of memory")
    assert len(slots) * each > 50 << 20, (each, len(slots))
    assert arena.used == before.footprint + len(slots) * slots[0].footprint
    used = arena.used
    for _ in range(100):
        try:
            arena.allocate(400 << 20)
        except MemoryError:
            continue
        sys.exit("there was memory")
    assert arena.used == used
    slots.clear()
    assert arena.used == before.footprint
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert arena.allocate(300 << 20).size == 300 << 20
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (120 << 20), resource.RLIM_INFINITY))
print("all was counted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process so")
@on_each_core
def test_when_the_system_has_no_more_nothing_is_lost(core: Any) -> None:
    """For small slots Python's objects have no memory sooner than the slots, and the plain core consists of them."""
    sizes = ["1048576", "200000", "3000"][: 3 if core.__name__.endswith("native") else 2]
    done = subprocess.run(
        [sys.executable, "-c", FULL, core.__name__, *sizes], capture_output=True, encoding="utf-8", timeout=100
    )
    assert (done.stdout, done.stderr) == ("all was counted\n", "")


@on_each_core
def test_no_thread_sees_a_slot_that_was_returned(core: Any) -> None:
    """A view of a slot is all that the threads have; slots are taken and dropped meanwhile, in every thread's hands."""
    arena, over, wrong = core.Arena(), threading.Event(), list[bytes]()
    shelf: list[list[memoryview]] = [[] for _ in range(4)]

    def look(views: list[memoryview]) -> None:
        while not over.is_set() or views:
            try:
                view = views.pop()
            except IndexError:
                time.sleep(0.0001)
                continue
            first = bytes(view)
            for _ in range(5):
                if bytes(view) != first or first.count(first[:1]) != len(first):
                    wrong.append(first)

    threads = [threading.Thread(target=look, args=(views,)) for views in shelf]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        number = 0
        while time.monotonic() < end:
            for views in shelf:
                number += 1
                slot = arena.allocate((100, 700, 5000)[number % 3])
                slot.body[:] = bytes([number % 251]) * slot.size
                if len(views) < 50:
                    views.append((slot.body, slot.part(10, 90).view)[number % 2])
        del slot
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert number > 100
    assert wrong == []
    assert arena.used == 0


@on_each_core
def test_a_million_slots_leave_nothing_behind(core: Any) -> None:
    """In any order: taken one by one, by the hundred, and dropped in another order."""
    arena, times = core.Arena(), 10_000 if core.__name__.endswith("native") else 1000

    def work(times: int) -> None:
        for i in range(times):
            slots = [arena.allocate(size) for size in (10, 512, 1024, 4096, 16384) for _ in range(20)]
            for slot in slots:
                slot.unit = slots  # which is how a block would be found
            del slots[i % 7 :: 2], slot
            views = [slot.view for slot in slots[:5]]
            slots.clear()
            assert arena.used == sum(map(len, views)) + sum(slot_overhead(len(view)) for view in views)

    def slot_overhead(size: int) -> int:
        return next(shape.pitch - size for shape in shapes if size <= shape.capacity + 20)

    shapes = [slot_shape(capacity_for(size)) for size in (10, 512, 1024, 4096, 16384)]
    work(100)
    gc.collect()
    blocks, before = sys.getallocatedblocks(), resident(os.getpid())
    work(times)
    gc.collect()
    assert arena.used == 0
    assert sys.getallocatedblocks() <= blocks + 100
    assert resident(os.getpid()) <= before + 4 * MIB
