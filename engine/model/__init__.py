"""The model: its loading from a directory, its identity, and the trial of its results in a batch.

Contains: properties of a model. Excludes: prompts, contexts, tiers, and the engines.
"""

from .identity import UnknownModelError, load

__all__ = ["UnknownModelError", "load"]
