"""What a gateway asks of a cluster beside what a client does: values as they are, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpage_server.client import BlockName
from kvpage_server.client.cluster import block_value
from kvpage_server.client.cluster.block_value import OPENING_SIZE, block_key, head_size, ranges_of_page, shape_of
from kvpage_server.client.cluster.calls import ClusterCalls
from kvpage_server.client.cluster.commands import Command, get_opening, get_range, simple
from kvpage_server.client.cluster.plan import GONE, Failed, Plan, timed
from kvpage_server.client.page import amiss, header_of
from kvpage_server.client.wire.deadline import Deadline
from kvpage_server.client.wire.reply import Answer
from kvpage_server.page import HEADER_SIZE, PageHeader, PageKey

Value = tuple[memoryview, ...]  # a string in one piece or two
NO_PAGE: Value = ()  # stands for a string under a page's key that is no page


@dataclass(frozen=True, slots=True)
class Standing:
    """A page's header and time to live."""

    header: PageHeader
    ttl_left_ms: int


@dataclass(frozen=True)
class Plans:
    """Are carried out by the client whose calls these are."""

    calls: ClusterCalls

    @timed
    def ask(self, end: Deadline, commands: Sequence[Command]) -> Plan[list[Answer | Failed]]:
        """The answers to commands for one key each, Failed for reads that nobody answered."""
        return (yield from self.calls.router.ask(commands, end))

    @timed
    def values(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Value | None]]:
        """What lies under pages' keys, as strings or in blocks."""
        names = [*dict.fromkeys((key.req_id, key.page) for key in keys)]
        asked = [*(simple(b"GET", bytes(key)) for key in keys), *map(get_opening, names)]
        answers = yield from self.calls.router.ask(asked, end)
        openings = dict(zip(names, answers[len(keys) :], strict=True))
        found: list[Value | None] = [
            (answer,) if isinstance(answer, memoryview) else None for answer in answers[: len(keys)]
        ]
        self._count_gone(answers[: len(keys)])
        wanted = {i: ranges for i, key in enumerate(keys) if (ranges := _ranges(key, openings[key.req_id, key.page]))}
        parts = [
            get_range(block_key((keys[i].req_id, keys[i].page)), *part) for i, both in wanted.items() for part in both
        ]
        pieces = yield from self.calls.router.ask(parts, end)
        for i, header, body in zip(wanted, pieces[::2], pieces[1::2], strict=True):
            found[i] = None
            if isinstance(header, memoryview) and isinstance(body, memoryview):
                found[i] = header, body
            self._count_gone([header] if isinstance(header, Failed) else [body])
        return found

    @timed
    def of_keys(self, end: Deadline, keys: Sequence[PageKey | bytes]) -> Plan[list[Value | None]]:
        """The values of keys, those of pages as strings or in blocks."""
        pages = [key for key in keys if isinstance(key, PageKey)]
        values = iter((yield from self.values(pages)(end)) if pages else ())
        others = [simple(b"GET", key) for key in keys if not isinstance(key, PageKey)]
        answers = iter((yield from self.calls.router.ask(others, end)) if others else ())
        found: list[Value | None] = []
        for key in keys:
            if isinstance(key, PageKey):
                found.append(next(values))
            else:
                answer = next(answers)
                found.append((answer,) if isinstance(answer, memoryview) else None)
        return found

    @timed
    def pages(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Value | None]]:
        """Pages' bodies; None for those that are not there, or not what was written."""
        values = yield from self.values(keys)(end)
        found: list[Value | None] = []
        for key, value in zip(keys, values, strict=True):
            header = header_of(key, value[0]) if value else None
            if value is None:
                found.append(None)
            elif header is None:
                self.calls.misses["header"] += 1
                found.append(None if len(value) > 1 else NO_PAGE)
            else:
                body = value[1] if len(value) > 1 else value[0][HEADER_SIZE:]
                reason = amiss(header, body, verify=self.calls.verify)
                self.calls.misses.update([reason] if reason else [])
                found.append(None if reason else (body,))
        return found

    @timed
    def blocks(self, end: Deadline, names: Sequence[BlockName]) -> Plan[list[Value | None]]:
        """Blocks' bodies; None for those that are not there, or not what was written."""
        answers = yield from self.calls.router.ask([simple(b"GET", block_key(name)) for name in names], end)
        self._count_gone(answers)
        return [self._body(name, answer) for name, answer in zip(names, answers, strict=True)]

    @timed
    def standing(self, end: Deadline, key: PageKey) -> Plan[Standing | Value | None]:
        """What is known of a page; None when it is not there."""
        name = key.req_id, key.page
        keys = bytes(key), block_key(name)
        asked = [get_opening(name), get_range(keys[0], 0, HEADER_SIZE - 1), *(simple(b"PTTL", one) for one in keys)]
        opening, header, alone, in_block = yield from self.calls.router.ask(asked, end)
        ranges = _ranges(key, opening)
        if ranges:
            [header] = yield from self.calls.router.ask([get_range(keys[1], *ranges[0])], end)
        ttl_left = in_block if ranges else alone
        if not header or isinstance(header, Failed) or isinstance(ttl_left, Failed):
            return None
        known = header_of(key, header)
        return Standing(known, ttl_left) if known else NO_PAGE

    @timed
    def in_block(self, end: Deadline, key: PageKey) -> Plan[bool]:
        """Whether a page lies in a block."""
        [opening] = yield from self.calls.router.ask([get_opening((key.req_id, key.page))], end)
        return _ranges(key, opening) is not None

    def _body(self, name: BlockName, value: Answer | Failed) -> Value | None:
        if not isinstance(value, memoryview):
            return None
        shape = shape_of(value[:OPENING_SIZE])
        before = head_size(shape) if shape else 0
        if shape is None or len(value) != before + shape.nbytes:
            reason: str | None = "header"
        else:
            reason = block_value.amiss(name[1], shape, value[:before], value[before:], verify=self.calls.verify)
        if reason:
            self.calls.misses[reason] += 1
            return None
        return (value[before:],)

    def _count_gone(self, answers: Sequence[Answer | Failed]) -> None:
        self.calls.misses[GONE] += sum(isinstance(answer, Failed) for answer in answers)


def _ranges(key: PageKey, opening: Answer | Failed) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where a page lies in the block that begins so, if it does."""
    shape = shape_of(opening) if isinstance(opening, memoryview) else None
    return ranges_of_page(key, shape) if shape else None
