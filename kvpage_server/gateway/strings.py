"""The commands of strings and keys on a gateway. When an answer is lost, a command is sent again, so only commands that
can safely run twice are supported.

A page may be part of a block. So commands on a page's key look for both, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.commands import simple
from kvpage_server.commands.arguments import plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.keys.value import checked_page
from kvpage_server.commands.steps import each
from kvpage_server.commands.table.spec import Spec
from kvpage_server.core import Argument
from kvpage_server.gateway.plans import Plans
from kvpage_server.gateway.upstream import Upstream
from kvpage_server.gateway.words import passed, spell, told
from kvpage_server.page import PageError, PageKey
from kvpage_server.resp.reply import OK, Reply, ReplyError

_SETS = frozenset({"set", "setex", "psetex"})
_OF_BLOCK = frozenset({"type", "ttl", "pttl", "expiretime", "pexpiretime"})  # the same for a page and its block
_OF_STRING = frozenset({"strlen", "getrange", "expire", "pexpire", "expireat", "pexpireat", "persist"})
PASSED = _SETS | _OF_BLOCK | _OF_STRING
COUNTED = {"del": b"UNLINK", "unlink": b"UNLINK", "exists": b"EXISTS", "touch": b"TOUCH"}  # of several keys
_ONCE = frozenset({b"NX", b"XX", b"GET", b"IFEQ"})  # options of SET


def page_of(key: bytes) -> PageKey | None:
    """The page that a key names, or None."""
    try:
        return PageKey.parse(key)
    except PageError:
        return None


@dataclass(frozen=True)
class StringsBehind:
    """Each method takes the command's row, a client and arguments, and returns the steps of the reply."""

    upstream: Upstream

    @property
    def _plans(self) -> Plans:
        return self.upstream.plans

    def get(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [value] = yield from self.upstream.do(self._plans.of_keys([_named(plain(args[0]))]))
        yield spell(value)

    def mget(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from each(args, lambda some: [*map(_named, plain_all(some))])
        yield from self.upstream.fetch(client, keys, self._plans.of_keys, spell)

    def counted(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """The number of keys that exist, or were deleted."""
        word, keys = COUNTED[spec.name], plain_all(args)
        pages = [page for key in keys if (page := page_of(key))]
        others = [key for key in keys if not page_of(key)]
        count = 0
        if pages and word == b"UNLINK":
            count += yield from self.upstream.do(self._plans.calls.delete(pages))
        elif pages:
            count += sum((yield from self.upstream.each(pages, self._plans.calls.taken)))
        if word == b"TOUCH":
            blocks = dict.fromkeys(block_key((page.req_id, page.page)) for page in pages)
            touched = [simple(word, key, writes=spec.writes) for key in (*map(bytes, pages), *blocks)]
            yield from self.upstream.each(touched, self._plans.ask)
        asked = [simple(word, key, writes=spec.writes) for key in others]
        answers = yield from self.upstream.each(asked, self._plans.ask)
        yield count + sum(answer for answer in answers if isinstance(answer, int))

    def passed(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """Pass a command on to the node unchanged."""
        if spec.name == "set" and _ONCE & {option.upper() for option in plain_all(args[2:])}:
            raise ReplyError(
                "ERR a gateway does not support SET with NX, XX or GET: when a node fails, it sends a command again"
            )
        page, words = page_of(plain(args[0])), [spec.name.upper().encode(), *args]
        if page and spec.name in _SETS:
            checked_page(client, bytes(page), args[1 if spec.name == "set" else 2])
            written = [passed(words, writes=True)]
            yield from self.upstream.do(self._plans.calls.put_pages(written, [(page.req_id, page.page)]))
            yield OK
        elif page and spec.name in _OF_BLOCK:
            block = [words[0], block_key((page.req_id, page.page))]
            asked = [passed(some, writes=False) for some in (words, block)]
            alone, in_block = yield from self.upstream.do(self._plans.ask(asked))
            yield told(in_block if alone in (-2, b"none") else alone)
        elif page and (yield from self.upstream.do(self._plans.in_block(page))):
            raise ReplyError(
                f"ERR '{spec.name}' of a page that lies in a block can't be done before a cluster: a block lives as one"
            )
        else:
            [answer] = yield from self.upstream.do(self._plans.ask([passed(words, writes=spec.writes)]))
            yield told(answer)


def _named(key: bytes) -> PageKey | bytes:
    """A key, as the page that it names if it names one."""
    return page_of(key) or key
