"""The parser: every split of the input gives the same commands, and what is no RESP is refused as Redis refuses it."""

from __future__ import annotations

import itertools
import random
import socket
import sys
import time
from collections.abc import Iterable, Sequence

import pytest
from fuzz.invariants import SEEDS, check
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kvpage_server.resp.parser import MAX_LINE, Buffer, Limits, Parser, ProtocolError
from servers import RunningServer
from wire import spell

from kvpage_server.core import Arena, Slot
from kvpage_server.page import checksum
from kvpage_server.resp.inline import split_words

Words = list[bytes]


def inline(words: Sequence[bytes]) -> bytes:
    """An inline command with every byte escaped."""
    return b" ".join(b'"' + b"".join(b"\\x%02x" % byte for byte in word) + b'"' for word in words) + b"\r\n"


def parse(
    pieces: Iterable[bytes], parser: Parser | None = None, limits: Limits | None = None
) -> tuple[list[Words], bool]:
    """The commands that come out when the input arrives in pieces, and whether it ended in a protocol error."""
    arena = Arena()
    parser = parser or Parser(arena.allocate, limits=limits)
    commands: list[Words] = []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (command := parser.next()) is not None:
                commands.append([bytes(word if isinstance(word, bytes) else word.body) for word in command])
    except ProtocolError:
        return commands, True
    return commands, False


