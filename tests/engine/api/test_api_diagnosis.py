"""Why a prompt was not found: forty generated edits of a conversation, evicted prompts, volatile lines of a system.

A token of the tiny models is a letter or the mark of a call, so this test knows the tokens of every prompt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import anthropic
import httpx
import jinja2
import openai
import pytest
from api_engines import TOOL_TEMPLATE, RunningEngine, start_engine, write_family, write_offered, write_tiny
from servers import start_server
from waiting import until

from engine.agent_engine import Answer, Reuse
from engine.api.diagnosis import AskedPrompt, PromptLog, common_prefix, diagnosis
from engine.api.openai.schema import ChatBody
from engine.memory.lifetimes import KeptContext
from kvpage_server.page import unix_ms

MARK = "<tool_call>"
Body = dict[str, Any]  # system, tools and messages


def words(random: Random, count: int = 6) -> str:
    return " ".join("".join(random.choices(ascii_lowercase, k=5)) for _ in range(count))


def conversation(random: Random) -> Body:
    roles = ("user", "assistant")
    return {
        "system": "\n".join(words(random) for _ in range(5)),
        "tools": [f"tool{name}" for name in "xyz"],
        "messages": [(roles[i % 2], words(random)) for i in range(7)],
    }


def edits(random: Random, base: Body) -> Iterator[tuple[Body, str | None, int | None]]:
    """Yield changed conversations, with the part that differs, and the first message that does."""
    system, tools, messages = base["system"], base["tools"], base["messages"]
    for i in range(5):
        lines = system.split("\n")
        lines[i] = words(random)
        yield {**base, "system": "\n".join(lines)}, "system", 0
    yield {**base, "system": "\n".join(system.split("\n")[:4])}, "system", 0
    yield {**base, "system": system + " more"}, "system", 0
    yield {**base, "system": None}, "system", 0
    for changed in (tools[::-1], tools[1:], ["tool0", *tools], []):
        yield {**base, "tools": changed}, "tools", None
        yield {**base, "tools": changed, "system": "other"}, "tools", 0
    for i, (role, text) in enumerate(messages):
        yield {**base, "messages": [*messages[:i], (role, words(random)), *messages[i + 1 :]]}, "messages", i + 1
        yield {**base, "messages": [*messages[:i], (role, text + "s"), *messages[i + 1 :]]}, "messages", i + 1
    for i in (0, 2, 4):
        yield {**base, "messages": [*messages[:i], *messages[i + 2 :]]}, "messages", i + 1
        yield {**base, "messages": [*messages[:i], messages[i + 2], messages[i + 1], messages[i]]}, "messages", i + 1
    for count in (0, 2, 4):
        more = [(role, words(random)) for role in ("assistant", "user") * (count // 2)]
        yield {**base, "messages": messages + more}, None, None
    yield {**base, "tools": [tools[0], *tools[:0:-1]]}, None, None  # the template writes the first tool only


BASE = conversation(Random(1))
EDITS = list(edits(Random(2), BASE))


def rendered(body: Body) -> str:
    messages = [{"role": role, "content": text} for role, text in body["messages"]]
    if body["system"] is not None:
        messages.insert(0, {"role": "system", "content": body["system"]})
    tools = [{"function": {"name": name}} for name in body["tools"]]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TOOL_TEMPLATE)
    text = template.render(messages=messages, tools=tools, add_generation_prompt=True)
    return text.replace(MARK, "\0")


def ask_messages(engine: RunningEngine, body: Body, earlier: str | None = None, model: str = "tiny") -> tuple[str, Any]:
    """Return the id of a message, and its diagnosis."""
    asked: Any = {
        "messages": [{"role": role, "content": text} for role, text in body["messages"]],
        "tools": [{"name": name, "input_schema": {}} for name in body["tools"]],
        **({"cache_control": {"type": "ephemeral"}} if body.get("cached") else {}),
        "diagnostics": {"previous_message_id": earlier},
        **({} if body["system"] is None else {"system": body["system"]}),
    }
    with anthropic.Anthropic(base_url=engine.url, api_key=engine.token, max_retries=0) as client:
        message = client.messages.create(model=model, max_tokens=1, extra_body={"temperature": 0}, **asked)
    reason = message.diagnostics and message.diagnostics.cache_miss_reason
    return message.id, reason and reason.model_dump()


def ask_responses(
    engine: RunningEngine, body: Body, earlier: str | None = None, model: str = "tiny"
) -> tuple[str, Any]:
    """Return the id of a response, and its diagnosis."""
    asked: Any = {
        "input": [{"role": role, "content": text} for role, text in body["messages"]],
        "tools": [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in body["tools"]],
        "prompt_cache_options": ({"comparison_response_id": earlier} if earlier else {})
        | ({"ttl": "30m"} if body.get("cached") else {}),
        "store": body.get("stored", True),
        **({} if body["system"] is None else {"instructions": body["system"]}),
    }
    with engine.client(engine.token) as client:
        response = client.responses.create(model=model, max_output_tokens=1, temperature=0, **asked)
    found = response.prompt_cache_diagnostics
    return response.id, found and found.model_dump(exclude_none=True)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = write_offered(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def earlier(offered: RunningEngine) -> tuple[str, str]:
    """The ids of a message and of a response with the unchanged conversation."""
    return ask_messages(offered, BASE)[0], ask_responses(offered, BASE)[0]


def test_there_are_forty_edits() -> None:
    assert len(EDITS) >= 40


@pytest.mark.parametrize("number", range(len(EDITS)))
def test_an_edit_is_found(offered: RunningEngine, earlier: tuple[str, str], number: int) -> None:
    body, part, message = EDITS[number]
    before, after = rendered(BASE), rendered(body)
    same = common_prefix(before, after)
    reason = ask_messages(offered, body, earlier[0])[1]
    found = ask_responses(offered, body, earlier[1])[1]
    if part is None:
        assert (same, reason, found) == (len(before), None, {"type": "cache_hit"})
        return
    assert reason.pop("seconds") > 0
    assert reason == {
        "type": f"{part}_changed",
        "cache_missed_input_tokens": len(before) - same,
        "reusable_input_tokens": same,
        "evicted_tokens": 0,
        "evicted_why": None,
        "message": message,
    }
    assert found.pop("seconds") > 0
    assert found == {
        "type": "cache_miss",
        "reason": "tools_changed" if part == "tools" else "input_changed",
        "cache_missed_tokens": len(before) - same,
        "comparison_reusable_tokens": same,
        "evicted_tokens": 0,
        **({} if message is None else {"message": message}),
    }


class Asking:
    """One of the two APIs, asked for a diagnosis."""

    def __init__(self, engine: RunningEngine, ask: Callable[..., tuple[str, Any]]) -> None:
        self.engine = engine
        self.ask = ask

    def first(self, body: Body) -> str:
        return self.ask(self.engine, body)[0]

    def why(self, body: Body, earlier: str) -> tuple[str, int, str | None]:
        """The kind of miss, the evicted tokens and why they were evicted; of a hit "hit"."""
        found = self.ask(self.engine, body, earlier)[1]
        if found is None or found["type"] == "cache_hit":
            return "hit", 0, None
        return found["type"], found.get("evicted_tokens", 0), found.get("evicted_why")


BOTH = pytest.mark.parametrize("ask", [ask_messages, ask_responses])


def plain(seed: int) -> Body:
    return {**conversation(Random(seed)), "tools": []}


def evict(engine: RunningEngine, seed: int = 10) -> None:
    """Send prompts of others, which take all of the small memory twice."""
    with engine.client(engine.token) as client:
        for i in range(10):
            client.completions.create(model="tiny", prompt=rendered(plain(seed + i)), max_tokens=1)


def test_a_replaced_agent_was_not_evicted(tmp_path: Path) -> None:
    """A fork has deleted its context from the page server, and other prompts took the place of it in memory."""
    body: Any = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": words(Random(9), 60)}]}
    with start_server() as server:
        model = write_tiny(tmp_path / "tiny")
        with start_engine(model, "--memory", "2mb", "--store", server.url) as engine, engine.client() as client:
            client.chat.completions.create(user="alice", **body)
            other: Any = body | {"messages": [{"role": "user", "content": "Hello"}], "user": "bob"}
            client.chat.completions.create(**other)
            assert httpx.post(f"{engine.url}/v1/agents/alice/save").status_code == 200
            fork = {"to": "alice", "replace": True}
            assert httpx.post(f"{engine.url}/v1/agents/bob/fork", json=fork).status_code == 201
            evict(engine)
            made: Any = client.chat.completions.create(user="alice", **body)
            assert made.kvpage["why"] == "deleted"


@BOTH
def test_a_deleted_prompt_was_not_evicted(tmp_path: Path, ask: Callable[..., tuple[str, Any]]) -> None:
    """A deleted response is unknown. An earlier reply with the same context, which is not stored, has lost its tokens,
    too.
    """
    with start_engine(write_tiny(tmp_path / "tiny")) as engine, engine.client() as client:
        body, api = plain(3), Asking(engine, ask)
        earlier = api.first({**body, "stored": False})
        deleted = ask_responses(engine, body)[0]
        client.responses.delete(deleted)
        kind, lost, why = api.why(body, earlier)
        assert (kind, lost > 100, why) == ("unavailable", True, "deleted")
        assert ask_responses(engine, body, deleted)[1] == {"type": "comparison_response_not_found"}
        assert api.why(body, api.first(body))[0] == "hit"


def test_the_last_prompt_of_a_client_was_deleted(tmp_path: Path) -> None:
    """`why` says so once. When the context was stored again, others evict it."""
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "2mb") as engine, engine.client() as client:
        text = words(Random(9), 40)

        def ask() -> tuple[str, str | None]:
            made: Any = client.responses.create(model="tiny", max_output_tokens=1, input=text)
            return made.id, made.kvpage["why"]

        client.responses.delete(ask()[0])
        assert ask()[1] == "deleted"
        assert ask()[1] is None
        evict(engine)
        assert ask()[1] == "evicted"


def test_a_context_that_was_stored_again_is_not_deleted() -> None:
    """Only prompts that were asked before have lost their tokens by the deletion."""
    log = PromptLog()

    def add(reply_id: str) -> AskedPrompt:
        prompt = asked()
        log.add(reply_id, prompt)
        log.answered(reply_id, answered(0))
        return prompt

    earlier, _ = add("msg_1"), add("resp_1")
    log.delete("resp_1", "", 40)
    before = asked()
    for prompt in (before, add("msg_2"), before):
        assert prompt.lost(earlier, 0).why == "deleted"
    assert asked().lost(earlier, 0).why == "evicted"


def test_a_deleted_agent_was_not_evicted(engine: RunningEngine) -> None:
    body: Any = {"model": "tiny", "max_tokens": 1, "temperature": 0, "user": "alice"}
    messages: Any = [{"role": "user", "content": words(Random(9), 40)}]
    with engine.client() as client:

        def ask() -> str | None:
            made: Any = client.chat.completions.create(messages=messages, **body)
            why: str | None = made.kvpage["why"]
            return why

        ask()
        assert ask() is None
        assert httpx.delete(f"{engine.url}/v1/agents/alice").status_code == 200
        assert ask() == "deleted"
        assert ask() is None


def short_lifetimes(command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start an engine whose lifetimes take a second."""
    short = "from engine.api.openai import schema; schema.LIFETIMES.update({'5m': 1, '30m': 1})"
    main = "import sys; from engine.cli import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", f"{short}; {main}", *command[3:]], **streams)


