"""The model: its download, its directory and adapter, and its identity."""

from .identity import UnknownModelError, adapt, load, unusable

__all__ = ["UnknownModelError", "adapt", "load", "unusable"]
