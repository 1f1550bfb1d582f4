"""Client that sends and receives pages without a copy, based on redis-py: its URLs, pools, TLS, ACL and retries."""

from kvpage_server.client.aio import AsyncPageClient
from kvpage_server.client.cluster.store import names_several
from kvpage_server.client.errors import (
    BadBuffer,
    Closed,
    DeadlineExceeded,
    Disconnected,
    PageClientError,
    Refused,
    Unsupported,
    WrongReply,
)
from kvpage_server.client.page import BlockName, Page
from kvpage_server.client.sync import PageClient

__all__ = [
    "AsyncPageClient",
    "BadBuffer",
    "BlockName",
    "Closed",
    "DeadlineExceeded",
    "Disconnected",
    "Page",
    "PageClient",
    "PageClientError",
    "Refused",
    "Unsupported",
    "WrongReply",
    "names_several",
]
