"""The URL, user and password of a store, from options and the environment; and addresses of ZMQ.

Every user of the machine can see a password on a command line. So a password can also be set in the environment, or
typed at a prompt.
"""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, quote, unquote, urlsplit

DEFAULT_URL = "redis://127.0.0.1:9221"
URL = "KVPAGE_URL"
_BETWEEN = re.compile(r",(?=[a-z]+://)")  # between two URLs
PASSWORDS = ("KVPAGE_PASSWORD", "REDISCLI_AUTH")  # the first one that is set counts; redis-cli reads the second, too

ZMQ_ADDRESS = "tcp://HOST:PORT such as tcp://127.0.0.1:5557, or ipc://PATH"
_TCP = re.compile(r"tcp://[^/\s]+:([0-9]{1,5}|\*)")


def is_zmq_address(text: str) -> bool:
    """Return whether a text is such an address. ZMQ itself takes only the last 16 bits of a larger port."""
    tcp = _TCP.fullmatch(text)
    return int(tcp[1].replace("*", "0")) <= 65535 if tcp else bool(re.fullmatch("ipc://.+", text))


def urls_of(servers: str) -> list[str]:
    """Return the URLs of a comma-separated list."""
    return _BETWEEN.split(servers)


def with_credentials(urls: str, user: str = "", password: str = "") -> str:
    """Return a URL, or a comma-separated list of URLs, with user and password inserted.

    An empty argument keeps the URL's own part. A URL without a password gets the password of the environment. Raises
    ValueError for an invalid URL.
    """
    return ",".join(_with_credentials(url, user, password) for url in urls_of(urls))


def _with_credentials(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    login, _, where = parts.netloc.rpartition("@")
    told_user, _, told_password = login.partition(":")
    of_environment = next(filter(None, map(os.environ.get, PASSWORDS)), "")
    user = quote(user, safe="") or told_user
    password = quote(password, safe="") or told_password or quote(of_environment, safe="")
    if "//" not in url or not (user or password):
        return url
    start = url.index("//") + 2
    credentials = f"{user}:{password}@" if password else f"{user}@"
    return f"{url[:start]}{credentials}{where}{url[start + len(parts.netloc) :]}"


def user_of(urls: str) -> str:
    """Return the user name in a store's URL, or in the first one of a list; "default" if there is none."""
    return unquote(urlsplit(urls_of(urls)[0]).username or "default")


def shown(url: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"//[^/]*@", "//", url)


_NO_TLS = "WRONG_VERSION_NUMBER", "record layer failure"  # errors of OpenSSL before 3.2, and since


def tls_hint(url: str, why: str) -> str:
    """Return the change of the URL if a connection has failed because of TLS; empty if it has another reason."""
    parts = urlsplit(url)
    if any(text in why for text in _NO_TLS):
        return "this port has no TLS: its URL begins with redis://"
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return "?ssl_ca_certs=FILE at the end of the URL names the CA of the server's certificate"
    if parts.scheme == "redis" and "Connection closed by server" in why:
        return "if this port has TLS, its URL begins with rediss://"
    files = [value for name, value in parse_qsl(parts.query) if name.startswith("ssl_") and "/" in value]
    return "; ".join(f"there is no file {file}" for file in files if not os.path.exists(file))
