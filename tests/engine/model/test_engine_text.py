"""The text of tokens: continuations of prompts, single tokens, and ids that the tokenizer does not know."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import chat_families
import pytest
from chat_families import BYTE_LEVEL, FAMILIES, SENTENCE_PIECE, Family, reused

# isort: split
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.generation.templates import Renderer
from engine.generation.text import AnswerText, ChatTemplate, Detokenizer, TokenText, history_adds_space
from engine.generation.tokens import encode_after, encode_part

SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2"
TEXTS = ["def f(n):\n    return n", " Paris, of course.", "a→ü🦭b  c", "  two\n\n three ", "naïve 日本語\t\x00end"]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece spells it
PADDING = 100_000  # an id past every vocabulary here


@cache
def byte_level() -> TokenizerWrapper:
    return FAMILIES["Mistral Small 3"].wrapper()


@cache
def sentence_piece() -> TokenizerWrapper:
    return FAMILIES["Mistral 7B v0.2"].wrapper()


@cache
def unknown_kind() -> TokenizerWrapper:
    """SentencePiece, in a form that mlx-lm decodes with the tokenizer itself."""
    return TokenizerWrapper(sentence_piece()._tokenizer, NaiveStreamingDetokenizer)


@cache
def smollm2() -> TokenizerWrapper:
    return load_tokenizer(SMOLLM2)


kinds = pytest.mark.parametrize("kind", [byte_level, sentence_piece, unknown_kind])
all_kinds = pytest.mark.parametrize("kind", [byte_level, sentence_piece, unknown_kind, smollm2])
Kind = Callable[[], TokenizerWrapper]


def read(detokenizer: Detokenizer, tokens: Sequence[int]) -> str:
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


@all_kinds
@pytest.mark.parametrize("text", TEXTS)
def test_continuation_is_the_decoded_text_less_the_prompt(kind: Kind, text: str) -> None:
    tokenizer = kind()
    tokens = tokenizer.encode("x" + text, add_special_tokens=False)
    token_text = TokenText(tokenizer)
    for cut in range(1, len(tokens)):
        prompt, whole = tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens)
        if not prompt.endswith("\ufffd"):
            assert read(token_text.after(tokens[:cut]), tokens[cut:]) == whole[len(prompt) :]


@all_kinds
def test_answer_completes_the_last_character_of_its_prompt(kind: Kind) -> None:
    tokenizer = kind()
    tokens = tokenizer.encode("x🦭y", add_special_tokens=False)
    token_text = TokenText(tokenizer)
    cuts = [cut for cut in range(len(tokens)) if tokenizer.decode(tokens[:cut]).endswith("\ufffd")]
    assert cuts
    for cut in cuts:
        assert read(token_text.after(tokens[:cut]), tokens[cut:]) == "🦭y"


@all_kinds
def test_continuation_of_random_tokens_is_decoded_text(kind: Kind) -> None:
    tokenizer, token_text, draw = kind(), TokenText(kind()), random.Random(11)
    whole_tokens = [t for t in range(len(tokenizer)) if b"".join([token_text.bytes_of(t) or b"\xff"]).isascii()]
    for _ in range(200):
        tokens = draw.choices(whole_tokens, k=12)
        cut = draw.randrange(1, 12)
        expected = tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:cut])) :]
        assert read(token_text.after(tokens[:cut]), tokens[cut:]) == expected


@all_kinds
def test_text_of_generate_is_that_of_mlx_lm(kind: Kind) -> None:
    tokenizer, draw = kind(), random.Random(12)
    for _ in range(200):
        tokens = draw.choices(range(len(tokenizer)), k=12)
        assert read(TokenText(tokenizer).as_generated(), tokens) == read(tokenizer.detokenizer, tokens)


def prefixing(tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """The definition of a SentencePiece tokenizer that writes a space before a first word and after special tokens."""
    definition: dict[str, Any] = json.loads(tokenizer._tokenizer.backend_tokenizer.to_str())
    prepend = {"type": "Prepend", "prepend": SPACE}
    return {**definition, "normalizer": {"type": "Sequence", "normalizers": [prepend, definition["normalizer"]]}}


def test_a_continuation_of_a_text_gets_no_space() -> None:
    """Also if a token has a line end and the letters after it."""
    definition = prefixing(sentence_piece())
    vocabulary = definition["model"]["vocab"]
    for before in ("\n", SPACE):
        vocabulary.setdefault(before + "s", len(vocabulary))
        definition["model"]["merges"].insert(0, [before, "s"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(definition)))
    for text in ("s>y", " s", "\ns", "", "🦭"):
        tokens = [*encode_part(tokenizer, "<"), *encode_after(tokenizer, text)]
        assert tokenizer.decode(tokens).lstrip() == "<" + text


@all_kinds
def test_an_answer_loses_one_space_of_several_at_most(kind: Kind) -> None:
    tokenizer = kind()
    spaces = [token for token in range(len(tokenizer)) if TokenText(tokenizer).bytes_of(token) == b" "]
    for space in spaces:
        text = read(
            TokenText(tokenizer).as_generated(), [*[space] * 5, *tokenizer.encode("x", add_special_tokens=False)]
        )
        assert len(text) - len(text.lstrip()) >= 4


@kinds
def test_tokens_past_the_vocabulary_have_no_text(kind: Kind) -> None:
    tokenizer = kind()
    token_text = TokenText(tokenizer)
    tokens = tokenizer.encode("of the keeper", add_special_tokens=False)
    padded = [x for token in tokens for x in (PADDING, token, len(tokenizer))]
    assert token_text.bytes_of(PADDING) == b""
    assert read(token_text.as_generated(), padded) == read(tokenizer.detokenizer, tokens)
    assert read(token_text.after([PADDING]), padded) == read(token_text.after([]), tokens)
    assert read(token_text.after(tokens), padded) == read(token_text.after(tokens), tokens)


@kinds
def test_bytes_of_an_answers_tokens_are_its_text(kind: Kind) -> None:
    tokenizer = kind()
    token_text = TokenText(tokenizer)
    for text in TEXTS:
        tokens = chat_families.tokens_of(tokenizer, text)
        parts = [token_text.bytes_of(token) for token in tokens]
        if kind is unknown_kind:
            assert all(part is None or part.decode() in text for part in parts)
        else:
            assert b"".join(part or b"" for part in parts) == text.encode()


def test_an_unreadable_character_delays_no_text_for_long() -> None:
    """A tokenizer of an unknown kind is not decoded over and over for tokens that never make a character."""
    tokenizer = unknown_kind()
    halves = [token for token in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(token) == "<0xE2>"] * 50
    text = AnswerText(TokenText(tokenizer).after([]), ())
    found = []
    for token in halves:
        text.add(token)
        found.append(text.read())
    assert sum(map(bool, found)) >= 4
    text.finish()
    assert "".join([*found, text.read()]) == text.text == "\ufffd" * 50


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def adds_space(tokenizer: TokenizerWrapper, renderer: Renderer) -> bool:
    return history_adds_space(tokenizer, ChatTemplate(tokenizer, renderer).plain)


def best(tokenizer: TokenizerWrapper, answer: str, renderer: Renderer) -> tuple[int, int, int]:
    """The tokens of an answer that the next turn reuses: with its first space, without it, and by the engine's rule."""
    dropped = answer.removeprefix(" ")
    kept = dropped if adds_space(tokenizer, renderer) else answer
    first, second, ruled = (reused(tokenizer, answer, text)[0] for text in (answer, dropped, kept))
    return first, second, ruled


