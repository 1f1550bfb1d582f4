"""`suffix`: a text between two others, in the format of the model's family."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from api_engines import start_engine, write_coder
from engine_models import letter_tokenizer

# isort: split
from tokenizers import AddedToken

from engine.generation.tokens import infill_of

FAMILIES = {  # the tokens of a family, and how it writes "ab" before and " c" after the answer
    "Qwen2.5-Coder": (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        "<|fim_prefix|>ab<|fim_suffix|> c<|fim_middle|>",
    ),
    "StarCoder": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix> c<fim_middle>"),
    "DeepSeek-Coder": (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],  # noqa: RUF001
        "<｜fim▁begin｜>ab<｜fim▁hole｜> c<｜fim▁end｜>",  # noqa: RUF001
    ),
    "CodeLlama": (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>ab▁<SUF> c▁<MID>"),
    "Codestral": (["[PREFIX]", "[SUFFIX]"], "[SUFFIX] c[PREFIX]ab"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_format_of_its_family(family: str) -> None:
    marks, expected = FAMILIES[family]
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    infill = infill_of(tokenizer)
    assert infill
    assert infill.prompt(tokenizer, "ab", " c") == tokenizer.encode(expected, add_special_tokens=False)
    assert len(infill.ends) == (family == "CodeLlama")


def test_a_model_without_such_tokens_has_none() -> None:
    assert infill_of(letter_tokenizer()) is None


def test_a_coder_reuses_the_text_before_the_gap(tmp_path: Path) -> None:
    with start_engine(write_coder(tmp_path / "coder")) as engine, engine.client() as api:
        before = "def add(a, b):\n    " * 20

        def ask(suffix: str, **more: object) -> openai.types.Completion:
            options: dict[str, object] = {"model": "coder", "prompt": before, "temperature": 0, "max_tokens": 5}
            return api.completions.create(suffix=suffix, **{**options, **more})  # type: ignore[call-overload]

        first, second = ask("print(1)"), ask("print(2)")
        assert first.usage.prompt_tokens == len(before) + len("print(1)") + 3
        assert second.usage.prompt_tokens_details.cached_tokens >= len(before)
        assert ask("print(1)").choices[0].text == first.choices[0].text
        assert ask("").usage.prompt_tokens == len(before)
        with pytest.raises(openai.BadRequestError, match="suffix: the prompt before it must be a text"):
            ask("a", prompt=[1, 2])
