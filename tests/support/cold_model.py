"""Model of every command for keys, based on a plain dictionary: without slots, blocks or a disk.

A command is words; `Model.answer` returns its expected reply, and changes the dictionary as a server changes its keys.
Unpredictable parts of a reply, such as the time in a page's header, are left open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvpage_server.page import HEADER_SIZE, PageError, PageKey, decode_page

PAGE = 6000  # bytes of every page
SHAPE = [b"2", b"1", b"1", b"0", b"1", b"0", b"8", b"%d" % PAGE]  # of every block: 2 layers, a head, a plane
LAYERS = 2

Words = list[bytes]


@dataclass(frozen=True)
class Value:
    """A string, or the body of a page; and whether it is to expire one day."""

    data: bytes
    is_page: bool = False
    expires: bool = False


@dataclass(frozen=True)
class Open:
    """A reply that is only constrained by a predicate."""

    holds: Callable[[Any], bool]


class Error(str):
    """An error that begins so."""


ANYTHING = Open(lambda reply: True)
A_NUMBER = Open(lambda reply: isinstance(reply, int))
OK = "OK"
WRONG_TYPE = Error("WRONGTYPE")
NO_INTEGER = Error("ERR value is not an integer")


def agrees(expected: Any, reply: Any) -> bool:
    """Return whether a reply matches the expected one. An internal error never matches."""
    if isinstance(reply, str) and "internal error" in reply:
        return False
    if isinstance(expected, Open):
        return expected.holds(reply)
    if isinstance(expected, Error):
        return isinstance(reply, str) and reply.startswith(expected)
    if isinstance(expected, list):
        return isinstance(reply, list) and len(reply) == len(expected) and all(map(agrees, expected, reply))
    return type(expected) is type(reply) and bool(expected == reply)


def page_key(words: Iterable[bytes]) -> bytes:
    return b"kv:" + b":".join(words)


def _in_any_order(expected: Iterable[bytes]) -> Open:
    return Open(lambda reply: isinstance(reply, list) and sorted(reply) == sorted(expected))


def _maps(*expected: dict[bytes, Any]) -> Open:
    """Arrays of RESP2 that are maps with at least those fields."""

    def holds(reply: Any) -> bool:
        found = [dict(zip(one[::2], one[1::2], strict=True)) for one in reply]
        shown = [{field: one.get(field) for field in fields} for one, fields in zip(found, expected, strict=False)]
        return len(found) == len(expected) and shown == [*expected]

    return Open(holds)


def _map(**expected: Any) -> Open:
    maps = _maps({field.encode(): value for field, value in expected.items()})
    return Open(lambda reply: isinstance(reply, list) and maps.holds([reply]))


def string(value: Value | None) -> Any:
    """Return the reply of GET. Of a page's header some is not known, but it has to fit the body."""
    if value is None or not value.is_page:
        return None if value is None else value.data

    def holds(reply: Any) -> bool:
        return isinstance(reply, bytes) and bytes(decode_page(reply)[1]) == value.data

    return Open(holds)


def _size(value: Value) -> int:
    return len(value.data) + (HEADER_SIZE if value.is_page else 0)


