"""Commands for publishing messages and subscribing to channels. Messages are not stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from kvpage_server.commands.arguments import plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import Parts
from kvpage_server.commands.steps import STEP, Steps, stepwise
from kvpage_server.core import Argument
from kvpage_server.core.pieces import Piece
from kvpage_server.glob import COMPARED, compiled, portions
from kvpage_server.resp import Push, Reply, ReplyError, Stream, encode

_LISTENING = "pubsub noscript loading stale while_subscribed"
_EACH = Parts(joined="apart")
MOST_PATTERNS = 1024  # patterns of a client at most


def _confirm(client: Client, kind: bytes, names: Iterable[bytes | None], act: Callable[[Client, bytes], None]) -> Reply:
    """Call `act(client, name)` for each name, and return an encoded confirmation for each, as (P)(UN)SUBSCRIBE do:
    `kind`, the name, and the number of the client's subscriptions. A name None, for no subscription, gets a
    confirmation alone.
    """
    pieces: list[Piece] = []
    for name in names:
        if name is not None:
            act(client, name)
        count = len(client.channels) + len(client.patterns)
        encode(Push([kind, name, count]), client.protocol, pieces)
    if client.unanswered:  # CLIENT REPLY turns off replies, but not push messages
        client.push(tuple(pieces))
        return ()
    return tuple(pieces)


def _named_or_all(args: list[Argument], everything: dict[bytes, None]) -> list[bytes] | list[None]:
    """Return the channels or patterns in `args`; without any, all subscriptions of the client; ``[None]`` without
    these, because one reply is necessary.
    """
    return plain_all(args) or list(everything) or [None]


_listening = partial(command, flags=_LISTENING, group="pubsub", since="2.0.0", reply="push")
_pubsub = partial(command, group="pubsub")
_about = partial(command, flags="pubsub loading stale filtered", group="pubsub", since="2.8.0")


@_listening(
    "subscribe channel [channel ...]",
    channels="all",
    parts=_EACH,
    complexity="O(N) with N channels",
    summary="Listens to channels.",
)
def subscribe(client: Client, args: list[Argument]) -> Reply:
    """Subscribe the client to channels. Return one confirmation for each."""
    return _confirm(client, b"subscribe", plain_all(args), client.server.channels.subscribe)


@_listening(
    "psubscribe pattern [pattern ...]",
    channels="patterns",
    parts=Parts(),
    complexity="O(N) with N patterns",
    summary="Listens to the channels that match patterns.",
)
def psubscribe(client: Client, args: list[Argument]) -> Reply:
    """Subscribe the client to all channels that match patterns, in a step for each. Return one confirmation for each
    pattern.
    """
    if len(args) == 1:
        return _listen(client, args[0])
    return Stream(None, (_listen(client, pattern) for pattern in args))


def _listen(client: Client, pattern: Argument) -> Reply:
    """Subscribe the client to a pattern, and return the confirmation. Raises ReplyError for more than MOST_PATTERNS
    patterns.
    """
    if len(client.patterns) >= MOST_PATTERNS:
        raise ReplyError(
            f"ERR a client may listen to {MOST_PATTERNS} patterns at the most: every message is held to all"
        )
    return _confirm(client, b"psubscribe", [plain(pattern)], client.server.channels.psubscribe)


@_listening(
    "unsubscribe [channel [channel ...]]",
    parts=_EACH,
    complexity="O(N) with N channels",
    summary="Stops listening to some channels, or to all.",
)
def unsubscribe(client: Client, args: list[Argument]) -> Reply:
    """End the client's subscriptions to channels, to all of them without arguments. Return one confirmation for each;
    without a subscription, one with null.
    """
    names = _named_or_all(args, client.channels)
    return _confirm(client, b"unsubscribe", names, client.server.channels.unsubscribe)


@_listening(
    "punsubscribe [pattern [pattern ...]]",
    parts=_EACH,
    complexity="O(N) with N patterns",
    summary="Stops listening to some patterns, or to all.",
)
def punsubscribe(client: Client, args: list[Argument]) -> Reply:
    """End the client's subscriptions to patterns, to all of them without arguments. Return one confirmation for each;
    without a subscription, one with null.
    """
    names = _named_or_all(args, client.patterns)
    return _confirm(client, b"punsubscribe", names, client.server.channels.punsubscribe)


@_pubsub(
    "publish channel message",
    flags="pubsub loading stale fast may_replicate",
    channels="first",
    since="2.0.0",
    complexity="O(N + M) with N listeners and M patterns",
    reply="integer",
    summary="Sends a message to the listeners of a channel.",
)
def publish(client: Client, args: list[Argument]) -> Reply:
    """Send a message to the subscribers of a channel. Return their number, when all messages published so far were
    sent.
    """
    channel, message = plain_all(args)
    channels = client.server.channels
    delivery = channels.publish(channel, message)

    def steps() -> Steps[Reply]:
        yield from channels.all_sent()
        return delivery.count

    return stepwise(steps(), small=not channels.busy)


container("pubsub", group="pubsub", summary="A container for commands about channels.")


@_about(
    "pubsub|channels [pattern]",
    most=3,
    complexity="O(N) with N channels",
    reply="array of bulk",
    summary="Lists the channels that have listeners.",
)
def pubsub_channels(client: Client, args: list[Argument]) -> Reply:
    """Return the channels that have subscribers, that match the pattern, if it is given, and that the user may
    subscribe to. Subscriptions to patterns are not included.
    """
    channels = list(client.server.channels.by_name)
    matches = compiled(plain(args[0])).matches if args else None

    def steps() -> Steps[list[bytes]]:
        found = list[bytes]()
        for start in range(0, len(channels), STEP):
            for some in portions(channels[start : start + STEP]):
                found += [one for one in some if client.may_subscribe(one) and (matches is None or matches(one))]
                yield ()
        return found

    return stepwise(steps(), small=len(channels) <= STEP and sum(map(len, channels)) <= COMPARED)


@_about(
    "pubsub|numsub [channel [channel ...]]",
    parts=Parts(joined="array", items=2),
    complexity="O(N) with N channels",
    reply="array",
    summary="Counts the listeners of channels.",
)
def pubsub_numsub(client: Client, args: list[Argument]) -> Reply:
    """Return each channel and the number of its subscribers, without those to patterns; 0 for channels forbidden to the
    user.
    """
    listeners = client.server.channels.by_name
    counts = {name: len(listeners.get(name, ())) if client.may_subscribe(name) else 0 for name in plain_all(args)}
    return [item for channel in plain_all(args) for item in (channel, counts[channel])]


@_about(
    "pubsub|numpat",
    complexity="O(N) with N patterns",
    reply="integer",
    summary="Counts the patterns that have listeners.",
)
def pubsub_numpat(client: Client, args: list[Argument]) -> Reply:
    """Return the number of different patterns that have subscribers, and that the user may subscribe to."""
    return sum(client.may_subscribe(pattern) for pattern in client.server.channels.by_pattern)
