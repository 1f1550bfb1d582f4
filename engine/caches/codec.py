"""The interface of a codec, which stores and restores one kind of cache.

To add a kind, write a module beside this one with a frozen dataclass that derives from :class:`TokenLayer` or
:class:`StateLayer`, and add the class to CODECS in ``engine.caches``. Nothing else changes: names, files, pages and
restoring follow from the codec. Its fields are part of a model's fingerprint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from engine.caches.planes import Matrices
from kvpage_server.page import Plane


class CacheCodec(ABC):
    """Describes one cache of one layer: which arrays it has, in planes of pages. It holds no cache."""

    __slots__ = ()
    KIND: ClassVar[type]  # exactly mlx-lm's class: a subclass may hold more
    RECURRENT: ClassVar[bool] = False  # carried from token to token, rounding and all, without an offset
    planes: tuple[Plane, ...]  # () for a layer that keeps nothing

    @classmethod
    @abstractmethod
    def describe(cls, cache: Any) -> Self:
        """The codec of a cache that has seen some tokens. Raises UnsupportedCacheError for one it cannot keep."""

    @abstractmethod
    def empty(self) -> Any:
        """A cache without a token."""

    @abstractmethod
    def matrices(self, tokens: int, /) -> tuple[Matrices, ...]:
        """The shapes of its planes: for so many tokens, or for the state after so many."""

    @property
    def packed(self) -> tuple[int, int] | None:
        """Bits of a value and values in a group, if it is quantised."""
        return None


class TokenLayer(CacheCodec):
    """Keeps a row for each token, so every prefix can be cut out."""

    __slots__ = ()

    @abstractmethod
    def arrays(self, cache: Any) -> tuple[mx.array, ...]:
        """Of a cache that holds one sequence: ``[1, heads, >= offset, dim]`` for each plane."""

    @abstractmethod
    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> Any:
        """A cache with the first `tokens` tokens of the `pieces`, ``[heads, rows, dim]`` a plane."""


class StateLayer(CacheCodec):
    """Carries a state, which is valid only at the position where it was taken."""

    __slots__ = ()

    @abstractmethod
    def capture(self, cache: Any) -> tuple[mx.array, ...]:
        """A copy of the state of a cache that holds one sequence, an array a plane.

        Raises CacheStateError for a cache that does not hold what its kind does after as many tokens.
        """

    @abstractmethod
    def restore(self, state: Sequence[mx.array], end: int) -> Any:
        """The cache after `end` tokens."""