def test_an_expired_prompt_is_named(tmp_path: Path) -> None:
    """It was kept in memory for its lifetime, which has ended."""
    model = write_tiny(tmp_path / "tiny")
    with start_engine(model, "--memory", "2mb", start=short_lifetimes) as engine:
        for seed, ask in ((3, ask_messages), (4, ask_responses)):
            api, body = Asking(engine, ask), {**plain(seed), "cached": True}
            earlier = api.first(body)
            time.sleep(1.1)
            evict(engine, 10 * seed)
            kind, lost, why = api.why(body, earlier)
            assert (kind, lost > 100, why) == ("unavailable", True, "expired")


def test_lifetimes_that_another_engine_has_renewed(tmp_path: Path) -> None:
    """The page server says when and why it has lost a full block. Here it was not renewed if it has expired."""
    model = write_tiny(tmp_path / "tiny")
    with (
        start_server("--maxmemory", "16mb") as server,
        server.client() as client,
        start_engine(model, "--store", server.url, "--memory", "2mb", start=short_lifetimes) as engine,
        start_engine(model, "--store", server.url) as other,
        other.client() as renewing,
    ):
        for seed, end in ((3, "deleted"), (4, "evicted"), (5, "expired")):
            api, body = Asking(engine, ask_messages), {**plain(seed), "cached": True}
            assert len(rendered(body)) > 256
            earlier, begun = api.first(body), time.monotonic()
            renewed = "" if end == "expired" else ask_responses(other, body)[0]
            until(lambda begun=begun: time.monotonic() > begun + 1.1, "the end of the lifetime that this engine knows")
            if end == "deleted":
                renewing.responses.delete(renewed)
            elif end == "evicted":
                client.flushall()
            else:
                for i in range(400):
                    client.execute_command("KVBLOCKSET", f"o{i}", 0, 1, 1, 1, 0, 1, 0, 3, 100_000, bytes(100_000))
            evict(engine, 10 * seed)
            kind, lost, why = api.why(body, earlier)
            assert (kind, lost > 100, why) == ("unavailable", True, end)


