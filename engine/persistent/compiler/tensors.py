"""What variables hold when a step begins: the model's tensors, what @init says, or zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from engine.persistent.compiler.frame import Frame
from engine.persistent.compiler.variables import Variable
from engine.persistent.dtypes import named
from engine.persistent.errors import ModelError


class Tensors:
    """The model's tensors, by variable. Raises ModelError for one that is not there or not as declared."""

    def __init__(self, variables: Mapping[str, Variable], tensors: Mapping[str, mx.array]) -> None:
        self._tensors = tensors
        self._values = {
            name: self._beginning(variable)
            for name, variable in variables.items()
            if variable.section in ("volatile", "constant") and not variable.declaration.indices
        }

    def getter(self, variable: Variable) -> Callable[[Frame], mx.array]:
        """A function that returns its value in a step."""
        name, begins = variable.name, self._values.get(variable.name)
        if variable.section == "constant":
            assert begins is not None
            return lambda frame: begins

        def get(frame: Frame) -> mx.array:
            value = frame.values.get(name)
            if value is not None:
                return value
            assert begins is not None, "dynamic variables are inserted before a step begins"
            return begins

        return get

    def beginning(self, name: str) -> mx.array | None:
        """What a volatile or constant variable begins with; None for others."""
        return self._values.get(name)

    def entry_getter(self, variable: Variable, counts: Sequence[Callable[[Frame], int]]) -> Callable[[Frame], mx.array]:
        """How one tensor of a family, such as ``W[l]``, is had in a step."""
        known: dict[tuple[int, ...], mx.array] = {}

        def get(frame: Frame) -> mx.array:
            indices = tuple([count(frame) for count in counts])
            found = known.get(indices)
            if found is None:
                name = variable.reference
                for index, value in zip(variable.declaration.indices, indices, strict=True):
                    name = name.replace(f"{{{index}}}", str(value))
                found = known[indices] = self._tensor(name, variable)
            return found

        return get

    def _beginning(self, variable: Variable) -> mx.array:
        declared = variable.declaration
        needed = variable.section == "constant" or declared.reference is not None
        if needed or (variable.reference in self._tensors and declared.init is None):
            return self._tensor(variable.reference, variable)
        return variable.dtype.full(variable.shape, declared.init)

    def _tensor(self, name: str, variable: Variable) -> mx.array:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the model has no tensor {name}, which {variable.name} names")
        if tensor.dtype != variable.dtype.mlx or tensor.shape != variable.shape:
            raise ModelError(
                f"{variable.name} is {variable.dtype.name}{list(variable.shape)}, "
                f"the model's {name} is {named(tensor.dtype)}{list(tensor.shape)}"
            )
        return tensor
