"""Authentication and authorisation: passwords, users, rules, as in Redis 7."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import forked
import pytest
import redis
from health import assert_prompt
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from wire import Wire, encode_command, parse

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import CATEGORIES, SUBCOMMANDS, TABLE

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """A server that asks for a password."""
    with start_server("--requirepass", PASSWORD) as server:
        yield server


@pytest.fixture
def admin(locked: RunningServer) -> Iterator[redis.Redis]:
    with locked.client(password=PASSWORD) as client:
        yield client
        for name in client.acl_users():
            if name != "default":
                client.acl_deluser(name)


class TestAStranger:
    def test_may_only_authenticate(self, locked: RunningServer) -> None:
        with Wire(locked.port) as wire:
            for name, spec in TABLE.items():
                words = [word.encode() for word in name.split("|")] + [b"x"] * max(abs(spec.arity) - spec.words, 0)
                if "no_auth" not in spec.flags and name not in SUBCOMMANDS and len(words) <= 10:
                    assert b"NOAUTH Authentication required." in wire.ask(*words), name

    def test_connects_with_the_password(self, locked: RunningServer) -> None:
        with Wire(locked.port) as wire:
            refused = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
            assert wire.ask(b"AUTH", b"wrong") == refused
            assert wire.ask(b"AUTH", b"nobody", PASSWORD.encode()) == refused
            assert wire.ask(b"HELLO", b"3").startswith(b"-NOAUTH HELLO must be called with the client already")
            assert wire.ask(b"HELLO", b"3", b"AUTH", b"default", b"wrong") == refused
            assert wire.ask(b"PING").startswith(b"-NOAUTH")
            assert wire.ask(b"AUTH", b"a", b"b", b"c") == b"-ERR syntax error\r\n"
            assert wire.ask(b"HELLO", b"3", b"AUTH", b"default", PASSWORD.encode(), b"SETNAME", b"me").startswith(b"%")
            assert wire.ask(b"CLIENT", b"GETNAME") == b"$2\r\nme\r\n"
            assert wire.ask(b"RESET") == b"+RESET\r\n"
            assert wire.ask(b"PING").startswith(b"-NOAUTH")
            assert wire.ask(b"AUTH", PASSWORD.encode()) == b"+OK\r\n"
            assert wire.ask(b"ACL", b"WHOAMI") == b"$7\r\ndefault\r\n"

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            (b"*11\r\n", b"unauthenticated multibulk length"),
            (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n", b"unauthenticated bulk length"),
        ],
    )
    def test_is_held_to_small_frames(self, locked: RunningServer, frame: bytes, reason: bytes) -> None:
        with locked.connect() as sock, sock.makefile("rb") as incoming:
            sock.sendall(frame)
            assert incoming.read() == b"-ERR Protocol error: %b\r\n" % reason

    def test_is_no_longer_held_to_them_once_it_is_known(self, locked: RunningServer) -> None:
        with Wire(locked.port) as wire:
            wire.ask(b"AUTH", PASSWORD.encode())
            assert wire.ask(b"SET", b"large", bytes(10**6)) == b"+OK\r\n"
            assert wire.ask(b"DEL", *[b"k%d" % i for i in range(50)], b"large") == b":1\r\n"
            wire.ask(b"RESET")
            wire.send(b"*11\r\n")
            assert b"unauthenticated" in wire.reply()

    def test_needs_no_password_where_none_is_set(self, server: RunningServer) -> None:
        with Wire(server.port) as wire:
            assert wire.ask(b"AUTH", b"x").startswith(b"-ERR AUTH <password> called without any password configured")
            assert wire.ask(b"AUTH", b"default", b"anything") == b"+OK\r\n"


def rest_of(wire: Wire) -> Iterator[bytes]:
    """The replies until the connection ends."""
    with suppress(EOFError, ConnectionError):
        while True:
            yield wire.reply()


class TestRules:
    def test_keys_to_read_and_keys_to_write(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.acl_setuser("u", enabled=True, passwords=["+p"], commands=["+@all"], keys=["both:*"])
        admin.execute_command("ACL", "SETUSER", "u", "%R~in:*", "%W~out:*")
        admin.mset({"in:a": "1", "out:a": "2", "other": "3"})
        denied = b"-NOPERM No permissions to access a key\r\n"
        with Wire(locked.port) as wire:
            wire.ask(b"AUTH", b"u", b"p")
            assert wire.ask(b"GET", b"in:a") == b"$1\r\n1\r\n"
            assert wire.ask(b"SET", b"out:a", b"4") == b"+OK\r\n"
            assert wire.ask(b"SET", b"both:a", b"5") == b"+OK\r\n"
            assert wire.ask(b"GETDEL", b"both:a") == b"$1\r\n5\r\n"
            for words in (b"SET in:a x", b"GET out:a", b"GET other", b"MGET in:a other", b"DEL in:a", b"INCR in:a"):
                assert wire.ask(*words.split()) == denied, words
            for words in (b"GETDEL out:a", b"GETEX out:a", b"INCR out:a", b"SET out:a x GET", b"STRLEN out:a"):
                assert wire.ask(*words.split()) == denied, words
            assert wire.ask(b"OBJECT", b"ENCODING", b"other") == denied

    def test_commands_by_name_subcommand_and_category(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.execute_command("ACL", "SETUSER", "u", "on", "nopass", "~*", "+@page", "+@read", "-mget", "+client|id")
        with Wire(locked.port) as wire:
            wire.ask(b"AUTH", b"u", b"")
            page = [b"r", b"0", b"0", b"0", b"0"]
            assert wire.ask(b"KVPAGESET", *page, b"1", b"1", b"2", b"0", b"abcd") == b"+OK\r\n"
            assert wire.ask(b"GET", b"kv:r:0:0:0:0")[:1] == b"$"
            assert wire.ask(b"CLIENT", b"ID")[:1] == b":"
            assert wire.ask(b"MGET", b"a") == b"-NOPERM User u has no permissions to run the 'mget' command\r\n"
            assert wire.ask(b"CLIENT", b"LIST") == (
                b"-NOPERM User u has no permissions to run the 'client|list' command\r\n"
            )
            assert wire.ask(b"SET", b"a", b"b")[:7] == b"-NOPERM"
        assert admin.acl_list()[-1].endswith("~* resetchannels -@all +@page +@read -mget +client|id")

    def test_channels(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.execute_command("ACL", "SETUSER", "u", "on", "nopass", "+@all", "&news.*")
        denied = b"-NOPERM No permissions to access a channel\r\n"
        with Wire(locked.port) as wire:
            wire.ask(b"AUTH", b"u", b"")
            assert wire.ask(b"PUBLISH", b"news.art", b"x") == b":0\r\n"
            assert wire.ask(b"PUBLISH", b"other", b"x") == denied
            assert wire.ask(b"SUBSCRIBE", b"news.art", b"other") == denied
            assert wire.ask(b"PSUBSCRIBE", b"news.a*") == denied
            assert wire.ask(b"PSUBSCRIBE", b"news.*")[:1] == b"*"

    def test_a_call_is_applied_completely_or_not_at_all(self, admin: redis.Redis) -> None:
        admin.acl_setuser("u", enabled=True, nopass=True, keys=["a"], commands=["+get"])
        before = admin.acl_list()
        for rules, why in (
            (("on", "+nosuch"), "Error in ACL SETUSER modifier '+nosuch': Unknown command or category name in ACL"),
            (("off", "+@nosuch"), "Unknown command or category"),
            (("~b", "what"), "Error in ACL SETUSER modifier 'what': Syntax error"),
            (("~b", "<none"), "The password you are trying to remove from the user does not exist"),
            (("#abc",), "The password hash must be exactly 64 characters"),
            (("~*", "~b"), "Adding a pattern after the"),
            (("(~a +get)",), "Selectors are not supported"),
            (("~" + "x" * 5000,), "a pattern has at most"),
        ):
            with pytest.raises(redis.ResponseError, match=re.escape(why)):
                admin.execute_command("ACL", "SETUSER", "u", *rules)
        with pytest.raises(redis.ResponseError, match="Usernames can't contain spaces"):
            admin.execute_command("ACL", "SETUSER", "u u")
        assert admin.acl_list() == before

    def test_may_be_repeated(self, locked: RunningServer, admin: redis.Redis) -> None:
        """A setup script runs it again."""
        for _ in range(2):
            assert admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all")
        with locked.client(username="app", password="pw") as app:
            assert app.set("a", "b")
        with pytest.raises(redis.ResponseError, match="Adding a pattern after the"):
            admin.execute_command("ACL", "SETUSER", "app", "~a")
        with pytest.raises(redis.ResponseError, match="Adding a pattern after the"):
            admin.execute_command("ACL", "SETUSER", "app", "&a")

    def test_may_name_commands_of_redis_only(self, locked: RunningServer, admin: redis.Redis) -> None:
        rules = ["+@all", "-hset", "-cluster", "-cluster|info", "+script|load", "-@geo", "-function"]
        for _ in range(2):
            admin.execute_command("ACL", "SETUSER", "u", "reset", "on", "nopass", "~*", *rules)
        assert admin.acl_list()[-1].endswith(" ".join(rules))
        with locked.client(username="u") as user:
            assert user.set("a", "b")
            with pytest.raises(redis.ResponseError, match="unknown command 'HSET'"):
                user.hset("h", "f", "v")
        warned = [line for line in locked.log.splitlines() if "do not exist here" in line]
        assert len(warned) == 1, "once, not each time"
        assert "function, hset" in warned[0]

    def test_a_command_for_every_key_names_the_missing_right(self, locked: RunningServer, admin: redis.Redis) -> None:
        """The right to the command is not enough: an error about the command alone would be misleading."""
        admin.acl_setuser("u", enabled=True, nopass=True, keys=["a"], commands=["+acl", "+flushall"])
        with locked.client(username="u") as user:
            assert user.acl_whoami() == "u"
            for call, lacks in (("ACL LIST", "%R~*"), ("FLUSHALL", "%W~*")):
                name = call.lower().replace(" ", "|")
                why = f"no permissions to run the '{name}' command without access to every key ({lacks})"
                with pytest.raises(redis.ResponseError, match=re.escape(why)):
                    user.execute_command(call)
                assert why in _try(admin, "ACL", "DRYRUN", "u", *call.split())
                admin.execute_command("ACL", "SETUSER", "u", lacks)
                assert user.execute_command(call)

    def test_are_felt_by_connections_at_once(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.acl_setuser("u", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all"])
        with Wire(locked.port) as wire, Wire(locked.port) as queuing, Wire(locked.port) as watching:
            for one in (wire, queuing, watching):
                one.ask(b"AUTH", b"u", b"")
            queuing.ask(b"MULTI")
            queuing.ask(b"SET", b"a", b"b")
            queuing.ask(b"PING")
            watching.ask(b"MONITOR")
            admin.execute_command("ACL", "SETUSER", "u", "resetkeys", "~b")
            assert wire.ask(b"GET", b"a")[:7] == b"-NOPERM"
            assert wire.ask(b"GET", b"b") == b"$-1\r\n"
            refused, pong = parse(queuing.ask(b"EXEC"))
            assert refused.startswith("NOPERM ACLs rules changed between the moment the transaction was accumulated")
            assert pong == "PONG"
            assert len(list(rest_of(watching))) < 2, "it may not see what all others do any more"
            assert admin.acl_deluser("u") == 1
            with pytest.raises((EOFError, ConnectionError)):
                wire.ask(b"PING")
        with pytest.raises(redis.ResponseError, match="'default' user cannot be removed"):
            admin.acl_deluser("default")

    def test_the_listed_rules_recreate_the_users(self, admin: redis.Redis) -> None:
        rng = random.Random(1)
        for i in range(20):
            rules = ["reset", rng.choice(["on", "off"]), *rng.choices(_RULES, k=rng.randrange(6))]
            admin.execute_command("ACL", "SETUSER", f"u{i}", *rules)
        lines = admin.acl_list()
        options = [word for line in lines for word in ("--user", *line.split()[1:])]
        with start_server(*options) as copy, copy.client(password=PASSWORD) as client:
            assert client.acl_list() == lines


_RULES = [
    *(
        "+@all",
        "-@all",
        "+@read",
        "-@read",
        "+@page",
        "-@dangerous",
        "+get",
        "-get",
        "+config|get",
        "-config",
        "+config",
    ),
    *("+hset", "-hset", "+@hash", "-@list", "+cluster", "-cluster|info", "+@scripting", "-lpush"),
    *("~*", "&*"),
    *("nopass", "resetpass", ">pass", ">word", "%R~r:*", "%W~w:*", "&c.*", "resetkeys", "resetchannels", "~a", "~b*"),
]
_QUESTIONS = [
    *("get a", "set a x", "getdel a", "get r:a", "set r:a x", "set w:a x", "mget a b", "ping", "del bcd"),
    *("subscribe c.a", "publish d x", "config get x", "config set x y", "client id", "client list", "flushall"),
]


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_commands_are_of_the_categories_that_redis_puts_them_in() -> None:
    with start_redis() as theirs, Wire(theirs.port) as wire:
        known = parse(wire.ask(b"COMMAND"))
    for row in [*known, *(sub for container in known for sub in container[9])]:
        name, categories = row[0].decode(), {category.removeprefix("@") for category in row[6]}
        if name in TABLE and name not in SUBCOMMANDS and not name.endswith("|help"):
            assert categories == TABLE[name].categories, name


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_random_rules_allow_the_commands_that_redis_allows() -> None:
    """The same rules to Debian's redis-server and to ours, then the same questions to ACL DRYRUN."""
    rng = random.Random(2)
    known = [rule for rule in _RULES if "page" not in rule]
    with start_redis() as theirs, start_server() as ours, theirs.client() as there, ours.client() as here:
        verdicts = set()
        for _ in range(150):
            rules = ["reset", *rng.choices(known, k=rng.randrange(1, 8)), "~*" if rng.random() < 0.5 else "on"]
            answers = [_try(client, "ACL", "SETUSER", "u", *rules) for client in (there, here)]
            assert answers[0] == answers[1], rules
            for question in _QUESTIONS:
                asked = [_try(client, "ACL", "DRYRUN", "u", *question.split()) for client in (there, here)]
                verdict = ["OK" if answer == "OK" else "no" for answer in asked]
                if TABLE[_name(question)].all_keys and "~*" not in here.acl_getuser("u")["keys"]:
                    assert verdict[1] == "no"  # stricter: it concerns every key
                else:
                    assert verdict[0] == verdict[1], (rules, question, asked)
                verdicts.add(verdict[0])
        assert verdicts == {"OK", "no"}


