"""Questions: any commands, each with the decoder of its reply.

Every reply is checked. If it is not a possible reply to its question, WrongReply is raised and the connection is
closed, because the next reply may belong to another question as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpage_server.client.errors import Refused, Unsupported, WrongReply
from kvpage_server.client.page import BlockName
from kvpage_server.client.wire.exchange import Request, command
from kvpage_server.client.wire.reply import Values

Word = str | bytes | int


class Question(NamedTuple):
    """A command, as its words, and the decoder of its reply, which raises WrongReply for a reply that does not fit."""

    words: Sequence[Word]
    read: Callable[[Any], Any]


def key_of(question: Question) -> bytes:
    """Return the second word of a question: its key, which selects the server. Raises Unsupported if there is none."""
    if len(question.words) < 2:
        raise Unsupported(f"several servers can't be asked for anything without a key, got {question.words[0]!r}")
    return encoded(question.words[1])


class BlockWords:
    """Questions about blocks for kvpage-server."""

    @staticmethod
    def exists(name: BlockName) -> Question:
        return Question(["KVBLOCKEXISTS", *name], up_to(1))

    @staticmethod
    def delete(req_id: bytes, pages: Sequence[int]) -> Question:
        return Question(["KVPAGEDEL", req_id, *pages], integer)


def ask(questions: Sequence[Question]) -> Request[list[Any]]:
    """Return the request that sends several questions in a pipeline. Its result is the list of their decoded replies.

    The result raises Refused for the first error reply.
    """
    return _request([question.words for question in questions], lambda values: _read(questions, values))


def watch(keys: Sequence[Word], question: Question) -> Request[Any]:
    """Return the request that watches keys, and sends a question about them. Its result is the decoded reply to the
    question.
    """
    return _request([["WATCH", *keys], question.words], lambda values: _read([Question((), ok), question], values)[1])


def commit(questions: Sequence[Question]) -> Request[list[Any] | None]:
    """Return the request that runs all questions in MULTI and EXEC.

    Its result is the list of their decoded replies, or None if a watched key was changed.
    """

    def read(values: list[Any]) -> list[Any] | None:
        opened, *queued, answers = values
        ok(opened)
        for value in queued:
            _expect(value == b"QUEUED", "QUEUED", value)
        return None if answers is None else _read(questions, array(len(questions))(answers))

    return _request([["MULTI"], *(question.words for question in questions), ["EXEC"]], read)


def encoded(word: Word) -> bytes:
    """Return the bytes that are sent for a word."""
    return word if isinstance(word, bytes) else str(word).encode()


def _request(commands: Sequence[Sequence[Word]], read: Callable[[list[Any]], Any]) -> Request[Any]:
    text = b"".join([command(*map(encoded, words)) for words in commands])
    return Request(lambda: iter((text,)), lambda: Values(len(commands)), read)


def _read(questions: Sequence[Question], values: Sequence[Any]) -> list[Any]:
    if refused := next((value for value in values if isinstance(value, Refused)), None):
        raise refused.again()
    return [question.read(value) for question, value in zip(questions, values, strict=True)]


# -- readers -----------------------------------------------------------------------------------------------------------


def _expect(so: bool, wanted: str, value: Any) -> None:
    if not so:
        raise WrongReply(f"instead of {wanted} came {value!r:.80}")


def ok(value: Any) -> None:
    """Raise WrongReply for another reply than OK."""
    _expect(value == b"OK", "OK", value)


def ok_or_not(value: Any) -> bool:
    """Return True for the reply OK, False for null. Raises WrongReply for another reply."""
    _expect(value in (b"OK", None), "OK or nothing", value)
    return value is not None


def integer(value: Any) -> int:
    _expect(isinstance(value, int), "a number", value)
    return int(value)


def integers(value: Any) -> list[int]:
    _expect(isinstance(value, list), "numbers", value)
    return [integer(one) for one in value]


def up_to(most: int) -> Callable[[Any], int]:
    """Return a decoder of numbers from 0 to `most`."""

    def read(value: Any) -> int:
        _expect(isinstance(value, int) and 0 <= value <= most, f"a number from 0 to {most}", value)
        return int(value)

    return read


def text(value: Any) -> bytes | None:
    """Decode a string or null. Raises WrongReply."""
    _expect(value is None or isinstance(value, bytes | memoryview), "a string", value)
    return None if value is None else bytes(value)


def array(length: int) -> Callable[[Any], list[Any]]:
    """Return a decoder of arrays of `length` replies of any kind."""

    def read(value: Any) -> list[Any]:
        _expect(isinstance(value, list) and len(value) == length, f"an array of {length}", value)
        return list(value)

    return read


def texts(length: int) -> Callable[[Any], list[bytes | None]]:
    """Return a decoder of arrays of `length` strings, with None for null."""
    several = array(length)
    return lambda value: [text(one) for one in several(value)]


def scanned(value: Any) -> tuple[bytes, list[bytes]]:
    """Decode the reply to SCAN: the next cursor, and keys. Raises WrongReply."""
    cursor, keys = array(2)(value)
    _expect(isinstance(cursor, bytes) and cursor.isdigit(), "a cursor", cursor)
    _expect(isinstance(keys, list) and all(isinstance(key, bytes) for key in keys), "keys", keys)
    return cursor, keys
