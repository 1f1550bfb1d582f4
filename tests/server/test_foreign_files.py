"""Files and JSON of others: everything that is not a file, too large or malformed is refused with a reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import forked
import pytest

from kvpage_server import bounded
from kvpage_server.bounded import open_regular, read_regular
from kvpage_server.cli import main
from kvpage_server.client import PageClient
from kvpage_server.configuration.config import ConfigError, from_arguments
from kvpage_server.replay import TraceError, read_trace

BOUNDS = {"containers": 10_000, "strings": 100, "values": 100}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 9000 + b"]" * 9000, "nested too deeply"),
        (b"[" * 5000 + b"1" + b"]" * 5000, "nested too deeply"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"[-1e999]", "the number -1e999 is too large"),
        (b"[NaN]", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' twice"),
        (b"\xff\xfe[\x00]\x00", "can't decode byte 0xff"),
        ("[\u0661]".encode(), "Expecting value"),  # an Arabic 1
        (b"[" + b"9" * 401 + b"]", "more than 400 digits"),
        (b'["x"' + b',"x"' * 100 + b"]", "more than 100 strings"),
        (b"[[]" + b",[]" * 10_000 + b"]", "more than 10000 lists"),
        (b"", "Expecting value"),
    ],
)
def test_json_is_refused_with_the_reason(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bounded.parse(text, **BOUNDS)


def test_json_within_its_bounds_is_parsed() -> None:
    text = b'{"a": [1, -2.5, 1e300, true, null], "b": {"a": "\\u00e9"}}'
    wanted: Any = {"a": [1, -2.5, 1e300, True, None], "b": {"a": "é"}}
    assert bounded.parse(text, **BOUNDS) == wanted


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe without a writer would wait for one."""
    pipe, listening, link = tmp_path / "pipe", tmp_path / "socket", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(listening))
        for path in (pipe, link, listening, tmp_path, Path("/dev/zero"), tmp_path / "none"):
            with pytest.raises(OSError, match=r"regular file|Is a directory|No such"):
                open_regular(path)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    assert read_regular(file, 8) == b"12345678"
    with pytest.raises(OSError, match="more than 7 bytes"):
        read_regular(file, 7)
    os.truncate(file, 1 << 40)  # sparse
    with pytest.raises(OSError, match="more than 8 bytes"):
        read_regular(file, 8)


ARABIC = "\u0661\u0662"  # digits for which str.isdigit() is true
KELVIN = "\u212a"  # its lower case is k


@pytest.mark.parametrize(
    "words",
    [
        ("--port", ARABIC),
        ("--maxmemory", ARABIC),
        ("--maxmemory", f"1{KELVIN}b"),
        ("--maxmemory-clients", f"{ARABIC}%"),
        ("--client-output-buffer-limit", "normal", "0", "0", ARABIC),
        ("--quota", "a*", ARABIC),
    ],
)
def test_a_parameter_takes_ascii_digits_only(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0].removeprefix("--")):
        from_arguments(words)


def test_a_url_and_an_option_take_ascii_digits_only() -> None:
    for option in ("node_deadline", "max_connections"):
        with pytest.raises(ValueError, match=option):
            PageClient(f"valkey-cluster://a:7000?{option}={ARABIC}")
    for words in (("replay", "x", "--nodes", ARABIC), ("status", "--watch", ARABIC)):
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code not in (0, None)


@pytest.mark.parametrize("parameter", ["", "aclfile"])
def test_a_pipe_or_a_directory_is_no_configuration(tmp_path: Path, parameter: str) -> None:
    """Both ended a start: the pipe by waiting for a writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "it is not a regular file"), (tmp_path, "Is a directory")):
        words = [f"--{parameter}", str(path)] if parameter else [str(path)]
        ended = forked.run("kvpage_server.app", "--check-config", *words)
        named = f"{parameter}: " if parameter else ""
        assert (ended.returncode, ended.stderr) == (1, f"kvpage-server: {named}{path}: {why}\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"timestamp": 1e999, "hash_ids": []}', "the number 1e999 is too large"),
        ('{"timestamp": NaN, "hash_ids": []}', "NaN is no number"),
        ('{"timestamp": -1, "hash_ids": []}', "timestamp must be"),
        ('{"timestamp": 1, "hash_ids": ' + "[" * 5000 + "]" * 5000 + "}", "more than 100 lists"),
        ('{"timestamp": 1, "timestamp": 2, "hash_ids": []}', "the name 'timestamp' twice"),
    ],
)
def test_a_hostile_trace_is_named_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"timestamp": 1, "hash_ids": [1]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=rf"line 2: .*{why}"):
        read_trace(trace)
