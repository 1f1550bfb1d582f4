"""Errors of a graph, of one of its steps, and of a stored instance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """A text that was parsed."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a text something stands; line and column count from 1."""

    source: Source
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"

    @property
    def excerpt(self) -> str:
        """The line, and a caret under the place."""
        lines = self.source.text.splitlines()
        line = lines[self.line - 1] if self.line <= len(lines) else ""
        before = line[: self.column - 1]
        indent = "".join("\t" if character == "\t" else " " for character in before)
        return f"{line}\n{indent}^"


class PersistentError(Exception):
    """The root of them all."""


class GraphError(PersistentError, ValueError):
    """Error in a graph, or in one of its steps. `at` is the position in its text, None for a graph without one.

    A step that raises it leaves persistent memory as it was before.
    """

    def __init__(self, message: str, at: Place | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.at = at

    def __str__(self) -> str:
        return f"{self.at}: {self.message}\n{self.at.excerpt}" if self.at else self.message


class ParseError(GraphError):
    """The text does not follow the grammar."""


class DeclarationError(GraphError):
    """A declaration contradicts itself: attributes that don't go together, a name declared twice."""


class UnknownNameError(GraphError):
    """A variable, size, block, operation, parameter, attribute or dtype that nobody declared."""


class DTypeError(GraphError):
    """A value of one dtype where another belongs; an @init that isn't of its variable's dtype."""


class RankError(GraphError):
    """Too many indices, too few, or a value with another number of dimensions than was declared."""


class ShapeError(GraphError):
    """A value with the right rank, but not the right sizes."""


class DimError(GraphError):
    """Dimensions that are negative or too large to count."""


class NegativeIndexError(GraphError):
    """An index or the start of a slice is below 0."""


class SliceRangeError(GraphError):
    """A slice that reaches past the end, or ends before it starts."""


class GrowthError(GraphError):
    """An index past what @fixed allows."""


class SliceWriteError(GraphError):
    """A write to more than one entry."""


class SliceResetError(GraphError):
    """A reset of a slice."""


class AccessError(GraphError):
    """Memory used as its section does not allow: a constant written, a table read without cache.read."""


class BlockCycleError(GraphError):
    """Blocks that branch to each other in a circle."""


class OperationError(GraphError):
    """An operation refused its arguments."""


class InputError(PersistentError, ValueError):
    """An inserted value is missing, of no dynamic variable, or not of its dtype and shape."""


class ModelError(PersistentError, ValueError):
    """The model lacks a tensor or a size that the graph asks for, or has it in another dtype or shape."""


class DeviceError(PersistentError):
    """Error: the device does not support an operation of the graph."""


class BrokenExecutorError(PersistentError):
    """Error: MLX failed during a step; this executor's memory is not reliable any more."""


class StoreError(PersistentError):
    """Base of errors of stored instances."""


class NoInstanceError(StoreError):
    """Nothing is stored under this name."""


class WrongProgramError(StoreError):
    """The instance was made by another program: another graph, other sizes or another model."""


class ConflictError(StoreError):
    """Somebody else has saved this instance since it was read or written here."""


class DamagedError(StoreError):
    """Error: stored data is incomplete or damaged."""