def test_an_eviction_after_a_cancelled_answer_is_named(tmp_path: Path) -> None:
    """The last prompt of the client is not answered, but the one before it was."""
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "2mb") as engine, engine.client() as client:
        body: Any = {"model": "tiny", "messages": [{"role": "user", "content": words(Random(9), 40)}]}

        def why() -> str | None:
            made: Any = client.chat.completions.create(max_tokens=1, **body)
            found: str | None = made.kvpage["why"]
            return found

        why()
        evict(engine)
        with client.chat.completions.create(max_tokens=100, stream=True, **body) as stream:
            next(iter(stream))
        evict(engine, 60)
        assert why() == "evicted"


def test_an_evicted_prompt_is_named_with_its_cost(tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "2mb") as engine:
        body = {**conversation(Random(3)), "tools": []}
        ids = ask_messages(engine, body)[0], ask_responses(engine, body)[0]
        assert ask_messages(engine, body, ids[0])[1] is None
        evict(engine)
        lost = ask_messages(engine, body, ids[0])[1]
        assert lost["type"] == "unavailable"
        assert lost["evicted_tokens"] > 100
        assert lost["evicted_why"] == "evicted"
        assert lost["seconds"] > 0
        evict(engine, 60)
        found = ask_responses(engine, body, ids[1])[1]
        assert (found["type"], found["evicted_tokens"] > 100) == ("unavailable", True)


