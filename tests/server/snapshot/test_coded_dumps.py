"""`kvpage dump --code`: safetensors files with the lossless code of pages, and damage that restores nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import safetensors.numpy
from hostile_dumps import BAD, DIGEST, forge, page_note, tensor
from keyspaces import block, cache, check_same, everything, set_block
from servers import RunningServer
from test_kvpage_cli import kvpage
from test_snapshot import EVERYTHING

from kvpage_server.lossless import decode_body, encode_block_body
from kvpage_server.page import BlockShape, DType, PageKey, Plane, checksum, encode_page
from kvpage_server.snapshot import restore as restoring
from kvpage_server.snapshot.dump import dump
from kvpage_server.snapshot.format import PageTensor, intact, opened, read_contents
from kvpage_server.snapshot.restore import restore
from kvpage_server.snapshot.store import RunningStore

SHAPE = BlockShape(2, 3, 16, (Plane(0, DType.BFLOAT16, 64), Plane(1, DType.FLOAT32, 64), Plane(2, DType.INT8, 8)))


@pytest.fixture
def store(server: RunningServer, client: redis.Redis) -> Iterator[RunningStore]:
    with RunningStore(server.url) as store:
        yield store


def set_cache(client: redis.Redis, req: str, page: int, ttl: int = 0) -> bytes:
    """Store a block whose planes of bfloat16 and float32 have a code; its body."""
    halves, words = (cache(page, 16, dtype, 6) for dtype in (DType.BFLOAT16, DType.FLOAT32))
    bytes_ = random.Random(page).randbytes(6 * 16 * 8)
    layers = [
        part[layer * len(part) // 2 : (layer + 1) * len(part) // 2]
        for layer in range(2)
        for part in (halves, words, bytes_)
    ]
    body = b"".join(layers)
    planes = [number for plane in SHAPE.planes for number in (plane.kv_type, int(plane.dtype), plane.head_dim)]
    client.execute_command("KVBLOCKSET", req, page, 2, 3, 16, ttl, 3, *planes, body)
    return body


def fill(client: redis.Redis) -> None:
    """Store blocks and a page with a code, a block and a page without, and a string."""
    for page in range(4):
        set_cache(client, "chat", page, ttl=3600 * (page % 2))
    set_block(client, "random", 0, block([(0, DType.BFLOAT16, 8), (1, DType.BFLOAT16, 6)]))
    key = PageKey(b"single", 3, 1, 4, 1)
    client.set(bytes(key), encode_page(key, cache(7, 128), dtype=DType.BFLOAT16, page_size=128, head_dim=64))
    odd = PageKey(b"single", 3, 1, 5, 1)
    client.set(bytes(odd), encode_page(odd, b"odd", dtype=DType.BFLOAT16, page_size=128, head_dim=64))
    client.set("string:coded", "a string")


def test_a_coded_dump_is_restored(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    before = everything(client)
    dumped = dump(store, tmp_path, EVERYTHING, code=True)
    assert (dumped.amount.pages + dumped.amount.strings, dumped.corrupt.texts) == (len(before[0]), [])
    assert dumped.stored < 0.85 * dumped.amount.nbytes
    client.flushall()
    restored = restore(store, tmp_path)
    assert restored.amount.pages == dumped.amount.pages
    assert (restored.there, restored.corrupt.texts, restored.finished) == (0, [], True)
    check_same(client, before)


def test_any_reader_opens_a_coded_file(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    body = set_cache(client, "chat", 0)
    dump(store, tmp_path, EVERYTHING, code=True)
    (file,) = tmp_path.glob("pages-*")
    tensors = safetensors.numpy.load_file(file)
    assert sorted(tensors) == ["kv:chat:*:*:0:0:coded", "kv:chat:*:*:0:1:coded", "kv:chat:*:*:0:2"]
    coded = tensors["kv:chat:*:*:0:0:coded"]
    plane = bytearray(6 * 16 * 64 * 2)
    decode_body(coded, memoryview(plane))
    assert (coded.dtype, coded.ndim) == (np.uint8, 1)
    assert plane[: len(plane) // 2] == body[: len(plane) // 2]  # the first layer's keys
    with safetensors.safe_open(file, "numpy") as opened_file:
        metadata = opened_file.metadata()
    assert json.loads(metadata["kv:chat:*:*:0:0:coded"])["code"] == "lossless"
    assert metadata["version"] == "2"


def test_a_dump_without_the_option_has_the_old_version(
    client: redis.Redis, store: RunningStore, tmp_path: Path
) -> None:
    fill(client)
    dump(store, tmp_path, EVERYTHING)
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "numpy") as opened_file:
            assert opened_file.metadata()["version"] == "1"
            names = [*opened_file.keys()]
            assert not [name for name in names if name.startswith("kv:") and name.endswith(":coded")]


def test_an_update_keeps_raw_and_coded_files(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    dump(store, tmp_path, EVERYTHING, code=True)
    set_cache(client, "later", 9)
    before = everything(client)
    dumped = dump(store, tmp_path, EVERYTHING, update=True)
    assert (dumped.kept, dumped.files) == (2, 3)
    assert dump(store, tmp_path, EVERYTHING, update=True, code=True).kept == 3
    client.flushall()
    restore(store, tmp_path)
    check_same(client, before)


def test_a_coded_tensor_is_restored_by_pages(
    client: redis.Redis, store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client)
    before = everything(client)
    dump(store, tmp_path, EVERYTHING, code=True)
    client.flushall()
    monkeypatch.setattr(restoring, "_SHARE", 1 << 20)  # blocks are larger than the share of the largest command
    monkeypatch.setattr(restoring, "PART_BYTES", 2000)
    assert restore(store, tmp_path).corrupt.texts == []
    check_same(client, before)


def test_the_commands_report_the_code(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    fill(client)
    directory = str(tmp_path / "dump")
    code, shown, errors = kvpage("dump", "--code", directory, "--url", server.url)
    assert (code, errors) == (0, "")
    assert ", coded as " in shown
    code, shown, errors = kvpage("inspect", "--verify", directory)
    assert (code, errors) == (0, "")
    assert "bfloat16, coded" in shown
    assert "all of it is intact" in shown
    code, shown, errors = kvpage("inspect", "--request", "chat", directory)
    assert (code, errors) == (0, "")
    assert "2 x 3 x 16 x 64" in shown
    code, shown, _ = kvpage("dump", "--json", "--code", "--update", directory, "--url", server.url)
    counts = json.loads(shown)
    assert counts["stored_bytes"] < counts["bytes"]


def test_damage_of_a_code_restores_nothing_wrong(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    """Every byte of the first 100, and some of the others, is changed."""
    set_cache(client, "chat", 0)
    before = everything(client)[0]
    dump(store, tmp_path, EVERYTHING, code=True)
    (file,) = tmp_path.glob("pages-*")
    contents, data = read_contents(file), file.read_bytes()
    coded = [span for span in contents.spans if isinstance(span.entry, PageTensor) and span.entry.code_size]
    assert len(coded) == 2
    rng = random.Random(1)
    for start, stop in ((span.start, span.stop) for span in coded):
        for at in [*range(start, start + 100), *rng.sample(range(start, stop), 20)]:
            changed = bytearray(data)
            changed[contents.data + at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            with opened(contents) as opened_file:
                found = {span.entry.name: [*intact(opened_file, contents, span)] for span in contents.spans}
            assert sum(map(all, found.values())) == 2
            if at % 10:
                continue
            client.flushall()
            restored = restore(store, tmp_path)
            assert (restored.amount.pages, restored.corrupt.count) == (12, 6)
            now = everything(client)[0]
            assert now == {key: before[key] for key in now}


BODY = cache(3, 16)
CODE = encode_block_body(BODY, BlockShape(1, 1, 16, (Plane(0, DType.BFLOAT16, 64),)))
NAME = "kv:r:0:0:7:0"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"head_dim": 32}, f"{NAME} in {BAD}: its bytes are not those"),
        ({"dtype": "float16"}, f"{NAME} in {BAD}: its bytes are not those"),
        ({"dtype": "float16", "checksum": f"{checksum(BODY):016x}"}, f"{NAME} in {BAD}: its bytes are not those"),
        ({"page_size": 32, "head_dim": 32, "checksum": f"{checksum(BODY):016x}"}, "its bytes are not those"),
        ({"checksum": DIGEST}, f"{NAME} in {BAD}: its bytes are not those"),
        ({"page_size": 1 << 20}, ":coded: 134217728 bytes do not have a code of"),
        ({"page_size": 1 << 31}, ":coded: 274877906944 bytes do not have a code of"),
        ({"page_size": -16}, ":coded: -2048 bytes do not have a code of"),
        ({"page_size": 0}, ":coded: 0 bytes do not have a code of"),
        ({"code": "zip"}, ":coded: its code must be lossless with at least one byte"),
        ({"code": [[]]}, ":coded: its code must be lossless with at least one byte"),
        ({"code": None}, ":coded: its code must be lossless with at least one byte"),
        ({"page": 8}, ":coded: its note is that of kv:r:0:0:8:0:coded"),
    ],
)
def test_a_hostile_note_costs_its_tensor(
    server: RunningServer, client: redis.Redis, tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    assert CODE is not None
    note = page_note(dtype="bfloat16", page_size=16, head_dim=64, code="lossless") | changes
    forge(tmp_path / BAD, {NAME + ":coded": tensor(note, len(CODE))}, bytes(CODE))
    code, shown, errors = kvpage("restore", str(tmp_path), "--url", server.url)
    assert (code, errors) == (1, ""), shown
    assert line in shown
    assert client.dbsize() == 0
    code, shown, errors = kvpage("inspect", "--verify", str(tmp_path))
    assert (code, errors) == (1, "")
    assert line in shown


def test_an_older_reader_refuses_a_coded_tensor(tmp_path: Path) -> None:
    """An older program does not know the field `code`."""
    assert CODE is not None
    note = page_note(dtype="bfloat16", page_size=16, head_dim=64)
    forge(tmp_path / BAD, {NAME + ":coded": tensor(note, len(CODE))}, bytes(CODE))
    contents = read_contents(tmp_path / BAD)
    assert (contents.spans, contents.bad) == ([], [f"{NAME}:coded: its note is that of {NAME}"])