def cut(data: bytes, positions: Iterable[int]) -> list[bytes]:
    """`data` in pieces that end at the positions."""
    edges = sorted({position % (len(data) + 1) for position in positions} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


# Lengths around the parser's own limits: short arguments, DIRECT, keep_from, what is read behind a long bulk, scratch.
LENGTHS = [0, 1, 9, 255, 256, 257, 999, 1000, 1022, 1023, 1024, 1025, 4095, 4096, 4097, 8190, 8192, 8193, 65536, 70000]
short_words = st.binary(max_size=12) | st.sampled_from([b"", b"\r\n", b"\r", b"\n", b"$3\r\n", b"*1\r\n", b"\0", b"7"])
long_words = st.builds(
    lambda size, seed: random.Random(seed).randbytes(size), st.sampled_from(LENGTHS), st.integers(0, 9)
)
commands = st.lists(short_words, min_size=1, max_size=14) | st.lists(short_words | long_words, min_size=1, max_size=4)
# An inline command: no word may be a multibulk's start, and there is at least one.
inline_commands = st.lists(st.binary(max_size=9), min_size=1, max_size=5)
streams = st.lists(st.tuples(commands, st.just(spell)) | st.tuples(inline_commands, st.just(inline)), max_size=6)
positions = st.lists(st.integers(0, 2**20), max_size=12)


steps = positions | st.sampled_from([997, 9001, 50_000]).map(lambda step: range(0, 2**22, step))  # as a socket gives it


@st.composite
def batches(draw: st.DrawFn) -> Words:
    """Groups of short words and a long one, nearly all of them alike."""
    pad = draw(st.sampled_from([5, 70]))  # so that a header fits in place of the words before a body, or does not
    size, short = draw(st.sampled_from([4096, 5000, 16384, 65536, 65537])), draw(st.integers(1, 12))
    words: Words = [b"BATCH"]
    for group in range(draw(st.integers(3, 30))):
        words += [b"%d:" % group + b"." * pad, *(b"%d" % (group % 7) for _ in range(short - 1))]
        words.append(random.Random(group).randbytes(size))
    for _ in range(draw(st.integers(0, 2))):
        words[draw(st.integers(1, len(words) - 1))] = draw(short_words | long_words)
    return words


@st.composite
def shapes(draw: st.DrawFn) -> Words:
    """Words of a few sizes, from 3 bytes to 300 KB, in a pattern that repeats, with some that break it."""
    sizes = st.sampled_from([3, 60, 75, 150, 185, 4096, 10_000, 100_000]) | st.integers(3, 300_000)
    pattern = draw(st.lists(sizes, min_size=1, max_size=4))
    odd = draw(st.lists(sizes, max_size=3))
    count = min(draw(st.integers(1, 120)), 4_000_000 // sum(pattern))
    lengths = pattern * count + odd
    for _ in range(draw(st.integers(0, 2))):
        lengths[draw(st.integers(0, len(lengths) - 1))] = draw(sizes)
    return [b"MSET", *(b"%c" % (65 + at % 26) * length for at, length in enumerate(lengths))]


@st.composite
def questions(draw: st.DrawFn) -> Words:
    """How many groups of short words, and these: most of them as long as those before."""
    width, every = draw(st.integers(1, 6)), draw(st.sampled_from([1, 7, 40]))
    count = draw(st.integers(1, 150))
    words: Words = [b"ASK", b"%d" % count]
    for group in range(count):
        words += [b"request-%d" % (group // every % 12), *(b"%d" % (group // place) for place in range(1, width))]
    for _ in range(draw(st.integers(0, 2))):
        words[draw(st.integers(1, len(words) - 1))] = draw(short_words)
    return words


def receive(parser: Parser, data: bytes, at_once: int) -> None:
    """Have a parser receive data as a socket gives it: a buffer's in pieces of so many bytes, some in every turn."""
    while data:
        room = parser.buffers()[0][: 5 * at_once]
        count = min(len(room), len(data))
        for start in range(0, count, at_once):
            stop = min(start + at_once, count)
            room[start:stop] = data[start:stop]
            if stop < count:
                parser.arriving(stop)
        parser.received(count)
        data = data[count:]


class TestSplits:
    @given(questions(), st.integers(0, 2**16), st.sampled_from([b"", b"x", b"$", b"\r\n", b"\0" * 5]), steps)
    def test_groups_taken_together_are_what_is_taken_byte_by_byte(
        self, words: Words, at: int, noise: bytes, positions: Sequence[int]
    ) -> None:
        data = bytearray(spell(words) + spell([b"PING"]))
        assert parse([bytes(data)]) == ([words, [b"PING"]], False)
        at %= len(data)
        data[at : at + 1] = noise
        one_by_one = parse(cut(bytes(data), range(len(data))))
        assert parse([bytes(data)]) == parse(cut(bytes(data), positions)) == one_by_one

    @given(shapes(), steps)
    @example([b"MSET", *[b"m" * 150, b"b" * 10_000] * 20, b"m" * 150], range(0, 200_000, 65536))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    def test_words_of_any_sizes_in_any_order_are_what_was_sent(self, words: Words, positions: Sequence[int]) -> None:
        data = spell(words) + spell([b"PING"])
        assert parse(cut(data, positions)) == ([words, [b"PING"]], False)

    @given(st.lists(batches(), min_size=1, max_size=2), steps, st.booleans())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    def test_any_split_gives_the_batches_that_were_sent(
        self, sent: list[Words], positions: Sequence[int], at_leisure: bool
    ) -> None:
        data = b"".join(map(spell, [*sent, [b"PING"]]))
        arena = Arena()
        parser = Parser(arena.allocate)
        if at_leisure:  # much is received before anybody asks for a command
            for piece in cut(data, positions):
                parser.feed(piece)
            data = b""
        assert parse(cut(data, positions) or [b""], parser) == ([*sent, [b"PING"]], False)
        assert arena.used == 0

    @given(batches(), steps, st.integers(0, 2**22), st.sampled_from([b"", b"x", b"\r\n", b"$5\r\n", b"\xff" * 9]))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    def test_a_damaged_batch_gives_the_same_whatever_the_split(
        self, words: Words, positions: Sequence[int], at: int, noise: bytes
    ) -> None:
        data = bytearray(spell(words) + spell([b"PING"]))
        at %= len(data)
        data[at : at + 1] = noise
        assert parse(cut(bytes(data), positions)) == parse([bytes(data)]) == parse([bytes(data)], Parser(Buffer))

    @pytest.mark.parametrize("last", [b"", b"short", bytes(5000), bytes(70_000)])
    def test_a_batch_may_end_in_another_way_than_it_began(self, last: bytes) -> None:
        """And nothing waits for what will not come."""
        pairs = [word for i in range(20) for word in (b"key:%050d" % i, bytes(4096))]
        for end in ([b"key", last], [last], [b"key", last, last]):
            words = [b"MSET", *pairs, *end]
            assert parse(cut(spell(words), range(0, 2**17, 10_000))) == ([words], False)

    @given(batches(), steps, st.sampled_from([1000, 30_000, 262_144]))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    def test_every_long_body_has_the_digest_of_its_bytes_however_they_come(
        self, words: Words, positions: Sequence[int], at_once: int
    ) -> None:
        arena = Arena()
        parser = Parser(arena.allocate, hashed=lambda name: name == b"BATCH")
        for piece in cut(spell(words), positions):
            receive(parser, piece, at_once)
        command = parser.next()
        assert command is not None
        bodies = [word for word in command if not isinstance(word, bytes)]
        assert [bytes(body.body) for body in bodies] == [word for word in words if len(word) >= 4096]
        assert [body.digest for body in bodies] == [checksum(body.body) for body in bodies]

    def test_what_nobody_wants_hashed_has_no_digest(self) -> None:
        arena = Arena()
        parser = Parser(arena.allocate, hashed=lambda name: name == b"BATCH")
        receive(parser, spell([b"MSET", *[b"key" * 30, bytes(5000)] * 20]), 1000)
        assert {body.digest for body in (parser.next() or [])[2::2] if isinstance(body, Slot)} == {0}

    @given(streams, positions)
    def test_any_split_gives_the_commands_that_were_sent(self, stream: list, positions: list[int]) -> None:
        data = b"".join(write(words) for words, write in stream)
        assert parse(cut(data, positions)) == ([words for words, _ in stream], False)

    @given(st.lists(st.lists(short_words, min_size=1, max_size=9), max_size=5))
    def test_a_byte_at_a_time(self, stream: list[Words]) -> None:
        data = b"".join(map(spell, stream))
        assert parse(cut(data, range(len(data)))) == (stream, False)

    def test_every_single_cut_of_a_page_write(self) -> None:
        body = random.Random(4).randbytes(5000)
        words = [b"KVPAGESET", b"req", b"5", b"8", b"42", b"0", b"1", b"128", b"64", b"3600", body]
        data = spell(words) + spell([b"PING"])
        for position in range(1, len(data)):
            assert parse([data[:position], data[position:]]) == ([words, [b"PING"]], False), position

    @given(st.data())
    @settings(max_examples=300)
    def test_damaged_input_gives_the_same_whatever_the_split(self, data: st.DataObject) -> None:
        """Commands before the damage come out, the same ones; then either an error always, or never."""
        good = b"".join(map(spell, data.draw(st.lists(st.lists(short_words, min_size=1, max_size=9), min_size=1))))
        damaged = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(damaged) - 1))
            damaged[position : position + 1] = data.draw(
                st.sampled_from([b"", b"\r\n", b"*", b"$", b"-", b"9", b"\n", b'"', b"\xff", b"\0", b"00"])
            )
        stream = bytes(damaged)
        assert parse(cut(stream, data.draw(positions))) == parse([stream])

    @given(st.binary(max_size=300), positions)
    def test_noise_gives_the_same_whatever_the_split(self, noise: bytes, positions: list[int]) -> None:
        for stream in (noise, b"*2\r\n$4\r\n" + noise, b"*3\r\n$1\r\na\r\n$2000\r\n" + noise):
            assert parse(cut(stream, positions)) == parse([stream])

    @given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 5200), st.binary(max_size=9)), max_size=5))
    def test_what_the_fuzzer_checks(self, seed: bytes, damages: list[tuple[int, bytes]]) -> None:
        data = bytearray(seed)
        for position, noise in damages:
            data[position : position + len(noise)] = noise
        check(bytes(data))

    def test_commands_wait_for_whoever_takes_them(self) -> None:
        """What was received is kept when it is not asked for at once."""
        parser = Parser(Buffer)
        sent = [[b"SET", b"key:%d" % i, bytes(i * 37 % 5000)] for i in range(300)]
        for piece in cut(b"".join(map(spell, sent)), range(0, 10**6, 1000)):
            parser.feed(piece)
        assert parse([b""], parser) == (sent, False)


