"""Whether a model is still the one that was probed."""

from __future__ import annotations

import logging

import mlx.nn as nn

from engine.model.identity import Identity, UnknownIdentityError
from engine.spec import ModelCacheSpec

log = logging.getLogger(__name__)


class ModelWatch:
    """Asked often: the model's objects are compared one by one, and it is hashed again only when one is another."""

    def __init__(self, model: nn.Module, spec: ModelCacheSpec) -> None:
        self._model = model
        self._spec = spec
        self._identity: Identity | None = None  # as it was looked at last; None when it could not be known
        self._same = not spec.refusal
        if not spec.refusal:
            self._look()

    def same(self) -> bool:
        """Whether the model computes what the one of the spec did; False when that cannot be known."""
        if not self._spec.refusal and not (self._identity and self._identity.holds()):
            self._look()
        return self._same

    def forget(self) -> None:
        """Read all of the model again before it is believed."""
        self._identity = None

    def _look(self) -> None:
        was, why = self._same, "it computes something else"
        try:
            self._identity = Identity(self._model, self._identity)
            self._same = self._identity.digest == self._spec.identity
        except UnknownIdentityError as error:
            self._identity, self._same, why = None, False, str(error)
        if was and not self._same:
            log.warning("the model is not the one that was probed (%s): nothing is reused or kept", why)
