"""Structured answers: JSON, schemas, regular expressions, choices and grammars."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from api_engines import RunningEngine, start_engine, write_caller, write_tiny
from engine_models import letter_tokenizer

# isort: split
import mlx.core as mx
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from pydantic import create_model
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.decoders import BPEDecoder, ByteFallback, Fuse, Metaspace, Replace, Sequence, WordPiece
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, NFD, NFKC, Lowercase, Strip, StripAccents
from tokenizers.normalizers import Replace as Replaced
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from engine.generation.structure import (
    ConstraintError,
    Constraints,
    compiling_thread,
    of_choice,
    of_grammar,
    of_json,
    of_regex,
)
from engine.generation.text import TokenText

HELLO = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def chat(api: openai.OpenAI, seed: int = 1, **more: Any) -> Any:
    options = {"model": "tiny", "messages": HELLO, "temperature": 1.5, "seed": seed, "max_tokens": 200, **more}
    return api.chat.completions.create(**options)


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": of, "strict": True}}}


def test_end_tokens_without_logits_are_ignored(tmp_path: Path) -> None:
    """A config.json that was copied from a larger model has such tokens."""
    model = write_tiny(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    ends = [config["eos_token_id"], 999_999]
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}), encoding="utf-8")
    with start_engine(model) as engine, engine.client() as api:
        assert is_person(chat(api, **schema(of=PERSON)).choices[0].message.content)
        for more in ({"ignore_eos": True}, {"xtc_probability": 1.0, "xtc_threshold": 0.1}):
            assert chat(api, max_tokens=8, extra_body=more).usage.completion_tokens == 8


def nested(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(levels - 1)} if levels else {"type": "null"}


def wide(count: int, first: int = 0) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(first, first + count)}}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() == {"name", "age", "tags"}
        and len(person["name"]) <= 8
        and 0 <= person["age"] <= 150
        and {*person["tags"]} <= {"a", "b"}
        and len(person["tags"]) <= 3
    )


def test_answers_of_a_random_model_match_the_schema(api: openai.OpenAI) -> None:
    answers = chat(api, n=12, **schema(PERSON)).choices
    assert {choice.finish_reason for choice in answers} == {"stop"}
    assert all(is_person(choice.message.content) for choice in answers)
    assert len({choice.message.content for choice in answers}) > 6
    (greedy,) = chat(api, temperature=0, **schema(PERSON)).choices
    assert greedy.finish_reason == "length" or is_person(greedy.message.content)


def test_a_cut_answer_is_the_beginning_of_the_whole_one(api: openai.OpenAI) -> None:
    whole = chat(api, **schema(PERSON)).choices[0].message.content
    cut = chat(api, max_tokens=9, **schema(PERSON)).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", whole[:9])
    stream = chat(api, stream=True, **schema(PERSON))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


LIST = {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "maxItems": 6}
WHEN = {"type": "object", "properties": {"at": {"type": "string", "format": "date"}}, "required": ["at"]}


@pytest.mark.parametrize("temperature", [0, 0.3, 1, 2])
@pytest.mark.parametrize("of", [PERSON, LIST, {**WHEN, "additionalProperties": False}])
def test_text_is_valid_or_cut_at_every_temperature(api: openai.OpenAI, of: dict[str, Any], temperature: float) -> None:
    """A text that ended by itself is valid. A text that `max_tokens` cut is the beginning of a valid one."""
    tokenizer = letter_tokenizer()
    constraint = Constraints(tokenizer, 97, [96]).compile(of_json(of))
    ended = 0
    for limit in (1, 5, 11, 100):
        for choice in chat(api, temperature=temperature, max_tokens=limit, n=4, **schema(of)).choices:
            matcher = constraint._matcher.deep_copy()
            tokens = tokenizer.encode(choice.message.content, add_special_tokens=False)
            assert matcher.try_consume_tokens(tokens) == len(tokens)
            assert choice.finish_reason == "stop" or len(tokens) == limit
            if choice.finish_reason == "stop":
                json.loads(choice.message.content)
                assert matcher.is_accepting()
                ended += 1
    assert ended or temperature == 0


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-[0-9]+!"}, r"[a-c]{3}-[0-9]+!"),
        ({"guided_choice": ["yes", "no (maybe)", "a|b"]}, r"yes|no \(maybe\)|a\|b"),
        ({"guided_grammar": 'root ::= "ab" [0-9] root | "!"'}, r"(ab[0-9])*!"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, r"x[0-9]{2}"),
        ({"guided_json": '{"enum": ["red", 7]}'}, r'"red"|7'),
        ({"structured_outputs": {"regex": "[xy]{4}"}}, r"[xy]{4}"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, r"one|two"),
        ({"structured_outputs": {"json": {"const": 12}}}, r"12"),
        ({"structured_outputs": {"grammar": 'start: "z"'}}, r"z"),
    ],
)
def test_constraints_of_vllm_are_kept(api: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        (choice,) = chat(api, seed, extra_body=fields).choices
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.message.content)
    text = api.completions.create(model="tiny", prompt="a", temperature=1, max_tokens=90, extra_body=fields)
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"extra_body": {"structured_outputs": {"json_object": True}}}],
)
def test_json_mode_gives_an_object(api: openai.OpenAI, fields: dict[str, Any]) -> None:
    (choice,) = chat(api, max_tokens=60, **fields).choices
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


async def test_an_answer_with_a_constraint_equals_the_answer_alone(engine: RunningEngine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as crowd:

        async def ask(seed: int, **more: Any) -> str:
            options: Any = {"model": "tiny", "messages": HELLO, "temperature": 1, "seed": seed, "max_tokens": 60}
            return (await crowd.chat.completions.create(**options, **more)).choices[0].message.content

        kinds: list[dict[str, Any]] = [{}, schema(PERSON), {"extra_body": {"guided_regex": "[a-z]{20}"}}]
        alone = [await ask(seed, **kind) for seed, kind in enumerate(kinds)]
        assert await asyncio.gather(*(ask(seed, **kind) for seed, kind in enumerate(kinds))) == alone


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (schema({"not": {}}), "response_format.json_schema.schema", "not"),
        (schema({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
        (schema({"type": "tree"}), "response_format.json_schema.schema", "tree"),
        (schema({"$ref": "#/definitions/x"}), "response_format.json_schema.schema", "does not exist"),
        (schema(nested(150)), "response_format.json_schema.schema", "nested too deeply"),
        (schema(wide(501)), "response_format.json_schema.schema", "properties: a schema has 500"),
        (schema({"allOf": [wide(1, i) for i in range(500)]}), "response_format.json_schema.schema", "too large"),
        (schema({"$ref": "#"}), "response_format.json_schema.schema", ""),
        (schema({"minimum": 5, "maximum": 1, "type": "integer"}), "response_format.json_schema.schema", "Unsatisf"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": [1]}, "guided_json", "object"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one constraint"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", ""),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", ""),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ""),
    ],
)
def test_a_wrong_constraint_is_refused_by_name(
    engine: RunningEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, **fields}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert len(error["message"]) < 500


async def test_large_schemas_delay_no_other_answer(engine: RunningEngine) -> None:
    """Tokens of a stream arrive while schemas are refused and compiled."""
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=60) as crowd:
        options: Any = {"model": "tiny", "messages": HELLO, "temperature": 0}

        async def refuse() -> None:
            with pytest.raises(openai.BadRequestError, match="properties: a schema has 500"):
                await crowd.chat.completions.create(**options, **schema(wide(1500)))

        async def tokens() -> int:
            stream = await crowd.chat.completions.create(**options, max_tokens=100, stream=True)
            return len([chunk async for chunk in stream])

        refusals = [asyncio.create_task(refuse()) for _ in range(20)]
        assert await tokens() > 90
        await asyncio.gather(*refusals)
        answer = await crowd.chat.completions.create(**options, max_tokens=5, **schema(wide(500)))
        assert answer.choices[0].message.content.startswith("{")


def test_a_constraint_begins_after_the_reasoning() -> None:
    tokenizer = letter_tokenizer()
    letters = {tokenizer.convert_ids_to_tokens(i): i for i in range(97)}
    process = Constraints(tokenizer, 97, [96]).compile(of_regex("b")).processor(2, [letters["z"], letters["y"]])
    logits = mx.where(mx.arange(97) == 96, 1.0, mx.zeros((1, 97)))  # the end is the likeliest token

    def allowed(answer: str) -> set[str]:
        tokens = mx.array([0, 1, *(letters[letter] for letter in answer)])
        masked = process(tokens, logits)[0].tolist()
        assert all(value in (0, 1, -mx.inf) for value in masked)
        likeliest[:] = [letter for letter, i in letters.items() if masked[i] == 1]
        return {letter for letter, i in letters.items() if masked[i] >= 0}

    likeliest: list[str] = []
    for reasoning, closing in (("", "z"), ("z", "y"), ("zx", "z"), ("zxz", "y")):
        assert allowed(reasoning) == letters.keys() - {tokenizer.eos_token}  # the answer cannot end within it
        assert likeliest == [closing]
    assert allowed("zxzy") == {"b"}
    assert allowed("zxzyb") == {tokenizer.eos_token}


def test_a_constraint_without_a_text_is_refused() -> None:
    with pytest.raises(ConstraintError):
        Constraints(letter_tokenizer(), 97, [96]).compile(of_json(False))
    process = Constraints(letter_tokenizer(), 97, [96]).compile(of_choice(["a"])).processor(0)
    with pytest.raises(ConstraintError, match="left its constraint"):
        process(mx.array([5]), mx.zeros((1, 97)))


REPLACING = Sequence([decoders.ByteLevel(), Replace("page", "PAGE")])


@pytest.mark.parametrize("decoder", [Metaspace(), WordPiece(), BPEDecoder(), REPLACING, None])
def test_a_decoder_that_cannot_constrain_is_refused(decoder: Any) -> None:
    """`Prompts.prepare` ignores the error: the model is served, and a request with a constraint is 400."""
    tokenizer = letter_tokenizer()
    tokenizer._tokenizer.backend_tokenizer.decoder = decoder
    with pytest.raises(ConstraintError, match="cannot constrain answers"):
        Constraints(tokenizer, 97, [96]).prepare()


@pytest.mark.parametrize("text", ["Zürich", "日本", "a\tb"])
def test_byte_tokens_listed_as_special_spell_text(text: str) -> None:
    """Trainers make such vocabularies if the bytes are given as special tokens."""
    pieces = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Zrichab"]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(pieces[:258])
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped = TokenizerWrapper(fast, SPMStreamingDetokenizer)
    process = Constraints(wrapped, len(pieces), [1]).compile(of_choice([text])).processor(0)
    tokens = [0]
    while tokens[-1] != 1:
        tokens.append(int(process(mx.array(tokens[1:], mx.int32), mx.zeros((1, len(pieces)))).argmax()))
    assert TokenText(wrapped).of(tokens[1:-1]) == text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("added", ["page", "a", "<mark>"])
def test_an_added_token_may_be_in_merges(added: str, special: bool) -> None:
    """Gemma's vocabulary lists tokens as added that merges make, too."""
    tokenizer = Tokenizer.from_str(byte_level([("p", "a"), ("g", "e"), ("pa", "ge"), ("page", "s")]))
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    assert text_of(tokenizer, "a page, pages <mark>") == "a page, pages <mark>"


