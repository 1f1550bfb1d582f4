"""The engine's benchmarks are correct: right bytes, the same tokens, and attention to the packed arrays."""

from __future__ import annotations

from engine_models import letter_tokenizer, tiny_llama

# isort: split
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import coming_back, engine_batch, engine_reconstruct, perplexity
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec

MODEL = tiny_llama(head_dim=32)
TOKENIZER = letter_tokenizer()
TOKENS = np.random.default_rng(10).integers(0, 96, 200).tolist()


def test_blocks_are_measured_both_ways_and_against_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reconstruct, "HEAD_DIM", 16)
    case = engine_reconstruct.Case(2, 3)
    case.check()
    assert case.nbytes == 511 * 3 * 2 * engine_reconstruct.HEADS * 16 * 2
    findings = list(engine_reconstruct.measure(case, rounds=2, graphs=2))
    against = ["", "copy, used memory", "copy, new memory"]
    assert [finding.against for finding in findings] == against * 2
    assert [finding.work.split()[0] for finding in findings] == ["reconstruct"] * 3 + ["extract"] * 3
    assert all(finding.value > 0 and finding.met is not None for finding in findings)


def test_blocks_that_change_on_their_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reconstruct, "HEAD_DIM", 16)
    case = engine_reconstruct.Case(2, 3)
    case.cache[1].values = case.cache[1].values + 1
    with pytest.raises(AssertionError, match="blocks have changed on their way"):
        case.check()


def test_the_engine_and_mlx_lm_are_given_the_same_work() -> None:
    prompts = [TOKENS[:40], TOKENS[40:100], TOKENS[100:130]]
    spec = ModelCacheSpec.probe(MODEL, TOKENIZER)
    (seconds, answers), (other, expected) = (
        engine_batch.ours(MODEL, TOKENIZER, spec, prompts),
        engine_batch.theirs(MODEL, TOKENIZER, prompts),
    )
    assert answers == expected
    assert max(map(len, answers)) == engine_batch.TOKENS
    assert seconds > 0
    assert other > 0


@pytest.mark.parametrize("quantised", [(32, 8), (32, 4)])
def test_perplexity_is_that_of_attention_to_packed_values(quantised: tuple[int, int]) -> None:
    packed = perplexity.empty_cache(MODEL, quantised)
    unpacked = [perplexity.Unpacked(layer) for layer in perplexity.empty_cache(MODEL, quantised)]
    exact = perplexity.perplexity(MODEL, TOKENS, perplexity.empty_cache(MODEL, None))
    found = perplexity.perplexity(MODEL, TOKENS, unpacked)
    assert found == pytest.approx(perplexity.perplexity(MODEL, TOKENS, packed), rel=1e-4)
    assert found != pytest.approx(exact, rel=1e-4)


def test_perplexity_is_that_of_all_tokens_read_at_once() -> None:
    logits = MODEL(mx.array([TOKENS[:-1]]))[0]
    foretold = mx.take_along_axis(mx.softmax(logits, axis=-1), mx.array(TOKENS[1:])[:, None], axis=-1)
    found = perplexity.perplexity(MODEL, TOKENS, perplexity.empty_cache(MODEL, None))
    assert found == pytest.approx(mx.exp(-mx.log(foretold).mean()).item(), rel=1e-4)


def test_a_returning_agent_gets_the_same_answer_from_every_tier(tmp_path: Path) -> None:
    machine = coming_back.Machine(MODEL, TOKENIZER, ModelCacheSpec.probe(MODEL, TOKENIZER))
    one = coming_back.compute(machine, machine.batch(BlockPool(16)), TOKENS)
    same, question = one.turns
    with coming_back.tiers(machine, [one], tmp_path / "cold") as found:
        findings = list(coming_back.first_tokens(machine, [one], found, tmp_path, rounds=2))
        wrong = replace(question, answer=[*question.answer[:-1], question.answer[-1] + 1])
        for tier in found.values():
            with pytest.raises(AssertionError, match=f"{tier.name}: said"):
                coming_back.come_back(tier, one.agent_id, wrong)
            with pytest.raises(AssertionError, match=f"199 of {len(TOKENS)} tokens came back"):
                coming_back.come_back(tier, one.agent_id, replace(same, reused=len(TOKENS)))
        with pytest.raises(AssertionError, match="mlx-lm's prompt cache: said"):
            coming_back.come_back_by_mlx_lm(machine, tmp_path / "context.safetensors", len(one.context), wrong)
    works = [finding.work for finding in findings if finding.against == "full prefill"]
    ways = ["hot", "page server", "mapped memory of the page server", "cold file", "mlx-lm's prompt cache"]
    assert works == [f"{turn} from {way}" for turn in ("200 tokens", "200 tokens and a question") for way in ways]
    compared = [finding.against for finding in findings if finding.what == "times as long"]
    assert compared == ["cold file", "mlx-lm's prompt cache", "hot"] * 2
    assert all(finding.value > 0 for finding in findings)
