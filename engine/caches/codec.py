"""What a codec is: the contract that every kind of cache is kept by.

To add a kind, write a module beside this one with a frozen dataclass that derives from :class:`TokenLayer` or
:class:`StateLayer`, and add the class to CODECS in ``engine.caches``. Nothing else has to know of it: names, files,
pages and restoring follow from what the codec says. Its fields are part of a model's fingerprint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from engine.caches.planes import Matrices
from kvpage_server.page import Plane


class CacheCodec(ABC):
    """Of one cache of one layer: which arrays it keeps, in planes of pages. It keeps no cache itself."""

    __slots__ = ()
    KIND: ClassVar[type]  # mlx-lm's class, exactly: a subclass may keep what its parent does not
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
        """The shapes of what is kept, a plane each: of so many tokens, or of the state after so many."""

    @property
    def packed(self) -> tuple[int, int] | None:
        """Bits a value and values a group, where keys and values are quantised."""
        return None


class TokenLayer(CacheCodec):
    """A row a token: every prefix can be cut out."""

    __slots__ = ()

    @abstractmethod
    def arrays(self, cache: Any) -> tuple[mx.array, ...]:
        """Of a cache that holds one sequence: ``[1, heads, >= offset, dim]`` for each plane."""

    @abstractmethod
    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> Any:
        """A cache with the first `tokens` tokens of the `pieces`, ``[heads, rows, dim]`` a plane."""


class StateLayer(CacheCodec):
    """A state that is good at the one position where it was taken."""

    __slots__ = ()

    @abstractmethod
    def capture(self, cache: Any) -> tuple[mx.array, ...]:
        """A copy of the state of a cache that holds one sequence, an array a plane.

        Raises CacheStateError for one that holds something else than its kind does after as many tokens.
        """

    @abstractmethod
    def restore(self, state: Sequence[mx.array], end: int) -> Any:
        """The cache after `end` tokens."""
