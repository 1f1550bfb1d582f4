"""Page bodies received straight into the arrays where they belong, many with one system call.

What a server answers when nothing is missing is known to the byte before it answers: ``*N``, then for each page a
frame (``$length``, for a blob also its 64-byte header), the body, CRLF. So the frames and bodies to come are handed to
the kernel as one list of buffers, and only the frames are looked at afterwards. Where one is not as expected, because
a page is missing or has another length, what came from there on is copied to where it really belongs, and it goes on.

A body is written by the kernel once; only bytes that came behind a surprise are moved once more, at most `_AT_ONCE` of
them a surprise. A place may hold bytes of other pages afterwards only if its own page was missed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvpage_server.client.errors import Refused, WrongReply
from kvpage_server.client.reply import MAX_LINE, bulk_size, refusal

CRLF = b"\r\n"
_AT_ONCE = 1024 * 1024  # bytes asked of the kernel in one call: they are hashed while in the cache
_GATHER = 512  # buffers in one call; IOV_MAX is 1024
_SCRATCH = 64 * 1024

Check = Callable[[int, memoryview, memoryview], str | None]


class Bodies:
    """The reply to a read of pages: `result` has, for each that was missed, its index and the reason.

    The reasons: ``absent``, ``size`` (another length than its place), and those of `check`, which is given the index
    of a page that has arrived, the `header` bytes before its body, and the body.
    """

    def __init__(
        self, places: Sequence[memoryview], *, array: bool, header: int = 0, check: Check | None = None
    ) -> None:
        """`array` says whether the answer is an array of bulk strings or, for one place, a bulk string alone."""
        self.done = False
        self._places = places
        self._header = header
        self._check = check
        self._missed: dict[int, str] = {}
        self._refused: Refused | None = None
        self._opening = b"*%d\r\n" % len(places) if array else b""
        befores = [self._opening] + [CRLF] * (len(places) - 1)
        frames = [b"%b$%d\r\n" % (before, header + len(at)) for before, at in zip(befores, places, strict=True)]
        self._frames = [*frames, CRLF]
        self._segments = self._lay_out()
        self._ends = list(accumulate(map(len, self._segments)))
        # Where the next byte belongs: in segment _at behind _filled bytes of it, unless one of the two below is set.
        self._at = self._filled = 0
        self._line: tuple[int, bytes, bytes] | None = None  # an item whose line is not whole: what is before, the data
        self._dropping: tuple[int, int] | None = None  # an item of another length and how many of its bytes will come
        self._scratch = memoryview(b"")

    def _lay_out(self) -> list[memoryview]:
        """The expected reply as segments of memory: frame, body, frame, body, ..., CRLF."""
        memory = memoryview(bytearray(sum(map(len, self._frames)) + self._header * len(self._places)))
        segments: list[memoryview] = []
        start = 0
        for frame, place in zip(self._frames, self._places, strict=False):
            end = start + len(frame) + self._header
            segments += (memory[start:end], place)
            start = end
        return [*segments, memory[start:]]

    def result(self) -> dict[int, str]:
        """What was missed and why. Raises Refused."""
        if self._refused is not None:
            raise self._refused
        return self._missed

    # -- as expected -----------------------------------------------------------------------------------------------

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong."""
        if self._line is not None:
            return [self._scratch]
        if self._dropping is not None:
            return [self._scratch[: self._dropping[1]]]
        at = self._at
        here = self._ends[at] - len(self._segments[at]) + self._filled
        stop = bisect_right(self._ends, here + _AT_ONCE) + 1
        wanted = self._segments[at : min(stop, at + _GATHER)]
        if self._filled:
            wanted[0] = wanted[0][self._filled :]
        return wanted

    def received(self, count: int) -> None:
        """So many bytes of `buffers()` are there. Raises WrongReply."""
        if self._line is not None:
            item, before, data = self._line
            self._line = None
            self._take(item, before, data + bytes(self._scratch[:count]))
        elif self._dropping is not None:
            item, left = self._dropping
            self._dropping = (item, left - count) if count < left else None
            self._expect(item + 1)
        else:
            self._advance(count)

    def _expect(self, item: int, arrived: bytes = b"") -> None:
        """The frame before `item` comes next; some of its first bytes have come."""
        self._at, self._filled = 2 * item, len(arrived)
        self._segments[self._at][: len(arrived)] = arrived

    def _advance(self, count: int) -> None:
        segments, at = self._segments, self._at
        count += self._filled
        while at < len(segments):
            segment = segments[at]
            size = len(segment)
            if not at & 1:
                frame = self._frames[at >> 1]
                known = min(count, len(frame))
                if bytes(segment[:known]) != frame[:known]:
                    self._surprise(at, count)
                    return
            if count < size:
                self._at, self._filled = at, count
                return
            count -= size
            if at & 1:
                self._finish(at >> 1)
            at += 1
        self.done = True

    def _finish(self, item: int) -> None:
        """A body has arrived whole."""
        if self._check is not None:
            header = self._segments[2 * item][len(self._frames[item]) :]
            reason = self._check(item, header, self._places[item])
            if reason is not None:
                self._missed[item] = reason

    # -- behind a surprise -----------------------------------------------------------------------------------------

    def _surprise(self, at: int, count: int) -> None:
        """The frame in segment `at` is another one; `count` bytes were received from its beginning on."""
        pieces = []
        for segment in self._segments[at:]:
            pieces.append(segment[:count])
            count -= len(pieces[-1])
            if not count:
                break
        if not self._scratch:
            self._scratch = memoryview(bytearray(_SCRATCH))
        item = at >> 1
        self._take(item, CRLF if item else self._opening, b"".join(pieces))

    def _take(self, item: int, before: bytes, data: bytes) -> None:
        """Take what begins where the frame of `item` does, of which `before` is still to be seen."""
        pos = 0
        while item < len(self._places):
            start = pos + len(before)
            if item == 0 and data[:1] == b"-":
                before, start = b"", 0
            if not data[pos:start] == before[: len(data) - pos]:
                raise WrongReply(f"before page {item} of {len(self._places)} came {data[pos : pos + 40]!r}")
            end = data.find(CRLF, start)
            if end < 0:
                self._wait(item, before, data[pos:])
                return
            line, pos = data[start:end], end + 2
            if line in (b"_", b"$-1"):
                self._missed[item] = "absent"
                item, before = item + 1, b""
            elif line[:1] == b"$":
                size = bulk_size(line[1:])
                arrived = data[pos : pos + size]
                if not self._place(item, size, arrived):
                    return
                item, before, pos = item + 1, CRLF, pos + len(arrived)
            elif item == 0 and line[:1] == b"-" and start == 0:
                self._refused = refusal(line[1:])
                item, before = len(self._places), b""
            else:
                raise WrongReply(f"instead of page {item} of {len(self._places)} came {line[:40]!r}")
        tail = (b"" if before else CRLF) + data[pos:]
        if not CRLF.startswith(tail):
            raise WrongReply(f"behind the last of {len(self._places)} pages came {tail[:40]!r}")
        self._expect(item, tail)
        self._advance(0)

    def _wait(self, item: int, before: bytes, data: bytes) -> None:
        """More is needed to understand `data`, the beginning of an item's line."""
        if item and (CRLF.startswith(data) if before else not data):
            self._expect(item, data if before else CRLF)
        elif len(data) > MAX_LINE:
            raise WrongReply(f"a line is longer than {MAX_LINE} bytes")
        else:
            self._line = (item, before, data)

    def _place(self, item: int, size: int, arrived: bytes) -> bool:
        """Put what has come of an item's bulk string where it belongs; whether that is all of it."""
        frame, segment, place = self._frames[item], self._segments[2 * item], self._places[item]
        if size != self._header + len(place):
            self._missed[item] = "size"
            if len(arrived) < size:
                self._dropping = (item, size - len(arrived))
            return len(arrived) == size
        head, body = arrived[: self._header], arrived[self._header :]
        segment[: len(frame) + len(head)] = frame + head
        place[: len(body)] = body
        if len(arrived) == size:
            self._finish(item)
            return True
        short = len(head) < self._header
        self._at, self._filled = (2 * item, len(frame) + len(head)) if short else (2 * item + 1, len(body))
        return False
