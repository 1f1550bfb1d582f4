"""Runs sensitive tests as other machines would: `make test-elsewhere`. CONTRIBUTING.md says when.

    python tests/elsewhere.py           each setting by itself
    python tests/elsewhere.py --short   two minutes: the settings that go together, at once
    python tests/elsewhere.py NAME...   some settings; --list shows the names

A setting that this machine does not offer is reported as skipped, with the reason. It never counts as passed.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ["tests/engine"]
ROUNDED = ["tests/engine/caches", "tests/engine/families", "tests/engine/model", "tests/engine/test_engine_exp005.py"]
PROGRAMS = [
    "tests/server/test_app.py",
    "tests/server/test_defaults.py",
    "tests/server/test_kvpage_cli.py",
    "tests/server/test_kvpage_json.py",
    "tests/server/test_private_files.py",
    "tests/server/test_signals.py",
    "tests/server/test_terminal_encodings.py",
    "tests/engine/test_demo.py",
    "tests/engine/test_engine_commands.py",
    "tests/simulation/test_command.py",
]
FILES = ["tests/server/configuration", "tests/server/snapshot", "tests/server/store/disk", "tests/docs"]
PACED = [
    "tests/server/net",
    "tests/server/store/disk/test_full_disk_after_restart.py",
    "tests/engine/persistent/test_persistent_attention.py",
]
QUICK = [
    "tests/engine/caches/test_engine_quantised_from.py",
    "tests/engine/model/test_engine_blas.py",
    "tests/engine/persistent/test_persistent_attention.py",
    "tests/server/net/test_pipelines.py",
    "tests/server/store/disk/test_full_disk_after_restart.py",
    "tests/server/store/disk/test_tiered_stored_before.py",
    "tests/server/test_encodings.py",
    "tests/server/test_kvpage_json.py",
    "tests/server/test_private_files.py",
    "tests/server/test_signals.py",
    "tests/server/test_terminal_encodings.py",
]
NEEDS = {"Nehalem": "sse4_2", "Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
PORTS = (8000, 9221, 9223, 6379, *range(7000, 7006))  # which our programs and those of Redis take by default
SPINNERS = 6  # processes that share a processor with the tests
MARKS = "not soak and not alone"


class NotHere(Exception):
    """The machine does not offer a setting; the message says why."""


@dataclass
class Run:
    """How pytest is started."""

    tests: Sequence[str]
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: Path = ROOT
    user: str | None = None
    umask: int = -1
    before: list[Callable[[], object]] = field(default_factory=list)  # called in the new process
    note: str = ""  # that is shown with the result

    @property
    def python(self) -> str:
        return str(self.directory / ".venv/bin/python")

    def start(self, log: Path, workers: str) -> int:
        """Run the tests; pytest's exit code."""
        command = [self.python, "-m", "pytest", "-n", workers, "-m", MARKS, *self.tests]
        with log.open("wb") as file:
            return subprocess.run(
                command,
                cwd=self.directory,
                env=self.environment,
                user=self.user,
                group=None if self.user is None else pwd.getpwnam(self.user).pw_gid,
                extra_groups=None if self.user is None else [],
                umask=self.umask,
                preexec_fn=lambda: [call() for call in self.before],
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode


# -- settings: each changes a Run while it is open, or raises NotHere --------------------------------------------------


@contextmanager
def kernel(run: Run, name: str) -> Iterator[None]:
    """OpenBLAS uses the kernels for that processor."""
    with suppress(FileNotFoundError):
        if NEEDS[name] not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
            raise NotHere(f"the processor has no {NEEDS[name]}")
    run.environment["OPENBLAS_CORETYPE"] = name
    program = "import engine, ctypes as c; f = c.CDLL(None).openblas_get_corename; f.restype = c.c_char_p; print(f())"
    done = subprocess.run([run.python, "-c", program], cwd=ROOT, env=run.environment, capture_output=True, check=False)
    if done.returncode:
        raise NotHere("MLX does not use OpenBLAS")
    if name.lower() not in done.stdout.decode().lower():
        raise NotHere(f"OpenBLAS does not have these kernels, and takes {done.stdout.decode().strip()}")
    yield


@contextmanager
def own_kernel(run: Run) -> Iterator[None]:
    run.environment.pop("OPENBLAS_CORETYPE", None)
    yield


@contextmanager
def threads(run: Run) -> Iterator[None]:
    run.environment["OPENBLAS_NUM_THREADS"] = "4"
    yield


@contextmanager
def interrupts_ignored(run: Run) -> Iterator[None]:
    run.before.append(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    run.before.append(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    yield


@contextmanager
def strict_umask(run: Run) -> Iterator[None]:
    run.umask = 0o077
    yield


@contextmanager
def ports_taken(run: Run) -> Iterator[None]:
    with ExitStack() as stack:
        for port in PORTS:
            with suppress(OSError):  # it is taken then
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


@contextmanager
def ascii_locale(run: Run) -> Iterator[None]:
    run.environment |= ASCII
    yield


@contextmanager
def latin_1_locale(run: Run) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as place:
        if not shutil.which("localedef") or not Path("/usr/share/i18n/charmaps").exists():
            raise NotHere("there is no localedef with its sources (Debian: the package locales)")
        command = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", f"{place}/en_US.ISO-8859-1"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise NotHere("localedef makes no locale of Latin-1")
        run.environment |= {"LOCPATH": place, "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}
        program = "import locale; print(locale.getencoding())"
        encoding = subprocess.check_output([run.python, "-c", program], env=run.environment)
        if encoding.strip() != b"ISO-8859-1":
            raise NotHere("the C library does not take a locale from LOCPATH")
        yield


@contextmanager
def slow(run: Run) -> Iterator[None]:
    """One processor, which busy processes share."""
    if not hasattr(os, "sched_setaffinity"):
        raise NotHere("processes cannot be bound to a processor")
    one = {min(os.sched_getaffinity(0))}
    run.before.append(lambda: os.sched_setaffinity(0, one))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(SPINNERS)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, one)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def another_user(run: Run) -> Iterator[None]:
    """A copy of the project in a path with a space, for nobody, who owns no file of it."""
    if os.geteuid():
        raise NotHere("only root can become another user; all other settings run as this one")
    if (ROOT / ".venv").is_symlink():
        raise NotHere(".venv is a link, so its copy would be the original")
    with tempfile.TemporaryDirectory(prefix="a path with spaces ") as place:
        os.chmod(place, 0o755)
        run.user, run.directory = "nobody", Path(place, "kvpage")
        python = _python_for(run.user)
        run.note = ", " + subprocess.check_output([python, "--version"], encoding="utf-8").strip()
        _copy(run.directory, python)
        home = Path(place, "home")
        home.mkdir()
        for directory in (home, *(path for path in run.directory.rglob("*") if path.is_dir()), run.directory):
            shutil.chown(directory, run.user)
        run.environment |= {"HOME": str(home), "USER": run.user, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        yield


def _python_for(user: str) -> str:
    """A Python of this version, without the last number, that the user may start."""
    minor = f"python3.{sys.version_info.minor}"
    for python in (f"/usr/bin/{minor}", os.path.realpath(sys.executable), f"/usr/local/bin/{minor}"):
        with suppress(OSError):
            if not subprocess.run([python, "-c", "import venv"], user=user, cwd="/", check=False).returncode:
                return python
    raise NotHere(f"{user} may start no {minor}: install Python outside of root's home")


def _copy(directory: Path, python: str) -> None:
    """The project and its environment, with another interpreter. Files are linked where that can be done."""
    cached = shutil.ignore_patterns(
        ".git", "data", "build", "dist", "*_cache", "__pycache__", "node_modules", ".hypothesis"
    )
    shutil.copytree(ROOT, directory, symlinks=True, ignore=cached, copy_function=_link)
    environment = directory / ".venv"
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (environment / "bin" / name).unlink(missing_ok=True)
        (environment / "bin" / name).symlink_to(python)
    (environment / "pyvenv.cfg").unlink()
    (environment / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\n", encoding="utf-8")
    packages = next(environment.glob("lib/python3*/site-packages"))
    named = [*environment.glob("bin/*"), *packages.glob("__editable__*"), *packages.glob("kvpage-*/direct_url.json")]
    for path in (path for path in named if path.is_file() and not path.is_symlink()):
        text = path.read_bytes()
        if str(ROOT).encode() in text:
            mode = path.stat().st_mode
            path.unlink()  # or the original would change
            path.write_bytes(_moved(text, directory))
            path.chmod(mode | 0o444)
    _add_what_older_pythons_need(python, packages)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _moved(text: bytes, directory: Path) -> bytes:
    first, newline, rest = text.partition(b"\n")
    if first.startswith(b"#!"):  # which cannot have a space; pip writes the same two lines
        first = b"#!/bin/sh\n'''exec' \"%b\" \"$0\" \"$@\"\n' '''" % str(directory / ".venv/bin/python").encode()
    return (first + newline + rest).replace(str(ROOT).encode(), str(directory).encode())


def _add_what_older_pythons_need(python: str, packages: Path) -> None:
    version = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:3])"]).split()
    if tuple(map(int, version)) < (3, 11, 3):  # redis-py and valkey-py have a requirement more there
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(packages),
            "async-timeout",
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise NotHere("pip gets no async-timeout, which redis-py needs before Python 3.11.3")


# -- the list ----------------------------------------------------------------------------------------------------------

Way = Callable[[Run], AbstractContextManager[None]]


@dataclass(frozen=True)
class Setting:
    """The differences from this machine, and the tests that could fail there."""

    ways: Sequence[Way]
    tests: Sequence[str]


SETTINGS: Mapping[str, Setting] = {
    "this processor's kernels": Setting([own_kernel], ENGINE),
    **{f"kernels of {name}": Setting([partial(kernel, name=name)], ENGINE) for name in NEEDS},
    "four threads of OpenBLAS": Setting([threads], ROUNDED),
    "SIGINT and SIGHUP ignored": Setting([interrupts_ignored], PROGRAMS),
    "umask 077": Setting([strict_umask], [*PROGRAMS, *FILES]),
    "default ports taken": Setting([ports_taken], [*PROGRAMS, *FILES]),
    "another user, a path with spaces": Setting([another_user], [*PROGRAMS, *FILES]),
    "ASCII": Setting([ascii_locale], [*PROGRAMS, *FILES]),
    "Latin-1": Setting([latin_1_locale], [*PROGRAMS, *FILES]),
    "a slow machine": Setting([slow], PACED),
}
TOGETHER = [threads, interrupts_ignored, strict_umask, ports_taken]
SHORT: Mapping[str, Setting] = {
    **{f"kernels of {name}": Setting([partial(kernel, name=name)], QUICK[:2]) for name in ("Nehalem", "Haswell")},
    "four threads, signals ignored, umask 077, ports taken": Setting(TOGETHER, QUICK),
    "ASCII": Setting([ascii_locale], QUICK[5:8]),
}


def tried(setting: Setting, workers: str) -> str:
    """Run a setting's tests: "passed", "skipped" or "FAILED", and the details."""
    run = Run(setting.tests)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        try:
            for way in setting.ways:
                stack.enter_context(way(run))
        except NotHere as reason:
            return f"skipped  {reason}"
        log = Path(place, "log")
        code = run.start(log, workers)
        output = log.read_text(encoding="utf-8", errors="replace")
        counted = output.rstrip().rpartition("\n")[2]
        if code:
            print(output, flush=True)
            return f"FAILED   exit code {code}: {counted}"
        return f"passed   {counted}{run.note}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run sensitive tests as other machines would.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a setting, or the beginning of its name (default: all)"
    )
    parser.add_argument("--short", action="store_true", help="two minutes: settings that go together, at once")
    parser.add_argument("--list", action="store_true", help="show the names")
    parser.add_argument("--workers", default="2", help="processes of pytest (default: %(default)s)")
    args = parser.parse_args()
    settings = SHORT if args.short else SETTINGS
    chosen = [name for name in settings if not args.names or any(map(name.startswith, args.names))]
    if unknown := [name for name in args.names if not any(known.startswith(name) for known in settings)]:
        parser.error(f"there is no setting {unknown[0]!r}; --list shows them")
    if args.list:
        print(*settings, sep="\n")
        return 0
    results = []
    for name in chosen:
        results.append(tried(settings[name], args.workers))
        print(f"{name:34}  {results[-1]}", flush=True)
    counts = [sum(result.startswith(word) for result in results) for word in ("passed", "skipped", "FAILED")]
    print("{} settings passed, {} skipped, {} failed".format(*counts))
    return int(counts[2] > 0)


if __name__ == "__main__":
    sys.exit(main())
