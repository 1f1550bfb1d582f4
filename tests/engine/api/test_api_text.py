"""The text of answers over HTTP: first spaces, parts of characters, tokens without a text, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_engines import END, TEMPLATE, RunningEngine, start_engine, write_speaker
from chat_families import FAMILIES
from engine_models import letter_tokenizer

# isort: split
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from engine.api.openai.shapes import TextLikelihoods
from engine.generation.text import TokenText
from engine.scheduling.request import Token

SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2"
PADDED = 20  # rows of a model past its tokenizer's vocabulary


@pytest.fixture(scope="module")
def real(smollm2: RunningEngine) -> Iterator[openai.OpenAI]:
    with smollm2.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(SMOLLM2)


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(**{"model": "smollm2", "prompt": prompt, "temperature": 0, **more})


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["def f(n):\n   ", "The capital of France is"])
def test_completion_continues_its_prompt(real: openai.OpenAI, tokenizer: TokenizerWrapper, prompt: str) -> None:
    (choice,) = complete(real, prompt, max_tokens=6, logprobs=1).choices
    assert choice.text.startswith(" ")
    streamed = [chunk.choices[0] for chunk in complete(real, prompt, max_tokens=6, logprobs=1, stream=True)]
    assert "".join(part.text for part in streamed) == choice.text
    answer = tokenizer.encode(prompt + choice.text)[len(tokenizer.encode(prompt)) :]
    assert tokenizer.decode(tokenizer.encode(prompt) + answer)[len(prompt) :] == choice.text
    assert "".join(choice.logprobs.tokens) == choice.text
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    assert [offset for part in streamed for offset in part.logprobs.text_offset] == choice.logprobs.text_offset


@pytest.mark.model
def test_next_turn_of_a_text_reuses_the_whole_answer(real: openai.OpenAI) -> None:
    prompt, agent = "def f(n):\n   ", {"agent_id": "coder"}
    first = complete(real, prompt, max_tokens=6, extra_body=agent)
    second = complete(real, prompt + first.choices[0].text, max_tokens=6, extra_body=agent)
    assert second.kvpage["tokens_reused"] == first.usage.total_tokens - 1 == second.usage.prompt_tokens - 1


@pytest.mark.model
def test_a_stop_string_may_begin_with_the_first_space(real: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "stop": [" Paris"]}
    whole = complete(real, "The capital of France is", **options)
    streamed = list(complete(real, "The capital of France is", stream=True, **options))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("", "stop")
    assert "".join(chunk.choices[0].text for chunk in streamed) == ""


@pytest.mark.model
def test_answer_completes_the_character_that_a_prompt_begins(real: openai.OpenAI, tokenizer: TokenizerWrapper) -> None:
    tokens = tokenizer.encode("🦭🦭🦭🦭")
    assert tokenizer.decode(tokens[:-1]).endswith("\ufffd")
    (choice,) = complete(real, tokens[:-1], max_tokens=1, logprobs=5).choices
    assert choice.logprobs.text_offset == [0]
    assert all(len(top) == 5 for top in choice.logprobs.top_logprobs)
    parts = [text for text in choice.logprobs.top_logprobs[0] if "\\x" in text]
    assert parts, "the likeliest tokens are parts of characters"
    chat = real.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Repeat: 🦭🦭🦭🦭🦭"}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=5,
    )
    entries = chat.choices[0].logprobs.content
    encoded = b"".join(bytes(token.bytes) for token in entries)
    assert encoded.decode("utf-8", "replace").removesuffix("\ufffd").startswith(chat.choices[0].message.content[:-1])
    assert all(token.bytes is not None for entry in entries for token in (entry, *entry.top_logprobs))


def byte_level() -> tuple[Any, list[int]]:
    """A tokenizer, and an answer between padding rows: a space, "Ok", the byte 0, a part of a character."""
    letters = letter_tokenizer()
    letters.add_tokens(["Ā", "â", "Ok"])
    tokens = [":", "Ġ", 101, "Ok", 102, "Ā", "â", END]
    return letters, [token if isinstance(token, int) else letters.convert_tokens_to_ids(token) for token in tokens]


def sentence_piece() -> tuple[Any, list[int]]:
    spm = FAMILIES["Phi 3"].wrapper()
    size = len(spm)
    end = spm.eos_token_id
    tokens = [":", "▁t", size + 1, "he", size + 2, "<0x00>", "<0xE2>"]
    return spm, [*(token if isinstance(token, int) else spm.convert_tokens_to_ids(token) for token in tokens), end]


@pytest.fixture(scope="module", params=[byte_level, sentence_piece])
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose model says tokens that its tokenizer does not have, the tokens, and their text."""
    tokenizer, tokens = request.param()
    size = len(tokenizer)
    model = write_speaker(
        tmp_path_factory.mktemp("models") / "padded", tokenizer, tokens, size + PADDED, template=TEMPLATE
    )
    text = " Ok\0\ufffd" if request.param is byte_level else " the\0\ufffd"
    with start_engine(model) as engine:
        yield engine, tokens, text


