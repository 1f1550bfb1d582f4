"""Several models in one process: each is loaded for its first request, and unloaded when others need its memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_engines import SMOLLM2, RunningEngine, start_engine, write_tiny
from engine_models import write_adapter
from servers import RunningServer
from waiting import eventually

# isort: split
import mlx.core as mx

from engine import cli
from engine.memory.limits import set_limits

HELLO = "hello " * 60
TOKENS = 300  # of a prompt with HELLO, at least: a block and more


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one architecture, whose weights differ."""
    directory = tmp_path_factory.mktemp("models")
    return [write_tiny(directory / name, seed=seed) for seed, name in enumerate(("ant", "bee", "cat"), start=1)]


@pytest.fixture
def store(server: RunningServer) -> str:
    """The URL of an empty page server."""
    with server.client() as client:
        client.flushall()
    return server.url


@pytest.fixture(scope="module")
def budget() -> int:
    """Bytes of weights and contexts that all models together may have on this machine."""
    before = mx.get_memory_limit()
    limits = set_limits()
    mx.set_memory_limit(before)
    return limits.mlx - limits.cache


@contextmanager
def serving(models: list[Path], *options: str, share: float = 0.1, budget: int = 1 << 30) -> Iterator[RunningEngine]:
    """An engine of several models; each may fill the given share of the budget with contexts."""
    memory = round(share * budget * len(models))
    others = [word for model in models[1:] for word in ("--model", str(model))]
    with start_engine(models[0], *others, "--memory", str(memory), *options) as engine:
        yield engine


def chat(client: openai.OpenAI, model: str, content: str = HELLO, **more: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 8, **more}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **options)  # type: ignore[call-overload]


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def reused(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def loaded(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list() if model.kvpage["loaded"]]  # type: ignore[attr-defined]


def alone(model: Path, name: str) -> str:
    with start_engine(model) as engine, engine.client() as client:
        return text(chat(client, name))


def test_a_model_is_loaded_for_its_first_request(tinies: list[Path]) -> None:
    with serving(tinies) as engine, engine.client() as client:
        assert [model.id for model in client.models.list()] == ["ant", "bee", "cat"]
        assert loaded(client) == ["ant"]
        answers = {name: text(chat(client, name)) for name in ("bee", "ant")}
        assert loaded(client) == ["ant", "bee"]
        assert client.models.retrieve("cat").kvpage["loaded"] is False  # type: ignore[attr-defined]
        metrics = httpx.get(f"{engine.url}/metrics").text
        assert 'kvpage_engine_answers_total{finish_reason="length",model="bee",tier="none"} 1.0' in metrics
        assert 'kvpage_engine_model_loaded{model="cat"} 0.0' in metrics
        assert 'kvpage_engine_pool_used_bytes{model="ant"}' in metrics
        assert 'kvpage_engine_pool_used_bytes{model="cat"}' not in metrics
    assert answers == {"ant": alone(tinies[0], "ant"), "bee": alone(tinies[1], "bee")}


def test_each_api_chooses_the_model(tinies: list[Path]) -> None:
    with serving(tinies[:2]) as engine, engine.client() as client:
        other = anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0)
        given: Any = {
            "max_tokens": 8,
            "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": HELLO}],
        }
        for name in ("ant", "bee"):
            expected = text(chat(client, name))
            assert (
                client.responses.create(model=name, input=HELLO, temperature=0, max_output_tokens=8).output_text
                == expected
            )
            assert other.messages.create(model=name, **given).content[0].text == expected  # type: ignore[union-attr]
            counted = other.messages.count_tokens(model=name, messages=given["messages"])
            assert counted.input_tokens > TOKENS
        for ask in (
            lambda: chat(client, "dog"),
            lambda: client.completions.create(model="dog", prompt="x"),
            lambda: client.responses.create(model="dog", input="x"),
            lambda: client.models.retrieve("dog"),
        ):
            with pytest.raises(openai.NotFoundError, match="'dog' is not served here, 'ant' and 'bee' are"):
                ask()
        with pytest.raises(anthropic.NotFoundError, match="'dog' is not served here, 'ant' and 'bee' are"):
            other.messages.create(model="dog", **given)


def test_parallel_streams_of_two_models_are_right(tinies: list[Path]) -> None:
    """Each stream has the tokens of a run alone, and the models do not wait for each other."""
    with serving(tinies[:2]) as engine, engine.client() as client:

        def stream(number: int) -> tuple[str, str]:
            name = ("ant", "bee")[number % 2]
            chunks = chat(client, name, f"{number} {HELLO}", max_tokens=64, stream=True)
            return name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(stream, range(16)))
        for number, (name, found) in enumerate(together):
            assert text(chat(client, name, f"{number} {HELLO}", max_tokens=64)) == found


