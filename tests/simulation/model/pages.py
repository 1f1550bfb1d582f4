"""Pages and blocks as the model has them: strings with names of their own, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from kvpage_server.lossless import decode_body
from tests.simulation.model.replies import (
    ANYTHING,
    OK,
    SOME_KEYS,
    Err,
    May,
    any_order,
    between,
    fields,
    one_of,
    some_of,
)
from tests.simulation.model.values import Store, Value

ITEM = {1: 2, 2: 4, 3: 1, 4: 2, 7: 4, 8: 1}  # bytes, by dtype
WRONG_TYPE = Err("WRONGTYPE")
_TOLD = (b"layer", b"head", b"page", b"type", b"dtype", b"page_size", b"head_dim", b"ttl")  # as in `Value.page`


def key_of(req: bytes, layer: int, head: int, page: int, kv_type: int) -> bytes:
    """A page's key."""
    return b"kv:%b:%d:%d:%d:%d" % (req, layer, head, page, kv_type)


def name_of(key: bytes) -> tuple[bytes, int, int, int, int]:
    """The page that a key names."""
    _, req, layer, head, page, kv_type = key.split(b":")
    return req, int(layer), int(head), int(page), int(kv_type)


def block_of(key: bytes) -> tuple[bytes, int]:
    """The request and page id of the block that a key belongs to, if it is a page's."""
    words = key.split(b":")
    return (words[1], int(words[4])) if len(words) == 6 and words[4].isdigit() else (b"", -1)


