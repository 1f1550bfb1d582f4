"""Comparison of a prompt with an earlier one of the same client: the first difference, and its cost; and the lines of
the system's text that change in every prompt (volatile lines), which are moved or dropped by option.

A request can name an earlier reply (Anthropic's `diagnostics.previous_message_id`). The answer then says why less of
its prompt was found in the cache than expected. The prompts of the latest replies are kept in memory for this, without
their text: token ids, and a digest of each part and of each line of the system's text.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import ge
from typing import Any, Literal, NamedTuple

from pydantic_core import to_json

from ..agent_engine import Answer
from ..tiers.server.lookup import REMOVED
from .openai.schema import ChatBody, Message

MAX_BYTES = 32 << 20  # of all kept prompts; a prompt of 4,000 tokens has 16 KB
_PART_BYTES = 200  # estimated bytes of a kept prompt without its tokens, and of each of its digests
FEW_TOKENS = 16  # a loss of so many tokens is not reported: see `tiers.server.tails.least_tail`
MOST_LIFETIMES = 16  # of a prompt: those of the most tokens
FEW_LINES = 3  # the most lines of a system's text that may be volatile
NOT_KEPT, NOT_READ, NOT_ANSWERED = "not kept", "not read", "not answered yet"
_GONE = (None, "absent", "gap", *REMOVED)  # reasons of a load that found less than was kept once: see docs/engine.md

VolatileLines = Literal["keep", "move", "drop"]


@dataclass(slots=True)
class AskedPrompt:
    """The prompt of a reply: the tenant, the client, the tokens, and digests of its parts."""

    tenant: str
    client: str  # the agent's id; without a name, a digest of the bearer token and the first text of a user
    model: str
    tools: bytes
    options: bytes  # digest of the variables of the chat template
    messages: tuple[bytes, ...]
    system: int  # the number of messages of the system at the beginning
    lines: tuple[bytes, ...]  # of the first message, if it is the system's
    tokens: array[int] = field(default_factory=lambda: array("I"))
    answer: array[int] = field(default_factory=lambda: array("I"))  # empty until it is complete
    volatile: frozenset[int] = frozenset()  # indexes of `lines` that differ from one prompt of the client to the next
    moved: bool = False  # whether its last message has these lines
    states: tuple[int, ...] | None = None  # the positions at which prompts can continue it; None for all
    asked: float = field(default_factory=time.monotonic)
    answered: float = inf  # the time.monotonic() at which its answer was complete
    kept: int | None = None  # the number of its first tokens that may be kept; None for all
    unread: str | None = None  # the reason why kept tokens of earlier prompts were not read
    requested_lifetimes: Sequence[tuple[int, int]] = ()  # its lifetimes: pairs of first tokens and seconds
    # The lifetimes of its tokens. Prompts that continue it have the same list, and renew them for all.
    lifetimes: list[KeptTokens] = field(default_factory=list)
    found: Sequence[KeptTokens] = ()  # those of earlier prompts, when it was answered
    # earlier prompts of which the page server does not have a block any more: why, as KVPAGEWHY, and the unix
    # milliseconds of its removal, 0 if they are unknown
    removed: list[tuple[AskedPrompt, str, int]] = field(default_factory=list)
    deleted: Stay | None = None  # when a client has deleted tokens of it, and the part that stayed
    restored: Stay | None = None  # when deleted tokens were stored again, and the part that was there then
    withdrawn: bool = False  # whether the client has deleted its reply, which is unknown then

    @classmethod
    def of(cls, tenant: str, agent_id: str | None, credential: str, body: ChatBody) -> AskedPrompt:
        """Return the prompt of a conversation, without its tokens. `agent_id` is the client's name for the agent.
        Clients with different credentials are different clients, which must not learn of each other's prompts.
        """
        messages = tuple(_digest(message.model_dump()) for message in body.messages)
        system = next((i for i, one in enumerate(body.messages) if not _is_system(one)), len(messages))
        first = next((one.content for one in body.messages if one.role == "user"), None)
        client = client_of(agent_id) if agent_id is not None else _digest([credential, first]).hex()
        lines = tuple(map(_digest, _lines(body)))
        tools, options = _digest([tool.model_dump() for tool in body.tools]), _digest(body.variables)
        return cls(tenant, client, body.model, tools, options, messages, system, lines)

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return 4 * (len(self.tokens) + len(self.answer)) + (1 + len(self.messages) + len(self.lines)) * _PART_BYTES

    def find_volatile(self, before: AskedPrompt) -> None:
        """Find the volatile lines, by comparison with the client's last prompt: the conversation goes on, and a few
        lines of the system's text differ, but not all.
        """
        if not self._goes_on(before) or len(self.lines) != len(before.lines) or self._has_another_system(before):
            return
        differ = {i for i, (one, other) in enumerate(zip(self.lines, before.lines, strict=True)) if one != other}
        if len(found := before.volatile | differ) <= FEW_LINES and len(found) < len(self.lines):
            self.volatile = found

    def _goes_on(self, before: AskedPrompt) -> bool:
        """Return whether it has all messages of `before`, apart from the system's, and the same model, tools and
        options.
        """
        same = (self.model, self.tools, self.options) == (before.model, before.tools, before.options)
        known = before.messages[before.system :]
        return same and self.messages[self.system :][: len(known)] == known

    def _has_another_system(self, before: AskedPrompt) -> bool:
        """Return whether no line of the system's text is the same, except empty ones."""
        return bool(self.lines and before.lines) and {*self.lines} & {*before.lines} <= {_digest("")}

    def why(self, before: AskedPrompt, reused: int) -> str | None:
        """Return why only `reused` tokens were reused, and not all of `before`, the client's last prompt, and its
        answer. None if all were reused, or if another part of the request has changed.
        """
        lost = self.lost(before, reused)
        if lost.why:
            return lost.why
        differ = [i for i in sorted(self.volatile) if self.lines[i] != before.lines[i]]
        if differ and reused < len(before.tokens) - FEW_TOKENS:
            return f"volatile line {differ[0] + 1} of system"
        if self._has_another_system(before) and self._goes_on(before) and reused < len(before.tokens) - FEW_TOKENS:
            return "system replaced"
        same = common_prefix(before.tokens + before.answer, self.tokens)
        known = min(len(before.tokens) + len(before.answer), len(self.tokens))
        if same < known and not _difference(before, self):
            if before.moved:
                return f"volatile line {min(before.volatile) + 1} of system was moved"
            return f"history rewritten from token {same}"
        return None

    def lost(self, before: AskedPrompt, reused: int) -> Lost:
        """Return the tokens at the beginning of both prompts that were not found."""
        same = common_prefix(before.tokens, self.tokens) if self.model == before.model else 0
        same = min(same, len(self.tokens) - 1)
        if same - reused <= FEW_TOKENS:
            return Lost(0, None)
        if self.unread:
            return Lost(0, self.unread)
        if before.answered > self.asked:
            return Lost(0, NOT_ANSWERED)
        if before.kept is not None:
            same = min(same, before.kept)
            if same - reused <= FEW_TOKENS:
                return Lost(0, NOT_KEPT)
        if before.states is not None:
            same = max((position for position in before.states if position <= same), default=0)
            if same - reused <= FEW_TOKENS:
                return Lost(0, None)
        lifetimes = self.found if before.lifetimes is self.lifetimes else before.lifetimes
        end = max((one.until for one in lifetimes if one.tokens > reused), default=inf)
        deleted = same - before.left(self.asked) > FEW_TOKENS
        reason = "deleted" if deleted else "expired" if end < time.time() else "evicted"
        known = next(((why, at) for one, why, at in self.removed if one is before), None)
        if reason == "expired" and known:  # another engine may have renewed the lifetime
            reason = "deleted" if known[0] == "deleted" else "expired" if known[1] > 1000 * end else "evicted"
        return Lost(same - reused, reason)

    def left(self, when: float) -> float:
        """Return how many of its first tokens clients had not deleted at the time.monotonic() `when`; inf for all."""
        last = self.restored if self.restored and self.restored.since < when else self.deleted
        return last.tokens if last else inf

    def delete(self, left: int) -> None:
        """Note that a client has deleted its tokens except the first `left`."""
        now = time.monotonic()
        self.deleted, self.restored = Stay(now, min(left, self.left(now))), None

    def restore(self, context: array[int], when: float) -> None:
        """Note that `context` was stored at the time.monotonic() `when`."""
        if self.deleted and (same := common_prefix(self.tokens, context)) > self.left(when):
            self.restored = Stay(when, same)

    @property
    def may_have_expired(self) -> bool:
        """Whether a lifetime of its tokens has ended, unless another engine has renewed it."""
        return any(one.until < time.time() for one in self.lifetimes)

    def begin_lifetimes(self, before: AskedPrompt | None, answer: Answer) -> None:
        """Note its lifetimes, and begin those of the client's prompt `before` anew, as far as it has reused them."""
        now = time.time()
        if before and before.model == self.model:
            self.found = tuple(before.lifetimes)
            running = [one for one in before.lifetimes if one.until > now]
            _begin(before.lifetimes, [one.anew(now, answer.reuse.tokens) for one in running])
            same = common_prefix(before.tokens, self.tokens)
            continues = same == len(before.tokens)
            self.lifetimes = before.lifetimes if continues else [one.shortened(same) for one in before.lifetimes]
        if kept := answer.kept:
            requested = (KeptTokens(tokens, kept.until / 1000, seconds) for tokens, seconds in self.requested_lifetimes)
            _begin(self.lifetimes, [one.shortened(kept.tokens).anew(now) for one in requested])


