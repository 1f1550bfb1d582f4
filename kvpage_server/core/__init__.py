"""What knows bytes, slots and pages, and no command, user, policy or tier.

It is there twice: compiled, and in plain Python, for where it cannot be built. Both have the same names, and `NAME`
says which one this is: "native" or "python". KVPAGE_CORE=python asks for the plain one.
"""

from typing import TYPE_CHECKING

from kvpage_server.core.choice import NAME, REASON

if TYPE_CHECKING or NAME == "python":
    from kvpage_server.core.python import (
        MOST_SPARE,
        SPARE_FOR,
        Arena,
        NewPages,
        PageNames,
        PageSet,
        Part,
        Slot,
        look_up,
    )
else:
    from kvpage_server.core.native import (
        MOST_SPARE,
        SPARE_FOR,
        Arena,
        NewPages,
        PageNames,
        PageSet,
        Part,
        Slot,
        look_up,
    )

__all__ = [
    "MOST_SPARE",
    "NAME",
    "REASON",
    "SPARE_FOR",
    "Arena",
    "NewPages",
    "PageNames",
    "PageSet",
    "Part",
    "Slot",
    "look_up",
]
