"""The servers that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

STARTS = """
import time
from servers import start_server
with start_server() as server:
    print(server.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are no forks")
def test_forked_servers_end_with_their_starter() -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", STARTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout
        server = int(process.stdout.readline())
        process.kill()
    until(lambda: not Path(f"/proc/{server}").exists(), "the end of the server")
