"""`kvpage doctor`: checks of the machine, of a server's configuration and of running servers, each with what to do.

The configuration is checked with the arguments of `kvpage-server`, as a start would read them. A check that has nothing
to examine is left out, with the reason: for example those of a server that does not run.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import re
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, Literal
from urllib.parse import urlsplit

import redis
from rich.text import Text

from kvpage_server import __version__, core
from kvpage_server.address import shown, tls_hint, urls_of, with_credentials
from kvpage_server.client.raw_commands import integer, plain_client
from kvpage_server.commands.access.users import UserFileError, Users
from kvpage_server.commands.families.server.config import OWN_DESCRIPTORS
from kvpage_server.configuration import certificates
from kvpage_server.configuration.config import (
    SMALL_MEMORY,
    SMALLEST_DISK,
    Config,
    ConfigError,
    choose_defaults,
    default_maxdisk,
    from_arguments,
)
from kvpage_server.store.disk.database import FILE
from kvpage_server.system.process import usable_memory
from kvpage_server.system.terminal import for_people, out, print_json, readable
from kvpage_server.system.text import as_size, plural

State = Literal["ok", "warning", "error", "skipped"]

_PYTHONS = range(11, 15)  # minor versions of Python 3 that the tests run
_BESIDE = 200 << 20  # bytes of the process without its values and a third of maxmemory: docs/size.md
_SPEED_BYTES = 32 << 20  # bytes that the disk's speed is measured with
_SPEED_SECONDS = 1.5  # most seconds of the measurement of small commits
_SLOW_DISK = 30 << 20  # bytes a second
_SLOW_COMMIT = {"always": 0.02, "everysec": 0.2, "no": 0.2}  # seconds of a commit, by appendfsync
_SLOW_ROUND_TRIP = 0.005  # seconds
_SWAPPED = 64 << 20  # bytes of a server in swap
_DAYS = 30  # days before the end of a certificate
_CLOCK_ERROR = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronised
_SLOW_CLOCKS = {"acpi_pm", "hpet", "jiffies", "refined-jiffies", "xen"}
_NETWORKS = {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "nfs", "nfs4", "smb3", "smbfs"}
_VOLATILE = {"tmpfs", "ramfs", "overlay"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check: its name, its state, the finding, and what to do about a warning or an error."""

    check: str
    state: State
    found: str
    advice: str = ""