class Pages:
    """A handler is a method named as its command is."""

    store: Store
    pinned: set[tuple[bytes, int]]
    unpins: int
    leased: dict[tuple[bytes, int], int]
    limited: bool
    rotted: set[bytes]
    changes: set[bytes]
    let_go: set[bytes]
    went: set[bytes]
    time: Callable[..., Any]
    checksums = True

    # -- writing ---------------------------------------------------------------------------------------------------

    def _new_page(self, words: tuple[bytes, ...]) -> tuple[bytes, Value]:
        req, layer, head, page, kv_type, dtype, rows, columns, ttl = words[0], *map(int, words[1:9])
        described = (layer, head, page, kv_type, dtype, rows, columns, ttl)
        expires = self.store.now + ttl * 1000 if ttl else 0
        return key_of(req, layer, head, page, kv_type), Value(words[9], expires, described, self.checksums)

    def do_kvpageset(self, *words: bytes) -> Any:
        self.store.put(*self._new_page(words))
        return OK

    def do_kvpagemset(self, _: bytes, *words: bytes) -> Any:
        for at in range(0, len(words), 10):
            self.store.put(*self._new_page(words[at : at + 10]))
        return OK

    def do_kvblockset(self, req: bytes, page: bytes, *words: bytes) -> Any:
        layers, heads, rows, ttl, count = map(int, words[:5])
        body, planes = words[-1], [tuple(map(int, words[5 + 3 * i : 8 + 3 * i])) for i in range(count)]
        expires = self.store.now + ttl * 1000 if ttl else 0
        new: dict[bytes, Value] = {}
        at = 0
        for layer in range(layers):
            for kv_type, dtype, columns in planes:
                for head in range(heads):
                    size = rows * columns * ITEM[dtype]
                    described = (layer, head, int(page), kv_type, dtype, rows, columns, ttl)
                    value = Value(body[at : at + size], expires, described, self.checksums)
                    new[key_of(req, layer, head, int(page), kv_type)] = value
                    at += size
        for key in self._keys(req, int(page)):
            if key not in new:
                self.store.drop(key)
        for key, value in new.items():
            self.store.put(key, value)
        return OK

    def do_kvblocksetcoded(self, req: bytes, page: bytes, *words: bytes) -> Any:
        *head, _, code = words
        body = bytearray(int.from_bytes(code[4:8], "little"))
        decode_body(code, memoryview(body))
        return self.do_kvblockset(req, page, *head, bytes(body))

    # -- existing values -----------------------------------------------------------------------------------------------

    def _keys(self, req: bytes, *pages: int) -> list[bytes]:
        """The living pages of a request, or of some of its blocks."""
        start = b"kv:%b:" % req
        found = [key for key in self.store.keys if key.startswith(start)]
        found = [key for key in found if not pages or name_of(key)[3] in pages]
        return [key for key in found if self.store.get(key) is not None and self.store.keys[key].page]

    def _blocks(self, req: bytes, *pages: int) -> dict[int, list[bytes]]:
        blocks: dict[int, list[bytes]] = {}
        for key in self._keys(req, *pages):
            blocks.setdefault(name_of(key)[3], []).append(key)
        return dict(sorted(blocks.items()))

    def _named(self, words: tuple[bytes, ...]) -> Iterator[Value | None]:
        for at in range(0, len(words), 5):
            yield self.store.get(b"kv:" + b":".join(words[at : at + 5]))

    def do_kvpageget(self, *words: bytes) -> Any:
        (value,) = self._named(words)
        return value if value is None else value.data if value.page else WRONG_TYPE

    def do_kvpagemget(self, _: bytes, *words: bytes) -> Any:
        return [value.data if value and value.page else None for value in self._named(words)]

    def do_kvpagemexists(self, _: bytes, *words: bytes) -> Any:
        return [int(value is not None and value.page is not None) for value in self._named(words)]

    def do_kvpageexists(self, *words: bytes) -> Any:
        return self.do_kvpagemexists(b"1", *words)[0]

    def do_kvpagestat(self, *words: bytes) -> Any:
        (value,) = self._named(words)
        if value is None or value.page is None:
            return WRONG_TYPE if value else None
        received = dict(zip(_TOLD, value.page, strict=True)) | {b"bytes": len(value.data)}
        if b"kv:" + b":".join(words) not in self.store.doubtful():
            received[b"ttl_left_ms"] = self.time(value.expires - self.store.now if value.expires else -1)
        block, now = (words[0], int(words[3])), self.store.elapsed()
        if block in self.pinned:
            received[b"pinned"] = 1
        if (until := self.leased.get(block, 0)) > now:
            received[b"lease_left_ms"] = May(f"at least {until - now}", lambda left: left >= until - now)
        return fields(received)

    def do_kvpagewhy(self, *words: bytes) -> Any:
        if len(words) == 1:
            return ANYTHING
        (value,) = self._named(words)
        if value is not None:
            return fields({b"reason": b"stored"}) if value.page else WRONG_TYPE
        key = b"kv:" + b":".join(words)
        reasons = [] if key in self.went and key not in self.store.doubtful() else [b"never stored"]
        reasons += [b"deleted", b"overwritten", b"expired"] if key in self.changes else []
        reasons += [b"evicted", b"over quota", b"corrupt"] if key in self.let_go else []
        return fields({b"reason": one_of(reasons)})

    def do_kvpagedel(self, req: bytes, *pages: bytes) -> Any:
        return sum(map(self.store.drop, self._keys(req, *map(int, pages))))

    def do_kvpageverify(self, req: bytes, *pages: bytes) -> Any:
        keys = self._keys(req, *map(int, pages))
        least = sum(self.store.keys[key].checksum is False for key in keys)
        most = sum(not self.store.keys[key].checksum for key in keys)
        corrupt = some_of(keys, lambda: bool(self.rotted))
        checked, unchecked = between(len(keys) - most, len(keys) - least), between(least, most)
        found = fields({b"checked": checked, b"unchecked": unchecked, b"corrupt": corrupt})
        found.members = frozenset(keys)
        return found

    def _of_index(self, key: bytes, reply: Callable[[list[bytes]], Any]) -> Any:
        if self.store.get(key) is not None:
            return WRONG_TYPE
        return reply(self._keys(key.split(b":")[1]) if key.endswith(b":index") else [])

    def do_smembers(self, key: bytes) -> Any:
        return self._of_index(key, any_order)

    def do_scard(self, key: bytes) -> Any:
        return self._of_index(key, len)

    def do_sismember(self, key: bytes, page: bytes) -> Any:
        return self._of_index(key, lambda pages: int(page in pages))

    def do_sscan(self, *_: bytes) -> Any:
        return SOME_KEYS

    def is_index(self, key: bytes) -> bool:
        """Whether a key lists the pages of a request that has some."""
        return key.endswith(b":index") and bool(self._keys(key.split(b":")[1]))

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _body(self, keys: list[bytes]) -> bytes | None:
        """A block's bytes, if it has every page that its largest layer, head and its planes let expect, all alike."""
        if not keys:
            return None
        names = sorted((name_of(key)[1], name_of(key)[4], name_of(key)[2], key) for key in keys)
        layers, heads = max(n[0] for n in names) + 1, max(n[2] for n in names) + 1
        planes = sorted({n[1] for n in names})
        wanted = [(layer, plane, head) for layer in range(layers) for plane in planes for head in range(heads)]
        if [n[:3] for n in names] != wanted:
            return None
        values = [self.store.keys[n[3]] for n in names]
        shapes: dict[int, set[Any]] = {}
        for value in values:
            assert value.page is not None
            shapes.setdefault(value.page[3], set()).add((value.page[4:7], len(value.data)))
            if len(value.data) != value.page[5] * value.page[6] * ITEM[value.page[4]]:
                return None
        if any(len(shape) > 1 for shape in shapes.values()) or len({v.page[5] for v in values if v.page}) > 1:
            return None
        return b"".join(value.data for value in values)

    def do_kvblockget(self, req: bytes, page: bytes) -> Any:
        return self._body(self._keys(req, int(page)))

    def do_kvblockmget(self, _: bytes, *words: bytes) -> Any:
        return [self.do_kvblockget(req, page) for req, page in zip(words[::2], words[1::2], strict=True)]

    do_kvblockmgetcoded = do_kvblockmget  # a connection decodes its replies

    def do_kvblockexists(self, req: bytes, page: bytes) -> Any:
        return int(self.do_kvblockget(req, page) is not None)

    def _is_unswept(self, req: bytes) -> bool:
        """Whether a page is due that the server may still count."""
        self._keys(req)
        return any(key.startswith(b"kv:%b:" % req) for key in self.store.lately_expired())

    def do_kvpageindex(self, req: bytes) -> Any:
        if self._is_unswept(req):
            return ANYTHING
        rows = []
        for page, keys in self._blocks(req).items():
            rows.append(fields({b"page": page, b"pages": len(keys), b"complete": int(self._body(keys) is not None)}))
            rows[-1].members = frozenset([b"%d" % page])
        return rows

    # -- protection ------------------------------------------------------------------------------------------------

    def protect(self, req: bytes, page: int, until: int) -> None:
        """A block is leased until then, or pinned: 0. Not one that may expire: nobody knows to the moment when."""
        if any(self.store.keys[key].expires for key in self._keys(req, page)):
            return
        if until:
            self.leased[req, page] = max(until, self.leased.get((req, page), 0))
        else:
            self.pinned.add((req, page))

    def is_protected(self, block: tuple[bytes, int]) -> bool:
        """Whether eviction has to leave a block alone."""
        return block in self.pinned or self.leased.get(block, 0) > self.store.elapsed()

    def _note_change(self, key: bytes) -> None:
        """Remove the protection of a deleted block. It may also end when one of its pages expires."""
        block, value = block_of(key), self.store.keys.get(key)
        if block not in self.pinned and block not in self.leased:
            return
        start, end = b"kv:%b:" % block[0], b":%d" % block[1]
        left = [one for one in self.store.keys if one.startswith(start) and one.rpartition(b":")[0].endswith(end)]
        left = [one for one in left if self.store.keys[one].page]
        if not left or (value is not None and value.expires):
            self.pinned.discard(block)
            self.leased.pop(block, None)

    def do_kvpageprefix(self, pages: bytes, lease: bytes, blocks: bytes, *words: bytes) -> Any:
        count, end = 0, 2 * int(blocks)
        for req, page in zip(words[:end:2], words[1:end:2], strict=True):
            if len(self._keys(req, int(page))) != int(pages):
                break
            count += 1
        limited = self.limited and int(lease)
        if len(words) == end:
            return between(0, count) if limited else count
        states = [*zip(words[end + 2 :: 3], map(int, words[end + 3 :: 3]), map(int, words[end + 4 :: 3]), strict=True)]
        incomplete = {need for req, page, need in states if self._body(self._keys(req, page)) is None}
        lengths = sorted({need for *_, need in states if need <= count} - incomplete)
        return one_of(lengths[:end] for end in range(len(lengths), -1, -1)) if limited else lengths

    def do_kvpagelease(self, req: bytes, milliseconds: bytes, *pages: bytes) -> Any:
        blocks = list(self._blocks(req, *map(int, pages)))
        return between(0, len(blocks)) if self.limited else len(blocks)

    def do_kvpagepin(self, req: bytes, *pages: bytes) -> Any:
        count = len(self._blocks(req, *map(int, pages)))
        return one_of([count, Err("ERR leases, pins and lifetimes may take")]) if self.limited else count

    def do_kvpagekeep(self, _tenant: bytes, _tenants: bytes, _seconds: bytes, *keys: bytes) -> Any:
        count = sum(1 for _ in takewhile(lambda key: self.store.get(key) is not None, keys))
        until = ANYTHING if count else 0  # the end of the first value, which may have had a longer lifetime before
        return [between(0, count), until, ANYTHING] if self.limited else [count, until, b"absent" * (count < len(keys))]

    def do_kvpageunpin(self, req: bytes, *pages: bytes) -> Any:
        blocks = {(req, page) for page in self._blocks(req, *map(int, pages))}
        self.pinned -= blocks
        self.unpins += 1
        return between(0, len(blocks))
