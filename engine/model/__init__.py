"""A model: loaded from its directory, told from every other one, and tried for what it does in a batch.

May lie here: what is true of a model whoever asks it. May not come in: prompts, contexts, tiers, or the engines.
"""

from engine.model.identity import UnknownModelError, load

__all__ = ["UnknownModelError", "load"]