@dataclass
class Patient:
    """The machine, the configuration of a server on it, and running servers."""

    arguments: list[str]  # of kvpage-server
    urls: str  # of running servers; empty for the one of the configuration
    root: Path = Path("/")  # directory with the kernel's /proc and /sys

    @cached_property
    def configuration_error(self) -> str:
        """The reason why `kvpage-server` would not start with its arguments; "" if it would."""
        checked = subprocess.run(
            [sys.executable, "-m", "kvpage_server.app", "--check-config", *self.arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        lines = checked.stderr.strip().splitlines() or [f"exit status {checked.returncode}"]
        return lines[-1].removeprefix("kvpage-server: ") if checked.returncode else ""

    @cached_property
    def config(self) -> Config:
        """The configuration. Raises ConfigError, OSError."""
        config = from_arguments(self.arguments)
        choose_defaults(config)
        return config

    @cached_property
    def directory(self) -> Path:
        """The directory of the store. It may be missing before the first start."""
        return Path(self.config.dir).absolute()

    @cached_property
    def servers(self) -> list[tuple[str, dict[str, Any] | Exception]]:
        """The URL of each server, and its reply to INFO, or the error."""
        urls = self.urls or self._own_url()
        return [(url, _info(url)) for url in urls_of(urls)] if urls else []

    def _own_url(self) -> str:
        """Return the URL of the server of the configuration; "" if it has only a port for TLS."""
        config = self.config
        host = config.bind[0].removeprefix("-") if config.bind else "*"
        host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "::*": "::1"}.get(host, host)
        where = f"redis://[{host}]:{config.port}" if ":" in host else f"redis://{host}:{config.port}"
        if not config.port:
            where = f"unix://{self.directory / config.unixsocket}" if config.unixsocket else ""
        return with_credentials(where, password=config.requirepass) if where else ""

    def kernel(self, name: str) -> str:
        """Return the text of a file in /proc or /sys; "" if the system does not have it."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def memory_of_machine(self, name: str) -> int:
        """Return a line of /proc/meminfo in bytes; 0 if there is none."""
        found = re.search(rf"^{name}: +(\d+) kB", self.kernel("proc/meminfo"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0


Check = Callable[[Patient], Iterable[Diagnosis]]


def run_checks(args: argparse.Namespace) -> int:
    """Run all checks, and print each when it has ended. Return 0; 1 if there is a warning, 2 if there is an error."""
    worst, counts = 0, {"ok": 0, "warning": 0, "error": 0, "skipped": 0}
    for diagnosis in examine(Patient(args.server, args.url or "")):
        counts[diagnosis.state] += 1
        worst = max(worst, {"warning": 1, "error": 2}.get(diagnosis.state, 0))
        if args.json:
            print_json(asdict(diagnosis))
        else:
            _show(diagnosis)
    if not args.json:
        problems = f"{plural(counts['error'], 'error')}, {plural(counts['warning'], 'warning')}"
        out.print(f"\n{plural(sum(counts.values()), 'check')}: {problems}, {counts['skipped']} skipped")
    return worst


def examine(patient: Patient) -> Iterator[Diagnosis]:
    """Run all checks, those of the machine first. Yield the result of each. An error that `configuration` has reported
    is not reported again by the check of its part.
    """
    for check in _OF_THE_INSTALLATION:
        yield from check(patient)
    try:
        patient.config  # noqa: B018  read once, for all checks
    except (ConfigError, OSError) as error:
        yield Diagnosis("configuration", "error", _text(error), _CORRECT)
        return
    for check in (*_OF_THE_MACHINE, *_OF_THE_CONFIGURATION, *_OF_THE_SERVERS):
        for found in check(patient):
            repeats = check is not configuration and found.found == patient.configuration_error
            yield Diagnosis(found.check, "skipped", f"see configuration; {found.advice}") if repeats else found


def _show(diagnosis: Diagnosis) -> None:
    colour = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}[diagnosis.state]
    state = Text(f"{diagnosis.state:8}", colour)
    out.print(Text.assemble(state, f" {diagnosis.check:15} ", readable(diagnosis.found)))
    if diagnosis.advice:
        out.print(Text.assemble(" " * 25, readable(f"-> {diagnosis.advice}")))


# -- Python and the libraries ------------------------------------------------------------------------------------------


def python(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the tests run on this Python."""
    found = f"Python {sys.version.split()[0]}"
    if sys.version_info.minor in _PYTHONS:
        yield Diagnosis("python", "ok", found)
    else:
        advice = f"use Python 3.{_PYTHONS[0]} to 3.{_PYTHONS[-1]}"
        yield Diagnosis("python", "warning", f"{found}, on which the tests do not run", advice)


def compiled_core(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the page core of this installation is compiled."""
    if core.NAME == "native":
        yield Diagnosis("page core", "ok", "compiled")
        return
    why = core.REASON or f"KVPAGE_CORE={core.NAME} is set"
    advice = "unset KVPAGE_CORE" if not core.REASON else "install a C compiler and xxhash.h, then `make core`"
    yield Diagnosis("page core", "warning", f"in Python, which is slower: {why}", advice)


def libraries(patient: Patient) -> Iterator[Diagnosis]:
    """Yield the versions of LMDB and of the dependencies that are older than their minimum."""
    import lmdb  # imported here: its C library is loaded

    old = []
    try:
        required = "\n".join(line for line in requires("kvpage") or () if "extra ==" not in line)
        for name, least in re.findall(r"^([\w-]+)>=([\d.]+)", required, re.MULTILINE):
            if _numbers(version(name)) < _numbers(least):
                old.append(f"{name} {version(name)} (at least {least})")
    except PackageNotFoundError as missing:
        advice = "install kvpage, or run `make` in a checkout"
        yield Diagnosis("libraries", "warning", f"{missing.name} is not installed", advice)
        return
    found = f"LMDB {'.'.join(map(str, lmdb.version()))}, redis-py {version('redis')}, uvloop {version('uvloop')}"
    if old:
        yield Diagnosis("libraries", "error", f"too old: {', '.join(old)}", "install kvpage again with pip")
    else:
        yield Diagnosis("libraries", "ok", found)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


_OF_THE_INSTALLATION: tuple[Check, ...] = (python, compiled_core, libraries)


# -- The machine -------------------------------------------------------------------------------------------------------


def overcommit(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the kernel gives address space that no memory backs yet, as the arena asks for."""
    mode = patient.kernel("proc/sys/vm/overcommit_memory")
    if mode != "2":
        known = {"0": "heuristic", "1": "always"}.get(mode)
        yield Diagnosis("overcommit", "ok" if known else "skipped", known or "no such setting on this system")
        return
    left = patient.memory_of_machine("CommitLimit") - patient.memory_of_machine("Committed_AS")
    found = f"vm.overcommit_memory is 2: the kernel gives {as_size(max(left, 0))} more in all"
    advice = "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio: the server reserves memory in large regions"
    yield Diagnosis("overcommit", "warning", found, advice)


def huge_pages(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the kernel backs the arena with pages of 2 MiB, for which the server asks."""
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    mode = re.search(r"\[(\w+)\]", patient.kernel(name))
    if not mode:
        yield Diagnosis("huge pages", "skipped", "no transparent huge pages on this system")
    elif mode[1] == "never":
        found = "never: filling fresh memory takes twice as long"
        yield Diagnosis("huge pages", "warning", found, f"echo madvise > /{name}")
    else:
        yield Diagnosis("huge pages", "ok", mode[1])


def swap(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the machine is about to swap."""
    total, free = patient.memory_of_machine("SwapTotal"), patient.memory_of_machine("SwapFree")
    available, memory = patient.memory_of_machine("MemAvailable"), patient.memory_of_machine("MemTotal")
    if not memory:
        yield Diagnosis("memory", "skipped", "no /proc/meminfo on this system")
        return
    found = (
        f"{as_size(available)} of {as_size(memory)} available, {as_size(total - free)} of {as_size(total)} swap used"
    )
    if available < memory // 20:
        yield Diagnosis("memory", "warning", found, "end other programs, or lower maxmemory: a server in swap is slow")
    else:
        yield Diagnosis("memory", "ok", found)


def backlog(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether as many connections may wait as tcp-backlog says."""
    most = patient.kernel("proc/sys/net/core/somaxconn")
    needed = patient.config.tcp_backlog
    if not most.isdecimal():
        yield Diagnosis("backlog", "skipped", "no net.core.somaxconn on this system")
    elif int(most) < needed:
        found = f"net.core.somaxconn is {most}, less than tcp-backlog {needed}"
        yield Diagnosis("backlog", "warning", found, f"sysctl net.core.somaxconn={needed}")
    else:
        yield Diagnosis("backlog", "ok", f"net.core.somaxconn {most}, tcp-backlog {needed}")


def open_files(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether a server that is started here gets a file descriptor for each of maxclients."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = patient.config.maxclients + OWN_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < needed:
        found = f"{hard:,} at most, and maxclients {patient.config.maxclients:,} needs {needed:,}"
        advice = f"ulimit -n {needed}, LimitNOFILE={needed} in a unit of systemd, or lower maxclients"
        yield Diagnosis("open files", "warning", found, advice)
    else:
        limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} at most"
        yield Diagnosis("open files", "ok", f"{limit}, {needed:,} needed")


def file_size(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether files may be as large as the store."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        yield Diagnosis("file size", "ok", "no limit")
        return
    found = f"files of {as_size(most)} at most (ulimit -f), which limits the store on disk"
    yield Diagnosis("file size", "warning", found, "ulimit -f unlimited, LimitFSIZE=infinity in a unit of systemd")


def clock(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the wall clock, which times to live use, is right."""
    installed = Path(__file__).stat().st_mtime
    if time.time() < installed - 86400:
        found = f"the clock is behind the installation of kvpage by {for_people(installed - time.time())}"
        yield Diagnosis("clock", "error", found, "set the clock, and synchronise it: timedatectl set-ntp true")
        return
    library = ctypes.CDLL(None)
    read = getattr(library, "adjtimex", None) or getattr(library, "ntp_adjtime", None)
    state = read(ctypes.create_string_buffer(512)) if read else -1  # zeros change nothing
    if state < 0:
        yield Diagnosis("clock", "skipped", "the system does not say whether the clock is synchronised")
    elif state == _CLOCK_ERROR:
        found = "not synchronised: times to live use this clock"
        yield Diagnosis("clock", "warning", found, "install chrony, or timedatectl set-ntp true")
    else:
        yield Diagnosis("clock", "ok", "synchronised")


def clock_source(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the kernel's clock is read without a system call."""
    source = patient.kernel("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        yield Diagnosis("clock source", "skipped", "the system does not name it")
    elif source in _SLOW_CLOCKS:
        found = f"{source}, which is slow to read: the server reads the clock for each command"
        yield Diagnosis("clock source", "warning", found, "add clocksource=tsc to the kernel's command line")
    else:
        yield Diagnosis("clock source", "ok", source)


_OF_THE_MACHINE: tuple[Check, ...] = (
    *(overcommit, huge_pages, swap, backlog, open_files, file_size, clock, clock_source),
)


# -- The configuration -------------------------------------------------------------------------------------------------

_CORRECT = "correct it: docs/configuration.md has every parameter and its values"


def configuration(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether a server starts with the configuration, see `kvpage-server --check-config`."""
    if patient.configuration_error:
        yield Diagnosis("configuration", "error", patient.configuration_error, _CORRECT)
    else:
        file = patient.config.file
        yield Diagnosis("configuration", "ok", f"{file} is valid" if file else "valid, without a file")


def maxmemory(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the machine, or the control group, has the memory that maxmemory allows."""
    limit, usable = patient.config.maxmemory, usable_memory()
    needed = limit + limit // 3 + _BESIDE
    if not limit:
        found = f"no limit: the kernel ends the server when {as_size(usable)} are used"
        yield Diagnosis("maxmemory", "warning", found, f"maxmemory {usable // 2 >> 20}mb")
    elif limit < SMALL_MEMORY:
        yield Diagnosis("maxmemory", "warning", f"only {as_size(limit)}", "a unit, such as maxmemory 5gb")
    elif needed > usable:
        found = f"{as_size(limit)} take up to {as_size(needed)}, and there are {as_size(usable)}"
        fits = max((usable - _BESIDE) * 3 // 4, 1 << 20) >> 20
        advice = f"maxmemory {fits}mb, or more memory: docs/size.md"
        yield Diagnosis("maxmemory", "error" if limit > usable else "warning", found, advice)
    else:
        yield Diagnosis("maxmemory", "ok", f"{as_size(limit)} of {as_size(usable)}")


def disk_space(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the disk has room for maxdisk."""
    config, place = patient.config, _existing(patient.directory)
    if config.store != "tiered":
        yield Diagnosis("disk space", "skipped", f"store {config.store} writes nothing")
        return
    file = patient.directory / FILE
    holds = file.stat().st_size if file.exists() else 0
    free = shutil.disk_usage(place).free
    limit = config.maxdisk if isinstance(config.maxdisk, int) else default_maxdisk(place)
    found = f"{as_size(free)} free in {place}, the store takes {as_size(holds)} of {as_size(limit)}"
    if free + holds < SMALLEST_DISK:
        yield Diagnosis("disk space", "error", found, f"free space, or name another directory: --dir; {_NO_DISK}")
    elif not limit:
        found = f"maxdisk is 0, no limit, and {as_size(free)} are free"
        yield Diagnosis("disk space", "warning", found, "maxdisk auto, or a size below that of the disk")
    elif holds > limit:
        found = f"the store takes {as_size(holds)} in {place}, more than maxdisk, {as_size(limit)}"
        advice = "raise maxdisk, or shrink the file: docs/troubleshooting.md#the-disk-grows-or-is-full"
        yield Diagnosis("disk space", "warning", found, advice)
    elif limit > free + holds:
        advice = "lower maxdisk, or free space: a full disk is worse than a full store"
        yield Diagnosis("disk space", "warning", found, advice)
    else:
        yield Diagnosis("disk space", "ok", found)


_NO_DISK = "without a disk: --store memory"


def file_system(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the directory is on a local file system that survives a restart."""
    place = _existing(patient.directory).resolve()
    kind = _file_system_of(place, patient.kernel("proc/self/mountinfo"))
    if patient.config.store != "tiered" or not kind:
        yield Diagnosis("file system", "skipped", "no disk is used" if kind else "the system does not list its mounts")
    elif kind in _NETWORKS:
        found = f"{place} is on {kind}, a network: LMDB needs the locks and the memory of one machine"
        yield Diagnosis("file system", "error", found, "name a directory on a local disk: --dir")
    elif kind in _VOLATILE:
        found = f"{place} is on {kind}, which does not outlive the machine or the container"
        advice = f"mount a volume, or name another directory: --dir; {_NO_DISK}"
        yield Diagnosis("file system", "warning", found, advice)
    else:
        yield Diagnosis("file system", "ok", kind)


def _file_system_of(place: Path, mounts: str) -> str:
    """Return the type of the file system with a directory, from /proc/self/mountinfo; "" if it is not listed."""
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        where = before.split()[4].replace("\\040", " ")
        if len(where) >= len(best) and place.is_relative_to(where):  # a later mount covers an earlier one
            best, kind = where, after.split()[0]
    return kind


def disk_speed(patient: Patient) -> Iterator[Diagnosis]:
    """Yield the speed of the disk, and the time of a commit, of a file that is written to its directory and removed."""
    if patient.config.store != "tiered":
        yield Diagnosis("disk speed", "skipped", "no disk is used")
        return
    try:
        rate, commit = _measured(_existing(patient.directory))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            yield Diagnosis("disk speed", "skipped", f"no file can be written: {error.strerror}")
        else:
            yield Diagnosis("disk speed", "error", _text(error), "examine the disk: dmesg, smartctl -a")
        return
    found = f"{as_size(round(rate))} a second, a commit takes {1000 * commit:.3g} ms"
    if rate < _SLOW_DISK or commit > _SLOW_COMMIT[patient.config.appendfsync]:
        advice = "use a faster disk for --dir, or appendfsync everysec: with always, each write waits for a commit"
        yield Diagnosis("disk speed", "warning", found, advice)
    else:
        yield Diagnosis("disk speed", "ok", found)


def _measured(directory: Path) -> tuple[float, float]:
    """Return the bytes a second of a sequential write, and the seconds of a small commit. Raises OSError."""
    block = os.urandom(1 << 20)
    with TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(_SPEED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        now = time.perf_counter()
        rate, commits, until = _SPEED_BYTES / (now - began), list[float](), now + _SPEED_SECONDS
        while len(commits) < 20 and (not commits or now < until):
            file.seek(0)
            file.write(block[:4096])
            file.flush()
            os.fsync(file.fileno())
            commits.append(time.perf_counter() - now)
            now = time.perf_counter()
    return rate, median(commits)


def permissions(patient: Patient) -> Iterator[Diagnosis]:
    """Yield the files with keys, passwords or pages that other users of the machine can read."""
    config = patient.config
    private = [patient.directory / FILE, *_named(patient, "tls_key_file", "aclfile")]
    if config.file and (config.requirepass or config.user or config.web_token or config.tls_key_file_pass):
        private.append(config.file)
    readable_by_others = [path for path in private if _mode(path) & 0o007]
    if patient.directory.name and _mode(patient.directory) & 0o002:
        readable_by_others.append(patient.directory)
    if readable_by_others:
        names = " ".join(map(str, readable_by_others))
        yield Diagnosis("permissions", "warning", f"other users have access to {names}", f"chmod o= {names}")
    else:
        yield Diagnosis("permissions", "ok", "no other user can read the store, keys or passwords")


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def ports(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the ports of the configuration are free, or in use by the running server."""
    config = patient.config
    own: dict[str, int] = {}
    for _, info in patient.servers:
        own |= info["ports"] if isinstance(info, dict) else {}
    taken, used = [], False
    for name, bind in (("port", config.bind), ("tls-port", config.bind), ("metrics-port", config.metrics_bind)):
        port = config.value(name)
        if port and own.get(name) == port:
            used = True
        elif port and not _is_free(bind, port):
            taken.append(f"{name} {port}")
    if taken:
        number = taken[0].split()[1]
        advice = f"`ss -ltnp 'sport = :{number}'` shows the program: stop it, or set another port"
        yield Diagnosis("ports", "error", f"another program has {', '.join(taken)}", advice)
    else:
        yield Diagnosis("ports", "ok", "in use by the running server" if used else "free")


def _is_free(addresses: list[str], port: int) -> bool:
    """Return whether a server could listen on a port of this machine's addresses."""
    for address in addresses:
        host = address.removeprefix("-")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(("" if host == "*" else host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True


def unix_socket(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the unix socket answers, and whether every user of the machine may connect."""
    if not patient.config.unixsocket:
        yield Diagnosis("unix socket", "skipped", "none is configured")
        return
    (path,) = _named(patient, "unixsocket")
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        yield Diagnosis("unix socket", "ok", f"{path} is made by the next start")
    except OSError as error:
        yield Diagnosis("unix socket", "error", f"{path}: {error.strerror or error}", "remove it, or name another path")
    else:
        everybody = " (every user of the machine may connect)" if patient.config.unixsocketperm & 0o002 else ""
        yield Diagnosis("unix socket", "ok", f"{path} accepts connections{everybody}")


def tls(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the certificate can be used, and until when."""
    if not patient.config.tls_port:
        found = f"{patient.config.file or 'a start without a configuration file'} has no tls-port"
        advice = "name the configuration of the server, to check its certificate" if "rediss://" in patient.urls else ""
        yield Diagnosis("tls", "skipped", found, advice)
        return
    config = copy(patient.config)
    for name in ("tls_cert_file", "tls_key_file", "tls_ca_cert_file"):
        for path in _named(patient, name):
            setattr(config, name, str(path))
    try:
        made = certificates.load(config)
        assert made is not None
        until, refusal = certificates.dates(made, config.tls_cert_file)
    except (certificates.CertificateError, OSError, ssl.SSLError) as error:
        yield Diagnosis("tls", "error", _text(error), "name a certificate and its key, both PEM: docs/security.md")
        return
    if refusal:
        yield Diagnosis("tls", "error", f"{config.tls_cert_file}: {refusal}", _OF_DATES[refusal])
    elif until is None:
        yield Diagnosis("tls", "skipped", "the dates of the certificate cannot be read")
    else:
        left = until - time.time()
        found = f"{config.tls_cert_file} is valid for {for_people(left)}"
        late = left < _DAYS * 86400
        yield Diagnosis("tls", "warning" if late else "ok", found, _RENEW if late else "")


_RENEW = "renew it, and send the server SIGHUP: docs/operations.md#renew-the-log-file-and-the-certificates"
_OF_DATES = {  # advice by OpenSSL's text about the dates of a certificate
    "certificate has expired": _RENEW,
    "certificate is not yet valid": "set the clocks of both machines (timedatectl set-ntp true), or wait",
}


def users(patient: Patient) -> Iterator[Diagnosis]:
    """Yield who can connect from where."""
    config, found = patient.config, Users()
    try:
        if config.requirepass:
            found.require_password(config.requirepass)
        for path in _named(patient, "aclfile"):
            found.load_file(path)
        if not config.aclfile:
            found.load(config.user_lines())
    except (UserFileError, OSError) as error:
        yield Diagnosis("users", "error", _text(error), "docs/security.md has the rules of users")
        return
    who = plural(len(found.by_name), "user")
    local = all(address.removeprefix("-") in ("127.0.0.1", "::1", "localhost") for address in config.bind)
    if local or not (found.default.enabled and found.default.no_password):
        yield Diagnosis("users", "ok", f"{who}, from {'this machine' if local else ' '.join(config.bind)}")
    elif config.protected_mode:
        advice = "set requirepass, or `user default off` and users with passwords: docs/security.md"
        yield Diagnosis("users", "warning", f"{who}; no password is set, so other machines are refused", advice)
    else:
        danger = f"everybody who reaches {' '.join(config.bind)} can read and change everything"
        yield Diagnosis("users", "error", danger, "set requirepass, or protected-mode yes: docs/security.md")


def _named(patient: Patient, *fields: str) -> list[Path]:
    """Return the absolute paths of parameters, which are relative to `dir`, without empty ones."""
    values = [getattr(patient.config, name) for name in fields]
    return [patient.directory / value for value in values if value]


def _existing(path: Path) -> Path:
    """Return the path, or the nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


_OF_THE_CONFIGURATION: tuple[Check, ...] = (
    *(configuration, maxmemory, disk_space, file_system, disk_speed, permissions, ports, unix_socket, tls, users),
)


# -- Running servers ---------------------------------------------------------------------------------------------------


_NUMBERS = (
    *("uptime_in_seconds", "used_memory", "maxmemory", "disk_bytes", "maxdisk", "server_time_usec"),
    *("disk_corrupt", "disk_repaired", "disk_quarantined", "disk_write_errors", "rdb_changes_since_last_save"),
    *("rejected_connections", "connected_clients", "maxclients"),
)


def _info(url: str) -> dict[str, Any] | Exception:
    """Return the fields of INFO of a server, with its `ports`, round trip in seconds and time; or the error."""
    try:
        with plain_client(url, protocol=3, socket_timeout=5, socket_connect_timeout=5) as client:
            info: dict[str, Any] = client.info()
            info |= {name: integer(info.get(name, 0)) for name in _NUMBERS}
            times = []
            for _ in range(20):
                began = time.perf_counter()
                client.info("server")  # a user for metrics may not call PING
                times.append(time.perf_counter() - began)
            info["round_trip"] = median(times)
            info["ahead"] = info["server_time_usec"] / 1e6 - time.time()
            info["ports"] = {"port": info.get("tcp_port")} | _ports_of(client)
            return info
    except (redis.RedisError, OSError, ValueError) as error:
        return error


def _ports_of(client: redis.Redis) -> dict[str, int]:
    try:
        found: Any = client.config_get("*port")
    except redis.ResponseError:  # the user may not
        return {}
    return {name: int(port) for name, port in found.items() if port.isdecimal()}


_START = "start it, or open its port: systemctl status kvpage-server, its log, the firewall"


def reached(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether each server answers, and takes the password."""
    if not patient.servers:
        yield Diagnosis("server", "skipped", "the configuration has only TLS: name a URL with --url rediss://...")
    for url, info in patient.servers:
        where = shown(url)
        if isinstance(info, dict) and "kvpage_version" in info:
            up = for_people(info["uptime_in_seconds"])
            yield Diagnosis("server", "ok", f"kvpage-server {info['kvpage_version']} at {where}, up {up}")
        elif isinstance(info, dict):
            other = f"{info.get('server_name', 'redis')} {info.get('redis_version', '')}"
            found = f"{where} is {other}, not a kvpage-server"
            yield Diagnosis("server", "error", found, "name the URL of a kvpage-server with --url, or start one there")
        elif isinstance(info, redis.AuthenticationError):
            advice = "set KVPAGE_PASSWORD in the environment, and name the user with --user"
            yield Diagnosis("server", "error", f"{where} refuses the password, or needs one: {info}", advice)
        elif isinstance(info, redis.ResponseError):
            yield Diagnosis("server", "error", f"{where}: {info}", "name a user with the right +info: --user")
        elif not patient.urls and isinstance(info, redis.ConnectionError):
            yield Diagnosis("server", "skipped", f"none runs at {where}")
        elif (refusal := _refusal_of_certificate(info)) is not None:
            why = refusal.verify_message
            advice = _OF_DATES.get(
                why, "name the file of its authority in the URL (?ssl_ca_certs=FILE): docs/security.md"
            )
            yield Diagnosis("server", "error", f"the certificate of {where} is refused: {why}", advice)
        else:
            advice = tls_hint(url, str(info)) or _START
            yield Diagnosis("server", "error", f"{where} does not answer: {info}", advice)


def _refusal_of_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the error of the check of a server's certificate that has caused a failed connection, or None."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _running(patient: Patient) -> list[tuple[str, dict[str, Any]]]:
    return [(shown(url), info) for url, info in patient.servers if isinstance(info, dict) and "kvpage_version" in info]


def versions(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether all servers have the version of this program."""
    others = [(url, info["kvpage_version"]) for url, info in _running(patient) if info["kvpage_version"] != __version__]
    if others:
        found = f"this is kvpage {__version__}; " + ", ".join(f"{url} is {other}" for url, other in others)
        yield Diagnosis("versions", "warning", found, "upgrade the older one: docs/upgrade.md")
    elif _running(patient):
        yield Diagnosis("versions", "ok", f"{__version__} everywhere")


def running_core(patient: Patient) -> Iterator[Diagnosis]:
    """Yield which page core each server runs."""
    for url, info in _running(patient):
        if info.get("page_core") == "native":
            yield Diagnosis("running core", "ok", "compiled")
        else:
            advice = "install a C compiler and xxhash.h, then `make core`, and restart the server; its log says why"
            yield Diagnosis("running core", "warning", f"{url} runs the page core in Python, which is slower", advice)


def limits(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the values of each server fit into maxmemory and maxdisk, which may have been lowered."""
    for url, info in _running(patient):
        excess = [
            f"{name} is {as_size(limit)}, and values take {as_size(used)}"
            for name, used, limit in (
                ("maxmemory", info["used_memory"], info["maxmemory"]),
                ("maxdisk", info["disk_bytes"], info["maxdisk"]),
            )
            if used > limit > 0
        ]
        if excess:
            advice = "raise the limit, or delete values; a policy that may evict them does so at the next writes"
            yield Diagnosis("limits", "warning", f"{url}: {'; '.join(excess)}", advice)
        else:
            yield Diagnosis("limits", "ok", "no store exceeds maxmemory or maxdisk")


def disk_errors(patient: Patient) -> Iterator[Diagnosis]:
    """Yield failed writes and damaged values of each server."""
    for url, info in _running(patient):
        failing = str(info.get("disk_failing") or "")
        counts = {name: info[f"disk_{name}"] for name in ("corrupt", "repaired", "quarantined", "write_errors")}
        damage = ", ".join(f"disk_{name} {count}" for name, count in counts.items() if count)
        if failing:
            unsaved = plural(info["rdb_changes_since_last_save"], "change")
            found = f"{url} cannot write: {failing}; a crash would lose {unsaved}"
            advice = "free space on the disk or replace it: docs/operations.md#when-the-disk-is-full"
            yield Diagnosis("disk errors", "error", found, advice)
        elif damage:
            yield Diagnosis("disk errors", "warning", f"{url}: {damage}", "examine the disk: dmesg, smartctl -a")
        else:
            yield Diagnosis("disk errors", "ok", "none")


def connections(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether each server has had room for all connections."""
    for url, info in _running(patient):
        names = "rejected_connections", "connected_clients", "maxclients"
        rejected, now, most = (info[name] for name in names)
        found = f"{now:,} of {most:,}, {rejected:,} rejected"
        if rejected or now > 0.9 * most:
            advice = "raise maxclients and ulimit -n, close idle clients (timeout), or see protected-mode in the log"
            yield Diagnosis("connections", "warning", f"{url}: {found}", advice)
        else:
            yield Diagnosis("connections", "ok", found)


def round_trips(patient: Patient) -> Iterator[Diagnosis]:
    """Yield the time of a small request to each server."""
    for url, info in _running(patient):
        found = f"{1000 * info['round_trip']:.2f} ms"
        if info["round_trip"] > _SLOW_ROUND_TRIP:
            advice = "use a unix socket, or a nearer server; SLOWLOG names slow commands"
            yield Diagnosis("round trip", "warning", f"{url}: {found}", advice)
        else:
            yield Diagnosis("round trip", "ok", found)


def clocks(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether the clocks of all servers agree with this machine's."""
    for url, info in _running(patient):
        ahead = info["ahead"]
        if abs(ahead) > 1 + info["round_trip"]:
            found = f"the clock of {url} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
            yield Diagnosis("server clock", "warning", found, "synchronise both: timedatectl set-ntp true")
        else:
            yield Diagnosis("server clock", "ok", "that of this machine")


def swapped(patient: Patient) -> Iterator[Diagnosis]:
    """Yield whether a server of this machine is in swap."""
    for url, info in _running(patient):
        status = patient.kernel(f"proc/{info.get('process_id')}/status") if _is_local(url) else ""
        found = re.search(r"^VmSwap:\s+(\d+) kB", status, re.MULTILINE)
        if found and int(found[1]) * 1024 > _SWAPPED:
            size = as_size(int(found[1]) * 1024)
            advice = "lower maxmemory, or set MemorySwapMax=0 in the unit: reads of swapped values wait for the disk"
            yield Diagnosis("swapped", "warning", f"{size} of {url} are in swap", advice)
        elif found:
            yield Diagnosis("swapped", "ok", "the server is in memory")


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in (None, "127.0.0.1", "::1", "localhost")


_OF_THE_SERVERS: tuple[Check, ...] = (
    *(reached, versions, running_core, limits, disk_errors, connections, round_trips, clocks, swapped),
)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
