"""A disk that is full or cannot be written to: a clear word at the start, and no harm later."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from servers import start_server
from test_tiered import TIERED, body, disk_info, get_page, set_page, tiered

from kvpage_server.store.disk import FILE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 12 MB, where that may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(client: redis.Redis, pages: int) -> int:
    """Write pages until one is refused; how many were taken."""
    for seed in range(pages):
        try:
            set_page(client, seed)
        except redis.ResponseError as error:
            if "MISCONF" not in str(error):
                raise
            return seed
        except redis.ConnectionError:
            return seed
    return pages


def test_a_full_disk_makes_room_by_evicting_what_is_worth_least(small_disk: Path) -> None:
    with tiered(small_disk, "--maxmemory", "2mb") as (server, client):
        assert fill(client, 1500) == 1500
        with suppress(redis.ConnectionError):
            client.execute_command("SAVE")
        assert disk_info(client)["disk_write_errors"] > 0
        found = {seed: get_page(client, seed) for seed in range(1500)}
        assert 50 < sum(value is not None for value in found.values()) < 700
        assert all(value in (None, body(20_000, seed)) for seed, value in found.items())
        assert "No space left on device" in server.log
        assert "internal error" not in server.log


def test_what_was_acknowledged_last_under_always_is_on_the_full_disk(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(7 * 1024**2))
    with start_server(*TIERED, "--appendfsync", "always", directory=small_disk, killed=True) as server:
        acknowledged = []
        for start in range(0, 400, 20):  # a connection may end; the next one goes on
            with server.client() as client, suppress(redis.ConnectionError, redis.ResponseError):
                for seed in range(start, start + 20):
                    set_page(client, seed)
                    acknowledged.append(seed)
        assert "No space left on device" in server.log
        server.stop(signal.SIGKILL)
    (small_disk / "ballast").unlink()
    with tiered(small_disk) as (_, client):
        assert get_page(client, acknowledged[-1]) == body(20_000, acknowledged[-1])
        assert all(get_page(client, seed) in (None, body(20_000, seed)) for seed in range(400))


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    directory.chmod(0o500)
    try:
        yield
    finally:
        directory.chmod(0o700)


def test_a_directory_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True).returncode:
            pytest.skip("root may write everywhere")
        try:
            command = [sys.executable, "-m", "kvpage_server.app", *TIERED, "--dir", str(tmp_path), "--port", "0"]
            refused = subprocess.run(command, capture_output=True)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
        assert refused.returncode == 1
        assert b"Read-only file system" in refused.stderr
        return
    with (
        read_only(tmp_path),
        pytest.raises(RuntimeError, match="Permission denied"),
        start_server(*TIERED, directory=tmp_path),
    ):
        pass


def test_a_damaged_store_is_refused_with_the_reason_and_a_way_out(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(100):
            set_page(client, seed)
    os.truncate(tmp_path / FILE, 500_000)
    with pytest.raises(RuntimeError, match=r"is damaged: .*Restore it from a backup, or move it away"):  # noqa: SIM117
        with start_server(*TIERED, directory=tmp_path):
            pass
