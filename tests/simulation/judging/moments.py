"""Whether a reply that was made in steps was right: at some moment of these, or each of its parts at one.

During such a reply, other clients change its values. So the permitted replies are known only when it arrives, from the
changes since its command was run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product
from typing import Any

from tests.simulation.acting.peers import Asked
from tests.simulation.model.model import Conversation, Model
from tests.simulation.model.pages import block_of
from tests.simulation.model.replies import ANYTHING, May, agrees, gathered, one_of
from tests.simulation.model.rights import keys_used
from tests.simulation.model.values import Cell, Store

_READS = frozenset(
    b"""mget kvpagemget kvblockget kvblockmget kvblockmgetcoded kvpagemexists kvblockexists kvpageindex kvpageverify
    scard kvpagepin kvpagelease""".split()
)
_SETS = frozenset((b"keys", b"smembers", b"dbsize"))
_OF_ONE_MOMENT = frozenset((b"mget",))  # though it waits for the disk
_MOST_MOMENTS = 5_000
_MOST_CASES = 64  # of values of keys that are uncertain at a moment


def agreed_meanwhile(model: Model, talk: Conversation, asked: Asked, reply: Any, now: int) -> bool:
    """Whether a reply that was made in steps was right at some moment of these; an array's parts each at one."""
    name = asked.words[0].lower()
    if name not in _READS | _SETS | {b"kvpageprefix"} or not asked.streamed:
        return False
    model.store.now = now
    model.store.expire()
    if name == b"kvpageprefix":
        return _was_restorable(model, talk, asked, reply)
    if name == b"kvpageverify":
        return _was_verified(model, asked, reply)
    if name in _SETS:
        return _was_gathered(model, talk, asked, reply)
    moments = _replies(model, talk, asked)
    if name == b"kvpageindex" and isinstance(reply, list) and all(isinstance(one, list) for one in moments):
        return _was_listed(moments, reply)
    if isinstance(reply, list) and all(isinstance(one, list) and len(one) == len(moments[0]) for one in moments):
        if name not in _OF_ONE_MOMENT:
            moments = [[one_of(options) for options in zip(*moments, strict=True)]]
        if name == b"kvpagemget":  # values replaced in steps may have been due before their step
            due = {key for key, old, _ in model.store.log[asked.at :] if old is not None and 0 < old.expires <= now}
            parts = zip(keys_used(asked.words), moments[0], strict=True)
            moments = [[one_of([part, None]) if key in due else part for key, part in parts]]
        if model.may_miss:
            moments = [[one_of([part, None]) for part in moment] for moment in moments]
    return any(agrees(moment, reply) for moment in moments)


def _replies(model: Model, talk: Conversation, asked: Asked) -> list[Any]:
    """Return the replies at each moment: changes are undone, the last one first."""
    store, moments = model.store, [asked.expected]
    changes, used = store.log[asked.at :], tuple(map(_beginning, keys_used(asked.words)))
    now, doubts, store.doubts = dict(store.keys), store.doubts, []
    unfinished = [variant for doubt in doubts if doubt.pending for variant in doubt.variants[1:]]
    end, model.talk = len(store.log), talk
    at = end
    moments += _before_parts(model, asked, used, at)
    for key, old, _ in reversed(changes):
        at -= 1
        if old is None:
            store.keys.pop(key, None)
        else:
            store.keys[key] = old
        if len(moments) > _MOST_MOMENTS:
            continue
        moments += _before_parts(model, asked, used, at)
        if used and not key.startswith(used):
            continue
        kept, store.now = store.now, 0
        moments.append(model.run(asked.words))
        if asked.words[0].lower() in _OF_ONE_MOMENT:
            moments += _before_unfinished(model, asked, unfinished, at)
        store.now = kept
    store.keys, store.doubts = now, doubts
    del store.log[end:]
    moments.append(model.run(asked.words))
    return [one for moment in moments for one in (moment.options if isinstance(moment, May) else [moment])]


def _before_parts(model: Model, asked: Asked, used: tuple[bytes, ...], at: int) -> list[Any]:
    """Return the replies after `at` changes if the last parts of a batch were not visible yet, one more in each."""
    kept, model.store.now = model.store.now, 0
    replies = [_reply_with(model, asked, cells.items()) for cells in _not_visible(model.store, used, at)]
    model.store.now = kept
    return replies


