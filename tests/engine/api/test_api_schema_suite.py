"""JSON Schema's own test suite through the mask of constraints.

`json_schema_suite.jsonl` has the cases of the suite's draft 2020-12, without its folder `optional`: a line has a
keyword, a description, a schema, and instances, each with whether it is valid. The suite is Julian Berman's, with its
licence next to it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_models import END

# isort: split
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.generation.structure import ConstraintError, Constraints, of_json

SUITE = Path(__file__).parents[2] / "support" / "json_schema_suite.jsonl"
COMPILED = 164  # schemas of the suite's 368
# Valid instances that no answer has: they write keys in another order, integers as 1.0, or texts of another format than
# the schema's `format`, which the suite considers to be a note.
UNUSUAL = {"allOf": 2, "const": 5, "enum": 4, "format": 10, "type": 1}


def byte_tokenizer() -> TokenizerWrapper:
    """A tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def test_the_mask_agrees_with_json_schemas_test_suite(capsys: pytest.CaptureFixture[str]) -> None:
    """No answer is an invalid instance. A schema that would permit one is refused, and the error names its keyword."""
    tokenizer = byte_tokenizer()
    constraints = Constraints(tokenizer, len(tokenizer), tokenizer.eos_token_ids)
    compiled, refused, valid, unusual = Counter[str](), Counter[str](), 0, Counter[str]()
    unnamed: list[str] = []
    for line in SUITE.read_text(encoding="ascii").splitlines():
        keyword, description, schema, instances = json.loads(line)
        try:
            constraint = constraints.compile(of_json(schema))
        except ConstraintError as error:
            refused[keyword] += 1
            named = any(word in str(error) for word in [*words(schema), "Unsatisfiable", "Resource", "$dynamicAnchor"])
            unnamed += [] if named or schema is False else [description]
            continue
        compiled[keyword] += 1
        for instance, is_valid in instances:
            matcher = constraint._matcher.deep_copy()
            tokens = tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
            accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert is_valid or not accepted, (description, instance)
            valid += accepted
            unusual[keyword] += is_valid and not accepted
    with capsys.disabled():
        wholly = sorted(compiled.keys() - refused.keys())
        print(f"\n{compiled.total()} schemas compiled, {refused.total()} refused; all of {', '.join(wholly)}")
        print(f"{valid} valid instances accepted, {unusual.total()} not; no invalid one accepted")
    assert not unnamed
    assert +unusual == UNUSUAL
    assert compiled.total() >= COMPILED


def words(schema: Any) -> set[str]:
    """Return all names of keywords in a schema, and the formats."""
    if isinstance(schema, list):
        return set().union(*map(words, schema))
    if not isinstance(schema, dict):
        return {schema} if isinstance(schema, str) else set()
    return {*schema, *(word for value in schema.values() for word in words(value))}
