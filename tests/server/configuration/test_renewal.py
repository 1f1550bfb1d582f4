"""The log file and the certificates are renewed while the server runs, and invalid ones change nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from servers import RunningServer, free_port, start_server
from test_tls import SecureServer, answers, certificates, files, issue, needs_openssl, run_openssl
from waiting import until

from kvpage_server.commands.context import Server
from kvpage_server.configuration import log
from kvpage_server.configuration.config import Config
from kvpage_server.service import renew_when
from kvpage_server.store.keyspace import Keyspace

__all__ = ["certificates"]  # a fixture


class TestLogFile:
    @pytest.fixture
    def logging_server(self, tmp_path: Path) -> Iterator[tuple[RunningServer, Path]]:
        log = tmp_path / "logs" / "kvpage.log"
        log.parent.mkdir()
        with start_server("--logfile", str(log)) as server:
            yield server, log

    def test_a_new_one_is_begun_where_it_was(self, logging_server: tuple[RunningServer, Path]) -> None:
        server, log = logging_server
        for turn in ("1", "2"):
            old = log.rename(log.with_name(f"old{turn}"))
            size = old.stat().st_size
            assert size
            server.process.send_signal(signal.SIGHUP)
            until(lambda: log.exists() and "the log goes on here" in log.read_text(encoding="utf-8"))
            assert old.stat().st_size == size
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
        server.stop()
        assert "SIGTERM: stopping" in log.read_text(encoding="utf-8")

    def test_the_group_that_logrotate_gave_it_to_keeps_it(self, logging_server: tuple[RunningServer, Path]) -> None:
        server, log = logging_server
        log.unlink()
        log.touch()
        log.chmod(0o644)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the log goes on here" in log.read_text(encoding="utf-8"))
        assert stat.S_IMODE(log.stat().st_mode) == 0o640

    def test_a_full_disk_leaves_the_old_file_and_no_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        before = list(logging.getLogger().handlers)
        with pytest.raises(OSError, match="No space left"):
            log.reopen(Config(logfile="/dev/full"))
        assert logging.getLogger().handlers == before
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("is_read", [False, True])
    def test_a_pipe_in_its_place_is_refused_at_once(self, tmp_path: Path, is_read: bool) -> None:
        pipe = tmp_path / "log"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        if not is_read:
            os.close(reader)
        with pytest.raises(OSError, match="regular file" if is_read else "No such device"):
            log.reopen(Config(logfile=str(pipe)))
        if is_read:
            os.close(reader)

    def test_an_unexpected_error_ends_no_further_renewals(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = Server(Config(logfile=str(tmp_path / "missing" / "log")), Keyspace())

        async def renewed() -> None:
            asked = asyncio.Event()
            task = asyncio.create_task(renew_when(asked, server))
            with monkeypatch.context() as patch:
                patch.setattr(log, "reopen", lambda config: 1 // 0)
                asked.set()
                await asyncio.to_thread(until, lambda: "the log file could not be renewed" in caplog.text)
            assert "ZeroDivisionError" in caplog.text
            asked.set()
            await asyncio.to_thread(until, lambda: "the log goes on in the old file" in caplog.text)
            task.cancel()

        asyncio.run(renewed())

    def test_the_old_file_is_used_if_no_new_one_can_be_opened(self, logging_server: tuple[RunningServer, Path]) -> None:
        server, log = logging_server
        moved = log.parent.rename(log.parent.with_name("moved")) / log.name
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the log goes on in the old file" in moved.read_text(encoding="utf-8"))
        assert f"{log}: No such file or directory" in moved.read_text(encoding="utf-8")
        server.stop()
        assert "bye" in moved.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def next_year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a replacement of `certificates`: another authority, with certificates of a server and a client."""
    at = tmp_path_factory.mktemp("next")
    issue(at, " of next year")
    run_openssl(*("rsa", "-aes256", "-passout", "pass:secret", "-in", "server.key", "-out", "locked.key"), at=at)
    for name in ("server.crt", "server.key", "ca.crt"):
        whole = (at / name).read_text(encoding="utf-8").splitlines()
        (at / f"torn-{name}").write_text("\n".join([*whole[:5], whole[-1], ""]), encoding="utf-8")
    return at


@pytest.fixture
def renewable(certificates: Path, tmp_path: Path) -> Iterator[SecureServer]:
    """A server whose certificates may be changed where they are."""
    for name in ("server.crt", "server.key", "ca.crt", "client.crt", "client.key"):
        shutil.copy(certificates / name, tmp_path)
    port = free_port()
    with start_server("--tls-port", str(port), *files(tmp_path)) as server:
        yield SecureServer(server, port, tmp_path)


