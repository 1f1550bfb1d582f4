"""Reads of leased and pinned values that are only on disk keep memory within `maxmemory`."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import start_server

MB = 1 << 20


@pytest.mark.parametrize("protect", [("KVPAGELEASE", "60000"), ("KVPAGEPIN",)], ids=["lease", "pin"])
def test_reads_of_protected_values_keep_memory_within_its_limit(protect: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "16mb", "--maxdisk", "256mb")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for number in range(60):
            client.execute_command("KVPAGESET", f"r{number}", 0, 0, 0, 0, 8, 1, MB, 0, bytes([number]) * MB)
        client.save()
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        command, *milliseconds = protect
        for number in range(60):
            assert client.execute_command(command, f"r{number}", *milliseconds) == 1
        for number in range(60):
            assert client.execute_command("KVPAGEGET", f"r{number}", 0, 0, 0, 0) == bytes([number]) * MB
            assert client.info("memory")["used_memory"] < 24 * MB
        assert client.info("everything")["leased_or_pinned"] == 60
