"""Data of earlier versions is still readable: files of the cold tier, contexts and instances on a page server.

The files in `stored_before` were written before the engine was divided into folders, by the code of that day.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from pools import pool_of
from servers import RunningServer, start_server

# isort: split
import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import mlx.core as mx
import pytest
from block_pages import page_bodies

from engine.caches import MLX_DTYPES, ArraysLayer, FullLayer, Layer, QuantizedLayer
from engine.memory.blocks import AgentBlocks, Arrays
from engine.persistent import Model, PersistentStore, Simulator, parse
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec, Shapes
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from kvpage_server.page import DType, Plane

STORED = Path(__file__).parents[1] / "stored_before"
TOKENS = tuple(range(3, 23))
STATES_AT = (16, 20)
LAYERS: dict[str, tuple[Layer, ...]] = {
    "plain": (
        FullLayer((2, 1), (Plane(0, DType.BFLOAT16, 4), Plane(1, DType.BFLOAT16, 3))),
        ArraysLayer((Plane(0, DType.FLOAT32, 4),), ((1, 2, 4),)),
    ),
    "packed": (
        QuantizedLayer(
            (1,) * 6,
            (*(Plane(i, DType.UINT32, 8) for i in range(2)), *(Plane(i, DType.FLOAT32, 1) for i in range(2, 6))),
            32,
            8,
        ),
    ),
}
GRAPH = """
dynamic { x: f32[D]; }
persistent {
    n: i32 @init(0);
    mass: f32 @init(0.5);
    K(i): f32[D] @table;
}
block entry {
    cache.write x >> K[n];
    cache.increment n;
    return;
}
"""


@pytest.fixture(params=LAYERS)
def spec(request: pytest.FixtureRequest) -> ModelCacheSpec:
    layers = LAYERS[request.param]
    return ModelCacheSpec(
        model_id=request.param,
        block_tokens=8,
        layers=layers,
        nesting=(None,) * len(layers),
        vocab_size=100,
        context=None,
        fingerprint=0x1234_5678_9ABC_DEF0 + len(layers),
        batches=False,
    )


pool = pool_of(16)


@pytest.fixture(scope="module")
def stored() -> Iterator[RunningServer]:
    """Start a page server with the keys of an earlier version."""
    with start_server("--maxmemory", "100mb") as server, server.client() as client:
        for key, value in json.loads((STORED / "page_server.json").read_text(encoding="utf-8")).items():
            client.set(key, base64.b64decode(value))
        yield server


def test_a_cold_file_of_that_day_is_loaded_to_the_bit(spec: ModelCacheSpec, pool: BlockPool, tmp_path: Path) -> None:
    shutil.copy(STORED / f"{spec.model_id}.safetensors", tmp_path)
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    context = cold.load(spec.model_id)
    assert context is not None, cold.misses
    check(context, spec)
    pool.free(context.block_ids)


def test_a_cold_file_is_written_as_it_was_that_day(spec: ModelCacheSpec, pool: BlockPool, tmp_path: Path) -> None:
    path = tmp_path / f"{spec.model_id}.safetensors"
    shutil.copy(STORED / path.name, path)
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    context = cold.load(spec.model_id)
    assert context
    assert cold.save(context)
    pool.free(context.block_ids)
    found, wanted = header(path), header(STORED / path.name)
    for changing in ("created_at", "digest"):
        del found["__metadata__"][changing], wanted["__metadata__"][changing]
    assert list(found.items()) == list(wanted.items())
    assert path.read_bytes()[-wanted_size(wanted) :] == (STORED / path.name).read_bytes()[-wanted_size(wanted) :]


def test_a_context_of_an_older_version_is_loaded_bit_by_bit(
    spec: ModelCacheSpec, pool: BlockPool, stored: RunningServer
) -> None:
    pages = PageTier(stored.url, spec, pool)
    context = pages.load(spec.model_id)
    assert context is not None, pages.misses
    check(context, spec)
    written = pages.save(context)
    pages.close()
    pool.free(context.block_ids)
    assert written
    assert (written.blocks_written, written.blocks_present) == (0, 3)  # it has the names and digests of that day


def test_a_save_equals_the_save_of_the_older_version(
    spec: ModelCacheSpec, pool: BlockPool, stored: RunningServer
) -> None:
    """Every key and every value, except the times in the pages' headers, newer fields of manifests, and records of
    tails, which that version did not have for named agents.
    """
    pages = PageTier(stored.url, spec, pool)
    context = pages.load(spec.model_id)
    assert context
    pages.close()
    with start_server("--maxmemory", "100mb") as other:
        pages = PageTier(other.url, spec, pool)
        assert pages.save(context)
        pages.close()
        with other.client() as client, stored.client() as of_that_day:
            for key in client.scan_iter(count=1000):
                if key.startswith(b"tails:"):
                    continue
                assert as_of_that_day(client.get(key)) == as_of_that_day(of_that_day.get(key)), key
            assert client.exists(f"manifest:{spec.model_id}:{spec.fingerprint:016x}")
    pool.free(context.block_ids)


def test_an_instance_of_that_day_is_resumed(stored: RunningServer) -> None:
    store = PersistentStore(stored.url)
    simulator = Simulator(Model(sizes={"D": 2}), parse(GRAPH), store=store)
    run = simulator.resume("counter")
    assert run.steps == 3
    assert run.fetch("n").item() == 3
    assert run.fetch("mass").item() == 0.5
    run.insert(x=mx.full(2, 3.0))
    run.step()
    assert run.fetch("K").tolist() == [[float(i)] * 2 for i in range(4)]
    store.close()


def check(context: AgentBlocks, spec: ModelCacheSpec) -> None:
    assert context.agent_id == spec.model_id
    assert context.tokens == TOKENS
    for block, end in zip(context.blocks, (8, 16, 20), strict=True):
        assert_same(block.layers, made_up(spec.token_shapes(block.tokens), end))
        if spec.has_state and end in STATES_AT and block.state is not None:
            assert_same(block.state, made_up(spec.state_shapes(end), end + 100))
    assert (context.blocks[-1].state is not None) == spec.has_state


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert [bytes(body) for body in page_bodies(found)] == [bytes(body) for body in page_bodies(wanted)]


def made_up(shapes: Shapes, seed: int) -> Arrays:
    layers = []
    for kept in shapes:
        planes = []
        for matrices in kept:
            seed += 1
            values = (mx.arange(matrices.nbytes // matrices.plane.dtype.itemsize) + 7 * seed) % 251
            planes.append(values.astype(MLX_DTYPES[matrices.plane.dtype]).reshape(matrices.shape))
        layers.append(tuple(planes))
    mx.eval(layers)
    return tuple(layers)


def header(path: Path) -> dict[str, dict[str, object]]:
    raw = path.read_bytes()
    found: dict[str, dict[str, object]] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


def wanted_size(described: dict[str, dict[str, object]]) -> int:
    return max(one["data_offsets"][1] for name, one in described.items() if name != "__metadata__")  # type: ignore[index]


def as_of_that_day(value: bytes) -> object:
    """Return a value without its variable parts; a manifest with its former fields."""
    if b'{"format"' in value:
        received = json.loads(value.partition(b" ")[2])
        return {name: received[name] for name in ("format", "fingerprint", "tokens", "chain")}
    return value[:32] + value[40:] if value.startswith(b"KVPG") else value
