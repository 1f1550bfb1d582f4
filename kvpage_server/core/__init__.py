"""The core: the hot path of the server. It parses requests, allocates the memory of values, stores and finds pages,
calls commands of the fast path, and sends replies. It has no users and no tiers.

There are two implementations with the same names: a compiled one, and the reference implementation in plain Python,
which is used if the compiled one cannot be built, or if KVPAGE_CORE=python is set. `NAME` is the one in use: "native"
or "python".
"""

from typing import TYPE_CHECKING

from kvpage_server.core import python
from kvpage_server.core.choice import NAME, REASON
from kvpage_server.core.protocol import Limits, ProtocolError
from kvpage_server.core.python.frames import Argument, Command

if TYPE_CHECKING or NAME == "python":
    from kvpage_server.core.python import *  # noqa: F403
else:
    from kvpage_server.core.native import *  # noqa: F403

__all__ = ["NAME", "REASON", "Argument", "Command", "Limits", "ProtocolError"]
__all__ += python.__all__
