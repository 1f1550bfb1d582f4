"""The simulator, which runs a graph step by step."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import redis
import xxhash

from kvpage_server.system.text import plural

from .compile import compile_graph
from .errors import (
    BrokenExecutorError,
    DeviceError,
    InputError,
    ModelError,
    NoInstanceError,
    StoreError,
    UnknownNameError,
)
from .graph import Graph, named
from .state import Memory
from .storage import PersistentStore, SavedPages, StoredInstance, body, export
from .variables import Event, Frame, Tensors, resolve

# -- Inputs of a graph: the sizes of its dimensions, and the tensors of its constants ----------------------------------

MAX_SIZE = 2**31 - 1  # the largest size in MLX
_SIZE = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Sizes of dimensions and tensors of constants, both by name. The constructor raises ModelError for a size out of
    range.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if not 0 <= size <= MAX_SIZE:
                raise ModelError(f"the size {name} must be between 0 and {MAX_SIZE}, got {size}")

    @classmethod
    def load(cls, path: Path, sizes: Mapping[str, int] | None = None) -> Self:
        """Load a model from a safetensors file.

        Metadata of the file whose value is 1 to 18 digits are sizes of dimensions, by name, such as `layers`. An entry
        of `sizes` replaces a size of the same name. Raises ModelError for a file that is not safetensors, a size above
        MAX_SIZE, a tensor of a dtype that MLX cannot load, such as f64, and dimensions that MLX would read wrongly.
        """
        try:
            loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from None
        tensors, metadata = loaded
        _check_shapes(path, tensors)
        named = {name: int(value) for name, value in metadata.items() if _SIZE.fullmatch(value)}
        return cls(named | dict(sizes or {}), tensors)

    def digest(self) -> str:
        """Return a hash of the names, dtypes, shapes and bytes of all tensors: 128 bits, in hexadecimal."""
        digest = xxhash.xxh3_128()
        for name, array in sorted(self.tensors.items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(body(array).data)
        return digest.hexdigest()


def _check_shapes(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Raise ModelError if a tensor in a safetensors file has another shape than MLX has read, which takes 32 bits of
    each dimension, or a negative dimension, which it accepts.
    """
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, array in tensors.items():
        shape = header[name]["shape"]
        if shape != list(array.shape) or min(shape, default=0) < 0:
            raise ModelError(f"{path}: the tensor {name} has the dimensions {shape}, from 0 to {MAX_SIZE} are allowed")


log = logging.getLogger(__name__)

FORMAT = 1  # version of the data from which the fingerprint is computed


class Device(Enum):
    """The device on which MLX computes."""

    CPU = "cpu"
    GPU = "gpu"

    @property
    def mlx(self) -> mx.Device:
        return mx.Device(mx.cpu if self is Device.CPU else mx.gpu)

    @classmethod
    def default(cls) -> Device:
        """Return the default device of MLX."""
        return Device.CPU if mx.default_device() == mx.Device(mx.cpu) else Device.GPU


class Simulator:
    """A compiled graph with its model and, optionally, a store for its instances. Executors run it.

    The constructor raises a GraphError with the position of the error, ModelError for tensors that are missing or do
    not match their declarations, and DeviceError for an unsupported dtype or a missing device.
    """

    def __init__(
        self, model: Model, graph: Graph, device: Device | None = None, *, store: PersistentStore | None = None
    ) -> None:
        self.model = model
        self.graph = graph
        self.device = device or Device.default()
        self.store = store
        self.variables = resolve(graph, model.sizes, on_gpu=self.device is Device.GPU)
        if not mx.is_available(self.device.mlx):
            raise DeviceError(f"MLX has no {self.device.name} on this machine")
        with mx.stream(self.device.mlx):
            self.tensors = Tensors(self.variables, model.tensors)
            self.actions = compile_graph(graph, self.variables, model.sizes, self.tensors)
        declared = {declaration.name for declaration in graph.declarations}
        self.temporary = [name for name in self.variables if name not in declared]  # declared by `assign`

    @cached_property
    def fingerprint(self) -> int:
        """A 64-bit hash of the program: the graph (without white space and comments of its text), the sizes, and the
        tensors of the model. An instance can be resumed only by a program with the same fingerprint.
        """
        identity = [FORMAT, repr(self.graph), sorted(self.model.sizes.items()), self.model.digest()]
        return int.from_bytes(hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).digest(), "little")

    def make_executor(self, instance: str | None = None, *, autosave: int = 0, trace: bool = False) -> Executor:
        """Return an executor with new persistent memory.

        With `instance`, a name of 1 to 128 of ``A-Z a-z 0-9 . _ -``, the executor can be saved, and saves itself after
        every `autosave` steps; never if that is 0. With `trace`, it records the events of each step. Raises StoreError
        for any other name, and if there is no store.
        """
        return Executor(self, self._stored(instance) if instance is not None else None, autosave, trace)

    def resume(self, instance: str, *, autosave: int = 0, trace: bool = False) -> Executor:
        """Return an executor that continues from the last save of an instance. The arguments are as for
        `make_executor`.

        Raises NoInstanceError if there is no save, WrongProgramError, DamagedError, ConflictError if another process
        saves the instance in every attempt to read it, and redis.RedisError if the server does not answer.
        """
        executor = Executor(self, self._stored(instance), autosave, trace)
        executor._load()
        return executor

    def _stored(self, instance: str) -> StoredInstance:
        if self.store is None:
            raise StoreError("this simulator has no store: Simulator(model, graph, store=PersistentStore(url))")
        return self.store.instance(instance, self.fingerprint)

    def memory(self) -> Memory:
        """Return new persistent memory, in its state before the first step."""
        return Memory(variable.layout for variable in self.variables.values() if variable.section == "persistent")


