"""Comparison of a prompt with an earlier one of the same client: the first difference, and the tokens it costs.

The clouds' APIs name an earlier reply (`diagnostics.previous_message_id`), and say why less of its prompt was found in
the cache than expected. The prompts of the latest replies are kept in memory for this, without their text: token ids,
and a digest of each part.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import to_json

from .openai.schema import ChatBody

MAX_BYTES = 32 << 20  # of all kept prompts; a prompt of 4,000 tokens has 16 KB
_PART_BYTES = 200  # of a kept prompt without its tokens, and of each of its digests


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """The prompt of a reply: the tenant, the tokens, and digests of its parts."""

    tenant: str
    model: str
    tools: bytes
    messages: tuple[bytes, ...]
    system: int  # the number of messages of the system at the beginning
    tokens: array[int]

    @classmethod
    def of(cls, tenant: str, body: ChatBody, tokens: Sequence[int]) -> AskedPrompt:
        """Return the prompt of a conversation, of which `tokens` are the ids."""
        messages = tuple(_digest(message.model_dump()) for message in body.messages)
        system = next((i for i, one in enumerate(body.messages) if one.role not in ("system", "developer")), 0)
        tools = _digest([tool.model_dump() for tool in body.tools])
        return cls(tenant, body.model, tools, messages, system, array("I", tokens))

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return len(self.tokens) * self.tokens.itemsize + (1 + len(self.messages)) * _PART_BYTES


class Difference(NamedTuple):
    """Why a prompt does not begin with an earlier one."""

    part: str  # "model", "tools", "system" or "messages": the first part that differs, in the order of the prompt
    message: int | None  # index of the first message that differs
    reusable: int  # tokens of the earlier prompt that both have in common at their beginning
    missed: int  # the other tokens of the earlier prompt


def difference(earlier: AskedPrompt, prompt: AskedPrompt) -> Difference | None:
    """Return the difference of a prompt from an earlier one; None if it begins with all messages of the earlier one,
    and has the same model and tools.
    """
    before, after = earlier.messages, prompt.messages
    count = min(len(before), len(after))
    first = next((i for i in range(count) if before[i] != after[i]), count)
    if earlier.model != prompt.model:
        part = "model"
    elif earlier.tools != prompt.tools:
        part = "tools"
    elif first < max(earlier.system, prompt.system):
        part = "system"
    elif first < len(before):
        part = "messages"
    else:
        return None
    same = 0 if part == "model" else common_prefix(earlier.tokens, prompt.tokens)
    return Difference(part, first if first < len(before) else None, same, len(earlier.tokens) - same)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two prompts have in common at their beginning."""
    count = min(len(first), len(second))
    return next((i for i in range(count) if first[i] != second[i]), count)


class PromptLog:
    """The prompts of the latest replies, by the reply's id, up to MAX_BYTES."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, AskedPrompt] = OrderedDict()
        self._bytes = 0

    def add(self, reply_id: str, prompt: AskedPrompt) -> None:
        self._prompts[reply_id] = prompt
        self._bytes += prompt.size
        while self._bytes > MAX_BYTES:
            _, oldest = self._prompts.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, reply_id: str, tenant: str) -> AskedPrompt | None:
        """Return the prompt of a reply; None if it is not kept, or another tenant's."""
        found = self._prompts.get(reply_id)
        return found if found and found.tenant == tenant else None


def _digest(part: Any) -> bytes:
    return hashlib.blake2b(to_json(part), digest_size=16).digest()
