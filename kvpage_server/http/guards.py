"""Protection against other sites: headers of every reply, and checks of every request.

A page of another site can make a browser send requests to this server, by its address or by a name that the site has
pointed at it. So the Host of a request must be a name of this machine. A request from another site is answered only if
the user followed a link.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAID = {
    "Content-Security-Policy": CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no-referrer, the Origin of our own forms would be null
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
NOBODY_ELSES = (".localhost", ".local", ".internal", ".svc")  # nobody can own such names, and names without a dot
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


def own_names() -> frozenset[str]:
    """The names of this machine."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), socket.getfqdn()))


class Guards:
    """Wraps an application. A header that a reply already has is kept."""

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str] = ()) -> None:
        """`names` are those of this machine; any address is accepted as well. `origins` are sites, such as
        https://chat.example, whose pages may send requests, and whose names this machine may have."""
        self._app = app
        self._names = {*names, *(urlsplit(origin).hostname for origin in origins)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)

        async def said(message: Message) -> None:
            if message["type"] == "http.response.start":
                of_answer = MutableHeaders(scope=message)
                for name, value in SAID.items():
                    of_answer.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["method"], headers)
        return await (refusal or self._app)(scope, receive, said)

    def _refusal(self, method: str, headers: Headers) -> PlainTextResponse | None:
        if not _is_own(headers.getlist("host"), self._names):
            return PlainTextResponse("the Host header names another machine\n", 421)
        if headers.get("origin") not in self._origins and not _is_from_here(method, headers):
            return PlainTextResponse("requests of other sites are not answered\n", 403)
        return None


def _is_own(hosts: list[str], names: Collection[str | None]) -> bool:
    if not hosts:  # no browser leaves it out
        return True
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".").lower()
    return name in names or "." not in name or name.endswith(NOBODY_ELSES) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_from_here(method: str, headers: Headers) -> bool:
    """Whether the request comes from our own page, or from a link that the user followed."""
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin"):
        followed = headers.get("sec-fetch-mode") == "navigate"
        return method == "GET" and followed and headers.get("sec-fetch-dest", "document") == "document"  # not a frame
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")