class Stay(NamedTuple):
    """The part of a prompt that clients have not deleted."""

    since: float  # time.monotonic()
    tokens: float  # its first tokens; inf for all


class KeptTokens(NamedTuple):
    """A lifetime of the first tokens of a prompt."""

    tokens: int
    until: float  # unix seconds
    seconds: int

    def shortened(self, tokens: int) -> KeptTokens:
        """Return it for `tokens` tokens at most."""
        return self._replace(tokens=min(self.tokens, tokens))

    def anew(self, now: float, reused: int | None = None) -> KeptTokens:
        """Return it with an end that is not before that of its length from `now` on, for the `reused` tokens."""
        begun = self._replace(until=max(self.until, now + self.seconds))
        return begun if reused is None else begun.shortened(reused)


def _begin(lifetimes: list[KeptTokens], new: Sequence[KeptTokens]) -> None:
    """Add lifetimes, and remove each that another one exceeds in all fields."""
    found = [one for one in {*lifetimes, *new} if one.tokens]
    left = [one for one in found if not any(other != one and all(map(ge, other, one)) for other in found)]
    lifetimes[:] = sorted(left)[-MOST_LIFETIMES:]


class Lost(NamedTuple):
    """Tokens that two prompts have in common at their beginning, and that were not found."""

    evicted: int  # those of them that are not in the cache any more
    # "deleted", "expired", "evicted", or the reason why they were not kept or not read; None if all were found, or if
    # unknown
    why: str | None


