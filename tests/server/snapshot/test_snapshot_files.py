"""The files of `kvpage dump`: any safetensors reader opens them, and damage is detected."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import redis
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keyspaces import BINARY, EIGHTS, HALVES, QUANTISED, everything, fill, set_block
from safetensors import safe_open
from servers import RunningServer
from test_kvpage_cli import kvpage

from kvpage_server.layouts import to_mlx
from kvpage_server.page import DType, PageHeader, PageKey, checksum
from kvpage_server.snapshot.format import (
    BadFile,
    DumpOf,
    FileContents,
    FoundPage,
    String,
    Tensor,
    bytes_of,
    entry_of,
    intact,
    opened,
    read_contents,
    tensors_of,
    text_of,
    write_file,
)


def found(
    layer: int = 0, head: int = 0, kv_type: int = 0, *, body: bytes = b"12345678", req_id: bytes = b"r"
) -> FoundPage:
    """A page of a server's; float16 ``[2, 2]`` where the body has 8 bytes."""
    key = PageKey(req_id, layer, head, 7, kv_type)
    header = PageHeader(DType.FLOAT16, kv_type, 2, 2, layer, head, 7, 1000, 60, len(body), checksum(body))
    return FoundPage(key, header, 59_000, memoryview(body))


def string(key: bytes, value: bytes) -> Tensor:
    return Tensor(String(key, len(value), -1, checksum(value)), [memoryview(value)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a plane, a page of no shape, and a string."""
    bodies = [random.Random(i).randbytes(8) for i in range(4)]
    plane = [found(i // 2, i % 2, body=body) for i, body in enumerate(bodies)]
    tensors = [*tensors_of([*plane, found(3, 1, 1, body=b"odd")]), string(b"s", b"value")]
    write_file(tmp_path / "pages-000001.safetensors", tensors, DumpOf(5, "everything"))
    return tmp_path / "pages-000001.safetensors"


def whole(file: Path) -> bool:
    """Return whether a file is accepted as intact."""
    try:
        contents = read_contents(file)
        with opened(contents) as data:
            return not contents.bad and all(all(intact(data, contents, span)) for span in contents.spans)
    except BadFile:
        return False


# -- readers -----------------------------------------------------------------------------------------------------------


def test_a_plane_is_a_tensor_of_layers_heads_tokens_and_dims(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    body = set_block(client, "q", 3, QUANTISED, ttl=100)
    client.execute_command("KVPAGESET", "one", 5, 8, 42, 0, 2, 1, 2, 0, np.array([1.5, -2], np.float32).tobytes())
    client.execute_command("KVPAGESET", "odd", 5, 8, 42, 0, 1, 128, 64, 3600, "BLOB_DATA")
    client.set(b"manifest:\xff", "text")
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    pages = safetensors.numpy.load_file(tmp_path / "pages-000002.safetensors")
    assert pages.keys() == {*(f"kv:q:*:*:3:{plane}" for plane in range(6)), "kv:one:5:8:42:0", "kv:odd:5:8:42:0"}
    for layer, planes in enumerate(to_mlx(body, QUANTISED)):
        for kv_type, values in planes.items():
            tensor = pages[f"kv:q:*:*:3:{kv_type}"]
            assert tensor.shape == (2, 2, 4, QUANTISED.planes[kv_type].head_dim)
            assert tensor.dtype == (np.uint32 if kv_type < 2 else np.float16)
            assert tensor[layer].tobytes() == values.tobytes()
    assert pages["kv:one:5:8:42:0"].tolist() == [[1.5, -2]]
    assert pages["kv:odd:5:8:42:0"].tobytes() == b"BLOB_DATA"
    strings = safetensors.numpy.load_file(tmp_path / "strings-000001.safetensors")
    assert {name: bytes(value) for name, value in strings.items()} == {"string:manifest:%FF": b"text"}
    with safe_open(tmp_path / "pages-000002.safetensors", "numpy") as reader:
        metadata = reader.metadata()
    received = json.loads(metadata["kv:q:*:*:3:2"])
    assert 95_000 < received.pop("ttl_left_ms") <= 100_000
    assert len(received.pop("checksum")) == 4
    assert received.pop("created_ms") > 0
    assert received == {
        "request": "q",
        "page": 3,
        "kv_type": 2,
        "layers": 2,
        "heads": 2,
        "dtype": "float16",
        "page_size": 4,
        "head_dim": 1,
        "ttl": 100,
        "unchecked": False,
    }


def test_bfloat16_and_float8_have_their_own_types(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    body = set_block(client, "half", 0, HALVES)
    set_block(client, BINARY, 1, EIGHTS)
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    (file,) = tmp_path.glob("pages-*")
    with safe_open(file, "numpy") as reader:
        kinds = {name: reader.get_slice(name).get_dtype() for name in reader.keys()}  # noqa: SIM118
        with pytest.raises(TypeError, match="bfloat16"):
            reader.get_tensor("kv:half:*:*:0:0")
    name = f"kv:{text_of(BINARY)}:*:*:1:"
    assert kinds == {
        "kv:half:*:*:0:0": "BF16",
        "kv:half:*:*:0:1": "BF16",
        f"{name}0": "F8_E4M3",
        f"{name}1": "F8_E5M2",
    }
    set_block(client, "half", 0, HALVES)
    kvpage("dump", str(tmp_path / "half"), "--request", "half", "--url", server.url)
    mx = pytest.importorskip("mlx.core")
    loaded = mx.load(str(tmp_path / "half" / "pages-000001.safetensors"))
    assert isinstance(loaded, dict)
    for layer, planes in enumerate(to_mlx(body, HALVES)):
        for kv_type, values in planes.items():
            tensor = loaded[f"kv:half:*:*:0:{kv_type}"]
            assert tensor.dtype == mx.bfloat16
            assert np.array(tensor[layer].view(mx.uint16)).tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", [np.bool_, np.uint16, np.int16, np.int32, np.uint64, np.int64, np.float64])
def test_elements_of_every_width_are_read_back(
    server: RunningServer, client: redis.Redis, tmp_path: Path, kind: type[np.generic]
) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], kind) * kind(3)
    dtype = DType[np.dtype(kind).name.upper()]
    client.execute_command("KVPAGESET", "wide", 0, 0, 0, 0, int(dtype), 2, 3, 0, values.tobytes())
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    (file,) = tmp_path.glob("pages-*")
    read = safetensors.numpy.load_file(file)["kv:wide:0:0:0:0"]
    assert read.dtype == values.dtype
    assert np.array_equal(read, values)
    client.flushall()
    assert kvpage("restore", str(tmp_path), "--url", server.url)[0] == 0
    assert client.execute_command("KVPAGEGET", "wide", 0, 0, 0, 0) == values.tobytes()


def test_tensors_lie_aligned_to_their_elements(tmp_path: Path) -> None:
    tensors = [*tensors_of([found(3, body=b"odd")]), *tensors_of([found(1)]), string(b"s", b"x")]
    contents = write_file(tmp_path / "f.safetensors", tensors, DumpOf(5, "everything"))
    assert contents.data % 64 == 0
    assert [(span.entry.in_file.element, span.start) for span in contents.spans] == [("F16", 0), ("U8", 8), ("U8", 11)]


# -- a written file can be read ----------------------------------------------------------------------------------------


@given(st.binary(max_size=40))
def test_every_key_has_a_name_of_its_own(key: bytes) -> None:
    name = text_of(key)
    assert bytes_of(name) == key
    assert name.encode().decode() == name


def test_names_are_readable_where_keys_are() -> None:
    assert text_of("agent/zähler@8".encode()) == "agent/zähler@8"
    assert text_of(b"50%\xff\n") == "50%25%FF\n"


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_the_metadata_is_parsed(layers: int, heads: int, data: st.DataObject) -> None:
    bodies = st.binary(min_size=8, max_size=8)
    pages = [found(i // heads, i % heads, body=data.draw(bodies), req_id=BINARY) for i in range(layers * heads)]
    (tensor,) = tensors_of(pages)
    entry, nbytes = tensor.entry, tensor.nbytes
    assert entry_of(entry.name, json.dumps(entry.note()), nbytes) == entry
    assert list(entry.headers()) == [page.header for page in pages]


def test_a_written_file_is_intact(file: Path) -> None:
    assert whole(file)
    contents = read_contents(file)
    assert contents.of == (5, "everything")
    assert [span.entry.name for span in contents.spans] == ["kv:r:*:*:7:0", "kv:r:3:1:7:1", "string:s"]
    assert file.stat().st_size == contents.size


# -- damage is detected ------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(file: Path, data: st.DataObject) -> None:
    written = bytearray(file.read_bytes())
    bit = data.draw(st.integers(0, len(written) * 8 - 1))
    written[bit // 8] ^= 1 << bit % 8
    other = file.with_name("flipped")
    other.write_bytes(written)
    assert not whole(other)


def test_a_torn_file_is_noticed_wherever_it_ends(file: Path) -> None:
    written = file.read_bytes()
    for length in range(0, len(written), 5):
        file.write_bytes(written[:length])
        assert not whole(file)
    file.write_bytes(written + b"\0")
    assert not whole(file)


def error_of(file: Path) -> str:
    with pytest.raises(BadFile) as error:
        read_contents(file)
    return str(error.value)


def test_other_files_are_recognised(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    for noise in (b"", b"kv", b"\xff" * 100, bytes(8)):
        file.write_bytes(noise)
        assert error_of(file).startswith("it is torn, or no safetensors file")
    for header in (b"[]", b"null"):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert error_of(file) == "it is not of kvpage dump"
    deep = b"[" * 100_000
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert error_of(file) == "it is torn, or no safetensors file: lists or objects are nested too deeply"
    safetensors.numpy.save_file({"a": np.zeros(3)}, file)
    assert error_of(file) == "it is not of kvpage dump"
    safetensors.numpy.save_file({"a": np.zeros(3)}, file, {"format": "kvpage-dump", "version": "3"})
    assert error_of(file) == "it is of version 3 of the format; this kvpage reads 1 and 2"


def forged(file: Path, **changes: object) -> FileContents:
    """Write a file with a valid digest whose page is described as something else, and read it."""
    (tensor,) = tensors_of([found(1)])
    entry, note = tensor.entry, tensor.entry.note() | changes
    forgery = SimpleNamespace(in_file=entry.in_file, note=lambda: note)
    write_file(file, [Tensor(forgery, tensor.pieces)], DumpOf(1, "everything"))  # type: ignore[arg-type]
    return read_contents(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"request": "other"},
        {"request": "a:b"},
        {"layers": 0, "heads": 4},
        {"layers": -2, "heads": -2},
        {"layers": 65536, "heads": 65536},
        {"dtype": "complex"},
        {"dtype": "float32"},
        {"kv_type": 9},
        {"page_size": 0},
        {"page_size": 3},
        {"ttl_left_ms": "soon"},
        {"ttl": [1, 2]},
        {"checksum": "no hex"},
        {"created_ms": -1},
    ],
)
def test_a_note_that_makes_no_sense_is_left_out(tmp_path: Path, changes: dict[str, object]) -> None:
    assert forged(tmp_path / "x.safetensors").spans[0].entry.name == "kv:r:1:0:7:0"
    contents = forged(tmp_path / "x.safetensors", **changes)
    assert not contents.spans
    assert [name for name, _ in (bad.split(": ", 1) for bad in contents.bad)] == ["kv:r:1:0:7:0"]


# -- a restore omits damaged entries -----------------------------------------------------------------------------------


def damage(file: Path, at: int = -1) -> None:
    written = bytearray(file.read_bytes())
    written[at] ^= 1
    file.write_bytes(written)


def test_a_corrupt_page_is_reported_and_skipped(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    set_block(client, "r", 0, HALVES)
    set_block(client, "r", 1, HALVES)
    client.set("s", "t")
    before, _ = everything(client)
    kvpage("dump", str(tmp_path), "--url", server.url)
    file = tmp_path / "pages-000002.safetensors"
    name = read_contents(file).spans[-1].entry.name.replace("*:*", "1:1")
    damage(file)
    for command in (("inspect", "--verify"), ("restore", "--url", server.url)):
        client.flushall()
        code, shown, _ = kvpage(command[0], str(tmp_path), *command[1:])
        assert code == 1
        assert f"  {name} in pages-000002.safetensors: its bytes are not those that were written\n" in shown
    after, _ = everything(client)
    assert after == {key: held for key, held in before.items() if key != name.encode()}


def test_a_file_that_is_not_whole_is_reported_and_skipped(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    fill(client)
    kvpage("dump", str(tmp_path), "--url", server.url)
    files = sorted(tmp_path.glob("*.safetensors"))
    strings, pages = files[1], files[0]
    written = pages.read_bytes()
    other = strings.read_bytes()
    for content, what in (
        (written[:-1], "it is torn: it has "),
        (written[:500], "it is torn, or no safetensors file"),
        (written.replace(b"float8_e4m3", b"float8_e5m2", 1), "its header is corrupt"),
        (other, "it is another file than the one that was written"),
        (None, "it is missing"),
    ):
        client.flushall()
        pages.unlink(missing_ok=True)
        if content is not None:
            pages.write_bytes(content)
        code, shown, _ = kvpage("restore", str(tmp_path), "--url", server.url)
        assert code == 1
        assert f"  {pages.name}: {what}" in shown
        assert shown.startswith("0 pages and 5 strings")
        assert client.dbsize() == 5
        assert kvpage("inspect", str(tmp_path))[0] == 1


def test_a_wrong_summary_is_named_and_the_files_are_restored(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    fill(client)
    count = client.dbsize()
    kvpage("dump", str(tmp_path), "--url", server.url)
    summary = tmp_path / "dump.json"
    written = summary.read_text(encoding="utf-8")
    for content, what in (
        ("{", "is corrupt"),
        ("[]", "is not of kvpage dump"),
        (written.replace("pages-", "../pages-"), "is corrupt: files must be names of files of a dump"),
        (written.replace("dumped_ms", "dumped"), "is corrupt: dumped_ms must be between 0 and"),
    ):
        summary.write_text(content, encoding="utf-8")
        client.flushall()
        code, shown, errors = kvpage("restore", str(tmp_path), "--url", server.url)
        assert (code, errors) == (1, "")
        assert f"  dump.json {what}" in shown
        assert "the dump was never finished" in shown
        assert client.dbsize() == count
        code, shown, errors = kvpage("inspect", str(tmp_path))
        assert (code, errors) == (1, "")
        assert f"  dump.json {what}" in shown
        code, _, errors = kvpage("dump", str(tmp_path), "--update", "--url", server.url)
        assert (code, errors.count("\n")) == (1, 1)
        assert what in errors


@pytest.mark.parametrize("finished", [True, False])
def test_a_dump_of_another_version_is_refused_unchanged(
    server: RunningServer, client: redis.Redis, tmp_path: Path, finished: bool
) -> None:
    client.set("string", "value")
    kvpage("dump", str(tmp_path), "--url", server.url)
    client.flushall()
    name = "dump.json" if finished else "strings-000001.safetensors"
    file = tmp_path / name
    file.write_bytes(re.sub(rb'("version": ?)"1"', rb'\1"3"', file.read_bytes()))
    if not finished:
        (tmp_path / "dump.json").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    reason = f"{file}: it is of version 3 of the format; this kvpage reads {'1' if finished else '1 and 2'}"
    for words in (["dump"], ["dump", "--update"], *([["restore"], ["restore", "--json"]] if finished else [])):
        assert kvpage(*words, str(tmp_path), "--url", server.url) == (1, "", f"kvpage: {reason}\n")
    code, shown, errors = kvpage("inspect", str(tmp_path))
    assert (code, errors) == (1, f"kvpage: {reason}\n" if finished else "")
    assert finished or reason.partition("/strings")[2] in shown
    assert client.dbsize() == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_one_file_of_another_version_is_reported(
    server: RunningServer, client: redis.Redis, tmp_path: Path, finished: bool
) -> None:
    """The others are restored, also without dump.json."""
    fill(client)
    kvpage("dump", str(tmp_path), "--url", server.url)
    if not finished:
        (tmp_path / "dump.json").unlink()
    file = tmp_path / "strings-000001.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"version":"1"', b'"version":"3"'))
    client.flushall()
    code, shown, errors = kvpage("restore", str(tmp_path), "--url", server.url)
    assert (code, errors) == (1, "")
    assert f"  {file.name}: it is of version 3 of the format; this kvpage reads 1 and 2\n" in shown
    assert client.dbsize() > 0


@pytest.mark.parametrize("version", ["null", "true", "-1", "1.5", "[1]", "{}", '"x"', '"-1"', '"\u0663"'])
def test_a_damaged_version_of_dump_json_loses_no_file(
    server: RunningServer, client: redis.Redis, tmp_path: Path, version: str
) -> None:
    client.set("string", "value")
    kvpage("dump", str(tmp_path), "--url", server.url)
    client.flushall()
    file = tmp_path / "dump.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"version": "1"', f'"version": {version}'), "utf-8")
    code, shown, errors = kvpage("restore", str(tmp_path), "--url", server.url)
    assert (code, errors) == (1, "")
    got = json.dumps(json.loads(version))
    assert f"  dump.json: it is corrupt: version must be digits, got {got}\n" in shown
    assert client.get("string") == b"value"


def test_files_of_others_in_the_directory_are_left_alone(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    client.set("s", "t")
    safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    assert kvpage("restore", str(tmp_path), "--url", server.url)[0] == 0
    assert kvpage("dump", str(tmp_path), "--update", "--url", server.url)[0] == 0
    assert (tmp_path / "model.safetensors").exists()
    code, shown, _ = kvpage("inspect", str(tmp_path / "model.safetensors"))
    assert code == 1
    assert "  model.safetensors: it is not of kvpage dump\n" in shown


# -- inspect -------------------------------------------------------------------------------------------------------


def test_inspect_shows_a_dump_without_a_server(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    fill(client)
    kvpage("dump", str(tmp_path), "--url", server.url)
    code, shown, _ = kvpage("inspect", str(tmp_path))
    assert code == 0
    assert shown.startswith("a dump of everything, just now: 2 files, ")
    rows = [line.split() for line in shown.splitlines()]
    assert ["chat-7", "bfloat16", "59", "min", "59", "s", "4", "32", "1.8", "KiB"] in rows
    assert ["quantised", "float16", "uint32", "for", "ever", "1", "24", "384", "bytes"] in rows
    assert [r"r\xff\xe9%41*", "bfloat16", "for", "ever", "1", "8", "448", "bytes"] in rows
    assert ["plain", "strings", "1", "h", "59", "min", "5", "293", "KiB"] in rows
    code, shown, _ = kvpage("inspect", str(tmp_path), "--request", "quantised", "--verify")
    assert code == 0
    rows = [line.split() for line in shown.splitlines()]
    k_scales = "kv:quantised:*:*:0:2 K_SCALES 4 tokens x 1 float16 for ever 2 x 2 x 4 x 1 32 bytes"
    assert k_scales.split() in rows
    assert len(rows) == 9
    assert rows[-1] == ["all", "of", "it", "is", "intact"]
    assert kvpage("inspect", str(tmp_path / "pages-000002.safetensors"))[1].startswith("a file of a dump: 1 file, ")
    (tmp_path / "dump.json").unlink()
    code, shown, _ = kvpage("inspect", str(tmp_path), "--verify")
    assert (code, shown.startswith("a dump that was never finished: 2 files, ")) == (1, True)
    assert shown.endswith("none of its files is corrupt, but some may be missing\n")
    assert json.loads(kvpage("inspect", str(tmp_path), "--json")[1])["finished"] is False
    code, shown, _ = kvpage("restore", str(tmp_path), "--url", server.url)
    assert code == 1
    assert "the dump was never finished: this is what there was of it\n" in shown
    assert kvpage("inspect", str(tmp_path / "nothing"))[0] == 1
