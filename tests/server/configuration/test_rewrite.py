"""CONFIG REWRITE, and values of several parts: the file keeps its comments, its order and unchanged lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import start_server

from kvpage_server.configuration import rewrite
from kvpage_server.configuration.config import Config, from_arguments
from kvpage_server.configuration.rewrite import rewritten

FILE = """\
# the first tenant
user alice on >secret ~kv:a.* +@all
quota kv:a.* 8mb

# the second tenant
user bob on >secret ~kv:b.* +@all
quota kv:b.* 4mb kv:c.* 2mb

# memory
maxmemory 64mb
maxdisk auto
# of subscribers
client-output-buffer-limit pubsub 16mb 8mb 60
# of others
client-output-buffer-limit normal 0 32mb 60
"""


def test_unchanged_lines_keep_their_place_and_spelling(tmp_path: Path) -> None:
    file = tmp_path / "kvpage.conf"
    file.write_text(FILE, encoding="utf-8")
    with start_server(file=file) as server, server.client() as client:
        assert client.config_rewrite()
    lines, before = file.read_text(encoding="utf-8").splitlines(), FILE.splitlines()
    users = [number for number, line in enumerate(before) if line.startswith("user ")]
    assert [line for number, line in enumerate(lines[: len(before)]) if number not in users] == [
        line for number, line in enumerate(before) if number not in users
    ]
    assert [lines[number].split()[1] for number in users] == ["alice", "bob"]
    assert not any(line.split()[:1] in (["user"], ["quota"]) for line in lines[len(before) :])


def test_maxclients_is_written_as_the_system_has_lowered_it(tmp_path: Path) -> None:
    file = tmp_path / "kvpage.conf"
    file.write_text("store memory\nmaxclients 5000\n", encoding="utf-8")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); "
    program = ("-c", f"{limit}from kvpage_server.app import main; main()")
    with start_server(file=file, program=program) as server, server.client() as client:
        assert client.config_get("maxclients")["maxclients"] == "36"
        assert client.config_rewrite()
    assert "maxclients 36" in file.read_text(encoding="utf-8").splitlines()


def test_changed_parts_are_replaced_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "kvpage.conf"
    file.write_text(FILE, encoding="utf-8")
    with start_server(file=file) as server, server.client() as client:
        client.config_set("quota", "kv:a.* 1mb kv:c.* 2mb kv:d.* 3mb")
        client.config_set("maxmemory", "32mb")
        client.config_set("client-output-buffer-limit", "normal 0 16mb 60")
        client.acl_deluser("alice")
        client.acl_setuser("carol", enabled=True, nopass=True)
        assert client.config_rewrite()
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["# the first tenant", "quota kv:a.* 1048576"]
    assert lines[4].startswith("user bob ")
    assert lines[5] == "quota kv:c.* 2097152"
    assert lines[8:10] == ["maxmemory 33554432", "maxdisk auto"]
    assert lines[11:14] == [
        "client-output-buffer-limit pubsub 16mb 8mb 60",
        "# of others",
        "client-output-buffer-limit normal 0 16777216 60",
    ]
    assert "quota kv:d.* 3145728" in lines[14:]
    assert any(line.startswith("user carol ") for line in lines[14:])
    again = Config()
    again.load(file)
    assert list(again.quota.items()) == [("kv:a.*", 1 << 20), ("kv:c.*", 2 << 20), ("kv:d.*", 3 << 20)]


def test_a_file_of_a_killed_rewrite_is_removed(tmp_path: Path) -> None:
    file, aclfile, left = tmp_path / "kvpage.conf", tmp_path / "users.acl", tmp_path / ".kvpage-abcdefgh.tmp"
    file.write_text(f"aclfile {aclfile}\n", encoding="utf-8")
    aclfile.write_text("user bob on >secret ~kv:b.* +@all\n", encoding="utf-8")
    with start_server(file=file) as server, server.client() as client:
        left.write_text("requirepass secret", encoding="utf-8")
        assert client.config_rewrite()
        assert not left.exists()
        (left := tmp_path / ".users-abcdefgh.tmp").touch()
        other = tmp_path / ".other-abcdefgh.tmp"
        other.touch()
        assert client.acl_save()
        assert not left.exists()
        assert other.exists()


def test_quotas_in_another_order_have_a_line_each() -> None:
    """A key belongs to the first quota that matches, so their order is a part of the value."""
    config = Config()
    config.set("quota", ["b*", "1", "a*", "2"])
    assert rewritten(b"quota a* 2\n# more\nquota b* 1\n", config, []) == b"quota b* 1\nquota a* 2\n# more\n"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("quota", "kv:a.* 8mb kv:b.* 0", ["kv:a.*", "8388608", "kv:b.*", "0"]),
        ("client-output-buffer-limit", "pubsub 1mb 1kb 3", ["pubsub", "1048576", "1024", "3"]),
        ("bind", "127.0.0.1 -::1", ["127.0.0.1", "-::1"]),
    ],
)
def test_one_quoted_word_is_taken_as_by_config_set(name: str, value: str, words: list[str]) -> None:
    quoted, separate, changed = (
        from_arguments([f"--{name}", value]),
        from_arguments([f"--{name}", *value.split()]),
        Config(),
    )
    changed.change(name, value)
    assert quoted.words(name) == separate.words(name) == changed.words(name)
    assert quoted.words(name)[-len(words) :] == words or words[0] in quoted.words(name)


def test_each_line_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    split = rewrite.split_words
    monkeypatch.setattr(rewrite, "split_words", lambda line: parsed.append(line) or split(line))
    users = [b"user u%d on nopass ~* +@all" % number for number in range(100)]
    old = b"\n".join([b"port 0", *users])
    assert rewritten(old, Config(), users).count(b"\nuser ") == 100
    assert len(parsed) <= 3 * 101
