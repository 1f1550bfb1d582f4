"""Signals: some end the server in order, some reload it, and others do no harm."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from documents import ROOT
from servers import START_WITHIN, STOP_WITHIN, RunningServer, answers, free_port, start_server
from terminals import Terminal, terminal
from waiting import until

from kvpage_server.system.process import IGNORED, STOP

MB = 1024**2
BODY = b"acknowledged" * 1000
FATE = re.compile(r"^\| (`SIG.*?) \| (.*?) \|", re.MULTILINE)


# A program with a finalizer that Ctrl-C interrupts. Python drops exceptions of finalizers.
INTERRUPTED_FINALIZER = """
import signal
from kvpage_server.system.program import ends_quietly

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
with ends_quietly("kvpage"):
    Finalized()
    signal.pause()
"""


# A program whose import is interrupted.
INTERRUPTED_IMPORT = """
import signal
from kvpage_server.system.program import ends_quietly, interrupts_deferred

signal.signal(signal.SIGINT, signal.default_int_handler)
with ends_quietly("kvpage"):
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        print("imported")
    print("went on")
"""


# A server that reads from a pipe while it starts, so that the start lasts until the test goes on.
SLOW_START = """
import sys
from kvpage_server import app
check, pipe = app.check_paths, sys.argv.pop(1)
app.check_paths = lambda config: (open(pipe, "rb").read(1), check(config))
app.main()
"""


# A server that gets a signal before it opens its store.
STOPPED_START = """
import signal, sys
from kvpage_server import app
number, open_store = int(sys.argv.pop(1)), app._open_store
signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT and SIGQUIT
app._open_store = lambda config: (signal.raise_signal(number), open_store(config))
app.main()
"""


def command(directory: Path, port: int, *options: str) -> list[str]:
    """Return the command of a server with a disk, which writes only at the end."""
    where = ["--dir", str(directory), "--port", str(port)]
    return [sys.executable, "-m", "kvpage_server.app", *where, "--appendfsync", "no", *options]


@contextmanager
def at(place: Terminal, directory: Path, *before: str) -> Iterator[RunningServer]:
    """A server started at a terminal, with a value that was acknowledged."""
    port = free_port()
    process = place.start([*before, *command(directory, port)])
    try:
        wait_for(port, process)
        server = RunningServer(process, port, directory / "log")
        with server.client() as client:
            assert client.set("x", BODY)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_WITHIN
    while not answers(port):
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_kept(directory: Path) -> None:
    """Check that acknowledged values exist after a restart."""
    with start_server("--store", "tiered", directory=directory) as server, server.client() as client:
        assert client.get("x") == BODY


class TestTerminal:
    def test_when_it_is_closed_everything_is_written(self, tmp_path: Path) -> None:
        with terminal() as place, at(place, tmp_path) as server:
            place.close()
            assert server.process.wait(STOP_WITHIN) == 0
        assert_kept(tmp_path)

    def test_a_sent_hangup_is_one(self, tmp_path: Path) -> None:
        with terminal() as place, at(place, tmp_path) as server:
            assert server.stop(signal.SIGHUP) == 0
        assert_kept(tmp_path)

    def test_so_it_is_where_input_and_output_go_elsewhere(self, tmp_path: Path) -> None:
        port, elsewhere = free_port(), dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with terminal() as place:
            process = place.start(command(tmp_path, port), **elsewhere)
            wait_for(port, process)
            with RunningServer(process, port, tmp_path / "log").client() as client:
                client.set("x", BODY)
            place.close()
            assert process.wait(STOP_WITHIN) == 0
        assert_kept(tmp_path)

    @pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
    def test_the_end_of_the_starting_make_saves_everything(self, tmp_path: Path) -> None:
        """The shell is hung up, and ends; then the system hangs up the foreground processes, including make."""
        port, pidfile = free_port(), tmp_path / "pid"
        words = shlex.join(command(tmp_path, port, "--pidfile", str(pidfile)))
        (tmp_path / "Makefile").write_text(f"run:\n\t{words}\n", encoding="utf-8")
        with terminal() as place:
            shell = place.start(["sh", "-c", f"make -f '{tmp_path / 'Makefile'}'; echo never"])
            wait_for(port, shell)
            with RunningServer(shell, port, tmp_path / "log").client() as client:
                client.set("x", BODY)
            assert int(pidfile.read_text(encoding="utf-8")) != shell.pid
            place.close()
            assert shell.wait(STOP_WITHIN) == -signal.SIGHUP
            until(lambda: not pidfile.exists() and not answers(port))
        assert_kept(tmp_path)

    @pytest.mark.parametrize("background", [False, True])
    def test_it_stops_without_a_forwarded_hangup_in_the_foreground(self, tmp_path: Path, background: bool) -> None:
        """The system notifies only the terminal's first process; if that is make, it waits for the server."""
        port, pidfile = free_port(), tmp_path / "pid"
        with terminal() as place:
            words = [*command(tmp_path, port, "--pidfile", str(pidfile))]
            first = place.start([sys.executable, "-c", _WAIT, str(int(background)), *words])
            wait_for(port, first)
            with RunningServer(first, port, tmp_path / "log").client() as client:
                client.set("x", BODY)
            place.close()
            if background:
                time.sleep(3)
                assert answers(port)
                os.kill(int(pidfile.read_text(encoding="utf-8")), signal.SIGTERM)
            assert first.wait(STOP_WITHIN) == 0
        assert_kept(tmp_path)

    def test_with_hangups_ignored_it_runs_on_without_a_terminal(self, tmp_path: Path) -> None:
        """nohup. The loss of the terminal, to which its log was written, does not stop it."""
        with terminal() as place, at(place, tmp_path, sys.executable, "-c", _IGNORE_AND_RUN) as server:
            place.close()
            with server.client() as client:
                client.config_set("loglevel", "debug")
                for _ in range(100):
                    client.execute_command("CLIENT", "NO-EVICT", "ON")
                    with server.connect() as other:  # is logged
                        other.sendall(b"*1\r\nnonsense\r\n")
                assert client.ping()
            assert server.stop(signal.SIGTERM) == 0
        assert_kept(tmp_path)


