"""The choice of tokens: parameters have the effect that mlx-lm, vLLM and OpenAI's API give them, in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine_bench import EngineBench
from engine_families import family
from engine_models import letter_tokenizer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_xtc, make_logits_processors

from engine.generation.sampling import SamplerError, Sampling
from engine.generation.text import AnswerText

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
EVERYTHING = 1 << 20  # a number of tokens that contains every context of these tests
NAMED = [
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(1.0, top_p=0.5, seed=2),
    Sampling(1.0, top_k=3, seed=3),
    Sampling(1.5, min_p=0.2, seed=4),
    Sampling(1.0, xtc_probability=0.5, xtc_threshold=0.02, seed=5),
    Sampling(repetition_penalty=1.3),
    Sampling(0.7, presence_penalty=0.5, frequency_penalty=-0.3, logit_bias={5: 3.0}, min_tokens=6, seed=6),
]


@pytest.fixture(params=["llama", "llama4"], ids=["in one batch", "in turns"])
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    bench = EngineBench(family(request.param), TOKENIZER, 64)
    yield bench
    bench.pool.check_empty()


def answer(bench: EngineBench, prompt: Sequence[int], *args: Any, count: int = 12, **options: Any) -> list[int]:
    bench.batch.submit("alice", prompt, *args, max_tokens=count, **options)
    (done,) = bench.batch.step()
    bench.free(done)
    if done.error:
        raise done.error
    return list(done.tokens)


def by_mlx_lm(bench: EngineBench, prompt: Sequence[int], count: int = 12, **options: Any) -> list[int]:
    """Return the likeliest tokens after mlx-lm's own processors."""
    processors = make_logits_processors(**options)
    made = stream_generate(bench.of.model, TOKENIZER, list(prompt), max_tokens=count, logits_processors=processors)
    return [response.token for response in made]


def by_reference(
    bench: EngineBench, prompt: Sequence[int], change: Callable[[np.ndarray, list[int]], None]
) -> list[int]:
    """Return the likeliest tokens of logits that `change` changes, given the tokens of the answer so far."""
    cache, tokens, found = make_prompt_cache(bench.of.model), list(prompt), list[int]()
    for _ in range(12):
        logits = np.array(bench.of.model(mx.array([tokens]), cache=cache)[0, -1].astype(mx.float32))
        change(logits, found)
        tokens = [int(logits.argmax())]
        found += tokens
    return found


@pytest.mark.parametrize("top_p", [0.0, 1e-320, 1e-46, 1e-40, 1e-7])
def test_tiny_top_p_means_the_likeliest_token(top_p: float) -> None:
    """In float32 such a value is 0, and 0 turned the filter off."""
    assert Sampling(1.0, top_p).sampler() is None


@pytest.mark.parametrize("size", [5, 20, EVERYTHING])
def test_repetition_penalty_equals_that_of_mlx_lm(bench: EngineBench, size: int) -> None:
    sampling = Sampling(repetition_penalty=4.0, repetition_context_size=None if size == EVERYTHING else size)
    expected = by_mlx_lm(bench, TOKENS[:30], repetition_penalty=4.0, repetition_context_size=size)
    assert answer(bench, TOKENS[:30], sampler=sampling) == expected
    assert size < EVERYTHING or expected != answer(bench, TOKENS[:30])


def test_any_context_size_of_repetition_is_accepted(bench: EngineBench) -> None:
    """MLX takes no index above 32 bits."""
    all_tokens = answer(bench, TOKENS[:30], sampler=Sampling(repetition_penalty=4.0))
    sampling = Sampling(repetition_penalty=4.0, repetition_context_size=1 << 40)
    assert answer(bench, TOKENS[:30], sampler=sampling) == all_tokens


def test_logit_bias_equals_that_of_mlx_lm(bench: EngineBench) -> None:
    likeliest = answer(bench, TOKENS[:30])[0]
    bias = {likeliest: -100.0, 7: 1.5}
    assert answer(bench, TOKENS[:30], sampler=Sampling(logit_bias=bias)) == by_mlx_lm(
        bench, TOKENS[:30], logit_bias=bias
    )
    assert answer(bench, TOKENS[:30], sampler=Sampling(logit_bias={9: 100.0})) == [9] * 12


def test_presence_and_frequency_count_the_answer_only(bench: EngineBench) -> None:
    def change(logits: np.ndarray, found: list[int]) -> None:
        for token in found:
            logits[token] -= 0.25
        logits[list({*found})] -= 0.5

    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert answer(bench, TOKENS[:30], sampler=sampling) == by_reference(bench, TOKENS[:30], change)


def test_penalties_count_restored_tokens_of_the_prompt(bench: EngineBench) -> None:
    bench.batch.submit("alice", TOKENS[:300], max_tokens=4)
    (first,) = bench.batch.step()
    question = [*first.blocks.tokens, 5, 6]
    for sampling in (Sampling(repetition_penalty=4.0), Sampling(presence_penalty=1.0), Sampling(min_tokens=3)):
        assert answer(bench, question, first.blocks, sampler=sampling) == answer(bench, question, sampler=sampling)
    bench.free(first)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_k=1), Sampling(2.0, min_p=1.0), Sampling(1.0, top_p=1e-6)], ids=repr
)
def test_filters_of_one_token_choose_the_likeliest(bench: EngineBench, sampling: Sampling) -> None:
    assert answer(bench, TOKENS[:30], sampler=sampling) == answer(bench, TOKENS[:30])


