"""A bare Debian, in a chroot: `make` installs the requirements of the server, which starts and stores a page."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import redis
from documents import ROOT
from servers import answers, free_port
from waiting import until

DEBOOTSTRAP = shutil.which("debootstrap")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can use chroot"),
    pytest.mark.skipif(not DEBOOTSTRAP, reason="debootstrap is not installed (Debian: apt-get install debootstrap)"),
]
ENTER = 'mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && exec chroot "$0" env -i "$@"'
OF_THE_NETWORK = ("etc/resolv.conf", "etc/pip.conf", "root/.config/pip/pip.conf", "etc/ssl/certs/ca-certificates.crt")


def within(bare: Path, *command: str) -> list[str]:
    """Return a command that runs another one in the checkout of a chroot, with its own mounts."""
    inherited = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name]
    variables = ["HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *inherited]
    change = ["sh", "-c", 'cd /root/kvpage && exec "$@"', "sh"]
    return ["unshare", "--mount", "sh", "-c", ENTER, str(bare), *variables, *change, *command]


def test_make_installs_the_server_on_a_bare_debian(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    assert DEBOOTSTRAP
    packages = "--include=ca-certificates,git,make,python3"
    subprocess.run([DEBOOTSTRAP, "--variant=minbase", packages, release, bare], check=True, capture_output=True)
    for name in OF_THE_NETWORK:
        if (source := Path("/", name)).exists():
            (bare / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, bare / name)
    (bare / "etc/hosts").write_text("127.0.0.1 localhost\n", encoding="ascii")
    subprocess.run(["git", "clone", "--quiet", ROOT, bare / "root/kvpage"], check=True)
    made = subprocess.run(within(bare, "make", ".venv/server.stamp"), capture_output=True, encoding="utf-8")
    assert made.returncode == 0, made.stdout + made.stderr
    port = free_port()
    command = within(bare, ".venv/bin/kvpage-server", "--port", str(port), "--dir", "/tmp")
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            until(lambda: answers(port), "the server")
            with redis.Redis(port=port) as client:
                words = "test_req_001", 5, 8, 42, 0
                assert client.execute_command("KVPAGESET", *words, 1, 128, 64, 3600, "BLOB_DATA")
                assert client.execute_command("KVPAGEGET", *words) == b"BLOB_DATA"
                assert client.info("server")["page_core"] == "native"
        finally:
            process.terminate()
    assert process.returncode == 0
    shutil.rmtree(bare)
