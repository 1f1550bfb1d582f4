"""A digest of everything that a model computes with, and the detection of later changes.

Weights are not enough: the scale of a LoRA layer, the base of a rope and the length of a window are plain attributes.
So the digest covers every object that the model refers to: classes with the source of their modules, attributes, arrays
and functions. Models with equal digests compute the same. An object that cannot be identified is an error, with its
path.

Properties that matter only in training are left out: frozen parameters and, unless a class asks for it, training mode.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import json
import operator
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# -- Models on disk, loaded with mlx-lm --------------------------------------------------------------------------------


ADAPTER_WEIGHTS = "adapters.safetensors"
NO_CODE = {"trust_remote_code": False}  # without this, transformers asks on the terminal whether to run a model's code
# Fields of config.json. The id of a token, which some configurations call an index, is no count.
COUNTS = re.compile(r"(?!\w*(token|pad))(\w+_)?((num|n)_(\w+_)?(layers?|loops|experts|inputs)|mult|iters|idx)")
OBJECTS = ("config.json", "hf_quant_config.json", "special_tokens_map.json", "tokenizer_config.json")
TEXTS = (".jinja", ".json", ".model", ".tiktoken", ".txt")  # files of a model that are read whole
MAX_TEXT_BYTES = 128 << 20  # the largest known, a tokenizer with 262,144 tokens, has a quarter of this


class UnknownModelError(ValueError):
    """Error: the path has no model that can be loaded. The message has the reason."""


def load(path: str | Path) -> tuple[Module, TokenizerWrapper]:
    """Load the model and the tokenizer from a local model directory of mlx-lm. Nothing is downloaded.

    Raises UnknownModelError if `path` is no such directory, if mlx-lm does not know its architecture, or if its weights
    are damaged or do not fit the architecture.
    """
    import mlx_lm  # takes seconds, because it imports transformers

    directory = Path(path)
    _check(directory)
    what = f"the model in {directory} cannot be loaded"
    with unusable(what):
        _check_counts(directory)
        try:
            model, tokenizer, *_ = mlx_lm.load(str(directory), NO_CODE)
        except KeyError as error:
            raise UnknownModelError(f"{what}: its config.json has no {error}") from error
    return model, tokenizer


@contextmanager
def unusable(what: str) -> Iterator[None]:
    """Raise UnknownModelError, whose message begins with `what`, for any exception in a ``with`` block that reads or
    uses a model's files: mlx-lm, MLX, transformers and tokenizers raise all kinds for a wrong file.
    """
    try:
        yield
    except UnknownModelError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownModelError(f"{what}: {reason:.500}") from error


def adapt(model: Module, directory: Path) -> None:
    """Add the LoRA, DoRA or full fine-tuning that mlx-lm has saved in `directory` to the model.

    Raises UnknownModelError if there is none, or it is of a model with other layers.
    """
    from mlx_lm.tuner.utils import load_adapters  # imports mlx.optimizers

    for needed in ("adapter_config.json", ADAPTER_WEIGHTS):
        if not (directory / needed).is_file():
            raise UnknownModelError(f"{directory} has no adapter of mlx-lm: there is no {needed}")
    _check_files(directory)
    what = f"the adapter in {directory} does not fit the model"
    with unusable(what):
        if "num_layers" not in json.loads((directory / "adapter_config.json").read_text(encoding="utf-8")):
            raise UnknownModelError(
                f"{what}: adapter_config.json has no num_layers; an adapter of PEFT must be converted"
            )
        load_adapters(model, str(directory))
        given = {*mx.load(str(directory / ADAPTER_WEIGHTS))}
    names = (name for name, _ in tree_flatten(model.parameters()))
    if missing := [name for name in names if name.endswith((".lora_a", ".lora_b")) and name not in given]:
        raise UnknownModelError(f"{what}: it has no {missing[0]}")
    model.eval()


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise UnknownModelError(f"{directory} is no directory; a model is a directory with config.json and safetensors")
    for needed in ("config.json", "model*.safetensors"):
        if not any(directory.glob(needed)):
            raise UnknownModelError(f"{directory} is no model directory: it has no {needed}")
    _check_files(directory)


def _check_files(directory: Path) -> None:
    """Raise UnknownModelError for a file that mlx-lm or transformers could read without an end: a pipe, a device, or a
    text of more than MAX_TEXT_BYTES. They read files in subdirectories, too.
    """
    for path in chain(directory.glob("*"), directory.glob("*/*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UnknownModelError(f"{path} is neither a file nor a directory")
        if path.suffix in TEXTS and path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
            raise UnknownModelError(f"{path} has more than {MAX_TEXT_BYTES >> 20} MiB, it is not read")


def _object(file: Path) -> dict[str, Any]:
    """Return the object in a file of JSON. Raises UnknownModelError, which names the file; transformers does not."""
    with unusable(f"{file} is no JSON"):
        found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise UnknownModelError(f"{file} is no JSON object")
    return found


def _check_counts(directory: Path) -> None:
    """Raise UnknownModelError if config.json counts more layers, experts or iterations than the weights have tensors,
    and no tensor has such a dimension, or if another configuration is no JSON object. mlx-lm creates the objects of all
    layers before it reads the weights, and MLX reads beyond an array at an index that is too large.
    """
    config, *_ = [_object(directory / name) for name in OBJECTS if (directory / name).exists()]
    files: list[Any] = [mx.load(str(file)) for file in directory.glob("model*.safetensors")]
    tensors = [array for tensors_of_file in files for array in tensors_of_file.values()]
    sizes = {size for array in tensors for size in array.shape}
    for name, value in _fields(config):
        if COUNTS.fullmatch(name) and isinstance(value, int) and abs(value) > len(tensors) and value not in sizes:
            raise UnknownModelError(
                f"{directory / 'config.json'} has {name} {value}, and the weights have {len(tensors)} tensors in all"
            )


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all fields of a configuration, and of the objects within it."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, dict):
            yield from _fields(value)


# -- The source of the modules that a model's code comes from ----------------------------------------------------------

ALWAYS = ("mlx", "mlx_lm")  # packages of which all used modules count


class SourceError(ValueError):
    """Error: the source of code cannot be read."""


class Sources:
    """Digests of the source files of modules, and of the parts of MLX, mlx-lm and their own package that these modules
    use.
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}  # by the module's name

    def add(self, of: dict[str, Any] | None) -> None:
        """Add a module, given by its namespace, and the modules that it uses. Raises SourceError if a source cannot be
        read.
        """
        if of is None or "__name__" not in of:
            raise SourceError("its module cannot be found")
        waiting = [of]
        while waiting:
            used = waiting.pop()
            name = used["__name__"]
            if name not in self._digests:
                self._digests[name] = _digest(name, used.get("__file__"))
                waiting += _uses(used, {name.partition(".")[0], *ALWAYS}) if self._digests[name] else ()

    def digest(self) -> bytes:
        """Return the digest of all sources."""
        return b"".join(name.encode() + b" " + digest for name, digest in sorted(self._digests.items()) if digest)


