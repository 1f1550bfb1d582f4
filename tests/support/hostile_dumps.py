"""Generators of hostile files: each damages the directory of a good dump, or adds to it, in its own way."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

Make = Callable[[Path], object]  # of the directory
VALUE = b"value"
DIGEST = f"{xxhash.xxh3_64_intdigest(VALUE):016x}"
NOTE = {"ttl_left_ms": -1, "checksum": DIGEST}
NESTED = "[" * 5000 + "]" * 5000
BAD = "strings-000009.safetensors"  # the file that a generator writes


class Hostile(NamedTuple):
    """A damage, and the text of the line that names it."""

    name: str
    make: Make
    line: str


def forge(file: Path, header: dict[str, Any] | bytes, data: bytes | int = VALUE, metadata: Any = None) -> None:
    """A file of a dump with a right digest; as many bytes of data as a number says take no room on disk."""
    facts = {"digest": "0" * 16, "format": "kvpage-dump", "version": "1", "dumped_ms": "5", "selection": "everything"}
    if isinstance(header, dict):
        received = {name: json.dumps(received.pop("note")) for name, received in header.items() if "note" in received}
        header = {"__metadata__": facts | received if metadata is None else metadata, **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    else:
        text = header
    text = text.replace(b'"digest":"' + b"0" * 16, b'"digest":"' + xxhash.xxh3_64_hexdigest(text).encode(), 1)
    raw(file, len(text), text, data)


def raw(file: Path, length: int, text: bytes, data: bytes | int = b"") -> None:
    file.write_bytes(length.to_bytes(8, "little") + text + (data if isinstance(data, bytes) else b""))
    if isinstance(data, int):
        os.truncate(file, 8 + len(text) + data)


def tensor(note: Any = NOTE, nbytes: int = len(VALUE), **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes], "note": note} | changes


def page_note(**changes: Any) -> dict[str, Any]:
    about = {"request": "r", "page": 7, "kv_type": 0, "layer": 0, "head": 0, "dtype": "int8", "page_size": 1}
    times = {"head_dim": 5, "created_ms": 1, "ttl": 0, "ttl_left_ms": -1, "checksum": DIGEST, "unchecked": False}
    return about | times | changes


def page(name: str = "kv:r:0:0:7:0", **changes: Any) -> dict[str, Any]:
    return {name: tensor(page_note(**changes), dtype="I8", shape=[1, 5])}


def plane(layers: int, heads: int, nbytes: int) -> dict[str, Any]:
    """A plane of so many pages in `nbytes` bytes."""
    note = page_note(layers=layers, heads=heads, head_dim=nbytes // (layers * heads))
    del note["layer"], note["head"]
    shape = [layers, heads, 1, nbytes // (layers * heads)]
    return {"kv:r:*:*:7:0": tensor(note, nbytes, dtype="I8", shape=shape)}


def _summary(change: Callable[[str], str]) -> Make:
    def make(path: Path) -> None:
        file = path / "dump.json"
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")

    return make


def _summary_is(other: Callable[[Path], object]) -> Make:
    def make(path: Path) -> None:
        file = path / "dump.json"
        file.unlink()
        other(file)

    return make


def _file(header: dict[str, Any] | bytes, data: bytes | int = VALUE, metadata: Any = None) -> Make:
    return lambda path: forge(path / BAD, header, data, metadata)


def _string(name: str = "string:bad", **changes: Any) -> Make:
    return _file({name: tensor(**changes)})


def _bound(file: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(file))
    sock.close()


def _replaced(text: str, by: str) -> Make:
    return _summary(lambda received: received.replace(text, by, 1))


def _literal(tensors: str, notes: str = "", dumped_ms: str = "5") -> Make:
    """A file whose header has these tensors and notes as text."""
    facts = f'"digest":"{"0" * 16}","format":"kvpage-dump","version":"1","dumped_ms":"{dumped_ms}"'
    return _file(f'{{"__metadata__":{{{facts},"selection":"everything"{notes}}}{tensors}}}'.encode())


FIVE = '{"dtype":"U8","shape":[5],"data_offsets":[0,5]}'
LARGE = 1 << 40  # bytes

SUMMARIES = [
    Hostile("nested", _summary(lambda received: NESTED), "dump.json is corrupt: more than 8 lists and objects"),
    Hostile("1e999", _replaced('"dumped_ms": ', '"dumped_ms": 1e999, "x": '), "dump.json is corrupt: the number 1e999"),
    Hostile("NaN", _replaced('"dumped_ms": ', '"dumped_ms": NaN, "x": '), "dump.json is corrupt: NaN is no number"),
    Hostile("negative", _replaced('"dumped_ms": ', '"dumped_ms": -'), "dump.json is corrupt: dumped_ms must be"),
    Hostile("late", _replaced('"dumped_ms": ', '"dumped_ms": 99999'), "dump.json is corrupt: dumped_ms must be"),
    Hostile("float", _replaced('"dumped_ms": ', '"dumped_ms": 1.5, "x": '), "dumped_ms must be between 0 and"),
    Hostile(
        "pairs",
        _summary(
            lambda received: json.dumps(json.loads(received) | {"files": [*json.loads(received)["files"].items()]})
        ),
        "files an object",
    ),
    Hostile("twice", _replaced('"version"', '"version": "1", "version"'), "has the name 'version' twice"),
    Hostile("above", _replaced('"pages-', '"../pages-'), "files must be names of files of a dump"),
    Hostile("absolute", _replaced('"pages-', '"/etc/pages-'), "files must be names of files of a dump"),
    Hostile("digits", _replaced('"pages-00000', '"pages-\\u0660\\u0660\\u0660\\u0660\\u0660'), "files must be names"),
    Hostile(
        "digest", _replaced('safetensors": "', 'safetensors": 7, "x": "'), "files must be names of files of a dump"
    ),
    Hostile("selection", _replaced('"everything"', "7"), "selection must be a string"),
    Hostile("bytes", _summary_is(lambda file: file.write_bytes(b'{"format": "\xff"}')), "can't decode byte 0xff"),
    Hostile("cut", _summary(lambda received: received[:40]), "dump.json is corrupt: "),
    Hostile("empty", _summary(lambda received: ""), "dump.json is corrupt: "),
    Hostile("pipe", _summary_is(os.mkfifo), "dump.json cannot be read: it is not a regular file"),
    Hostile("socket", _summary_is(_bound), "dump.json cannot be read: "),
    Hostile("directory", _summary_is(Path.mkdir), "dump.json cannot be read: Is a directory"),
    Hostile("loop", _summary_is(lambda file: file.symlink_to(file)), "dump.json cannot be read: Too many levels"),
    Hostile("device", _summary_is(lambda file: file.symlink_to("/dev/zero")), "dump.json cannot be read: it is not"),
    Hostile(
        "sparse", lambda path: os.truncate(path / "dump.json", LARGE), "dump.json cannot be read: it has more than"
    ),
]

FILES = [
    Hostile("pipe", lambda path: os.mkfifo(path / BAD), f"{BAD}: it cannot be read: it is not a regular file"),
    Hostile("socket", lambda path: _bound(path / BAD), f"{BAD}: it cannot be read: "),
    Hostile("directory", lambda path: (path / BAD).mkdir(), f"{BAD}: it cannot be read: Is a directory"),
    Hostile("loop", lambda path: (path / BAD).symlink_to(BAD), f"{BAD}: it cannot be read: Too many levels"),
    Hostile("nowhere", lambda path: (path / BAD).symlink_to("none"), f"{BAD}: it is missing"),
    Hostile("device", lambda path: (path / BAD).symlink_to("/dev/zero"), f"{BAD}: it cannot be read: it is not"),
    Hostile("empty", lambda path: (path / BAD).touch(), f"{BAD}: it is torn"),
    Hostile("short", lambda path: (path / BAD).write_bytes(b"1234567"), f"{BAD}: it is torn"),
    Hostile("past its end", lambda path: raw(path / BAD, 100, b"{}"), f"{BAD}: it is torn"),
    Hostile("2^64", lambda path: raw(path / BAD, (1 << 64) - 1, b"{}", 99), f"{BAD}: it is torn"),
    Hostile("huge", lambda path: raw(path / BAD, 1 << 39, b"", LARGE), f"{BAD}: its header has {1 << 39} bytes"),
    Hostile(
        "nested", _file(NESTED.encode()), f"{BAD}: it is torn, or no safetensors file: lists or objects are nested"
    ),
    Hostile("bytes", _file(b'{"\xff": 1}'), "can't decode byte 0xff"),
    Hostile("twice", _literal(',"a":{},"a":{}'), "has the name 'a' twice"),
    Hostile("NaN", _literal(',"a":NaN'), "NaN is no number"),
    Hostile("long number", _literal(',"a":' + "9" * 5000), "a number of more than 400 digits"),
    Hostile("tensors", _literal("".join(f',"{i}":{{}}' for i in range(1 << 20))), "lists and objects"),
    Hostile("no metadata", _file({}, metadata=[]), f"{BAD}: it is not of kvpage dump"),
    Hostile("numbers", _literal("", ',"a":1'), "its metadata is not text"),
    Hostile("moment", _literal("", dumped_ms="\u0661"), "dumped_ms must be between 0"),
    Hostile("list", _literal(',"a":[]'), "its header makes no sense"),
    Hostile("no dtype", _literal(',"a":{"shape":[],"data_offsets":[0,1]}'), "makes no sense: it has no field 'dtype'"),
    Hostile("dtype", _string(dtype="COMPLEX"), "its header makes no sense: 'COMPLEX' is no type of elements"),
    Hostile(
        "nested dtype", _string(dtype=[[]]), "its header makes no sense: one of its fields has a value of another type"
    ),
    Hostile("float size", _string(shape=[5.0]), "sizes and offsets are whole numbers"),
    Hostile("negative size", _string(shape=[-5]), "sizes and offsets are whole numbers"),
    Hostile("true size", _string(shape=[True]), "sizes and offsets are whole numbers"),
    Hostile("dimensions", _string(shape=[1] * 9), "the tensors do not lie one after the other"),
    Hostile("great size", _string(shape=[1 << 62, 1 << 62]), "the tensors do not lie one after the other"),
    Hostile("negative offset", _string(data_offsets=[-5, 0]), "sizes and offsets are whole numbers"),
    Hostile("float offset", _string(data_offsets=[0.0, 5.0]), "sizes and offsets are whole numbers"),
    Hostile("three offsets", _string(data_offsets=[0, 5, 5]), "sizes and offsets are whole numbers"),
    Hostile("text offsets", _string(data_offsets="05"), "sizes and offsets are whole numbers"),
    Hostile(
        "overlap", _file({"string:a": tensor(), "string:b": tensor()}), "the tensors do not lie one after the other"
    ),
    Hostile("gap", _string(data_offsets=[5, 10]), "the tensors do not lie one after the other"),
    Hostile("cut", _file({"string:bad": tensor()}, VALUE[:-1]), f"{BAD}: it is torn: it has "),
    Hostile("longer", _file({"string:bad": tensor()}, VALUE + b"!"), f"{BAD}: it is torn: it has "),
]

ENTRIES = [
    Hostile("nested", _string(note=json.loads("[" * 900 + "]" * 900)), "string:bad: "),
    Hostile(
        "1e999",
        _literal(f',"string:bad":{FIVE}', r',"string:bad":"{\"ttl_left_ms\":1e999}"'),
        "string:bad: the number 1e999 is too large",
    ),
    Hostile("list", _string(note=[1]), "string:bad: its note is not a JSON object"),
    Hostile(
        "no note", _file({"string:bad": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}), "string:bad: it has"
    ),
    Hostile("other name", _string("plain:bad"), "plain:bad: its note is that of string:plain:bad"),
    Hostile(
        "surrogate",
        _literal(rf',"string:\ud800":{FIVE}', rf',"string:\ud800":{json.dumps(json.dumps(NOTE))}'),
        "surrogates not allowed",
    ),
    Hostile("escapes", _string("string:\x1b[2J\n", note={}), r"string:\x1b[2J\n: it has no field"),
    Hostile("long name", _string("string:" + "x" * 100_000, note={}), "string:" + "x" * 293 + ": it has no field"),
    Hostile("dtype of note", _string(dtype="I8"), "its type or shape is not that of its note"),
    Hostile("checksum", _string(note=NOTE | {"checksum": "0x" + DIGEST[2:]}), "a checksum has 16 hexadecimal digits"),
    Hostile("checksum number", _string(note=NOTE | {"checksum": 7}), "a checksum has 16 hexadecimal digits"),
    Hostile("wrong checksum", _string(note=NOTE | {"checksum": "0" * 16}), f"bad in {BAD}: its bytes are not those"),
    Hostile("ttl list", _string(note=NOTE | {"ttl_left_ms": [1]}), "string:bad: one value of type int is allowed"),
    Hostile("ttl list of a page", _file(page(ttl_left_ms=[1])), "kv:r:0:0:7:0: one value of type int is allowed"),
    Hostile("checksum list", _file(page(checksum=[DIGEST])), "kv:r:0:0:7:0: one value of type str is allowed"),
    Hostile("ttl text", _string(note=NOTE | {"ttl_left_ms": "1"}), "one value of type int is allowed"),
    Hostile(
        "ttl 2^63", _string(note=NOTE | {"ttl_left_ms": 1 << 63}), "string:bad: -1 to 9223372036854775807 are allowed"
    ),
    Hostile(
        "60 million heads",
        _file(plane(60_000, 1000, 60_000_000), 60_000_000),
        "it has 60000000 pages, and at most 131072",
    ),
    Hostile("layers", _file(page(layers=1 << 40)), "1 to 65536 are allowed"),
    Hostile("float layers", _file(page(layers=1.0)), "one value of type int is allowed"),
    Hostile("last layer", _file(page("kv:r:65536:0:7:0", layer=65536)), "layer_idx must be between 0 and 65535"),
    Hostile("created", _file(page(created_ms=1 << 64)), f"0 to {(1 << 63) - 1} are allowed"),
    Hostile("ttl", _file(page(ttl=-1)), "0 to 140737488355327 are allowed"),
    Hostile("request", _file(page("kv:r r:0:0:7:0", request="r r")), "req_id must be 1 to 256 bytes"),
    Hostile("request number", _file(page(request=7)), "kv:r:0:0:7:0: "),
    Hostile("page size", _file(page(page_size=0)), "page_size must be between 1 and"),
    Hostile("dtype number", _file(page(dtype=7)), "kv:r:0:0:7:0: dtype must be one of float16, "),
    Hostile("another page", _file(page(page=8)), "its note is that of kv:r:0:0:8:0"),
    Hostile(
        "sparse string",
        _file({"string:bad": tensor(nbytes=60 << 30)}, 60 << 30),
        "string:bad, 64424509440 bytes: the server takes",
    ),
    Hostile("index", _string("string:kv:r:index"), "kv:r:index: "),
]
