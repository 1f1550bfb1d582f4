"""Search for a sequence of byte classes: the part of a glob pattern between two stars.

The search is bit-parallel ("shift-and": R. Baeza-Yates and G. Gonnet, A new approach to text searching, 1992), so its
cost is O(string), whatever the classes are. The reference implementation is in `core/python/coding.py`.
"""

from libc.stdint cimport uint64_t


def find_classes(
    bytes masks not None, Py_ssize_t bit, Py_ssize_t size, bytes string not None, Py_ssize_t start, Py_ssize_t end
):
    """Return the first position from `start` at which `size` successive bytes of a string, up to `end`, are each in
    their class; -1 if there is none. `masks` has 256 uint64 in the order of the machine: bit `bit` + i of a byte's mask
    says whether it is in class i. The other bits are for other searches.
    """
    cdef const uint64_t *mask_of = <const uint64_t *><const char *>masks
    cdef const unsigned char *text = string
    cdef uint64_t matched = 0  # bit `bit` + i: the last i + 1 bytes are in the first i + 1 classes
    cdef uint64_t first, whole, within
    cdef Py_ssize_t i
    if len(masks) != 256 * sizeof(uint64_t) or not (0 <= bit < bit + size <= 64 and 0 <= start <= end <= len(string)):
        raise ValueError("masks are 256 words of 64 bits, and the positions are within the string")
    first, whole = <uint64_t>1 << bit, <uint64_t>1 << (bit + size - 1)
    within = (whole << 1) - first
    for i in range(start, end):
        matched = (matched << 1 | first) & mask_of[text[i]] & within
        if matched & whole:
            return i - size + 1
    return -1
