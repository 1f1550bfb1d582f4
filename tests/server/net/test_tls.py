"""TLS with client certificates, and unix sockets with permissions: the other ways in."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from health import MIB, assert_prompt, unharmed
from servers import RunningServer, free_port, start_server
from test_access import start_refused
from test_kvpage_cli import kvpage
from waiting import until
from wire import encode_command

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(not OPENSSL, reason="openssl, which makes the certificates, is not installed")


def run_openssl(*words: str, at: Path) -> str:
    assert OPENSSL
    return subprocess.run([OPENSSL, *words], cwd=at, check=True, capture_output=True, encoding="utf-8").stdout


_BY_ITSELF = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")


def issue(at: Path, of: str = "") -> None:
    """An authority, and a server and a client that it vouches for; `of` ends the names in their certificates."""
    run_openssl(*_BY_ITSELF, "-keyout", "ca.key", "-out", "ca.crt", "-subj", f"/CN=authority{of}", at=at)
    (at / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1", encoding="utf-8")
    for name in ("server", "client"):
        request = ("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        run_openssl(*request, "-subj", f"/CN={name}{of}", at=at)
        signed = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        run_openssl(*signed, "-days", "2", "-extfile", "names", "-out", f"{name}.crt", at=at)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server and a client that it vouches for, and a client that only vouches for itself."""
    at = tmp_path_factory.mktemp("certificates")
    issue(at)
    run_openssl(*_BY_ITSELF, "-keyout", "stranger.key", "-out", "stranger.crt", "-subj", "/CN=stranger", at=at)
    return at


def files(at: Path) -> tuple[str, ...]:
    """The options that name the server's certificates."""
    return (
        *("--tls-cert-file", str(at / "server.crt"), "--tls-key-file", str(at / "server.key")),
        *("--tls-ca-cert-file", str(at / "ca.crt")),
    )


def helped(tool: str) -> str:
    received = subprocess.run([tool, "--help"], capture_output=True, encoding="utf-8", check=False)
    return received.stdout + received.stderr


class SecureServer:
    """A server that takes plain and encrypted connections, the latter from clients with a certificate."""

    def __init__(self, plain: RunningServer, port: int, at: Path) -> None:
        self.plain, self.port, self.at = plain, port, at

    def client(self) -> redis.Redis:
        own = {"ssl_certfile": str(self.at / "client.crt"), "ssl_keyfile": str(self.at / "client.key")}
        return redis.Redis(port=self.port, ssl=True, ssl_ca_certs=str(self.at / "ca.crt"), **own, socket_timeout=60)

    def connect(self, certificate: str | None = "client") -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.at / "ca.crt")
        if certificate:
            context.load_cert_chain(self.at / f"{certificate}.crt", self.at / f"{certificate}.key")
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return context.wrap_socket(raw, server_hostname="localhost")


def answers(secure: SecureServer, certificate: str | None) -> bool:
    """Whether a client with that certificate is answered."""
    try:
        with secure.connect(certificate) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(7) == b"+PONG\r\n"
    except (ssl.SSLError, ConnectionResetError):
        return False


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[SecureServer]:
    port = free_port()
    with start_server("--maxmemory", "1gb", "--tls-port", str(port), *files(certificates)) as server:
        yield SecureServer(server, port, certificates)


