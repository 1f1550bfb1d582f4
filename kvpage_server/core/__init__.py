"""What knows bytes, slots and pages, and no command, user, policy or tier.

It is there twice: compiled, and in plain Python, for where it cannot be built. Both have the same names, and `NAME`
says which one this is. KVPAGE_CORE=python asks for the plain one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    NAME: str
else:
    try:
        if os.environ.get("KVPAGE_CORE") == "python":
            raise ImportError("the plain one was asked for")
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

        NAME = "native"
    except ImportError:
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

        NAME = "python"

__all__ = ["MOST_SPARE", "NAME", "SPARE_FOR", "Arena", "NewPages", "PageNames", "PageSet", "Part", "Slot", "look_up"]
