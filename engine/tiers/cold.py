"""The cold tier: an agent's context in a safetensors file of its own.

``<agent_id>.safetensors`` has, for every layer i that keeps a row for each token::

    k_layer_{i}, v_layer_{i}                 [n_kv_heads, head_dim, total_tokens], F16, BF16 or F32
    or, of a quantised cache, in the format of mlx.core.dequantize,
    k_layer_{i}, v_layer_{i}                 [n_kv_heads, total_tokens, head_dim * bits / 32], U32, packed
    k_layer_{i}_scales, _biases, v_ likewise [n_kv_heads, total_tokens, head_dim / group_size]

and for a layer that carries a state instead, once for every position at which it was taken::

    state_{tokens}_layer_{i}_{n}             [heads, rows, dim], the n-th of its arrays

With the option for the lossless code (docs/page-code.md), an array that shrinks by a tenth or more is a tensor of bytes
with `:coded` after its name: the code of ``[heads, rows, dim]`` as of a block whose pages are the heads.

with their description in the metadata, in which all values are text:

    version ("1", or "2" with coded tensors), digest, agent_id, model_id, fingerprint (16 hex digits), created_at
    (ISO 8601), total_tokens, v_head_dim, kv_bits and kv_group_size ("" unless quantised); as JSON model_tag (n_layers,
    n_kv_heads, head_dim, block_tokens), layers (the kind of each), tokens (their ids) and states (the positions at
    which they were taken)

A file is replaced atomically: it is written under another name, synchronised and renamed, and the directory is
synchronised. It is used if agent, model, geometry and all shapes match, which is checked before a tensor is read, and
if the digest of the whole file matches.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvpage_server import bounded
from kvpage_server.lossless import decode_body, encode_block_body
from kvpage_server.page import BlockShape, DType, KVType, PageError
from kvpage_server.system.durable import private_directory, remove, remove_unfinished, replacing

from .. import tensor_file
from ..caches import MLX_DTYPES, Matrices
from ..chains import common_prefix, is_agent_id
from ..memory.blocks import AgentBlocks, Arrays, KVBlock, check_agent_id
from ..pool import BlockPool, PoolExhaustedError
from ..spec import ModelCacheSpec
from ..tensor_file import DamagedFileError, Tensor, TensorReader
from .server.manifest import Miss

Bits = NDArray[Any]  # values as unsigned integers, because numpy has no bfloat16

VERSION = "1"
CODED_VERSION = "2"  # of a file with coded tensors, so that an older engine refuses it
CODED = ":coded"
DIRECTORY = Path("~/.agent_memory/caches")
SUFFIX = ".safetensors"
NAMES = ("k_layer_{}", "v_layer_{}", "k_layer_{}_scales", "k_layer_{}_biases", "v_layer_{}_scales", "v_layer_{}_biases")
MAX_TOKENS = 2_000_000  # of a context; the largest header allows no more
_MOST_RATIO = 4  # of an array to its code
_STRIP_COLUMNS = 16  # columns that are transposed together: their cache lines stay in the CPU's cache


class _Place(NamedTuple):
    """An array of a context: its layer and number, and its tensor in the file."""

    layer: int
    number: int  # of the array in its layer
    kept: Matrices
    state_at: int | None  # the position at which the state was taken; None for an array with a row for each token

    @property
    def transposed(self) -> bool:
        """Whether the tensor has the tokens last: keys and values that are not packed."""
        return self.state_at is None and self.kept.plane.kv_type <= KVType.V and self.kept.plane.dtype != DType.UINT32

    @property
    def name(self) -> str:
        if self.state_at is not None:
            return f"state_{self.state_at}_layer_{self.layer}_{self.number}"
        return NAMES[self.kept.plane.kv_type].format(self.layer)

    @property
    def tensor(self) -> Tensor:
        heads, rows, dim = self.kept.shape
        return Tensor(self.kept.plane.dtype.safetensors, (heads, dim, rows) if self.transposed else (heads, rows, dim))

    def is_in(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor of a file has the array, or its code."""
        if name != self.name + CODED:
            return (name, tensor) == (self.name, self.tensor)
        nbytes = self.kept.nbytes
        return tensor == Tensor("U8", (tensor.nbytes,)) and 0 < nbytes <= _MOST_RATIO * tensor.nbytes

    def encode(self, array: Bits) -> memoryview | None:
        """Return the code of ``[heads, rows, dim]``, or None if it would save less than a tenth."""
        try:
            shape = self._block_shape()
        except PageError:  # more heads than a block has pages
            return None
        return encode_block_body(array.reshape(-1).view(np.uint8).data, shape)

    def decode(self, code: NDArray[np.uint8]) -> Bits:
        """Return ``[heads, rows, dim]`` from its code. Raises DamagedFileError."""
        array = np.empty(self.kept.shape, f"u{self.kept.plane.dtype.itemsize}")
        try:
            decode_body(code.data, array.reshape(-1).view(np.uint8).data, self._block_shape())
        except PageError as error:
            raise DamagedFileError(f"{self.name}: {error}") from None
        return array

    def _block_shape(self) -> BlockShape:
        return BlockShape(1, self.kept.heads, self.kept.rows, (self.kept.plane,))