def shown(secure: SecureServer) -> str:
    """The name in the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    pem = ssl.get_server_certificate(("127.0.0.1", secure.port))
    file = Path(secure.at, "shown.pem")
    file.write_text(pem, encoding="utf-8")
    return run_openssl("x509", "-noout", "-subject", "-in", "shown.pem", at=secure.at)


def set_files(secure: SecureServer, **changes: object) -> None:
    with secure.plain.client() as client:
        words = [word for name, value in changes.items() for word in (name.replace("_", "-"), str(value))]
        client.execute_command("CONFIG", "SET", *words)


@needs_openssl
class TestCertificates:
    def test_a_hangup_reads_them_again_and_connections_live_on(self, renewable: SecureServer, next_year: Path) -> None:
        with renewable.connect() as before:
            assert "next year" not in shown(renewable)
            for name in ("server.crt", "server.key", "ca.crt"):
                shutil.copy(next_year / name, renewable.at / name)
            os.kill(renewable.plain.pid, signal.SIGHUP)
            until(lambda: "new connections get the certificates" in renewable.plain.log)
            assert "next year" in shown(renewable)
            assert not answers(renewable, "client")  # whom the old authority vouches for
            assert answers(SecureServer(renewable.plain, renewable.port, next_year), "client")
            for _ in range(3):
                before.sendall(b"PING\r\n")
                assert before.recv(7) == b"+PONG\r\n"

    def test_a_hangup_with_bad_certificates_changes_nothing(self, renewable: SecureServer, next_year: Path) -> None:
        shutil.copy(next_year / "server.crt", renewable.at)  # and the key is to follow
        os.kill(renewable.plain.pid, signal.SIGHUP)
        until(lambda: "the old certificates stay in use" in renewable.plain.log)
        assert "the key is not that of the certificate" in renewable.plain.log
        assert "next year" not in shown(renewable)
        assert answers(renewable, "client")

    def test_others_are_named_while_it_runs(self, renewable: SecureServer, next_year: Path) -> None:
        with renewable.connect() as before:
            set_files(renewable, tls_cert_file=next_year / "server.crt", tls_key_file=next_year / "server.key")
            assert "next year" in shown(renewable)
            assert not answers(SecureServer(renewable.plain, renewable.port, next_year), "client")
            set_files(renewable, tls_ca_cert_file=next_year / "ca.crt")
            assert answers(SecureServer(renewable.plain, renewable.port, next_year), "client")
            assert not answers(renewable, "client")
            set_files(renewable, tls_auth_clients="no", slowlog_log_slower_than=0)
            assert answers(SecureServer(renewable.plain, renewable.port, next_year), None)
            set_files(renewable, tls_key_file=next_year / "locked.key", tls_key_file_pass="secret")
            assert "next year" in shown(renewable)
            before.sendall(b"PING\r\n")
            assert before.recv(7) == b"+PONG\r\n"
        with renewable.plain.client() as client:
            assert "tls-key-file-pass" not in client.config_get("*")
            log = str(client.execute_command("SLOWLOG", "GET", 100))
            assert "redacted" in log
            assert "secret" not in log

    def test_bad_ones_are_refused_without_a_port_too(self, next_year: Path) -> None:
        certificate, key, authority = (str(next_year / name) for name in ("server.crt", "server.key", "ca.crt"))
        with start_server() as server, server.client(decode_responses=True) as client:
            for name in ("tls-cert-file", "tls-key-file", "tls-ca-cert-file"):
                with pytest.raises(redis.ResponseError, match=f"argument '{name}'"):
                    client.config_set(name, str(next_year / "none"))
            with pytest.raises(redis.ResponseError, match="CONFIG SET takes both at once"):
                client.config_set("tls-cert-file", certificate)
            assert not any(client.config_get("tls-*-file").values())
            client.config_set("tls-ca-cert-file", authority, "tls-cert-file", certificate, "tls-key-file", key)
            client.config_set("tls-ca-cert-file", "", "tls-cert-file", "", "tls-key-file", "")

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"tls_cert_file": "server.crt"}, "the key is not that of the certificate; CONFIG SET takes both at once"),
            ({"tls_cert_file": "none.crt"}, "none.crt: No such file or directory"),
            ({"tls_cert_file": "."}, " is not a file"),
            ({"tls_cert_file": "/dev/zero"}, "/dev/zero is not a file"),
            ({"tls_cert_file": "server.key"}, "server.key holds no certificate in PEM"),
            ({"tls_key_file": "server.crt"}, "server.crt holds no private key in PEM"),
            ({"tls_cert_file": "torn-server.crt", "tls_key_file": "server.key"}, "a certificate is damaged"),
            ({"tls_cert_file": "server.crt", "tls_key_file": "torn-server.key"}, "the key is damaged"),
            ({"tls_cert_file": "server.crt", "tls_key_file": "locked.key"}, "tls-key-file-pass does not open the key"),
            ({"tls_ca_cert_file": "torn-ca.crt"}, "a certificate is damaged"),
            ({"tls_ca_cert_file": "ca.key"}, "ca.key holds no certificate in PEM"),
            ({"tls_cert_file": "huge.crt"}, "huge.crt: it has more than 16777216 bytes"),
            (
                {"tls_cert_file": "server.crt", "tls_key_file": "server.key", "maxclients": "x"},
                "must be a whole number",
            ),
        ],
    )
    def test_bad_ones_are_refused_and_the_old_ones_stay(
        self, renewable: SecureServer, next_year: Path, changes: dict[str, str], why: str
    ) -> None:
        with open(next_year / "huge.crt", "wb") as sparse:
            sparse.truncate(64 << 30)
        with renewable.plain.client(decode_responses=True) as client:
            before = client.config_get("tls*")
            named = {name: next_year / value if name.startswith("tls") else value for name, value in changes.items()}
            with pytest.raises(redis.ResponseError) as caught:
                set_files(renewable, **named)
            assert "CONFIG SET failed (possibly related to argument '" in str(caught.value)
            assert why in str(caught.value)
            assert client.config_get("tls*") == before
        assert "next year" not in shown(renewable)
        assert answers(renewable, "client")