def bytes_split(parser: Parser, chunks: Sequence[bytes], commands: Sequence[Words] = ()) -> int:
    """How many bytes the parser splits at their line ends when it is fed chunks, which are those commands."""
    split = 0

    def note(frame: object, event: str, called: object) -> None:
        nonlocal split
        if event == "c_call" and getattr(called, "__name__", "") == "split":
            split += len(getattr(called, "__self__", b""))

    sys.setprofile(note)
    try:
        found = parse(chunks, parser)
    finally:
        sys.setprofile(None)
    assert found == ([*commands], False)
    return split


class TestMemory:
    def test_a_long_bulk_arrives_in_the_memory_that_was_allocated_for_it(self) -> None:
        made: list[Buffer] = []

        def allocate(size: int) -> Buffer:
            made.append(Buffer(size))
            return made[-1]

        for pieces in ([10_000], [10, 10_000], [40, 41, 9000, 10_030]):
            parser = Parser(allocate, keep_from=4096)
            body = random.Random(5).randbytes(10_000)
            for piece in cut(spell([b"SET", b"key", body]), pieces):
                parser.feed(piece)
                command = parser.next()
            assert command is not None
            assert command[2] is made[-1]
            assert made[-1].body == body
        assert len(made) == 3  # and nothing else was allocated

    def test_bulks_shorter_than_keep_from_are_bytes(self) -> None:
        for pieces in ([], [30], range(0, 5000, 7)):
            parser = Parser(Buffer, keep_from=4096)
            for piece in cut(spell([b"SET", b"key", bytes(4095)]), pieces):
                parser.feed(piece)
            assert parser.next() == [b"SET", b"key", bytes(4095)]

    def test_an_upload_that_is_cut_short_leaks_nothing(self) -> None:
        arena = Arena()
        for size in (5000, 100_000, 5_000_000):
            for missing in (1, 2, 3, 1000, size + 2):
                parser = Parser(arena.allocate)
                parser.feed(spell([b"SET", b"key", bytes(size)])[:-missing])
                assert parser.next() is None
                assert arena.used > size
                del parser
                assert arena.used == 0

    @given(streams, positions, st.integers(0, 2**20))
    @settings(max_examples=50)
    def test_an_arena_is_empty_when_parser_and_commands_are_gone(
        self, stream: list, positions: list[int], end: int
    ) -> None:
        arena = Arena()
        data = b"".join(write(words) for words, write in stream)
        parse(cut(data[: end % (len(data) + 1)], positions), Parser(arena.allocate))
        assert arena.used == 0

    def test_pending_counts_what_waits_for_the_end_of_a_command(self) -> None:
        parser = Parser(Buffer)
        parser.feed(b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n")
        assert parser.next() is None
        assert 6 <= parser.pending <= 30
        parser.feed(b"$100000\r\n" + bytes(50_000))
        assert parser.next() is None
        assert parser.pending >= 100_000  # its memory is taken already
        parser.feed(bytes(50_000) + b"\r\n")
        assert parser.next() is not None
        assert parser.pending == 0

    def test_the_work_grows_with_the_input_not_with_its_square(self) -> None:
        """A command of many arguments that comes in small pieces; ten times as many take about ten times as long."""

        def seconds(arguments: int) -> float:
            data = spell([b"%d" % i for i in range(arguments)])
            best = 1e9
            for _ in range(3):
                parser, start = Parser(Buffer), time.process_time()
                for piece in cut(data, range(0, len(data), 512)):
                    parser.feed(piece)
                    parser.next()
                best = min(best, time.process_time() - start)
            return best

        assert seconds(100_000) < 40 * seconds(10_000)

    def test_what_has_arrived_is_split_once(self) -> None:
        """However much more is announced: a million words that do not come cost no more than those that do."""
        chunks = 10 * [b"$2\r\nab\r\n" * 4000]
        parser = Parser(Buffer)
        assert bytes_split(parser, [b"*1000000\r\n", *chunks]) <= 1.05 * sum(map(len, chunks))
        assert parser.arguments == 40_000

    def test_so_is_a_batch_of_which_no_group_is_like_another(self) -> None:
        words = [b"ASK", b"3000", *(b"x" * (1 + i * 7 % 30) for i in range(3000) for _ in range(5))]
        chunks = cut(spell(words), range(0, 2**20, 50_000))
        assert bytes_split(Parser(Buffer), chunks, [words]) <= 1.2 * sum(map(len, chunks))


class TestLimits:
    def refused(self, data: bytes, limits: Limits | None = None, *, step: int = 2**30) -> str:
        """The error that `data` ends in when it comes in pieces of `step` bytes."""
        parser = Parser(Buffer, limits=limits)
        try:
            for piece in cut(data, range(0, len(data), step)):
                parser.feed(piece)
                while parser.next() is not None:
                    pass
        except ProtocolError as error:
            return str(error)
        raise AssertionError("it was taken")

    def test_bulks_longer_than_the_limit(self) -> None:
        limits = Limits(max_bulk=1000)
        assert parse([spell([bytes(1000)])], limits=limits) == ([[bytes(1000)]], False)
        assert self.refused(b"*1\r\n$1001\r\n", limits) == "invalid bulk length"

    def test_arguments_beyond_the_limit(self) -> None:
        limits = Limits(max_arguments=5)
        assert parse([spell([b"a"] * 5)], limits=limits) == ([[b"a"] * 5], False)
        assert self.refused(spell([b"a"] * 6), limits) == "invalid multibulk length"

    def test_commands_longer_than_the_limit(self) -> None:
        limits = Limits(max_command=100_000)
        assert parse([spell([bytes(40_000)] * 2)], limits=limits)[1] is False
        assert self.refused(spell([bytes(40_000)] * 3), limits) == "command exceeds the query buffer limit"

    @pytest.mark.parametrize("size", [1, 900, 1023])
    def test_many_short_arguments_count_as_well(self, size: int) -> None:
        limits = Limits(max_command=100_000)
        words = [bytes(size)] * (200_000 // size)
        assert self.refused(spell(words), limits) == "command exceeds the query buffer limit"

    def test_a_stranger_sends_ten_arguments_of_16_kib_at_the_most(self) -> None:
        limits = Limits(unauthenticated=True)
        assert parse([spell([bytes(16384)] * 10)], limits=limits)[1] is False
        assert self.refused(spell([b"a"] * 11), limits) == "unauthenticated multibulk length"
        assert self.refused(b"*2\r\n$16385\r\n", limits) == "unauthenticated bulk length"

    @pytest.mark.parametrize(
        ("start", "error"),
        [
            (b"", "too big inline request"),
            (b"*", "too big mbulk count string"),
            (b"*1\r\n$", "too big bulk count string"),
        ],
    )
    def test_a_line_without_end_is_not_waited_for(self, start: bytes, error: str) -> None:
        line = b"1" * (MAX_LINE + 2)
        assert self.refused(start + line) == error
        assert self.refused(start + line, step=1000) == error

    def test_a_bulk_without_its_end_is_refused_wherever_it_is_taken(self) -> None:
        for size in (0, 5, 500, 1000, 2000, 5000, 100_000):
            data = b"*1\r\n$%d\r\n%b" % (size, bytes(size)) + b"xx" + bytes(100)
            assert self.refused(data) == "bulk string is not terminated by CRLF"
            if size < 5000:
                assert self.refused(data, step=1) == "bulk string is not terminated by CRLF"
        run = spell([b"a"] * 8).replace(b"a\r\n", b"ab\n", 8)
        assert self.refused(run) == "bulk string is not terminated by CRLF"


class TestInline:
    @given(st.lists(st.binary(), max_size=6))
    def test_escaped_words_come_back(self, words: Words) -> None:
        assert split_words(inline(words)) == words

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b"", []),
            (b" \t ", []),
            (b"a b  c ", [b"a", b"b", b"c"]),
            (b"\"\" ''", [b"", b""]),
            (b"\"a b\" 'c d'", [b"a b", b"c d"]),
            (rb'"\x41\x0a\n\r\t\b\a\\\"\q"', [b'A\n\n\r\t\b\a\\"q']),
            (rb'"\xg1"', [b"xg1"]),
            (rb"'\n\'\"'", [rb"\n'\""]),
            (rb"a\nb", [rb"a\nb"]),
            (b'a"b c"', [b"ab c"]),
            (b"\xff\xfe", [b"\xff\xfe"]),
            (b'"a', None),
            (b"'a", None),
            (b'"a"b', None),
            (b"'a'b", None),
            (b'"a\\"', None),
        ],
    )
    def test_quotes(self, line: bytes, words: Words | None) -> None:
        assert split_words(line) == words


