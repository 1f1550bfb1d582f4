"""Turns usage strings into the argument trees of COMMAND DOCS, from which redis-cli makes its hints.

The grammar is that of Redis's documentation. Lower-case words are values, and upper-case words are tokens. A token
before a value names it. ``[ ]`` is optional, and ``< a | b >`` or ``[a | b]`` is one of several. ``key [key ...]``
means that the argument before the brackets can be repeated.
"""

from __future__ import annotations

import re
from typing import Any

_TOKEN = re.compile(r"\.\.\.|[\[\]<>|]|[^\s\[\]<>|]+")
_INTEGERS = """N P count cursor decrement dtype end head head_dim heads increment index layer layers lease_ms
    milliseconds numreplicas page page_size pages_per_block protover seconds start timeout ttl type"""
_KINDS = dict.fromkeys(_INTEGERS.split(), "integer") | {
    "key": "key",
    "pattern": "pattern",
    "unix-time-seconds": "unix-time",
    "unix-time-milliseconds": "unix-time",
}


def arguments(usage: str) -> list[dict[str, Any]]:
    """The argument tree of a usage string, as the maps that COMMAND DOCS replies."""
    words = _TOKEN.findall(usage)
    found, rest = _sequence(words)
    assert not rest, f"unbalanced usage: {usage}"
    return found


def arity(name: str, usage: str) -> int:
    """The number of words of a call, including its name, negative if there can be more, as in Redis's tables."""
    least, more = _words(arguments(usage))
    count = name.count("|") + 1 + least
    return -count if more else count


def _words(found: list[dict[str, Any]]) -> tuple[int, bool]:
    """The least number of words of the arguments, and whether there can be more."""
    least, may_take_more = 0, False
    for argument in found:
        inner = argument.get("arguments", [])
        if argument["type"] == "oneof":
            choices = [_words([choice]) for choice in inner]
            count = min(choice for choice, _ in choices)
            more = any(open_ended or choice > count for choice, open_ended in choices)
        elif argument["type"] == "block":
            count, more = _words(inner)
        else:
            count, more = 1 + ("token" in argument and argument["type"] != "pure-token"), False
        flags = argument.get("flags", [])
        may_take_more |= more or bool(flags)
        least += 0 if "optional" in flags else count
    return least, may_take_more


def _sequence(words: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Arguments up to a closing bracket or a bar, and the words that follow."""
    found: list[dict[str, Any]] = []
    while words and words[0] not in ("]", ">", "|"):
        word, words = words[0], words[1:]
        if word in ("[", "<"):
            group, words = _group(words, optional=word == "[")
            if group.get("flags") == ["repeats"]:
                _mark_repeating(found, group)
            else:
                found.append(group)
        elif word == "...":
            found.append({"name": "...", "type": "string"})
        elif _is_token(word):
            found.append({"name": word.lower(), "type": "pure-token", "token": word})
            if words and not _is_token(words[0]) and words[0] not in ("[", "]", "<", ">", "|", "..."):
                found[-1] = _named_value(word, words[0])
                words = words[1:]
        else:
            found.append(_value(word))
    return found, words


def _group(words: list[str], *, optional: bool) -> tuple[dict[str, Any], list[str]]:
    """A bracketed group: one of its alternatives, or all of its arguments."""
    choices: list[list[dict[str, Any]]] = []
    while True:
        choice, words = _sequence(words)
        choices.append(choice)
        closing, words = words[0], words[1:]
        if closing != "|":
            break
    if len(choices) == 1 and choices[0] and choices[0][-1]["name"] == "...":
        return {"flags": ["repeats"], "arguments": choices[0][:-1]}, words
    parts = [_as_one(choice) for choice in choices]
    group = parts[0] if len(parts) == 1 else {"name": "choice", "type": "oneof", "arguments": parts}
    if optional:
        group = {**group, "flags": ["optional", *group.get("flags", [])]}
    return group, words


def _as_one(arguments: list[dict[str, Any]]) -> dict[str, Any]:
    return arguments[0] if len(arguments) == 1 else {"name": "group", "type": "block", "arguments": arguments}


def _mark_repeating(found: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """`key [key ...]`: what stands before the group is given once or more."""
    count = len(group["arguments"])
    names = [argument["name"] for argument in group["arguments"]]
    if [argument["name"] for argument in found[-count:]] == names:
        repeated = _as_one(found[-count:])
        del found[-count:]
        found.append({**repeated, "flags": ["multiple"]})
    else:
        found.append({**_as_one(group["arguments"]), "flags": ["optional", "multiple"]})


def _is_token(word: str) -> bool:
    return word.isupper() and len(word) > 1


def _named_value(token: str, word: str) -> dict[str, Any]:
    value = {**_value(word), "token": token}
    return {**value, "type": "string"} if token == "TYPE" else value  # SCAN's, not a page's


def _value(word: str) -> dict[str, Any]:
    value = {"name": word, "type": _KINDS.get(word, "string")}
    return {**value, "key_spec_index": 0} if word == "key" else value