@needs_openssl
class TestTLS:
    def test_kvpage_gives_advice_on_tls_in_urls(self, secure: SecureServer) -> None:
        plain, port = secure.plain.url, secure.port
        for url, advice in (
            (f"rediss://127.0.0.1:{secure.plain.port}", "; this port has no TLS: its URL begins with redis://"),
            (f"redis://127.0.0.1:{port}", "; if this port has TLS, its URL begins with rediss://"),
            (f"rediss://localhost:{port}", "; ?ssl_ca_certs=FILE at the end of the URL names the CA"),
            (f"rediss://localhost:{port}?ssl_ca_certs=/nosuch", "; there is no file /nosuch"),
        ):
            code, shown, errors = kvpage("status", url=url)
            assert (code, shown) == (2, ""), url
            assert advice in errors, url
        assert kvpage("status", url=plain)[0] == 0

    def test_a_client_closed_during_the_handshake_leaves_nothing(self, secure: SecureServer) -> None:
        """The socket does not say any more whose it was; the server's log must have no traceback at its end."""
        for data in (b"", b"PING\r\n") * 40:
            sock = secure.connect()
            sock.sendall(data)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            with socket.create_connection(("127.0.0.1", secure.port), timeout=30) as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with secure.client() as client:
            until(lambda: client.info("clients")["connected_clients"] == 1, "only this client")
        assert "AttributeError" not in secure.plain.log
        assert "exception" not in secure.plain.log

    def test_pages_of_any_size_are_written_and_read(self, secure: SecureServer) -> None:
        with secure.client() as client, secure.plain.client() as plain:
            for size in (1, 1000, 16 * 1024, 256 * 1024 + 1, 64 * MIB):
                body = os.urandom(size)
                name = ("r", 0, 0, size, 0)
                client.execute_command("KVPAGESET", *name, 8, size, 1, 0, body)
                assert client.execute_command("KVPAGEGET", *name) == body
                assert plain.execute_command("KVPAGEGET", *name) == body
            names = [word for page in range(300) for word in ("m", 0, 0, page, 0)]
            pages = [
                word
                for page in range(300)
                for word in ("m", 0, 0, page, 0, 8, 1024, 16, 0, bytes([page % 251]) * 16384)
            ]
            client.execute_command("KVPAGEMSET", 300, *pages)
            assert client.execute_command("KVPAGEMGET", 300, *names) == [
                bytes([page % 251]) * 16384 for page in range(300)
            ]
            client.flushall()

    def test_asks_for_a_certificate_of_the_authority(self, secure: SecureServer) -> None:
        assert not answers(secure, None)
        assert not answers(secure, "stranger")
        assert answers(secure, "client")
        with secure.client() as client:
            assert client.client_info()["laddr"] == f"127.0.0.1:{secure.port}"

    @pytest.mark.parametrize(("asks", "takes_strangers"), [("no", True), ("optional", False)])
    def test_may_do_without(self, certificates: Path, asks: str, takes_strangers: bool) -> None:
        port = free_port()
        with start_server("--tls-port", str(port), *files(certificates), "--tls-auth-clients", asks) as server:
            secure = SecureServer(server, port, certificates)
            assert answers(secure, None)
            assert answers(secure, "client")
            assert answers(secure, "stranger") == takes_strangers

    def test_redis_cli_talks_to_it(self, secure: SecureServer, certificates: Path) -> None:
        redis_cli = shutil.which("redis-cli")
        if redis_cli is None or "--tls" not in helped(redis_cli):
            pytest.skip("redis-cli is not installed, or knows no TLS")
        command = [redis_cli, "-h", "localhost", "-p", str(secure.port), "--tls", "--cacert", "ca.crt"]
        command += ["--cert", "client.crt", "--key", "client.key", "PING"]
        assert subprocess.check_output(command, cwd=certificates) == b"PONG\n"

    def test_an_invalid_handshake_harms_no_other(self, secure: SecureServer) -> None:
        """Plain commands, noise, silence and hanging up, on the encrypted port."""
        beginnings = (b"*1\r\n$4\r\nPING\r\n", bytes(range(256)), b"", b"\x16\x03\x01\x02\x00\x01")
        with unharmed(secure.plain):
            socks = [socket.create_connection(("127.0.0.1", secure.port), timeout=60) for _ in range(40)]
            for i, sock in enumerate(socks):
                sock.sendall(beginnings[i % len(beginnings)])
            with secure.client() as client:
                assert client.ping()
            for sock in socks:
                sock.close()

    def test_half_open_handshakes_are_bounded_and_counted(self, certificates: Path) -> None:
        """Strangers declare a ClientHello of 128 KB. Clients are served, and the log has a line for each reason."""
        port = free_port()
        options = ("--maxmemory", "64mb", "--tls-port", str(port), *files(certificates))
        part = b"\x16\x03\x01\x40\x00\x01\x01\xff\x00\x03\x03" + bytes(16 * 1024 - 6)
        with start_server(*options) as server, server.client() as client, ExitStack() as stack:
            before = server.rss()
            for _ in range(150):
                half = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                half.sendall(part)
            until(lambda: client.info("memory")["mem_clients_normal"] > 8 * MIB)
            assert client.info("clients")["connected_clients"] > 30
            assert client.info("memory")["mem_clients_normal"] < 20 * MIB
            assert server.rss() - before < 40 * MIB
            client.config_set("maxclients", 20)
            with server.client() as other:
                assert other.ping(), "a client takes the place of a handshake"
            assert answers(SecureServer(server, port, certificates), "client")
            stack.close()
            until(lambda: client.info("memory")["mem_clients_normal"] < MIB)
            assert 0 < server.log.count("no TLS with") < 10
            assert ": \n" not in server.log

    def test_a_handshake_of_too_many_bytes_ends(self, secure: SecureServer) -> None:
        part = b"\x16\x03\x01\x40\x00\x01\x01\xff\x00\x03\x03" + bytes(16 * 1024 - 6)
        more = b"\x16\x03\x01\x40\x00" + bytes(16 * 1024)
        with socket.create_connection(("127.0.0.1", secure.port), timeout=5) as sock:
            with suppress(OSError):
                sock.sendall(part + more + more)
            with suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        assert "more than 32768 bytes before the end of the handshake" in secure.plain.log

    def test_a_slow_reader_is_waited_for_without_hoarding(self, secure: SecureServer) -> None:
        body = os.urandom(MIB)
        with secure.client() as client:
            client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 8, MIB, 1, 0, body)
            with unharmed(secure.plain), secure.connect() as sock:
                asking = threading.Thread(
                    target=self._ask, args=(sock, encode_command([b"KVPAGEGET", *b"r 0 0 0 0".split()]) * 200)
                )
                asking.start()
                assert_prompt(secure.plain)
                assert int(client.info("memory")["mem_clients_normal"]) < 32 * MIB
                with sock.makefile("rb") as incoming:
                    for _ in range(200):
                        assert incoming.readline() == b"$%d\r\n" % MIB
                        assert incoming.read(MIB + 2) == body + b"\r\n"
                asking.join()
            client.flushall()

    @staticmethod
    def _ask(sock: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            sock.sendall(data)

    def test_a_killed_connection_ends(self, secure: SecureServer) -> None:
        with secure.client() as client, secure.connect() as sock:
            until(lambda: len(client.client_list()) == 2)
            port = sock.getsockname()[1]
            assert client.client_kill(f"127.0.0.1:{port}")
            with suppress(ssl.SSLError, ConnectionResetError):
                assert sock.recv(1) == b""
            until(lambda: len(client.client_list()) == 1)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ((), "TLS needs both tls-cert-file and tls-key-file"),
            (
                ("--tls-cert-file", "none.crt", "--tls-key-file", "none.key"),
                "tls-cert-file none.crt, tls-key-file none.key: ",
            ),
        ],
    )
    def test_certificates_that_do_not_serve_are_named(self, options: tuple[str, ...], why: str) -> None:
        assert why in start_refused("--tls-port", "1", *options)

    def test_an_authority_is_needed_to_ask_clients(self, certificates: Path) -> None:
        own = files(certificates)[:4]
        assert "tls-auth-clients yes needs tls-ca-cert-file" in start_refused("--tls-port", "1", *own)


