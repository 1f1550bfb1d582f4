"""The execution of commands, of which those with very many words run in parts.

A command of up to `WORDS_PER_STEP` words runs in one step, as in Redis, so no client sees a part of its effect. A
longer command runs in parts, which its row defines (`Parts`), and other clients have their turn between the parts. A
long command without parts is refused, because it would delay all clients. The rights for all parts are checked before
the first part, and not later: the command runs with the rights at its start. When a part fails, the command ends, and
the effects of the parts before it stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.commands.context import MOST_QUEUED, Client, too_much_queued
from kvpage_server.commands.dispatch.checks import (
    Postponed,
    check_rights,
    check_state,
    end_caching,
    free_memory,
    prepare,
    queues,
    refused,
    rejected,
    takes_memory,
    wait_for_messages,
)
from kvpage_server.commands.dispatch.run import run, run_part, run_with_client_flags
from kvpage_server.commands.specs import BY_WORD, WORDS_PER_STEP, Parts, Spec, find
from kvpage_server.commands.steps import Steps, freed
from kvpage_server.core import Argument, Command
from kvpage_server.core.pieces import Piece
from kvpage_server.glob import LONGEST_COMPARED, compared_bytes
from kvpage_server.resp import Raw, Reply, ReplyError, Stream, Wait, encode
from kvpage_server.store.disk.prefetch import Hold

_COMPARED = 1 << 18  # bytes of keys that are compared with patterns in a step, and the same for each comparison
_RIGHTS = 16 * _COMPARED  # such bytes above which the rights are checked in steps


class _Disconnected(Exception):
    """The signal that the client has disconnected while its rights are checked: its command does not run."""


def begin(client: Client, spec: Spec, words: Command) -> Stream:
    """Return the reply to a command of more than WORDS_PER_STEP words: a Stream that runs its parts.

    Raises ReplyError if the command is refused, Paused if it has to wait for the end of a CLIENT PAUSE.
    """
    if queues(client, spec):
        raise too_much_queued()
    if not client.fast_path_ok:
        if client.server.command_override is not None:
            spec = client.server.command_override(client, spec, words)
        check_state(client, spec)
    if spec.parts is None:
        raise ReplyError(f"ERR '{spec.name}' takes at most {WORDS_PER_STEP} words at once, got {len(words)}")
    client.last_command = spec.name
    return Stream(None, _steps(client, spec, spec.parts, words), whole=spec.writes)


def rights_need_steps(client: Client, words: Command) -> bool:
    """Return whether the check of the rights takes so long that it has to run in steps: many or long words, each
    compared with many patterns.
    """
    if client.user is None:
        return False
    cost = client.user.cost
    return cost * len(words) * 2 * LONGEST_COMPARED > _RIGHTS and cost * sum(map(_size, words)) > _RIGHTS


def _size(word: Argument) -> int:
    return compared_bytes(word if isinstance(word, bytes) else word.body)


def check_rights_in_steps(client: Client, spec: Spec, words: Command) -> Stream:
    """Return the reply to a command for which `rights_need_steps` holds: a Stream that checks the rights in steps, and
    then runs the command or, after MULTI, queues it. Raises ReplyError or Paused as `check_state`.
    """
    check_state(client, spec)
    client.last_command = spec.name

    def steps() -> Iterator[Reply]:
        """Check the rights, then yield the reply; an error is the reply if a right is missing."""
        try:
            yield from _check_rights(client, spec, words)
            yield from (_queue if queues(client, spec) else _run_whole)(client, spec, words)
        except _Disconnected:
            return
        except ReplyError as error:
            yield rejected(client, spec, words, error)

    return Stream(None, steps(), whole=spec.writes and not queues(client, spec))


def _queue(client: Client, spec: Spec, words: Command) -> Iterator[Reply]:
    """Wait until there is memory for a command, and queue it for EXEC. Raises ReplyError."""
    while client.server.keyspace.memory.is_full():
        try:
            free_memory(client)
            break
        except Postponed as postponed:
            postponed.__traceback__ = None  # its frames refer to it, and to the words
            wait = postponed.wait
        yield wait
    assert client.transaction is not None
    yield client.transaction.queue(spec, words)


def _check_rights(client: Client, spec: Spec, words: Command) -> Iterator[Reply]:
    """Check the rights for a command, or for a part of it, as `check_rights`, in several steps if `rights_need_steps`.
    Raises ReplyError, and _Disconnected.
    """
    if client.gone:
        raise _Disconnected
    user = client.user
    if user is None or "no_auth" in spec.flags or not rights_need_steps(client, words):
        check_rights(client, spec, words)
        return
    at_once = max(_COMPARED // (user.cost * max(map(_size, words))), 1)
    for number, denial in enumerate(user.checks(spec, words[spec.words :]), start=1):
        if denial is not None:
            raise refused(client, denial)
        if not number % at_once:
            yield ()
            if client.gone:
                raise _Disconnected


def refuse_in_steps(error: ReplyError, words: Command) -> Stream:
    """Return a Stream that sends an error, and then frees the words of a command of very many words in steps."""

    def steps() -> Iterator[Reply]:
        """Yield the error, then free the words."""
        yield error
        yield from freed(words)

    return Stream(None, steps())


def _run_whole(client: Client, spec: Spec, words: Command) -> Iterator[Reply]:
    """Wait until a command can run, run it as a whole, and yield the items of its reply. Raises ReplyError."""
    reply = yield from _run_when_ready(client, spec, words)
    end_caching(client, spec)
    yield from _flat(reply)


def _run_when_ready(client: Client, spec: Spec, words: Command) -> Steps[Reply]:
    """Wait until a command, or a part of it, can run. Run it, again after each wait of its own, and return its reply.
    Raises ReplyError.
    """
    while True:
        hold = yield from _ready(client, spec, words)
        try:
            return run_part(client, spec, words)
        except Postponed as postponed:
            postponed.__traceback__ = None  # its frames refer to it, and to the words
            wait, room = postponed.wait, postponed.room
        del hold
        yield wait
        del room  # the space that it reserves is for the next call


def _steps(client: Client, spec: Spec, parts: Parts, words: Command) -> Iterator[Reply]:
    """Check the rights of each part, run the parts or the command as a whole, and yield the items of the reply. Then
    free the words.
    """
    try:
        if not client.fast_path_ok:
            for part in parts.divided(words, spec.words):
                yield from _check_rights(client, spec, part)
                yield ()
        if parts.joined:
            try:
                yield from _joined(client, spec, parts, words)
            finally:
                end_caching(client, spec)
        else:
            yield from _run_whole(client, spec, words)
    except _Disconnected:
        pass
    except ReplyError as error:
        yield rejected(client, spec, words, error)
    yield from freed(words)


def _ready(client: Client, spec: Spec, words: Command) -> Steps[Hold | None]:
    """Yield waits until a command can run: memory and disk have space, and the values that it needs are in memory.

    Return the hold that keeps these values in memory, or None. The caller keeps a reference to the hold until the
    command has run. Raises ReplyError if memory is full, or the disk fails.
    """
    hold: Hold | None = None
    while True:
        try:
            if spec.stores:
                free_memory(client)
            wait_for_messages(client, spec)
            prepare(client, spec, words)
            return hold
        except Postponed as postponed:
            hold = postponed.hold or hold
            yield postponed.wait


def _flat(reply: Reply) -> Iterator[Reply]:
    """Yield the items of a streamed reply, or another reply as a whole."""
    if not isinstance(reply, Stream):
        yield reply
        return
    if reply.length is not None:
        yield Raw(b"*%d\r\n" % reply.length)
    yield from reply.items


def _joined(client: Client, spec: Spec, parts: Parts, words: Command) -> Iterator[Reply]:
    """Run the parts one after the other, and yield the reply that their replies make together, see `Parts.joined`."""
    total: Reply = 0
    if parts.joined == "array":
        yield Raw(b"*%d\r\n" % (parts.items * (len(words) - spec.words - parts.first)))
    for part in parts.divided(words, spec.words):
        reply = yield from _run_when_ready(client, spec, part)
        if parts.joined == "array":
            yield from _items(client, reply, parts.items * (len(part) - spec.words - parts.first))
        elif isinstance(reply, ReplyError):
            yield reply
            return
        elif parts.joined == "apart":
            yield reply
        else:
            total = total + reply if parts.joined == "sum" else reply
            yield ()
    if parts.joined in ("sum", "last"):
        yield total


def _items(client: Client, reply: Reply, count: int) -> Iterator[Reply]:
    """Yield the items of one part's array reply without the array's header. An error reply stands for all `count`
    items.
    """
    begun = False
    for step in _flat(reply):
        if begun or type(step) is Wait or step == ():
            yield step
            continue
        begun, pieces = True, list[Piece]()
        encode(step, client.protocol, pieces)
        yield tuple(pieces * count) if isinstance(step, ReplyError) else tuple(pieces[1:])


# -- The path of all commands that are not on the fast path ------------------------------------------------------------


def execute(client: Client, words: Command) -> Reply:
    """Run a command, or queue it after MULTI, and return its reply; errors are replies, too.

    `words` are all words of the command. Raises Paused if it has to wait for the end of a CLIENT PAUSE, Postponed if it
    has to wait for memory, disk or messages. The session then calls this function once more with the same words.
    """
    spec = None
    try:
        count = len(words)
        spec = BY_WORD.get(words[0])
        if spec is None or count != spec.arity:
            spec = find(words)
        if count > WORDS_PER_STEP and not (queues(client, spec) and count <= MOST_QUEUED):
            return begin(client, spec, words)
        client.last_command = spec.name
        server = client.server
        stores = spec.stores
        if not client.fast_path_ok:
            if server.command_override is not None:
                spec = server.command_override(client, spec, words)
            if rights_need_steps(client, words):
                return check_rights_in_steps(client, spec, words)
            check_rights(client, spec, words)
            check_state(client, spec)
            stores = takes_memory(client, spec)
        if stores and server.keyspace.memory.is_full():
            free_memory(client)
        wait_for_messages(client, spec)
        if client.transaction is not None and queues(client, spec):
            return client.transaction.queue(spec, words)
        prepare(client, spec, words)
    except ReplyError as error:
        reply = rejected(client, spec, words, error)
        return reply if len(words) <= WORDS_PER_STEP else refuse_in_steps(reply, words)
    return run(client, spec, words) if client.fast_path_ok else run_with_client_flags(client, spec, words)
