"""Invalid commands, which have no effect but an error."""

from __future__ import annotations

from collections.abc import Sequence

_WORDS = {  # how many a command has, its name among them; as many at least where it is negative
    b"set": -3, b"get": 2, b"mset": -3, b"expire": -3, b"incr": 2, b"kvpageset": 11, b"kvpageget": 6,
}  # fmt: skip
_UNKNOWN = frozenset((b"nosuch",))
_PAGE = 10  # words of a page that is stored
_MOST = (None, 65535, 65535, 2**32 - 1, 5, 15, 2**32 - 1, 2**32 - 1, 2**47 - 1)
_LEAST = (None, 0, 0, 0, 0, 1, 1, 1, 0)
_ITEM = {1: 2, 2: 4, 3: 1, 4: 2, 8: 1}  # bytes of an element, of the types that are used


def is_unknown(words: Sequence[bytes]) -> bool:
    """Whether there is no such command, or not with so many words: it cannot be queued either."""
    name = words[0].lower()
    count = _WORDS.get(name, len(words))
    return name in _UNKNOWN or (len(words) != count if count > 0 else len(words) < -count)


def is_wrong(words: Sequence[bytes]) -> bool:
    """Whether a command's arguments are wrong: it is refused when it is run."""
    name, args = words[0].lower(), words[1:]
    if name == b"kvpageset":
        return _is_wrong_page(args)
    if name == b"kvpagemset":
        pages = [args[at : at + _PAGE] for at in range(1, len(args), _PAGE)]
        return int(args[0]) * _PAGE != len(args) - 1 or any(map(_is_wrong_page, pages))
    if name == b"kvblockset":
        layers, heads, rows, _, planes = map(int, args[2:7])
        sizes = [rows * int(args[8 + 3 * i + 1]) * _ITEM[int(args[8 + 3 * i])] for i in range(planes)]
        return len(args[-1]) != layers * heads * sum(sizes)
    if name == b"set":
        options = args[2:]
        return (b"NX" in options and b"XX" in options) or options[:2] == (b"PX", b"0")
    if name == b"mset":
        return len(args) % 2 == 1
    if name in (b"expire", b"incrby"):
        return not args[1].removeprefix(b"-").isdigit()
    return name == b"setex" and int(args[1]) <= 0


def _is_wrong_page(words: Sequence[bytes]) -> bool:
    numbers = words[1 : _PAGE - 1]
    return not all(
        word.isdigit() and least <= int(word) <= most
        for word, least, most in zip(numbers, _LEAST[1:], _MOST[1:], strict=True)
    )