def test_tokens_without_a_spelling_are_empty_text(padded: tuple[RunningEngine, list[int], str]) -> None:
    engine, tokens, text = padded
    padding = tokens[2]
    with engine.client() as client:
        options: Any = {"model": "padded", "temperature": 0, "max_tokens": 20}
        whole = client.completions.create(**options, prompt=[padding, tokens[0]], logprobs=20)
        streamed = list(client.completions.create(**options, prompt=[padding, tokens[0]], logprobs=20, stream=True))
        question: Any = [{"role": "user", "content": "a"}]
        chat = client.chat.completions.create(**options, messages=question, logprobs=True, top_logprobs=20)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason, whole.usage.completion_tokens) == (text, "stop", len(tokens) - 2)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    assert chat.choices[0].message.content == text
    first = text[:2] if text.startswith(" t") else " "
    rest = text.removeprefix(first).removesuffix("\0\ufffd")
    assert choice.logprobs.tokens == [first, "", rest, "", "\0", "\\xe2"]
    start = len(first)
    assert choice.logprobs.text_offset == [0, start, start, *[start + len(rest)] * 2, len(text) - 1]
    assert [top.bytes for top in chat.choices[0].logprobs.content] == [
        list(part.encode()) for part in (first, "", rest, "", "\0")
    ] + [[0xE2]]


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_equal_texts_are_not_merged(kind: Any) -> None:
    tokenizer, (colon, *_) = kind()
    padding = [len(tokenizer) + i for i in range(3)]
    likeliest = [(padding[0], -0.5), (colon, -1.0), (padding[1], -2.0), (padding[2], -3.0)]
    token = Token(0, padding[1], "", False, -2.0, tuple(likeliest))
    other = Token(0, colon, ":", False, -1.0, tuple(likeliest))
    shown = TextLikelihoods(TokenText(tokenizer), [colon], 4).of([token, other])
    assert shown["tokens"] == ["", ":"]
    names = [f"token_id:{i}" for i in padding]
    assert shown["top_logprobs"] == [
        {names[0]: -0.5, ":": -1.0, "": -2.0, names[2]: -3.0},
        {"": -0.5, ":": -1.0, names[1]: -2.0, names[2]: -3.0},
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_token_of_an_answer_has_its_logprob_under_its_text(count: int) -> None:
    """OpenAI's API returns up to one more than `logprobs`."""
    tokenizer, (colon, *_) = byte_level()
    padding = [len(tokenizer), len(tokenizer) + 1]
    likeliest = ((padding[0], -0.5), (colon, -1.0), (padding[1], -2.0))
    for token, logprob in likeliest:
        answer = TextLikelihoods(TokenText(tokenizer), [colon], count)
        shown = answer.of([Token(0, token, "", False, logprob, likeliest[:count])])
        (text,), (top,) = shown["tokens"], shown["top_logprobs"]
        assert top[text] == logprob
        assert sorted(top.values(), reverse=True) == sorted({*dict(likeliest[:count]).values(), logprob}, reverse=True)
