"""Hints of vLLM's requests: which chunks the server should not evict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

RETAIN, PIN, UNPIN = "kvpage.retain", "kvpage.pin", "kvpage.unpin"  # types of actions
_LONGEST = 3600  # seconds of a lease
_SESSIONS = 1000  # whose chunks are known


@dataclass(frozen=True, slots=True)
class Hint:
    """An action: for the chunks `keys`, or those of a session, or, without both, those of the request itself."""

    kind: str
    lease_ms: int
    keys: tuple[OffloadKey, ...]
    session: str


def hints_of(context: ReqContext) -> list[Hint]:
    """Return the hints of a request for this tier: the actions of its `kv_hints`, and in its `kv_transfer_params` those
    of ``kvpage_hints``, and ``kvpage_retain_seconds``. Raises ValueError if one is not valid.
    """
    params = context.kv_transfer_params or {}
    actions = context.kv_hints.actions if context.kv_hints else []
    given = [(action.action_type, action.payload) for action in actions]
    given += [(hint["type"], hint) for hint in params.get("kvpage_hints", [])]
    if "kvpage_retain_seconds" in params:
        given.append((RETAIN, {"seconds": params["kvpage_retain_seconds"]}))
    return [_hint(kind, payload) for kind, payload in given if kind in (RETAIN, PIN, UNPIN)]


def _hint(kind: str, payload: dict[str, Any]) -> Hint:
    group = payload.get("group", 0)
    keys = [make_offload_key(bytes.fromhex(block), group) for block in payload.get("blocks", [])]
    lease_ms = _lease_ms(payload.get("seconds")) if kind == RETAIN else 0
    return Hint(kind, lease_ms, tuple(keys), payload.get("session", ""))


def _lease_ms(seconds: Any) -> int:
    """Return seconds as milliseconds of a lease. Raises ValueError if they are no number, or too many."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST:
        raise ValueError(f"the seconds to retain must be 0 to {_LONGEST}, got {seconds!r:.40}")
    return int(1000 * seconds)


class Sessions:
    """The chunks of the last sessions of this engine. A request names its session as ``kvpage_session``."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, dict[OffloadKey, None]] = OrderedDict()

    def add(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        """Add chunks of a request to its session, if it names one."""
        if name := (context.kv_transfer_params or {}).get("kvpage_session"):
            self._keys.setdefault(name, {}).update(dict.fromkeys(keys))
            self._keys.move_to_end(name)
            if len(self._keys) > _SESSIONS:
                self._keys.popitem(last=False)

    def keys(self, name: str) -> tuple[OffloadKey, ...]:
        """Return the chunks of a session in the order in which they were added."""
        return tuple(self._keys.get(name, ()))