def test_the_longest_unused_model_is_unloaded_and_continues(tinies: list[Path], store: str, budget: int) -> None:
    """Two of three models fit. The contexts of the third are restored from the store, with and without a name."""
    options = ("--store", store, "--keep", "all")
    with serving(tinies, *options, share=0.4, budget=budget) as engine, engine.client() as client:
        first = {name: chat(client, name, user="anne") for name in ("ant", "bee")}
        assert [reused(answer) for answer in first.values()] == [0, 0], "contexts of different models are different"
        assert text(first["ant"]) != text(first["bee"])
        chat(client, "ant", "hi")
        chat(client, "cat", "hi")
        assert loaded(client) == ["ant", "cat"]
        again = chat(client, "bee", user="anne")
        assert loaded(client) == ["bee", "cat"]
        assert (reused(again), text(again)) == (again.usage.prompt_tokens - 1, text(first["bee"]))
        assert again.kvpage["tier"] == "page"
        agents = httpx.get(f"{engine.url}/v1/agents?model=ant").json()["data"]
        assert [(agent["id"], agent["model"], agent["saved"]) for agent in agents] == [("anne", "ant", True)]
        unnamed = chat(client, "ant")
        assert (reused(unnamed), text(unnamed)) == (unnamed.usage.prompt_tokens - 1, text(first["ant"]))
        assert httpx.delete(f"{engine.url}/v1/agents/anne").status_code == 200
        assert [httpx.get(f"{engine.url}/v1/agents/anne?model={name}").status_code for name in ("ant", "bee")] == [
            404
        ] * 2


def test_files_of_agents_are_kept_for_each_model(tinies: list[Path], tmp_path: Path, budget: int) -> None:
    with serving(tinies[:2], "--cold", str(tmp_path / "cold"), share=0.6, budget=budget) as engine:
        with engine.client() as client:
            first = {name: chat(client, name, user="anne") for name in ("ant", "bee")}
            again = {name: chat(client, name, user="anne") for name in ("ant", "bee")}
        assert [text(answer) for answer in first.values()] == [text(answer) for answer in again.values()]
        assert all(answer.kvpage["tier"] == "cold" for answer in again.values())
        assert httpx.delete(f"{engine.url}/v1/agents/anne").status_code == 200
        assert list((tmp_path / "cold").rglob("anne*")) == []


def test_a_model_with_a_running_answer_is_not_unloaded(tinies: list[Path], budget: int) -> None:
    """The other model's request waits for it. Further requests for the first model wait for their turn, too."""
    with serving(tinies[:2], share=0.6, budget=budget) as engine, engine.client() as client:
        expected = text(chat(client, "ant", max_tokens=600))
        began = iter(chat(client, "ant", max_tokens=600, stream=True))
        next(began)
        with ThreadPoolExecutor(2) as threads:
            other = threads.submit(chat, client, "bee")
            assert eventually(lambda: engine.metric("pending") == 2)
            behind = threads.submit(chat, client, "ant")
            assert eventually(lambda: engine.metric("pending") == 3)
            assert loaded(client) == []
            rest = "".join(chunk.choices[0].delta.content or "" for chunk in began)
            assert rest == expected
            assert text(other.result()) != text(behind.result())
        assert loaded(client) == ["ant"]


def test_waiting_requests_are_bounded_and_may_leave(tinies: list[Path], budget: int) -> None:
    options = ("--max-queue", "2")
    with serving(tinies[:2], *options, share=0.6, budget=budget) as engine, engine.client() as client:
        running = iter(chat(client, "ant", max_tokens=2000, stream=True))
        next(running)
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.5), "bee")
        assert eventually(lambda: engine.metric("pending") == 1)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(chat, client, "bee")
            assert eventually(lambda: engine.metric("pending") == 2)
            with pytest.raises(openai.RateLimitError, match="the queue is full") as refused:
                chat(client, "bee")
            assert refused.value.response.headers["retry-after"] == "1"
            running.close()  # type: ignore[attr-defined]
            assert len(text(waiting.result())) == 8


def test_a_model_that_never_fits_is_refused_with_the_sizes(tinies: list[Path], tmp_path: Path, budget: int) -> None:
    huge = tmp_path / "huge"
    huge.mkdir()
    with (huge / "model.safetensors").open("wb") as weights:
        weights.truncate(2 * budget)
    with serving([tinies[0], huge]) as engine, engine.client() as client:
        with pytest.raises(
            openai.InternalServerError, match=r"'huge' needs .* GB \(.* of weights, .*\), and all"
        ) as refused:
            chat(client, "huge")
        assert (refused.value.status_code, refused.value.code) == (503, "model_too_large")
        assert refused.value.response.headers["retry-after"] == "60"
        assert loaded(client) == ["ant"]
    with pytest.raises(RuntimeError, match="'ant' needs"), serving(tinies[:2], share=1.5, budget=budget):
        pass


