"""With any file in the directory of cold files, its agent starts afresh, and soon."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contexts import SPEC, made, some_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import pool_of

# isort: split
from engine.pool import BlockPool
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.store import AgentCacheStore

TOKENS = some_tokens(4, 20)
SOON = 10.0  # seconds, on a machine that does other things; a good file of this size takes a millisecond

Header = dict[str, Any]


pool = pool_of(64)


@pytest.fixture
def cold(tmp_path: Path, pool: BlockPool) -> SafetensorsCacheAdapter:
    return SafetensorsCacheAdapter(SPEC, pool, tmp_path)


def good(pool: BlockPool, cold: SafetensorsCacheAdapter) -> tuple[Path, Header, bytes]:
    """A file that is in order, its header and its bodies."""
    context = made(pool, "alice", TOKENS)
    cold.save(context)
    pool.free(context.block_ids)
    path = cold._directory / "alice.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return path, json.loads(raw[8:end]), raw[end:]


def write(path: Path, header: Header | bytes, bodies: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bodies)


def refused(cold: SafetensorsCacheAdapter, store: AgentCacheStore) -> str | None:
    """Why the agent's file is of no use; that is known soon, and the agents are listed meanwhile."""
    began = time.perf_counter()
    context, reason = cold.find("alice", TOKENS)
    assert time.perf_counter() - began < SOON
    assert context is None
    assert cold.load("alice") is None
    assert cold.reach("alice", TOKENS) == 0
    assert [info.agent_id for info in store.agents()] == ["alice"]
    assert store.load("alice", TOKENS) is None
    return reason


def changed(**metadata: Any) -> Callable[[Header], Header]:
    return lambda header: {**header, "__metadata__": {**header["__metadata__"], **metadata}}


def first(**fields: Any) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        name = next(name for name in header if name != "__metadata__")
        return {**header, name: {**header[name], **fields}}

    return change


def shaped(change: Callable[[list[int]], Any]) -> Callable[[Header], Header]:
    def to(header: Header) -> Header:
        name = next(name for name in header if name != "__metadata__")
        return {**header, name: {**header[name], "shape": change(header[name]["shape"])}}

    return to


def tensors(count: int) -> Callable[[Header], Header]:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return lambda header: {**header, **{f"t{i}": empty for i in range(count)}}