def _try(client: redis.Redis, *words: str) -> str:
    try:
        return _text(client.execute_command(*words))
    except redis.ResponseError as error:
        return str(error)


def _text(answer: object) -> str:
    return answer.decode() if isinstance(answer, bytes) else "OK" if answer is True else str(answer)


def _name(question: str) -> str:
    longer = "|".join(question.split()[:2])
    return longer if longer in TABLE else question.split()[0]


class TestTheCommands:
    def test_report_the_user_and_the_commands(self, admin: redis.Redis) -> None:
        assert admin.acl_whoami() == "default"
        assert admin.acl_cat() == list(CATEGORIES)
        assert {"kvpageset", "kvpageget", "kvblockget"} <= set(admin.acl_cat("page"))
        assert "hset" not in admin.acl_cat("hash")
        with pytest.raises(redis.ResponseError, match="Unknown category 'nosuch'"):
            admin.acl_cat("nosuch")
        assert len(admin.acl_genpass()) == 64
        assert len(admin.acl_genpass(5)) == 2
        with pytest.raises(redis.ResponseError, match="positive number up to 4096"):
            admin.execute_command("ACL", "GENPASS", 5000)
        admin.acl_setuser("u", enabled=True, passwords=["+secret"], keys=["a*"], commands=["+get"])
        assert admin.acl_users() == ["default", "u"]
        received = admin.acl_getuser("u")
        assert received["flags"] == ["on"]
        assert received["keys"] == ["~a*"]
        assert "secret" not in str(admin.acl_list()) + str(received)
        assert admin.acl_getuser("nobody") is None

    def test_dry_runs_of_sets_need_every_key_of_the_request(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 3, 1, 4, 0, "abcd")
        for key, allowed in (("%R~kv:r:index", False), ("%R~kv:r:*", True)):
            admin.acl_setuser("u", enabled=True, nopass=True, reset_keys=True, keys=[key], commands=["+@all"])
            with locked.client(username="u", password="any") as user:
                for call in ("SMEMBERS", "SCARD", "SISMEMBER kv:r:index", "SSCAN 0", "SSCAN 0 COUNT 10"):
                    words = [call.split()[0], "kv:r:index", *call.split()[1:]]
                    assert (_try(admin, "ACL", "DRYRUN", "u", *words) == "OK") == allowed, words
                    assert ("No permissions" not in _try(user, *words)) == allowed, words

    def test_dry_runs_say_why_not(self, admin: redis.Redis) -> None:
        admin.acl_setuser("u", enabled=True, keys=["kv:r:*"], commands=["+kvpageget", "+publish"])
        page = ("0", "0", "0", "0")
        assert _try(admin, "ACL", "DRYRUN", "u", "kvpageget", "r", *page) == "OK"
        assert _try(admin, "ACL", "DRYRUN", "u", "kvpageget", "q", *page) == (
            "User u has no permissions to access the 'kv:q:0:0:0:0' key"
        )
        admin.acl_setuser("u", commands=["+kvpageverify"], keys=["%W~kv:w:*"])
        assert _try(admin, "ACL", "DRYRUN", "u", "kvpageverify", "r") == "OK"
        assert "no permissions" in _try(admin, "ACL", "DRYRUN", "u", "kvpageverify", "w")  # its reply lists keys
        assert _try(admin, "ACL", "DRYRUN", "u", "get", "a") == "User u has no permissions to run the 'get' command"
        assert _try(admin, "ACL", "DRYRUN", "u", "publish", "c", "x") == (
            "User u has no permissions to access the 'c' channel"
        )
        assert "not found" in _try(admin, "ACL", "DRYRUN", "nobody", "get", "a")

    def test_the_log_lists_denied_requests_by_user(self, locked: RunningServer, admin: redis.Redis) -> None:
        admin.acl_log_reset()
        admin.acl_setuser("u", enabled=True, nopass=True, keys=["a"], commands=["+get", "+@transaction"])
        with Wire(locked.port) as wire:
            wire.ask(b"AUTH", b"u", b"")
            for _ in range(3):
                wire.ask(b"GET", b"b")
            wire.ask(b"SET", b"a", b"x")
            wire.ask(b"MULTI")
            wire.ask(b"GET", b"c")
            wire.ask(b"DISCARD")
            wire.ask(b"AUTH", b"nobody", b"x")
        with locked.client(password=PASSWORD, protocol=2) as client:  # redis-py before 8 splits client-info only there
            received = client.acl_log()
        assert [(entry["reason"], entry["object"], entry["username"]) for entry in received] == [
            ("auth", "AUTH", "nobody"),
            ("key", "c", "u"),
            ("command", "set", "u"),
            ("key", "b", "u"),
        ]
        assert [int(entry["count"]) for entry in received] == [1, 1, 1, 3]
        assert received[1]["context"] == "multi"
        assert received[1]["client-info"]["user"] == "u"
        denied = admin.info("stats")
        assert denied["acl_access_denied_key"] >= 4
        assert admin.acl_log_reset()
        assert admin.acl_log() == []
        admin.config_set("acllog-max-len", 2)
        for name in (b"x", b"y", b"z"):
            with Wire(locked.port) as wire:
                wire.ask(b"AUTH", name, b"")
        assert len(admin.acl_log()) == 2

    def test_the_default_user_can_lose_its_password_and_get_another(self, locked: RunningServer) -> None:
        with start_server() as server, server.client() as client:
            client.config_set("requirepass", "new")
            assert client.ping(), "who is in stays in"
            with pytest.raises(redis.AuthenticationError), server.client() as other:
                other.ping()
            with server.client(password="new") as other:
                assert other.config_get("requirepass") == {"requirepass": "new"}
                other.config_set("requirepass", "")
            with server.client() as other:
                assert other.ping()