_WAIT = (
    "import signal, subprocess, sys; signal.signal(signal.SIGHUP, lambda *_: None);"
    "sys.exit(subprocess.call(sys.argv[2:], process_group=0 if sys.argv[1] == '1' else None))"
)
_IGNORE_AND_RUN = (
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
)


def test_a_closed_log_pipe_does_not_stop_it(tmp_path: Path) -> None:
    """The case of `kvpage-server 2>&1 | head -1`."""
    port = free_port()
    process = subprocess.Popen(command(tmp_path, port), stderr=subprocess.PIPE, start_new_session=True)
    assert process.stderr
    wait_for(port, process)
    process.stderr.close()
    with RunningServer(process, port, tmp_path / "log").client() as client:
        assert client.set("x", BODY)
    process.terminate()
    assert process.wait(STOP_WITHIN) == 0
    assert_kept(tmp_path)


def test_a_service_continues_after_a_hangup() -> None:
    with start_server() as server, server.client() as client:
        client.set("x", BODY)
        for _ in range(3):
            server.process.send_signal(signal.SIGHUP)
            assert client.get("x") == BODY
        until(lambda: "SIGHUP" in server.log)
        assert client.ping()


@pytest.mark.parametrize("number", STOP, ids=lambda number: signal.Signals(number).name)
def test_stop_signals_stop_it_in_order(tmp_path: Path, number: int) -> None:
    with start_server("--store", "tiered", "--appendfsync", "no", directory=tmp_path) as server:
        with server.client() as client:
            client.set("x", BODY)
        assert server.stop(signal.Signals(number)) == 0
    assert f"{signal.Signals(number).name}: stopping" in server.log
    assert_kept(tmp_path)


def test_other_signals_have_no_effect() -> None:
    with start_server() as server, server.client() as client:
        for number in IGNORED:
            os.kill(server.pid, number)
            assert client.ping(), number
        os.kill(server.pid, signal.SIGUSR1)
        assert client.ping()


