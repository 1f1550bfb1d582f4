"""Random commands made from the usage strings of the command table: mostly well-formed, now and then not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from kvpage_server.commands.specs import Spec, arguments

Words = list[bytes]

KEYS = [
    *(b"a", b"b", b"counter", b"key:1", b"key:2", b"k*y?[x]", b"", b"kv:req:0:0:0:0"),
    *(b"\x00\xff bin\r\n\x80", b"K" * 300),
]
VALUES = [
    *(b"%d" % n for n in (0, 1, -1, 7, 10000, 2**63 - 1, -(2**63), 2**63 - 2)),
    *(b"", b"01", b"-0", b"+1", b" 1", b"1 ", b"1.5", b"0x10", b"9223372036854775808", b"abc", b"hello world"),
    *(b"\x00\x01\xfe\xff", b"line\r\nline", b"x" * 44, b"x" * 45, b"12345678901234567890", b"KVPG\x02short"),
    *(b"y" * 1023, b"z" * 1025, b"w" * 5000, b"v" * 20000),
]
INTEGERS = [b"0", b"1", b"-1", b"5", b"-5", b"100", b"9223372036854775807", b"-9223372036854775808"]
NO_INTEGERS = [
    *(b"", b"abc", b"1.5", b"+1", b"-0", b"01", b" 1", b"1 ", b"0x10"),
    *(b"9223372036854775808", b"1\x00", b"-", b"\xff"),
]
ODD_WORDS = [
    *(b"", b"0", b"-1", b"abc", b"two words", b"\x00\x01\xfe\xff", b"line\r\nline"),
    *(b"x" * 100, b"9223372036854775808"),
]
PATTERNS = [
    *(b"*", b"k*", b"key:?", b"key:[1-2]", b"[^k]*", b"k\\*y*", b"", b"nothing"),
    *(b"*[", b"?", b"**a", b"k[", b"\\"),
]
CHANNELS = [b"news", b"news.art", b"", b"\x00\xff", b"other"]


_OURS_ALONE = {"MAXLEN"}  # arguments that Redis does not have
_ABOUT_ANOTHER = {"command|getkeys": [], "command|getkeysandflags": [], "acl|dryrun": [b"default"]}


class Commands:
    """`next()` is the next command of a sequence that `rng` decides."""

    def __init__(self, rng: random.Random, specs: list[Spec]) -> None:
        self._rng = rng
        self._specs = specs
        any_of = rng.choice
        self._values: dict[str, Callable[[], bytes]] = {
            "key": lambda: any_of(KEYS),
            "value": lambda: any_of(VALUES),
            "message": lambda: any_of(VALUES),
            "pattern": lambda: any_of(PATTERNS),
            "channel": lambda: any_of(CHANNELS),
            "seconds": lambda: self._time(0, 10**3),
            "milliseconds": lambda: self._time(0, 10**6),
            "unix-time-seconds": lambda: self._time(int(time.time()), 10**3),
            "unix-time-milliseconds": lambda: self._time(int(time.time() * 1000), 10**6),
            "cursor": lambda: any_of([b"0", b"0", b"0", b"", b"x", b"-1", b"18446744073709551616", b"1 ", b"+0"]),
            "count": lambda: any_of([b"1", b"10", b"1000", b"0", b"-1", b"x"]),
            "type": lambda: any_of([b"string", b"STRING", b"list", b"x"]),
            "protover": lambda: any_of([b"2", b"3", b"3", b"1", b"4", b"x", b"03"]),
            "index": lambda: any_of([b"0", b"0", b"1", b"-1", b"x"]),
            "username": lambda: any_of([b"default"]),
            "password": lambda: any_of([b"", b"secret"]),
            "clientname": lambda: any_of([b"me", b"", b"with space", b"with\nnewline"]),
            "connection-name": lambda: any_of([b"me", b"", b"with space", b"with\nnewline"]),
            "parameter": lambda: any_of([b"appendonly", b"databases", b"save", b"no-such", b"databas?s", b"[", b""]),
        }

    def _integer(self) -> bytes:
        return self._rng.choice(NO_INTEGERS if self._rng.random() < 0.15 else INTEGERS)

    def _time(self, now: int, unit: int) -> bytes:
        """Return a time far in the future, never one during the test; or none, or one in the past or out of range."""
        if self._rng.random() < 0.8:
            return b"%d" % (now + self._rng.randint(unit, 1000 * unit))
        return self._rng.choice([b"0", b"-1", b"1" if now else b"-5", *NO_INTEGERS, *INTEGERS[-2:]])

    def next(self) -> Words:
        rng = self._rng
        if rng.random() < 0.01:
            return [rng.choice([b"nosuch", b"NO\x00SUCH", b"x" * 200]), *rng.choices(ODD_WORDS, k=rng.randrange(4))]
        return self.of(rng.choice(self._specs))

    def of(self, spec: Spec) -> Words:
        """A call of one command, spelt in upper, lower or mixed case, one in ten a word short or a word too long."""
        words = [self._case(word.encode()) for word in spec.name.split("|")]
        if spec.name in _ABOUT_ANOTHER:
            return [*words, *_ABOUT_ANOTHER[spec.name], *self.of(self._rng.choice(self._specs))]
        words += self._sequence(arguments(spec.usage))
        if self._rng.random() < 0.1:
            place = self._rng.randrange(1, len(words) + 1)
            words[place : place + self._rng.randrange(2)] = self._rng.choice([[], [self._rng.choice(ODD_WORDS)]])
        return words

    def _case(self, word: bytes) -> bytes:
        return self._rng.choice([word, word.upper(), word.capitalize()])

    def _sequence(self, tree: list[dict[str, Any]]) -> Words:
        return [word for argument in tree for word in self._argument(argument)]

    def _argument(self, argument: dict[str, Any]) -> Words:
        flags = argument.get("flags", [])
        if "optional" in flags and (self._rng.random() < 0.6 or argument.get("token") in _OURS_ALONE):
            return []
        times = self._rng.choice([1, 1, 2, 3]) if "multiple" in flags else 1
        return [word for _ in range(times) for word in self._once(argument)]

    def _once(self, argument: dict[str, Any]) -> Words:
        token = [self._case(argument["token"].encode())] if "token" in argument else []
        if argument["type"] == "oneof":
            return self._argument(self._rng.choice(argument["arguments"]))
        if argument["type"] == "block":
            return token + self._sequence(argument["arguments"])
        if argument["type"] == "pure-token":
            return token
        return [*token, self._values.get(argument["name"], self._integer)()]
