"""Full or closed standard streams end no program with a traceback, and change no exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from servers import START_WITHIN, STOP_WITHIN, RunningServer, free_port
from waiting import eventually

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")


def start(*words: str) -> subprocess.Popen[str]:
    with open("/dev/full", "w", encoding="utf-8") as full:
        return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=full, encoding="utf-8")


def test_a_server_serves_and_stops_in_order(tmp_path: Path) -> None:
    port = free_port()
    process = start("-m", "kvpage_server", "--port", str(port), "--dir", str(tmp_path), "--loglevel", "debug")
    with redis.Redis(port=port) as client:
        assert eventually(lambda: _answers(client), within=START_WITHIN)
        client.set("key", "value")
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_WITHIN) == 0


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_kvpage_keeps_its_exit_status() -> None:
    process = start("-m", "kvpage_server.cli", "status", "--url", f"redis://127.0.0.1:{free_port()}")
    assert process.wait(STOP_WITHIN) == 2


def test_an_engine_continues_after_a_report() -> None:
    program = (
        "from engine.commands.options import report; report('begins'); report('goes on'); print('done', flush=True)"
    )
    process = start("-c", program)
    assert process.communicate(timeout=STOP_WITHIN)[0] == "done\n"


@pytest.mark.parametrize("program", ["kvpage", "kvpage_server", "kvpage_engine"])
def test_a_full_disk_is_reported_by_help_and_version(program: str) -> None:
    main = f"import sys; from kvpage_server.__main__ import {program} as main; sys.exit(main())"
    for word in ("--help", "--version"):
        with open("/dev/full", "w", encoding="utf-8") as full:
            command = [sys.executable, "-c", main, word]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=STOP_WITHIN)
        assert (done.returncode, done.stderr.partition(": ")[2]) == (1, "No space left on device\n")


def closed(streams: str, *words: str) -> list[str]:
    """Return a command that starts a program without the standard streams of a shell's redirections."""
    return ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *words]


def test_kvpage_runs_with_closed_streams(server: RunningServer) -> None:
    main = "from kvpage_server.__main__ import kvpage as main; main()"
    asked = "-c", main, "status", "--url"
    for url, code in ((server.url, 0), (f"redis://127.0.0.1:{free_port()}", 2)):
        done = subprocess.run(closed("<&- >&-", *asked, url), stderr=subprocess.PIPE, timeout=STOP_WITHIN)
        assert (done.returncode, done.stderr.count(b"\n")) == (code, code // 2), done.stderr
    done = subprocess.run(closed("2>&-", *asked, url), stdout=subprocess.PIPE, timeout=STOP_WITHIN)
    assert (done.returncode, done.stdout) == (2, b"")


def test_no_file_of_a_server_gets_a_closed_stream(tmp_path: Path) -> None:
    """A library that prints an error would write it into the file."""
    port = free_port()
    words = "-m", "kvpage_server", "--port", str(port), "--dir", str(tmp_path), "--store", "tiered"
    with subprocess.Popen(closed("<&- >&- 2>&-", *words)) as process, redis.Redis(port=port) as client:
        try:
            assert eventually(lambda: _answers(client), within=START_WITHIN)
            assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)} == {os.devnull}
        finally:
            process.terminate()
        assert process.wait(STOP_WITHIN) == 0