def test_a_constrained_answer_gets_no_first_space() -> None:
    """RoBERTa's and older GPT-2's tokenizers put a space before each text."""
    for split in (ByteLevel(add_prefix_space=True), pre_tokenizers.Sequence([ByteLevel(add_prefix_space=True)])):
        tokenizer = Tokenizer.from_str(byte_level([]))
        tokenizer.pre_tokenizer = split
        assert text_of(tokenizer, '{"a": "b"}') == '{"a": "b"}'


@pytest.mark.parametrize(
    "normalizer",
    [NFC(), NFKC(), Lowercase(), Replaced("\u200b", ""), normalizers.Sequence([NFD(), StripAccents(), Strip()])],
)
def test_a_constrained_answer_is_not_normalized(normalizer: normalizers.Normalizer) -> None:
    """Qwen's tokenizers normalize to NFC. Names of files on macOS, for example, are NFD."""
    text = "10 \u2126, cafe\u0301 \u00e9, \ufb2a \u0958, a\u200bb, YES "
    tokenizer = Tokenizer.from_str(byte_level([]))
    tokenizer.normalizer = normalizer
    assert text_of(tokenizer, text) == text


def byte_level(merges: list[tuple[str, str]]) -> str:
    """Return the definition of a byte-level tokenizer with these merges, and the end of an answer as token 256."""
    pieces = [*sorted(ByteLevel.alphabet()), "<end>", *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer.to_str()


def text_of(tokenizer: Tokenizer, text: str) -> str:
    """Return the only answer that a constraint to `text` allows."""
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))
    vocabulary = tokenizer.get_vocab_size()
    process = Constraints(wrapped, vocabulary, [256]).compile(of_choice([text])).processor(0)
    tokens = [0]
    while tokens[-1] != 256:
        tokens.append(int(process(mx.array(tokens[1:], mx.int32), mx.zeros((1, vocabulary))).argmax()))
    return TokenText(wrapped).of(tokens[1:-1])