class Model:
    """The keys. A handler is a method named as the command is."""

    def __init__(self) -> None:
        self.keys: dict[bytes, Value] = {}

    def answer(self, words: Words) -> Any:
        """The reply to a command, which is carried out."""
        name = words[0].decode()
        handler = getattr(self, f"do_{name}", None)
        if handler is not None:
            return handler(*words[1:])
        sub = getattr(self, f"do_{name}_{words[1].decode()}")
        return sub(*words[2:])

    # -- strings ---------------------------------------------------------------------------------------------------

    def _put(self, key: bytes, data: bytes, expires: bool = False) -> None:
        """A page, if it is a blob that fits its key."""
        try:
            header, found = decode_page(data)
            if header.names(PageKey.parse(key)):
                self.keys[key] = Value(bytes(found), True, expires)
                return
        except PageError:
            pass
        self.keys[key] = Value(data, False, expires)

    def do_set(self, key: bytes, data: bytes, *options: bytes) -> Any:
        old = self.keys.get(key)
        reply = string(old) if b"GET" in options else OK
        if (b"NX" in options and old) or (b"XX" in options and not old):
            return reply if b"GET" in options else None
        self._put(key, data, b"EX" in options or (b"KEEPTTL" in options and bool(old and old.expires)))
        return reply

    def do_get(self, key: bytes) -> Any:
        return string(self.keys.get(key))

    def do_setex(self, key: bytes, _: bytes, data: bytes) -> Any:
        self._put(key, data, True)
        return OK

    do_psetex = do_setex

    def do_setnx(self, key: bytes, data: bytes) -> Any:
        if key in self.keys:
            return 0
        self._put(key, data)
        return 1

    def do_getset(self, key: bytes, data: bytes) -> Any:
        old = self.keys.get(key)
        self._put(key, data)
        return string(old)

    def do_getdel(self, key: bytes) -> Any:
        return string(self.keys.pop(key, None))

    def do_getex(self, key: bytes, *options: bytes) -> Any:
        value = self.keys.get(key)
        if value is not None and options:
            self.keys[key] = replace(value, expires=options[0] == b"EX")
        return string(value)

    def do_mget(self, *keys: bytes) -> Any:
        return [string(self.keys.get(key)) for key in keys]

    def do_mset(self, *words: bytes) -> Any:
        for key, data in zip(words[::2], words[1::2], strict=True):
            self._put(key, data)
        return OK

    def do_msetnx(self, *words: bytes) -> Any:
        if not self.keys.keys().isdisjoint(words[::2]):
            return 0
        self.do_mset(*words)
        return 1

    def do_strlen(self, key: bytes) -> Any:
        return _size(self.keys[key]) if key in self.keys else 0

    def do_getrange(self, key: bytes, start: bytes, end: bytes) -> Any:
        value = self.keys.get(key)
        if value is None:
            return b""
        size, first, last = _size(value), int(start), int(end)
        if last < first < 0:
            return b""
        first, last = (max(place + size, 0) if place < 0 else place for place in (first, last))
        header = size - len(value.data)
        part = (bytes(header) + value.data)[first : last + 1]
        hidden = max(header - first, 0)
        return Open(lambda reply: len(reply) == len(part) and reply[hidden:] == part[hidden:])

    do_substr = do_getrange

    def do_incrby(self, key: bytes, amount: bytes) -> Any:
        old = self.keys.get(key, Value(b"0"))
        if old.is_page or not old.data.removeprefix(b"-").isdigit():
            return NO_INTEGER
        self.keys[key] = replace(old, data=b"%d" % (int(old.data) + int(amount)))
        return int(self.keys[key].data)

    def do_incr(self, key: bytes) -> Any:
        return self.do_incrby(key, b"1")

    def do_decr(self, key: bytes) -> Any:
        return self.do_incrby(key, b"-1")

    def do_decrby(self, key: bytes, amount: bytes) -> Any:
        return self.do_incrby(key, b"%d" % -int(amount))

    # -- keys ------------------------------------------------------------------------------------------------------

    def do_del(self, *keys: bytes) -> Any:
        return sum(self.keys.pop(key, None) is not None for key in keys)

    do_unlink = do_del

    def do_touch(self, *keys: bytes) -> Any:
        return sum(key in self.keys for key in keys)

    def do_exists(self, *keys: bytes) -> Any:
        return sum(key in self.keys or bool(self._listed(key)) for key in keys)

    def do_type(self, key: bytes) -> Any:
        return "string" if key in self.keys else "set" if self._listed(key) else "none"

    def do_keys(self, _: bytes) -> Any:
        return _in_any_order(self.keys)

    def do_kvlost(self, key: bytes) -> Any:
        return _map(strings=[]) if key in self.keys else ANYTHING

    def do_scan(self, *_: bytes) -> Any:
        keys = set(self.keys)
        return Open(lambda reply: reply[0] == b"0" and set(reply[1]) == keys)

    def do_randomkey(self) -> Any:
        keys = set(self.keys) or {None}
        return Open(lambda reply: reply in keys)

    def do_dbsize(self) -> Any:
        return len(self.keys)

    def do_flushall(self) -> Any:
        self.keys.clear()
        return OK

    do_flushdb = do_flushall

    def do_expire(self, key: bytes, time: bytes) -> Any:
        if key not in self.keys:
            return 0
        self.keys[key] = replace(self.keys[key], expires=True)
        if int(time) <= 0:
            del self.keys[key]
        return 1

    do_pexpire = do_expireat = do_pexpireat = do_expire

    def do_persist(self, key: bytes) -> Any:
        value = self.keys.get(key)
        if value is None or not value.expires:
            return 0
        self.keys[key] = replace(value, expires=False)
        return 1

    def do_ttl(self, key: bytes) -> Any:
        value = self.keys.get(key)
        if value is None:
            return -1 if self._listed(key) else -2
        return Open(lambda reply: reply > 0) if value.expires else -1

    do_pttl = do_expiretime = do_pexpiretime = do_ttl

    def _if_there(self, key: bytes, reply: Any) -> Any:
        return reply if key in self.keys else None

    def do_object_encoding(self, key: bytes) -> Any:
        value = self.keys.get(key)
        if value is None:
            return None
        if value.is_page or len(value.data) > 44:
            return b"raw"
        return b"int" if value.data.removeprefix(b"-").isdigit() else b"embstr"

    def do_object_refcount(self, key: bytes) -> Any:
        return self._if_there(key, 1)

    def do_object_idletime(self, key: bytes) -> Any:
        return self._if_there(key, A_NUMBER)

    def do_object_freq(self, key: bytes) -> Any:
        return self._if_there(key, Error("ERR An LFU"))

    def do_memory_usage(self, key: bytes) -> Any:
        return self._if_there(key, A_NUMBER)

    # -- index keys ------------------------------------------------------------------------------------------------

    def _pages(self, req: bytes, *pages: bytes) -> list[PageKey]:
        """The pages of a request, or of some of its blocks."""
        named = [PageKey.parse(key) for key, value in self.keys.items() if value.is_page]
        return [name for name in named if name.req_id == req and (not pages or name.page in map(int, pages))]

    def _listed(self, key: bytes) -> list[bytes]:
        if not (key.startswith(b"kv:") and key.endswith(b":index")):
            return []
        return [bytes(name) for name in self._pages(key.split(b":")[1])]

    def do_smembers(self, key: bytes) -> Any:
        return WRONG_TYPE if key in self.keys else _in_any_order(self._listed(key))

    def do_scard(self, key: bytes) -> Any:
        return WRONG_TYPE if key in self.keys else len(self._listed(key))

    def do_sismember(self, key: bytes, member: bytes) -> Any:
        return WRONG_TYPE if key in self.keys else int(member in self._listed(key))

    def do_sscan(self, key: bytes, *_: bytes) -> Any:
        return WRONG_TYPE if key in self.keys else [b"0", _in_any_order(self._listed(key))]

    # -- pages -----------------------------------------------------------------------------------------------------

    def do_kvpageset(self, *words: bytes) -> Any:
        self.keys[page_key(words[:5])] = Value(words[9], True, words[8] != b"0")
        return OK

    def do_kvpagemset(self, _: bytes, *words: bytes) -> Any:
        for start in range(0, len(words), 10):
            self.do_kvpageset(*words[start : start + 10])
        return OK

    def _page(self, words: Iterable[bytes]) -> Value | None:
        return self.keys.get(page_key(words))

    def do_kvpageget(self, *words: bytes) -> Any:
        value = self._page(words)
        return value if value is None else value.data if value.is_page else WRONG_TYPE

    def _named(self, words: tuple[bytes, ...]) -> list[Value | None]:
        found = [self._page(words[start : start + 5]) for start in range(0, len(words), 5)]
        return [value if value and value.is_page else None for value in found]

    def do_kvpagemget(self, _: bytes, *words: bytes) -> Any:
        return [value.data if value else None for value in self._named(words)]

    def do_kvpageexists(self, *words: bytes) -> Any:
        return self.do_kvpagemexists(b"1", *words)[0]

    def do_kvpagemexists(self, _: bytes, *words: bytes) -> Any:
        return [int(value is not None) for value in self._named(words)]

    def do_kvpagestat(self, *words: bytes) -> Any:
        value = self._page(words)
        if value is None:
            return None
        return _map(bytes=PAGE, layer=int(words[1]), page=int(words[3])) if value.is_page else WRONG_TYPE

    def do_kvpagewhy(self, *words: bytes) -> Any:
        value = self._page(words) if len(words) == 5 else None
        if value is None:
            return ANYTHING
        return _map(reason=b"stored") if value.is_page else WRONG_TYPE

    def do_kvpagedel(self, *words: bytes) -> Any:
        return self.do_del(*map(bytes, self._pages(*words)))

    def do_kvpageverify(self, *words: bytes) -> Any:
        return _map(checked=len(self._pages(*words)), unchecked=0, corrupt=[])

    def _blocks(self, *words: bytes) -> dict[int, list[PageKey]]:
        names = self._pages(*words)
        return {page: [name for name in names if name.page == page] for page in sorted({name.page for name in names})}

    def do_kvpageindex(self, req: bytes) -> Any:
        blocks = self._blocks(req).items()
        whole = {page: int(self._whole(names)) for page, names in blocks}
        return _maps(*({b"page": page, b"pages": len(names), b"complete": whole[page]} for page, names in blocks))

    def do_kvpageprefix(self, pages: bytes, _: bytes, __: bytes, *words: bytes) -> Any:
        count = 0
        for req, page in zip(words[::2], words[1::2], strict=True):
            if len(self._pages(req, page)) != int(pages):
                break
            count += 1
        return count

    def do_kvpagelease(self, req: bytes, _: bytes, *pages: bytes) -> Any:
        most = len(self._blocks(req, *pages))
        return Open(lambda reply: 0 <= reply <= most)

    def do_kvpagepin(self, *words: bytes) -> Any:
        most = len(self._blocks(*words))
        return Open(lambda reply: reply == most or str(reply).startswith("ERR leases and pins may take"))

    def do_kvpageunpin(self, *words: bytes) -> Any:
        most = len(self._blocks(*words))
        return Open(lambda reply: 0 <= reply <= most)

    # -- blocks ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _whole(names: list[PageKey]) -> bool:
        """Whether those pages are a block: every layer up to the last has every plane."""
        layers, planes = {name.layer for name in names}, {name.kv_type for name in names}
        return bool(names) and len(names) == (max(layers) + 1) * len(planes)

    def do_kvblockset(self, req: bytes, page: bytes, *words: bytes) -> Any:
        self.do_kvpagedel(req, page)
        for layer in range(LAYERS):
            part = words[-1][layer * PAGE : (layer + 1) * PAGE]
            self.keys[page_key((req, b"%d" % layer, b"0", page, b"0"))] = Value(part, True, words[3] != b"0")
        return OK

    def do_kvblockget(self, req: bytes, page: bytes) -> Any:
        names = self._pages(req, page)
        if not self._whole(names):
            return None
        names.sort(key=lambda name: (name.layer, name.kv_type))
        return b"".join(self.keys[bytes(name)].data for name in names)

    def do_kvblockmget(self, _: bytes, *words: bytes) -> Any:
        return [self.do_kvblockget(req, page) for req, page in zip(words[::2], words[1::2], strict=True)]

    def do_kvblockexists(self, req: bytes, page: bytes) -> Any:
        return int(self._whole(self._pages(req, page)))
