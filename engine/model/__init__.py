"""The model: its loading from a directory, its identity, and the trial of its results in a batch."""

from .identity import UnknownModelError, load

__all__ = ["UnknownModelError", "load"]
