"""An engine as a process: each line of JSON on stdin is a conversation, the answer to it is a line of JSON on stdout.

With ``--store URL`` its contexts live on the page server between turns, without it in its own memory. It ends with its
input, so that it doesn't outlive the process that started it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.batch_engine import BlockPoolBatchEngine
from engine.blocks import AgentBlocks
from engine.caches import UnsupportedCacheError
from engine.model import UnknownModelError, load
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

AGENT = "keeper"
POOL_BLOCKS = 64  # 16,384 tokens
MAX_TOKENS = 32

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and what it took."""

    text: str
    tokens: list[int]  # of the answer
    prompt_tokens: int
    tokens_reused: int  # of the prompt
    time_to_first_token: float  # seconds since the question came, fetching from the store included
    store_trouble: dict[str, int]  # what PageTier counted in this turn


class Conversation:
    """The agent's side of a conversation."""

    def __init__(self, model_directory: str, store: str | None) -> None:
        model, self._tokenizer = load(model_directory)
        spec = ModelCacheSpec.probe(model, self._tokenizer)
        self._pool = BlockPool(POOL_BLOCKS)
        self._engine = BlockPoolBatchEngine(model, self._tokenizer, spec, self._pool)
        self._pages = PageTier(store, spec, self._pool) if store else None
        self._kept: AgentBlocks | None = None

    def answer(self, messages: Messages) -> Turn:
        """The likeliest next message, after the whole of `messages` has been tokenised anew."""
        asked = time.perf_counter()
        before = self._trouble()
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        known = self._pages.load(AGENT, prompt) if self._pages else self._kept
        submitted = time.perf_counter()
        self._engine.submit(AGENT, prompt, known, max_tokens=MAX_TOKENS)
        if known:
            self._pool.free(known.block_ids)
        (done,) = self._engine.step()
        if self._pages:
            self._pages.save(done.blocks)
            self._pool.free(done.blocks.block_ids)
        else:
            self._kept = done.blocks
        return Turn(
            text=done.text,
            tokens=list(done.tokens),
            prompt_tokens=done.prompt_tokens,
            tokens_reused=done.tokens_reused,
            time_to_first_token=submitted - asked + done.time_to_first_token,
            store_trouble=dict(self._trouble() - before),
        )

    def _trouble(self) -> Counter[str]:
        return self._pages.misses + self._pages.unsaved if self._pages else Counter()


def main() -> None:
    """Answer until the input ends. Exits with 1 when the model cannot be loaded."""
    parser = argparse.ArgumentParser(description="An engine that answers conversations, a line of JSON each.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", metavar="URL")
    args = parser.parse_args()
    try:
        conversation = Conversation(args.model, args.store)
    except (UnknownModelError, UnsupportedCacheError) as error:
        sys.exit(str(error))
    for line in sys.stdin:
        print(json.dumps(asdict(conversation.answer(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
