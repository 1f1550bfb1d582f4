"""SLOWLOG, LATENCY and MONITOR: slow commands, and all commands while they run."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import Any

from kvpage_server.commands.arguments import as_integer, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.measure import CallCounts, LatencyEvent, SlowCall
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import lower_name
from kvpage_server.commands.steps import STEP, Steps, freed, stepwise
from kvpage_server.core import Argument
from kvpage_server.resp import OK, Reply, ReplyError, Stream, Verbatim

_slowlog = partial(command, flags="admin loading stale", group="server", since="2.2.12")
_latency = partial(command, flags="admin noscript loading stale", group="server", since="2.8.13")


container("slowlog", group="server", since="2.2.12", summary="A container for slow log commands.")


@_slowlog(
    "slowlog|get [count]",
    most=3,
    complexity="O(N) with N entries",
    reply="array of array",
    summary="Returns the last slow calls.",
)
def slowlog_get(client: Client, args: list[Argument]) -> Reply:
    """Return the last slow calls, 10 by default, all for -1: id, unix time, microseconds, words, address and name of
    the client.
    """
    count = as_integer(args[0]) if args else 10
    if count is None or count < -1:
        raise ReplyError("ERR count should be greater than or equal to -1")
    entries = client.server.slow_log.entries
    chosen = list(islice(entries, len(entries) if count == -1 else count))
    return Stream(len(chosen), map(_row, chosen))


def _row(call: SlowCall) -> list[Reply]:
    """Return SLOWLOG GET's array for a call."""
    return [call.id, call.unix_time, call.microseconds, call.words, call.address, call.name]


@_slowlog("slowlog|len", reply="integer", summary="Counts the slow calls remembered.")
def slowlog_len(client: Client, args: list[Argument]) -> Reply:
    """Return the number of calls in the slow log, at most slowlog-max-len."""
    return len(client.server.slow_log.entries)


@_slowlog("slowlog|reset", complexity="O(N) with N entries", reply="OK", summary="Forgets the slow calls.")
def slowlog_reset(client: Client, args: list[Argument]) -> Reply:
    """Remove all calls from the slow log, and return OK. The ids go on from the last one."""
    log = client.server.slow_log
    calls = list(log.entries)
    log.entries = deque()

    def steps() -> Steps[Reply]:
        yield from freed(calls)
        return OK

    return stepwise(steps(), small=len(calls) <= STEP)


container("latency", group="server", since="2.8.13", summary="A container for latency diagnostics commands.")


@_latency(
    "latency|latest", complexity="O(N) with N events", reply="array of array", summary="Returns the last slow moments."
)
def latency_latest(client: Client, args: list[Argument]) -> Reply:
    """Return the last sample of each event: name, unix time, milliseconds, and the longest milliseconds since the
    start.
    """
    return [
        [name, *event.samples[-1], event.longest]
        for name, event in client.server.latency.events.items()
        if event.samples
    ]


@_latency("latency|history event", reply="array of array", summary="Returns when an event was slow.")
def latency_history(client: Client, args: list[Argument]) -> Reply:
    """Return the samples of an event, the oldest first, each as unix time and milliseconds."""
    event = client.server.latency.events.get(_event(plain(args[0])), LatencyEvent())
    return [list(sample) for sample in event.samples]


def _event(word: bytes) -> str:
    """Return the name of an event. No name has 64 bytes."""
    return word[:64].decode("ascii", "replace")


@_latency(
    "latency|reset [event [event ...]]",
    complexity="O(N) with N events",
    reply="integer",
    summary="Forgets slow moments.",
)
def latency_reset(client: Client, args: list[Argument]) -> Reply:
    """Remove the named events, all without arguments. Return the number of removed events."""
    events = client.server.latency.events
    named = [*map(_event, plain_all(args))] or list(events)
    return sum(events.pop(name, None) is not None for name in named)


@_latency(
    "latency|histogram [command [command ...]]",
    since="7.0.0",
    complexity="O(N) with N commands",
    reply="map",
    summary="Returns how long calls of commands took.",
)
def latency_histogram(client: Client, args: list[Argument]) -> Reply:
    """Return a map of the commands with calls: the number of calls, and for some limits in microseconds the number of
    calls that took at most so long.
    """
    calls = client.server.stats.calls
    if not args:
        return {name: _histogram(of) for name, of in calls.items() if of.count}
    named = {lower_name(word).decode("ascii", "replace") for word in plain_all(args)}
    chosen = [name for name in calls if name in named or name.partition("|")[0] in named]
    return {name: _histogram(calls[name]) for name in chosen if calls[name].count}


def _histogram(calls: CallCounts) -> dict[str, Any]:
    """Return LATENCY HISTOGRAM's map of a command."""
    return {"calls": calls.count, "histogram_usec": dict(calls.cumulative())}


@_latency("latency|doctor", complexity="O(N) with N events", reply="text", summary="Says in words what was slow.")
def latency_doctor(client: Client, args: list[Argument]) -> Reply:
    """Return a text for people with a line for each event."""
    server = client.server
    threshold = server.config.latency_monitor_threshold
    if not threshold:
        return Verbatim(
            b"Slow moments are not being noted: set latency-monitor-threshold to the milliseconds that count as slow."
        )
    lines = [
        f"{name}: {len(event.samples)} seconds with one of {threshold} ms or more, the longest of {event.longest} ms"
        for name, event in server.latency.events.items()
    ]
    return Verbatim("\n".join(lines or ["Nothing was slow."]).encode())


@_latency(
    "monitor",
    flags="admin noscript loading stale no_multi",
    since="1.0.0",
    complexity="O(N) for every command, with N monitoring connections",
    reply="OK",
    summary="Shows every command that the server runs.",
)
def monitor(client: Client, args: list[Argument]) -> Reply:
    """Return OK, and then send a line for each command that any client runs, until RESET. Passwords are redacted, and
    administrative commands left out.
    """
    client.server.monitors[client] = None
    client.update_fast_path()
    return OK
