"""A full disk below standard error ends no program, and changes no exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from servers import START_WITHIN, STOP_WITHIN, free_port
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
