"""The subcommands of CLIENT for client-side caching: TRACKING, TRACKINGINFO, CACHING, GETREDIR. See
`notifying/tracking.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer, plain, plain_all, shorten
from kvpage_server.commands.context import Client
from kvpage_server.commands.notifying.channels import Mode
from kvpage_server.commands.registry import command
from kvpage_server.core import Argument
from kvpage_server.resp import OK, Reply, ReplyError

MOST_PREFIXES = 1024  # prefixes of a client at most, and bytes of a prefix at most
_TURN_OFF_FIRST = "before disabling tracking for this client, and then re-enabling it with a different mode."


_tracking = partial(command, flags="noscript loading stale keeps_caching", group="connection", since="6.0.0")


@_tracking(
    "client|tracking <ON | OFF> [REDIRECT client-id] [PREFIX prefix [PREFIX prefix ...]] [BCAST] [OPTIN] "
    "[OPTOUT] [NOLOOP]",
    complexity="O(1), O(N) with N prefixes",
    reply="OK",
    summary="Sends the connection a message when a key that it read changes, for a cache in the client.",
)
def client_tracking(client: Client, args: list[Argument]) -> Reply:
    """Turn client-side caching for the connection on or off, and return OK.

    A RESP2 client needs another connection for the messages: the one with the id after REDIRECT, which subscribes to
    the channel `__redis__:invalidate`.
    """
    state, *words = plain_all(args)
    mode, prefixes = _mode(client, words)
    if state.upper() == b"ON":
        _check(client, mode, prefixes)
        if mode.broadcast:
            mode.prefixes = dict.fromkeys(prefixes or [b""])
        client.server.events.track(client, mode)
    elif state.upper() == b"OFF":
        client.server.events.untrack(client)
    else:
        raise ReplyError(SYNTAX_ERROR)
    return OK


def _mode(client: Client, words: list[bytes]) -> tuple[Mode, list[bytes]]:
    """Return the mode and the prefixes in CLIENT TRACKING's options. Raises ReplyError."""
    mode, prefixes = Mode(), []
    rest = iter(words)
    for word in rest:
        option = word.upper()
        if option == b"BCAST":
            mode.broadcast = True
        elif option == b"OPTIN":
            mode.opt_in = True
        elif option == b"OPTOUT":
            mode.opt_out = True
        elif option == b"NOLOOP":
            mode.no_loop = True
        elif option in (b"REDIRECT", b"PREFIX") and (value := next(rest, None)) is not None:
            if option == b"PREFIX":
                prefixes.append(value)
            else:
                mode.redirect = _redirect(client, mode, value)
        else:
            raise ReplyError(SYNTAX_ERROR)
    return mode, prefixes


def _redirect(client: Client, mode: Mode, value: bytes) -> int:
    """Return the client id after REDIRECT. Raises ReplyError unless it is the id of a client that this client
    may see.
    """
    if mode.redirect:
        raise ReplyError("ERR A client can only redirect to a single other client")
    number = integer(value)
    other = client.server.clients.get(number)
    if other is None or other.gone or not (client.sees_all or other.user is client.user):
        raise ReplyError("ERR The client ID you want redirect to does not exist")
    return number


def _check(client: Client, mode: Mode, prefixes: list[bytes]) -> None:
    """Raise ReplyError if the options contradict each other or the client's current mode, or if prefixes are too long,
    too many or overlap.
    """
    before = client.tracking
    if prefixes and not mode.broadcast:
        raise ReplyError("ERR PREFIX option requires BCAST mode to be enabled")
    if before is not None and before.broadcast != mode.broadcast:
        raise ReplyError(f"ERR You can't switch BCAST mode on/off {_TURN_OFF_FIRST}")
    if mode.broadcast and (mode.opt_in or mode.opt_out):
        raise ReplyError("ERR OPTIN and OPTOUT are not compatible with BCAST")
    if mode.opt_in and mode.opt_out:
        raise ReplyError("ERR You can't specify both OPTIN mode and OPTOUT mode")
    if before is not None and ((mode.opt_in and before.opt_out) or (mode.opt_out and before.opt_in)):
        raise ReplyError(f"ERR You can't switch OPTIN/OPTOUT mode {_TURN_OFF_FIRST}")
    if mode.broadcast:
        existing = list(before.prefixes) if before is not None else []
        longest, count = max(map(len, prefixes), default=0), len({*prefixes, *existing})
        if longest > MOST_PREFIXES:
            raise ReplyError(f"ERR A prefix can have at most {MOST_PREFIXES} bytes, got {longest}")
        if count > MOST_PREFIXES:
            raise ReplyError(f"ERR A client can have at most {MOST_PREFIXES} prefixes, got {count}")
        _check_overlaps(prefixes, existing)


