"""The public names of kvpage: clients, pages and blocks, and their errors.

`kvpage.layouts` converts blocks for other engines, and `kvpage.engine` is the engine, which needs the extra `engine`.
"""

from kvpage_server import __version__
from kvpage_server.client import (
    AsyncPageClient,
    BadBuffer,
    BlockBody,
    BlockName,
    Closed,
    Coding,
    DeadlineExceeded,
    Disconnected,
    Kept,
    Page,
    PageClient,
    PageClientError,
    RawCommand,
    Refused,
    StateName,
    Unsupported,
    Word,
    WrongReply,
)
from kvpage_server.lossless import decode_lossless, encode_lossless
from kvpage_server.page import (
    BlockShape,
    DType,
    KVType,
    PageError,
    PageHeader,
    PageKey,
    Plane,
    decode_page,
    encode_page,
)

__all__ = [
    "AsyncPageClient",
    "BadBuffer",
    "BlockBody",
    "BlockName",
    "BlockShape",
    "Closed",
    "Coding",
    "DType",
    "DeadlineExceeded",
    "Disconnected",
    "KVType",
    "Kept",
    "Page",
    "PageClient",
    "PageClientError",
    "PageError",
    "PageHeader",
    "PageKey",
    "Plane",
    "RawCommand",
    "Refused",
    "StateName",
    "Unsupported",
    "Word",
    "WrongReply",
    "__version__",
    "decode_lossless",
    "decode_page",
    "encode_lossless",
    "encode_page",
]