HOSTILE: dict[str, Callable[[Header], Header | bytes]] = {
    "nested deeply": lambda header: b"[" * 5_000_000,
    "nested deeply in a name": lambda header: b'{"a":' * 500_000 + b"0" + b"}" * 500_000,
    "nested within what is there": lambda header: json.dumps(header).encode()[:-1] + b',"x":' + b"[" * 10_000,
    "a list of millions": lambda header: b"[" + b"0," * 7_000_000 + b"0]",
    "a hundred thousand tensors": tensors(100_000),
    "ten thousand tensors": tensors(10_000),
    "longer than a header may be": lambda header: b" " * (17 << 20),
    "fractions for a shape": shaped(lambda shape: [float(n) for n in shape]),
    "one fraction": shaped(lambda shape: [*shape[:-1], shape[-1] + 0.5]),
    "infinite": lambda header: json.dumps(shaped(lambda shape: [float("inf")])(header)).encode(),
    "negative": shaped(lambda shape: [-shape[0], -shape[1], *shape[2:]]),
    "enormous": shaped(lambda shape: [1 << 62] * 8),
    "of many dimensions": shaped(lambda shape: [*shape, *[1] * 100_000]),
    "true": shaped(lambda shape: [True, *shape]),
    "no shape": shaped(lambda shape: None),
    "a shape in letters": shaped(lambda shape: "abc"),
    "long numbers": shaped(lambda shape: [int("9" * 4000)]),
    "another dtype": first(dtype="F7"),
    "a dtype that is a list": first(dtype=[[]]),
    "places in fractions": first(data_offsets=[0.0, 1.5]),
    "places that are none": first(data_offsets=None),
    "a tensor that is none": lambda header: {**header, "x": None},
    "metadata that is none": lambda header: {**header, "__metadata__": None},
    "metadata that is a list": lambda header: {**header, "__metadata__": []},
    "metadata of numbers": changed(tokens=5),
    "more tokens than there is room for": changed(total_tokens=str(10**15)),
    "as many as memory": changed(total_tokens="9" * 4000),
    "tokens that are none": changed(total_tokens="many"),
    "tokens nested deeply": changed(tokens="[" * 1_000_000),
    "tokens in lists": changed(tokens="[" + "[]," * 1_000_000 + "0]"),
    "tokens in letters": changed(tokens=json.dumps("a" * len(TOKENS)), total_tokens=str(len(TOKENS))),
    "tokens in fractions": changed(tokens=json.dumps([float(token) for token in TOKENS])),
    "negative tokens": changed(tokens=json.dumps([-1, *TOKENS[1:]])),
    "tokens that the model has not": changed(tokens=json.dumps([97, *TOKENS[1:]])),
    "states that are none": changed(states="[[]]"),
    "states in fractions": changed(states="[8.0]"),
    "one state again and again": changed(states=json.dumps([8] * 100_000)),
    "half a letter": changed(digest="\ud800" * 16),
    "an empty digest": changed(digest=""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_a_miss_with_a_reason(name: str, cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    path, header, bodies = good(pool, cold)
    store = AgentCacheStore(SPEC, pool, cold=cold)
    write(path, HOSTILE[name](header), bodies)
    assert refused(cold, store) in ("damaged", "schema")
    context = made(pool, "alice", TOKENS)
    assert cold.save(context), "a new one takes its place"
    pool.free(context.block_ids)
    found = cold.load("alice", TOKENS)
    assert found
    pool.free(found.block_ids)
    store.close()


def test_anything_but_a_file_is_a_miss(cold: SafetensorsCacheAdapter, pool: BlockPool, tmp_path: Path) -> None:
    """A pipe that nobody writes to would be read for ever."""
    store = AgentCacheStore(SPEC, pool, cold=cold)
    path = tmp_path / "alice.safetensors"
    os.mkfifo(path)
    assert refused(cold, store) == "damaged"
    path.unlink()
    path.mkdir()
    assert refused(cold, store) == "EISDIR"
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert refused(cold, store) == "damaged"
    path.unlink()
    path.symlink_to(path)
    assert refused(cold, store) == "ELOOP"
    store.close()


def test_files_that_are_no_agents_are_not_listed(
    tmp_path: Path, cold: SafetensorsCacheAdapter, pool: BlockPool
) -> None:
    path, _, _ = good(pool, cold)
    for name in (b"bad\nname", b"\xff\xfe", b"a" * 200, b"a b", b".x"):
        (tmp_path / os.fsdecode(name + b".safetensors")).write_bytes(path.read_bytes())
    assert cold.agents() == ["alice"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_changed_header_is_detected(data: st.DataObject, cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    """Something in it is another: nothing raises, nothing hangs, and nothing of it is believed."""
    path, header, bodies = good(pool, cold)
    raw = json.dumps(header)
    places = ["__metadata__", *header["__metadata__"], *header]
    name = data.draw(st.sampled_from(places))
    inner = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda values: st.lists(values, max_size=5) | st.dictionaries(st.text(), values, max_size=3),
    )
    holder = header if name in header else header["__metadata__"]
    if name in header and name != "__metadata__" and data.draw(st.booleans()):
        holder, name = header[name], data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    holder[name] = data.draw(inner)
    if json.dumps(header) == raw:
        return
    write(path, header, bodies)
    context, reason = cold.find("alice", TOKENS)
    assert (context, cold.load("alice")) == (None, None)
    assert reason in ("damaged", "schema", "version", "agent", "fingerprint")