# Of an answer of some words, and of one of indented code, that begin with a space: tokens that the next turn reuses if
# the space is kept, and if it is dropped. docs/decisions/0070 has the table.
REUSED: dict[str, Any] = {
    "Qwen2.5, SmolLM2, Yi, Hermes (ChatML)": [(10, 0), (8, 2)],
    "Qwen3": [(10, 0), (8, 2)],
    "Llama 3": [(0, 0), (0, 0)],
    "Llama 2": [(8, 8), (0, 0)],
    "Mistral 7B v0.2": [(9, 0), (8, 2)],
    "Mistral 7B v0.3": [(9, 9), (0, 0)],
    "Mixtral 8x7B": [(0, 9), (3, 8)],
    "Mistral Small 3": [(10, 0), (8, 2)],
    "Gemma 2, Gemma 3": [(0, 0), (0, 0)],
    "DeepSeek LLM, DeepSeek V2": [(0, 10), (3, 8)],
    "DeepSeek V3": [(10, 0), (8, 2)],
    "GLM 4": [(0, 0), (0, 0)],
    "gpt-oss": [(10, 0), (8, 2)],
    "Phi 3": [(9, 0), (8, 2)],
    "Kimi K2": [(10, 0), (8, 2)],
    "Command R": [(0, 0), (0, 0)],
    "Vicuna": [(0, 9), (3, 8)],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_next_turn_reuses_most_with_the_templates_space(renderer: Renderer, name: str) -> None:
    tokenizer = FAMILIES[name].wrapper()
    for answer, (kept, dropped) in zip((" Paris is the city.", "    return n"), REUSED[name], strict=True):
        assert best(tokenizer, answer, renderer) == (kept, dropped, max(kept, dropped))
    assert adds_space(tokenizer, renderer) == (name in ("Mixtral 8x7B", "DeepSeek LLM, DeepSeek V2", "Vicuna"))


@pytest.mark.parametrize(("begin", "drops"), [("<AI>", True), ("<AI>:", False), ("AI: ", False)])
def test_a_space_of_the_tokenizer_is_dropped(renderer: Renderer, begin: str, drops: bool) -> None:
    """The tokenizer writes a space before an answer that is directly after a special token."""
    family = Family(SENTENCE_PIECE, "<user>{}", begin, f"{begin!r} + content", "</s>")
    definition = Tokenizer.from_str(json.dumps(prefixing(family.wrapper())))
    fast = PreTrainedTokenizerFast(tokenizer_object=definition, eos_token="</s>", chat_template=family.template)
    tokenizer = TokenizerWrapper(fast, SPMStreamingDetokenizer)
    for answer in (" Paris is the city.", "    return n"):
        kept, dropped, ruled = best(tokenizer, answer, renderer)
        assert (ruled, dropped > kept) == (max(kept, dropped), drops)


def test_a_template_that_raises_keeps_the_first_space(renderer: Renderer) -> None:
    tokenizer = FAMILIES["DeepSeek V3"].wrapper()
    tokenizer._tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert not adds_space(tokenizer, renderer)
    assert FAMILIES["DeepSeek V3"].tokenizer == BYTE_LEVEL
