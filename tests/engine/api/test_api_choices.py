"""Several answers to a request: `n`, `best_of`, lists of prompts and `echo`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
from api_engines import RunningEngine

HELLO = [{"role": "user", "content": "Hello"}]


def chat(api: openai.OpenAI, **more: Any) -> Any:
    return api.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "temperature": 1, "seed": 5, "max_tokens": 12, **more}
    )


def complete(api: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return api.completions.create(
        **{"model": "tiny", "prompt": prompt, "temperature": 1, "seed": 5, "max_tokens": 8, **more}
    )


def test_n_answers_are_the_answers_of_following_seeds(api: openai.OpenAI) -> None:
    together = chat(api, n=4)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in together.choices]
    assert texts == [chat(api, seed=5 + i).choices[0].message.content for i in range(4)]
    assert len({*texts}) == 4
    one = chat(api).usage
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (one.prompt_tokens, 48)


def test_metrics_count_a_prompt_of_n_answers_once(engine: RunningEngine, api: openai.OpenAI) -> None:
    names = ("prompt_tokens_total", "reused_tokens_total", "answers_total", "generated_tokens_total")
    for prompt in ([20, 21, 22, 23], [20, 21, 22, 23, 24, 25]):
        before = [engine.metric(name) for name in names]
        usage = complete(api, prompt, n=4, max_tokens=2).usage
        counts = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, 4, usage.completion_tokens
        assert [engine.metric(name) - count for name, count in zip(names, before, strict=True)] == [*counts]


def test_a_stream_of_n_answers_has_the_index_in_each_chunk(api: openai.OpenAI) -> None:
    texts: dict[int, str] = defaultdict(str)
    roles, reasons, usages = [], {}, []
    for chunk in chat(api, n=3, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    whole = chat(api, n=3)
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert (roles, reasons) == ([0, 1, 2], {0: "length", 1: "length", 2: "length"})
    assert [usage.completion_tokens for usage in usages] == [36]
    more: Any = {"include_usage": True, "continuous_usage_stats": True}
    for stream in (
        chat(api, n=3, stream=True, stream_options=more),
        complete(api, ["Hello", "Good day"], max_tokens=18, stream=True, stream_options=more),
    ):
        *running, last = [chunk.usage for chunk in stream]
        assert [usage.completion_tokens for usage in running] == sorted(usage.completion_tokens for usage in running)
        assert {usage.prompt_tokens for usage in running} == {last.prompt_tokens}
        assert running[-1].completion_tokens == last.completion_tokens == 36


def test_the_first_answer_is_the_context_of_the_agent(api: openai.OpenAI) -> None:
    first = chat(api, n=3, extra_body={"agent_id": "alice"})
    history = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}]
    again = chat(api, messages=[*history, *HELLO], extra_body={"agent_id": "alice"})
    assert again.kvpage["tokens_reused"] >= first.usage.prompt_tokens + 10


def test_a_list_of_prompts_has_an_answer_for_each(api: openai.OpenAI) -> None:
    prompts = ["one", "two and more", "three"]
    together = complete(api, prompts, n=2)
    alone = [complete(api, prompt, seed=seed).choices[0].text for prompt in prompts for seed in (5, 6)]
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [*range(6)]
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    ids = complete(api, [[10, 11], [12]])
    assert [choice.text for choice in ids.choices] == [
        complete(api, prompt).choices[0].text for prompt in ([10, 11], [12])
    ]


def test_echo_returns_the_prompt_before_the_answer(api: openai.OpenAI) -> None:
    plain = complete(api, "Once upon").choices[0].text
    assert complete(api, "Once upon", echo=True).choices[0].text == "Once upon" + plain
    stream = complete(api, "Once upon", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Once upon" + plain
    (ids,) = complete(api, [10, 11, 12], echo=True).choices
    assert len(ids.text) == 3 + 8


def test_best_of_returns_the_likeliest_answers(api: openai.OpenAI) -> None:
    best = complete(api, "Once upon", best_of=5, n=2)
    every = complete(api, "Once upon", n=5, logprobs=0)
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 8 for choice in every.choices}
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 40


def test_a_closed_stream_of_n_answers_frees_the_engine(engine: RunningEngine, api: openai.OpenAI) -> None:
    stream = chat(api, n=4, max_tokens=3000, stream=True)
    next(iter(stream))
    stream.close()
    answer = chat(api, max_tokens=2)
    assert answer.usage.completion_tokens == 2
    assert engine.metric("pending") == 0