class Executor:
    """One instance of a graph. A caller inserts the dynamic inputs, runs a step, and fetches the results.

    A step that raises leaves persistent memory as it was before. Threads must not share an executor.
    """

    def __init__(self, simulator: Simulator, stored: StoredInstance | None, autosave: int, trace: bool) -> None:
        if autosave < 0 or (autosave and stored is None):
            raise ValueError(f"autosave is 0 or more, and needs an instance to save, got {autosave}")
        self.simulator = simulator
        self.steps = 0  # completed steps, including the steps before a resume
        # failed autosaves since the last successful save, which will include their changes
        self.unsaved = 0
        self._stored = stored
        self._autosave = autosave
        self._trace = trace
        self._inserted: dict[str, mx.array] = {}
        self._frame: Frame | None = None  # of the last step; None if it failed
        self._broken = False
        with mx.stream(simulator.device.mlx):
            self.memory = simulator.memory()

    def insert(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Set the values of dynamic variables for the next step: arrays of the declared dtype and shape, or numbers.
        Values of other variables that were inserted before stay.

        Raises InputError, and sets no value, for an unknown variable or a value of another dtype or shape.
        """
        given = {**(values or {}), **more}
        checked = {name: self._checked(name, value) for name, value in given.items()}
        self._inserted.update(checked)

    def step(self) -> None:
        """Run the block ``entry`` of the graph once, with the inserted values, which are removed afterwards.

        Raises InputError for a missing input, a GraphError with the position of the failed statement,
        BrokenExecutorError if MLX failed. An autosave, after the step, raises ConflictError if another process has
        saved the instance.
        """
        if self._broken:
            raise BrokenExecutorError("an earlier step could not be computed; resume the instance, or start anew")
        missing = [
            variable.name
            for variable in self.simulator.variables.values()
            if variable.section == "dynamic" and variable.name not in self._inserted
        ]
        if missing:
            raise InputError(f"{', '.join(missing)} must be inserted before each step")
        self._frame = (
            None  # drop the views of the last step, because MLX copies an array that has views before a change
        )
        journal = self.memory.journal
        journal.begin()
        frame = Frame(self.steps, self.memory, self._inserted, trace=[] if self._trace else None)
        with mx.stream(self.simulator.device.mlx):
            try:
                frame.run(self.simulator.actions)
            except BaseException:
                self._inserted = {}
                frame.values = {}
                self._evaluate(journal.rollback)
                raise
            self._inserted = {}
            for name in self.simulator.temporary:
                frame.values.pop(name, None)  # MLX changes an array in place only if it has no other reference
            self._evaluate(lambda: mx.eval(journal.arrays(), list(frame.values.values())))
        journal.begin()  # the changes of this step are final
        self._frame = frame
        self.steps += 1
        if self._autosave and self.steps % self._autosave == 0:
            self._save_if_possible()

    def fetch(self, name: str) -> mx.array:
        """Return the value of a variable: of a persistent or constant one at any time, of others after a successful
        step.

        Raises UnknownNameError, and InputError for a variable without a value. A variable of `assign` has none outside
        of a step.
        """
        variable = self.simulator.variables.get(name)
        if variable is None:
            known = ", ".join(self.simulator.variables) or "none"
            raise UnknownNameError(f"there is no variable {name}, only {known}")
        with mx.stream(self.simulator.device.mlx):
            if variable.section == "persistent":
                found: mx.array | None = self.memory.read(name)
            elif variable.section == "constant":
                found = self.simulator.tensors.beginning(name)
            else:
                begins = self.simulator.tensors.beginning(name)
                found = self._frame.values.get(name, begins) if self._frame else None
                found = None if name in self.simulator.temporary else found
        if found is None:
            raise InputError(f"{name} holds nothing that can be fetched now")
        return found

    def trace(self) -> list[Event]:
        """Return an event for each statement of the last step. Raises InputError without `trace`, and after a failed
        step.
        """
        if self._frame is None or self._frame.trace is None:
            raise InputError("there is a trace after a step, for make_executor(trace=True)")
        return list(self._frame.trace)

    def save(self) -> SavedPages:
        """Store all changes since the last save atomically: a reader finds either all of them, or the state before.

        Return the number and bytes of the written pages. Raises StoreError if the executor was made without an
        instance, BrokenExecutorError after a failure of MLX, ConflictError if another process has saved the instance,
        and redis.RedisError.
        """
        if self._stored is None:
            raise StoreError("this executor has no instance to save: make_executor(NAME)")
        if self._broken:
            raise BrokenExecutorError("what a step could not compute is not saved")
        saved = self._stored.save(self.memory, self.steps)
        self.unsaved = 0
        return saved

    def export(self, path: Path) -> None:
        """Write persistent memory to a safetensors file, with one tensor for each variable; for a table, all entries in
        one tensor.
        """
        with mx.stream(self.simulator.device.mlx):
            names = [*self.memory.scalars, *self.memory.tables]
            metadata = {"fingerprint": f"{self.simulator.fingerprint:016x}", "steps": str(self.steps)}
            export(path, {name: self.memory.read(name) for name in names}, metadata)

    def _load(self) -> None:
        assert self._stored
        with mx.stream(self.simulator.device.mlx):
            steps = self._stored.load(self.memory)
        if steps is None:
            raise NoInstanceError(f"nothing is stored of instance {self._stored.name}")
        self.steps = steps

    def _save_if_possible(self) -> None:
        """Save after a step. If the server fails, count the failure in `unsaved`, and log the first one in a row."""
        failures = self.unsaved
        try:
            self.save()
        except redis.RedisError as error:
            self.unsaved += 1
            if not failures:
                log.warning("step %d cannot be saved; the next steps try again: %s", self.steps, error)
        else:
            if failures:
                log.warning("step %d is saved again, after %s", self.steps, plural(failures, "failure"))

    def _evaluate(self, compute: Any) -> None:
        """Call `compute`, which evaluates arrays. An exception breaks the executor, because arrays may be damaged.

        Raises BrokenExecutorError for an error of MLX, other exceptions unchanged.
        """
        try:
            compute()
        except BaseException as error:
            self._broken = True
            if isinstance(error, RuntimeError | ValueError):
                raise BrokenExecutorError(str(error)) from error
            raise

    def _checked(self, name: str, value: Any) -> mx.array:
        """Return an inserted value as an evaluated array. Raises InputError for an unknown variable, or a value of
        another dtype or shape.
        """
        variable = self.simulator.variables.get(name)
        if variable is None or variable.section != "dynamic":
            dynamic = [found.name for found in self.simulator.variables.values() if found.section == "dynamic"]
            raise InputError(f"{name} is no dynamic variable, those are {', '.join(dynamic) or 'none'}")
        dtype, expected = variable.dtype, f"{variable.dtype.name}{list(variable.shape)}"
        if isinstance(value, bool | int | float):
            literal = dtype.literal(float(value) if dtype.is_float else value)
            if literal is None:
                raise InputError(f"{name} is {expected}, got {value!r}")
            value = dtype.number(literal)
        elif isinstance(value, np.ndarray | np.generic):
            value = mx.array(np.asarray(value), dtype=mx.float64 if value.dtype == np.float64 else None)
        if not isinstance(value, mx.array):
            raise InputError(f"{name} is {expected}, got {type(value).__name__}")
        if value.dtype != dtype.mlx or value.shape != variable.shape:
            raise InputError(f"{name} is {expected}, got {named(value.dtype)}{list(value.shape)}")
        try:
            mx.eval(value)
        except RuntimeError as error:
            raise InputError(f"{name} could not be computed: {error}") from error
        return value
