"""The model: its download, its directory and adapter, its identity, and the trial of its results in a batch."""

from .identity import UnknownModelError, adapt, load

__all__ = ["UnknownModelError", "adapt", "load"]
