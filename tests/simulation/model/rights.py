"""Rights of users in the model: a tenant's keys have a prefix of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.model.replies import Err

Words = tuple[bytes, ...]
_NO_KEYS = frozenset(
    b"ping echo hello auth client multi exec discard unwatch info save kvdecode keys dbsize publish subscribe "
    b"unsubscribe psubscribe punsubscribe reset "
    b"config command acl randomkey scan".split()
)
_SEVERAL = frozenset(b"del unlink exists touch mget watch".split())
_PAGE = frozenset(b"kvpageset kvpageget kvpageexists kvpagestat".split())
_PAGES = {b"kvpagemset": 10, b"kvpagemget": 5, b"kvpagemexists": 5}
NO_RIGHT = Err("NOPERM")


@dataclass
class Rights:
    """Rights of a user: prefixes of its keys, and forbidden commands."""

    beginnings: list[bytes]
    denied: set[bytes] = field(default_factory=set)
    is_on: bool = True  # or nobody can say that he is this user

    def may(self, words: Words) -> bool:
        """Whether it may do that."""
        return words[0].lower() not in self.denied and all(map(self.may_use, keys_used(words)))

    def may_use(self, key: bytes) -> bool:
        """Whether it may use a key, or all that begin so."""
        return key.startswith(tuple(self.beginnings))

    def change(self, rules: Words) -> None:
        """Change the rights as ACL SETUSER does."""
        for rule in rules:
            if rule == b"on":
                self.is_on = True
            elif rule == b"resetkeys":
                self.beginnings = []
            elif rule[:1] == b"~":
                self.beginnings.append(rule[1:].removesuffix(b"*"))
            else:
                (self.denied.add if rule[:1] == b"-" else self.denied.discard)(rule[1:])


def keys_used(words: Words) -> list[bytes]:
    """The keys of a command; for a request, or a block of one, how all of its keys begin."""
    name = words[0].lower()
    if name in _NO_KEYS:
        return []
    if name in _SEVERAL:
        return list(words[1:])
    if name in (b"object", b"memory"):
        return list(words[2:])  # those of their commands that have words have a key
    if name in (b"mset", b"msetnx"):
        return list(words[1::2])
    if name in _PAGE:
        return [b"kv:" + b":".join(words[1:6])]
    if name in _PAGES:
        return [b"kv:" + b":".join(words[at : at + 5]) for at in range(2, len(words), _PAGES[name])]
    if name in (b"kvblockmget", b"kvblockmgetcoded"):
        return [b"kv:%b:" % req for req in words[2::2]]
    if name == b"kvpageprefix":
        end = 4 + 2 * int(words[3])
        return [b"kv:%b:" % req for req in (*words[4:end:2], *words[end + 2 :: 3])]
    if name.startswith((b"kvpage", b"kvblock")):
        return [b"kv:%b:" % words[1]]
    return [words[1]]
