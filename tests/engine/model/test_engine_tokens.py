"""Streaming of answers: readable text that is never revised, optional log-probabilities, the prompt's blocks as soon as
they are computed; and a receiver that fails harms no other answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from block_pages import page_bodies
from engine_bench import EngineBench
from engine_families import family
from engine_models import letter_tokenizer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.text import AnswerText
from engine.generation.tokens import UnknownTokenError
from engine.memory.blocks import AgentBlocks
from engine.scheduling.request import CompletedGeneration, Token

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
PLAIN = TOKENS[500:800]  # to which the models answer with a visible letter a token
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
IN_ONE_BATCH, IN_TURNS, WITH_STATE = "llama", "llama4", "gemma3_text"


class Bench(EngineBench):
    """A batch engine and the tokens of its answers."""

    def __init__(self, kind: str) -> None:
        super().__init__(family(kind), TOKENIZER, 32)
        self.received: list[Token] = []

    def complete(self, prompt: list[int], cache: AgentBlocks | None = None, **options: Any) -> CompletedGeneration:
        options = {"on_token": self.received.append, "max_tokens": 12, **options}
        self.batch.submit("alice", prompt, cache, **options)
        (done,) = self.batch.step()
        return done


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.pool.check_empty()


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bench", names, indirect=True)


both_ways = kinds(IN_ONE_BATCH, IN_TURNS)


@both_ways
def test_the_streamed_tokens_are_the_answer(bench: Bench) -> None:
    done = bench.complete(TOKENS[:300])
    assert [token.token for token in bench.received] == list(done.tokens)
    assert "".join(token.text for token in bench.received) == done.text
    assert len({token.uid for token in bench.received} | {done.uid}) == 1
    assert {(token.logprob, token.top, token.ends_text) for token in bench.received} == {(None, (), False)}
    bench.free(done)


@kinds(IN_ONE_BATCH)
def test_text_that_utf8_cannot_spell_is_refused(bench: Bench) -> None:
    with pytest.raises(UnknownTokenError, match=r"a prompt is text that UTF-8 can spell, got '\\ud83d'"):
        bench.batch.submit("alice", "half of a seal: \ud83d")
    assert bench.batch.pending == 0


@both_ways
def test_a_token_is_sent_before_the_next_is_computed(bench: Bench) -> None:
    bench.batch.submit("alice", TOKENS[:20], max_tokens=5, on_token=bench.received.append)
    grown = []
    while bench.batch.pending:
        completed = bench.batch.step_once()
        grown.append(len(bench.received))
    assert grown[-5:] == [1, 2, 3, 4, 5]
    bench.free(*completed)


@both_ways
def test_log_probabilities_equal_mlx_lms(bench: Bench) -> None:
    done = bench.complete(TOKENS[:300], logprobs=3)
    steps = generate_step(mx.array(TOKENS[:300]), bench.of.model, max_tokens=12, prompt_cache=bench.of.empty())
    for received, (token, logprobs) in zip(bench.received, steps, strict=True):
        likeliest = np.argsort(-np.array(logprobs), kind="stable")[:3].tolist()
        assert received.token == token == likeliest[0]
        assert [token for token, _ in received.top] == likeliest
        np.testing.assert_allclose([logprob for _, logprob in received.top], np.array(logprobs)[likeliest], atol=1e-4)
        assert received.logprob == received.top[0][1]
    bench.free(done)


@both_ways
def test_text_that_may_be_a_stop_string_is_held_back(bench: Bench) -> None:
    whole = bench.complete(PLAIN)
    text = whole.text
    bench.received.clear()
    never = text[2:5] + "\x00"  # begins as the text does and goes on in another way
    done = bench.complete(PLAIN, stop=[never, text[7:10]])
    assert "".join(token.text for token in bench.received) == done.text == text[:7]
    texts = [token.text for token in bench.received]
    assert (texts[2:5], texts[5]) == ([""] * 3, text[2:6])
    assert texts[7:] == [""] * 3
    assert done.finish_reason == "stop"
    bench.free(whole, done)


@both_ways
def test_the_end_of_text_is_reported_with_the_held_back_text(bench: Bench) -> None:
    whole = bench.complete(PLAIN)
    bench.received.clear()
    at = next(i for i, token in enumerate(whole.tokens) if token not in whole.tokens[:i] and i > 2)
    tokenizer = letter_tokenizer()
    tokenizer.eos_token_ids = [whole.tokens[at]]
    bench.batch = BlockPoolBatchEngine(bench.of.model, tokenizer, bench.of.spec, bench.pool)
    done = bench.complete(PLAIN, stop=[whole.text[at - 1] + "\x00"])
    assert [token.ends_text for token in bench.received] == [False] * at + [True]
    assert [token.text for token in bench.received][-2:] == ["", whole.text[at - 1]]
    assert "".join(token.text for token in bench.received) == done.text == whole.text[:at]
    bench.free(whole, done)


@pytest.mark.parametrize("kind", [BPEStreamingDetokenizer, NaiveStreamingDetokenizer])
def test_half_a_character_is_not_readable(kind: Any) -> None:
    """With one token per byte, as any byte-level vocabulary encodes unknown text."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    text = AnswerText(kind(tokenizer), ())
    tokens = tokenizer.encode("a→ü🦭b")
    read = []
    for token in tokens:
        text.add(token)
        read.append(text.read())
    assert read == ["a", "", "", "→", "", "ü", "", "", "", "🦭", "b"]
    text.add(tokens[1])
    assert text.read() == ""
    text.finish()
    assert (text.read(), text.text) == ("\ufffd", "a→ü🦭b\ufffd")