def _not_visible(store: Store, used: tuple[bytes, ...], at: int) -> Iterator[dict[bytes, Cell]]:
    """Yield the earlier values of a batch's pages that may not have been visible after `at` changes: those of its last
    part, of its last two parts, and so on. Others have not changed these pages since the batch was begun.
    """
    for begun, parts, seen in store.batches:
        if begun > at or (len(seen) == len(parts) and seen[-1] < at):
            continue
        others, hidden = {key for key, _, _ in store.log[begun:at]}, dict[bytes, Cell]()
        for part in reversed(parts[sum(when < at for when in seen) :]):
            mine = {key: before for key, (before, _) in part.items() if not used or key.startswith(used)}
            hidden |= {key: before for key, before in mine.items() if key not in others}
            if hidden:
                yield dict(hidden)


def _reply_with(model: Model, asked: Asked, cells: Iterable[tuple[bytes, Cell]]) -> Any:
    """Return the reply if some keys had these values."""
    kept = dict(model.store.keys)
    for key, cell in cells:
        if cell is None:
            model.store.keys.pop(key, None)
        else:
            model.store.keys[key] = cell
    reply = model.run(asked.words)
    model.store.keys = kept
    return reply


def _before_unfinished(model: Model, asked: Asked, variants: list[dict[bytes, Cell]], at: int) -> list[Any]:
    """Return the replies after `at` changes if commands in steps had not changed their keys yet, or not all of them.

    Others have changed some of these keys since: then each may have had any of its possible values.
    """
    late = {key: cells for key, cells in model.store.moments_of_late(at).items() if key in keys_used(asked.words)}
    return [
        _reply_with(model, asked, [*variant.items(), *zip(late, cells, strict=True)])
        for variant in [{}, *variants]
        for cells in islice(product(*late.values()), _MOST_CASES)
    ]


def _beginning(key: bytes) -> bytes:
    """How the keys begin that a key of a command stands for: a request's index for all of its pages."""
    return key.removesuffix(b"index") if key[:3] == b"kv:" else key


def _was_gathered(model: Model, talk: Conversation, asked: Asked, reply: Any) -> bool:
    """Return whether a set, or its size, contains the members of all moments, and only members of some moment."""
    store, model.talk, end = model.store, talk, len(model.store.log)
    moments = [*asked.expected.options, *model.run(asked.words).options]
    if any(moment.members is None for moment in moments):
        return agrees(ANYTHING, reply)
    is_index, start = asked.words[0].lower() == b"smembers", _beginning(asked.words[-1])
    least = frozenset.intersection(*(moment.members for moment in moments)) - asked.unsure
    most = frozenset.union(*(moment.members for moment in moments))
    for key, *cells in store.log[asked.at : end]:
        if is_index and not key.startswith(start):
            continue
        there = [cell is not None and (cell.page is not None or not is_index) for cell in cells]
        least -= {key} if not all(there) else set()
        most |= {key} if any(there) and model._sees(key) else set()
    return gathered([least, most], reply)


def _was_verified(model: Model, asked: Asked, reply: Any) -> bool:
    """Whether pages were verified that were there at some moment, and all that were there at every one."""
    if not isinstance(reply, list | dict):
        return False
    received = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    req, pages = asked.words[1], set(map(int, asked.words[2:]))
    changed = {key for key, _, _ in model.store.log[asked.at :] if block_of(key)[0] == req}
    changed = {key for key in changed if not pages or block_of(key)[1] in pages}
    sets = [option.members or frozenset() for option in asked.expected.options]
    least, most = frozenset.intersection(*sets) - changed, frozenset.union(*sets) | changed
    corrupt = set(received[b"corrupt"])
    count = received[b"checked"] + received[b"unchecked"]
    return len(least) <= count <= len(most) and corrupt <= (most if model.rotted else set())


def _was_restorable(model: Model, talk: Conversation, asked: Asked, reply: Any) -> bool:
    """Return whether each length of a prefix was restorable at some moment, and all are in the reply that were at every
    moment. With a lease, lengths behind the longest of the reply may be missing, because it could not be leased.
    """
    if not isinstance(reply, list):
        return False
    moments = [frozenset(moment) for moment in _replies(model, talk, asked) if isinstance(moment, list)]
    always, ever = frozenset.intersection(*moments), frozenset().union(*moments)
    if int(asked.words[2]):
        always = frozenset(length for length in always if reply and length < reply[-1])
    return reply == sorted(set(reply)) and always <= set(reply) <= ever


def _was_listed(moments: list[list[May]], reply: list[Any]) -> bool:
    """Return whether each block's state existed at some moment, and all permanent blocks are listed, in order."""
    pages = [row[b"page"] if isinstance(row, dict) else row[1] for row in reply]
    always = frozenset.intersection(*[frozenset().union(*(row.members or () for row in moment)) for moment in moments])
    rows = [row for moment in moments for row in moment]
    known = all(any(agrees(row, received) for row in rows) for received in reply)
    return known and pages == sorted(set(pages)) and always <= {b"%d" % page for page in pages}
