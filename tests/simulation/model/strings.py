"""Strings, counters and times to live, as the model has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.model.replies import OK, Err, part_of_blob
from tests.simulation.model.values import Cell, Store, Value, read_page

_BOUNDS = -(2**63), 2**63 - 1
NO_INTEGER = Err("ERR value is not an integer")
_UNITS = {b"EX": 1000, b"PX": 1, b"EXAT": 1000, b"PXAT": 1}


def _string(value: Cell) -> Any:
    return None if value is None else value.string


class Strings:
    """A handler is a method named as its command is."""

    store: Store
    is_index: Callable[[bytes], bool]

    def _expiry(self, option: bytes, time: bytes) -> int:
        return int(time) * _UNITS[option] + (0 if option.endswith(b"AT") else self.store.now)

    def _put(self, key: bytes, data: bytes, expires: int = 0) -> None:
        is_page = data[:4] == b"KVPG" and key.startswith(b"kv:") and key.count(b":") == 5
        self.store.put(key, read_page(key, data, expires) if is_page else Value(data, expires))

    def do_set(self, key: bytes, data: bytes, *options: bytes) -> Any:
        old, expires = self.store.get(key), 0
        for at, option in enumerate(options):
            if option in _UNITS:
                expires = self._expiry(option, options[at + 1])
            elif option == b"KEEPTTL" and old is not None:
                expires = old.expires
        reply = _string(old) if b"GET" in options else OK
        if (b"NX" in options and old is not None) or (b"XX" in options and old is None):
            return reply if b"GET" in options else None
        self._put(key, data, expires)
        return reply

    def do_get(self, key: bytes) -> Any:
        return _string(self.store.get(key))

    def do_setex(self, key: bytes, seconds: bytes, data: bytes) -> Any:
        self._put(key, data, self._expiry(b"EX", seconds))
        return OK

    def do_psetex(self, key: bytes, milliseconds: bytes, data: bytes) -> Any:
        self._put(key, data, self._expiry(b"PX", milliseconds))
        return OK

    def do_setnx(self, key: bytes, data: bytes) -> Any:
        if self.store.get(key) is not None:
            return 0
        self._put(key, data)
        return 1

    def do_getset(self, key: bytes, data: bytes) -> Any:
        old = self.store.get(key)
        self._put(key, data)
        return _string(old)

    def do_getdel(self, key: bytes) -> Any:
        old = self.store.get(key)
        self.store.drop(key)
        return _string(old)

    def do_getex(self, key: bytes, *options: bytes) -> Any:
        value = self.store.get(key)
        if value is not None and options:
            if options[0] == b"PERSIST":
                if value.expires:
                    self.store.retime(key, 0)
            else:
                self._retime(key, self._expiry(*options))
        return _string(value)

    def do_mget(self, *keys: bytes) -> Any:
        return [_string(self.store.get(key)) for key in keys]

    def do_mset(self, *words: bytes) -> Any:
        for key, data in zip(words[::2], words[1::2], strict=True):
            self._put(key, data)
        return OK

    def do_msetnx(self, *words: bytes) -> Any:
        if any(self.store.get(key) is not None for key in words[::2]):
            return 0
        self.do_mset(*words)
        return 1

    def do_strlen(self, key: bytes) -> Any:
        value = self.store.get(key)
        return 0 if value is None else value.size

    def do_incrby(self, key: bytes, amount: bytes) -> Any:
        old = self.store.get(key) or Value(b"0")
        if old.page or not old.data.removeprefix(b"-").isdigit() or b"%d" % int(old.data) != old.data:
            return NO_INTEGER
        new = int(old.data) + int(amount)
        if not _BOUNDS[0] <= new <= _BOUNDS[1]:
            return Err("ERR increment or decrement would overflow")
        self.store.put(key, replace(old, data=b"%d" % new))
        return new

    def do_incr(self, key: bytes) -> Any:
        return self.do_incrby(key, b"1")

    def do_decr(self, key: bytes) -> Any:
        return self.do_incrby(key, b"-1")

    def do_decrby(self, key: bytes, amount: bytes) -> Any:
        return self.do_incrby(key, b"%d" % -int(amount))

    def do_getrange(self, key: bytes, start: bytes, end: bytes) -> Any:
        value = self.store.get(key)
        if value is None:
            return b""
        size, first, last = value.size, int(start), int(end)
        if last < first < 0:
            return b""
        first, last = (max(place + size, 0) if place < 0 else place for place in (first, last))
        return part_of_blob(value.header, value.data, first, last) if value.page else value.data[first : last + 1]

    do_substr = do_getrange

    # -- keys ------------------------------------------------------------------------------------------------------

    def do_del(self, *keys: bytes) -> Any:
        return sum(self.store.get(key) is not None and self.store.drop(key) for key in keys)

    do_unlink = do_del

    def do_touch(self, *keys: bytes) -> Any:
        return sum(self.store.get(key) is not None for key in keys)

    def do_exists(self, *keys: bytes) -> Any:
        return sum(self.store.get(key) is not None or self.is_index(key) for key in keys)

    def do_type(self, key: bytes) -> Any:
        return b"string" if self.store.get(key) is not None else b"set" if self.is_index(key) else b"none"

    # -- times -----------------------------------------------------------------------------------------------------

    def _retime(self, key: bytes, expires: int) -> None:
        if expires <= self.store.now:
            self.store.drop(key)
        else:
            self.store.retime(key, expires)

    def _expire(self, key: bytes, expires: int, *conditions: bytes) -> Any:
        value = self.store.get(key)
        if value is None:
            return 0
        old = value.expires
        if (
            (b"NX" in conditions and old)
            or (b"XX" in conditions and not old)
            or (b"GT" in conditions and (not old or expires <= old))
            or (b"LT" in conditions and old and expires >= old)
        ):
            return 0
        self._retime(key, max(expires, 1))
        return 1

    def do_expire(self, key: bytes, seconds: bytes, *conditions: bytes) -> Any:
        return self._expire(key, self.store.now + int(seconds) * 1000, *conditions)

    def do_pexpire(self, key: bytes, milliseconds: bytes, *conditions: bytes) -> Any:
        return self._expire(key, self.store.now + int(milliseconds), *conditions)

    def do_expireat(self, key: bytes, seconds: bytes, *conditions: bytes) -> Any:
        return self._expire(key, int(seconds) * 1000, *conditions)

    def do_pexpireat(self, key: bytes, milliseconds: bytes, *conditions: bytes) -> Any:
        return self._expire(key, int(milliseconds), *conditions)

    def do_persist(self, key: bytes) -> Any:
        value = self.store.get(key)
        if value is None or not value.expires:
            return 0
        self.store.retime(key, 0)
        return 1

    def _expiry_of(self, key: bytes) -> int:
        value = self.store.get(key)
        return (-1 if self.is_index(key) else -2) if value is None else value.expires or -1

    def _left(self, key: bytes) -> int:
        expires = self._expiry_of(key)
        return expires if expires < 0 else max(expires - self.store.now, 0)

    def time(self, milliseconds: int, unit: int = 1) -> Any:
        """Return the reply for a time: milliseconds or seconds, rounded."""
        return milliseconds if milliseconds < 0 else (milliseconds + unit // 2) // unit

    def do_pexpiretime(self, key: bytes) -> Any:
        return self.time(self._expiry_of(key))

    def do_expiretime(self, key: bytes) -> Any:
        return self.time(self._expiry_of(key), 1000)

    def do_pttl(self, key: bytes) -> Any:
        return self.time(self._left(key))

    def do_ttl(self, key: bytes) -> Any:
        return self.time(self._left(key), 1000)
