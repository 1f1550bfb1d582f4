"""The URL, user and password of a store, from options and the environment.

Everybody who lists the machine's processes can see a password on a command line. So it can also come from the
environment, or be typed in.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote, urlsplit

DEFAULT_URL = "redis://127.0.0.1:9221"
URL = "KVPAGE_URL"
_BETWEEN = re.compile(r",(?=[a-z]+://)")  # a URL and the next
PASSWORDS = ("KVPAGE_PASSWORD", "REDISCLI_AUTH")  # the first that is set; redis-cli reads the other one, too


def urls_of(servers: str) -> list[str]:
    """Return the URLs in a list with commas, for servers side by side; or the only one."""
    return _BETWEEN.split(servers)


def with_credentials(urls: str, user: str = "", password: str = "") -> str:
    """Return the URL, or each of a list, with user and password in it. If one is not given, the URL's stays. If the URL
    has no password either, it is taken from the environment.

    Raises ValueError for an invalid URL.
    """
    return ",".join(_with_credentials(url, user, password) for url in urls_of(urls))


def _with_credentials(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    told, _, where = parts.netloc.rpartition("@")
    told_user, _, told_password = told.partition(":")
    of_environment = next(filter(None, map(os.environ.get, PASSWORDS)), "")
    user = quote(user, safe="") or told_user
    password = quote(password, safe="") or told_password or quote(of_environment, safe="")
    if "//" not in url or not (user or password):
        return url
    start = url.index("//") + 2
    credentials = f"{user}:{password}@" if password else f"{user}@"
    return f"{url[:start]}{credentials}{where}{url[start + len(parts.netloc) :]}"


def user_of(urls: str) -> str:
    """Return the user of a store's URL, or of the first of a list."""
    return unquote(urlsplit(urls_of(urls)[0]).username or "default")


def shown(url: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"//[^/]*@", "//", url)
