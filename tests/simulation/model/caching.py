"""How a connection tracks keys, and what CLIENT TRACKING and TRACKINGINFO answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.model.replies import Err, May

Words = tuple[bytes, ...]
SYNTAX = Err("ERR syntax error")
_OPTIONS = {b"BCAST": "broadcast", b"OPTIN": "opt_in", b"OPTOUT": "opt_out", b"NOLOOP": "no_loop"}


@dataclass(frozen=True)
class Mode:
    """How a connection tracks."""

    redirect: int = 0  # the id of the connection that receives invalidations
    broadcast: bool = False
    opt_in: bool = False
    opt_out: bool = False
    no_loop: bool = False
    asked: bool = False  # CLIENT CACHING applies to the next command
    prefixes: frozenset[bytes] = frozenset()

    @property
    def notes(self) -> bool:
        """Return whether the keys of a read are tracked."""
        return not self.broadcast and (self.asked if self.opt_in else not (self.opt_out and self.asked))

    def is_about(self, key: bytes) -> bool:
        """Whether it broadcasts changes of a key."""
        return self.broadcast and key.startswith(tuple(self.prefixes))


def asked_for(words: Words, may_redirect: Callable[[int], bool]) -> Mode | Err:
    """Return the mode of some options, or the error of one of them."""
    mode, rest = Mode(), iter(words)
    for word in rest:
        value = next(rest, None) if word in (b"PREFIX", b"REDIRECT") else b""
        if word in _OPTIONS:
            mode = replace(mode, **{_OPTIONS[word]: True})
        elif word == b"PREFIX" and value is not None:
            mode = replace(mode, prefixes=mode.prefixes | {value})
        elif word == b"REDIRECT" and value is not None:
            if mode.redirect:
                return Err("ERR A client can only redirect to a single other client")
            if not may_redirect(int(value)):
                return Err("ERR The client ID you want redirect to does not exist")
            mode = replace(mode, redirect=int(value))
        else:
            return SYNTAX
    return mode


def contradiction(before: Mode | None, mode: Mode) -> Err | None:
    """Return the error of a mode that contradicts itself or the mode before it."""
    if mode.prefixes and not mode.broadcast:
        return Err("ERR PREFIX option requires BCAST mode to be enabled")
    if before is not None and before.broadcast != mode.broadcast:
        return Err("ERR You can't switch BCAST mode on/off")
    if mode.broadcast and (mode.opt_in or mode.opt_out):
        return Err("ERR OPTIN and OPTOUT are not compatible with BCAST")
    if mode.opt_in and mode.opt_out:
        return Err("ERR You can't specify both OPTIN mode and OPTOUT mode")
    if before is not None and ((mode.opt_in and before.opt_out) or (mode.opt_out and before.opt_in)):
        return Err("ERR You can't switch OPTIN/OPTOUT mode")
    there = before.prefixes if before is not None else frozenset()
    for prefix in mode.prefixes:
        others = [*there, *(mode.prefixes - {prefix})]
        if any(prefix.startswith(one) or one.startswith(prefix) for one in others):
            return Err("ERR Prefix '")
    return None


def described(mode: Mode | None, broken: list[bool]) -> May:
    """Return TRACKINGINFO's reply, in RESP3 or as an array of RESP2. `broken`: the permitted values of that flag."""
    flags = _flags(mode)
    shown = [flags | {b"broken_redirect"} if case else flags for case in broken] if mode else [flags]
    redirect, prefixes = (mode.redirect, sorted(mode.prefixes)) if mode else (-1, [])

    def holds(reply: Any) -> bool:
        if isinstance(reply, list) and len(reply) == 6:
            reply = dict(zip(reply[::2], reply[1::2], strict=True))
        if not isinstance(reply, dict) or set(reply) != {b"flags", b"redirect", b"prefixes"}:
            return False
        received = reply[b"flags"]
        is_set = isinstance(received, list | set) and len(set(received)) == len(received) and set(received) in shown
        return is_set and reply[b"redirect"] == redirect and reply[b"prefixes"] == prefixes

    return May(f"flags {shown}, redirect {redirect}, prefixes {prefixes}", holds)


def _flags(mode: Mode | None) -> set[bytes]:
    if mode is None:
        return {b"off"}
    flags = {
        b"on": True, b"bcast": mode.broadcast, b"optin": mode.opt_in, b"caching-yes": mode.opt_in and mode.asked,
        b"optout": mode.opt_out, b"caching-no": mode.opt_out and mode.asked, b"noloop": mode.no_loop,
    }  # fmt: skip
    return {flag for flag, is_set in flags.items() if is_set}