class TestTheFile:
    @pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
    def test_may_be_one_that_redis_wrote(self, tmp_path: Path) -> None:
        users = {
            "app": "on >pw ~app:* %R~shared:* &app.* +@all -@dangerous -hset -cluster|info +lpush +script|load",
            "reader": "on nopass ~* &* -@all +@read -@stream +client|id -xrange +info",
            "queue": "off >a >b ~q:* -@all +@list +@hash -llen +xadd",
            "all": "on nopass ~* &* +@all",
        }
        file = tmp_path / "users.acl"
        file.touch()
        with start_redis("--aclfile", str(file)) as theirs, theirs.client() as client:
            for name, rules in users.items():
                client.execute_command("ACL", "SETUSER", name, *rules.split())
            assert client.acl_save()
            there = client.acl_list()
        with start_server("--aclfile", str(file)) as ours, ours.client() as client:
            assert client.acl_list() == [line.replace("sanitize-payload ", "") for line in there]
            assert client.acl_dryrun("app", "set", "app:a", "b") == b"OK"
            assert ours.log.count("do not exist here") == 1

    def test_is_read_saved_and_read_again(self, tmp_path: Path) -> None:
        file = tmp_path / "users.acl"
        file.write_text("# people\nuser default off\n\nuser boss on >secret ~* &* +@all\n", encoding="utf-8")
        with start_server("--aclfile", str(file)) as server, server.client(username="boss", password="secret") as boss:
            assert boss.acl_users() == ["boss", "default"]
            with pytest.raises(redis.AuthenticationError), server.client() as other:
                other.ping()
            boss.acl_setuser("new", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
            assert boss.acl_save()
            assert b"user new on nopass ~* resetchannels +@all" in file.read_bytes()
            assert b"secret" not in file.read_bytes()
            good = file.read_text(encoding="utf-8")
            with server.client(username="new", password="") as new:
                assert new.ping()
                file.write_text(good + "user broken +nosuch\n", encoding="utf-8")
                with pytest.raises(redis.ResponseError, match="line 4: Error in ACL SETUSER modifier '\\+nosuch'"):
                    boss.acl_load()
                assert new.ping(), "nothing has changed"
                file.write_text(good.replace("user new", "user newer"), encoding="utf-8")
                assert boss.acl_load()
                assert boss.acl_users() == ["boss", "default", "newer"]
                with pytest.raises(redis.ConnectionError):
                    new.ping()

    @pytest.mark.parametrize("password", ["", "secret"])
    def test_a_file_without_a_default_user_loads_as_at_a_start(self, tmp_path: Path, password: str) -> None:
        file = tmp_path / "users.acl"
        file.write_text("user default on >own ~* &* +@all\n", encoding="utf-8")
        options = ("--aclfile", str(file), "--requirepass", password)
        with start_server(*options) as server, server.client(password="own") as client:
            file.write_text("user boss on >secret ~* &* +@all\n", encoding="utf-8")
            assert client.acl_load()
            loaded = client.acl_list()
        with start_server(*options) as server, server.client(username="boss", password="secret") as boss:
            assert boss.acl_list() == loaded

    def test_does_without_a_file(self, admin: redis.Redis) -> None:
        for words in ("SAVE", "LOAD"):
            with pytest.raises(redis.ResponseError, match="not configured to use an ACL file"):
                admin.execute_command("ACL", words)

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("people boss on", "line 1: a line must start with 'user', got 'people'"),
            ("user", "line 1: a user needs a name"),
            ("user a on +nosuch", "line 1: Error in ACL SETUSER modifier '+nosuch': Unknown command"),
            ("user a on\nuser a off", "line 2: user 'a' is defined twice"),
        ],
    )
    def test_that_is_wrong_stops_the_server(self, tmp_path: Path, line: str, why: str) -> None:
        file = tmp_path / "users.acl"
        file.write_text(line, encoding="utf-8")
        assert why in start_refused("--aclfile", str(file))

    def test_a_wrong_line_of_the_configuration_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "kvpage.conf"
        file.write_text("# users\nuser a on\nuser a off\n", encoding="utf-8")
        ended = forked.run("kvpage_server.app", "--check-config", str(file))
        assert f"{file}, line 3: user 'a' is defined twice" in ended.stderr

    @pytest.mark.parametrize("option", ["--aclfile", ""])
    def test_an_error_quotes_a_part_of_a_long_word(self, tmp_path: Path, option: str) -> None:
        file = tmp_path / "file"
        file.write_text("y" * 1_000_000 + " 5\n", encoding="utf-8")
        words = ["--check-config", *([option] if option else []), str(file)]
        ended = forked.run("kvpage_server.app", *words)
        assert ended.returncode == 1
        assert "more characters)" in ended.stderr
        assert len(ended.stderr) < 10_000

    def test_an_error_names_no_rule_that_is_a_part_of_the_name(self) -> None:
        received = start_refused("--user", "ta on >secret")
        assert received == "kvpage-server: user ta: a user's name has no spaces: its rules are words of their own\n"

    def test_and_lines_of_the_configuration_exclude_each_other(self, tmp_path: Path) -> None:
        file = tmp_path / "users.acl"
        file.write_text("", encoding="utf-8")
        received = start_refused("--aclfile", str(file), "--user", "a", "on")
        assert "users can be in `user` lines or in an aclfile, not in both" in received