def test_filters_draw_only_the_allowed_tokens() -> None:
    logprobs = mx.log(mx.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))

    def drawn(**options: Any) -> set[int]:
        sampler = Sampling(1.5, seed=3, **options).sampler()
        assert sampler
        return {int(sampler(logprobs).item()) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_k=5) == drawn(top_k=99) == {0, 1, 2, 3, 4}
    assert drawn(min_p=0.3) == {0, 1, 2}
    assert drawn(top_p=0.65) == {0, 1}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.12) == {2, 3, 4}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.12, xtc_special_tokens=[0]) == {0, 2, 3, 4}
    assert drawn(xtc_probability=0.5, xtc_threshold=0.12) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.1, 0.5])
def test_xtc_excludes_the_tokens_that_mlx_lm_excludes(threshold: float) -> None:
    logits = mx.random.normal((1, 96), key=mx.random.key(4)) * 3
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampling = Sampling(1.0, xtc_probability=1.0, xtc_threshold=threshold)
    ours = sampling._without_top_choices(logprobs, mx.array([7], mx.int32))
    assert mx.array_equal(ours, apply_xtc(logprobs, 1.0, threshold, [7]))


def test_rounding_errors_do_not_change_drawn_tokens() -> None:
    chance = np.random.default_rng(3)
    logits = chance.normal(0, 3, 49_152).astype(np.float32)
    noisy = logits + chance.normal(0, 1e-5, logits.shape).astype(np.float32)
    right, other = Sampling(1.5, seed=7).sampler(), Sampling(1.5, seed=7).sampler()
    assert right
    assert other
    drawn = [(right(mx.array(logits)[None]), other(mx.array(noisy)[None])) for _ in range(200)]
    assert len({one.item() for one, _ in drawn}) > 100
    assert sum(one.item() != two.item() for one, two in drawn) == 0


def test_an_answer_in_a_batch_of_eight_equals_the_answer_alone(bench: EngineBench) -> None:
    prompts = [TOKENS[40 * i : 40 * i + 20 + i] for i in range(len(NAMED))]
    alone = [answer(bench, prompt, sampler=sampling) for prompt, sampling in zip(prompts, NAMED, strict=True)]
    uids = [bench.batch.submit(f"agent-{i}", prompts[i], max_tokens=12, sampler=NAMED[i]) for i in range(len(NAMED))]
    done = {made.uid: made for made in bench.batch.step()}
    assert [list(done[uid].tokens) for uid in uids] == alone
    bench.free(*done.values())


def test_a_stop_token_ends_the_answer_without_its_text(bench: EngineBench) -> None:
    whole = answer(bench, TOKENS[:30])
    stop = whole[4]
    bench.batch.submit("alice", TOKENS[:30], max_tokens=12, stop_tokens=[95, stop])
    (done,) = bench.batch.step()
    assert (list(done.tokens), done.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert list(done.blocks.tokens) == [*TOKENS[:30], *whole[: whole.index(stop) + 1]]
    bench.free(done)


def test_no_stop_token_is_chosen_before_min_tokens(bench: EngineBench) -> None:
    stop = answer(bench, TOKENS[:30])[0]
    for count in (0, 1, 5):
        found = answer(bench, TOKENS[:30], sampler=Sampling(min_tokens=count), stop_tokens=[stop])
        assert len(found) >= count
        assert stop not in found
    options: dict[str, Any] = {"sampler": Sampling(ignore_eos=True), "stop_tokens": [stop]}
    assert len(answer(bench, TOKENS[:30], **options)) == 12


def test_stop_strings_begin_after_min_tokens() -> None:
    class Letters:
        text = ""

        def add_token(self, token: int) -> None:
            self.text += chr(token)

        def finalize(self) -> None:
            pass

    for count, expected in ((0, ""), (1, "a"), (2, "abx"), (4, "abxa"), (5, "abxab")):
        text, read = AnswerText(Letters(), ["ab", "b"], count), ""
        for letter in "abxab":
            if not text.stopped_by:
                text.add(ord(letter))
                read += text.read()
        text.finish()
        assert text.text == read + text.read() == expected


def test_a_processor_that_fails_ends_its_own_answer_alone(bench: EngineBench) -> None:
    def late(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size > 43:
            raise LookupError("no such rule")
        return logits

    alone = answer(bench, TOKENS[:300])
    for processor, error in (
        (late, LookupError),
        (lambda tokens, logits: logits[0], SamplerError),
        (lambda tokens, logits: None, SamplerError),
    ):
        failing = bench.batch.submit("bob", TOKENS[:40], max_tokens=8, logits_processors=[processor])
        well = bench.batch.submit("alice", TOKENS[:300], max_tokens=12)
        done = {made.uid: made for made in bench.batch.step()}
        assert list(done[well].tokens) == alone
        assert type(done[failing].error) is error
        bench.free(done[well])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": float("nan")}, "min_p"),
        ({"xtc_threshold": 0.6}, "xtc_threshold"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_context_size": 0}, "repetition_context_size"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_a_parameter_outside_of_its_range_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*got"):
        Sampling(**options)
