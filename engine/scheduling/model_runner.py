"""The model runner: it runs a model in mlx-lm's batches, or one prompt at a time where batches give other results. And
the detector of a model that has changed.
"""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from kvpage_server.tracing import is_seen, span

from ..generation.unbatched import SHORT_TOKENS, OnePassGenerator, UnbatchedGenerator
from ..memory import kvcache
from ..memory.blocks import AgentBlocks
from ..memory.kvcache import Cache
from ..model.identity import Identity, UnknownIdentityError
from ..spec import ModelCacheSpec
from .request import Request

# -- Detection of a model that has changed since it was probed ---------------------------------------------------------

log = logging.getLogger(__name__)


class ModelWatch:
    """Detector of changes of a model. It compares the identity of the model's Python objects, its modules and arrays,
    and hashes the weights only if one of them was replaced.
    """

    def __init__(self, model: nn.Module, spec: ModelCacheSpec) -> None:
        self._model = model
        self._spec = spec
        self._identity: Identity | None = None  # of the last hash; None if unknown
        self._same = not spec.refusal
        if not spec.refusal:
            self._look()

    def same(self) -> bool:
        """Return whether the model computes the same as when it was probed; False if that is unknown."""
        if not self._spec.refusal and not (self._identity and self._identity.holds()):
            self._look()
        return self._same

    def forget(self) -> None:
        """Make the next call of `same` hash the whole model again."""
        self._identity = None

    def _look(self) -> None:
        was, why = self._same, "it computes something else"
        try:
            self._identity = Identity(self._model, self._identity)
            self._same = self._identity.digest == self._spec.identity
        except UnknownIdentityError as error:
            self._identity, self._same, why = None, False, str(error)
        if was and not self._same:
            log.warning("the model is not the one that was probed (%s): nothing is reused or kept", why)


class ModelRunner:
    """Executor of requests, step by step. `insert` returns the uid by which the other methods name a request. After a
    step that raised, `restart` must be called.
    """

    def __init__(self, model: nn.Module, spec: ModelCacheSpec, stop_tokens: Any, prefill_chunk: int) -> None:
        self._model = model
        self._spec = spec
        self._stop_tokens = stop_tokens
        self._prefill_chunk = prefill_chunk
        self._generator = self._new_generator()

    def insert(self, request: Request) -> int:
        """Add a request, and return its uid. Its prompt is divided into segments that end at its checkpoints."""
        last = [len(request.prompt) - 1] if request.forked else []  # before it, forks share the cache
        ends = sorted({request.tokens_reused, *request.checkpoints, *last, len(request.prompt)})
        ends = ends[ends.index(request.tokens_reused) :]
        (uid,) = self._generator.insert_segments(
            [[list(request.prompt[start:end]) for start, end in pairwise(ends)]],
            max_tokens=[request.max_tokens],
            caches=[request.cache],
            all_tokens=[list(request.prompt[: request.tokens_reused])],
            choices=[request.choice],
        )
        return int(uid)

    def copied(self, uid: int, tokens: int) -> Cache | None:
        """Return a copy of the cache of a request; None unless it has `tokens` tokens now."""
        held = self.held(uid)
        return copy.deepcopy(held[0]) if held and len(held[1]) == tokens else None

    def takes_one_pass(self, reused: int, tokens: int) -> bool:
        """Return whether a prompt of `tokens` tokens, of which `reused` are restored, may be computed in one pass of
        the model.
        """
        return self._spec.resumes and reused > 0 and tokens - reused <= SHORT_TOKENS

    def step(self) -> tuple[list[Any], list[Any]]:
        """Advance prompts by a chunk and answers by a token. Return mlx-lm's responses for prompts and for tokens."""
        prompts, tokens = self._generator.next()
        return prompts, tokens

    def extract(self, uid: int) -> tuple[Cache, list[int]]:
        """Return the cache of a request, and the tokens that it has. Raises KeyError if the request is complete."""
        cache, tokens = self._generator.extract_cache([uid])[uid]
        return cache, tokens

    def held(self, uid: int) -> tuple[Cache, list[int]] | None:
        """Return the cache of a request and the tokens that it has; None if the generator does not have it, because
        it was complete after its first token.
        """
        found: tuple[Cache, list[int]] | None = self._generator.extract_cache([uid]).get(uid)
        return found

    def remove(self, uid: int) -> None:
        self._generator.remove([uid])

    def restart(self) -> None:
        """Drop all requests, and create a new generator. A failed step leaves caches partly written."""
        with suppress(Exception):
            self._generator.close()
        self._generator = self._new_generator()

    def close(self) -> None:
        """Free mlx-lm's memory."""
        self._generator.close()

    def cache(self, blocks: AgentBlocks | None, tokens: int) -> Cache:
        """Return a cache with the first `tokens` tokens of `blocks`, or an empty one."""
        if blocks and tokens:
            with span("kvpage.assemble") as seen:
                if is_seen(seen):
                    seen.set(
                        tokens=tokens, blocks=len(blocks.blocks), bytes=sum(block.nbytes for block in blocks.blocks)
                    )
                return kvcache.reconstruct(self._spec, blocks.blocks, tokens)
        if self._spec.refusal or self._spec.quantised_from:
            return list(make_prompt_cache(self._model))
        return kvcache.empty(self._spec)

    def _new_generator(self) -> Any:
        stop, chunk = self._stop_tokens, self._prefill_chunk
        if self._spec.batches:
            short = SHORT_TOKENS if self._spec.resumes else 0
            return OnePassGenerator(self._model, stop_tokens=stop, prefill_step_size=chunk, short=short)
        return UnbatchedGenerator(
            self._model,
            stop_tokens=stop,
            prefill_step_size=chunk,
            quantised_from=self._spec.quantised_from,
            quantised=partial(kvcache.quantised, self._spec),
        )
