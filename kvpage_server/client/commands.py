"""Requests to one server: string commands for any Redis, or the page commands of kvpage-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvpage_server.client.errors import Unsupported
from kvpage_server.client.page import BlockName, Page, StateName, header_of, mismatch, pages_of_block
from kvpage_server.client.raw_commands import Kept, array, ascending, integer, kept, ok, up_to
from kvpage_server.client.wire.exchange import Piece, Request, around_set, command, word
from kvpage_server.client.wire.reply import Values
from kvpage_server.core import Bodies, Chunk, Memory, PageKeys, SentPages
from kvpage_server.page import HEADER_SIZE, BlockShape, PageKey, unix_ms

Missed = dict[int, str]  # position in the batch -> reason of the miss
_NAMES_PER_STEP = 4096  # names that are encoded before other tasks have their turn


# -- words -------------------------------------------------------------------------------------------------------------


def _encode_names(opening: bytes, names: PageKeys, encode: Callable[[PageKeys], bytes]) -> Iterator[Piece]:
    """Yield the bytes of a command that names pages: `opening`, then the names, encoded by `encode` in chunks of
    _NAMES_PER_STEP.
    """
    yield opening
    for start in range(0, len(names), _NAMES_PER_STEP):
        yield encode(names[start : start + _NAMES_PER_STEP])


def _chunks(count: int, encode: Callable[[int], Chunk]) -> Iterator[Chunk]:
    at = 0
    while at < count:
        run = encode(at)
        yield run
        at = run.stop


def _opening(one: bytes, several: bytes, count: int) -> bytes:
    """Return the encoded first words of a command with `count` keys: the name `one` for a single key, otherwise
    `several`.
    """
    return b"*%d\r\n%b" % (1 + count, word(one if count == 1 else several))


def _page_opening(name: bytes, count: int, width: int) -> bytes:
    """Return the encoded first words of KVPAGE`name`, or of KVPAGEM`name` if `count` is more than one page.

    `width` is the number of arguments of each page.
    """
    if count == 1:
        return b"*%d\r\n%b" % (1 + width, word(b"KVPAGE" + name))
    return b"*%d\r\n%b%b" % (2 + count * width, word(b"KVPAGEM" + name), word(count))


def _flat(names: Sequence[BlockName | StateName]) -> Iterator[bytes | int]:
    for name in names:
        yield from name


def _one_piece(text: bytes) -> Callable[[], Iterator[Piece]]:
    return lambda: iter((text,))


# -- answers -----------------------------------------------------------------------------------------------------------


def _all_ok(values: list[Any]) -> None:
    for value in values:
        ok(value)


def _integer(values: list[Any]) -> int:
    return integer(values[0])


def _yes_no(values: list[Any]) -> list[bool]:
    return [up_to(1)(value) == 1 for value in values]


# -- dialects ----------------------------------------------------------------------------------------------------------


class BlobCommands:
    """Requests to any Redis or Valkey, which stores a page as a string with the page's blob."""

    def set_pages(self, pages: SentPages, ttl: int) -> Request[None]:
        """Write pages: all with one MSET, or, if there is a `ttl` in seconds, each with its own SET."""
        created, count = unix_ms(), len(pages)
        before, after = around_set(ttl) if ttl else (b"", b"\r\n")

        def pieces() -> Iterator[Piece | Chunk]:
            if not ttl:
                yield b"*%d\r\n%b" % (1 + 2 * count, word(b"MSET"))
            yield from _chunks(count, lambda start: pages.as_blobs(start, before, after, ttl, created))

        return Request(pieces, lambda: Values(count if ttl else 1), _all_ok)

    def read_pages(self, names: PageKeys, places: Memory, verify: bool) -> Request[Missed]:
        array = len(names) > 1
        return Request(
            lambda: _encode_names(_opening(b"GET", b"MGET", len(names)), names, PageKeys.keys),
            lambda: Bodies(places, array=array, names=names, verify=verify),
            dict,
        )

    def fetch_pages(self, keys: Sequence[PageKey], verify: bool) -> Request[tuple[list[Page | None], Missed]]:
        names = PageKeys(keys)

        def read(values: list[Any]) -> tuple[list[Page | None], Missed]:
            blobs = values if len(keys) == 1 else array(len(keys))(values[0])
            missed: Missed = {}
            return [_decode(i, keys[i], blob, verify, missed) for i, blob in enumerate(blobs)], missed

        return Request(lambda: _encode_names(_opening(b"GET", b"MGET", len(names)), names, PageKeys.keys), Values, read)

    def exists(self, keys: Sequence[PageKey]) -> Request[list[bool]]:
        text = b"".join(command(b"EXISTS", bytes(key)) for key in keys)
        return Request(_one_piece(text), lambda: Values(len(keys)), _yes_no)

    def delete(self, keys: Sequence[PageKey]) -> Request[int]:
        """Delete pages. The reply is the number of pages that existed."""
        names = PageKeys(keys)
        return Request(
            lambda: _encode_names(_opening(b"DEL", b"DEL", len(names)), names, PageKeys.keys), Values, _integer
        )

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Return the request that writes blocks of one shape. A body is one memoryview, or several in the order of its
        bytes. `ttl` is in seconds, 0 for none.
        """
        whole = [pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)) for pieces in bodies]
        pages = [
            Page(key, body[span], plane.dtype, shape.page_size, plane.head_dim)
            for name, body in zip(names, whole, strict=True)
            for key, plane, span in pages_of_block(name, shape)
        ]
        return self.set_pages(SentPages(pages), ttl)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Memory, verify: bool
    ) -> Request[Missed]:
        found = [
            (key, place[span])
            for name, place in zip(names, places.views(), strict=True)
            for key, _, span in pages_of_block(name, shape)
        ]
        keys, spans = PageKeys([key for key, _ in found]), Memory([place for _, place in found])
        request = self.read_pages(keys, spans, verify)

        def blocks(pages: Missed) -> Missed:
            return {page // shape.pages: reason for page, reason in pages.items()}

        return Request(request.pieces, request.receiver, blocks)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Raise Unsupported: a plain Redis cannot list the pages of a request."""
        raise self._unsupported("delete a request")

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """Raise Unsupported: a plain Redis cannot count the complete blocks of a prefix."""
        raise self._unsupported("count the complete blocks of a prefix")

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
    ) -> Request[list[int]]:
        """Raise Unsupported."""
        raise self._unsupported("count the complete blocks of a prefix")

    def examine(
        self, names: Sequence[BlockName], states: Sequence[BlockName], pages_per_block: int, lease_ms: int
    ) -> Request[tuple[int, list[bool]]]:
        """Raise Unsupported."""
        raise self._unsupported("count the complete blocks of a prefix")

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Raise Unsupported: a plain Redis has no leases."""
        raise self._unsupported("lease blocks")

    def keep(self, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Request[Kept]:
        """Raise Unsupported: a plain Redis cannot protect a value from eviction for a time."""
        raise self._unsupported("keep values")

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"a plain Redis or Valkey can't {what}, only kvpage-server can")


def _decode(item: int, key: PageKey, blob: Any, verify: bool, missed: Missed) -> Page | None:
    """Return the page in a blob, or None if the blob is absent or invalid. Then `missed[item]` is set to the reason."""
    if blob is None:
        missed[item] = "absent"
        return None
    header, body = header_of(key, blob), memoryview(blob)[HEADER_SIZE:]
    if reason := mismatch(header, body, verify=verify):
        missed[item] = reason
        return None
    assert header
    return Page(key, body, header.dtype, header.page_size, header.head_dim)


class PageCommands(BlobCommands):
    """Requests to kvpage-server. Reads that verify checksums, and deletions, use the string commands as for Redis."""

    def set_pages(self, pages: SentPages, ttl: int) -> Request[None]:
        """Write pages, all or none."""
        count = len(pages)

        def pieces() -> Iterator[Piece | Chunk]:
            yield _page_opening(b"SET", count, 10)
            yield from _chunks(count, lambda start: pages.as_words(start, ttl))

        return Request(pieces, Values, _all_ok)

    def read_pages(self, names: PageKeys, places: Memory, verify: bool) -> Request[Missed]:
        """Receive pages into the buffers `places`. The result has the reason for each miss, by index.

        With `verify`, the pages are received as blobs, because their headers have the checksums.
        """
        if verify:
            return super().read_pages(names, places, verify)
        return Request(
            lambda: _encode_names(_page_opening(b"GET", len(names), 5), names, PageKeys.words),
            lambda: Bodies(places, array=len(names) > 1),
            dict,
        )

    def exists(self, keys: Sequence[PageKey]) -> Request[list[bool]]:
        names = PageKeys(keys)

        def read(values: list[Any]) -> list[bool]:
            return _yes_no(values if len(names) == 1 else array(len(names))(values[0]))

        return Request(
            lambda: _encode_names(_page_opening(b"EXISTS", len(names), 5), names, PageKeys.words), Values, read
        )

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Write whole blocks, each with its own command."""
        planes = [(int(plane.kv_type), int(plane.dtype), plane.head_dim) for plane in shape.planes]
        numbers = shape.layers, shape.heads, shape.page_size, ttl, len(planes), *chain.from_iterable(planes)
        opening = b"*%d\r\n%b" % (4 + len(numbers), word(b"KVBLOCKSET"))
        after = b"".join(map(word, numbers)) + b"$%d\r\n" % shape.nbytes

        def pieces() -> Iterator[Piece]:
            for (req_id, page), body in zip(names, bodies, strict=True):
                yield b"%b%b%b%b" % (opening, word(req_id), word(page), after)
                yield from body
                yield b"\r\n"

        return Request(pieces, lambda: Values(len(names)), _all_ok)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Memory, verify: bool
    ) -> Request[Missed]:
        """Receive whole blocks into the buffers `places`. The result has the reason for each miss, by index.

        `verify` has no effect, because a block has no checksum of its own.
        """
        if len(names) == 1:
            text = command(b"KVBLOCKGET", *names[0])
        else:
            text = command(b"KVBLOCKMGET", len(names), *_flat(names))
        return Request(_one_piece(text), lambda: Bodies(places, array=len(names) > 1), dict)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Delete all pages of a request, or those with these page ids. The result is the number of deleted pages."""
        return Request(_one_piece(command(b"KVPAGEDEL", req_id, *pages)), Values, _integer)

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """Count the complete blocks from the first name on, and lease them for `lease_ms` milliseconds, 0 for no
        lease.
        """
        text = command(b"KVPAGEPREFIX", pages_per_block, lease_ms, len(names), *_flat(names))
        return Request(_one_piece(text), Values, lambda values: up_to(len(names))(values[0]))

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
    ) -> Request[list[int]]:
        """Find the lengths in blocks at which a prefix can be restored: all its blocks and the states that need as many
        are complete. Lease the longest for `lease_ms` milliseconds.
        """
        words = pages_per_block, lease_ms, len(names), *_flat(names), b"LENGTHS", len(states), *_flat(states)
        return Request(
            _one_piece(command(b"KVPAGEPREFIX", *words)), Values, lambda values: ascending(len(names))(values[0])
        )

    def examine(
        self, names: Sequence[BlockName], states: Sequence[BlockName], pages_per_block: int, lease_ms: int
    ) -> Request[tuple[int, list[bool]]]:
        """Count the complete blocks of `names` as `prefix` does, and find out for each state whether it is complete.
        With `lease_ms`, a state counts only if it is leased, too.
        """
        words = [(b"KVPAGEPREFIX", pages_per_block, lease_ms, len(names), *_flat(names))] if names else []
        for req_id, page in states:
            if lease_ms:
                words.append((b"KVPAGELEASE", req_id, lease_ms, page))
            words.append((b"KVBLOCKEXISTS", req_id, page))

        def read(values: list[Any]) -> tuple[int, list[bool]]:
            count = up_to(len(names))(values[0]) if names else 0
            answers = _yes_no(values[1:] if names else values)
            width = 2 if lease_ms else 1
            return count, [all(answers[i : i + width]) for i in range(0, len(answers), width)]

        text = b"".join(command(*some) for some in words)
        return Request(_one_piece(text), lambda: Values(len(words)), read)

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Lease all blocks of a request, or those with these page ids, for `lease_ms` milliseconds. The result is their
        number.
        """
        return Request(_one_piece(command(b"KVPAGELEASE", req_id, lease_ms, *pages)), Values, _integer)

    def keep(self, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Request[Kept]:
        """Give the values of some keys a lifetime; with 0 seconds, begin their own ones anew."""
        words = command(b"KVPAGEKEEP", tenant.encode(), tenants, seconds, *keys)
        return Request(_one_piece(words), Values, lambda values: kept(len(keys))(values[0]))


def ask_dialect() -> Request[BlobCommands]:
    """Return the request for the commands that the server supports. Its result is the `BlobCommands` object to use."""

    def read(values: list[Any]) -> BlobCommands:
        wanted = len(_FAMILY)
        known = [description for description in array(wanted)(values[0]) if description]
        return PageCommands() if len(known) == wanted else BlobCommands()

    return Request(_one_piece(command(b"COMMAND", b"INFO", *_FAMILY)), Values, read)


_FAMILY = (b"kvpagemget", b"kvblockmget")
