"""The core: bytes, slots and pages. It knows neither users nor tiers.

It is there twice: compiled, and in plain Python, for where it cannot be built. Both have the same names, and `NAME`
says which one this is: "native" or "python". KVPAGE_CORE=python asks for the plain one.
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