def start_refused(*options: str) -> str:
    """Return the error message of a server that does not start."""
    ended = forked.run("kvpage_server.app", "--port", "0", "--store", "memory", *options)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


def address_of_this_machine() -> str | None:
    """One that is not of the loopback, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            found: str = probe.getsockname()[0]
        except OSError:
            return None
    return None if found.startswith("127.") else found


class TestProtectedMode:
    def test_refuses_remote_connections_without_a_password(self) -> None:
        address = address_of_this_machine()
        if address is None:
            pytest.skip("this machine has no address but the loopback's")
        with start_server("--bind", "127.0.0.1", address) as server, server.client() as here:
            with socket.create_connection((address, server.port), timeout=60) as sock:
                received = sock.makefile("rb").read()
            assert received.startswith(b"-DENIED kvpage-server is running in protected mode")
            assert here.info("stats")["rejected_connections"] == 1
            here.config_set("protected-mode", "no")
            with redis.Redis(address, server.port) as elsewhere:
                assert elsewhere.ping()
            here.config_set("protected-mode", "yes")
            here.config_set("requirepass", "x")
            with redis.Redis(address, server.port, password="x") as elsewhere:
                assert elsewhere.ping()


def test_guessing_passwords_does_not_keep_others_waiting() -> None:
    """On a server of its own: this address's later logins are slowed down, and guesses that still wait are counted."""
    guesses = b"".join(encode_command([b"AUTH", b"guess%d" % i]) for i in range(20_000))
    with (
        start_server("--requirepass", PASSWORD) as server,
        server.client(password=PASSWORD) as admin,
        server.connect() as sock,
    ):
        sock.sendall(guesses)
        assert_prompt(server, password=PASSWORD)
        assert len(admin.acl_log()) <= 10


