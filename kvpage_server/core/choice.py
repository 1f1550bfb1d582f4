"""Selection of the core: the compiled one, or the reference implementation.

The latter is selected if KVPAGE_CORE=python is set, or if the compiled core cannot be used.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from kvpage_server.core.sources import digest

VARIABLE = "KVPAGE_CORE"
NATIVE = "kvpage_server.core.native"
STALE = "it was compiled from other sources than are there now"


def choose() -> tuple[str, str]:
    """Return the name of the core, "native" or "python", and the reason why the compiled core cannot be used, or "".

    The reason is also "" if KVPAGE_CORE=python is set. Raise SystemExit if KVPAGE_CORE has another value.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == "python":
        return "python", ""
    if asked:  # no other core can be requested; this is raised in every program that imports the core
        raise SystemExit(f"{VARIABLE} is {asked!r}: set it to python, or leave it unset for the compiled core")
    fault = _unusable_reason()
    return ("python", fault) if fault else ("native", "")


def _unusable_reason() -> str:
    """Return the reason why the compiled core cannot be used; "" if it can.

    It may not be compiled for this Python, or it was compiled from other sources than those in its folder.
    """
    try:
        import_module(NATIVE)  # imports all modules of the core
        built = import_module(f"{NATIVE}.built")
    except ImportError as error:
        return f"it was not compiled for this Python: {error}"
    except (AttributeError, TypeError, ValueError):  # it was compiled for another version of the Python code
        return STALE
    now = digest(Path(__file__).parent / "native")
    if now and now != built.SOURCES:
        return STALE
    return ""


NAME, REASON = choose()