def test_a_broken_model_is_reported_and_others_go_on(tinies: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tinies[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 32}), encoding="utf-8")
    with serving([tinies[0], broken]) as engine, engine.client() as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="'broken' cannot be loaded: the model in") as refused:
                chat(client, "broken")
            assert (refused.value.status_code, refused.value.code) == (503, "model_unavailable")
        assert text(chat(client, "ant"))
        (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert text(chat(client, "broken"))


def test_an_adapter_belongs_to_the_model_of_its_name(tinies: list[Path], tmp_path: Path, store: str) -> None:
    pirate = write_adapter(tmp_path / "pirate", 1)
    options = ("--model", f"plain={tinies[0]}", "--adapter", f"ant={pirate}", "--store", store, "--keep", "all")
    with start_engine(tinies[0], *options) as engine, engine.client() as client:
        assert [model.id for model in client.models.list()] == ["ant+pirate", "plain"]
        answers = [chat(client, name) for name in ("ant+pirate", "plain")]
        assert [reused(answer) for answer in answers] == [0, 0]
        assert text(answers[0]) != text(answers[1]) == alone(tinies[0], "ant")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "{ant}", "--model", "{ant}"], "two models have the name 'ant': give them other names with"),
        (["--model", "{ant}", "--model", "{bee}", "--name", "x"], "--name is for one model"),
        (["--model", "{ant}", "--model", "{bee}", "--adapter", "{cat}"], "--adapter with several models names one"),
        (["--model", "{ant}", "--adapter", "bee={cat}"], "--adapter: there is no model 'bee'"),
        (["--model", "{ant}", "--model", "no/such-model"], "no/such-model is neither a directory nor the id of"),
    ],
)
def test_unclear_models_end_the_start_with_a_reason(
    tinies: list[Path], capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    paths = {path.name: path for path in tinies}
    assert cli.main(["serve", "--port", "0", *(word.format(**paths) for word in words)]) == 1
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_memory_is_bounded_however_often_models_are_loaded(tmp_path: Path, budget: int) -> None:
    sizes: Any = {"hidden_size": 512, "intermediate_size": 2048}
    models = [write_tiny(tmp_path / name, seed=seed, **sizes) for seed, name in enumerate("ab")]
    nbytes = (models[0] / "model.safetensors").stat().st_size
    with serving(models, share=0.6, budget=budget) as engine, engine.client() as client:
        used = []
        for _ in range(4):
            for name in "ab":
                chat(client, name, "hi")
                used.append(engine.rss())
    assert max(used) - used[1] < nbytes < 2 * nbytes


def test_the_contexts_of_all_models_are_saved_at_the_end(tinies: list[Path], store: str) -> None:
    for turn in range(2):
        with serving(tinies, "--store", store, "--keep", "named") as engine, engine.client() as client:
            answers = [chat(client, name, user="zoe") for name in ("ant", "bee", "cat")]
        assert all((reused(answer) > TOKENS) == bool(turn) for answer in answers)


def test_tenants_have_their_own_agents_of_each_model(tinies: list[Path], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a one\nb two\n", encoding="utf-8")
    with serving(tinies[:2], "--token-file", str(tokens)) as engine, engine.client("one") as one:
        for name in ("ant", "bee"):
            assert reused(chat(one, name, user="anne")) == 0
            with engine.client("two") as two:
                assert reused(chat(two, name)) == 0
        (shown,) = [
            httpx.get(f"{engine.url}/v1/agents", headers={"Authorization": f"Bearer {token}"}).json()["data"]
            for token in ("one",)
        ]
        assert [(agent["id"], agent["model"]) for agent in shown] == [("anne", "ant"), ("anne", "bee")]
        other = httpx.get(f"{engine.url}/v1/agents", headers={"Authorization": "Bearer two"}).json()["data"]
        assert other == []


@pytest.mark.model
async def test_running_streams_continue_while_a_model_is_loaded(tinies: list[Path]) -> None:
    """SmolLM2 is loaded, which takes seconds, while the tokens of the tiny model arrive."""
    with serving([tinies[0], SMOLLM2]) as engine:
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=60) as client:
            question: Any = [{"role": "user", "content": "What is the capital of France?"}]
            asked = asyncio.create_task(
                client.chat.completions.create(model="smollm2", messages=question, temperature=0, max_tokens=8)
            )
            tokens, began = 0, time.monotonic()
            while not asked.done():
                stream = await client.chat.completions.create(
                    model="ant", messages=question, max_tokens=200, stream=True, temperature=0
                )
                async for _ in stream:
                    tokens += 1
            assert tokens > 20 * (time.monotonic() - began), "tokens a second"
            assert "Paris" in text(await asked)