@functools.cache
def _digest(name: str, file: str | None) -> bytes:
    """Return the digest of a module's file; empty for modules of Python's library and for MLX's core."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names - {"__main__"} or name == "mlx.core" or name.startswith("mlx.core."):
        return b""
    if file is None:
        raise SourceError(f"the module {name} has no file")
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()
    except OSError as error:
        raise SourceError(f"the source of {name} cannot be read: {error}") from error


def _uses(used: dict[str, Any], packages: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the namespaces of the modules in `packages` that the namespace `used` refers to: directly, or by a class or
    function.

    Submodules of a package under their own names do not count: any import of one adds it to the namespace.
    """
    for key, value in list(used.items()):
        module = isinstance(value, types.ModuleType)
        name = value.__name__ if module else getattr(value, "__module__", None)
        if module and name == f"{used['__name__']}.{key}":
            continue
        if isinstance(name, str) and name.partition(".")[0] in packages and name in sys.modules:
            yield vars(sys.modules[name])


def found(value: Any) -> Any:
    """Return the object that the module of a class or function has under its qualified name; None if there is none."""
    within: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        within = vars(within).get(name) if hasattr(within, "__dict__") else None
    return within


def namespace(cls: type) -> dict[str, Any] | None:
    """Return the namespace of a class's module, also if the module is not in sys.modules; None if it cannot be
    found.
    """
    if module := sys.modules.get(cls.__module__):
        return vars(module)
    functions = (member for member in vars(cls).values() if isinstance(member, types.FunctionType))
    return next((function.__globals__ for function in functions), None)


SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset)
COMPILED = type(nn.silu)  # the type of a function compiled by mx.compile
FOREIGN = (types.BuiltinFunctionType, type(mx.exp))  # functions that are not written in Python

# the objects that an object refers to now, and the objects that it referred to before
Holder = tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]


class UnknownIdentityError(ValueError):
    """Error: a model refers to an object that cannot be hashed. The message has its path and the reason."""


class Identity:
    """Hash of a model at the time of construction, and the detection of later changes."""

    def __init__(self, model: nn.Module, before: Identity | None = None) -> None:
        """Hash `model`. `before` is an earlier identity of it: arrays that have not changed since are not read again.

        Raises UnknownIdentityError for an object that cannot be hashed.
        """
        walk = _Walk(before._arrays if before else {})
        try:
            walk.feed("model", model)
        except RecursionError as error:
            raise UnknownIdentityError("the model is nested too deeply to be told from others") from error
        self.digest = walk.digest()
        self._holders = walk.holders
        self._arrays: dict[int, _Array] = walk.arrays

    def holds(self) -> bool:
        """Return whether the model refers to the same objects as at construction, and MLX has written to none of its
        arrays.

        Takes about a microsecond for each object. Writes of another library to an array's memory are not noticed.
        """
        return all(_same(now(), then) for now, then in self._holders) and all(
            array.holds() for array in self._arrays.values()
        )


def _same(now: Iterable[Any], then: tuple[Any, ...]) -> bool:
    now = tuple(now)
    return len(now) == len(then) and all(map(operator.is_, now, then))


class _Array:
    """An array and its digest, and the detection of writes to it.

    MLX writes in place only if one array alone refers to the memory. A second reference is kept here, so that an array
    gets another address when it is written.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self._second = array.reshape(array.shape)
        mx.eval(self._second)
        self._address = _address(array)
        digest = xxhash.xxh3_128(f"{array.dtype} {array.shape}\n".encode())
        if array.size:
            digest.update(memoryview(array.reshape(-1).view(mx.uint8)))
        self.digest = digest.digest()

    def holds(self) -> bool:
        """Return whether the array is unchanged; False if that is unknown."""
        return not self.array.size or (self._address is not None and _address(self.array) == self._address)


def _address(array: Any) -> int | None:
    """Return the address of an array's memory; None if it is empty, or not contiguous in any order of its axes."""
    view = memoryview(array)
    if strides := view.strides if not view.c_contiguous else None:
        view = memoryview(array.transpose(sorted(range(array.ndim), key=lambda axis: -strides[axis])))
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.c_contiguous and view.nbytes else None


