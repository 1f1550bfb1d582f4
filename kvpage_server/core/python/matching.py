"""Search for a sequence of byte classes: the part of a glob pattern between two stars."""

from __future__ import annotations

from array import array


def find_classes(masks: bytes, bit: int, size: int, string: bytes, start: int, end: int) -> int:
    """Return the first position from `start` at which `size` successive bytes of a string, up to `end`, are each in
    their class; -1 if there is none. `masks` has 256 uint64 in the order of the machine: bit `bit` + i of a byte's mask
    says whether it is in class i. The other bits are for other searches.
    """
    if len(masks) != 2048 or not (0 <= bit < bit + size <= 64 and 0 <= start <= end <= len(string)):
        raise ValueError("masks are 256 words of 64 bits, and the positions are within the string")
    mask_of, matched, first, whole = array("Q", masks), 0, 1 << bit, 1 << (bit + size - 1)
    within = (whole << 1) - first
    for i in range(start, end):
        matched = (matched << 1 | first) & mask_of[string[i]] & within
        if matched & whole:
            return i - size + 1
    return -1
