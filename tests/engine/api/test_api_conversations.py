"""OpenAI's Conversations API, with OpenAI's own client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import openai
import pytest
import redis
from api_engines import RunningEngine, start_engine, write_tiny
from openai.types.conversations import (
    Conversation,
    ConversationCreateParams,
    ConversationUpdateParams,
    ItemCreateParams,
    ItemListParams,
    ItemRetrieveParams,
)
from servers import RunningServer

from engine.api.openai.errors import ApiError
from engine.api.records import ConversationRecords, Records

DOCS = (Path(__file__).parents[3] / "docs" / "responses.md").read_text(encoding="utf-8")
UNKNOWN = f"conv_{32 * '0'}"


def message(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def create(client: openai.OpenAI, conversation: str, text: str) -> Any:
    return client.responses.create(
        model="tiny", input=text, conversation=conversation, max_output_tokens=4, temperature=0
    )


def texts(client: openai.OpenAI, conversation: str, **options: Any) -> list[str]:
    items = client.conversations.items.list(conversation, **options)
    return [item.model_dump()["content"][0]["text"] for item in items]


@pytest.fixture(scope="module")
def one(tenants: RunningEngine) -> Iterator[openai.OpenAI]:
    with tenants.client("one") as client:
        yield client


def test_a_conversation_continues_at_another_engine(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model, "--store", server.url, "--keep", "all") as engine, engine.client() as client:
        made = client.conversations.create(items=[message("Be brief.", "system")], metadata={"a": "b"})
        first = create(client, made.id, "Hello")
        assert first.conversation.id == made.id
        second = create(client, made.id, "More")
        usage = second.usage
        assert usage.input_tokens_details.cached_tokens >= 0.98 * first.usage.total_tokens - 1
        asked = [f"{role}:{text}\n" for role, text in (("system", "Be brief."), ("user", "Hello"))]
        history = [*asked, f"assistant:{first.output_text}\n", "user:More\n", "assistant:"]
        assert usage.input_tokens == len("".join(history))
    with start_engine(model, "--store", server.url) as engine, engine.client() as client:
        third = create(client, made.id, "And more")
        assert third.usage.input_tokens_details.cached_tokens >= 0.98 * usage.total_tokens - 1
        said = ["Be brief.", "Hello", first.output_text, "More", second.output_text, "And more", third.output_text]
        assert texts(client, made.id, order="asc", limit=2) == said
        assert texts(client, made.id) == said[::-1]
        with pytest.raises(openai.BadRequestError, match="name the conversation"):
            client.responses.create(model="tiny", input="More", previous_response_id=third.id)


def test_a_conversation_is_changed(one: openai.OpenAI) -> None:
    made = one.conversations.create()
    assert one.conversations.retrieve(made.id) == made
    assert one.conversations.update(made.id, metadata={"topic": "rivers"}).metadata == {"topic": "rivers"}
    added = one.conversations.items.create(made.id, items=[message("One"), message("Two")])
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
    for item in added.data:
        assert one.conversations.items.retrieve(str(item.id), conversation_id=made.id) == item
    kept = one.conversations.items.delete(str(added.data[0].id), conversation_id=made.id)
    assert (kept.id, kept.metadata) == (made.id, {"topic": "rivers"})
    assert texts(one, made.id) == ["Two"]
    with pytest.raises(openai.NotFoundError, match="no item"):
        one.conversations.items.retrieve(str(added.data[0].id), conversation_id=made.id)
    assert one.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        one.conversations.retrieve(made.id)


def test_references_name_items_of_conversations(one: openai.OpenAI, tenants: RunningEngine) -> None:
    """And conversations take references: to items of conversations and of responses."""
    made = one.conversations.create(items=[message("One"), message("Two")])
    answer = create(one, made.id, "Three").output[0]
    first, second, third, _ = one.conversations.items.list(made.id, order="asc").data
    listed: list[Any] = [{"type": "item_reference", "id": item.id} for item in (third, first, answer)]
    copy = one.conversations.create(items=[message("Zero"), *listed])
    other: list[Any] = [{"type": "item_reference", "id": second.id}]
    one.conversations.items.create(copy.id, items=other)
    assert texts(one, copy.id, order="asc") == ["Zero", "Three", "One", answer.content[0].text, "Two"]
    referred = one.responses.create(model="tiny", input=other, max_output_tokens=4)
    assert referred.usage
    assert referred.usage.input_tokens == len("user:Two\nassistant:")
    with pytest.raises(openai.BadRequestError, match=f"Duplicate item found with id '{second.id}'"):
        one.conversations.items.create(made.id, items=other)
    with tenants.client("two") as client, pytest.raises(openai.NotFoundError, match="not found") as raised:
        client.conversations.create(items=other)
    assert raised.value.param == "items"
    one.conversations.items.delete(str(second.id), conversation_id=made.id)
    for items in (other, [*other, message("More")]):
        with pytest.raises(openai.NotFoundError, match="not found"):
            one.conversations.items.create(made.id, items=items)
    one.conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        one.responses.create(model="tiny", input=[listed[1]])
    assert len(texts(one, copy.id)) == 5


def test_a_page_of_long_items_has_fewer(one: openai.OpenAI, tenants: RunningEngine) -> None:
    """Together they are longer than a body."""
    made = one.conversations.create()
    said = [letter * 400_000 for letter in "abcde"]
    for text in said:
        one.conversations.items.create(made.id, items=[message(text)])
    page = one.conversations.items.list(made.id, limit=100, order="asc")
    assert [len(page.data), page.has_more] == [2, True]
    assert texts(one, made.id, limit=100, order="asc") == said
    one.conversations.delete(made.id)


async def test_items_that_no_conversation_has_are_not_kept(
    server: RunningServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response may end after its conversation was deleted."""
    monkeypatch.setattr("engine.api.records.MAX_ITEMS", 2)
    conversations = ConversationRecords(Records(server.url, 40))
    items = [{"id": f"item_{i}", "text": "A secret"} for i in range(3)]
    made = f"conv_{32 * '1'}"
    await conversations.create("", made, {}, items[:1])
    ids = [item["id"] for item in items[:1]] * 70
    assert len(await conversations.items("", made, ids)) == 70
    monkeypatch.setattr("engine.api.records.MOST_READ", 100)
    with pytest.raises(ApiError, match="the conversation before it has more than"):
        await conversations.items("", made, ids)
    with pytest.raises(ApiError, match="at most 2"):
        await conversations.append("", made, items[1:])
    assert len(client.keys(f"item:*{made}*")) == 1
    assert await conversations.delete("", made)
    assert not await conversations.append("", made, items[1:])
    assert not client.keys(f"*{made}*")