def test_a_common_head_does_not_hide_an_eviction(tmp_path: Path) -> None:
    """All prompts begin with the same tokens, which are found. A changed line behind lost tokens is not the reason."""
    head = "You are brief.\nThe date is: "
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "2mb") as engine, engine.client() as client:

        def ask(text: str, end: str = "Monday") -> tuple[int, str | None]:
            messages: Any = [
                {"role": "system", "content": f"{head}\n{text}\n{end}"},
                {"role": "user", "content": text[:9]},
            ]
            made: Any = client.chat.completions.create(model="tiny", max_tokens=1, messages=messages)
            return made.usage.prompt_tokens_details.cached_tokens, made.kvpage["why"]

        text = words(Random(7), 60)
        shared = len(f"system:{head}\n")
        for end in ("Monday", "Friday"):
            ask(text)
            for i in range(10):
                ask(words(Random(10 + i), 60))
            read, why = ask(text, end)
            assert (shared <= read < shared + 5, why) == (True, "evicted")
        read, why = ask(text, "Sunday")
        assert (read > len(text), why) == (True, "volatile line 4 of system")
        shown = httpx.get(f"{engine.url}/metrics").text
        assert 'kvpage_engine_misses_total{model="tiny",reason="volatile line"}' in shown


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba2"])
def test_a_window_or_a_recurrence_is_no_eviction(tmp_path: Path, kind: str) -> None:
    """These layers continue at few positions, so less is found of a prompt that was changed within a block."""
    with start_engine(write_family(tmp_path / "tiny", kind)) as engine, engine.client() as client:
        text = words(Random(8), 60)
        more: Any = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]
        for said, later in ((text, []), (text, []), (text, more), (text[:300] + text[310:], [])):
            messages: Any = [{"role": "user", "content": said}, *later]
            made: Any = client.chat.completions.create(model="tiny", max_tokens=1, user="alice", messages=messages)
            assert made.kvpage["why"] not in ("evicted", "expired")


