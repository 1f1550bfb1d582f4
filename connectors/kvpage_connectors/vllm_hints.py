"""Hints of vLLM's requests, in its envelope (`v1/kv_hints/protocol.py`): which blocks the server should not evict.

vLLM defines no actions. These are the ones of kvpage-engine: `engine.api.hints`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

RETAIN, PIN, UNPIN = "retain", "pin", "unpin"  # types of actions
VERSION = "1"  # of the actions
_LONGEST = 3600  # seconds of a lease
_MOST_HASHES = 4096  # that the hints of a request name together
_SESSIONS = 1000  # whose blocks are known
_BLOCKS = 100_000  # of all sessions

Params = Mapping[str, Any] | None  # a request's `kv_transfer_params`
_Block = TypeVar("_Block", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Hint:
    """An action: for the blocks with these hashes, or those of a session, or, without both, those of the request."""

    kind: str
    lease_ms: int
    hashes: tuple[bytes, ...]
    group: int  # the KV cache group of the blocks
    session: str

    @property
    def is_own(self) -> bool:
        """Whether it is for the blocks of the request itself."""
        return not (self.hashes or self.session)


def hints_of(params: Params, envelope: Any) -> list[Hint]:
    """Return the hints of a request: the actions of its envelope, and in its `kv_transfer_params` ``kv_hints`` and
    ``kvpage_retain_seconds``. Raises ValueError if one is not valid, or if they name more than _MOST_HASHES blocks.
    """
    params = params or {}
    actions = envelope.actions if envelope else []
    given = [(action.action_type, action.action_version, action.payload) for action in actions]
    names = ("action_type", "action_version", "payload")
    given += [tuple(action[name] for name in names) for action in params.get("kv_hints", {}).get("actions", [])]
    if "kvpage_retain_seconds" in params:
        given.append((RETAIN, VERSION, {"seconds": params["kvpage_retain_seconds"]}))
    ours = [(kind, payload) for kind, version, payload in given if version == VERSION and _is_known(kind, payload)]
    named = sum(len(payload.get("block_hashes", [])) for _, payload in ours)
    if named > _MOST_HASHES:
        raise ValueError(f"the hints of a request may name {_MOST_HASHES} blocks, got {named}")
    return [_hint(kind, payload) for kind, payload in ours]


def _is_known(kind: str, payload: Mapping[str, Any]) -> bool:
    """Return whether an action is supported: not if unknown fields of its payload may name other blocks than its
    request's.
    """
    named = "block_hashes" in payload or "session_id" in payload
    return kind in (RETAIN, PIN, UNPIN) and (named or payload.keys() <= {"seconds", "group"})


def _hint(kind: str, payload: Mapping[str, Any]) -> Hint:
    hashes = tuple(bytes.fromhex(block) for block in payload.get("block_hashes", []))
    lease_ms = _lease_ms(payload.get("seconds")) if kind == RETAIN else 0
    return Hint(kind, lease_ms, hashes, payload.get("group", 0), payload.get("session_id", ""))


def _lease_ms(seconds: Any) -> int:
    """Return seconds as milliseconds of a lease. Raises ValueError if they are no number, or too many."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST:
        raise ValueError(f"the seconds to retain must be 0 to {_LONGEST}, got {seconds!r:.40}")
    return int(1000 * seconds)


class Sessions(Generic[_Block]):
    """The blocks of the last sessions of this engine, _BLOCKS at most. A request names its session as
    ``kvpage_session``.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, dict[_Block, None]] = OrderedDict()
        self._count = 0  # blocks of all sessions

    def add(self, params: Params, blocks: Iterable[_Block]) -> None:
        """Add blocks of a request to its session, if it names one."""
        if name := (params or {}).get("kvpage_session"):
            session = self._blocks.setdefault(name, {})
            self._blocks.move_to_end(name)
            self._count -= len(session)
            session.update(dict.fromkeys(blocks))
            self._count += len(session)
            while len(self._blocks) > _SESSIONS or self._count > _BLOCKS:
                _, oldest = self._blocks.popitem(last=False)
                self._count -= len(oldest)

    def blocks(self, name: str) -> tuple[_Block, ...]:
        """Return the blocks of a session in the order in which they were added."""
        return tuple(self._blocks.get(name, ()))
