"""The core: the hot path of the server, and of the Python client.

It parses requests, allocates the memory of values, stores and finds pages, calls commands of the fast path, and sends
and receives replies. It does not know users, eviction or the disk.

There are two implementations with the same names: a compiled one, and the reference implementation in plain Python. The
reference implementation is used if the compiled one cannot be imported, or if KVPAGE_CORE=python is set. `NAME` is the
implementation in use: "native" or "python".
"""

from typing import TYPE_CHECKING

from kvpage_server.core import python
from kvpage_server.core.choice import NAME, REASON
from kvpage_server.core.protocol import Limits, ProtocolError
from kvpage_server.core.python.calls import CallAgain
from kvpage_server.core.python.frames import Argument, Command

if TYPE_CHECKING or NAME == "python":
    from kvpage_server.core.python import *  # noqa: F403
else:
    from kvpage_server.core.native import *  # noqa: F403

__all__ = ["NAME", "REASON", "Argument", "CallAgain", "Command", "Limits", "ProtocolError"]
__all__ += python.__all__
