"""Where a store is and who asks: a URL, and what the environment says of both.

A password on a command line is seen by everybody who lists the machine's processes. So it can come from the environment
or be typed in.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote, urlsplit

DEFAULT_URL = "redis://127.0.0.1:9221"
URL = "KVPAGE_URL"
_BETWEEN = re.compile(r",(?=[a-z]+://)")  # a URL and the next
PASSWORDS = ("KVPAGE_PASSWORD", "REDISCLI_AUTH")  # the first that is set; redis-cli reads the other one, too


def urls_of(servers: str) -> list[str]:
    """Those of servers side by side, which have commas between them; of one server its only one."""
    return _BETWEEN.split(servers)


def with_credentials(urls: str, user: str = "", password: str = "") -> str:
    """The URL, or each of a list, with a user's name and password in it. What is not given stays as it stands in the
    URL; where no password stands there either, it is the environment's.

    Raises ValueError for a URL that is none.
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


def shown(url: str) -> str:
    """A URL as it may be shown: without the password it may hold."""
    return re.sub(r"//[^/]*@", "//", url)