class TestUnixSocket:
    def test_has_the_permissions_it_was_given(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        with start_server("--unixsocket", str(path), "--unixsocketperm", "760") as server:
            assert stat.S_IMODE(path.stat().st_mode) == 0o760
            with redis.Redis(unix_socket_path=str(path)) as client:
                assert client.ping()
                assert client.client_info()["addr"] == f"{path}:0"
                assert client.client_info()["flags"] == "U"
            assert_prompt(server)
        assert not path.exists()

    def test_can_be_the_only_way_in(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        options = ("--port", "0", "--unixsocket", str(path), "--store", "memory")
        command = [sys.executable, "-m", "kvpage_server.app", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
            until(path.exists)
            with redis.Redis(unix_socket_path=str(path)) as client:
                assert client.info("server")["tcp_port"] == 0
            process.send_signal(signal.SIGTERM)
            _, received = process.communicate(timeout=60)
        assert f"ready on unix {path}\n" in received

    def test_a_removed_socket_does_not_prevent_the_save_at_the_stop(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        options = ("--unixsocket", str(path), "--store", "tiered", "--appendfsync", "no")
        with start_server(*options, directory=tmp_path) as server, server.client() as client:
            client.set("key", "value")
            path.unlink()
        with start_server(*options, directory=tmp_path) as server, server.client() as client:
            assert client.get("key") == b"value"

    def test_a_stop_leaves_the_files_of_another_server(self, tmp_path: Path) -> None:
        path, pidfile = tmp_path / "socket", tmp_path / "pid"
        options = ("--unixsocket", str(path), "--pidfile", str(pidfile))
        with start_server(*options) as first:
            path.unlink()
            with start_server(*options) as second:
                first.stop()
                assert pidfile.read_text(encoding="utf-8") == f"{second.pid}\n"
                with redis.Redis(unix_socket_path=str(path)) as client:
                    assert client.ping()
        assert not path.exists()
        assert not pidfile.exists()

    def test_takes_the_place_of_one_left_behind_and_of_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        with start_server("--unixsocket", str(path)), redis.Redis(unix_socket_path=str(path)) as client:
            assert client.ping()
            assert f"cannot listen on the unix socket {path}" in start_refused("--unixsocket", str(path))
            assert client.ping()
        path.write_text("precious", encoding="utf-8")
        assert f"unixsocket: {path} exists and is not a socket" in start_refused("--unixsocket", str(path))
        assert path.read_text(encoding="utf-8") == "precious"


@needs_openssl
@pytest.mark.parametrize(("days", "warns"), [("-1", True), ("2", False)])
def test_an_expired_certificate_is_reported(tmp_path: Path, days: str, warns: bool) -> None:
    asked = ("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=localhost")
    run_openssl(*asked, at=tmp_path)
    signed = ("x509", "-req", "-in", "own.csr", "-signkey", "own.key", "-days", days, "-out", "own.crt")
    run_openssl(*signed, at=tmp_path)
    options = ["--tls-port", "9443", "--tls-cert-file", "own.crt", "--tls-key-file", "own.key"]
    options += ["--tls-auth-clients", "no"]
    command = [sys.executable, "-m", "kvpage_server", "--check-config", *options, "--store", "memory"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert done.stdout == "the configuration is valid\n"
    assert ("tls-cert-file own.crt: certificate has expired" in done.stderr) == warns