def talk(server: RunningServer, data: bytes) -> bytes:
    """All that a server answers to `data`."""
    with server.connect() as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass  # refused while it was still being sent: what was answered is there to read
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


PING = spell([b"PING"])
FRAMES = [
    b"*0\r\n",
    b"*-1\r\n",
    b"*-10\r\n",
    b"*-99999999999999999999999\r\n",
    b"*9223372036854775807\r\n",
    b"*9223372036854775808\r\n",
    b"*18446744073709551617\r\n",
    b"*2147483648\r\n",
    b"*2147483647\r\n",
    b"*1048577\r\n",
    b"*\r\n",
    b"*abc\r\n",
    b"*+1\r\n",
    b"* 1\r\n",
    b"*1 \r\n",
    b"*01\r\n",
    b"*-0\r\n",
    b"*-\r\n",
    b"*1.0\r\n",
    b"*1\r\n$-1\r\n",
    b"*1\r\n$-0\r\n",
    b"*1\r\n$9223372036854775807\r\n",
    b"*1\r\n$9223372036854775808\r\n",
    b"*1\r\n$18446744073709551616\r\n",
    b"*1\r\n$536870913\r\n",
    b"*1\r\n$4294967296\r\n",
    b"*1\r\n$\r\n",
    b"*1\r\n$abc\r\n",
    b"*1\r\n$+4\r\nPING\r\n",
    b"*1\r\n$04\r\nPING\r\n",
    b"*1\r\n$ 4\r\nPING\r\n",
    b"*1\r\n:4\r\nPING\r\n",
    b"*1\r\nPING\r\n",
    b"*1\r\n\xff\r\n",
    b"*1\r\n*1\r\n$4\r\nPING\r\n",
    b"*2\r\n$4\r\nECHO\r\n*1\r\n$1\r\na\r\n",
    b"$4\r\nPING\r\n",
    b":1\r\n",
    b"+PING\r\n",
    b"\r\n",
    b"\n",
    b" \t\r\n",
    b"ping\n",
    b"PING\r\n",
    b"  ping  \r\n",
    b'ECHO "hello world"\r\n',
    rb'ECHO "\x41\t\"\\"' + b"\r\n",
    b"ECHO 'it\\'s'\r\n",
    b'ECHO ""\r\n',
    b'ECHO "unbalanced\r\n',
    b"ECHO 'a'b\r\n",
    b"ECHO a b\r\n",
    b"NOSUCH a b\r\n",
    b"a" * 200_000,
    b"*" + b"1" * 200_000,
    b"*1\r\n$" + b"1" * 200_000,
    spell([b""]),
    spell([b"", b""]),
    spell([b"\0"]),
    spell([b"PING\0"]),
    spell([b"ECHO", b"\0\r\n\xff"]),
    spell([b"ECHO", b""]),
    spell([b"SET", b"\0\r\n\xff", b"binary\0value"]) + spell([b"GET", b"\0\r\n\xff"]),
    spell([b"NOSUCH\r\n", b"a\r\nb", b"\xff\0"]),
    spell([b"no such"]),
    spell([b"x" * 300, b"y" * 300, b"z"]),
    spell([b"NOSUCH", *[b"argument"] * 30]),
    b"PING\r\n*1\r\n$4\r\nPING\r\nPING\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\nPING\r\n",
    spell([b"post", b"/"]),
    spell([b"Host:"]),
]


