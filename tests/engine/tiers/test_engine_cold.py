"""The cold tier: files that any safetensors reader opens, whole or not at all, and never believed when wrong."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from block_pages import page_bodies
from engine_models import letter_tokenizer, tiny, tiny_llama
from pools import pool_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from safetensors import safe_open

from engine.batch_engine import BlockPoolBatchEngine
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, BlockError, IncompatibleBlocksError
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.server.lookup import FetchReport
from kvpage_server.system.durable import remove_unfinished, replacing

MODEL = tiny_llama()
TOKENIZER = letter_tokenizer()
SPEC = ModelCacheSpec.probe(MODEL, TOKENIZER, model_id="tiny")
TOKENS = tuple(np.random.default_rng(5).integers(0, 96, 700).tolist())


pool = pool_of(32)


@pytest.fixture
def cold(tmp_path: Path, pool: BlockPool) -> SafetensorsCacheAdapter:
    return SafetensorsCacheAdapter(SPEC, pool, tmp_path)


def computed(
    model: Any,
    spec: ModelCacheSpec,
    tokens: Sequence[int],
    checkpoints: Sequence[int] = (),
    *,
    held: Any = None,
    agent_id: str = "alice",
) -> AgentBlocks:
    """A context as an engine leaves it, outside of any pool."""
    held = held or make_prompt_cache(model)
    states = {}
    for start, end in pairwise([0, *checkpoints, len(tokens)]):
        mx.eval(model(mx.array([tokens[start:end]]), cache=held))
        if end in checkpoints:
            states[end] = kvcache.capture(spec, held)
    blocks = kvcache.extract(spec, held, range(spec.blocks_for(len(tokens))), len(tokens), 0, states)
    return AgentBlocks(agent_id, tuple(tokens), blocks, spec.fingerprint)


@cache
def context(tokens: tuple[int, ...] = TOKENS, agent_id: str = "alice") -> AgentBlocks:
    return computed(MODEL, SPEC, tokens, agent_id=agent_id)


def bits(context: AgentBlocks) -> list[list[bytes]]:
    """Return the pages and states of every block."""
    return [[*map(bytes, page_bodies(b.layers)), *map(bytes, page_bodies(b.state or ()))] for b in context.blocks]


def fetch_same(tier: PageTier, saved: AgentBlocks, pool: BlockPool) -> FetchReport:
    """Fetch alice's context, check that it has the bytes of the saved one, and free it. Return the fetch's report."""
    fetch = tier.fetch("alice", TOKENS)
    found = fetch.result()
    assert found
    assert bits(found) == bits(saved)
    pool.free(found.block_ids, "alice")
    return fetch.report


@contextmanager
def loaded(cold: SafetensorsCacheAdapter, agent_id: str = "alice", tokens: Sequence[int] | None = None) -> Any:
    """Load a context and free it; return it, or the reason of the miss."""
    before = cold.misses.copy()
    found = cold.load(agent_id, tokens)
    if found is None:
        (reason,) = cold.misses - before
        yield reason
    else:
        assert cold.misses == before
        yield found
        cold._pool.free(found.block_ids, agent_id)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 700])
def test_a_saved_context_is_loaded_bit_by_bit(cold: SafetensorsCacheAdapter, pool: BlockPool, count: int) -> None:
    saved = context(TOKENS[:count])
    assert cold.save(saved) == (cold._directory / "alice.safetensors").stat().st_size
    with loaded(cold) as found:
        assert (found.agent_id, found.tokens) == ("alice", saved.tokens)
        assert bits(found) == bits(saved)
        found.validate(SPEC)
        assert pool.holdings()["alice"].nbytes == count * SPEC.token_nbytes
        assert [block.nbytes for block in found.blocks] == [block.nbytes for block in saved.blocks]


def test_an_engine_continues_from_a_file_with_the_same_tokens(cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    batch = BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool)
    batch.submit("alice", TOKENS, max_tokens=20)
    (whole,) = batch.step()
    cold.save(whole.blocks)
    pool.free(whole.blocks.block_ids)
    prompt = whole.blocks.tokens[:710]
    with loaded(cold, tokens=prompt) as found:
        batch.submit("alice", prompt, found, max_tokens=10)
        (resumed,) = batch.step()
    assert resumed.tokens_reused == 709
    assert (*prompt, *resumed.tokens) == whole.blocks.tokens
    pool.free(resumed.blocks.block_ids)


def test_a_context_that_was_not_kept_changes_nothing_stored(cold: SafetensorsCacheAdapter) -> None:
    cold.save(context(TOKENS[:40]))
    assert cold.save(AgentBlocks("alice", (), (), SPEC.fingerprint)) == 0
    assert cold.save(AgentBlocks("bob", (), (), SPEC.fingerprint)) == 0
    assert cold.agents() == ["alice"]
    with loaded(cold) as found:
        assert found.tokens == TOKENS[:40]


def test_another_thread_may_save_and_load(cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    """Arrays that the thread of MLX receives are evaluated."""
    batch = BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool)
    batch.submit("alice", TOKENS[:300], max_tokens=5)
    (first,) = batch.step()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(cold.save, first.blocks).result()
        found = thread.submit(cold.load, "alice", first.blocks.tokens).result()
    assert bits(found) == bits(first.blocks)
    batch.submit("alice", [*found.tokens, 7], found, max_tokens=5)
    (second,) = batch.step()
    assert second.tokens_reused == len(found)
    for context in (first.blocks, found, second.blocks):
        pool.free(context.block_ids, "alice")


@pytest.mark.parametrize("common", [1, 255, 256, 300, 512, 699])
def test_a_diverging_prompt_loads_only_the_common_part(cold: SafetensorsCacheAdapter, common: int) -> None:
    cold.save(context())
    prompt = (*TOKENS[:common], (TOKENS[common] + 1) % 96, 5, 5)
    with loaded(cold, tokens=prompt) as found:
        assert found.tokens == TOKENS[:common]
        assert len(found.blocks) == SPEC.blocks_for(common)
        rows = [page for block in bits(found) for page in block]
        whole = [page for block in bits(context()) for page in block]
        assert all(all_rows.startswith(some) for some, all_rows in zip(rows, whole, strict=False))


def test_a_prompt_that_begins_otherwise_finds_nothing(cold: SafetensorsCacheAdapter) -> None:
    cold.save(context())
    with loaded(cold, tokens=((TOKENS[0] + 1) % 96, *TOKENS[1:])) as found:
        assert found == "absent"
    with loaded(cold, "bob") as found:
        assert found == "absent"


def test_plain_safetensors_reads_the_documented_schema(tmp_path: Path, pool: BlockPool) -> None:
    model = tiny_llama(dtype=mx.float16)
    spec = ModelCacheSpec.probe(model, TOKENIZER, model_id="half")
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    held = make_prompt_cache(model)
    cold.save(computed(model, spec, TOKENS[:300], held=held))
    tensors = safetensors.numpy.load_file(tmp_path / "alice.safetensors")
    assert set(tensors) == {f"{plane}_layer_{i}" for plane in "kv" for i in range(4)}
    for i, layer in enumerate(held):
        for plane, array in zip("kv", layer.keys_and_values(), strict=True):
            stored = tensors[f"{plane}_layer_{i}"]
            assert (stored.shape, stored.dtype) == ((2, 16, 300), np.float16)
            assert np.array_equal(stored.transpose(0, 2, 1), np.array(array[0]))
    with safe_open(tmp_path / "alice.safetensors", "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata.pop("tokens")) == list(TOKENS[:300])
    assert json.loads(metadata.pop("model_tag")) == {
        "n_layers": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "block_tokens": 256,
    }
    assert json.loads(metadata.pop("layers")) == ["KVCache"] * 4
    assert metadata.pop("created_at").startswith("20")
    assert len(metadata.pop("digest")) == 16
    assert metadata == {
        "version": "1",
        "agent_id": "alice",
        "model_id": "half",
        "fingerprint": f"{spec.fingerprint:016x}",
        "total_tokens": "300",
        "kv_bits": "",
        "kv_group_size": "",
        "v_head_dim": "16",
        "states": "[]",
    }


def test_mlx_reads_bfloat16_from_the_file(tmp_path: Path, pool: BlockPool) -> None:
    model = tiny_llama(dtype=mx.bfloat16)
    spec = ModelCacheSpec.probe(model, TOKENIZER)
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    held = make_prompt_cache(model)
    cold.save(computed(model, spec, TOKENS[:300], held=held))
    tensors = mx.load(str(tmp_path / "alice.safetensors"))
    for i, layer in enumerate(held):
        for plane, array in zip("kv", layer.keys_and_values(), strict=True):
            assert tensors[f"{plane}_layer_{i}"].dtype == mx.bfloat16
            assert mx.array_equal(tensors[f"{plane}_layer_{i}"].swapaxes(1, 2), array[0])


@pytest.mark.parametrize("bits_a_value", [4, 8])
def test_a_quantised_cache_can_be_dequantised_from_the_file(tmp_path: Path, pool: BlockPool, bits_a_value: int) -> None:
    model = tiny_llama(head_dim=64)
    empty = [QuantizedKVCache(64, bits_a_value) for _ in range(4)]
    spec = ModelCacheSpec.probe(model, TOKENIZER, cache=[QuantizedKVCache(64, bits_a_value) for _ in range(4)])
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    cold.save(computed(model, spec, TOKENS[:300], held=empty))
    tensors, metadata = mx.load(str(tmp_path / "alice.safetensors"), return_metadata=True)
    for i, layer in enumerate(empty):
        for plane, packed in zip("kv", (layer.keys, layer.values), strict=True):
            names = (f"{plane}_layer_{i}{part}" for part in ("", "_scales", "_biases"))
            of_file = mx.dequantize(*(tensors[name] for name in names), group_size=64, bits=bits_a_value)
            of_cache = mx.dequantize(*(array[0, :, :300] for array in packed), group_size=64, bits=bits_a_value)
            assert mx.array_equal(of_file, of_cache)
    assert (metadata["kv_bits"], metadata["kv_group_size"]) == (str(bits_a_value), "64")
    assert (json.loads(metadata["model_tag"])["head_dim"], metadata["v_head_dim"]) == (64, "64")


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "mamba2"])
def test_states_are_kept_where_they_were_taken(tmp_path: Path, pool: BlockPool, family: str) -> None:
    model = tiny(family)
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=64)
    saved = computed(model, spec, TOKENS[:150], [64, 128])
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path)
    assert cold.save(saved)
    with loaded(cold) as found:
        assert bits(found) == bits(saved)
        assert pool.holdings()["alice"].nbytes == sum(block.nbytes for block in saved.blocks)
    for prompt, reach in ((TOKENS[:151], 150), (TOKENS[:150], 128), (TOKENS[:129], 128), (TOKENS[:128], 64)):
        with loaded(cold, tokens=prompt) as found:
            assert len(found) == found.reusable(spec, len(prompt) - 1) == reach
            assert bits(found) == bits(saved)[: spec.blocks_for(reach)]
    with loaded(cold, tokens=TOKENS[:64]) as found:
        assert found == "absent"


def of_bfloat16() -> tuple[ModelCacheSpec, AgentBlocks]:
    """A context whose file has coded tensors, and its spec."""
    model = tiny_llama(dtype=mx.bfloat16)
    spec = ModelCacheSpec.probe(model, TOKENIZER, model_id="tiny")
    return spec, computed(model, spec, TOKENS[:300])


def test_a_coded_file_is_loaded_bit_by_bit(tmp_path: Path, pool: BlockPool) -> None:
    spec, saved = of_bfloat16()
    raw, coded = (SafetensorsCacheAdapter(spec, pool, tmp_path, code=code) for code in (False, True))
    size = raw.save(saved)
    assert size
    assert (coded.save(saved) or size) < 0.8 * size
    names = safetensors.numpy.load_file(tmp_path / "alice.safetensors").keys()
    assert set(names) == {f"{plane}_layer_{i}:coded" for plane in "kv" for i in range(4)}
    for cold in (raw, coded):
        with loaded(cold) as found:
            assert bits(found) == bits(saved)
        with loaded(cold, tokens=(*TOKENS[:260], 1)) as found:
            assert (len(found), bits(found)[0]) == (260, bits(saved)[0])
    assert raw.save(saved) == size
    with loaded(coded) as found:
        assert bits(found) == bits(saved)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "mamba2"])
def test_coded_states_are_loaded_bit_by_bit(tmp_path: Path, pool: BlockPool, family: str) -> None:
    model = tiny(family)
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=64)
    saved = computed(model, spec, TOKENS[:150], [64, 128])
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path, code=True)
    assert cold.save(saved)
    with loaded(cold) as found:
        assert bits(found) == bits(saved)


def test_every_changed_byte_of_a_coded_file_is_detected(tmp_path: Path, pool: BlockPool) -> None:
    spec, saved = of_bfloat16()
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path, code=True)
    cold.save(saved)
    path = tmp_path / "alice.safetensors"
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    places = random.Random(7)
    for at in (*range(start, start + 60), *(places.randrange(len(good)) for _ in range(100))):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << places.randrange(8)]) + good[at + 1 :])
        with loaded(cold) as found:
            assert isinstance(found, str), f"a changed bit in byte {at} was believed"


CODED_EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "another format": ("version", lambda header: header["__metadata__"].update(version="3")),
    "raw under the name of the code": ("schema", lambda header: header["k_layer_2:coded"].update(dtype="I8")),
    "in two dimensions": (
        "schema",
        lambda header: header["k_layer_2:coded"].update(shape=[1, *header["k_layer_2:coded"]["shape"]]),
    ),
    "the code under the name of the array": (
        "schema",
        lambda header: header.update(v_layer_3=header.pop("v_layer_3:coded")),
    ),
    "codes of each other": (
        "damaged",
        lambda header: header["__metadata__"].update(tokens=json.dumps([1] * 301), total_tokens="301"),
    ),
    "more tokens than codes can have": (
        "schema",
        lambda header: header["__metadata__"].update(tokens=json.dumps([1] * 100_000), total_tokens="100000"),
    ),
}


@pytest.mark.parametrize("name", CODED_EDITS)
def test_a_coded_file_that_contradicts_itself_is_a_miss(tmp_path: Path, pool: BlockPool, name: str) -> None:
    spec, saved = of_bfloat16()
    cold = SafetensorsCacheAdapter(spec, pool, tmp_path, code=True)
    cold.save(saved)
    reason, edit = CODED_EDITS[name]
    change(tmp_path / "alice.safetensors", edit)
    with loaded(cold) as found:
        assert found == reason


def test_another_models_file_is_a_miss(tmp_path: Path, cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    cold.save(context())
    other = ModelCacheSpec.probe(tiny_llama(seed=8), TOKENIZER, model_id="tiny")
    with loaded(SafetensorsCacheAdapter(other, pool, tmp_path)) as found:
        assert found == "fingerprint"
    with pytest.raises(IncompatibleBlocksError):
        SafetensorsCacheAdapter(other, pool, tmp_path).save(context())


def test_a_file_under_another_agents_name_is_a_miss(tmp_path: Path, cold: SafetensorsCacheAdapter) -> None:
    cold.save(context())
    (tmp_path / "alice.safetensors").rename(tmp_path / "mallory.safetensors")
    with loaded(cold, "mallory") as found:
        assert found == "agent"


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header by `edit`, as somebody would who knows the format but not the digest."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + length :])


EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "another format": ("version", lambda header: header["__metadata__"].update(version="3")),
    "no version": ("version", lambda header: header["__metadata__"].pop("version")),
    "no metadata": ("version", lambda header: header.pop("__metadata__")),
    "fewer tokens than rows": ("schema", lambda header: header["__metadata__"].update(tokens="[1, 2]")),
    "tokens that are none": ("schema", lambda header: header["__metadata__"].update(tokens="[true]", total_tokens="1")),
    "no list": ("schema", lambda header: header["__metadata__"].update(tokens="3")),
    "a state in nowhere": ("schema", lambda header: header["__metadata__"].update(states="[17]")),
    "a state that is not there": ("damaged", lambda header: header["__metadata__"].update(states="[256]")),
    "another dtype": ("schema", lambda header: header["k_layer_2"].update(dtype="U32")),
    "another shape": ("schema", lambda header: header["k_layer_2"].update(shape=[2, 300, 16])),
    "two layers with each other's names": (
        "schema",
        lambda header: header.update(k_layer_0=header["v_layer_0"], v_layer_0=header["k_layer_0"]),
    ),
    "other tokens": (
        "damaged",
        lambda header: header["__metadata__"].update(tokens=json.dumps([1] * 300)),
    ),
    "an unknown dtype": ("damaged", lambda header: header["k_layer_2"].update(dtype="F8")),
    "overlapping": ("damaged", lambda header: header["k_layer_2"].update(data_offsets=[0, 38400])),
    "an endless tensor": ("damaged", lambda header: header["v_layer_3"].update(data_offsets=[268800, 2**60])),
    "not a tensor": ("damaged", lambda header: header.update(k_layer_2=7)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_file_that_contradicts_itself_or_the_model_is_a_miss(
    tmp_path: Path, cold: SafetensorsCacheAdapter, name: str
) -> None:
    cold.save(context(TOKENS[:300]))
    reason, edit = EDITS[name]
    change(tmp_path / "alice.safetensors", edit)
    with loaded(cold) as found:
        assert found == reason


def test_nothing_is_read_of_a_file_that_does_not_fit(
    tmp_path: Path, cold: SafetensorsCacheAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.save(context())
    change(tmp_path / "alice.safetensors", lambda header: header["__metadata__"].update(fingerprint="0" * 16))
    read = []
    whole = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *args: read.append(args[-1]) or whole(*args))
    with loaded(cold) as found:
        assert found == "fingerprint"
    assert sum(read) < 10_000 < 700 * SPEC.token_nbytes


def test_every_changed_byte_is_detected(tmp_path: Path, cold: SafetensorsCacheAdapter) -> None:
    cold.save(context(TOKENS[:40]))
    path = tmp_path / "alice.safetensors"
    good = path.read_bytes()
    places = random.Random(6)
    for at in (*range(16), *(places.randrange(len(good)) for _ in range(300))):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << places.randrange(8)]) + good[at + 1 :])
        with loaded(cold) as found:
            assert isinstance(found, str), f"a changed bit in byte {at} was believed"
    path.write_bytes(good)
    with loaded(cold) as found:
        assert bits(found) == bits(context(TOKENS[:40]))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_a_file_that_is_cut_off_is_a_miss(tmp_path: Path, cold: SafetensorsCacheAdapter, keep: int) -> None:
    cold.save(context(TOKENS[:300]))
    path = tmp_path / "alice.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with loaded(cold) as found:
        assert found == "damaged"


@pytest.mark.parametrize("agent_id", ["", ".", "..", "../alice", "a/b", "/etc/passwd", "a\0b", ".tmp", "a" * 129, "ä"])
def test_agent_ids_cannot_leave_the_directory(tmp_path: Path, pool: BlockPool, agent_id: str) -> None:
    cold = SafetensorsCacheAdapter(SPEC, pool, tmp_path / "inside" / "caches")
    (tmp_path / "inside" / "alice.safetensors").write_bytes(b"another's")
    for attempt in (cold.load, cold.delete):
        with pytest.raises(BlockError, match="an agent id is"):
            attempt(agent_id)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["alice.safetensors"]


def test_without_free_blocks_nothing_is_loaded(cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    cold.save(context())
    held = pool.allocate(30)
    with loaded(cold) as found:
        assert found == "pool"
    pool.free(held)
    pool.reconfigure(total_bytes=700 * SPEC.token_nbytes - 1)
    with loaded(cold) as found:
        assert found == "pool"


def test_a_damaged_file_gives_its_blocks_back(tmp_path: Path, cold: SafetensorsCacheAdapter, pool: BlockPool) -> None:
    cold.save(context())
    with (tmp_path / "alice.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with loaded(cold) as found:
        assert found == "damaged"
    pool.check_empty()


def test_contexts_are_listed_and_deleted(cold: SafetensorsCacheAdapter) -> None:
    for agent in ("bob", "alice", "_carol.7"):
        cold.save(context(TOKENS[:9], agent))
    assert cold.agents() == ["_carol.7", "alice", "bob"]
    assert cold.delete("bob")
    assert not cold.delete("bob")
    assert cold.agents() == ["_carol.7", "alice"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, cold: SafetensorsCacheAdapter) -> None:
    """A limit on files' sizes is as good as a full disk, and ends with the test."""
    cold.save(context(TOKENS[:40]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert cold.save(context()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert cold.unsaved == {"EFBIG": 1}
    assert os.listdir(tmp_path) == ["alice.safetensors"]
    with loaded(cold) as found:
        assert found.tokens == TOKENS[:40]


def test_read_and_write_errors_are_reported(tmp_path: Path, cold: SafetensorsCacheAdapter) -> None:
    (tmp_path / "alice.safetensors").mkdir()
    with loaded(cold) as found:
        assert found == "EISDIR"
    assert cold.save(context(TOKENS[:40])) is None
    assert cold.unsaved == {"EISDIR": 1}
    assert os.listdir(tmp_path) == ["alice.safetensors"]


def test_a_file_is_durable_before_its_rename_and_after_it(
    tmp_path: Path, cold: SafetensorsCacheAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = Path.rename

    def renaming(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    def flushing(flush: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *rest: int) -> Any:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            done.append("flush file" if is_file else "flush directory")
            return flush(descriptor, *rest)

        return call

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr("kvpage_server.system.durable.flush", flushing(os.fsync))
    monkeypatch.setattr("os.fsync", flushing(os.fsync))
    cold.save(context(TOKENS[:40]))
    assert done[0] == "flush file"
    assert done[-2:] == ["rename", "flush directory"]


def test_only_abandoned_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".alice-abc.tmp").write_bytes(b"half")
    (tmp_path / "alice.safetensors").write_bytes(b"whole")
    with replacing(tmp_path / "bob.safetensors") as file:
        assert remove_unfinished(tmp_path) == 1
        file.write(b"bob's")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "alice.safetensors": b"whole",
        "bob.safetensors": b"bob's",
    }


SAVE_FOR_EVER = """
import itertools, sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_engine_cold import SPEC, TOKENS, context
from engine.pool import BlockPool
from engine.tiers.cold import SafetensorsCacheAdapter

cold = SafetensorsCacheAdapter(SPEC, BlockPool(1), Path({directory!r}))
contexts = [context(TOKENS), context(TOKENS[:400])]
for count in itertools.count():
    assert cold.save(contexts[count % 2])
    if not count:
        print("ready", flush=True)
"""


def stop_in_the_middle_of_a_save(engine: subprocess.Popen[str], directory: Path, after: float) -> None:
    """The process is stopped, not ended: it holds its lock."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(after)
        engine.send_signal(signal.SIGSTOP)
        os.waitpid(engine.pid, os.WUNTRACED)  # until it has stopped
        if any(directory.glob(".*.tmp")):
            return
        engine.send_signal(signal.SIGCONT)
    raise TimeoutError("no unfinished file was ever seen")


def test_an_engine_killed_while_it_saves_leaves_a_whole_context(tmp_path: Path, pool: BlockPool) -> None:
    """One of the two that it writes in turn, to the bit, at whichever moment; and nothing of the half-written one."""
    moments = random.Random(7)
    whole = {700: bits(context(TOKENS)), 400: bits(context(TOKENS[:400]))}
    code = SAVE_FOR_EVER.format(
        tests=[str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")], directory=str(tmp_path)
    )
    found_lengths = set()

    def look() -> None:
        with loaded(SafetensorsCacheAdapter(SPEC, pool, tmp_path)) as found:
            assert bits(found) == whole[len(found)]
            found_lengths.add(len(found))

    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8") as engine:
            try:
                assert engine.stdout
                assert engine.stdout.readline() == "ready\n"
                for _ in range(8):
                    stop_in_the_middle_of_a_save(engine, tmp_path, moments.uniform(0.002, 0.02))
                    look()
                    engine.send_signal(signal.SIGCONT)
                stop_in_the_middle_of_a_save(engine, tmp_path, 0.01)
            finally:
                engine.kill()
        assert any(tmp_path.glob(".*.tmp"))
        look()
        assert os.listdir(tmp_path) == ["alice.safetensors"]
    assert found_lengths == {400, 700}
