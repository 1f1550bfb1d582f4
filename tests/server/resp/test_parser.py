"""The parser: every split of the input gives the same commands, and invalid RESP gets Redis' errors."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import pytest
from cores import CORES
from fuzz.invariants import SEEDS, check
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from servers import RunningServer
from wire import encode_command

from kvpage_server.core import Limits, Parser, ProtocolError
from kvpage_server.core.protocol import (
    AHEAD,
    DIRECT,
    KEEP_FROM,
    MAX_LINE,
    MOST_LISTED,
    RECEIVE_TURN,
    SCRATCH_SIZE,
    split_words,
)
from kvpage_server.page import checksum

Words = list[bytes]


@pytest.fixture(scope="module", params=CORES, ids=lambda core: core.__name__.rpartition(".")[2])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def inline(words: Sequence[bytes]) -> bytes:
    """An inline command with every byte escaped."""
    return b" ".join(b'"' + b"".join(b"\\x%02x" % byte for byte in word) + b'"' for word in words) + b"\r\n"


def plain(command: Iterable) -> Words:
    return [bytes(word if isinstance(word, bytes) else word.body) for word in command]


def commands_of(parser: Parser) -> Iterator[Words]:
    while (command := parser.next()) is not None:
        yield plain(command)


def parse(core: ModuleType, pieces: Iterable[bytes], limits: Limits | None = None) -> tuple[list[Words], str]:
    """Return the commands of input that arrives in pieces, and the final error."""
    arena = core.Arena()
    parser = core.Parser(arena, limits=limits)
    commands: list[Words] = []
    try:
        for piece in pieces:
            parser.feed(piece)
            commands += commands_of(parser)
    except ProtocolError as error:
        return commands, str(error)
    finally:
        del parser
        assert arena.used == 0
    return commands, ""


def send_all(sock: socket.socket, *parts: bytes) -> None:
    for part in parts:
        sock.sendall(part)


def cut(data: bytes, positions: Iterable[int]) -> list[bytes]:
    """`data` in pieces that end at the positions."""
    edges = sorted({position % (len(data) + 1) for position in positions} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


# Lengths around the parser's own limits: short words, slots, direct receipt, the scratch memory.
LENGTHS = [0, 1, 9, 255, 510, 511, 512, 513, 1000, 4095, 4096, 8192, 65536, 70000, DIRECT, DIRECT + 1, SCRATCH_SIZE + 1]
short_words = st.binary(max_size=12) | st.sampled_from([b"", b"\r\n", b"\r", b"\n", b"$3\r\n", b"*1\r\n", b"\0", b"7"])
long_words = st.builds(
    lambda size, seed: random.Random(seed).randbytes(size), st.sampled_from(LENGTHS), st.integers(0, 9)
)
commands = st.lists(short_words, min_size=1, max_size=14) | st.lists(short_words | long_words, min_size=1, max_size=4)
# An inline command: no word may be a multibulk's start, and there is at least one.
inline_commands = st.lists(st.binary(max_size=9), min_size=1, max_size=5)
streams = st.lists(
    st.tuples(commands, st.just(encode_command)) | st.tuples(inline_commands, st.just(inline)), max_size=6
)
positions = st.lists(st.integers(0, 2**20), max_size=12)
steps = positions | st.sampled_from([997, 9001, 50_000]).map(lambda step: range(0, 2**22, step))  # as a socket gives it
slow = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def batches(draw: st.DrawFn) -> Words:
    """Words of a few sizes, from none to 300 KB, in a pattern that repeats, with some that break it."""
    sizes = st.sampled_from([0, 3, 60, 511, 512, 4096, 10_000, 100_000]) | st.integers(0, 300_000)
    pattern = draw(st.lists(sizes, min_size=1, max_size=11))
    count = min(draw(st.integers(1, 120)), 2_000_000 // (sum(pattern) + 1) + 1)
    lengths = pattern * count + draw(st.lists(sizes, max_size=3))
    for _ in range(draw(st.integers(0, 2))):
        lengths[draw(st.integers(0, len(lengths) - 1))] = draw(sizes)
    return [b"BATCH", *(b"%c" % (65 + at % 26) * length for at, length in enumerate(lengths))]


class TestSplits:
    @given(streams, positions)
    def test_any_split_gives_the_commands_that_were_sent(
        self, core: ModuleType, stream: list, positions: list[int]
    ) -> None:
        data = b"".join(write(words) for words, write in stream)
        assert parse(core, cut(data, positions)) == ([words for words, _ in stream], "")

    @given(st.lists(batches(), min_size=1, max_size=2), steps)
    @example([[b"BATCH", *[b"m" * 150, b"b" * 10_000] * 40, b"m" * 150]], range(0, 2**20, 65536))
    @slow
    def test_any_split_gives_the_batches_that_were_sent(
        self, core: ModuleType, sent: list[Words], positions: Sequence[int]
    ) -> None:
        data = b"".join(map(encode_command, [*sent, [b"PING"]]))
        assert parse(core, cut(data, positions)) == ([*sent, [b"PING"]], "")

    @given(batches(), steps, st.integers(0, 2**22), st.sampled_from([b"", b"x", b"\r\n", b"$5\r\n", b"\xff" * 9]))
    @slow
    def test_a_damaged_batch_gives_the_same_for_every_split(
        self, core: ModuleType, words: Words, positions: Sequence[int], at: int, noise: bytes
    ) -> None:
        data = bytearray(encode_command(words) + encode_command([b"PING"]))
        at %= len(data)
        data[at : at + 1] = noise
        assert parse(core, cut(bytes(data), positions)) == parse(core, [bytes(data)])

    @given(st.lists(st.lists(short_words, min_size=1, max_size=9), max_size=5))
    def test_a_byte_at_a_time(self, core: ModuleType, stream: list[Words]) -> None:
        data = b"".join(map(encode_command, stream))
        assert parse(core, cut(data, range(len(data)))) == (stream, "")

    def test_every_single_cut_of_a_page_write(self, core: ModuleType) -> None:
        body = random.Random(4).randbytes(5000)
        words = [b"KVPAGESET", b"req", b"5", b"8", b"42", b"0", b"1", b"128", b"64", b"3600", body]
        data = encode_command(words) + encode_command([b"PING"])
        for position in range(1, len(data)):
            assert parse(core, [data[:position], data[position:]]) == ([words, [b"PING"]], ""), position

    @given(st.data())
    def test_damaged_input_gives_the_same_for_every_split(self, core: ModuleType, data: st.DataObject) -> None:
        """The commands before the damage are the same; then the same error, or none."""
        good = b"".join(
            map(encode_command, data.draw(st.lists(st.lists(short_words, min_size=1, max_size=9), min_size=1)))
        )
        damaged = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(damaged) - 1))
            damaged[position : position + 1] = data.draw(
                st.sampled_from([b"", b"\r\n", b"*", b"$", b"-", b"9", b"\n", b'"', b"\xff", b"\0", b"00"])
            )
        stream = bytes(damaged)
        assert parse(core, cut(stream, data.draw(positions))) == parse(core, [stream])

    @given(st.binary(max_size=300), positions)
    def test_noise_gives_the_same_for_every_split(self, core: ModuleType, noise: bytes, positions: list[int]) -> None:
        for stream in (noise, b"*2\r\n$4\r\n" + noise, b"*3\r\n$1\r\na\r\n$2000\r\n" + noise):
            assert parse(core, cut(stream, positions)) == parse(core, [stream])

    @given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 5200), st.binary(max_size=9)), max_size=5))
    def test_the_invariants_of_the_fuzzer_hold(self, seed: bytes, damages: list[tuple[int, bytes]]) -> None:
        data = bytearray(seed)
        for position, noise in damages:
            data[position : position + len(noise)] = noise
        check(bytes(data))

    def test_commands_wait_until_they_are_read(self, core: ModuleType) -> None:
        """Received commands are kept until they are read."""
        sent = [[b"SET", b"key:%d" % i, bytes(i * 37 % 5000)] for i in range(300)]
        parser = core.Parser(core.Arena())
        for piece in cut(b"".join(map(encode_command, sent)), range(0, 10**6, 1000)):
            parser.feed(piece)
        assert [*commands_of(parser)] == sent


class TestReceiving:
    """From a socket, and into memory that several connections share."""

    @given(st.lists(batches(), min_size=1, max_size=4), st.randoms(use_true_random=False))
    @slow
    def test_connections_with_shared_scratch_get_their_own_bytes(
        self, core: ModuleType, sent: list[Words], order: random.Random
    ) -> None:
        arena, scratch = core.Arena(), core.Scratch()
        parsers = [core.Parser(arena, scratch) for _ in sent]
        pairs = [socket.socketpair() for _ in sent]
        left = [memoryview(encode_command([b"PING"]) + encode_command(words)) for words in sent]
        got: list[list[Words]] = [[] for _ in sent]
        try:
            for one, other in pairs:
                one.setblocking(False)
                other.setblocking(False)
            while any(len(commands) < 2 for commands in got):
                i = order.randrange(len(sent))
                if left[i]:
                    try:
                        count = pairs[i][0].send(left[i][: order.choice([1, 700, 200_000])])
                    except BlockingIOError:
                        count = 0
                    left[i] = left[i][count:]
                if parsers[i].receive(pairs[i][1].fileno()) > 0 and order.random() < 0.7:
                    command = parsers[i].next()  # a part, because others receive before the rest is read
                    got[i] += [] if command is None else [plain(command)]
                for parser, commands in zip(parsers, got, strict=True):
                    if parser is parsers[i]:
                        commands += commands_of(parser)
            assert got == [[[b"PING"], words] for words in sent]
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def test_no_data_is_distinguished_from_the_end_of_the_stream(self, core: ModuleType) -> None:
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            parser = core.Parser(core.Arena())
            assert parser.receive(other.fileno()) == -1
            one.sendall(b"PING\r\n")
            assert parser.receive(other.fileno()) == 6
            assert parser.next() == [b"PING"]
            one.close()
            assert parser.receive(other.fileno()) == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            parser.receive(other.fileno() if other.fileno() >= 0 else 9999)

    def test_an_available_command_is_received_in_one_call(self, core: ModuleType) -> None:
        parser = core.Parser(core.Arena())
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            for size in (100, DIRECT + AHEAD, SCRATCH_SIZE + DIRECT, 1, SCRATCH_SIZE + DIRECT):
                words = [b"PAGE", b"key", bytes(size)]
                one.sendall(encode_command(words))
                assert parser.receive(other.fileno()) == len(encode_command(words))
                assert plain(parser.next()) == words
                assert parser.next() is None

    def test_little_is_received_with_the_end_of_a_long_word(self, core: ModuleType) -> None:
        """The next word may be as long: bytes that arrived with the end of this one would have to be copied."""
        parser = core.Parser(core.Arena())
        data = encode_command([b"PAGE", b"key", bytes(2 * DIRECT)])
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            rest = DIRECT // 2
            one.sendall(data[:-rest])
            assert parser.receive(other.fileno()) == len(data) - rest
            assert parser.is_partial
            one.sendall(data[-rest:] + data)
            assert parser.receive(other.fileno()) == rest + AHEAD
            assert not parser.is_partial
            assert plain(parser.next())[2] == bytes(2 * DIRECT)
            assert parser.next() is None
            assert parser.receive(other.fileno()) == len(data) - AHEAD
            assert plain(parser.next())[2] == bytes(2 * DIRECT)

    def test_a_call_receives_no_more_than_others_may_wait_for(self, core: ModuleType) -> None:
        parser = core.Parser(core.Arena())
        data = encode_command([b"PAGE", b"key", bytes(8 * RECEIVE_TURN)])
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            sender = threading.Thread(target=send_all, args=(one, data))
            sender.start()
            counts: list[int] = []
            while parser.next() is None:
                counts.append(max(parser.receive(other.fileno()), 0))
            sender.join()
        assert sum(counts) == len(data)
        assert max(counts) < 2 * RECEIVE_TURN

    def test_an_error_is_raised_when_its_command_is_read(self, core: ModuleType) -> None:
        """The bytes before the error were received, and are counted."""
        parser = core.Parser(core.Arena())
        sent = b"PING\r\n*2\r\n$4\r\nECHO\r\n#oops\r\n"
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            one.sendall(sent[:13])
            assert parser.receive(other.fileno()) == 13
            assert parser.next() == [b"PING"]
            assert parser.next() is None
            assert parser.is_partial
            one.sendall(sent[13:])
            assert parser.receive(other.fileno()) == len(sent) - 13
            assert not parser.is_partial
            with pytest.raises(ProtocolError, match="expected '\\$', got '#'"):
                parser.next()

    def test_a_deleted_parser_releases_the_scratch_memory(self, core: ModuleType) -> None:
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            arena, scratch = core.Arena(), core.Scratch()
            for _ in range(3):
                one.sendall(encode_command([b"PING"]) + b"*2\r\n$4\r\nEC")
                parser = core.Parser(arena, scratch)
                assert parser.receive(other.fileno()) > 0
                assert parser.next() == [b"PING"]
                del parser

    @pytest.mark.parametrize("size", [KEEP_FROM, 1024, 5000, DIRECT, 700_000])
    def test_a_body_is_in_place_with_its_digest_for_any_split(self, core: ModuleType, size: int) -> None:
        body = random.Random(size).randbytes(size)
        for name in (b"PAGE", b"OTHER"):
            data = encode_command([name, b"key", body])
            for at in (5, 30, 40, len(data) // 2, len(data) - 2):
                one, other = socket.socketpair()
                with one, other:
                    other.setblocking(False)
                    parser = core.Parser(core.Arena(), hashed=frozenset([b"PAGE"]))
                    sender = threading.Thread(target=send_all, args=(one, data[:at], data[at:]))
                    sender.start()
                    while (command := parser.next()) is None:
                        if parser.receive(other.fileno()) < 0:
                            time.sleep(0.0001)
                    sender.join()
                assert type(command[2]) is core.Slot
                assert bytes(command[2].body) == body
                assert bytes(command[2].view) == b"$%d\r\n%b\r\n" % (size, body)
                assert command[2].digest == (checksum(body) if name == b"PAGE" else 0)


class TestWords:
    def test_a_long_command_is_a_sequence_of_which_a_part_is_a_view(self, core: ModuleType) -> None:
        sent = [b"%d" % i * (i % 7) if i % 50 else bytes(600) for i in range(1000)]
        parser = core.Parser(core.Arena())
        parser.feed(encode_command(sent))
        words = parser.next()
        assert type(words) is core.Words
        assert (len(words), bytes(words[0].body), words[1], words[-1]) == (1000, sent[0], sent[1], sent[-1])
        part = words[100:900][50:]
        assert type(part) is core.Words
        assert plain(part) == sent[150:900] == plain([*part])
        assert plain(words[1::10]) == sent[1::10]
        assert plain(words[:3] + words[5:7]) == sent[:3] + sent[5:7]
        assert plain([b"x"] + words[5:7]) == [b"x", *sent[5:7]]  # noqa: RUF005
        assert words[1:4] == sent[1:4]
        assert words[1:4] != sent[1:5]
        assert plain(words[900:2000]) == sent[900:]
        assert not words[5:5]
        for beyond in (1000, -1001):
            with pytest.raises(IndexError):
                words[beyond]

    def test_as_many_as_are_listed_are_a_list(self, core: ModuleType) -> None:
        for count, kind in ((MOST_LISTED, list), (MOST_LISTED + 1, core.Words)):
            for data in (encode_command([b"w"] * count), b"w " * count + b"\n"):
                parser = core.Parser(core.Arena())
                parser.feed(data)
                command = parser.next()
                assert type(command) is kind
                assert command == [b"w"] * count

    def test_the_last_words_can_be_freed_some_at_a_time(self, core: ModuleType) -> None:
        arena = core.Arena()
        parser = core.Parser(arena)
        parser.feed(encode_command([bytes(600) if i % 2 else b"w" * 500 for i in range(9000)]))
        words = parser.next()
        used = arena.used
        while words:
            del words[-1000:]
            assert arena.used < used
            used = arena.used
        assert arena.used == 0
        parser.feed(encode_command([b"w"] * 100))
        with pytest.raises(TypeError):
            del parser.next()[:5]


class TestMemory:
    def test_an_upload_that_is_cut_short_leaks_nothing(self, core: ModuleType) -> None:
        arena = core.Arena()
        for size in (5000, 100_000, 5_000_000):
            for missing in (1, 2, 3, 1000, size + 2):
                parser = core.Parser(arena)
                parser.feed(encode_command([b"SET", b"key", bytes(size)])[:-missing])
                assert parser.next() is None
                assert arena.used == parser.receiving > size
                if missing == 3:
                    parser.give_up()
                    assert (arena.used, parser.receiving, parser.held) == (0, 0, 0)
                del parser
                assert arena.used == 0

    def test_incomplete_commands_are_counted(self, core: ModuleType) -> None:
        parser = core.Parser(core.Arena())
        assert (parser.held, parser.is_idle) == (0, True)
        parser.feed(b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$1")
        assert parser.next() is None
        assert 8 <= parser.held <= 200
        assert not parser.is_idle
        parser.feed(b"00000\r\n" + bytes(50_000))
        assert parser.next() is None
        assert 100_000 <= parser.held <= 100_200  # its memory is taken already
        assert parser.receiving >= 100_000
        parser.feed(bytes(50_000) + b"\r\n")
        assert parser.next() is not None
        assert (parser.held, parser.is_idle, parser.receiving) == (0, True, 0)
        assert parser.received >= 100_000

    def test_a_million_empty_words_cost_their_count(self, core: ModuleType) -> None:
        parser = core.Parser(core.Arena())
        parser.feed(b"*1000001\r\n")
        for _ in range(20):
            parser.feed(b"$0\r\n\r\n" * 50_000)
            assert parser.next() is None
        assert 8_000_000 <= parser.held <= 64_000_000
        parser.feed(b"$1\r\nx\r\n")
        words = parser.next()
        assert (len(words), words[0], words[-1]) == (1_000_001, b"", b"x")

    def test_memory_that_cannot_be_had_is_an_error_and_leaks_nothing(self, core: ModuleType) -> None:
        arena = core.Arena()
        limits = Limits(max_bulk=2**60, max_command=2**61)
        parser = core.Parser(arena, limits=limits)
        parser.feed(b"*4\r\n$3\r\nSET\r\n$600\r\n" + bytes(600) + b"\r\n$%d\r\n" % 2**58)
        with pytest.raises(MemoryError):
            parser.next()
        parser.give_up()
        assert arena.used == 0

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize("piece", [1, 512])
    @pytest.mark.parametrize("unit", [b"$2\r\nab\r\n", b"$511\r\n" + bytes(511) + b"\r\n"])
    def test_the_work_grows_with_the_input_not_with_its_square(self, core: ModuleType, unit: bytes, piece: int) -> None:
        """A command of many words that arrives in small pieces; ten times as many take about ten times as long."""
        few = 500 * piece // len(unit) + 10

        def seconds(count: int) -> float:
            pieces = cut(b"*%d\r\n" % count + unit * count, range(0, len(unit) * count, piece))
            best = 1e9
            for _ in range(3):
                parser, start = core.Parser(core.Arena()), time.process_time()
                for data in pieces:
                    parser.feed(data)
                    parser.next()
                best = min(best, time.process_time() - start)
            return best

        assert seconds(10 * few) < 40 * seconds(few)

    @pytest.mark.parametrize("start", [b"", b"*", b"*1\r\n$"])
    def test_a_line_received_byte_by_byte_is_scanned_once(self, core: ModuleType, start: bytes) -> None:
        parser, began = core.Parser(core.Arena()), time.process_time()
        for byte in cut(start + b"1" * (MAX_LINE - 10), range(MAX_LINE)):
            parser.feed(byte)
            assert parser.next() is None
        assert time.process_time() - began < 2


class TestLimits:
    def refused(self, core: ModuleType, data: bytes, limits: Limits | None = None, *, step: int = 2**30) -> str:
        """Return the final error of `data` that arrives in pieces of `step` bytes."""
        return parse(core, cut(data, range(0, len(data), step)), limits)[1]

    def test_words_longer_than_the_limit(self, core: ModuleType) -> None:
        limits = Limits(max_bulk=1000)
        assert parse(core, [encode_command([bytes(1000)])], limits) == ([[bytes(1000)]], "")
        assert self.refused(core, b"*1\r\n$1001\r\n", limits) == "invalid bulk length"

    def test_words_beyond_the_limit(self, core: ModuleType) -> None:
        limits = Limits(max_arguments=5)
        assert parse(core, [encode_command([b"a"] * 5)], limits) == ([[b"a"] * 5], "")
        assert self.refused(core, encode_command([b"a"] * 6), limits) == "invalid multibulk length"

    def test_commands_longer_than_the_limit(self, core: ModuleType) -> None:
        limits = Limits(max_command=100_000)
        assert self.refused(core, encode_command([bytes(40_000)] * 2), limits) == ""
        assert (
            self.refused(core, encode_command([bytes(40_000)] * 3), limits)
            == "command exceeds client-query-buffer-limit"
        )

    @pytest.mark.parametrize("size", [1, 500, 1023])
    def test_many_short_words_count_as_well(self, core: ModuleType, size: int) -> None:
        limits = Limits(max_command=100_000)
        words = [bytes(size)] * (200_000 // size)
        assert self.refused(core, encode_command(words), limits) == "command exceeds client-query-buffer-limit"

    def test_a_stranger_sends_ten_words_of_16_kib_at_the_most(self, core: ModuleType) -> None:
        def error_of(data: bytes, trusted: bool) -> str:
            parser = core.Parser(core.Arena())
            parser.trust(trusted)
            parser.feed(data)
            try:
                while parser.next() is not None:
                    pass
            except ProtocolError as error:
                return str(error)
            return ""

        for data, error in (
            (encode_command([bytes(16384)] * 10), ""),
            (encode_command([b"a"] * 11), "unauthenticated multibulk length"),
            (b"*2\r\n$16385\r\n", "unauthenticated bulk length"),
        ):
            assert error_of(data, False) == error
            assert error_of(data, True) == ""

    @pytest.mark.parametrize(
        ("start", "error"),
        [
            (b"", "too big inline request"),
            (b"*", "too big mbulk count string"),
            (b"*1\r\n$", "too big bulk count string"),
        ],
    )
    def test_too_long_a_line_is_refused_with_and_without_its_end(
        self, core: ModuleType, start: bytes, error: str
    ) -> None:
        line = start + b"1" * (MAX_LINE + 2)
        for data in (line, line + b"\r\n"):
            assert self.refused(core, data) == error
            assert self.refused(core, data, step=1000) == error

    @pytest.mark.parametrize(
        ("number", "received"),
        [
            (b"-1", ""),
            (b"-9223372036854775808", ""),
            *((number, "invalid multibulk length") for number in (b"-9223372036854775809", b"9223372036854775807")),
            *((number, "invalid multibulk length") for number in (b"9223372036854775808", b"1" * 30, b"-0", b"+1")),
            *(
                (number, "invalid multibulk length")
                for number in (b"", b"-", b"01", b" 1", b"1 ", b"1\n", "²".encode())
            ),
        ],
    )
    def test_counts_are_parsed_as_redis_does(self, core: ModuleType, number: bytes, received: str) -> None:
        assert self.refused(core, b"*" + number + b"\r\n") == received
        if received:
            assert self.refused(core, b"*1\r\n$" + number + b"\r\n") == "invalid bulk length"

    def test_a_word_without_its_end_is_refused_wherever_it_is_taken(self, core: ModuleType) -> None:
        for size in (0, 5, 500, 1000, 2000, 5000, 100_000):
            for words in (1, 100):
                data = b"*%d\r\n$%d\r\n%b" % (words, size, bytes(size)) + b"xx" + bytes(100)
                for step in (1, 2**30) if size < 5000 else (9999, 2**30):
                    assert self.refused(core, data, step=step) == "bulk string is not terminated by CRLF"


class TestInline:
    @given(st.lists(st.binary(), max_size=6))
    def test_escaped_words_are_restored(self, words: Words) -> None:
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
    with server.connect() as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass  # refused during the write: the error can still be read
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


PING = encode_command([b"PING"])
FRAMES = [
    b"*0\r\n",
    b"*-1\r\n",
    b"*-10\r\n",
    b"*-99999999999999999999999\r\n",
    b"*-9223372036854775809\r\n",
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
    encode_command([b""]),
    encode_command([b"", b""]),
    encode_command([b"\0"]),
    encode_command([b"PING\0"]),
    encode_command([b"ECHO", b"\0\r\n\xff"]),
    encode_command([b"ECHO", b""]),
    encode_command([b"SET", b"\0\r\n\xff", b"binary\0value"]) + encode_command([b"GET", b"\0\r\n\xff"]),
    encode_command([b"NOSUCH\r\n", b"a\r\nb", b"\xff\0"]),
    encode_command([b"no such"]),
    encode_command([b"x" * 300, b"y" * 300, b"z"]),
    encode_command([b"NOSUCH", *[b"argument"] * 30]),
    b"PING\r\n*1\r\n$4\r\nPING\r\nPING\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\nPING\r\n",
    encode_command([b"post", b"/"]),
    encode_command([b"Host:"]),
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

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_damaged_frames(self, server: RunningServer, redis_server: RunningServer, data: st.DataObject) -> None:
        frame = bytearray(encode_command([b"ECHO", data.draw(st.sampled_from([b"a", b"", b"12345", b"\xff"]))]))
        # Any bytes but the line ends: where Redis takes any two bytes for the end of a bulk, ours wants CRLF.
        position = data.draw(st.sampled_from([i for i, byte in enumerate(frame) if byte not in b"\r\n"]))
        frame[position : position + 1] = data.draw(st.sampled_from([b"", b"-", b"0", b"9", b"$", b"*", b":", b"\xfe"]))
        stream = PING + bytes(frame) + PING
        ours, theirs = talk(server, stream), talk(redis_server, stream)
        if b"is not terminated by CRLF" not in ours:
            assert ours == theirs, stream

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(alphabet="ab\"'\\xn4 \t\v\f\r\x07\xff", max_size=14).map(lambda text: text.encode("latin-1")))
    @example(b"a\vb")
    @example(b'"a"\vb')
    @example(b"\va")
    def test_inline_commands(self, server: RunningServer, redis_server: RunningServer, line: bytes) -> None:
        stream = b"ECHO " + line + b"\n" + PING
        assert talk(server, stream) == talk(redis_server, stream), line


def test_empty_lines_are_ignored_in_any_number_and_split(core: ModuleType) -> None:
    blanks = b"\r\n" * 1000 + b" \t\0\r\n\n" * 1000 + b" " * MAX_LINE + b"\n"
    stream = blanks + b"PING\r\n" + blanks + encode_command([b"ECHO", b"x"]) + blanks
    whole = [b"PING"], [b"ECHO", b"x"]
    for size in (len(stream), 4096, 1000, 7):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert parse(core, pieces) == ([*whole], ""), size
    assert parse(core, [b"\n" + b" " * (MAX_LINE + 1) + b"\n"])[1] == "too big inline request"