def test_the_time_of_an_answers_masks_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.generation.structure.ALL_MASKS_SECONDS", 0.1)
    monkeypatch.setattr("engine.generation.structure.MASK_SECONDS", 0.0)
    grammar = of_grammar('start: s\ns: s s s s s | s s | "a" | ""')
    letter = letter_tokenizer()._tokenizer.convert_tokens_to_ids("a")
    process = Constraints(letter_tokenizer(), 97, [96]).compile(grammar).processor(0)
    with pytest.raises(ConstraintError, match=r"^the masks of \d+ tokens took \d+\.\d s$"):
        [process(mx.array([letter] * tokens), mx.zeros((1, 97))) for tokens in range(300)]


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "endless",
    [
        {"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"},
        {
            "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1}},
            "$ref": "#/$defs/node",
        },
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        {
            "type": "object",
            "patternProperties": {"a": {"$ref": "#"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            "type": "object",
            "patternProperties": {"^a$": {"$ref": "#"}},
            "additionalProperties": False,
            "required": ["a"],
        },
    ],
)
def test_a_recursion_without_an_end_is_refused(endless: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=r"\$ref: a text that matches this recursion has no end"):
        of_json(endless)


@pytest.mark.parametrize(
    ("costly", "keyword"),
    [
        ({"multipleOf": 1_000_003}, "multipleOf"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 991}]}, "multipleOf"),
        ({"enum": []}, "enum"),
        ({"type": []}, "type"),
        ({"type": "string", "maxLength": 10**12}, "maxLength"),
        ({"type": "integer", "minimum": 10**390}, "minimum"),
    ],
)
def test_a_costly_or_empty_keyword_is_named(costly: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ConstraintError, match=f"^{keyword}: "):
        of_json(costly)
    assert of_json({"type": "number", "multipleOf": 0.25})


