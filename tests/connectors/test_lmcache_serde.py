"""The serde of LMCache with a stub of its interface: exact for all dtypes, of one size for a layout, and safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvpage_connectors.lmcache_l2  # noqa: F401 - it registers the serde
import numpy as np
import pytest
from kvpage import PageError
from kvpage_connectors.lmcache_serde import NAME
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import FACTORIES
from lmcache.v1.memory_management import MemoryObj

KEY = ObjectKey(bytes(32), "model", 0)


@dataclass
class TorchType:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16, FLOAT16, FLOAT32 = TorchType("bfloat16", 2), TorchType("float16", 2), TorchType("float32", 4)
UINT8 = TorchType("uint8", 1)
WORDS = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32, "uint8": np.uint8}


def values(shape: tuple[int, ...], dtype: TorchType, seed: int = 0) -> bytes:
    """Return values whose magnitude depends on plane, layer and channel, as in a KV cache."""
    rng = np.random.default_rng(seed)
    scale = np.exp(2 * rng.standard_normal((*shape[:-2], 1, shape[-1])))
    array = (rng.standard_normal(shape) * scale).astype(np.float32)
    if dtype is BFLOAT16:
        return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.astype(WORDS[dtype.name]).tobytes()


def object_of(shapes: list[Any], dtypes: list[Any], body: bytes) -> MemoryObj:
    return MemoryObj(memoryview(bytearray(body)), shapes, dtypes)


def buffer(size: int) -> MemoryObj:
    return object_of([(size,)], [UINT8], b"\xff" * size)


def serialized(one: MemoryObj) -> MemoryObj:
    serializer = FACTORIES[NAME]({}).serializer  # type: ignore[attr-defined]
    size = serializer.estimate_serialized_size(MemoryLayoutDesc(one.get_shapes(), one.get_dtypes()))
    into = buffer(size)
    assert serializer.serialize(one, into, KEY) == size
    return into


def deserialized(code: MemoryObj, like: MemoryObj) -> bytes:
    into = object_of(like.get_shapes(), like.get_dtypes(), bytes(like.get_size()))
    FACTORIES[NAME]({}).deserializer.deserialize(code, into, KEY)  # type: ignore[attr-defined]
    return bytes(into.byte_array)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "share"),
    [
        ([(2, 4, 64, 128)], [BFLOAT16], 0.751),
        ([(4, 256, 72)], [BFLOAT16], 0.751),
        ([(64, 128)], [BFLOAT16], 0.752),
        ([(2, 3, 1024, 64)], [FLOAT16], 0.901),
        ([(2, 3, 256, 64)], [FLOAT32], 0.901),
        ([(2, 4, 64, 8)], [UINT8], 1.01),
        ([(2, 2, 64, 64), (1, 2, 64, 32), (100,)], [BFLOAT16, FLOAT32, UINT8], 0.83),
    ],
    ids=["planes and layers", "layers", "one array", "float16", "float32", "uint8", "several arrays"],
)
def test_objects_are_exact_and_take_their_share(shapes: list[Any], dtypes: list[Any], share: float) -> None:
    body = b"".join(
        values(shape, dtype, 7) if len(shape) > 1 else bytes(range(100))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    one = object_of(shapes, dtypes, body)
    code = serialized(one)
    assert code.get_size() <= share * len(body)
    assert deserialized(code, one) == body
    assert bytes(code.byte_array) == bytes(serialized(one).byte_array)


def test_an_object_without_a_short_code_is_not_stored() -> None:
    noise = object_of([(2, 4, 64, 64)], [BFLOAT16], np.random.default_rng(1).bytes(2 * 4 * 64 * 64 * 2))
    with pytest.raises(PageError, match="has more than"):
        serialized(noise)


def test_a_damaged_code_is_a_miss() -> None:
    shapes = [(2, 4, 64, 128)]
    one = object_of(shapes, [BFLOAT16], values(shapes[0], BFLOAT16))
    code = serialized(one)
    for at in (0, 3, 7, 8, 20, 5000):
        damaged = object_of(code.get_shapes(), code.get_dtypes(), bytes(code.byte_array))
        damaged.byte_array[at] ^= 1
        with pytest.raises(PageError):
            deserialized(damaged, one)
    other = object_of([(2, 4, 64, 96)], [BFLOAT16], bytes(2 * 4 * 64 * 96 * 2))
    with pytest.raises(PageError):
        deserialized(code, other)