class _LoadCancelledError(Exception):
    """Error: the load was cancelled."""


def path_of(directory: Path, agent_id: str) -> Path:
    """Return the path of an agent's file. Raises BlockError for an invalid agent id."""
    return directory.expanduser() / f"{check_agent_id(agent_id)}{SUFFIX}"


class SafetensorsCacheAdapter:
    """Store of contexts in safetensors files. Several threads may load at the same time, and one may save.

    An unusable file is a miss, and a failed write leaves the previous file. The reason is counted: ``absent`` there is
    no file, or it does not start with the prompt; ``version``, ``agent``, ``fingerprint`` it has another format, agent
    or model; ``schema`` it contradicts itself or the model; ``damaged`` its checksum does not match; ``pool`` no blocks
    are free; or the system's error, such as ``EACCES`` or ``ENOSPC``.
    """

    def __init__(
        self, spec: ModelCacheSpec, pool: BlockPool, directory: Path = DIRECTORY, *, code: bool = False
    ) -> None:
        """Create the directory, and remove files that a crash left half written. Raises OSError.

        With `code`, new files have arrays in the lossless code. Both kinds of files are read.
        """
        self.misses: Counter[str] = Counter()  # loads that found nothing, by reason
        self.unsaved: Counter[str] = Counter()  # saves that failed, by reason
        self.save_failure: str | None = None  # the reason for which the last save failed; None if it succeeded
        self._counting = threading.Lock()
        self._spec = spec
        self._pool = pool
        self._directory = directory.expanduser()
        self._code = code
        private_directory(self._directory)
        remove_unfinished(self._directory)

    def agents(self) -> list[str]:
        """Return the agents that have a file, for any model."""
        names = (path.name.removesuffix(SUFFIX) for path in self._directory.glob(f"[!.]*{SUFFIX}"))
        return sorted(filter(is_agent_id, names))  # the directory may have other files

    def has(self, agent_id: str) -> bool:
        """Return whether the agent has a file, for any model."""
        return self._path(agent_id).exists()

    def save(self, context: AgentBlocks) -> int | None:
        """Write a context in place of the agent's last one. Return the file's size, or None if the write failed.

        Return 0, without a change, for the empty context of an answer that was not kept. Raises IncompatibleBlocksError
        for blocks of another model.
        """
        context.validate(self._spec)
        if not context.blocks:
            return 0
        states, arrays = context.stored_states, context.states
        places = _places(self._spec, len(context), states)
        # The header has the size of each code before the first one is written. So an array is encoded twice, instead of
        # keeping the codes of all arrays in memory.
        sizes = [_code(place, context, arrays).nbytes if self._code else 0 for place in places]
        tensors = {
            place.name + (CODED if size else ""): Tensor("U8", (size,)) if size else place.tensor
            for place, size in zip(places, sizes, strict=True)
        }
        metadata = _metadata(self._spec, context, states)
        if any(sizes):
            metadata["version"] = CODED_VERSION
        bodies = (
            _code(place, context, arrays) if size else _body(place, context, arrays)
            for place, size in zip(places, sizes, strict=True)
        )
        try:
            with replacing(self._path(context.agent_id)) as file:
                nbytes = tensor_file.write(file, tensors, metadata, bodies)
        except OSError as error:
            self.save_failure = _reason(error)
            self.unsaved[self.save_failure] += 1
            return None
        self.save_failure = None
        return nbytes

    def load(self, agent_id: str, tokens: Sequence[int] | None = None) -> AgentBlocks | None:
        """Load the part of the agent's context with which `tokens` begin; without `tokens`, all of it.

        If layers carry a state, this part ends at a stored state, and leaves at least one of the `tokens` to compute.
        Its blocks are allocated in the pool, and the caller frees them. Return None if nothing is usable.
        """
        return self.find(agent_id, tokens)[0]

    def find(
        self, agent_id: str, tokens: Sequence[int] | None = None, *, is_cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[AgentBlocks | None, str | None]:
        """Return the result of `load`, and the reason for a miss.

        Stops when `is_cancelled` returns True, which is not counted as a miss.
        """
        try:
            with _open(self._path(agent_id)) as file:
                return self._load(agent_id, TensorReader(file), tokens, is_cancelled), None
        except _LoadCancelledError:
            return None, None
        except (Miss, DamagedFileError, PoolExhaustedError, OSError) as error:
            reason = _reason(error)
            with self._counting:
                self.misses[reason] += 1
            return None, reason

    def reach(self, agent_id: str, tokens: Sequence[int] | None = None) -> int:
        """Return how many of `tokens` a load of the agent's file would restore, by its header. Counts no miss."""
        try:
            with _open(self._path(agent_id)) as file:
                return _reach(self._spec, *_check(self._spec, agent_id, TensorReader(file)), tokens)
        except (Miss, DamagedFileError, OSError):
            return 0

    def delete(self, agent_id: str) -> bool:
        """Delete the agent's file. Return whether there was one. Raises OSError if it cannot be deleted."""
        return remove(self._path(agent_id))

    def _path(self, agent_id: str) -> Path:
        return path_of(self._directory, agent_id)

    def _load(
        self, agent_id: str, reader: TensorReader, tokens: Sequence[int] | None, is_cancelled: Callable[[], bool]
    ) -> AgentBlocks:
        """Return the usable part of a file's context, in blocks of the pool. Raises Miss if none of it is usable,
        PoolExhaustedError, DamagedFileError, _LoadCancelledError.
        """
        stored, states = _check(self._spec, agent_id, reader)
        reach = _reach(self._spec, stored, states, tokens)
        if not reach:
            raise Miss("absent")
        nbytes = reach * self._spec.token_nbytes
        nbytes += sum(self._spec.state_nbytes(position) for position in states if position <= reach)
        ids = self._pool.allocate(self._spec.blocks_for(reach), agent_id, nbytes)
        try:
            bodies = zip(reader.tensors, _cancellable(is_cancelled, reader.bodies()), strict=True)
            blocks = _blocks(self._spec, bodies, ids, stored, states, reach)
            self._pool.settle({block.block_id: block.nbytes for block in blocks})
        except BaseException:
            self._pool.free(ids, agent_id)
            raise
        return AgentBlocks(agent_id, stored[:reach], blocks, self._spec.fingerprint)


def _metadata(spec: ModelCacheSpec, context: AgentBlocks, states: Sequence[int]) -> dict[str, str]:
    """Return the metadata of a file. All values are text."""
    tag = asdict(spec.tag)
    bits, group_size = next((layer.packed for layer in spec.layers if layer.packed), (None, None))
    values = [kept.plane.head_dim for layer in spec.token_shapes(1) for kept in layer if kept.plane.kv_type == KVType.V]
    if bits:
        values = [dim * 32 // bits for dim in values]
        tag["head_dim"] = tag["head_dim"] * 32 // bits
    return {
        "version": VERSION,
        "agent_id": context.agent_id,
        "model_id": tag.pop("model_id"),
        "fingerprint": f"{spec.fingerprint:016x}",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_tokens": str(len(context)),
        "kv_bits": str(bits or ""),
        "kv_group_size": str(group_size or ""),
        "v_head_dim": str(values[0]) if values else "",
        "model_tag": json.dumps(tag),
        "layers": json.dumps([layer.KIND.__name__ for layer in spec.layers]),
        "tokens": json.dumps(context.tokens),
        "states": json.dumps(states),
    }


def _places(spec: ModelCacheSpec, tokens: int, states: Sequence[int]) -> list[_Place]:
    """Return the tensors of a file with `tokens` tokens and states at these positions, in the order of the file."""
    shapes = [(spec.token_shapes(tokens), None), *((spec.state_shapes(end), end) for end in states)]
    return [
        _Place(i, number, kept, end)
        for layers, end in shapes
        for i, layer in enumerate(layers)
        for number, kept in enumerate(layer)
    ]


def _check(spec: ModelCacheSpec, agent_id: str, reader: TensorReader) -> tuple[tuple[int, ...], list[int]]:
    """Return the stored tokens and the positions of states. Raises Miss unless the file belongs to `agent_id` and the
    model."""
    version = CODED_VERSION if reader.metadata.get("version") == CODED_VERSION else VERSION
    expected = {"version": version, "agent_id": agent_id, "fingerprint": f"{spec.fingerprint:016x}"}
    for name, value in expected.items():
        if reader.metadata.get(name) != value:
            raise Miss(name.removesuffix("_id"))
    try:
        tokens, states = (_numbers(reader.metadata[name]) for name in ("tokens", "states"))
        total = int(reader.metadata["total_tokens"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Miss("schema") from error
    ends = {*range(spec.block_tokens, len(tokens), spec.block_tokens), len(tokens)}
    positions = range(1, len(tokens) + 1) if spec.has_state else ends
    valid = len(tokens) == total and sorted({*states}) == states and len(states) <= len(reader.tensors)
    valid = valid and all(position in positions for position in states)
    valid = valid and all(0 <= token < spec.vocab_size for token in tokens)
    places = _places(spec, total, states) if valid else []
    valid = valid and len(places) == len(reader.tensors)
    if not valid or not all(place.is_in(*found) for place, found in zip(places, reader.tensors.items(), strict=True)):
        raise Miss("schema")
    return tuple(tokens), states


def _numbers(text: str) -> list[int]:
    """Parse a JSON list of integers. Raises ValueError or RecursionError for other text."""
    bounded.check(text.encode(errors="replace"), containers=1, strings=0, values=MAX_TOKENS)
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError("a list of numbers")
    return numbers


def _open(path: Path) -> BinaryIO:
    """Open a file to read, without blocking if it is a pipe."""
    return cast(BinaryIO, open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)))


def _reach(spec: ModelCacheSpec, stored: Sequence[int], states: Sequence[int], tokens: Sequence[int] | None) -> int:
    """Return how many of `tokens`, or of all stored tokens, a file with these `stored` tokens and `states` restores."""
    common = len(stored) if tokens is None else common_prefix(stored, tokens)
    if not spec.has_state:
        return common
    limit = common if tokens is None else min(common, len(tokens) - 1)
    return max((end for end in states if end <= limit), default=0)


def _body(place: _Place, context: AgentBlocks, states: Mapping[int, Arrays]) -> Bits:
    """Return the values of a tensor, in the layout of the file. `states` are the context's states by position."""
    if place.state_at is not None:
        return _bits(states[place.state_at][place.layer][place.number])
    parts = _parts(place, context)
    body = np.empty(place.tensor.shape, f"u{place.kept.plane.dtype.itemsize}")
    for part, (start, end) in zip(parts, pairwise([0, *context.ends]), strict=True):
        if place.transposed:
            _transpose(part, body[:, :, start:end])
        else:
            body[:, start:end] = part
    return body


def _code(place: _Place, context: AgentBlocks, states: Mapping[int, Arrays]) -> Bits:
    """Return the code of an array, empty if it stays as it is. `states` are the context's states by position."""
    if place.state_at is not None:
        array = _bits(states[place.state_at][place.layer][place.number])
    else:
        array = np.concatenate(_parts(place, context), axis=1)
    code = place.encode(array)
    return np.frombuffer(code if code is not None else b"", np.uint8)


def _parts(place: _Place, context: AgentBlocks) -> list[Bits]:
    """Return an array with a row for each token, ``[heads, rows, dim]`` of each block."""
    return [_bits(block.layers[place.layer][place.number]) for block in context.blocks]


def _blocks(
    spec: ModelCacheSpec,
    bodies: Iterator[tuple[str, NDArray[np.uint8]]],
    ids: Sequence[int],
    stored: Sequence[int],
    states: Sequence[int],
    reach: int,
) -> tuple[KVBlock, ...]:
    """Return blocks of the first `reach` tokens, read from the names and bytes of the file's tensors, `bodies`, which
    is read to its end. Raises DamagedFileError.

    `ids` are allocated block ids, `stored` the tokens and `states` the positions of states in the file.
    """
    edges = list(pairwise([*range(0, reach, spec.block_tokens), reach]))
    layers: list[list[list[mx.array]]] = [[[] for _ in spec.layers] for _ in edges]  # [block][layer][plane]
    states_at: dict[int, list[list[mx.array]]] = {position: [[] for _ in spec.layers] for position in states}
    for place, (name, body) in zip(
        _places(spec, len(stored), states), bodies, strict=True
    ):  # reads to the end, where the digest is checked
        is_coded = name != place.name
        transposed = place.transposed and not is_coded
        values = (
            place.decode(body)
            if is_coded
            else body.view(f"u{place.kept.plane.dtype.itemsize}").reshape(place.tensor.shape)
        )
        dtype = MLX_DTYPES[place.kept.plane.dtype]
        if place.state_at is not None:
            states_at[place.state_at][place.layer].append(mx.array(values).view(dtype))
            continue
        for block, (start, end) in zip(layers, edges, strict=True):
            rows = values[:, :, start:end] if transposed else values[:, start:end]
            block[place.layer].append(
                mx.array(_transpose(rows) if transposed else np.ascontiguousarray(rows)).view(dtype)
            )
    blocks = []
    for block_id, (start, end), arrays in zip(ids, edges, layers, strict=True):
        made = KVBlock(block_id, end - start, _frozen(arrays))
        for position in states_at:
            if start < position <= end:
                made = made.with_state(position - start, _frozen(states_at[position]))
        blocks.append(made)
    mx.eval([[block.layers, *block.states.values()] for block in blocks])  # so that another thread can use them
    return tuple(blocks)


def _cancellable(is_cancelled: Callable[[], bool], bodies: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bodies. Raises _LoadCancelledError when `is_cancelled` returns True."""
    for body in bodies:
        if is_cancelled():
            raise _LoadCancelledError
        yield body


def _frozen(layers: Sequence[Sequence[mx.array]]) -> Arrays:
    return tuple(map(tuple, layers))


def _bits(array: mx.array) -> Bits:
    """Return a view of an evaluated, contiguous array's values as unsigned integers."""
    return np.frombuffer(memoryview(cast(Any, array)).cast("B"), f"u{array.itemsize}").reshape(array.shape)


def _transpose(matrices: Bits, into: Bits | None = None) -> Bits:
    """Return ``[heads, a, b]`` as ``[heads, b, a]``, in `into` if given."""
    heads, height, width = matrices.shape
    result = np.empty((heads, width, height), matrices.dtype) if into is None else into
    for start in range(0, height, _STRIP_COLUMNS):
        result[:, :, start : start + _STRIP_COLUMNS] = matrices[:, start : start + _STRIP_COLUMNS].transpose(0, 2, 1)
    return result


def _reason(error: Exception) -> str:
    if isinstance(error, DamagedFileError):
        return "damaged"
    if isinstance(error, PoolExhaustedError):
        return "pool"
    if isinstance(error, FileNotFoundError):
        return "absent"
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "system")
    return str(error)
