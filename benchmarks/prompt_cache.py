"""The prompt cache over HTTP: the first token of Responses, Messages and pre-warmed prompts, compared with chats.

All on the real small model, the server and the engine a process each. The requests that are compared follow each other,
in turns, with the same prompt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.findings import Finding, show, write
from benchmarks.http_api import SMOLLM2, Api, ours
from benchmarks.servers import start_kvpage

ADDED_MS = 2.0  # target: milliseconds that an API adds to the first token of a chat, at most
PREWARMED = 1.1  # target: the first token of a pre-warmed prompt, in those of a hot one, at most
ANSWER = 2  # tokens
SETTLE_SECONDS = 0.3  # after an answer, for the writes of its context
INTRO = (
    "SmolLM2-135M in float32 over HTTP, the page server and the engine a process each; milliseconds to the first token "
    "as a client sees them, medians, and the median of the differences or ratios of each pair"
)
CONTROL = {"type": "ephemeral"}
QUESTION = "Name a river."


class Way(NamedTuple):
    """A way to ask for an answer to a system's text and a question."""

    path: str
    mark: bytes  # in the first line of the stream that has text of the answer
    fields: dict[str, Any]


def _chat(system: str) -> Way:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    return Way("/v1/chat/completions", b'"delta":{"content":"', {"messages": messages, "max_tokens": ANSWER})


def _response(system: str, **fields: Any) -> Way:
    given = {"instructions": system, "input": QUESTION, "max_output_tokens": ANSWER, **fields}
    return Way("/v1/responses", b'"type":"response.output_text.delta"', given)


def _message(system: str, **fields: Any) -> Way:
    text: dict[str, Any] = {"type": "text", "text": system}
    messages = [{"role": "user", "content": QUESTION}]
    given = {"system": [text], "messages": messages, "max_tokens": ANSWER, **fields}
    return Way("/v1/messages", b'"type":"content_block_delta"', given)


def _marked(system: str) -> Way:
    """A message with breakpoints after the system's text and at the end."""
    way = _message(system, cache_control=CONTROL)
    way.fields["system"][0]["cache_control"] = CONTROL
    return way


def first_token(api: Api, way: Way) -> tuple[float, dict[str, Any]]:
    """Return the milliseconds to the first text of a streamed answer, and the last event that is JSON."""
    body = json.dumps({"model": api.model, "temperature": 0, "stream": True, **way.fields})
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=300)
    connection.connect()
    asked, first = time.perf_counter(), 0.0
    connection.request("POST", way.path, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    last = b"{}"
    for line in reply:
        if not first and way.mark in line:
            first = time.perf_counter()
        if line.startswith(b"data: {"):
            last = line[6:]
    connection.close()
    if reply.status != 200 or not first:
        raise RuntimeError(f"{way.path}: {reply.status}: {last.decode()}")
    found: dict[str, Any] = json.loads(last)
    return 1000 * (first - asked), found


def post(api: Api, way: Way) -> dict[str, Any]:
    """Return the reply to a request that is not streamed."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=300)
    body = json.dumps({"model": api.model, "temperature": 0, **way.fields})
    connection.request("POST", way.path, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    found: dict[str, Any] = json.loads(reply.read())
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"{way.path}: {reply.status}: {found}")
    return found


def added(api: Api, system: str, rounds: int) -> list[Finding]:
    """Return the milliseconds that each API adds to the first token of a hot chat, with the same prompt."""
    earlier = post(api, _response(system))
    history = [
        {"role": "system", "content": system},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": earlier["output"][0]["content"][0]["text"]},
        {"role": "user", "content": "And a lake."},
    ]
    continued = {"messages": history, "max_tokens": ANSWER}
    pairs = {
        "/v1/responses": (_response(system), _chat(system)),
        "/v1/responses, store: false": (_response(system, store=False), _chat(system)),
        "/v1/responses, previous_response_id": (
            _response(system, input="And a lake.", previous_response_id=earlier["id"]),
            _chat(system)._replace(fields=continued),
        ),
        "/v1/messages": (_message(system), _chat(system)),
        "/v1/messages, two cache_control": (_marked(system), _chat(system)),
    }
    return [_added(work, [_pair(api, (other, way), i) for i in range(rounds)]) for work, (other, way) in pairs.items()]


def _pair(api: Api, ways: Sequence[Way], turn: int) -> list[float]:
    """Return the first tokens of two ways, in milliseconds. Which one is asked first changes with each turn."""
    found: dict[int, float] = {}
    for i in (0, 1) if turn % 2 else (1, 0):
        found[i], _ = first_token(api, ways[i])
        time.sleep(SETTLE_SECONDS / 3)
    return [found[0], found[1]]


def _added(work: str, pairs: list[list[float]]) -> Finding:
    pairs = pairs[2:]  # the first ones load code and contexts
    both = [median(times) for times in zip(*pairs, strict=True)]
    more = median(ours - chats for ours, chats in pairs)
    return Finding(work, "a chat", "ms added", "{:.2f} / {:.2f} ms".format(*both), more, at_most=ADDED_MS)


def prewarmed(api: Api, systems: Sequence[str]) -> list[Finding]:
    """Return the first tokens after a pre-warming request, in those of the next request, whose prompt is hot."""
    warm: dict[str, tuple[Callable[[str], Way], Callable[[str], Way]]] = {
        "Responses, prewarm": (lambda text: _response(text, prompt_cache_options={"prewarm": True}), _response),
        "Messages, max_tokens 0": (lambda text: _message(text, max_tokens=0, cache_control=CONTROL), _message),
    }
    findings = []
    for kind, (work, (prewarm, ask)) in enumerate(warm.items()):
        pairs = []
        for system in systems[kind :: len(warm)]:
            post(api, prewarm(system))
            times = []
            for _ in range(3):
                time.sleep(SETTLE_SECONDS)
                times.append(first_token(api, ask(system))[0])
            pairs.append((times[0], median(times[1:])))
        both = [median(times) for times in zip(*pairs[1:], strict=True)]
        ratio = median(first / hot for first, hot in pairs[1:])
        measured = "{:.1f} / {:.1f} ms".format(*both)
        findings.append(Finding(work, "the same prompt, hot", "first token", measured, ratio, at_most=PREWARMED))
    return findings


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/prompt_cache.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prompt_cache")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    words = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8").split() * 2
    rounds, prompts, length = (4, 4, 40) if quick else (40, 24, 400)
    systems = [f"Copy {i}. {' '.join(words[i : i + length])}" for i in range(prompts)]
    with start_kvpage() as store, ours(store.url) as api:
        findings = [*added(api, systems[0][::-1], rounds), *prewarmed(api, systems)]
    show(findings, "The prompt cache over HTTP")
    if not quick:
        write(findings, "prompt_cache", {"model": Path(SMOLLM2).name}, intro=INTRO)


if __name__ == "__main__":
    main()
