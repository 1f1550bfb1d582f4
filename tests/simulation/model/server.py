"""Queries about the server and the own connection, and the model's replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.model.replies import A_NUMBER, ANYTHING, OK, Err, May, any_order, fields
from tests.simulation.model.rights import keys_used

if TYPE_CHECKING:
    from tests.simulation.model.model import Conversation, Words
    from tests.simulation.model.rights import Rights
    from tests.simulation.model.values import Store

# parameters that CONFIG GET returns as they were set
_KNOWN = frozenset((b"maxmemory", b"maxmemory-policy", b"page-checksums"))


class AboutTheServer:
    """A part of `Model`."""

    store: Store
    talk: Conversation
    talks: list[Conversation]
    config: dict[bytes, bytes]
    users: dict[bytes, Rights]
    paused_until: int
    has_killed: bool
    _now: Callable[[], int]

    def _anything(self, *_: bytes) -> Any:
        return ANYTHING

    def _ok(self, *_: bytes) -> Any:
        return OK

    do_info = do_memory = do_object = do_slowlog = do_latency = do_command = do_bgsave = _anything
    do_acl = do_client_list = do_client_help = do_config = do_pubsub_help = do_module_help = do_cluster_help = _anything

    # -- connections -----------------------------------------------------------------------------------------------

    do_client_no_evict = do_client_no_touch = do_client_setinfo = do_readonly = do_readwrite = _ok

    def do_client_id(self) -> Any:
        return self.talk.client.id

    def do_client_setname(self, name: bytes) -> Any:
        self.talk.called = name
        return OK

    def do_client_getname(self) -> Any:
        return self.talk.called or None

    def do_client_info(self) -> Any:
        begins = b"id=%d " % self.talk.client.id
        return May("a line about oneself", lambda reply: begins in bytes(reply) and b"name=" in bytes(reply))

    def do_client_unblock(self, _: bytes) -> Any:
        return 0

    def do_client_pause(self, milliseconds: bytes, _: bytes = b"") -> Any:
        self.paused_until = max(self.paused_until, self.store.elapsed() + int(milliseconds))
        return OK

    def do_client_unpause(self) -> Any:
        self.paused_until = self.store.elapsed()
        return OK

    def do_client_reply(self, how: bytes) -> Any:
        talk = self.talk
        if how == b"SKIP" and talk.silent >= 0:
            talk.silent = 2  # this one and the next
        elif how != b"SKIP":
            talk.silent = 0 if how == b"ON" else -1
        return OK

    def do_client_kill(self, *words: bytes) -> Any:
        options = dict(zip(words[::2], words[1::2], strict=True))
        if options.get(b"ID") == b"0":
            return Err("ERR client-id should be greater than 0")
        ended = [talk for talk in self.talks if _is_chosen(talk, options)]
        ended = [talk for talk in ended if talk is not self.talk or options.get(b"SKIPME") == b"no"]
        self.has_killed = True
        for talk in ended:
            talk.ends = True
            talk.over = talk is not self.talk  # a client that ends itself is answered first
            talk.quits = False  # replies that wait for the disk are not sent anymore
        return A_NUMBER  # new connections may not have sent their names yet

    def do_quit(self) -> Any:
        self.talk.ends = self.talk.quits = self.talk.over = True
        return OK

    def do_monitor(self) -> Any:
        self.talk.monitors = True
        return OK

    def do_select(self, number: bytes) -> Any:
        return OK if number == b"0" else Err("ERR DB index is out of range")

    def do_wait(self, *_: bytes) -> Any:
        return 0

    # -- users -----------------------------------------------------------------------------------------------------

    def do_acl_whoami(self) -> Any:
        return self.talk.user

    def do_acl_users(self) -> Any:
        return any_order([b"default", *self.users])

    def do_acl_setuser(self, user: bytes, *rules: bytes) -> Any:
        self.change_rights(user, rules)
        return OK

    def change_rights(self, user: bytes, rules: Words) -> None:
        """Change the rights of a user, which is created if necessary."""
        raise NotImplementedError

    def do_acl_deluser(self, user: bytes) -> Any:
        for talk in self.talks:
            if talk.user == user:
                talk.ends, talk.over, talk.quits = True, True, False
        return int(self.users.pop(user, None) is not None)

    def do_acl_dryrun(self, user: bytes, *words: bytes) -> Any:
        if user != b"default" and user not in self.users:
            return Err("ERR User")
        if user == b"default" or self.users[user].may(words):
            return OK
        return May("why not", lambda reply: isinstance(reply, bytes) and reply.startswith(b"User " + user))

    # -- the server ------------------------------------------------------------------------------------------------

    def do_role(self) -> Any:
        return [b"master", 0, []]

    def do_time(self) -> Any:
        now = self._now()
        return May(
            "the time",
            lambda reply: len(reply) == 2 and int(reply[0]) * 1000 + int(reply[1]) // 1000 == now,
        )

    def do_lastsave(self) -> Any:
        return A_NUMBER

    def do_cluster(self, *_: bytes) -> Any:
        return Err("ERR This instance has cluster support disabled")

    def do_module_list(self) -> Any:
        return []

    def do_command_count(self) -> Any:
        return A_NUMBER

    def do_command_getkeys(self, *words: bytes) -> Any:
        return keys_used(words)

    def do_config_get(self, name: bytes) -> Any:
        return fields({name: self.config[name]}) if name in _KNOWN & self.config.keys() else ANYTHING

    # -- channels and keys -----------------------------------------------------------------------------------------

    def do_pubsub_channels(self) -> Any:
        here = {channel for talk in self.talks if not talk.gone for channel in talk.channels}
        most = {channel for talk in self.talks for channel in talk.channels}
        return May(f"between {here} and {most}", lambda reply: here <= set(reply) <= most)

    def do_pubsub_numpat(self) -> Any:
        return A_NUMBER

    def do_pubsub_numsub(self, channel: bytes) -> Any:
        listen = [talk for talk in self.talks if channel in talk.channels]
        least = sum(not talk.gone for talk in listen)
        return [channel, May("how many listen", lambda reply: least <= reply <= len(listen))]

    def _of_key(self, key: bytes, holds: Callable[[Any], bool]) -> Any:
        return None if self.store.get(key) is None else May("something about a key", holds)

    def do_object_encoding(self, key: bytes) -> Any:
        return self._of_key(key, lambda reply: isinstance(reply, bytes))

    def do_object_refcount(self, key: bytes) -> Any:
        return self._of_key(key, lambda reply: reply == 1)

    def do_object_idletime(self, key: bytes) -> Any:
        return self._of_key(key, lambda reply: reply >= 0)

    def do_memory_usage(self, key: bytes) -> Any:
        return self._of_key(
            key, lambda reply: reply is not None and reply >= len(key)
        )  # a value on disk only uses no more


def _is_chosen(talk: Conversation, options: dict[bytes, bytes]) -> bool:
    """Whether CLIENT KILL with these options is about somebody."""
    client = talk.client
    if client is None:
        return False
    tests = {
        b"ID": lambda value: client.id == int(value),
        b"USER": lambda value: talk.user == value,
        b"TYPE": lambda value: bool(talk.channels or talk.patterns) == (value == b"pubsub"),
        b"SKIPME": lambda value: True,
    }
    return all(tests[name](value) for name, value in options.items())
