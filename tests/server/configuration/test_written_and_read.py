"""Files that the server writes and reads again: the values are equal after both, and no value adds a line."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_server

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.access.user import RuleError, change_of
from kvpage_server.commands.access.users import UserFileError, Users, lines_of, save_file
from kvpage_server.configuration import log
from kvpage_server.configuration.config import Config, ConfigError
from kvpage_server.configuration.rewrite import rewritten
from kvpage_server.system.text import LogLines

SPACES = [b" ", b"\t", b"\n", b"\v", b"\f", b"\r", b"\0"]  # they end a word of an ACL file
ODD = [b"\x01", b"\x1b", b"\x1c", b"\x7f", b"\x85", b"\xa0", b'"', b"'", b"\\", b"#", b"\xff", "é".encode()]
SIGNS = [b"~", b"&", b"%R~", b"%W~", b"%RW~"]
EVIL = b"x\nuser evil on nopass ~* +@all"
HOSTILE = ['"', "'", "\\", "a\nport 1", "a\r\nport 1", "\0", "# a", " a ", "\t", "\udcff\udc80", "é", "\x85a", "x' 'y"]
FORGED = "x\r\n2026-01-01 00:00:00.000 W forged \x1b[2J\x85"

words = st.lists(st.sampled_from([*SPACES, *ODD, b"a", b"*", b"user", b"on"]), max_size=6).map(b"".join)
rules = st.lists(st.tuples(st.sampled_from(SIGNS), words).map(b"".join), max_size=4)
texts = st.sampled_from(HOSTILE) | st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
in_a_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(client: redis.Redis, *rule: bytes) -> str:
    """The error for a user with these rules; empty if the server accepts them."""
    try:
        client.execute_command("ACL", "SETUSER", *rule)
    except redis.ResponseError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
@pytest.mark.parametrize("character", [*SPACES, *ODD])
def test_patterns_are_refused_as_redis_refuses_them(
    server: RunningServer, redis_server: RunningServer, character: bytes
) -> None:
    with server.client() as ours, redis_server.client() as theirs:
        for sign in SIGNS:
            rule = sign + b"a" + character + b"b"
            found, expected = (refusal(client, b"new", rule) for client in (ours, theirs))
            assert (found == "") == (expected == "") == (character not in SPACES), rule
            if character != b"\0":  # the message of Redis ends there
                assert found == expected
        name = b"new" + character + b"user"
        assert refusal(ours, name, b"on") == refusal(theirs, name, b"on")
        for client in (ours, theirs):
            client.execute_command("ACL", "DELUSER", b"new", name)


def test_a_user_needs_a_name(server: RunningServer) -> None:
    with server.client() as client:
        assert refusal(client, b"", b"on") == "Usernames can't be empty"


@pytest.mark.parametrize("sign", SIGNS)
def test_no_pattern_adds_a_user_to_a_file(tmp_path: Path, sign: bytes) -> None:
    aclfile, conf = tmp_path / "users.acl", tmp_path / "kvpage.conf"
    aclfile.touch()
    conf.touch()
    for options in (["--aclfile", str(aclfile)], []):
        with start_server(*options, "--store", "memory", file=conf) as server, server.client() as client:
            assert "Syntax error" in refusal(client, b"new", b"on", sign + EVIL)
            assert client.acl_save() if options else client.config_rewrite()
        with start_server(*options, "--store", "memory", file=conf) as server, server.client() as client:
            assert client.acl_users() == ["default"]


@pytest.mark.parametrize("sign", ["~", "&", "%R~", "%W~", "%RW~"])
def test_a_space_in_a_pattern_of_a_file_is_refused(tmp_path: Path, sign: str) -> None:
    conf = tmp_path / "kvpage.conf"
    conf.write_text(f'user new on "{sign}a b"\n', encoding="utf-8")
    aclfile = tmp_path / "users.acl"
    aclfile.write_bytes(b"user new on " + sign.encode() + b"a\0b\n")
    for options in ([str(conf)], ["--user", "new", "on", f"{sign}a\nb"], ["--aclfile", str(aclfile)]):
        done = forked.run("kvpage_server.app", "--check-config", *options)
        assert done.returncode == 1
        assert "Error in ACL SETUSER modifier" in done.stderr
        assert "Syntax error" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [b"a b", b"a\vb", b"a\fb", b"a\0b", b""])
def test_users_of_a_file_have_names_of_one_word(name: bytes) -> None:
    with pytest.raises(UserFileError, match="here: a user"):
        Users().load([("here", [name, b"on"])])


@in_a_directory
@given(named=st.dictionaries(words, rules, max_size=4))
def test_users_that_are_saved_are_loaded_equal(tmp_path: Path, named: dict[bytes, list[bytes]]) -> None:
    users = Users()
    for name, given_rules in named.items():
        for rule in given_rules:
            try:
                users.set(name, [(rule, change_of(rule))])
            except RuleError:
                continue
    aclfile = tmp_path / "users.acl"
    save_file(aclfile, users.lines())
    assert aclfile.read_bytes().count(b"\n") == len(users.by_name)
    loaded = Users()
    loaded.load(lines_of(aclfile))
    assert loaded.lines() == users.lines()
    config = Config()
    conf = tmp_path / "kvpage.conf"
    conf.write_bytes(rewritten(b"", config, users.lines()))
    config.load(conf)
    found = Users()
    found.load((str(conf), [word.encode("utf-8", "surrogateescape") for word in line]) for line in config.user)
    assert found.lines() == users.lines()


@in_a_directory
@pytest.mark.parametrize("name", [name for name in Config.parameters() if name != "user"])
@given(value=texts)
def test_a_parameter_that_is_rewritten_is_read_equal(tmp_path: Path, name: str, value: str) -> None:
    config, loaded, conf = Config(), Config(), tmp_path / "kvpage.conf"
    try:
        config.change(name, value)
    except ConfigError:
        return
    text = rewritten(b"# mine\n", config, [])
    assert len([line for line in text.splitlines() if line and not line.startswith(b"#")]) <= 1
    conf.write_bytes(text)
    loaded.load(conf)
    assert {one: loaded.words(one) for one in loaded.parameters()} == {
        one: config.words(one) for one in config.parameters()
    }


@pytest.mark.parametrize("character", "\xa0\u3000\u2028\x85\x1c\x1f")
def test_only_ascii_white_space_separates_words(tmp_path: Path, character: str) -> None:
    config, loaded, conf = Config(), Config(), tmp_path / "kvpage.conf"
    config.change("quota", f"kv:a{character} 1gb\t{character}b*\n2")
    assert config.quota == {f"kv:a{character}": 1 << 30, f"{character}b*": 2}
    with pytest.raises(ConfigError, match="takes 4 values"):
        config.change("client-output-buffer-limit", f"normal{character}0 0 0")
    before = b"quota kv:a" + character.encode() + b" 1\n"
    conf.write_bytes(rewritten(before, config, []))
    assert conf.read_bytes().count(b"\nquota ") <= 1
    loaded.load(conf)
    assert [*loaded.quota.items()] == [*config.quota.items()]


@pytest.mark.parametrize("password", HOSTILE)
def test_a_rewritten_password_is_valid_after_a_restart(tmp_path: Path, password: str) -> None:
    conf, raw = tmp_path / "kvpage.conf", password.encode("utf-8", "surrogateescape")
    conf.touch()
    with start_server("--store", "memory", file=conf) as server, server.client() as client:
        client.execute_command("CONFIG", "SET", "requirepass", raw)
        assert client.config_rewrite()
    with start_server("--store", "memory", file=conf) as server, server.client(password=raw) as client:
        assert client.acl_users() == ["default"]


def test_a_message_is_one_line_of_the_log() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LogLines("%(levelname).1s %(message)s"))
    log = logging.Logger("tested")
    log.addHandler(handler)
    log.warning("client %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("a command failed")
    first, second, *traceback = written.getvalue().removesuffix("\n").split("\n")
    assert first == r"W client x\r\n2026-01-01 00:00:00.000 W forged \x1b[2J\u0085"
    assert second == "E a command failed"
    assert traceback
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)


def test_a_line_is_escaped_without_a_free_descriptor() -> None:
    program = (
        "import resource; from kvpage_server.system.text import printable; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); print(printable('a\\nb'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=100)
    assert (done.stdout, done.stderr) == ("a\\nb\n", "")


def test_times_before_1970_have_positive_milliseconds() -> None:
    handler = log._handler(Config())
    for json in (False, True):
        handler.setFormatter(log.JSONLines() if json else log._for_people())
        record = log._line(logging.INFO, "x")
        record.created, record.msecs = -0.75, -750.0  # as in Python 3.11
        assert "59.250" in handler.format(record)


def test_a_file_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    conf = tmp_path / "kvpage.conf"
    program = (
        "import sys; from pathlib import Path; from kvpage_server.configuration.config import Config; "
        "from kvpage_server.configuration.rewrite import rewritten; config = Config(); "
        "config.change('requirepass', '\\u00e9'); Path(sys.argv[1]).write_bytes(rewritten(b'', config, []))"
    )
    ascii_only = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", program, str(conf)], env=ascii_only, check=True, timeout=100)
    config = Config()
    config.load(conf)
    assert config.requirepass == "é"