def test_a_prompt_that_was_not_kept_or_not_read_was_not_evicted(tmp_path: Path) -> None:
    """The mode explicit without a breakpoint reads and keeps nothing."""
    with start_engine(write_tiny(tmp_path / "tiny")) as engine, engine.client() as client:

        def ask(text: str, mode: str, earlier: str = "") -> Any:
            options: Any = {"mode": mode, **({"comparison_response_id": earlier} if earlier else {})}
            return client.responses.create(model="tiny", max_output_tokens=1, input=text, prompt_cache_options=options)

        for seed, modes, why in ((1, ("implicit", "explicit"), "not read"), (2, ("explicit", "implicit"), "not kept")):
            text = words(Random(seed))
            made = ask(text, modes[1], ask(text, modes[0]).id)
            found = made.prompt_cache_diagnostics.model_dump()
            assert made.usage.input_tokens_details.cached_tokens < 10
            assert (found["type"], found["evicted_tokens"], found["evicted_why"]) == ("unavailable", 0, why)
            assert made.kvpage["why"] == why


def test_an_id_of_the_other_api_is_unknown(offered: RunningEngine, earlier: tuple[str, str]) -> None:
    message, response = earlier
    assert ask_messages(offered, BASE, response)[1] == {"type": "previous_message_not_found"}
    assert ask_responses(offered, BASE, message)[1] == {"type": "comparison_response_not_found"}


def test_an_id_of_another_tenant_is_unknown(tenants: RunningEngine) -> None:
    body = {**conversation(Random(4)), "tools": []}
    found = []
    try:
        tenants.token = "one"
        ids = [ask(tenants, body)[0] for ask in (ask_messages, ask_responses)]
        tenants.token = "two"
        for ask, known, unknown in ((ask_messages, ids[0], "msg_0"), (ask_responses, ids[1], "resp_0")):
            found += [ask(tenants, body, one)[1] for one in (known, unknown)]
    finally:
        tenants.token = "none"
    assert found == [{"type": "previous_message_not_found"}] * 2 + [{"type": "comparison_response_not_found"}] * 2