def test_denials_are_counted_by_kind(admin: redis.Redis, locked: RunningServer) -> None:
    admin.config_resetstat()
    admin.acl_setuser("u", enabled=True, nopass=True, keys=["a"], commands=["+get", "+publish", "+multi", "+exec"])
    with Wire(locked.port) as wire:
        wire.ask(b"AUTH", b"u", b"x")
        for words in ("SET a b", "GET b", "PUBLISH c x", "AUTH u", "AUTH nobody x", "HELLO 3 AUTH nobody x"):
            assert wire.ask(*words.encode().split())[:1] == b"-"
        wire.ask(b"MULTI")
        wire.ask(b"GET", b"a")
        admin.acl_setuser("u", reset_keys=True)
        assert b"NOPERM" in wire.ask(b"EXEC")
    received = {name: count for name, count in admin.info("stats").items() if name.startswith("acl_access_denied_")}
    kinds = {"auth": 3, "cmd": 1, "key": 2, "channel": 1}
    assert received == {f"acl_access_denied_{kind}": count for kind, count in kinds.items()}
    admin.acl_dryrun("u", "get", "b")
    assert admin.info("stats")["acl_access_denied_key"] == 2, "a dry run is no attempt"


def test_only_administrators_read_the_password_and_the_token() -> None:
    token = "9jV2xQm4TzK7sWc1"
    options = ("--requirepass", PASSWORD, "--web-token", token)
    with start_server(*options) as server, server.client(password=PASSWORD) as admin:
        rules = ("metrics on >figures %R~* -@all +info +config|get", "almost on >figures ~* &* +@all -flushall")
        for line in rules:
            admin.execute_command("ACL", "SETUSER", *line.split())
        assert (admin.config_get("requirepass"), admin.config_get("web-token")) == (
            {"requirepass": PASSWORD},
            {"web-token": token},
        )
        for name in ("metrics", "almost"):
            with server.client(username=name, password="figures") as other:
                shown = other.config_get("*")
                assert {"requirepass", "web-token"}.isdisjoint(shown)
                assert not {PASSWORD, token} & set(shown.values())
                assert shown["maxmemory-policy"] == "allkeys-prefix"