class _Walk:
    """Hash of an object and all objects that it refers to. Each object is hashed once, after its kind and length."""

    def __init__(self, known: dict[int, _Array]) -> None:
        self._known = known  # by id
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, int] = {}  # order of hashed objects, by id
        self._alive: list[Any] = []  # keeps hashed objects alive, so that no id is used twice
        self._sources = Sources()
        self.holders: list[Holder] = []
        self.arrays: dict[int, _Array] = {}

    def digest(self) -> str:
        self._put("sources", self._sources.digest())
        self._put("mlx", version("mlx").encode())
        return self._hash.hexdigest()

    def feed(self, path: str, value: Any) -> None:
        """Hash `value`, whose path is `path`."""
        kind = type(value)
        if kind in SCALARS:
            self._put(kind.__name__, (value.hex() if kind is float else repr(value)).encode())
        elif kind is mx.array:
            self._put("array", self._array(value))
        elif kind is mx.Dtype:
            self._put("dtype", str(value).encode())
        elif id(value) in self._seen:
            self._put("again", str(self._seen[id(value)]).encode())
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._object(path, value)

    def _put(self, kind: str, content: bytes = b"") -> None:
        """Hash a record: its kind, its length and its content."""
        self._hash.update(f"{kind} {len(content)}\n".encode() + content)

    def _hold(self, now: Callable[[], Iterable[Any]]) -> None:
        """Note the objects that an object refers to, so that `Identity.holds` can compare them later. `now` returns
        them.
        """
        self.holders.append((now, tuple(now())))

    def _object(self, path: str, value: Any) -> None:
        """Hash an object that is neither an array nor a scalar, by its type."""
        match value:
            case nn.Module():
                self._module(path, value)
            case type():
                self._class(path, value)
            case types.FunctionType():
                self._function(path, value)
            case types.CodeType():
                self._code(path, value)
            case types.MethodType():
                self._put("method")
                self.feed(path, (value.__func__, value.__self__))
            case types.ModuleType():
                self._put("module", value.__name__.encode())
                self._source(path, vars(value))
            case functools.partial():
                self._put("partial")
                self.feed(path, (value.func, value.args, value.keywords))
            case np.ndarray() | np.generic() if not value.dtype.hasobject:
                self._put("numpy", f"{value.dtype.str} {value.shape}\n".encode() + value.tobytes())
            case _ if type(value) in CONTAINERS:
                self._container(path, value)
            case _ if isinstance(value, COMPILED):
                self._compiled(path, value)
            case _ if isinstance(value, FOREIGN):
                self._foreign(path, value)
            case _:
                self._instance(path, value)

    def _array(self, array: mx.array) -> bytes:
        """Return the digest of an array. An unchanged array of the earlier identity is not read again."""
        known = self._known.get(id(array))
        if not (known and known.array is array and known.holds()):
            known = _Array(array)
        self.arrays[id(array)] = known
        return known.digest

    def _module(self, path: str, module: nn.Module) -> None:
        """Hash a module of MLX: its class, and by name its items and attributes, except the attributes of training."""
        items, attributes = dict(module), dict(vars(module))
        self._hold(lambda: (*module, *module.values(), *vars(module), *vars(module).values()))
        self._class(path, type(module))
        attributes.pop("_no_grad", None)
        if not _asks_for_training(type(module)):
            attributes.pop("_training", None)
        for held in (items, attributes):
            self._put("attributes", str(len(held)).encode())
            for name in sorted(held):
                self.feed(name, name)
                self.feed(f"{path}.{name}", held[name])

    def _container(self, path: str, value: Any) -> None:
        """Hash a container with its elements: a dict in its order, a set without one."""
        self._put(type(value).__name__, str(len(value)).encode())
        if isinstance(value, dict):
            self._hold(lambda: (*value, *value.values()))
            for key, held in value.items():  # in order, which may matter
                self.feed(path, key)
                self.feed(f"{path}.{key}", held)
        elif isinstance(value, (set, frozenset)):
            self._hold(lambda: value)
            for digest in sorted(self._apart(path, element) for element in value):
                self._put("element", digest)
        else:
            self._hold(lambda: value)
            for i, element in enumerate(value):
                self.feed(f"{path}.{i}", element)

    def _apart(self, path: str, element: Any) -> bytes:
        """Return the digest of an element of a set, hashed separately, because the elements of a set have no order."""
        walk = _Walk(self._known)
        walk.feed(path, element)
        self.holders += walk.holders
        self.arrays |= walk.arrays
        return walk.digest().encode()

    def _class(self, path: str, cls: type) -> None:
        """Hash a class: its name, its scalar attributes, and the source of its module, and the same for its base
        classes.

        If its module has another or no class under this name, also hash its functions.
        """
        for base in cls.__mro__:
            self._put("class", f"{base.__module__}.{base.__qualname__}".encode())
            if base.__module__ == "builtins":
                continue
            self._source(path, namespace(base))
            public = found(base) is base
            for name, member in sorted(vars(base).items()):
                if type(member) in SCALARS and not name.startswith("__"):
                    self.feed(f"{path}.{name}", (name, member))
                elif not public and (functions := _functions(member)):
                    self.feed(f"{path}.{name}", (name, functions))

    def _function(self, path: str, function: types.FunctionType) -> None:
        """Hash a function: its module and qualified name, and the source of its module.

        If the module has another or no function under this name (a lambda, or a function within a function), also hash
        its code, default arguments and closure. Raises UnknownIdentityError if the source or one of these values cannot
        be hashed.
        """
        self._put("function", f"{function.__module__}.{function.__qualname__}".encode())
        self._source(path, function.__globals__)
        if found(function) is function:
            return
        self._hold(lambda: _closed_over(function))
        self.feed(path, _closed_over(function))

    def _code(self, path: str, code: types.CodeType) -> None:
        """Hash a code object, and the version of Python, on which the bytecode depends."""
        self._put("code", repr((sys.version_info[:2], code.co_name, code.co_names, code.co_freevars)).encode())
        self._put("bytes", code.co_code)
        self.feed(path, code.co_consts)

    def _compiled(self, path: str, function: Any) -> None:
        """Hash a function made by mx.compile: the original function, which the garbage collector knows."""
        self._put("compiled")
        of = [value for value in gc.get_referents(function) if callable(value) and value is not type(function)]
        if len(of) != 1:
            raise _unknown(path, function)
        self.feed(path, of[0])

    def _foreign(self, path: str, function: Any) -> None:
        """Hash a function that is not written in Python by its name. Raises UnknownIdentityError if its module does not
        have it.
        """
        if found(function) is not function:
            raise _unknown(path, function)
        self._put("foreign", f"{function.__module__}.{function.__name__}".encode())

    def _instance(self, path: str, value: Any) -> None:
        """Hash an object by the values from which pickle would restore it. Raises UnknownIdentityError if pickle
        cannot.
        """
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise _unknown(path, value) from error
        if isinstance(reduced, str):  # the name of a global
            raise _unknown(path, value)
        made_by, arguments, state, *items = (*reduced, None, None, None)[:5]
        self._put("instance")
        self._class(path, type(value))
        self.feed(path, (made_by, arguments))
        self.feed(path, state)
        self.feed(path, [None if elements is None else list(elements) for elements in items])
        if hasattr(value, "__dict__"):
            self._hold(lambda: (*vars(value), *vars(value).values()))

    def _source(self, path: str, of: dict[str, Any] | None) -> None:
        try:
            self._sources.add(of)
        except SourceError as error:
            raise UnknownIdentityError(f"{path} cannot be told from others: {error}") from error


def _unknown(path: str, value: Any) -> UnknownIdentityError:
    return UnknownIdentityError(f"{path} cannot be told from others: it is a {type(value).__qualname__}")


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    cells = (_content(cell) for cell in function.__closure__ or ())
    return (function.__code__, *cells, function.__defaults__, function.__kwdefaults__)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return ...


def _functions(member: Any) -> tuple[types.FunctionType, ...]:
    """Return the Python functions of a class member: itself, or those of a method or property."""
    parts = (member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "fdel")))
    return tuple(part for part in parts if isinstance(part, types.FunctionType))


def _asks_for_training(cls: type) -> bool:
    """Return whether the code of a class or of a base class uses the attribute `training`."""
    bases = (base for base in cls.__mro__ if base not in (nn.Module, dict, object))
    return any(_mentions(f.__code__) for base in bases for member in vars(base).values() for f in _functions(member))


def _mentions(code: types.CodeType) -> bool:
    words = ("training", "_training")
    if any(word in code.co_names or word in code.co_consts for word in words):
        return True
    return any(_mentions(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