def references(count: int) -> dict[str, Any]:
    """Return a schema with a chain of references."""
    step = {
        i: {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}}, {"type": "null"}]} for i in range(count)
    }
    return {"$ref": "#/$defs/0", "$defs": {**{str(i): part for i, part in step.items()}, str(count): {}}}


def rules(count: int) -> str:
    """Return a grammar with a chain of rules."""
    chain = "\n".join(f'r{i}: r{i + 1} | "a"' for i in range(count - 2))
    return f'start: r0\n{chain}\nr{count - 2}: "b"'


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: of_json(references(1001)), r"^\$ref: a schema has 1000 different ones at most, got 1002$"),
        (lambda: of_grammar(rules(501)), "^a grammar has 500 rules at most, got 501$"),
        (lambda: of_grammar(rules(501).replace(":", "::=")), "^a grammar has 500 rules at most, got 501$"),
        (
            lambda: of_grammar(rules(501).replace(": r", ": r-").replace("\nr", "\nr-")),
            "^a grammar has 500 rules at most",
        ),
        (lambda: of_grammar('start: %json {"type": "string"}'), "^%json is not supported within a grammar$"),
        (lambda: of_grammar("start: " + "a" * 32_768), "^a grammar has 32,768 characters at most, got 32,775$"),
        (
            lambda: of_grammar("start: /" + "a*" * 2048 + "/"),
            "^the regular expressions of a grammar have 4096 characters, got 4,098$",
        ),
        (lambda: of_regex("a*" * 2049), "^a regular expression has 4096 characters at most, got 4,098$"),
        (lambda: of_json({"pattern": "a*" * 2049}), "^pattern: all together have 4096 characters at most, got 4,098$"),
    ],
)
def test_a_grammar_of_many_rules_is_refused(make: Callable[[], str], error: str) -> None:
    with pytest.raises(ConstraintError, match=error):
        make()


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (r'[\u0400-\u04ff]+ "."', ["привет."], ["a."]),
        (r'[\u00e0-\u00ff] "."', ["é."], ["a.", "Ā."]),
        (r'"\u00e9\x41\x0a" "\U0001F642"', ["éA\n🙂"], ["e"]),
        (r"[\U0001F600-\U0001F64F\u4e00-\u9fff]", ["😀", "日"], ["a"]),
        ('[a~~b]+ "."', ["~a~b."], ["c."]),
        ('[&&|]+ "."', ["&|&."], ["a."]),
        ('[+--] "."', ["+.", ",.", "-."], ["*.", "/."]),
        ('[a-] [^^b] "/" "#"', ["aa/#", "-c/#"], ["b", "ab", "a^"]),
        (r'[\]\[/"-] "\"\\" # "[" and more', ['["\\', ']"\\', '""\\', '-"\\'], ["a"]),
        (r'[^"\\\x7F\x00-\x1F] [\t\x0a]', ["é\t", "a\n"], ["\x1f", '"', "\x7f", "a "]),
    ],
)
def test_gbnf_is_read_as_by_llama_cpp(grammar: str, accepted: list[str], refused: list[str]) -> None:
    tokenizer = LLTokenizer("byte")
    for text in (*accepted, *refused):
        matcher = LLMatcher(tokenizer, of_grammar(f"root ::= {grammar}"))
        data = [*text.encode()]
        matches = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert (matches, text) == (text in accepted, text)


