"""What to type next, as messages say it. Every hint can be pasted into a shell."""

from __future__ import annotations

import os
import shlex

from kvpage_server.look.strings import AsStrings
from kvpage_server.observe.asking import AskedStore, ask, text
from kvpage_server.observe.whose import holdings_of_agent


def typed(name: str) -> str:
    """A name of the command line as a shell takes it; empty if it cannot be pasted, as bytes that are not UTF-8."""
    return shlex.quote(name) if name.isprintable() and not name.startswith("-") else ""


def is_an_agent(store: AskedStore, name: bytes) -> str:
    """Returns a message with the commands that show an agent; empty if no agent has this name."""
    holdings = ask(store, holdings_of_agent(name))
    if not holdings.agents and not holdings.unreadable:
        return ""
    said = text(name)
    word = typed(os.fsdecode(name))
    shows = f": kvpage stat {word} shows its blocks, kvpage verify {word} checks them" if word else ""
    return f"{said} is an agent, and no request{shows}"


def may_say_why(store: AskedStore, name: str, *page: str) -> str:
    """The end of a message that something is not there; empty where nothing tells why."""
    word = typed(name)
    return f"; kvpage why {' '.join([word, *page])} may say why" if word and not isinstance(store, AsStrings) else ""
