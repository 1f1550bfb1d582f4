"""Bad weather for a server: ``python storm.py PORT SECONDS`` runs 67 hostile and 67 slow clients, and ends in silence.

Each client does one bad thing after another, on connections of its own; when the server ends one, it opens the next.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from wire import encode_command

HOSTILE = SLOW = 67
PAGE = [b"r", b"0", b"0", b"0", b"0"]  # a large page that the honest ones stored
Deed = Callable[[asyncio.StreamReader, asyncio.StreamWriter, random.Random], Awaitable[None]]


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    beginning = rng.choice([b"", b"*3\r\n$3\r\nSET\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$200000\r\n" + bytes(90_000)])
    writer.write(beginning)
    await asyncio.sleep(rng.random() * 0.2)
    writer.transport.abort()


async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Noise, broken frames, negative and absurd lengths, nested arrays."""
    nonsense = [
        rng.randbytes(2000),
        b"*-5\r\n*1\r\n*1\r\n",
        b"*1\r\n$%d\r\n" % 2**63,
        b"*%d\r\n" % 2**40,
        b'SET "a\r\n',
    ]
    writer.write(rng.choice(nonsense))
    await reader.read()


async def announce_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Announce half a gigabyte, and send a small part."""
    writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % rng.choice([500 * 2**20, 60 * 2**20]) + bytes(3000))
    await asyncio.wait_for(reader.read(), rng.random() * 2)


async def send_many_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """A command of a million words, a few thousand at a time."""
    writer.write(b"*1000000\r\n$4\r\nMSET\r\n")
    for _ in range(20):
        writer.write(b"$2\r\nab\r\n" * 3000)
        await writer.drain()
        await asyncio.sleep(0.1)


async def ask_without_listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """For pages, keys, explanations, by the thousand; no answer is read."""
    asked = [
        encode_command([b"KVPAGEGET", *PAGE]),
        encode_command([b"COMMAND", b"DOCS"]),
        encode_command([b"NOSUCH"]),
        encode_command([b"AUTH", b"x"]),
    ]
    writer.write(rng.choice(asked) * 300)
    await asyncio.sleep(rng.random() * 2)


async def overhear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """All that is said, without reading it."""
    writer.write(rng.choice([encode_command([b"MONITOR"]), encode_command([b"PSUBSCRIBE", b"*"])]))
    await asyncio.sleep(rng.random() * 2)


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    writer.write(encode_command([b"PUBLISH", b"news", bytes(50_000)]) * 20)
    await asyncio.wait_for(reader.read(100), 2)


async def read_little_by_little(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """A large answer, a few bytes at a time."""
    writer.write(encode_command([b"KVPAGEGET", *PAGE]) * 8)
    for _ in range(50):
        await reader.read(1000)
        await asyncio.sleep(0.05)


async def write_little_by_little(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    """A page, in small pieces, and its answer."""
    body = bytes(20_000)
    name = [b"slow%d" % rng.randrange(20), b"0", b"0", b"0", b"0"]
    data = encode_command([b"KVPAGESET", *name, b"8", b"20000", b"1", b"60", body])
    for start in range(0, len(data), 1000):
        writer.write(data[start : start + 1000])
        await asyncio.sleep(0.05)
    assert await reader.readline() == b"+OK\r\n"


async def sit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    writer.write(b"*2\r\n$3\r\nGE")
    await asyncio.sleep(2)


HOSTILE_DEEDS: list[Deed] = [
    *(hang_up, talk_nonsense, announce_much, send_many_words, ask_without_listening, overhear, shout),
]
SLOW_DEEDS: list[Deed] = [read_little_by_little, write_little_by_little, sit]


async def client(port: int, deeds: list[Deed], seed: int, until: float) -> int:
    """Do one thing after another until it is time; how many."""
    rng = random.Random(seed)
    done = 0
    while asyncio.get_running_loop().time() < until:
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
            try:
                await asyncio.wait_for(rng.choice(deeds)(reader, writer, rng), 5)
                done += 1
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.01)
    return done


async def storm(port: int, seconds: float) -> int:
    until = asyncio.get_running_loop().time() + seconds
    everybody = [(HOSTILE_DEEDS, i) for i in range(HOSTILE)] + [(SLOW_DEEDS, HOSTILE + i) for i in range(SLOW)]
    return sum(await asyncio.gather(*(client(port, deeds, seed, until) for deeds, seed in everybody)))


if __name__ == "__main__":
    print(asyncio.run(storm(int(sys.argv[1]), float(sys.argv[2]))))
