"""Client that sends and receives pages without a copy, based on redis-py: its URLs, pools, TLS, ACL and retries."""

from kvpage_server.client.aio import AsyncPageClient
from kvpage_server.client.cluster.store import names_several
from kvpage_server.client.commands import Coding
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
from kvpage_server.client.page import BlockBody, BlockName, Page, StateName
from kvpage_server.client.raw_commands import Kept, RawCommand, Word
from kvpage_server.client.sync import PageClient

__all__ = [
    "AsyncPageClient",
    "BadBuffer",
    "BlockBody",
    "BlockName",
    "Closed",
    "Coding",
    "DeadlineExceeded",
    "Disconnected",
    "Kept",
    "Page",
    "PageClient",
    "PageClientError",
    "RawCommand",
    "Refused",
    "StateName",
    "Unsupported",
    "Word",
    "WrongReply",
    "names_several",
]