def test_a_file_that_may_not_grow_ends_nothing_and_is_no_promise(tmp_path: Path) -> None:
    """SIGXFSZ: without permission to write, `always` refuses, and values that it did not refuse exist."""
    port, most = free_port(), 2 << 20
    process = subprocess.Popen(
        [*command(tmp_path, port), "--appendfsync", "always"],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    wait_for(port, process)
    kept = []
    with RunningServer(process, port, tmp_path / "log").client() as client:
        for i in range(most // len(BODY)):
            try:
                client.set(f"x{i}", BODY)
                kept.append(f"x{i}")
            except redis.ResponseError as error:
                assert str(error).startswith("MISCONF") or "No space" in str(error)  # noqa: PT017 - each is looked at
                break
    process.kill()
    process.wait()
    assert 10 < len(kept) < most // len(BODY)
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        assert client.mget(kept) == [BODY] * len(kept)


def test_ctrl_c_while_it_starts_leaves_no_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    python, *_, directory, port_option, port, fsync, no = command(tmp_path, free_port())
    words = [python, "-c", SLOW_START, str(pipe), "--dir", directory, port_option, port, fsync, no]
    with subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True) as process:
        writing = os.open(pipe, os.O_WRONLY)  # it reads
        process.send_signal(signal.SIGINT)
        _, received = process.communicate(timeout=60)
        os.close(writing)
    assert (process.returncode, received) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("number", STOP[:3], ids=lambda number: signal.Signals(number).name)
def test_stop_signals_stop_a_start_in_order(tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-c", STOPPED_START, str(number), "--dir", str(tmp_path), "--port", "0"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=100)
    assert done.returncode == 0
    assert done.stderr.endswith(f"{signal.Signals(number).name}: stopping before the start is complete\n")


@pytest.mark.parametrize(
    ("program", "output"),
    [(INTERRUPTED_FINALIZER, ""), (INTERRUPTED_IMPORT, "imported\n")],
    ids=["finalizer", "import"],
)
def test_ctrl_c_in_a_finalizer_or_an_import_ends_a_program(program: str, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, output, "kvpage: interrupted\n")


def fates() -> dict[str, str]:
    """Return the documented effect of each signal in docs/operations.md."""
    table = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return {name: fate for names, fate in FATE.findall(table) for name in re.findall(r"`(SIG\w+)`", names)}


def test_an_unreadable_file_ends_it_with_a_reason(tmp_path: Path) -> None:
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        client.mset({f"key {number}": os.urandom(MB) for number in range(8)})
    port = free_port()
    command = [sys.executable, "-m", "kvpage_server", "--port", str(port), "--dir", str(tmp_path), "--scrub-rate", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        until(lambda: answers(port), "the start", within=START_WITHIN)
        os.truncate(tmp_path / "kvpage.lmdb", MB)  # an access above raises SIGBUS, as with an unreadable sector
        with redis.Redis(port=port) as client, suppress(redis.ConnectionError):
            client.mget([f"key {number}" for number in range(8)])
        printed = process.communicate(timeout=STOP_WITHIN)[1]
    assert (process.returncode, "Fatal Python error: Bus error" in printed) == (-signal.SIGBUS, True)


def test_the_table_of_signals_is_true_and_whole() -> None:
    received = fates()
    realtime = range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()
    for number in signal.valid_signals() - set(realtime):
        name = signal.Signals(number).name
        expected: Callable[[str], bool] = {
            number in STOP: lambda fate: fate.startswith("stops in order"),
            number in IGNORED: lambda fate: fate.startswith("is ignored"),
            number == signal.SIGHUP: lambda fate: "terminal" in fate and "service" in fate,
        }.get(True, lambda fate: fate.startswith("as the system has it"))
        assert expected(received.get(name, "nothing")), (name, received.get(name))
    assert set(realtime) <= set(IGNORED)


@pytest.mark.parametrize("read", [False, True])
def test_a_key_removed_and_stored_again_is_written(tmp_path: Path, read: bool) -> None:
    """Under appendfsync no the new value waits in memory, while the removal of the old one waits to be written."""
    options = ("--store", "tiered", "--appendfsync", "no")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for key in ("a", "b", "c"):
            client.set(key, b"old" * 3000)
            assert client.get(key)  # a second use: it is written to disk
        client.save()
        client.delete("a", "b", "c")
        with client.pipeline(transaction=False) as pipe:
            for key in ("a", "b", "c"):
                pipe.set(key, b"new" * 3000)
                if read:
                    pipe.get(key)
            pipe.execute()
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        assert client.mget("a", "b", "c") == [b"new" * 3000] * 3


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc is of Linux")
def test_a_hangup_during_the_start_renews_after_it(tmp_path: Path) -> None:
    """A hook of logrotate may send it while the machine starts. The other signals are ignored."""
    port, log = free_port(), tmp_path / "log"
    words = ["--port", str(port), "--dir", str(tmp_path), "--logfile", str(log)]
    command = [sys.executable, "-m", "kvpage_server", *words]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            status = Path(f"/proc/{process.pid}/status")
            ignored = re.compile(r"^SigIgn:\s*(\w+)", re.MULTILINE)
            last = 1 << (signal.SIGALRM - 1)
            until(lambda: int(ignored.search(status.read_text(encoding="utf-8"))[1], 16) & last)
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                process.send_signal(number)
            until(lambda: answers(port) and "SIGHUP: the log goes on here" in log.read_text(encoding="utf-8"))
        finally:
            process.terminate()
        assert process.wait(STOP_WITHIN) == 0
