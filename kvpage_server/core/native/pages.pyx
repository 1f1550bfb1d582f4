"""Batches of pages. The reference implementation, `core/python/pages.py`, documents the classes and functions.

A batch is an array of C structures (`Place`) and two lists, of keys and of slots. So parsing, checking and hashing a
page runs without Python objects except its key. Storing and finding a page costs one lookup in a dict.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_CLEAR, Py_INCREF, Py_XINCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset

from kvpage_server.core.native.hashing cimport digest_of
from kvpage_server.core.native.slots cimport Arena, Slot, header_of
from kvpage_server.core.native.unlocked cimport UNLOCKED_FROM
from kvpage_server.core.native.words cimport word_at

import secrets
import struct

from kvpage_server import page as contract
from kvpage_server.core import arguments, pieces

cdef extern from *:
    int popcount "__builtin_popcountll"(unsigned long long) nogil
    int __builtin_clzll(unsigned long long) nogil

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object, object) except? NULL


# -- the page contract in types of C -----------------------------------------------------------------------------------

cdef packed struct Header:
    char[4] magic
    uint8_t version
    uint8_t dtype
    uint8_t kv_type
    uint8_t flags
    uint32_t page_size
    uint32_t head_dim
    uint32_t layer
    uint32_t head
    uint64_t page
    uint64_t created
    uint64_t ttl
    uint32_t body_size
    uint32_t reserved
    uint64_t checksum

cdef enum:
    NAME_WORDS = 5
    PAGE_WORDS = 10
    MOST_REQ_ID = 256
    LONGEST_KEY = 3 + MOST_REQ_ID + 4 * (1 + 10)
    LONGEST_NUMBER = 15  # digits of the largest number, which is a ttl
    MOST_HASHED = 4 << 20  # bytes that are hashed in one step, in about 0.5 ms

cdef int64_t MAX_LAYER = contract.MAX_LAYER, MAX_HEAD = contract.MAX_HEAD, MAX_PAGE = contract.MAX_PAGE
cdef int64_t MAX_KV_TYPE = contract.MAX_KV_TYPE, MAX_U32 = contract.MAX_U32, MAX_TTL = contract.MAX_TTL
cdef uint32_t TYPES = pieces.TYPES, GROUPS = pieces.GROUPS, ROW_HEADS = pieces.ROW_HEADS
cdef uint8_t[256] ITEMSIZE  # bytes of an element by dtype; 0 for an invalid dtype
cdef uint8_t[256] IN_REQ_ID  # by byte: 1 if a request id may contain it


cdef fill_tables():
    """Fill the two tables above."""
    for dtype in range(256):
        ITEMSIZE[dtype] = contract.DType(dtype).itemsize if dtype in contract.DType.__members__.values() else 0
        IN_REQ_ID[dtype] = dtype > 0x20 and dtype != 0x7F and dtype != ord(":")


cdef check_contract():
    """Raise ImportError if the header's layout or a constant differs from `page.py` and `arguments.py`."""
    cdef Header header
    values = (b"KVPG", 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    memcpy(header.magic, b"KVPG", 4)
    header.version, header.dtype, header.kv_type, header.flags = 2, 3, 4, 5
    header.page_size, header.head_dim, header.layer, header.head = 6, 7, 8, 9
    header.page, header.created, header.ttl = 10, 11, 12
    header.body_size, header.reserved, header.checksum = 13, 14, 15
    same = contract.LAYOUT.pack(*values) == (<char *>&header)[:sizeof(Header)]
    if not (
        same
        and (contract.MAGIC, contract.VERSION, contract.MAX_REQ_ID) == (b"KVPG", 2, MOST_REQ_ID)
        and (arguments.NAME_WORDS, arguments.PAGE_WORDS) == (NAME_WORDS, PAGE_WORDS)
        and len(str(contract.MAX_TTL)) == LONGEST_NUMBER
    ):
        raise ImportError("the compiled core is of another version than the package: build it again")


fill_tables()
check_contract()


# -- the pages of a block ----------------------------------------------------------------------------------------------

EACH_ROW = struct.Struct("I4xQ").iter_unpack  # yields the fields of each `Row`
cdef uint64_t SCATTER = secrets.randbits(64) | 1  # factor of the hash; random, so that a client cannot cause collisions


cdef class PageSet:
    """The set of pages of one block. Costs: O(1) to add, remove and find a page."""

    def __cinit__(self, bytes req_id not None, uint32_t page):
        self.req_id, self.page = req_id, page
        self.rows = &self.one
        self.bits_of_room = 0

    def __dealloc__(self):
        self.drop_rows()

    cdef void drop_rows(self) noexcept:
        """Free the table, and use an empty one of one entry."""
        if self.rows != &self.one:
            free(self.rows)
        self.rows = &self.one
        self.one.number = 0
        self.one.heads = 0
        self.bits_of_room = 0
        self.taken = 0

    cdef Row *row(self, uint32_t number) noexcept:
        """Return the entry of a row, or the free entry where it would be added; NULL if the table has to grow first.

        `number` is the row's number plus one. Amortised O(1): a multiplicative hash, then linear probing.
        """
        cdef uint32_t last = (<uint32_t>1 << self.bits_of_room) - 1
        cdef uint32_t i
        if not last:
            return &self.one if self.one.number in (0, number) else NULL
        i = <uint32_t>(number * SCATTER >> (64 - self.bits_of_room))
        while self.rows[i].number != number:
            if not self.rows[i].number:
                return NULL if 4 * self.taken >= 3 * last else &self.rows[i]
            i = (i + 1) & last
        return &self.rows[i]

    cdef int grow(self) except -1:
        """Replace the table by one that is at most half full after the next row.

        Drop rows without pages. O(entries).
        """
        cdef Row *old = self.rows
        cdef uint32_t i, room = <uint32_t>1 << self.bits_of_room, living = 0
        cdef int bits = 2
        for i in range(room):
            living += old[i].heads != 0
        while (<uint32_t>1 << bits) < 2 * (living + 1):
            bits += 1
        cdef Row *new = <Row *>calloc(<size_t>1 << bits, sizeof(Row))
        if new == NULL:
            raise MemoryError("the system has no memory for the index of a block")
        self.rows, self.bits_of_room, self.taken = new, bits, living
        for i in range(room):
            if old[i].heads:
                self.row(old[i].number)[0] = old[i]
        if old != &self.one:
            free(old)
        return 0

    cdef Row *row_to_fill(self, uint32_t number) except NULL:
        """Return the entry of a row. Add the row if the table does not have it. Raise MemoryError."""
        cdef Row *found = self.row(number)
        if found == NULL:
            self.grow()
            found = self.row(number)
        if not found.number:
            found.number = number
            self.taken += 1
        return found

    cdef void change(self) noexcept:
        """Count a change of a page."""
        self.shape_known = False
        self.version += 1

    def changed(self):
        self.change()

    cdef int add_page(self, uint32_t layer, uint32_t head, uint32_t kv_type) except -1:
        cdef uint64_t bit = <uint64_t>1 << head % ROW_HEADS
        cdef Row *row = self.row_to_fill(number_of(layer, head, kv_type))
        self.change()
        if not row.heads & bit:
            row.heads |= bit
            self.pages += 1
        return 0

    def add(self, uint32_t layer, uint32_t head, uint32_t kv_type):
        self.add_page(layer, head, kv_type)

    def discard(self, uint32_t layer, uint32_t head, uint32_t kv_type):
        cdef uint64_t bit = <uint64_t>1 << head % ROW_HEADS
        cdef Row *row = self.row(number_of(layer, head, kv_type))
        self.change()
        if row != NULL and row.heads & bit:
            row.heads ^= bit
            self.pages -= 1

    def has(self, uint32_t layer, uint32_t head, uint32_t kv_type):
        cdef Row *row = self.row(number_of(layer, head, kv_type))
        return row != NULL and row.heads >> head % ROW_HEADS & 1 == 1

    def each_row(self):
        return EACH_ROW(self.sorted_rows())

    cdef bytes sorted_rows(self):
        """Return the rows with pages as an array of `Row`, in bytes, sorted by number.

        The numbers are those of the rows.
        """
        cdef size_t i, count = 0, room = <size_t>1 << self.bits_of_room
        for i in range(room):
            count += self.rows[i].heads != 0
        found = PyBytes_FromStringAndSize(NULL, count * sizeof(Row))
        cdef Row *rows = <Row *>PyBytes_AS_STRING(found)
        count = 0
        for i in range(room):
            if self.rows[i].heads:
                rows[count] = self.rows[i]
                rows[count].number -= 1
                count += 1
        sort(rows, count)
        return found

    def outline(self):
        cdef size_t i
        cdef uint32_t plane, group, layers = 0, heads = 0, planes = 0
        cdef Row *row
        for i in range(<size_t>1 << self.bits_of_room):
            row = &self.rows[i]
            if row.heads:
                plane, group = (row.number - 1) // GROUPS, (row.number - 1) % GROUPS
                layers = max(layers, plane // TYPES + 1)
                heads = max(heads, group * ROW_HEADS + 64 - __builtin_clzll(row.heads))
                planes |= <uint32_t>1 << plane % TYPES
        return layers, heads, planes

    @property
    def bits(self):
        return dict(self.each_row())

    @bits.setter
    def bits(self, rows):
        cdef Row *row
        cdef uint64_t heads
        self.drop_rows()
        self.pages = 0
        self.change()
        for number, heads in rows.items():
            row = self.row_to_fill(number + 1)
            row.heads = heads
            self.pages += popcount(heads)


cdef int sort(Row *rows, size_t count) except -1:
    """Sort rows by number in O(count): a radix sort by the four bytes of a number, the lowest byte first."""
    cdef size_t[256] starts
    cdef size_t i, start, size
    cdef int shift
    cdef Row *other = <Row *>malloc(max(count, <size_t>1) * sizeof(Row))
    if other == NULL:
        raise MemoryError("the system has no memory for the index of a block")
    cdef Row *source = rows
    cdef Row *target = other
    for shift in range(0, 32, 8):
        # Count the rows with each value of this byte, and compute where each group starts.
        memset(starts, 0, sizeof(starts))
        for i in range(count):
            starts[source[i].number >> shift & 255] += 1
        start = 0
        for i in range(256):
            size, starts[i] = starts[i], start
            start += size
        # Copy each row to the next place of its group.
        for i in range(count):
            target[starts[source[i].number >> shift & 255]] = source[i]
            starts[source[i].number >> shift & 255] += 1
        source, target = target, source
    free(other)  # after an even number of passes, the sorted rows are in `rows`
    return 0


cdef inline uint32_t number_of(uint32_t layer, uint32_t head, uint32_t kv_type) noexcept:
    """Return the number of a page's row plus one."""
    return (layer * TYPES + kv_type) * GROUPS + head // ROW_HEADS + 1


# -- names -------------------------------------------------------------------------------------------------------------

cdef inline int64_t number(const char *text, Py_ssize_t size, int64_t most) noexcept:
    """Parse decimal digits without leading zeros. Return the number; -1 if it is invalid, or more than `most`."""
    cdef int64_t value = 0
    cdef Py_ssize_t i
    if size < 1 or size > LONGEST_NUMBER or (text[0] == c"0" and size > 1):
        return -1
    for i in range(size):
        if text[i] < c"0" or text[i] > c"9":
            return -1
        value = value * 10 + (text[i] - c"0")
    return value if value <= most else -1


cdef bint is_req_id(const char *text, Py_ssize_t size) noexcept:
    """Return whether bytes are a valid request id."""
    cdef Py_ssize_t i
    for i in range(size):
        if not IN_REQ_ID[<uint8_t>text[i]]:
            return False
    return 1 <= size <= MOST_REQ_ID


cdef inline int64_t number_at(words, Py_ssize_t i, int64_t most) except -2:
    """Parse word `i` with `number`; return -1 for a slot, too. Raise IndexError."""
    cdef Py_ssize_t size
    cdef void *slot
    cdef const char *text = word_at(words, i, &size, &slot)
    return -1 if slot != NULL or text == NULL else number(text, size, most)


cdef inline char *put_part(char *at, const char *text, Py_ssize_t size) noexcept:
    """Write a colon and a text at `at`. Return the address behind them."""
    at[0] = c":"
    memcpy(at + 1, text, size)
    return at + 1 + size


cdef bytes read_name(words, Py_ssize_t first, Place *place):
    """Return the key of the page that five words name, and fill its place. Return None if a word is invalid."""
    cdef char[LONGEST_KEY] key
    cdef char *end = key + 2
    cdef Py_ssize_t size, i
    cdef void *slot
    cdef int64_t[NAME_WORDS] value
    cdef int64_t[NAME_WORDS] most = [0, MAX_LAYER, MAX_HEAD, MAX_PAGE, MAX_KV_TYPE]
    cdef const char *text = word_at(words, first, &size, &slot)
    if text == NULL or not is_req_id(text, size):
        return None
    memcpy(key, b"kv", 2)
    end = put_part(end, text, size)
    place.req_id = <uint16_t>size
    for i in range(1, NAME_WORDS):
        text = word_at(words, first + i, &size, &slot)
        value[i] = -1 if text == NULL or slot != NULL else number(text, size, most[i])
        if value[i] < 0:
            return None
        end = put_part(end, text, size)
    place.layer, place.head = <uint16_t>value[1], <uint16_t>value[2]
    place.page, place.kv_type = <uint32_t>value[3], <uint8_t>value[4]
    return PyBytes_FromStringAndSize(key, end - key)


cdef raise_bad_page(words, Py_ssize_t first, Py_ssize_t place, Py_ssize_t width, bint strict):
    """Raise BadPage for a page with an invalid word, with the message of the reference implementation.

    `place` is the page's index in the batch, `width` the number of its words.
    """
    cdef Py_ssize_t at = first + place * width
    some = words[at : at + width]
    try:
        arguments.page_name(some)
        if width == PAGE_WORDS:
            body = some[PAGE_WORDS - 1]
            size = len(body) if isinstance(body, bytes) else body.size
            arguments.page_shape(some[NAME_WORDS : PAGE_WORDS - 1], size, strict=strict)
    except contract.PageError as error:
        raise arguments.BadPage(str(error), place) from None
    raise SystemError(f"the cores do not agree on what these words say: {some[: PAGE_WORDS - 1]}")


cdef class PageNames:
    """The names of up to `most` pages, parsed from five words each, from word `first` on."""

    def __init__(self, words, Py_ssize_t first, Py_ssize_t most):
        cdef Py_ssize_t i
        self.allocate(words, first, most, NAME_WORDS)
        for i in range(self.room):
            key = read_name(words, first + i * NAME_WORDS, &self.places[i])
            if key is None:
                raise_bad_page(words, first, i, NAME_WORDS, False)
            self.keys.append(key)
            self.count += 1

    def __dealloc__(self):
        free(self.places)

    cdef int allocate(self, words, Py_ssize_t first, Py_ssize_t most, Py_ssize_t width) except -1:
        """Allocate places for up to `most` pages of `width` words each, from word `first` on."""
        if self.places != NULL or first < 0:
            raise ValueError("a batch is read once, from a word that is there")
        self.keys = []
        self.room = max(min(most, (len(words) - first) // width), 0)
        self.places = <Place *>malloc(max(self.room, 1) * sizeof(Place))
        if self.places == NULL:
            raise MemoryError("the system has no memory for the pages of a batch")
        return 0

    def __len__(self):
        return self.count

    cdef int check(self, Py_ssize_t i) except -1:
        """Raise IndexError if there is no page `i`."""
        if not 0 <= i < self.count:
            raise IndexError("there is no such page")
        return 0

    cdef const char *key(self, Py_ssize_t i) noexcept:
        """Return the bytes of the key of page `i`."""
        return PyBytes_AS_STRING(<object>PyList_GET_ITEM(self.keys, i))

    cdef bint is_same_block(self, Py_ssize_t i, Py_ssize_t j) noexcept:
        """Return whether two pages belong to one block."""
        cdef Place *one = &self.places[i]
        cdef Place *other = &self.places[j]
        return (
            one.page == other.page
            and one.req_id == other.req_id
            and memcmp(self.key(i) + 3, self.key(j) + 3, one.req_id) == 0
        )

    cdef tuple block_name(self, Py_ssize_t i):
        """Return the request id and page id of the block of page `i`."""
        return PyBytes_FromStringAndSize(self.key(i) + 3, self.places[i].req_id), self.places[i].page

    def name(self, Py_ssize_t i):
        self.check(i)
        place = &self.places[i]
        req_id, page = self.block_name(i)
        return arguments.PageName(self.keys[i], req_id, place.layer, place.head, page, place.kv_type)

    def block(self, Py_ssize_t i):
        self.check(i)
        return self.block_name(i)

    def blocks(self):
        cdef Py_ssize_t i
        return [self.block_name(i) for i in range(self.count) if i == 0 or not self.is_same_block(i, i - 1)]

    def runs(self, places not None):
        cdef Py_ssize_t start = 0, stop
        cdef list found = []
        places = list(places)
        for stop in range(1, len(places) + 1):
            if stop < len(places):
                self.check(places[stop])
                if self.is_same_block(places[start], places[stop]):
                    continue
            found.append((self.block(places[start]), places[start:stop]))
            start = stop
        return found


# -- pages to store ----------------------------------------------------------------------------------------------------

cdef class NewPages(PageNames):
    """Up to `most` pages to store, parsed from ten words each, from word `first` on, with headers and bodies in slots.
    """

    cdef readonly list slots

    def __init__(
        self,
        words,
        Py_ssize_t first,
        Py_ssize_t most,
        Arena arena not None,
        int64_t now,
        bint strict,
        bint hashes,
    ):
        cdef Py_ssize_t i, left = MOST_HASHED
        self.allocate(words, first, most, PAGE_WORDS)
        self.slots = []
        for i in range(self.room):
            key = read_name(words, first + i * PAGE_WORDS, &self.places[i])
            slot = None
            if key is not None:
                slot = self.describe(words, first + i * PAGE_WORDS, i, arena, now, strict, hashes, &left)
            if slot is None:
                raise_bad_page(words, first, i, PAGE_WORDS, strict)
            self.keys.append(key)
            self.slots.append(slot)
            self.count += 1
            if left <= 0:
                break

    cdef Slot describe(
        self,
        words,
        Py_ssize_t first,
        Py_ssize_t i,
        Arena arena,
        int64_t now,
        bint strict,
        bint hashes,
        Py_ssize_t *left,
    ):
        """Return the slot of page `i`, with its header; None if a word is invalid.

        Subtract hashed bytes from `left`.
        """
        cdef Place *place = &self.places[i]
        cdef Header header
        cdef Py_ssize_t size
        cdef void *held
        cdef const char *body
        cdef Slot slot
        cdef uint64_t digest
        cdef int64_t dtype = number_at(words, first + 5, 255)
        cdef int64_t page_size = number_at(words, first + 6, MAX_U32)
        cdef int64_t head_dim = number_at(words, first + 7, MAX_U32)
        cdef int64_t ttl = number_at(words, first + 8, MAX_TTL)
        if dtype < 0 or not ITEMSIZE[dtype] or page_size < 1 or head_dim < 1 or ttl < 0:
            return None
        # Check the size of the body. A short body has no slot yet: copy it to a new one.
        body = word_at(words, first + 9, &size, &held)
        if body == NULL or size > MAX_U32 or (strict and not fills(size, <uint64_t>page_size * <uint64_t>head_dim, ITEMSIZE[dtype])):
            return None
        if held != NULL:
            slot = <Slot>held
        else:
            slot = arena.take(size)
            memcpy(slot.at, body, size)
        # Hash the body, unless the parser has hashed it while it was received.
        digest = slot.digest if hashes else 0
        if hashes and not digest:
            digest = hash_of(slot)
            left[0] -= size
        slot.digest = 0
        # Write the header.
        memcpy(header.magic, b"KVPG", 4)
        header.version, header.flags, header.reserved = 2, 0, 0
        header.dtype, header.kv_type = <uint8_t>dtype, place.kv_type
        header.page_size, header.head_dim = <uint32_t>page_size, <uint32_t>head_dim
        header.layer, header.head, header.page = place.layer, place.head, place.page
        header.created, header.ttl = now, ttl
        header.body_size, header.checksum = <uint32_t>size, digest
        memcpy(header_of(slot), &header, sizeof(Header))
        place.expires = now + ttl * 1000 if ttl else 0
        return slot

    @classmethod
    def one(cls, name, Slot slot not None, int64_t expires):
        cdef NewPages pages = cls.__new__(cls)
        key, req_id, layer, head, page, kv_type = name
        pages.allocate((), 0, 0, PAGE_WORDS)
        pages.places[0] = Place(expires, page, layer, head, len(req_id), kv_type, NULL)
        pages.keys, pages.slots, pages.count = [key], [slot], 1
        return pages

    def expires(self, Py_ssize_t i):
        self.check(i)
        return self.places[i].expires

    def put(self, dict entries not None, dict requests not None, Py_ssize_t at, type make not None, list fresh, *, bint one_block):
        cdef Py_ssize_t i = at, stop = at, grown = 0, stored = 0, replaced = 0, footprint, size
        cdef Py_ssize_t key_bytes = 0, name_bytes = 0, made_before
        cdef list blocks = [], made = [], beside = []
        cdef Place *place
        cdef PyObject *found
        cdef Slot slot, old
        cdef PageSet block = None
        self.check(at)
        cdef int64_t expires = self.places[at].expires
        try:
            while i < self.count and self.places[i].expires == expires:
                # Find the value that the page replaces. If that is no single page in memory, the store has to decide.
                place, key = &self.places[i], <object>PyList_GET_ITEM(self.keys, i)
                slot = <Slot>PyList_GET_ITEM(self.slots, i)
                old = None
                found = PyDict_GetItemWithError(entries, key)
                if found != NULL:
                    if type(<object>found) is not Slot or type((<Slot>found).unit) is not make:
                        break
                    old = <Slot>found
                # Find or create the block, unless it is the one of the page before.
                if block is None or not self.is_same_block(i, i - 1):
                    if one_block and block is not None:
                        break
                    if old is not None:  # it is a page, so its block exists
                        block = <PageSet>old.unit
                        note_neighbours(requests, block, beside)
                    else:
                        made_before = PyList_GET_SIZE(made)
                        other = self.open_block(requests, i, make, made, beside)
                        if other is None:
                            break
                        name_bytes += (PyList_GET_SIZE(made) - made_before) * place.req_id
                        block = <PageSet>other
                    blocks.append(block)
                # Count the growth of the block. If an error follows, `take_back` undoes the changes.
                footprint, size, stop = footprint_of(slot), slot.size, i + 1
                slot.unit, slot.expires, place.old = block, expires, found
                Py_XINCREF(found)
                if old is None:
                    key_bytes += len(<bytes>key)
                    size += sizeof(Header)
                else:
                    footprint -= footprint_of(old)
                    size -= old.size
                    replaced += old.expires != 0
                    block.change()
                grown += footprint
                stored += size
                block.footprint += footprint
                # Add the page to the block, and store the slot in the index.
                if old is None:
                    block.add_page(place.layer, place.head, place.kv_type)
                    if fresh is not None:
                        fresh.append(key)
                if expires and not 0 < block.soonest < expires:
                    block.soonest = expires
                PyDict_SetItem(entries, key, slot)
                i += 1
            result = i, blocks, PyList_GET_SIZE(made), beside, grown, stored, replaced, key_bytes, name_bytes
        except:
            self.take_back(entries, requests, at, stop, made)
            raise
        for i in range(at, stop):
            Py_CLEAR(self.places[i].old)
        return result

    cdef int take_back(self, dict entries, dict requests, Py_ssize_t at, Py_ssize_t stop, list made) except -1:
        """Undo the changes of a `put` that failed: of the pages from index `at` to before `stop`. `made` has the
        created blocks.
        """
        cdef Py_ssize_t i
        cdef Place *place
        cdef Slot slot
        cdef PageSet block
        for i in range(stop - 1, at - 1, -1):
            place, slot = &self.places[i], self.slots[i]
            block = slot.unit
            block.footprint -= footprint_of(slot)
            if place.old == NULL:
                entries.pop(self.keys[i], None)
                block.discard(place.layer, place.head, place.kv_type)
            else:
                entries[self.keys[i]] = <Slot>place.old
                block.footprint += footprint_of(<Slot>place.old)
                Py_CLEAR(place.old)
        for block in made:
            request = requests.get(block.req_id)
            if request is not None:
                request.pop(block.page, None)
                if not request:
                    del requests[block.req_id]
        return 0

    cdef object open_block(self, dict requests, Py_ssize_t i, type make, list made, list beside):
        """Return the block of page `i`. Create it with `make` if it does not exist, and append it to `made`.

        Return None if the store has to decide: the block is an extent, or unloaded.
        """
        cdef Place *place = &self.places[i]
        req_id = PyBytes_FromStringAndSize(self.key(i) + 3, place.req_id)
        cdef PyObject *request = PyDict_GetItemWithError(requests, req_id)
        cdef PyObject *found
        page = place.page
        if request == NULL:
            block = make(req_id, page)
            made.append(block)
            PyDict_SetItem(requests, req_id, {page: block})
            return block
        found = PyDict_GetItemWithError(<object>request, page)
        if found == NULL:
            block = make(req_id, page)
            made.append(block)
            PyDict_SetItem(<object>request, page, block)
        elif type(<object>found) is not make or (<PageSet>found).extent is not None:
            return None
        else:
            block = <object>found
        note_neighbours(requests, <PageSet>block, beside)
        return block


cdef int note_neighbours(dict requests, PageSet block, list beside) except -1:
    """Append a block to `beside` if its request has the block with the page id before or after it."""
    cdef dict request = requests[block.req_id]
    if len(request) > 1 and (<int64_t>block.page - 1 in request or <int64_t>block.page + 1 in request):
        beside.append(block)
    return 0


cdef inline Py_ssize_t footprint_of(Slot slot) noexcept:
    return slot.chunk.size_class.pitch


cdef bint fills(uint64_t size, uint64_t elements, uint64_t itemsize) noexcept:
    """Return whether a body of `size` bytes has `elements` elements. It divides, because a product may overflow."""
    return size % itemsize == 0 and size // itemsize == elements


cdef uint64_t hash_of(Slot slot) noexcept:
    """Return the XXH3-64 of a slot's body. A long one is hashed without the interpreter's lock."""
    cdef uint64_t digest
    cdef const char *at = slot.at
    cdef Py_ssize_t size = slot.size
    if size < UNLOCKED_FROM:
        return digest_of(at, size)
    with nogil:
        digest = digest_of(at, size)
    return digest


# -- lookups -----------------------------------------------------------------------------------------------------------

def look_up(dict entries not None, list keys not None, Py_ssize_t first, Py_ssize_t stop, Py_ssize_t most, int64_t now):
    cdef list found = [], blocks = [], absent = [], others = []
    cdef PyObject *entry
    cdef PyObject *last = NULL
    cdef Slot slot
    cdef Py_ssize_t i
    for i in range(max(first, 0), min(stop, len(keys))):
        entry = PyDict_GetItemWithError(entries, <object>PyList_GET_ITEM(keys, i))
        if entry == NULL:
            found.append(None)
            absent.append(i)
            continue
        if type(<object>entry) is Slot:
            slot = <Slot>entry
            if not 0 < slot.expires <= now and (<PyObject *>slot.unit == last or isinstance(slot.unit, PageSet)):
                found.append(slot)
                if <PyObject *>slot.unit != last:
                    last = <PyObject *>slot.unit
                    blocks.append(slot.unit)
                most -= slot.size
                if most <= 0:
                    break
                continue
        found.append(None)
        others.append(i)
    return found, blocks, absent, others


def filled(list found not None, filler):
    cdef Py_ssize_t i
    cdef tuple result = PyTuple_New(PyList_GET_SIZE(found))
    for i in range(PyList_GET_SIZE(found)):
        item = <object>PyList_GET_ITEM(found, i)
        if item is None:
            item = filler
        Py_INCREF(item)
        PyTuple_SET_ITEM(result, i, item)
    return result


# -- changes of blocks -------------------------------------------------------------------------------------------------

cdef packed struct Change:  # before each request id in the records of changes
    uint8_t kind
    uint16_t req_id  # bytes of the request id
    uint32_t page

cdef enum:
    REMOVED, ADDED, CLEARED  # kinds of changes
    LEAST_ROOM = 1 << 20  # bytes of the first buffer, which is kept
    LEAST_DIGITS = 16  # of a hash, of which the last 16 are used

cdef uint64_t GROUP_FACTOR = 0x9E3779B97F4A7C15  # spreads the numbers of groups over the bits of a hash


cdef class BlockChanges:
    """The queue of KV events: records in one buffer, which is compacted when it is full."""

    cdef char *buffer
    cdef Py_ssize_t begin, end, room  # the records are at begin to end, in a buffer of `room` bytes
    cdef Py_ssize_t count, most
    cdef object wake
    cdef readonly Py_ssize_t dropped

    def __init__(self, Py_ssize_t most, wake):
        self.most, self.wake = most, wake

    def __dealloc__(self):
        free(self.buffer)

    def __len__(self):
        return self.count

    @property
    def nbytes(self):
        return self.end - self.begin

    def note(self, bytes req_id not None, uint32_t page, bint was_added):
        self.append(ADDED if was_added else REMOVED, req_id, page)

    def add_all(self, list blocks not None):
        cdef PageSet block
        for block in blocks:
            self.append(ADDED, block.req_id, block.page)

    def clear(self):
        self.append(CLEARED, b"", 0)

    def take(self, Py_ssize_t most):
        cdef Py_ssize_t count = min(max(most, 0), self.count), size = 0, i
        for i in range(count):
            size += self.size_at(self.begin + size)
        records = PyBytes_FromStringAndSize(self.buffer + self.begin, size) if count else b""
        self.begin += size
        self.count -= count
        if not self.count:
            self.begin = self.end = 0
            if self.room > LEAST_ROOM:
                free(self.buffer)
                self.buffer, self.room = NULL, 0
        return count, records

    cdef Py_ssize_t size_at(self, Py_ssize_t at) noexcept:
        """Return the bytes of the record at a place of the buffer."""
        return sizeof(Change) + (<Change *>(self.buffer + at)).req_id

    cdef int append(self, uint8_t kind, bytes req_id, uint32_t page) except -1:
        """Append a record. Raise MemoryError, and OverflowError for a request id that no client can send."""
        cdef Py_ssize_t size = len(req_id), before = self.count
        cdef Change *change
        if size > 0xFFFF:
            raise OverflowError("a request id has more than 65,535 bytes")
        if self.end + <Py_ssize_t>sizeof(Change) + size > self.room:
            self.make_room(sizeof(Change) + size)
        change = <Change *>(self.buffer + self.end)
        change.kind, change.req_id, change.page = kind, <uint16_t>size, page
        memcpy(self.buffer + self.end + sizeof(Change), PyBytes_AS_STRING(req_id), size)
        self.end += sizeof(Change) + size
        self.count += 1
        if self.count > self.most:
            self.begin += self.size_at(self.begin)
            self.count -= 1
            self.dropped += 1
        if self.count > before == 0:
            self.wake()
        return 0

    cdef int make_room(self, Py_ssize_t size) except -1:
        """Move the records to the begin of a buffer that is at most half full after `size` more bytes. Amortised O(1)
        for each byte. Raise MemoryError.
        """
        cdef Py_ssize_t used = self.end - self.begin, room = max(self.room, LEAST_ROOM)
        cdef char *to = self.buffer
        while room < 2 * (used + size):
            room *= 2
        if room > self.room:
            to = <char *>malloc(room)
            if to == NULL:
                raise MemoryError("the system has no memory for the changes of blocks")
        if used:
            memmove(to, self.buffer + self.begin, used)
        if to != self.buffer:
            free(self.buffer)
        self.buffer, self.room, self.begin, self.end = to, room, 0, used
        return 0


cdef struct Hashed:  # a block whose request id ends with a hash, in the order of first changes
    uint64_t hash
    uint32_t group
    bint was_added


def changed_blocks(bytes records not None):
    cdef const char *text = PyBytes_AS_STRING(records)
    cdef Py_ssize_t size = len(records), at = 0, most = count_of(text, size)
    cdef Py_ssize_t space, count = 0, last_space = -1
    cdef const char *req_id
    cdef const char *last = NULL  # the request id of the change that chose `group`
    cdef Change change
    cdef Hashed *blocks = NULL
    cdef uint32_t *table = NULL
    cdef uint32_t group = 0, last_page = 0, i
    cdef int bits = 1
    cdef uint64_t hash
    cdef bint was_cleared = False
    cdef dict groups = {}, others = {}
    while (<Py_ssize_t>1 << bits) <= 2 * most:
        bits += 1
    cdef uint32_t mask = (<uint32_t>1 << bits) - 1
    try:
        blocks = <Hashed *>malloc((most + 1) * sizeof(Hashed))
        table = <uint32_t *>calloc(<size_t>1 << bits, sizeof(uint32_t))  # index in `blocks` plus one; 0 for none
        if blocks == NULL or table == NULL:
            raise MemoryError("the system has no memory for the changes of blocks")
        while at < size:
            memcpy(&change, text + at, sizeof(Change))
            req_id = text + at + sizeof(Change)
            at += sizeof(Change) + change.req_id
            if change.kind == CLEARED:
                was_cleared, groups, others = True, {}, {}
                count, last_space = 0, -1
                memset(table, 0, sizeof(uint32_t) << bits)
                continue
            # Find the group, unless it is the one of the change before. No digit is a dot.
            if not (
                last_space > 0
                and change.page == last_page
                and ends_with_hash(req_id, last_space + 1, change.req_id)
                and not memcmp(req_id, last, last_space + 1)
            ):
                space = last_dot(req_id, change.req_id)
                if not ends_with_hash(req_id, space + 1, change.req_id):
                    others[req_id[: change.req_id], change.page] = change.kind == ADDED
                    continue
                last, last_space, last_page = req_id, space, change.page
                group = <uint32_t>groups.setdefault((req_id[: max(space, 0)], last_page), len(groups))
            hash = hash_in(text + at - LEAST_DIGITS)
            # Find or add the block. Linear probing in a table that is at most half full.
            i = <uint32_t>(((hash ^ group * GROUP_FACTOR) * SCATTER) >> (64 - bits))
            while table[i] and not (blocks[table[i] - 1].hash == hash and blocks[table[i] - 1].group == group):
                i = (i + 1) & mask
            if not table[i]:
                blocks[count].hash, blocks[count].group = hash, group
                count += 1
                table[i] = <uint32_t>count
            blocks[table[i] - 1].was_added = change.kind == ADDED
        return was_cleared, packed_groups(groups, blocks, count), others
    finally:
        free(blocks)
        free(table)


cdef Py_ssize_t count_of(const char *text, Py_ssize_t size) except -1:
    """Return the number of records. Raise ValueError if the text ends within one."""
    cdef Py_ssize_t at = 0, count = 0
    while size - at >= <Py_ssize_t>sizeof(Change):
        at += sizeof(Change) + (<const Change *>(text + at)).req_id
        count += 1
    if at != size:
        raise ValueError("the records of changes end within one")
    return count


cdef Py_ssize_t last_dot(const char *req_id, Py_ssize_t size) noexcept:
    """Return the place of the last dot, -1 if there is none."""
    cdef Py_ssize_t at = size - 1
    while at >= 0 and req_id[at] != b".":
        at -= 1
    return at


cdef bint ends_with_hash(const char *req_id, Py_ssize_t begin, Py_ssize_t size) noexcept:
    """Return whether the bytes from `begin` to `size` are enough hexadecimal digits, in a loop for vectors."""
    cdef uint8_t others = 0
    cdef Py_ssize_t i
    for i in range(begin, size):
        others |= (<uint8_t>(req_id[i] - 48) > 9) & (<uint8_t>(req_id[i] - 97) > 5)
    return size - begin >= LEAST_DIGITS and not others


cdef uint64_t hash_in(const char *digits) noexcept:
    """Return the number that 16 hexadecimal digits mean."""
    cdef uint64_t value = 0
    cdef int i
    for i in range(LEAST_DIGITS):
        value = value << 4 | (<uint8_t>digits[i] & 15) + 9 * (<uint8_t>digits[i] >> 6)  # 97 & 15 is 1
    return value


cdef list packed_groups(dict groups, Hashed *blocks, Py_ssize_t count):
    """Return (name before the hash, page id, removed hashes, added hashes) of each group."""
    cdef Py_ssize_t i, room = 2 * len(groups) + 1
    cdef uint32_t *counts = <uint32_t *>calloc(room, sizeof(uint32_t))  # removed and added blocks of each group
    cdef char **to = <char **>calloc(room, sizeof(char *))
    cdef list arrays = []
    try:
        if counts == NULL or to == NULL:
            raise MemoryError("the system has no memory for the changes of blocks")
        for i in range(count):
            counts[2 * blocks[i].group + blocks[i].was_added] += 1
        for i in range(2 * <Py_ssize_t>len(groups)):
            array = PyBytes_FromStringAndSize(NULL, 5 + 9 * <Py_ssize_t>counts[i]) if counts[i] else b""
            arrays.append(array)
            if counts[i]:
                to[i] = PyBytes_AS_STRING(array)
                to[i][0] = <char>0xDD
                to[i] = put_big_endian(to[i] + 1, counts[i], 4)
        for i in range(count):
            at = &to[2 * blocks[i].group + blocks[i].was_added]
            at[0][0] = <char>0xCF
            at[0] = put_big_endian(at[0] + 1, blocks[i].hash, 8)
        return [(*name, arrays[2 * group], arrays[2 * group + 1]) for name, group in groups.items()]
    finally:
        free(counts)
        free(to)


cdef char *put_big_endian(char *to, uint64_t value, int size) noexcept:
    cdef int i
    for i in range(size):
        to[i] = <char>(value >> 8 * (size - 1 - i))
    return to + size