class Diagnosis(NamedTuple):
    """Why less than an earlier prompt was reused."""

    part: str | None  # "model", "tools", "system", "messages", "options": the first that differs; None if none does
    message: int | None  # index of the first message that differs
    reusable: int  # tokens of the earlier prompt that both have in common at their beginning
    missed: int  # the other tokens of the earlier prompt if a part differs, otherwise 0
    lost: Lost  # of the reusable tokens; if a part differs, this is not known
    seconds: float  # for the computation of missed and evicted tokens

    @property
    def own_fields(self) -> dict[str, Any]:
        """Fields that the clouds do not have."""
        return {
            "message": self.message,
            "evicted_tokens": self.lost.evicted,
            "evicted_why": self.lost.why,
            "seconds": round(self.seconds, 3),
        }


def diagnosis(earlier: AskedPrompt, prompt: AskedPrompt, answer: Answer | None) -> Diagnosis:
    """Compare a prompt with an earlier one. Without its answer, nothing is known of evicted tokens and of seconds."""
    part, message = _difference(earlier, prompt) or (None, None)
    size = len(earlier.tokens)
    same = 0 if part == "model" else common_prefix(earlier.tokens, prompt.tokens)
    if part and part != "model" and same == size:
        part, message = None, None
    missed, lost, seconds = size - same if part else 0, Lost(0, None), 0.0
    if answer:
        computed = answer.prompt_tokens - answer.reuse.tokens
        if part is None:
            lost = prompt.lost(earlier, answer.reuse.tokens)
        seconds = answer.reuse.prefill_seconds * min(computed, missed + lost.evicted) / computed
    return Diagnosis(part, message, same, missed, lost, seconds)