def _check_overlaps(prefixes: list[bytes], existing: list[bytes]) -> None:
    """Raise ReplyError if one of the new `prefixes` overlaps with another one or an existing one."""
    overlapping = _overlapping([*prefixes, *existing])
    for place, prefix in enumerate(prefixes):
        if prefix not in overlapping:
            continue
        others = [(other, "an existing") for other in existing]
        others += [(other, "another provided") for other in prefixes[place + 1 :]]
        for other, which in others:
            if prefix.startswith(other) or other.startswith(prefix):
                shown, beside = shorten(prefix, len(prefix)), shorten(other, len(other))
                raise ReplyError(
                    f"ERR Prefix '{shown}' overlaps with {which} prefix '{beside}'. "
                    "Prefixes for a single client must not overlap."
                )


def _overlapping(names: list[bytes]) -> set[bytes]:
    """Return the names that are a prefix of another name, or have another name as a prefix. O(names log names).

    In sorted order, a name directly follows its prefixes and their other continuations.
    """
    found, openings = set[bytes](), list[bytes]()
    for name in sorted(names):
        while openings and not name.startswith(openings[-1]):
            openings.pop()
        found.update((name, openings[-1]) if openings else ())
        openings.append(name)
    return found


@_tracking(
    "client|caching <YES | NO>",
    reply="OK",
    summary="Says whether the keys of the next command, or transaction, are tracked.",
)
def client_caching(client: Client, args: list[Argument]) -> Reply:
    """Set whether the keys of the next command, or of the transaction, are tracked, and return OK. YES requires OPTIN,
    NO requires OPTOUT.
    """
    mode, word = client.tracking, plain(args[0]).upper()
    if mode is None:
        raise ReplyError(
            "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode "
            "enabled"
        )
    if word not in (b"YES", b"NO"):
        raise ReplyError(SYNTAX_ERROR)
    mode_name = "OPTIN" if word == b"YES" else "OPTOUT"
    if not (mode.opt_in if word == b"YES" else mode.opt_out):
        raise ReplyError(
            f"ERR CLIENT CACHING {word.decode()} is only valid when tracking is enabled in {mode_name} mode."
        )
    mode.caching_called = True
    return OK


@_tracking(
    "client|getredir",
    reply="integer",
    summary="Returns the id of the connection that gets this one's tracking messages.",
)
def client_getredir(client: Client, args: list[Argument]) -> Reply:
    """Return the id of the connection that gets the invalidation messages; 0 for the client's own connection, -1 if it
    does not track.
    """
    return client.redirection


@_tracking(
    "client|trackinginfo",
    since="6.2.0",
    complexity="O(N) with N prefixes",
    reply="map",
    summary="Describes how the connection tracks keys.",
)
def client_trackinginfo(client: Client, args: list[Argument]) -> Reply:
    """Return a map with the options of client-side caching: flags, redirect, prefixes."""
    mode = client.tracking
    described: dict[str, Any] = {"flags": dict.fromkeys(_flags(mode)).keys(), "redirect": client.redirection}
    return described | {"prefixes": sorted(mode.prefixes) if mode is not None else []}


def _flags(mode: Mode | None) -> list[str]:
    """Return the names of the options of a mode; "off" without a mode."""
    if mode is None:
        return ["off"]
    flags = {
        "on": True,
        "bcast": mode.broadcast,
        "optin": mode.opt_in,
        "caching-yes": mode.opt_in and mode.caching_called,
        "optout": mode.opt_out,
        "caching-no": mode.opt_out and mode.caching_called,
        "noloop": mode.no_loop,
        "broken_redirect": mode.broken,
    }
    return [flag for flag, is_set in flags.items() if is_set]
