"""Notices when a model is no longer the one that was probed."""

from __future__ import annotations

import logging

import mlx.nn as nn

from engine.model.identity import Identity, UnknownIdentityError
from engine.spec import ModelCacheSpec

log = logging.getLogger(__name__)


class ModelWatch:
    """Compares the model's objects one by one, and hashes it again only when one has changed."""

    def __init__(self, model: nn.Module, spec: ModelCacheSpec) -> None:
        self._model = model
        self._spec = spec
        self._identity: Identity | None = None  # as seen last; None if unknown
        self._same = not spec.refusal
        if not spec.refusal:
            self._look()

    def same(self) -> bool:
        """Whether the model computes the same as the probed one; False if unknown."""
        if not self._spec.refusal and not (self._identity and self._identity.holds()):
            self._look()
        return self._same

    def forget(self) -> None:
        """Hash all of the model again at the next question."""
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