def test_a_conversation_is_found_by_its_tenant_only(one: openai.OpenAI, tenants: RunningEngine) -> None:
    made = one.conversations.create(items=[message("A secret")])
    item = one.conversations.items.list(made.id).data[0].id
    with tenants.client("two") as other:
        asks: list[Any] = [
            lambda: other.conversations.retrieve(made.id),
            lambda: other.conversations.update(made.id, metadata={}),
            lambda: other.conversations.delete(made.id),
            lambda: other.conversations.items.list(made.id),
            lambda: other.conversations.items.create(made.id, items=[message("Hello")]),
            lambda: other.conversations.items.retrieve(str(item), conversation_id=made.id),
            lambda: other.conversations.items.delete(str(item), conversation_id=made.id),
            lambda: create(other, made.id, "Hello"),
            lambda: create(other, UNKNOWN, "Hello"),
        ]
        for ask in asks:
            with pytest.raises(openai.NotFoundError, match="there is no conversation"):
                ask()
    assert isinstance(one.conversations.retrieve(made.id), Conversation)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [message("Hello")] * 21}, "items"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"items": [{"type": "web_search_call"}]}, "items"),
        (f"/{UNKNOWN}/items", {}, "items"),
    ],
)
def test_a_wrong_field_is_named(tenants: RunningEngine, path: str, body: dict[str, Any], param: str) -> None:
    url = f"{tenants.url}/v1/conversations{path}"
    reply = httpx.post(url, json=body, headers={"Authorization": "Bearer one"}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_every_parameter_of_openais_types_is_documented() -> None:
    section = DOCS.split("## Conversations")[1].partition("\n## ")[0]
    kinds = (ConversationCreateParams, ConversationUpdateParams, ItemCreateParams, ItemListParams, ItemRetrieveParams)
    names = {name for kind in kinds for name in get_type_hints(kind)} - {"conversation_id"}
    rows = re.findall(r"^\| (`.*`).* \| (?:honoured|ignored) \|", section, re.MULTILINE)
    assert names == {name for row in rows for name in re.findall("`(.*?)`", row)}
