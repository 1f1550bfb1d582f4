"""Errors of persistent memory (docs/persistent.md): of a graph, which is a program with variables that outlive its
steps, of a step, and of a stored instance of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed text, and its name in error messages."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text. Line and column count from 1."""

    source: Source
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"

    @property
    def excerpt(self) -> str:
        """The line of the text, and a caret under the position."""
        lines = self.source.text.splitlines()
        line = lines[self.line - 1] if self.line <= len(lines) else ""
        before = line[: self.column - 1]
        indent = "".join("\t" if character == "\t" else " " for character in before)
        return f"{line}\n{indent}^"


class PersistentError(Exception):
    """Base of all errors of persistent memory."""


class GraphError(PersistentError, ValueError):
    """Error: a graph is invalid, or one of its steps failed. `at` is the position in the graph's text, None without a
    text.

    A step that raises it leaves persistent memory as it was before the step.
    """

    def __init__(self, message: str, at: Place | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.at = at

    def __str__(self) -> str:
        return f"{self.at}: {self.message}\n{self.at.excerpt}" if self.at else self.message


class ParseError(GraphError):
    """Error: the text does not follow the grammar."""


class DeclarationError(GraphError):
    """Error: the attributes of a declaration contradict each other, or a name is declared twice."""


class UnknownNameError(GraphError):
    """Error: there is no variable, size, block, operation, parameter, attribute or dtype of this name."""


class DTypeError(GraphError):
    """Error: a value has the wrong dtype, or the literal of @init is not a value of the variable's dtype."""


class RankError(GraphError):
    """Error: the number of indices, arguments or dimensions differs from the declared number."""


class ShapeError(GraphError):
    """Error: a value has the declared number of dimensions, but other sizes."""


class DimError(GraphError):
    """Error: a dimension is negative or too large, or its computation divides by zero."""


class NegativeIndexError(GraphError):
    """Error: an index or the start of a slice is below 0."""


class SliceRangeError(GraphError):
    """Error: a slice extends past the end, or ends before it starts."""


class GrowthError(GraphError):
    """Error: an index, a count or a size exceeds a limit: of @fixed, of MLX, or of this machine's memory."""


class SliceWriteError(GraphError):
    """Error: the target of a write is a slice. A write has one entry as its target."""


class SliceResetError(GraphError):
    """Error: the target of a reset is a slice. A reset has a variable, an entry, or all entries below first indices."""


class AccessError(GraphError):
    """Error: the section of a variable does not permit the access, for example a write to a constant."""


class BlockCycleError(GraphError):
    """Error: blocks of the program branch to each other in a cycle, or are nested too deeply."""


class OperationError(GraphError):
    """Error: an operation refused its arguments."""


class InputError(PersistentError, ValueError):
    """Error: an inserted value is missing, has no dynamic variable, or has the wrong dtype or shape; or a variable has
    no value to fetch.
    """


class ModelError(PersistentError, ValueError):
    """Error: a tensor of the model is missing or has another dtype or shape, a size is out of range, or the file cannot
    be loaded.
    """


class DeviceError(PersistentError):
    """Error: the device is missing, or does not support a dtype of the graph."""


class BrokenExecutorError(PersistentError):
    """Error: MLX failed during a step, so the executor's memory may be damaged. It cannot be used any more."""


class StoreError(PersistentError):
    """Base of errors of stored instances."""


class NoInstanceError(StoreError):
    """Error: no instance is stored under this name."""


class WrongProgramError(StoreError):
    """Error: another program has saved the instance: another graph, other sizes or another model."""


class ConflictError(StoreError):
    """Error: another process has saved this instance since this process last read or saved it."""


class DamagedError(StoreError):
    """Error: stored data is incomplete or damaged."""
