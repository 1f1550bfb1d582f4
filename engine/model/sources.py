"""The source of the modules that a model's code comes from."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ALWAYS = ("mlx", "mlx_lm")  # packages whose used modules always count


class SourceError(ValueError):
    """Code whose source cannot be read."""


class Sources:
    """Digests of modules, and of what they use of MLX, mlx-lm and their own package."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}  # by the module's name

    def add(self, of: dict[str, Any] | None) -> None:
        """A module, by its namespace. Raises SourceError."""
        if of is None or "__name__" not in of:
            raise SourceError("its module cannot be found")
        waiting = [of]
        while waiting:
            used = waiting.pop()
            name = used["__name__"]
            if name not in self._digests:
                self._digests[name] = _digest(name, used.get("__file__"))
                waiting += _uses(used, {name.partition(".")[0], *ALWAYS}) if self._digests[name] else ()

    def digest(self) -> bytes:
        """The digest of all sources."""
        return b"".join(name.encode() + b" " + digest for name, digest in sorted(self._digests.items()) if digest)


@functools.cache
def _digest(name: str, file: str | None) -> bytes:
    """Empty for Python's library and MLX's core, which count by their version."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names - {"__main__"} or name == "mlx.core" or name.startswith("mlx.core."):
        return b""
    if file is None:
        raise SourceError(f"the module {name} has no file")
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()
    except OSError as error:
        raise SourceError(f"the source of {name} cannot be read: {error}") from error


def _uses(used: dict[str, Any], packages: set[str]) -> Iterator[dict[str, Any]]:
    """Namespaces of the modules whose names, classes and functions are in the namespace `used`.

    A package's submodules by their own names do not count: they appear when anybody imports them.
    """
    for key, value in list(used.items()):
        module = isinstance(value, types.ModuleType)
        name = value.__name__ if module else getattr(value, "__module__", None)
        if module and name == f"{used['__name__']}.{key}":
            continue
        if isinstance(name, str) and name.partition(".")[0] in packages and name in sys.modules:
            yield vars(sys.modules[name])


def found(value: Any) -> Any:
    """The object under the module and name that a class or function gives for itself; None if there is none."""
    within: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        within = vars(within).get(name) if hasattr(within, "__dict__") else None
    return within


def namespace(cls: type) -> dict[str, Any] | None:
    """The namespace of a class's module, also of one that is not in sys.modules."""
    if module := sys.modules.get(cls.__module__):
        return vars(module)
    functions = (member for member in vars(cls).values() if isinstance(member, types.FunctionType))
    return next((function.__globals__ for function in functions), None)