@pytest.mark.parametrize(
    ("pieces", "stop", "read"),
    [
        (["a", "b", "ab", "c"], ["abc"], ["", "", "ab", ""]),
        (["xab", "abab", "c!"], ["ababc"], ["x", "ab", ""]),
        (["x\n", "\n", "y"], ["\n\nz"], ["x", "", "\n\ny"]),
        (["one", " tw", "o"], ["two", "one two"], ["", "", ""]),
    ],
)
def test_as_little_text_as_possible_is_held_back(pieces: list[str], stop: list[str], read: list[str]) -> None:
    text = AnswerText(Pieces(pieces), stop)
    found = []
    for i in range(len(pieces)):
        text.add(i)
        found.append(text.read())
    text.finish()
    assert found == read
    assert "".join([*found, text.read()]) == text.text


@kinds(IN_ONE_BATCH, IN_TURNS, WITH_STATE)
def test_full_blocks_of_the_prompt_precede_the_first_token(bench: Bench) -> None:
    shared: list[AgentBlocks] = []

    def keep(blocks: AgentBlocks) -> None:
        assert not bench.received
        bench.pool.share(blocks.block_ids, "elsewhere")
        shared.append(blocks)

    promised = bench.pool.used_bytes
    done = bench.complete(TOKENS[:769], on_prompt=keep)
    (blocks,) = shared
    assert blocks.tokens == tuple(TOKENS[:768])
    assert done.blocks.blocks[:3] == blocks.blocks
    assert promised < bench.pool.used_bytes == sum(block.nbytes for block in done.blocks.blocks)
    plain = bench.complete(TOKENS[:769])
    for block, other in zip(blocks.blocks, plain.blocks.blocks, strict=False):
        assert [bytes(page) for page in page_bodies(block.layers)] == [bytes(p) for p in page_bodies(other.layers)]
        assert (block.state is None) == (other.state is None)
    assert done.tokens == plain.tokens
    again = bench.complete(TOKENS[:769], blocks)
    assert (again.tokens_reused, again.tokens) == (768, plain.tokens)
    bench.free(done, plain, again)
    bench.pool.free(blocks.block_ids, "elsewhere")


@both_ways
def test_blocks_of_a_known_prompt_are_reported_too(bench: Bench) -> None:
    first = bench.complete(TOKENS[:600])
    shared: list[AgentBlocks] = []
    second = bench.complete(TOKENS[:600], first.blocks, on_prompt=shared.append)
    third = bench.complete(TOKENS[:20], on_prompt=shared.append)
    assert [blocks.blocks for blocks in shared] == [first.blocks.blocks[: len(shared[0].blocks)], ()]
    assert len(shared[0]) == (512 if bench.of.spec.batches else second.tokens_reused // 256 * 256)
    bench.free(first, second, third)


@both_ways
def test_no_byte_is_promised_twice(bench: Bench) -> None:
    """Blocks made before the answer use its reservation."""
    used: list[int] = []
    bench.batch.submit("alice", TOKENS[:769], max_tokens=200, on_prompt=lambda _: used.append(bench.pool.used_bytes))
    promised = bench.pool.used_bytes
    (done,) = bench.batch.step()
    assert used == [promised]
    assert bench.pool.used_bytes <= promised
    bench.free(done)


@both_ways
@pytest.mark.parametrize("receiver", ["on_token", "on_prompt"])
def test_a_receiver_that_fails_ends_its_own_answer_alone(bench: Bench, receiver: str) -> None:
    def fail(_: object) -> None:
        raise LookupError("nobody is there")

    alone = bench.complete(TOKENS[:300])
    failing = bench.batch.submit("bob", TOKENS[:600], max_tokens=8, **{receiver: fail})
    well = bench.batch.submit("alice", TOKENS[:300], max_tokens=12)
    done = {answer.uid: answer for answer in bench.batch.step()}
    assert done[well].tokens == alone.tokens
    failed = done[failing]
    assert (failed.finish_reason, str(failed.error), len(failed.blocks)) == ("error", "nobody is there", 0)
    assert len(failed.tokens) == (receiver == "on_token")
    bench.free(alone, done[well])


@both_ways
def test_a_receiver_may_cancel_its_answer_and_another(bench: Bench) -> None:
    uids: list[int] = []

    def leave(token: Token) -> None:
        bench.received.append(token)
        for uid in uids:
            bench.batch.cancel(uid)
        uids.clear()

    uids += [bench.batch.submit(name, TOKENS[:20], max_tokens=5, on_token=leave) for name in ("bob", "carol")]
    stays = bench.batch.submit("alice", TOKENS[:30], max_tokens=5)
    (done,) = bench.batch.step()
    assert (done.uid, len(bench.received)) == (stays, 1)
    bench.free(done)


@both_ways
def test_more_log_probabilities_than_tokens_are_refused(bench: Bench) -> None:
    for wrong in (-1, 98):
        with pytest.raises(ValueError, match=f"logprobs must be 0 to 97, got {wrong}"):
            bench.batch.submit("alice", TOKENS[:20], logprobs=wrong)


class Pieces:
    """A detokenizer of tokens that are whole words."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += self._pieces[token]

    def finalize(self) -> None:
        pass