def test_a_swapped_model_is_named(tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", hidden_size=32)
    body = {**conversation(Random(5)), "tools": []}
    with start_engine(write_tiny(tmp_path / "tiny"), "--model", str(other)) as engine:
        ids = ask_messages(engine, body)[0], ask_responses(engine, body)[0]
        reason = ask_messages(engine, body, ids[0], "other")[1]
        found = ask_responses(engine, body, ids[1], "other")[1]
    missed = len(rendered(body))
    assert (reason["type"], reason["cache_missed_input_tokens"]) == ("model_changed", missed)
    assert (found["reason"], found["cache_missed_tokens"]) == ("model_changed", missed)


def test_another_model_and_other_options_are_named() -> None:
    """No variable of the tiny template is tested here: this compares prompts directly."""

    def prompt(model: str = "a", text: str = "Hello", **fields: Any) -> AskedPrompt:
        body = ChatBody.of({"model": model, "messages": [{"role": "user", "content": text}], **fields})
        made = AskedPrompt.of("", None, "", body)
        made.tokens.extend(f"{fields}{text}".encode())
        return made

    before = prompt()
    assert diagnosis(before, prompt(), None).part is None
    assert diagnosis(before, prompt("b"), None)[:4] == ("model", None, 0, len(before.tokens))
    assert diagnosis(before, prompt(reasoning_effort="high"), None)[:4] == ("options", None, 1, len(before.tokens) - 1)
    assert diagnosis(before, prompt(text="Help"), None)[:3] == ("messages", 0, 5)


def test_the_end_of_a_lifetime_is_named() -> None:
    """A prompt is compared with an earlier one, which it reuses up to a token. The lifetime of the next tokens
    counts, which a hit has renewed as far as it reached.
    """
    now = unix_ms()
    earlier, hit, prompt = asked(), asked(), asked()
    earlier.requested_lifetimes = [(50, 3600), (80, 300)]
    earlier.begin_lifetimes(None, answered(0, KeptContext(80, now + 300_000)))
    hit.begin_lifetimes(earlier, answered(70))
    after = time.time()
    for minutes, reused, why in (
        (0, 0, "evicted"),
        (4, 60, "evicted"),
        (6, 75, "expired"),
        (6, 85, None),
        (59, 40, "evicted"),
        (61, 40, "expired"),
        (61, 85, None),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda minutes=minutes: after + 60 * minutes)
            found = diagnosis(earlier, prompt, answered(reused)).lost
        assert found.why == why, (minutes, reused)


def test_a_new_lifetime_does_not_hide_the_end_of_the_last() -> None:
    """A prompt that continues an earlier one, and has a lifetime again."""
    earlier, prompt, now = asked(), asked(), unix_ms()
    earlier.requested_lifetimes = prompt.requested_lifetimes = [(80, 300)]
    earlier.begin_lifetimes(None, answered(0, KeptContext(80, now + 300_000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now / 1000 + 600)
        answer = answered(0, KeptContext(80, now + 900_000))
        prompt.begin_lifetimes(earlier, answer)
        assert diagnosis(earlier, prompt, answer).lost.why == "expired"
        assert diagnosis(earlier, asked(), answered(0)).lost.why == "evicted"


def test_only_the_latest_lifetimes_are_noted() -> None:
    """Prompts that reuse fewer and fewer tokens do not make the notes longer."""
    earlier = asked(400)
    earlier.requested_lifetimes = [(400, 300)]
    earlier.begin_lifetimes(None, answered(0, KeptContext(400, unix_ms() + 300_000)))
    for reused in range(390, 0, -10):
        asked(400).begin_lifetimes(earlier, answered(reused))
    assert len(earlier.lifetimes) <= 16


def test_only_tokens_with_a_state_behind_them_are_evicted() -> None:
    """The states of a large window are at few positions, and other prompts continue only there."""
    earlier, prompt = asked(1000), asked(1000)
    earlier.states = (300, 999)
    prompt.tokens[700:] = array("I", [5] * 300)
    assert prompt.lost(earlier, 300) == (0, None)
    assert prompt.lost(earlier, 0) == (300, "evicted")
    assert asked(1000).lost(earlier, 300) == (699, "evicted")
    earlier.states = ()
    assert asked(1000).lost(earlier, 0) == (0, None)


def asked(count: int = 100) -> AskedPrompt:
    """A prompt whose answer is complete."""
    made = AskedPrompt.of("", None, "", ChatBody.of({"model": "a", "messages": [{"role": "user", "content": "Hello"}]}))
    made.tokens.extend(range(count))
    made.answered = 0.0
    return made


def answered(reused: int, kept: KeptContext | None = None) -> Answer:
    return Answer(0, "", "", (), "stop", None, 100, Reuse(tokens=reused, prefill_seconds=1.0), kept=kept)


def chat(client: openai.OpenAI, date: str, *texts: str, **fields: Any) -> tuple[int, str | None, int]:
    """Return the tokens that were read for a chat, the reason why not more, and the number of the prompt's tokens."""
    messages: Any = [{"role": "system", "content": f"You are brief.\nAnswer in English.\nIt is {date}.\n{80 * 'x'}"}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    made = client.chat.completions.create(model="tiny", max_tokens=1, temperature=0, messages=messages, **fields)
    assert made.usage
    assert made.usage.prompt_tokens_details
    return made.usage.prompt_tokens_details.cached_tokens or 0, made.kvpage["why"], made.usage.prompt_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["keep", "move", "drop"])
def test_a_volatile_line_is_named_and_can_be_moved(tmp_path: Path, mode: str) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--volatile-lines", mode) as engine, engine.client() as client:
        turns = ["Hello", "Hi", "More", "Well", "And?"]
        before = len("system:You are brief.\nAnswer in English.\n" + ("It is " if mode == "keep" else ""))
        chat(client, "Monday", *turns[:1])
        assert chat(client, "Tuesday", *turns[:3])[:2] == (before, "volatile line 3 of system")
        read, why, total = chat(client, "Friday", *turns)
        if mode == "keep":
            assert (read, why) == (before, "volatile line 3 of system")
        else:
            assert read > before + 80
            assert why == (None if mode == "drop" else "volatile line 3 of system")
        turns += ["Yes", "Really?"]
        why = chat(client, "Friday", *turns)[1]
        assert why
        assert why.startswith("volatile line 3 of system was moved" if mode == "move" else "history rewritten")
        assert total < chat(client, "Sunday", *turns)[2]


@pytest.mark.parametrize("lines", [1, 3])
def test_a_system_that_was_replaced_is_no_volatile_line(tmp_path: Path, lines: int) -> None:
    """It is not dropped."""
    with start_engine(write_tiny(tmp_path / "tiny"), "--volatile-lines", "drop") as engine, engine.client() as client:
        found, user = [], {"role": "user", "content": "Hello"}
        for word in ("a brief poet", "some verbose lawyer", "some verbose lawyer"):
            text = "\n\n".join(f"{word} {i}" for i in range(lines))
            messages: Any = [{"role": "system", "content": text}, user]
            made = client.chat.completions.create(model="tiny", max_tokens=1, user="alice", messages=messages)
            assert made.usage
            found.append((made.kvpage["why"], made.usage.prompt_tokens))  # type: ignore[attr-defined]
        assert found[1][0] == "system replaced"
        assert found[2] == (None, found[1][1])
        assert found[1][1] > found[0][1]


def test_a_rewritten_history_is_named_with_its_token(api: openai.OpenAI) -> None:
    """Templates that drop the thoughts of earlier turns do the same."""
    first = api.chat.completions.create(
        model="tiny", max_tokens=20, temperature=0, user="alice", messages=[{"role": "user", "content": "Think"}]
    )
    answer = first.choices[0].message.content or ""
    messages: Any = [
        {"role": "user", "content": "Think"},
        {"role": "assistant", "content": answer[5:]},
        {"role": "user", "content": "More"},
    ]
    second = api.chat.completions.create(model="tiny", max_tokens=1, user="alice", messages=messages)
    same = len("user:Think\nassistant:") + common_prefix(answer, answer[5:] + "\nuser:More")
    assert second.kvpage["why"] == f"history rewritten from token {same}"  # type: ignore[attr-defined]


def test_thoughts_that_a_template_drops_are_named(tmp_path: Path) -> None:
    """The template is that of DeepSeek V3.2 in mlx-lm."""
    model = write_tiny(tmp_path / "tiny")
    config = model / "tokenizer_config.json"
    chosen = {"chat_template_type": "deepseek_v32"}
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | chosen), encoding="utf-8")
    (model / "chat_template.jinja").unlink()
    question: Any = {"role": "user", "content": "Hello"}
    asked: Any = {"model": "tiny", "max_tokens": 20, "temperature": 0, "extra_body": {"enable_thinking": True}}
    with start_engine(model) as engine, engine.client() as client:
        first = client.chat.completions.create(messages=[question], **asked)
        thoughts = first.choices[0].message.content  # the prompt opens them, and the model does not close them
        answer: Any = {"role": "assistant", "content": "Yes", "reasoning_content": thoughts}
        second: Any = client.chat.completions.create(messages=[question, answer, question], **asked)
    assert first.usage
    begins = first.usage.prompt_tokens - len("think>")  # "</think>" is left of the earlier turn
    assert second.usage.prompt_tokens_details.cached_tokens == begins
    assert second.kvpage["why"] == f"history rewritten from token {begins}"


# As those of GLM: thoughts are between marks, and those before the user's last message are left out, unless a variable
# keeps them. The prompt opens the thoughts of the answer.
KEEPING_TEMPLATE = """[gMASK]<sop>
{%- set last = namespace(user=-1) %}
{%- for message in messages if message.role == "user" %}{% set last.user = messages.index(message) %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- set kept = loop.index0 > last.user or (clear_thinking is defined and not clear_thinking) %}
{{- "<|assistant|>" + ("<think>" + message.reasoning_content if kept and message.reasoning_content else "") }}
{{- "</think>" + message.content }}
{%- else %}{{ "<|" + message.role + "|>" + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""


def second_turn(engine: RunningEngine, api: str, question: str, thoughts: str, keeps: bool) -> tuple[int, str | None]:
    """Ask again after an answer with thoughts. Return the reused tokens, and why not more."""
    more: Any = {"chat_template_kwargs": {"clear_thinking": False}} if keeps else {}
    first: Any = {"role": "user", "content": question}
    last: Any = {"role": "user", "content": "And?"}
    if api == "messages":
        content: Any = [
            {"type": "thinking", "thinking": thoughts, "signature": ""},
            {"type": "text", "text": "Yes"},
        ]
        with anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0) as client:
            asked: Any = [first, {"role": "assistant", "content": content}, last]
            message: Any = client.messages.create(model="tiny", max_tokens=1, messages=asked, extra_body=more)
        return message.usage.cache_read_input_tokens, message.kvpage["why"]
    with engine.client() as openais:
        if api == "responses":
            reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
            reasoning["content"] = [{"type": "reasoning_text", "text": thoughts}]
            items: Any = [first, reasoning, {"role": "assistant", "content": "Yes"}, last]
            made: Any = openais.responses.create(model="tiny", max_output_tokens=1, input=items, extra_body=more)
            return made.usage.input_tokens_details.cached_tokens, made.kvpage["why"]
        answer: Any = {"role": "assistant", "content": "Yes", "reasoning_content": thoughts}
        messages: Any = [first, answer, last]
        chatted: Any = openais.chat.completions.create(model="tiny", max_tokens=1, messages=messages, extra_body=more)
        return chatted.usage.prompt_tokens_details.cached_tokens, chatted.kvpage["why"]


def test_an_option_keeps_thoughts_in_the_context(tmp_path: Path) -> None:
    """Without it, the tokens before the thoughts are reused, and the first other token is named."""
    model = write_tiny(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(KEEPING_TEMPLATE, encoding="utf-8")
    with start_engine(model) as engine, engine.client() as client:
        for api in ("chat", "responses", "messages"):
            for keeps in (False, True):
                question = words(Random(f"{api} {keeps}"))
                first = client.chat.completions.create(
                    model="tiny", max_tokens=20, temperature=0, messages=[{"role": "user", "content": question}]
                )
                thoughts = first.choices[0].message.content or ""  # the model does not close them
                assert first.usage
                prompt = first.usage.prompt_tokens
                read, why = second_turn(engine, api, question, thoughts, keeps)
                begins = prompt - len("think>")  # "</think>" is left of the earlier turn
                wanted = (prompt + 20, None) if keeps else (begins, f"history rewritten from token {begins}")
                assert (read, why) == wanted, api