def short(frame: bytes) -> str:
    return repr(frame[:40])


class TestAgainstRedis:
    """The same bytes to redis-server and to ours, answers compared to the byte."""

    @pytest.mark.parametrize("frame", FRAMES, ids=short)
    def test_odd_frames_are_answered_as_redis_answers_them(
        self, server: RunningServer, redis_server: RunningServer, frame: bytes
    ) -> None:
        data = PING + frame + PING
        assert talk(server, data) == talk(redis_server, data)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_damaged_frames(self, server: RunningServer, redis_server: RunningServer, data: st.DataObject) -> None:
        frame = bytearray(spell([b"ECHO", data.draw(st.sampled_from([b"a", b"", b"12345", b"\xff"]))]))
        # Any bytes but the line ends: where Redis takes any two bytes for the end of a bulk, ours wants CRLF.
        position = data.draw(st.sampled_from([i for i, byte in enumerate(frame) if byte not in b"\r\n"]))
        frame[position : position + 1] = data.draw(st.sampled_from([b"", b"-", b"0", b"9", b"$", b"*", b":", b"\xfe"]))
        stream = PING + bytes(frame) + PING
        ours, theirs = talk(server, stream), talk(redis_server, stream)
        if b"is not terminated by CRLF" not in ours:
            assert ours == theirs, stream

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(alphabet="ab\"'\\xn4 \t\v\f\r\x07\xff", max_size=14).map(lambda text: text.encode("latin-1")))
    @example(b"a\vb")
    @example(b'"a"\vb')
    @example(b"\va")
    def test_inline_commands(self, server: RunningServer, redis_server: RunningServer, line: bytes) -> None:
        stream = b"ECHO " + line + b"\n" + PING
        assert talk(server, stream) == talk(redis_server, stream), line