@pytest.mark.parametrize("code", [r"\ud800", r"\U00110000"])
def test_a_code_that_is_no_character_is_refused(code: str) -> None:
    for grammar in (f'"{code}"', f"[{code}]"):
        with pytest.raises(ConstraintError, match="is no character"):
            of_grammar(f"root ::= {grammar}")


@pytest.mark.parametrize("make", [lambda: of_json(references(998)), lambda: of_grammar(rules(500))])
def test_long_chains_of_rules_do_not_overflow_the_stack(make: Callable[[], str]) -> None:
    """llguidance follows them by recursion, and an overflow would end the process."""
    with compiling_thread("tiny") as thread:
        assert thread.submit(lambda: Constraints(letter_tokenizer(), 97, [96]).compile(make())).result()


def test_a_text_that_is_always_the_same_has_a_limit() -> None:
    for endless in (
        of_grammar('root ::= "a" root'),
        of_json({"type": "array", "items": {"type": "null"}, "minItems": 9999}),
    ):
        with pytest.raises(ConstraintError, match="begin with more than 4096 tokens that are always the same"):
            Constraints(letter_tokenizer(), 97, [96]).compile(endless)
    for long in (of_regex("(ab){1000000}"), of_choice(["a" * 900_000]), of_json({"const": "x" * 500_000})):
        with pytest.raises(ConstraintError, match=r"begin with [0-9]{3},[0-9]{3} bytes that are always the same"):
            Constraints(letter_tokenizer(), 97, [96]).compile(long)


def test_a_long_given_text_does_not_hold_pythons_lock() -> None:
    """Another thread runs again and again while a constraint is compiled."""
    constraints, long = Constraints(letter_tokenizer(), 97, [96]), of_choice(["a" * 900_000])
    constraints.prepare()
    compiled = threading.Event()

    def compile_long() -> float:
        begun = time.monotonic()
        with pytest.raises(ConstraintError):
            constraints.compile(long)
        compiled.set()
        return time.monotonic() - begun

    with compiling_thread("tiny") as thread:
        taken = thread.submit(compile_long)
        last, longest = time.monotonic(), 0.0
        while not compiled.wait(0.001):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert longest < 0.5 * taken.result(), "one wait for Python's lock took most of the time"


@pytest.mark.parametrize(
    "ending",
    [
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"},
        {
            "$defs": {"node": {**NODE, "required": ["next"]}, "end": {"type": "null"}},
            "anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/end"}],
        },
    ],
)
def test_a_recursion_that_can_end_is_compiled(ending: dict[str, Any]) -> None:
    assert Constraints(letter_tokenizer(), 97, [96]).compile(of_json(ending))


Weather = create_model("Weather", city=(Literal["Oslo", "Rome"], ...), celsius=(int, ...), sunny=(bool, ...))


def test_openais_client_parses_an_answer_of_the_real_model(smollm2: RunningEngine) -> None:
    with smollm2.client() as client:
        messages: Any = [{"role": "user", "content": "What is the weather in Rome? Answer in JSON."}]
        options: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 60}
        parsed = client.chat.completions.parse(response_format=Weather, **options).choices[0].message.parsed
        assert isinstance(parsed, Weather)
        (choice,) = client.chat.completions.create(**options, **schema({"const": "<|im_end|>"})).choices
        assert (choice.message.content, choice.finish_reason) == ('"<|im_end|>"', "stop")


def test_the_text_of_an_added_token_is_no_token(tmp_path: Path) -> None:
    with start_engine(write_caller(tmp_path / "caller")) as engine, engine.client() as client:
        (choice,) = chat(client, model="caller", max_tokens=30, extra_body={"guided_choice": ["a<tool_call>b"]}).choices
        assert (choice.message.content, choice.finish_reason) == ("a<tool_call>b", "stop")
