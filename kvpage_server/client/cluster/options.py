"""The options that may stand in a cluster's URL, as in ``valkey-cluster://a:7000,b:7000?node_deadline=3``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

_CERT_REQS = {name: name for name in ("none", "optional", "required")}
_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _seconds(text: str) -> float:
    value = float(text) if text.isascii() else math.nan
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text) if text.isascii() else 0
    if value < 1:
        raise ValueError
    return value


_SECONDS = _seconds, "a number of seconds, more than 0"
_COUNT = _count, "a whole number, 1 or more"
_FLAG = _TRUTH.__getitem__, "true or false"
_TEXT = str, "a text"
_Kind = tuple[Callable[[str], Any], str]

_ALL: dict[str, _Kind] = {
    "node_deadline": _SECONDS,
    "read_from_replicas": _FLAG,
    "client_name": _TEXT,
    "max_connections": _COUNT,
    "password": _TEXT,
    "protocol": ({"2": 2, "3": 3}.__getitem__, "2 or 3"),
    "socket_connect_timeout": _SECONDS,
    "socket_keepalive": _FLAG,
    "socket_timeout": _SECONDS,
    "username": _TEXT,
}
_TLS: dict[str, _Kind] = {
    "ssl_ca_certs": _TEXT,
    "ssl_ca_path": _TEXT,
    "ssl_cert_reqs": (_CERT_REQS.__getitem__, "none, optional or required"),
    "ssl_certfile": _TEXT,
    "ssl_check_hostname": _FLAG,
    "ssl_ciphers": _TEXT,
    "ssl_keyfile": _TEXT,
    "ssl_password": _TEXT,
}


def options_of(query: str, *, tls: bool) -> dict[str, Any]:
    """The options in a URL's query. Raises ValueError, which says what is wrong and what is allowed."""
    allowed, found = {**_ALL, **_TLS} if tls else _ALL, dict[str, Any]()
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _TLS and not tls:
            raise ValueError(f"the option {name} of a cluster's URL needs rediss-cluster://")
        if name not in allowed:
            raise ValueError(f"unknown option {name!r:.60} in a cluster's URL; allowed: {', '.join(allowed)}")
        if name in found:
            raise ValueError(f"the option {name} is given twice in a cluster's URL")
        read, wanted = allowed[name]
        try:
            if not text:
                raise ValueError
            found[name] = read(text)
        except (KeyError, ValueError):
            raise ValueError(f"the option {name} of a cluster's URL must be {wanted}, got {text!r:.60}") from None
    return found
