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
from itertools import accumulate, pairwise

from kvpage_server.client.errors import Refused, WrongReply
from kvpage_server.client.reply import MAX_LINE, bulk_size, refusal

CRLF = b"\r\n"
_AT_ONCE = 256 * 1024  # bytes asked of the kernel in one call: they are hashed while in the cache
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
        self._segments: list[memoryview] = []  # laid out when it is first asked for: the question is sent by then
        self._here = 0  # bytes of the expected answer that have come; or else one of the next two is set
        self._item = 0  # all items before it are decided
        self._line: tuple[int, bytes, bytes] | None = None  # an item whose line is not whole: what is before, the data
        self._dropping: tuple[int, int] | None = None  # an item of another length and how many of its bytes will come
        self._scratch = memoryview(b"")

    def _lay_out(self) -> None:
        """The expected answer as segments of memory: frame, header if there are any, body, frame, ..., CRLF."""
        places, header = self._places, self._header
        frame_of = {size: b"\r\n$%d\r\n" % (header + size) for size in set(map(len, places))}
        frames = [frame_of[len(place)] for place in places] + [CRLF]
        frames[0] = self._opening + frames[0].removeprefix(CRLF)
        self._expected = b"".join(frames)
        self._frame_ends = list(accumulate(map(len, frames)))
        self._frames = memoryview(bytearray(self._expected))
        self._width = width = 3 if header else 2
        self._segments = segments = [self._frames] * (width * len(places) + 1)
        segments[::width] = [self._frames[start:end] for start, end in pairwise([0, *self._frame_ends])]
        segments[width - 1 :: width] = places
        if header:
            headers = memoryview(bytearray(header * len(places)))
            segments[1::width] = [headers[start : start + header] for start in range(0, len(headers), header)]
        self._ends = list(accumulate(map(len, segments)))

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
        if not self._segments:
            self._lay_out()
        at = bisect_right(self._ends, self._here)
        stop = bisect_right(self._ends, self._here + _AT_ONCE, at) + 1
        wanted = self._segments[at : min(stop, at + _GATHER)]
        wanted[0] = wanted[0][self._here - self._start(at) :]
        return wanted

    @property
    def expected(self) -> int:
        """All that will come if nothing is missing, once an answer has begun like that; else the rest of a body."""
        if self._dropping is not None:
            return self._dropping[1]
        if self._line is not None or not self._here:
            return 0
        if not self._missed:
            return self._ends[-1] - self._here
        item, within = divmod(bisect_right(self._ends, self._here), self._width)
        return self._ends[self._width * (item + 1) - 1] - self._here if within else 0

    def _start(self, at: int) -> int:
        """Where in the expected answer a segment starts."""
        return self._ends[at - 1] if at else 0

    def _frame_start(self, item: int) -> int:
        """Where in the memory of all frames that of an item starts."""
        return self._frame_ends[item - 1] if item else 0

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
            self._advance(self._here + count)

    def _expect(self, item: int, arrived: bytes = b"") -> None:
        """The frame before `item` comes next; some of its first bytes have come."""
        start = self._frame_start(item)
        self._frames[start : start + len(arrived)] = arrived
        self._item, self._here = item, self._start(self._width * item) + len(arrived)

    def _advance(self, here: int) -> None:
        """The expected answer may have come up to `here`: it has, if all frames are as they should be."""
        at = bisect_right(self._ends, here)
        item, within = divmod(at, self._width)
        known = self._frame_start(self._item)
        seen = (
            self._frame_ends[min(item, len(self._places))]
            if within
            else self._frame_start(item) + here - self._start(at)
        )
        if bytes(self._frames[known:seen]) != self._expected[known:seen]:
            self._surprise(here, seen)
            return
        self._finish(self._item, item)
        self._item, self._here = item, here
        self.done = at == len(self._segments)

    def _finish(self, start: int, stop: int) -> None:
        """Bodies have arrived whole."""
        if self._check is None:
            return
        check, segments, width, places = self._check, self._segments, self._width, self._places
        for item in range(start, stop):
            reason = check(item, segments[width * item + 1], places[item])
            if reason is not None:
                self._missed[item] = reason

    # -- behind a surprise -----------------------------------------------------------------------------------------

    def _surprise(self, here: int, seen: int) -> None:
        """One of the frames that came up to `here` is another one; `seen` is where what came of them ends."""
        item = self._item
        while True:
            start, end = self._frame_start(item), min(self._frame_ends[item], seen)
            if self._frames[start:end] != self._expected[start:end]:
                break
            self._finish(item, item + 1)
            item += 1
        at = self._width * item
        left = here - self._start(at)
        pieces = []
        while left:
            pieces.append(self._segments[at][:left])
            left -= len(pieces[-1])
            at += 1
        if not self._scratch:
            self._scratch = memoryview(bytearray(_SCRATCH))
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
        self._advance(self._here)

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
        if size != self._header + len(self._places[item]):
            self._missed[item] = "size"
            if len(arrived) < size:
                self._dropping = (item, size - len(arrived))
            return len(arrived) == size
        body = arrived[self._header :]
        self._places[item][: len(body)] = body
        if self._header:
            header = arrived[: self._header]
            self._segments[self._width * item + 1][: len(header)] = header
        if len(arrived) == size:
            self._finish(item, item + 1)
            return True
        self._expect(item, self._expected[self._frame_start(item) : self._frame_ends[item]])
        self._here += len(arrived)
        return False
