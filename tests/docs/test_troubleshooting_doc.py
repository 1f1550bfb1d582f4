"""docs/troubleshooting.md: programs that cannot start print the documented words."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

from documents import ROOT, entry_point
from servers import start_server
from waiting import PATIENCE

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
EMPTY = b"not a database" * 1000


def words_of(section: str) -> list[str]:
    """Return the parts of errors in the first column of a section's table."""
    rows = re.findall(r"^\| (`.*?) \|", TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.MULTILINE)
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)]


def error_of(program: str, *words: str) -> str:
    """Return the message of a program that cannot start."""
    done = subprocess.run([*entry_point(program), *words], capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


def test_a_server_that_cannot_start_prints_the_documented_words(tmp_path: Path) -> None:
    documented = words_of("The server will not start")
    for name in ("free", "used", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "wrong.conf").write_text("port 9221\nmaxmemory lots\n", encoding="utf-8")
    (tmp_path / "foreign" / "kvpage.lmdb").write_bytes(EMPTY)

    def start(directory: str, port: int = 0) -> str:
        return error_of("kvpage-server", "--dir", str(tmp_path / directory), "--bind", "127.0.0.1", "--port", str(port))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        errors = [start("free", taken.getsockname()[1])]
    with start_server("--store", "tiered", directory=tmp_path / "used"):
        errors.append(start("used"))
    errors.append(error_of("kvpage-server", str(tmp_path / "wrong.conf")))
    errors.append(start("foreign"))
    found = [phrase for phrase in documented if any(phrase in error for error in errors)]
    assert found == [
        "cannot listen on",
        "is in use by another kvpage-server",
        "line",
        "is not a store of kvpage-server",
    ]


def test_an_engine_that_cannot_start_prints_the_documented_words(tmp_path: Path) -> None:
    documented = words_of("The engine will not start")
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}', encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        errors = [error_of("kvpage-engine", "serve", "--port", str(taken.getsockname()[1]))]
    models = tmp_path / "absent", tmp_path
    errors += [error_of("kvpage-engine", "serve", "--port", "0", "--model", str(model)) for model in models]
    found = [phrase for phrase in documented if any(phrase in error for error in errors)]
    assert found == ["is neither a directory nor the id of a model", "cannot be loaded", "cannot listen on"]
