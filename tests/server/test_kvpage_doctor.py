"""`kvpage doctor` finds problems of the machine, the configuration and the server, and gives advice."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import free_port, start_redis, start_server, with_constants
from small_disks import small_disk
from test_kvpage_cli import ROOT, kvpage
from test_tls import certificates, files, needs_openssl, run_openssl
from waiting import until

from kvpage_server import doctor
from kvpage_server.commands.families.server.config import OWN_DESCRIPTORS
from kvpage_server.doctor import Check, Diagnosis, Patient

__all__ = ["certificates"]  # a fixture


def result(check: Check, *arguments: str, url: str = "", root: Path = Path("/")) -> Diagnosis:
    """Return the result of a check for the arguments of a server."""
    (found,) = check(Patient([*arguments], url, root))
    return found


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A configuration whose server would start, with a directory and a port of its own."""
    file = tmp_path / "kvpage.conf"
    (tmp_path / "data").mkdir(0o700)
    file.write_text(f"port {free_port()}\nmaxmemory 100mb\nmaxdisk 100mb\ndir {tmp_path / 'data'}\n", encoding="utf-8")
    file.chmod(0o600)
    return file


def test_every_documented_check_is_run(conf: Path) -> None:
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8").partition("## Examine the machine")[2]
    table = text.partition("## As a service")[0].partition("| part | checks |")[2]
    listed = {name for row in re.findall(r"^\| \w.* \| (`.*)\|", table, re.M) for name in re.findall(r"`([^`]+)`", row)}
    with start_server(file=conf) as server:
        found = {each.check: each for each in doctor.examine(Patient([str(conf)], server.url))}
    assert listed == found.keys()
    assert len(found) >= 20
    assert all(each.advice for each in found.values() if each.state in ("warning", "error"))
    assert not any(each.advice for each in found.values() if each.state in ("ok", "skipped"))


def test_the_exit_status_is_that_of_the_worst_check(conf: Path) -> None:
    code, shown, errors = kvpage("doctor", str(conf), "--json")
    states = [json.loads(line)["state"] for line in shown.splitlines()]
    assert set(states) <= {"ok", "warning", "skipped"}, shown
    assert (code, errors) == (int("warning" in states), "")
    conf.write_text("maxmemory much\n", encoding="utf-8")
    code, shown, errors = kvpage("doctor", str(conf))
    assert (code, errors) == (2, "")
    assert re.search(r"^error    configuration   .*line 1: maxmemory .*'much'", shown, re.M), shown
    assert re.search(r"^ +-> correct it", shown, re.M)
    assert kvpage("doctor", url="valkey-cluster://127.0.0.1:1")[0] == 2


@pytest.mark.parametrize(
    ("part", "lines"),
    [("users", "user alice on nosuch\n"), ("tls", "tls-port 7\ntls-cert-file /nosuch\ntls-key-file /nosuch\n")],
)
def test_an_error_of_the_configuration_is_reported_once(conf: Path, part: str, lines: str) -> None:
    with conf.open("a", encoding="utf-8") as file:
        file.write(lines)
    found = {each.check: each for each in doctor.examine(Patient([str(conf)], ""))}
    assert [each.check for each in found.values() if "nosuch" in each.found] == ["configuration"]
    assert found[part].state == "skipped"
    assert "docs/security.md" in found[part].found