def _difference(before: AskedPrompt, after: AskedPrompt) -> tuple[str, int | None] | None:
    """Return the first part that differs, and the first message; None if `after` begins with all messages of `before`,
    and has the same model, tools and options.
    """
    count = min(len(before.messages), len(after.messages))
    first = next((i for i in range(count) if before.messages[i] != after.messages[i]), count)
    message = first if first < len(before.messages) else None
    if before.model != after.model:
        return "model", message
    if before.tools != after.tools:
        return "tools", message
    if first < max(before.system, min(after.system, len(before.messages))):
        return "system", message
    if message is not None:
        return "messages", message
    return ("options", None) if before.options != after.options else None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two prompts have in common at their beginning."""
    count = min(len(first), len(second))
    if first[:count] == second[:count]:
        return count
    return next(i for i in range(count) if first[i] != second[i])


class PromptLog:
    """The prompts of the latest replies, by the reply's id, up to MAX_BYTES."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, AskedPrompt] = OrderedDict()
        self._last: dict[tuple[str, str], str] = {}  # reply ids, by tenant and client
        self._last_answered: dict[tuple[str, str], str] = {}  # the same, of prompts whose answers are complete
        self._bytes = 0

    def add(self, reply_id: str, prompt: AskedPrompt) -> None:
        self._prompts[reply_id] = prompt
        self._last[prompt.tenant, prompt.client] = reply_id
        self._bytes += prompt.size
        self._trim()

    def answered(self, reply_id: str, answer: Answer) -> None:
        """Add the tokens of the answer to a prompt, why it was not read or kept, and the end of its lifetime."""
        if prompt := self._prompts.get(reply_id):
            prompt.answer, prompt.answered = array("I", answer.tokens), time.monotonic()
            prompt.kept, prompt.states = 0 if answer.not_kept else prompt.kept, answer.states
            prompt.unread = prompt.unread or (None if answer.reuse.why in _GONE else answer.reuse.why)
            before = self._last_answered.get((prompt.tenant, prompt.client), reply_id)
            self._last_answered[prompt.tenant, prompt.client] = reply_id
            self._bytes += 4 * len(answer.tokens)
            if before != reply_id and before in self._prompts and self._prompts[before].withdrawn:
                self._remove(before)
            context = (prompt.tokens + prompt.answer)[: prompt.kept]
            for other in self._prompts.values():
                if (other.tenant, other.model) == (prompt.tenant, prompt.model):
                    other.restore(context, prompt.answered)
            self._trim()

    def find(self, reply_id: str | None, tenant: str, kind: str) -> AskedPrompt | None:
        """Return the prompt of a reply whose id begins with `kind`; None if it is not kept, or another tenant's."""
        found = self._prompts.get(reply_id) if reply_id and reply_id.startswith(kind) else None
        return found if found and found.tenant == tenant and not found.withdrawn else None

    def last(self, prompt: AskedPrompt) -> list[AskedPrompt]:
        """Return the last prompts of the same client: the last one that is answered, and the last one if it is not."""
        client = prompt.tenant, prompt.client
        ids = dict.fromkeys(last[client] for last in (self._last_answered, self._last) if client in last)
        return [self._prompts[one] for one in ids if one in self._prompts]

    def delete(self, reply_id: str, tenant: str, left: int | None) -> None:
        """Withdraw the prompt of a response that was deleted; it stays until the client's next answer, if it is the
        last one. The first `left` tokens of its context stay, all for None. Mark all prompts that have tokens behind
        these in common with it.
        """
        if not (deleted := self.find(reply_id, tenant, "resp_")):
            return
        context = deleted.tokens + deleted.answer
        if left is not None and left < len(context):
            for other in self._prompts.values():
                same = (other.tenant, other.model) == (tenant, deleted.model)
                if same and other.tokens[: left + 1] == context[: left + 1]:
                    other.delete(left)
        deleted.withdrawn = True
        if self._last_answered.get((tenant, deleted.client)) != reply_id:
            self._remove(reply_id)

    def delete_agent(self, tenant: str, agent_id: str) -> None:
        """Mark the prompts of an agent whose contexts were deleted. `agent_id` is the client's name for the agent."""
        for prompt in self._prompts.values():
            if (prompt.tenant, prompt.client) == (tenant, client_of(agent_id)):
                prompt.delete(0)

    def _trim(self) -> None:
        while self._bytes > MAX_BYTES:
            self._remove(next(iter(self._prompts)))

    def _remove(self, reply_id: str) -> None:
        prompt = self._prompts.pop(reply_id)
        self._bytes -= prompt.size
        for last in (self._last, self._last_answered):
            if last.get((prompt.tenant, prompt.client)) == reply_id:
                del last[prompt.tenant, prompt.client]


def without_volatile(body: ChatBody, lines: Sequence[int], mode: VolatileLines) -> ChatBody:
    """Return a conversation without these lines of the system's text. With `mode` "move", the last message has them at
    its end, and a conversation whose last message is the assistant's is not changed. "keep" changes nothing.
    """
    last, texts = body.messages[-1], _lines(body)
    lines = [i for i in lines if i < len(texts)]
    if mode == "keep" or not lines or (mode == "move" and last.role not in ("user", "tool")):
        return body
    system, *others = body.messages
    left = "\n".join(text for i, text in enumerate(texts) if i not in lines)
    messages = [system.model_copy(update={"content": left}), *others]
    if mode == "move":
        moved = "\n".join([last.content or "", "", *(texts[i] for i in lines)])
        messages[-1] = last.model_copy(update={"content": moved})
    return body.model_copy(update={"messages": messages})


def client_of(agent_id: str) -> str:
    """Return the client of prompts of an agent with this name."""
    return f"agent {agent_id}"


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _lines(body: ChatBody) -> list[str]:
    """Return the lines of the first message, if it is the system's."""
    first = body.messages[0]
    return (first.content or "").split("\n") if _is_system(first) else []


def _digest(part: Any) -> bytes:
    return hashlib.blake2b(to_json(part), digest_size=16).digest()
