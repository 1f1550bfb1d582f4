"""What to type next, as messages say it. Every hint can be pasted into a shell."""

from __future__ import annotations

import shlex

from kvpage_server.look.strings import AsStrings
from kvpage_server.observe.asking import AskedStore


def typed(name: str) -> str:
    """A name of the command line as a shell takes it; empty if it cannot be pasted, as bytes that are not UTF-8."""
    return shlex.quote(name) if name.isprintable() and not name.startswith("-") else ""


def may_say_why(store: AskedStore, name: str, *page: str) -> str:
    """The end of a message that something is not there; empty where nothing tells why."""
    word = typed(name)
    return f"; kvpage why {' '.join([word, *page])} may say why" if word and not isinstance(store, AsStrings) else ""