def test_each_result_is_printed_when_it_is_there(conf: Path) -> None:
    command = [str(Path(sys.executable).with_name("kvpage")), "doctor", str(conf), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as running:
        assert running.stdout is not None
        first = json.loads(running.stdout.readline())
        assert first["check"] == "python"
        assert running.poll() is None, "it is still examining the disk"
        assert len(running.stdout.read().splitlines()) >= 20


# -- the machine -------------------------------------------------------------------------------------------------------

MEMINFO = (
    "MemTotal: 1000 kB\nMemAvailable: {} kB\nSwapTotal: 500 kB\nSwapFree: 0 kB\nCommitLimit: 9 kB\nCommitted_AS: 4 kB\n"
)


@pytest.mark.parametrize(
    ("check", "file", "text", "advice"),
    [
        (doctor.overcommit, "proc/sys/vm/overcommit_memory", "2\n", "sysctl vm.overcommit_memory=0"),
        (doctor.huge_pages, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "echo madvise"),
        (doctor.swap, "proc/meminfo", MEMINFO, "lower maxmemory"),
        (doctor.backlog, "proc/sys/net/core/somaxconn", "128\n", "sysctl net.core.somaxconn=511"),
        (
            doctor.clock_source,
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
            "hpet\n",
            "clocksource=tsc",
        ),
    ],
)
def test_a_setting_of_the_kernel_is_reported(
    check: Check, file: str, text: str, advice: str, conf: Path, tmp_path: Path
) -> None:
    """The files are those of another machine."""
    absent = result(check, str(conf), root=tmp_path)
    assert (absent.state, absent.advice) == ("skipped", "")
    place = tmp_path / file
    place.parent.mkdir(parents=True)
    place.write_text(text, encoding="utf-8")
    found = result(check, str(conf), root=tmp_path)
    assert found.state == "warning"
    assert advice in found.advice


def test_too_few_files_are_reported_with_the_needed_number(conf: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = result(doctor.open_files, str(conf), "--maxclients", str(min(hard, 1_000_000)))
    if hard < 1_000_000:
        assert (few.state, f"ulimit -n {hard + OWN_DESCRIPTORS}" in few.advice) == ("warning", True)
    assert result(doctor.open_files, str(conf), "--maxclients", "10").state == "ok"


def test_a_limit_of_file_sizes_is_reported(conf: Path) -> None:
    command = f"ulimit -f 65536; exec '{sys.executable}' -m kvpage_server.cli doctor '{conf}' --json"
    done = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8")
    found = {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert found["file size"]["state"] == "warning"
    assert "64.0 MiB" in found["file size"]["found"]


def test_the_python_core_is_reported(conf: Path) -> None:
    command = [sys.executable, "-m", "kvpage_server.cli", "doctor", str(conf), "--json"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ | {"KVPAGE_CORE": "python"})
    found = {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert found["page core"]["state"] == "warning"
    assert "KVPAGE_CORE" in found["page core"]["advice"]


# -- the configuration -------------------------------------------------------------------------------------------------


def test_memory_that_the_machine_lacks_is_reported(conf: Path) -> None:
    assert result(doctor.maxmemory, str(conf)).state == "ok"
    assert result(doctor.maxmemory, str(conf), "--maxmemory", "0").state == "warning"
    assert result(doctor.maxmemory, str(conf), "--maxmemory", "5").state == "warning"
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    too_much = result(doctor.maxmemory, str(conf), "--maxmemory", str(most + 1))
    assert too_much.state == "error"
    (fits,) = re.findall(r"^maxmemory (\d+mb)", too_much.advice)
    assert result(doctor.maxmemory, str(conf), "--maxmemory", fits).state == "ok"


def test_a_disk_that_is_smaller_than_the_store_is_reported(conf: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 40) as place:
        here = str(conf), "--dir", str(place)
        assert result(doctor.disk_space, *here).state == "warning"
        found = result(doctor.file_system, *here)
        assert (found.state, "tmpfs" in found.found) == ("warning", True)
        (place / "other").write_bytes(bytes(30 << 20))
        assert result(doctor.disk_space, *here).state == "error"
        assert result(doctor.disk_speed, *here).state == "skipped"
    for check in (doctor.disk_space, doctor.file_system, doctor.disk_speed):
        assert result(check, str(conf), "--store", "memory").state == "skipped"


def test_the_disk_is_measured_and_nothing_is_left(conf: Path) -> None:
    found = result(doctor.disk_speed, str(conf))
    assert re.search(r"[\d.]+ \w+ a second, a commit takes [\d.]+ ms", found.found)
    assert [*(conf.parent / "data").iterdir()] == []


def test_files_that_others_can_read_are_reported(conf: Path) -> None:
    acl = conf.parent / "users.acl"
    acl.write_text("user default on >secret ~* +@all\n", encoding="utf-8")
    acl.chmod(0o644)
    conf.chmod(0o644)
    assert result(doctor.permissions, str(conf)).state == "ok", "it has no password"
    found = result(doctor.permissions, str(conf), "--aclfile", str(acl), "--requirepass", "secret")
    assert found.state == "warning"
    (command,) = re.findall(r"^chmod .*", found.advice)
    subprocess.run(command, shell=True, check=True)
    assert acl.stat().st_mode & 0o777 == 0o640
    assert result(doctor.permissions, str(conf), "--aclfile", str(acl), "--requirepass", "secret").state == "ok"


def test_a_port_of_another_program_is_reported(conf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = result(doctor.ports, str(conf), "--metrics-port", str(port))
        assert (found.state, found.found) == ("error", f"another program has metrics-port {port}")
        assert f":{port}" in found.advice
    assert result(doctor.ports, str(conf)).found == "free"
    with start_server(file=conf) as server:
        assert result(doctor.ports, str(conf), "--port", str(server.port)).found == "in use by the running server"
        assert result(doctor.ports, str(conf), "--port", str(free_port()), url=server.url).found == "free"


def test_a_unix_socket_is_tried(conf: Path) -> None:
    path = str(conf.parent / "socket")
    assert result(doctor.unix_socket, str(conf), "--unixsocket", path).state == "ok"
    with start_server("--unixsocket", path, "--unixsocketperm", "777", file=conf):
        found = result(doctor.unix_socket, str(conf), "--unixsocket", path, "--unixsocketperm", "777")
    assert found.found == f"{path} accepts connections (every user of the machine may connect)"


def test_a_url_for_tls_gets_advice_on_tls(conf: Path) -> None:
    found = result(doctor.tls, str(conf), url="rediss://127.0.0.1:1")
    assert (found.state, found.found) == ("skipped", f"{conf} has no tls-port")
    assert found.advice.startswith("name the configuration of the server")
    with start_server(file=conf) as server:
        plain = result(doctor.reached, str(conf), url=server.url.replace("redis", "rediss"))
    assert (plain.state, plain.advice) == ("error", "this port has no TLS: its URL begins with redis://")


@needs_openssl
def test_a_certificate_is_reported_before_it_ends(conf: Path, certificates: Path) -> None:
    secure = "--tls-port", str(free_port()), *files(certificates)
    found = result(doctor.tls, str(conf), *secure)
    assert (found.state, "valid for 1 d 23 h" in found.found) == ("warning", True)
    own = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=long", "-days", "90"]
    run_openssl(*own, "-keyout", "long.key", "-out", "long.crt", at=conf.parent)
    new = [f"--tls-{kind}-file {conf.parent}/long.{end}" for kind, end in (("cert", "crt"), ("key", "key"))]
    assert result(doctor.tls, str(conf), *secure, *" ".join(new).split()).state == "ok"
    missing = result(doctor.tls, str(conf), *secure, "--tls-key-file", "none.key")
    assert (missing.state, "none.key" in missing.found) == ("error", True)


@needs_openssl
@pytest.mark.parametrize(
    ("days", "refusal", "advice"),
    [("-1", "certificate has expired", "renew it"), ("2", "self-signed certificate", "?ssl_ca_certs=FILE")],
)
def test_a_refused_certificate_of_a_server_gets_advice(conf: Path, days: str, refusal: str, advice: str) -> None:
    own = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", "own.key", "-out", "own.csr"]
    run_openssl(*own, at=conf.parent)
    signed = ["x509", "-req", "-in", "own.csr", "-signkey", "own.key", "-days", days, "-out", "own.crt"]
    run_openssl(*signed, at=conf.parent)
    own_files = [f"--tls-{kind}-file {conf.parent}/own.{end}" for kind, end in (("cert", "crt"), ("key", "key"))]
    port = free_port()
    options = "--tls-port", str(port), *" ".join(own_files).split(), "--tls-auth-clients", "no"
    with start_server(*options, file=conf):
        trusted = f"?ssl_ca_certs={conf.parent}/own.crt" if days == "-1" else ""
        found = result(doctor.reached, str(conf), url=f"rediss://localhost:{port}{trusted}")
    assert (found.state, refusal in found.found) == ("error", True)
    assert advice in found.advice


def test_a_store_that_is_open_to_everybody_is_an_error(conf: Path) -> None:
    everywhere = "--bind", "0.0.0.0"
    assert result(doctor.users, str(conf), *everywhere).state == "warning"
    assert result(doctor.users, str(conf), *everywhere, "--protected-mode", "no").state == "error"
    guarded = result(doctor.users, str(conf), *everywhere, "--protected-mode", "no", "--requirepass", "secret")
    assert guarded.state == "ok"
    conf.write_text(conf.read_text(encoding="utf-8") + "user alice on badrule\n", encoding="utf-8")
    assert result(doctor.users, str(conf)).state == "error"
    assert "badrule" in result(doctor.configuration, str(conf)).found


# -- running servers ---------------------------------------------------------------------------------------------------


def test_the_password_of_the_configuration_is_tried(conf: Path) -> None:
    with start_server("--requirepass", "secret", file=conf) as server:
        here = str(conf), "--port", str(server.port)
        assert result(doctor.reached, *here, "--requirepass", "secret").state == "ok"
        wrong = result(doctor.reached, *here, "--requirepass", "wrong")
        assert (wrong.state, "refuses the password" in wrong.found) == ("error", True)
        with server.client(password="secret") as client:
            client.execute_command("ACL", "SETUSER", "metrics", "on", ">third", "-@all", "+info")
        url = server.url.replace("//", "//metrics:third@")
        assert result(doctor.reached, str(conf), url=url).state == "ok"
        examined = [*doctor.examine(Patient([*here, "--requirepass", "secret"], ""))]
        assert "secret" not in str(examined)


def test_a_named_server_has_to_run_and_to_be_one(conf: Path) -> None:
    assert result(doctor.reached, str(conf)).state == "skipped"
    absent = result(doctor.reached, str(conf), url=f"redis://127.0.0.1:{free_port()}")
    assert (absent.state, "does not answer" in absent.found) == ("error", True)
    if shutil.which("redis-server"):
        with start_redis() as other:
            found = result(doctor.reached, str(conf), url=other.url)
            assert (found.state, "not a kvpage-server" in found.found) == ("error", True)


def test_another_version_and_core_of_a_server_is_reported(conf: Path) -> None:
    newer = with_constants("kvpage_server.commands.families.server.info", __version__="'99.0'", core="module.core")
    with start_server(program=newer) as server:
        found = result(doctor.versions, str(conf), url=server.url)
    assert (found.state, f"{server.url} is 99.0" in found.found) == ("warning", True)


def test_a_store_larger_than_a_lowered_maxdisk_is_reported(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path), "--store", "tiered")
    with start_server(*where, "--maxdisk", "100mb", directory=tmp_path) as server, server.client() as client:
        for number in range(200):
            client.set(f"s{number}", os.urandom(200_000))
        client.execute_command("KVPAGEKEEP", "tenant", 1, 3600, *(f"s{number}" for number in range(100)))
        client.save()
        assert result(doctor.limits, *where, url=server.url).state == "ok"
    lowered = (*where, "--maxdisk", "16mb", "--maxmemory-policy", "noeviction")
    with start_server(*lowered, directory=tmp_path) as server:
        found = result(doctor.limits, *lowered, url=server.url)
        assert (found.state, "maxdisk is 16.0 MiB, and values take 38." in found.found) == ("warning", True)
        assert "more than maxdisk by 22." in kvpage("status", url=server.url)[1]
        line = r" W   disk    38\.[0-9]+M of values, and maxdisk has space for 12\.00M: writes are refused until values"
        assert re.search(line, server.log)
    with start_server(*lowered[:-1], "allkeys-lru", directory=tmp_path) as server, server.client() as client:
        line = r"for 12\.00M: writes evict some, and are refused when the 19\.[0-9]+M with lifetimes are left"
        assert re.search(line, server.log)
        accepted = 0
        with suppress(redis.OutOfMemoryError):
            while accepted < 200 and client.set(f"new{accepted}", os.urandom(200_000)):
                accepted += 1
        assert accepted < 200
        assert client.exists(*(f"s{number}" for number in range(100))) == 100
    found = result(doctor.disk_space, *lowered)
    assert (found.state, "more than maxdisk, 16.0 MiB" in found.found) == ("warning", True)


def test_a_disk_that_fails_is_an_error(conf: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 40) as place:
        options = "--store", "tiered", "--maxdisk", "1gb", "--save", ""
        with start_server(*options, directory=place, killed=True) as server, server.client() as client:
            until(
                lambda: not client.set(os.urandom(8), os.urandom(1 << 20)) or client.info()["disk_failing"], "failure"
            )
            found = result(doctor.disk_errors, str(conf), url=server.url)
            server.process.kill()
    assert (found.state, "cannot write" in found.found) == ("error", True)


def test_rejected_connections_are_reported(conf: Path) -> None:
    with start_server("--maxclients", "10") as server:
        opened: list[Any] = [server.connect() for _ in range(20)]
        for sock in opened[10:]:
            sock.recv(100)
        for sock in opened:
            sock.close()

        def is_alone() -> bool:
            with suppress(redis.ConnectionError), server.client() as client:  # until then it is rejected, too
                return client.info()["connected_clients"] == 1
            return False

        until(is_alone, "the others are closed")
        found = result(doctor.connections, str(conf), url=server.url)
    assert (found.state, bool(re.search(r"[1-9]\d* rejected", found.found))) == ("warning", True)
