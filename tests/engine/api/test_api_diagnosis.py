"""Why a prompt was not found: forty generated edits of a conversation, evicted prompts, volatile lines of a system.

A token of the tiny models is a letter or the mark of a call, so this test knows the tokens of every prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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

from engine.agent_engine import Answer, Reuse
from engine.api.diagnosis import AskedPrompt, common_prefix, diagnosis
from engine.api.openai.schema import ChatBody

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
        "diagnostics": {"previous_message_id": earlier},
        **({} if body["system"] is None else {"system": body["system"]}),
    }
    with anthropic.Anthropic(base_url=engine.url, api_key=engine.token, max_retries=0) as client:
        message = client.messages.create(model=model, max_tokens=1, **asked)
    reason = message.diagnostics and message.diagnostics.cache_miss_reason
    return message.id, reason and reason.model_dump()


def ask_responses(
    engine: RunningEngine, body: Body, earlier: str | None = None, model: str = "tiny"
) -> tuple[str, Any]:
    """Return the id of a response, and its diagnosis."""
    asked: Any = {
        "input": [{"role": role, "content": text} for role, text in body["messages"]],
        "tools": [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in body["tools"]],
        "prompt_cache_options": {"comparison_response_id": earlier} if earlier else {},
        **({} if body["system"] is None else {"instructions": body["system"]}),
    }
    with engine.client(engine.token) as client:
        response = client.responses.create(model=model, max_output_tokens=1, **asked)
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


def test_an_evicted_prompt_is_named_with_its_cost(tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "2mb") as engine:
        body = {**conversation(Random(3)), "tools": []}
        ids = ask_messages(engine, body)[0], ask_responses(engine, body)[0]
        assert ask_messages(engine, body, ids[0])[1] is None
        for i in range(40):
            ask_messages(engine, {**conversation(Random(10 + i)), "tools": []})
        lost = ask_messages(engine, body, ids[0])[1]
        assert lost["type"] == "unavailable"
        assert lost["evicted_tokens"] > 100
        assert lost["evicted_why"] == "evicted"
        assert lost["seconds"] > 0
        for i in range(40):
            ask_messages(engine, {**conversation(Random(60 + i)), "tools": []})
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
            for i in range(40):
                ask(words(Random(10 + i), 30))
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
    """A prompt is compared with an earlier one of which no token is left."""
    body = ChatBody.of({"model": "a", "messages": [{"role": "user", "content": "Hello"}]})
    earlier, prompt = (AskedPrompt.of("", None, "", body) for _ in range(2))
    for one in (earlier, prompt):
        one.tokens.extend(range(100))
        one.answered = True
    answer = Answer(0, "", "", (), "stop", None, 100, Reuse(prefill_seconds=1.0))
    for seconds, why in ((-1, "expired"), (60, "evicted"), (None, "evicted")):
        earlier.kept_until = time.time() + seconds if seconds else 0.0
        found = diagnosis(earlier, prompt, answer)
        assert found.lost == (99, why)
        assert prompt.why(earlier, 0) == why


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
