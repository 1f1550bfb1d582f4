"""Glob patterns. `Glob` compiles a pattern in O(pattern), and compares a name in O(pattern + name).

Stars divide a pattern into parts. The first and the last part are compared at the two ends of a name, and each part
between them at its first occurrence, without backtracking. A part without wildcards is found by the algorithm of Knuth,
Morris and Pratt, or in a long name by `bytes.find`. A part with wildcards is compared at each position; if that takes
many comparisons, it is found by a bit-parallel search ("shift-and": R. Baeza-Yates and G. Gonnet, A new approach to
text searching, 1992), whose masks are kept for the next names. The reference implementation is in
`core/python/coding.py`.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport UINT64_MAX, uint16_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

from kvpage_server.core.python.coding import LONGEST_PART as _LONGEST_PART
from kvpage_server.core.python.coding import LONGEST_PATTERN as _LONGEST_PATTERN

cdef enum:
    ANY = 256  # an item that is ?
    CLASSES = 257  # CLASSES + i: an item that is class i; items below 256 are bytes

cdef Py_ssize_t LONGEST_PART = _LONGEST_PART  # at most 64, the bits of a mask
cdef Py_ssize_t LONGEST_PATTERN = _LONGEST_PATTERN
cdef Py_ssize_t USUAL = 4  # comparisons of a byte of a name with items of a part with wildcards
cdef Py_ssize_t WASTED = 4096  # comparisons in addition to the usual ones, until the pattern gets masks
cdef Py_ssize_t LONG = 30_000  # bytes from which `bytes.find` takes O(name) for any part, since Python 3.10


cdef struct Members:  # of a class
    uint64_t bits[4]


cdef struct Part:  # items between two stars
    uint16_t first, size  # its items are items[first : first + size]
    uint16_t group, bit  # of its masks, if it has wildcards
    bint plain  # it has no wildcards


cdef class Glob:
    """A compiled pattern."""

    cdef uint16_t *items  # each matches one byte; the items of all parts in order
    cdef uint16_t *borders  # of items: the longest border of its part up to it, if the part is plain
    cdef Members *classes
    cdef Part *parts  # between the first part and the last one, without empty parts
    cdef uint64_t *masks  # groups of 256; bit b of a byte's mask: the item of bit b matches the byte; NULL until needed
    cdef Py_ssize_t count, class_count, part_count, groups
    cdef Py_ssize_t first, last  # items of the first part, and of the last one
    cdef Py_ssize_t wasted  # comparisons in addition to the usual ones
    cdef bint has_star

    def __cinit__(self, bytes pattern not None, bint ignore_case=False):
        cdef Py_ssize_t size = len(pattern)
        if size > LONGEST_PATTERN:
            raise ValueError(f"a pattern has at most {LONGEST_PATTERN} bytes, got {size}")
        self.items = <uint16_t *>allocated(NULL, size * sizeof(uint16_t))
        self.parse(pattern, size, ignore_case)
        self.items = <uint16_t *>allocated(self.items, self.count * sizeof(uint16_t))
        self.classes = <Members *>allocated(self.classes, self.class_count * sizeof(Members))
        self.parts = <Part *>allocated(self.parts, self.part_count * sizeof(Part))
        self.prepare()

    def __dealloc__(self):
        free(self.items)
        free(self.borders)
        free(self.classes)
        free(self.parts)
        free(self.masks)

    @property
    def nbytes(self):
        """The memory that the pattern takes at most, in bytes."""
        items = self.count * sizeof(uint16_t) * (1 if self.borders == NULL else 2)
        parts = self.part_count * sizeof(Part) + self.class_count * sizeof(Members)
        return 256 + items + parts + self.groups * 256 * sizeof(uint64_t)

    def matches(self, name not None):
        """Return whether the pattern matches a whole name, which is bytes."""
        if not isinstance(name, bytes):
            raise TypeError("a name is bytes")
        cdef const unsigned char *text = <bytes>name
        cdef Py_ssize_t size = len(<bytes>name), start = self.first, end = size - self.last, i
        if not self.has_star:
            return size == self.first and self.is_at(0, self.first, text)
        if self.count == 0:
            return size > 0
        if start > end or not self.is_at(0, self.first, text):
            return False
        if not self.is_at(self.count - self.last, self.last, text + end):
            return False
        for i in range(self.part_count):
            if self.parts[i].plain and end - start >= LONG:
                start = (<bytes>name).find(self.bytes_of(&self.parts[i]), start, end)
            else:
                start = self.find(&self.parts[i], text, start, end)
            if start < 0:
                return False
            start += self.parts[i].size
        return True

    # -- compilation -------------------------------------------------------------------------------------------------

    cdef int parse(self, const unsigned char *pattern, Py_ssize_t size, bint ignore_case) except -1:
        """Set the items, the parts without their places in masks, and the fields beside them. Raise MemoryError."""
        cdef Py_ssize_t at = 0, begin = 0  # the first item of the current part
        cdef unsigned char byte
        while at < size:
            byte = pattern[at]
            at += 1
            if byte == b"*":
                if not self.has_star:
                    self.first = self.count
                elif self.count > begin:
                    self.add_part(begin)
                self.has_star, begin = True, self.count
            elif byte == b"?":
                self.add(ANY)
            elif byte == b"[":
                at = self.parse_class(pattern, at, size, ignore_case)
            else:
                if byte == b"\\" and at < size:
                    byte = pattern[at]
                    at += 1
                self.add_byte(byte, ignore_case)
        if self.has_star:
            self.last = self.count - begin
        else:
            self.first = self.count
        return 0

    cdef Py_ssize_t parse_class(
        self, const unsigned char *pattern, Py_ssize_t at, Py_ssize_t size, bint ignore_case
    ) except -1:
        """Add the class, such as [a-z], whose members begin at `at`. Return the position after it."""
        cdef Members members = Members([0, 0, 0, 0])
        cdef bint negated = at < size and pattern[at] == b"^"
        cdef int i
        at += negated
        while at < size and pattern[at] != b"]":
            if pattern[at] == b"\\" and size - at >= 2:
                members.bits[pattern[at + 1] >> 6] |= <uint64_t>1 << (pattern[at + 1] & 63)
                at += 2
            elif size - at >= 3 and pattern[at + 1] == b"-":
                add_range(&members, pattern[at], pattern[at + 2], ignore_case)
                at += 3
            else:
                add_range(&members, pattern[at], pattern[at], ignore_case)
                at += 1
        if negated:
            for i in range(4):
                members.bits[i] = ~members.bits[i]
        self.add_class(members)
        return at + 1

    cdef int add(self, int item) except -1:
        self.items[self.count] = <uint16_t>item
        self.count += 1
        return 0

    cdef int add_byte(self, unsigned char byte, bint ignore_case) except -1:
        cdef Members members = Members([0, 0, 0, 0])
        if ignore_case and lower(byte) != upper(byte):
            members.bits[lower(byte) >> 6] = <uint64_t>1 << (lower(byte) & 63) | <uint64_t>1 << (upper(byte) & 63)
            return self.add_class(members)
        return self.add(byte)

    cdef int add_class(self, Members members) except -1:
        """Add an item for members: a byte, ANY or a class. Raise MemoryError."""
        cdef uint64_t any = members.bits[0] | members.bits[1] | members.bits[2] | members.bits[3]
        cdef uint64_t every = members.bits[0] & members.bits[1] & members.bits[2] & members.bits[3]
        cdef int byte = 0
        if every == UINT64_MAX:
            return self.add(ANY)
        if any and any & (any - 1) == 0:  # one member, or up to four with the same last bits
            while not members.bits[byte >> 6] >> (byte & 63) & 1:
                byte += 1
            members.bits[byte >> 6] ^= any
            if members.bits[0] | members.bits[1] | members.bits[2] | members.bits[3] == 0:
                return self.add(byte)
            members.bits[byte >> 6] ^= any
        if self.class_count & (self.class_count + 1) == 0:  # room for one less than a power of two
            self.classes = <Members *>allocated(self.classes, (2 * self.class_count + 1) * sizeof(Members))
        self.classes[self.class_count] = members
        self.class_count += 1
        return self.add(CLASSES + self.class_count - 1)

    cdef int add_part(self, Py_ssize_t begin) except -1:
        """Add the part between two stars of the items from `begin`. Raise MemoryError."""
        if self.part_count & (self.part_count + 1) == 0:
            self.parts = <Part *>allocated(self.parts, (2 * self.part_count + 1) * sizeof(Part))
        self.parts[self.part_count] = Part(<uint16_t>begin, <uint16_t>(self.count - begin), 0, 0, False)
        self.part_count += 1
        return 0

    cdef int prepare(self) except -1:
        """Complete the parts between two stars. Raise ValueError for a long part with wildcards, MemoryError."""
        cdef Py_ssize_t used = LONGEST_PART, i, at
        cdef Part *part
        for i in range(self.part_count):
            part = &self.parts[i]
            part.plain = True
            for at in range(part.first, part.first + part.size):
                part.plain &= self.items[at] < ANY
            if part.plain:
                if self.borders == NULL:
                    self.borders = <uint16_t *>allocated(NULL, self.count * sizeof(uint16_t))
                set_borders(self.items + part.first, self.borders + part.first, part.size)
                continue
            if part.size > LONGEST_PART:
                raise ValueError(
                    f"a part of a pattern between two stars that has a ? or [ matches at most {LONGEST_PART} bytes, "
                    f"got {part.size}"
                )
            if used + part.size > LONGEST_PART:
                self.groups, used = self.groups + 1, 0
            part.group, part.bit = <uint16_t>(self.groups - 1), <uint16_t>used
            used += part.size
        return 0

    cdef int make_masks(self) except -1:
        """Make the masks of all parts with wildcards. Raise MemoryError."""
        cdef uint64_t *masks = <uint64_t *>calloc(self.groups * 256, sizeof(uint64_t))
        cdef uint64_t *group
        cdef uint64_t bit, every
        cdef Py_ssize_t i, at
        cdef int item, byte
        if masks == NULL:
            raise MemoryError("the system has no memory for a pattern")
        for i in range(self.part_count):
            if self.parts[i].plain:
                continue
            group, bit, every = masks + 256 * self.parts[i].group, <uint64_t>1 << self.parts[i].bit, 0
            for at in range(self.parts[i].first, self.parts[i].first + self.parts[i].size):
                item = self.items[at]
                if item < ANY:
                    group[item] |= bit
                elif item == ANY:
                    every |= bit
                else:
                    for byte in range(256):
                        if self.classes[item - CLASSES].bits[byte >> 6] >> (byte & 63) & 1:
                            group[byte] |= bit
                bit <<= 1
            for byte in range(256):
                group[byte] |= every
        self.masks = masks
        return 0

    # -- comparison --------------------------------------------------------------------------------------------------

    cdef inline bint fits(self, Py_ssize_t at, unsigned char byte) noexcept:
        """Return whether an item matches a byte."""
        cdef int item = self.items[at]
        if item < ANY:
            return item == byte
        return item == ANY or self.classes[item - CLASSES].bits[byte >> 6] >> (byte & 63) & 1

    cdef bint is_at(self, Py_ssize_t first, Py_ssize_t size, const unsigned char *text) noexcept:
        """Return whether `size` items match the beginning of a text."""
        cdef Py_ssize_t i
        for i in range(size):
            if not self.fits(first + i, text[i]):
                return False
        return True

    cdef Py_ssize_t find(self, Part *part, const unsigned char *text, Py_ssize_t start, Py_ssize_t end) except -2:
        """Return the first position from `start` at which a part matches the text up to `end`; -1 if there is none.
        Raise MemoryError.
        """
        cdef Py_ssize_t more = 0, i  # comparisons in addition to the usual ones
        if part.plain:
            return find_plain(self.items + part.first, self.borders + part.first, part.size, text, start, end)
        while self.masks == NULL:
            if end - start < part.size:
                self.wasted += max(more, 0)
                return -1
            i = 0
            while i < part.size and self.fits(part.first + i, text[start + i]):
                i += 1
            more += i - USUAL
            if i == part.size:
                self.wasted += max(more - i, 0)
                return start
            start += 1
            if self.wasted + more > WASTED:
                self.make_masks()
        return find_masked(self.masks + 256 * part.group, part.bit, part.size, text, start, end)

    cdef bytes bytes_of(self, Part *part):
        """Return the bytes that a part without wildcards matches."""
        cdef Py_ssize_t i
        return bytes([self.items[i] for i in range(part.first, part.first + part.size)])


def literal(bytes pattern not None):
    """Return the only name that a pattern matches; None if it has wildcards. A backslash quotes the next byte."""
    cdef const unsigned char *text = pattern
    cdef Py_ssize_t size = len(pattern), count = 0, at = 0
    cdef bytes name = PyBytes_FromStringAndSize(NULL, size)
    cdef char *written = name
    while at < size:
        if text[at] == b"*" or text[at] == b"?" or text[at] == b"[":
            return None
        if text[at] == b"\\":
            at += 1
            if at == size:
                return None
        written[count] = text[at]
        count += 1
        at += 1
    return name if count == size else name[:count]


cdef void *allocated(void *memory, size_t size) except NULL:
    """Reallocate memory. Raise MemoryError."""
    memory = realloc(memory, max(size, 1))
    if memory == NULL:
        raise MemoryError("the system has no memory for a pattern")
    return memory


cdef inline unsigned char lower(unsigned char byte) noexcept:
    return byte + 32 if b"A" <= byte <= b"Z" else byte


cdef inline unsigned char upper(unsigned char byte) noexcept:
    return byte - 32 if b"a" <= byte <= b"z" else byte


cdef int add_range(Members *members, unsigned char start, unsigned char end, bint ignore_case) noexcept:
    """Add the bytes of a range, in either direction. Without case, those whose lower case is between its ends."""
    cdef unsigned char low = min(start, end), high = max(start, end)
    cdef int byte
    if not ignore_case:
        for byte in range(low, high + 1):
            members.bits[byte >> 6] |= <uint64_t>1 << (byte & 63)
        return 0
    for byte in range(256):
        if lower(low) <= lower(<unsigned char>byte) <= lower(high):
            members.bits[byte >> 6] |= <uint64_t>1 << (byte & 63)
    return 0


cdef int set_borders(const uint16_t *items, uint16_t *borders, Py_ssize_t size) noexcept:
    """Set for each i the length of the longest end of items[1 : i + 1] that is also a beginning of the items."""
    cdef Py_ssize_t length = 0, i
    borders[0] = 0
    for i in range(1, size):
        while length and items[i] != items[length]:
            length = borders[length - 1]
        length += items[i] == items[length]
        borders[i] = <uint16_t>length
    return 0


cdef Py_ssize_t find_plain(
    const uint16_t *items,
    const uint16_t *borders,
    Py_ssize_t size,
    const unsigned char *text,
    Py_ssize_t start,
    Py_ssize_t end,
) noexcept:
    """Return the first position of the bytes `items` in a text; -1 if there is none."""
    cdef Py_ssize_t matched = 0, i
    for i in range(start, end):
        while matched and items[matched] != text[i]:
            matched = borders[matched - 1]
        matched += items[matched] == text[i]
        if matched == size:
            return i - size + 1
    return -1


cdef Py_ssize_t find_masked(
    const uint64_t *masks, int bit, Py_ssize_t size, const unsigned char *text, Py_ssize_t start, Py_ssize_t end
) noexcept:
    """Return the first position at which `size` successive bytes of a text have the bits from `bit` on in their masks;
    -1 if there is none.
    """
    cdef uint64_t first = <uint64_t>1 << bit, whole = first << (size - 1)
    cdef uint64_t within = (whole << 1) - first  # the bits of the part, since others may share the masks
    cdef uint64_t matched = 0  # bit `bit` + i: the last i + 1 bytes match the first i + 1 items
    cdef Py_ssize_t i
    for i in range(start, end):
        matched = (matched << 1 | first) & masks[text[i]] & within
        if matched & whole:
            return i - size + 1
    return -1
