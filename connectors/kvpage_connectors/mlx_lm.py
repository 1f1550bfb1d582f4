"""mlx-lm with a kvpage-server: contexts of its HTTP server, and prompt caches under a name instead of in a file.

mlx-lm's server keeps the caches of its last prompts in memory (`LRUPromptCache`), and loses them at its end. Here the
server's cache writes each context to a kvpage-server, too, and prompts are looked up there before the generation thread
gets them: a request that waits for the network stops no stream. The contexts are those of kvpage-engine, so both reuse
each other's. Tried with mlx-lm 0.32.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Any, cast
from urllib.parse import urldefrag

import mlx.core as mx
import mlx.nn as nn
import redis
import xxhash
from kvpage.engine.caches import CacheStateError
from kvpage.engine.chains import unnamed_agent
from kvpage.engine.memory import kvcache
from kvpage.engine.memory.blocks import AgentBlocks, Arrays, BlockError
from kvpage.engine.pool import BlockPool
from kvpage.engine.spec import ModelCacheSpec
from kvpage.engine.tiers.pages import PageTier
from mlx_lm import server
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import LRUPromptCache

from kvpage_connectors.mlx_lm_one_pass import OnePassGenerator
from kvpage_connectors.reasons import Reasons, guarded
from kvpage_server.address import with_credentials
from kvpage_server.system.text import plural

log = logging.getLogger("kvpage")

MAX_FETCHED = 16  # contexts that were fetched and whose prompts the generation thread did not take yet
QUEUE_BYTES = 1 << 30  # of contexts that wait to be written; others are not written
CLOSE_SECONDS = 10.0  # at the end, for contexts that are not written yet
PIECE = 32 << 20  # bytes of a value that has a part of a named prompt cache


# -- Contexts of the server --------------------------------------------------------------------------------------------


def _nothing() -> tuple[list[Any], int] | None:
    return None


class StoredContexts:
    """Contexts of one model on a kvpage-server. Threads can share it. An error is a miss, which `reasons` logs."""

    def __init__(self, url: str, spec: ModelCacheSpec) -> None:
        """Connect in the background. Raises ValueError for an invalid URL."""
        self.spec = spec
        self.reasons = Reasons(log)
        self._pool = BlockPool()
        self._pages = PageTier(url, spec, self._pool)
        self._fetched: dict[tuple[int, ...], AgentBlocks] = {}  # by the prompt's tokens, the oldest first
        self._lock = threading.Lock()  # of `_fetched` and `_waiting`
        self._writer = ThreadPoolExecutor(1, "kvpage-write")
        self._waiting: dict[Future[None], int] = {}  # bytes of contexts that are not written yet
        self._failed = 0  # contexts that the server did not take

    @guarded(lambda: None)
    def fetch(self, tokens: Sequence[int], beyond: int) -> None:
        """Fetch the longest stored beginning of a prompt if it has more than `beyond` tokens. `take` returns it."""
        found = self._pages.fetch(unnamed_agent(""), tokens, beyond=beyond, named=False).result()
        if found is None:
            return
        with self._lock:
            dropped = [self._fetched.pop(tuple(tokens), None)]
            self._fetched[tuple(tokens)] = found
            if len(self._fetched) > MAX_FETCHED:  # a prompt that was refused, for example
                dropped.append(self._fetched.pop(next(iter(self._fetched))))
        for context in filter(None, dropped):
            self._free(context)

    @guarded(_nothing)
    def take(self, tokens: Sequence[int], beyond: int) -> tuple[list[Any], int] | None:
        """Return mlx-lm's caches with the beginning of a prompt that `fetch` has found, and its number of tokens; None
        if it has not more than `beyond`.
        """
        with self._lock:
            found = self._fetched.pop(tuple(tokens), None)
        if found is None:
            return None
        try:
            count = found.reusable_for(self.spec, tokens)
            return (kvcache.reconstruct(self.spec, found.blocks, count), count) if count > beyond else None
        finally:
            self._free(found)

    @guarded(lambda: None)
    def save(self, tokens: Sequence[int], cache: Sequence[Any], beginnings: Mapping[int, Sequence[Any]]) -> None:
        """Copy and write a context in the background, unless too many wait. mlx-lm does not change a finished `cache`.

        The states of its `beginnings`, caches by their number of tokens, are written with it.
        """
        nbytes = len(tokens) * self.spec.token_nbytes + self.spec.state_nbytes(len(tokens))
        with self._lock:
            if sum(self._waiting.values()) + nbytes > QUEUE_BYTES:
                self.reasons.count("save", "queue")
                return
        states = {count: kvcache.capture(self.spec, before) for count, before in beginnings.items()}
        mx.eval([layer.state for layer in cache])  # another thread cannot use arrays that are not evaluated
        writing = self._writer.submit(self._write, tokens, cache, states)
        with self._lock:
            self._waiting[writing] = nbytes
        writing.add_done_callback(self._written)

    def close(self) -> None:
        """Wait a while for contexts that are not written yet, then close the connections."""
        with self._lock:
            waiting = list(self._waiting)
        if lost := len(wait(waiting, CLOSE_SECONDS).not_done):
            log.warning("%s not written", plural(lost, "context"))
        if failed := self._failed:
            log.warning(
                "%s could not be saved since the start; a next turn saves its context again", plural(failed, "context")
            )
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._pages.close()

    def _blocks(self, tokens: Sequence[int], cache: Sequence[Any], states: Mapping[int, Arrays]) -> AgentBlocks:
        agent = unnamed_agent("")
        for held in (len(tokens), len(tokens) - 1):  # without a batch, the last token may not be in the cache
            ids = self._pool.allocate(self.spec.blocks_for(held), agent)
            try:
                blocks = kvcache.extract(self.spec, cache, ids, held, states=states)
            except (BlockError, CacheStateError):
                self._pool.free(ids, agent)
                if held < len(tokens):
                    raise
            else:
                return AgentBlocks(agent, tuple(tokens[:held]), blocks, self.spec.fingerprint)
        raise AssertionError("unreachable")

    @guarded(lambda: None)
    def _write(self, tokens: Sequence[int], cache: Sequence[Any], states: Mapping[int, Arrays]) -> None:
        context = self._blocks(tokens, cache, states)
        try:
            saved = self._pages.publish(context)
            if saved is None or not saved.whole:
                self._failed += 1
                self.reasons.count("save", self._pages.save_failure or "gone", len(context.blocks))
        finally:
            self._free(context)

    def _written(self, writing: Future[None]) -> None:
        with self._lock:
            del self._waiting[writing]

    def _free(self, context: AgentBlocks) -> None:
        self._pool.free(context.block_ids, context.agent_id)


class StoredPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache, with the contexts of a kvpage-server below it."""

    def __init__(self, url: str, max_size: int = 10, max_bytes: int = 1 << 63) -> None:
        """Create an empty cache. `max_size` and `max_bytes` limit the memory, as in mlx-lm."""
        super().__init__(max_size, max_bytes)
        self._url = url
        self._lock = threading.RLock()  # of the contexts in memory: threads of HTTP look them up
        self._contexts: dict[Any, StoredContexts] = {}  # by mlx-lm's key of a model

    def attach(self, key: Any, model: nn.Module, tokenizer: Any) -> None:
        """Look up and write contexts of a model, of which this computes a few tokens. A model whose contexts cannot be
        kept is named in the log, and works as in mlx-lm.
        """
        if key in self._contexts:
            return
        spec = ModelCacheSpec.probe(model, tokenizer, model_id=str(key[0]).rstrip("/").rpartition("/")[2])
        refusal = "a draft model has caches of its own" if key[2] is not None else spec.refusal
        if refusal:
            log.warning("contexts are not stored: %s", refusal)
            return
        self._contexts[key] = StoredContexts(self._url, spec)
        log.info("contexts are stored on %s", re.sub("//[^/]*@", "//", self._url))  # without user and password

    def takes_one_pass(self, key: Any) -> bool:
        """Return whether the model of `key` can be run by `OnePassGenerator`."""
        contexts = self._contexts.get(key)
        return contexts is not None and contexts.spec.resumes and not contexts.spec.has_state

    def prefetch(self, key: Any, tokens: Sequence[int]) -> None:
        """Fetch the beginning of a prompt that memory lacks, and wait for it. Call it in a thread of HTTP."""
        if contexts := self._contexts.get(key):
            with self._lock:
                found = self._trie.search(key, list(tokens))
            longest = found.common_prefix if found.longer and not contexts.spec.has_state else len(found.shorter or ())
            if found.exact is None:
                contexts.fetch(tokens, longest)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return caches with the longest beginning of a prompt that is in memory or was fetched, and the other
        tokens.
        """
        with self._lock:
            cache, rest = super().fetch_nearest_cache(model, tokens)
        contexts = self._contexts.get(model)
        if contexts and (taken := contexts.take(tokens, len(tokens) - len(rest))):
            log.info("%d of %d tokens are restored", taken[1], len(tokens))
            return taken[0], tokens[taken[1] :]
        return cache, rest

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a context in memory. Write it if it ends with an answer: then its beginnings are in it."""
        contexts, has_images = self._contexts.get(model), min(tokens, default=0) < 0  # mlx-lm's ids of images
        writes = contexts and cache_type == "assistant" and not has_images
        with self._lock:
            beginnings = self._beginnings(model, tokens) if contexts and writes and contexts.spec.has_state else {}
            super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        if contexts and writes:
            contexts.save(tokens, prompt_cache, beginnings)

    def _beginnings(self, model: Any, tokens: Sequence[int]) -> dict[int, list[Any]]:
        """Return the caches in memory that have the first tokens of a context, by their number of tokens."""
        found, node = {}, self._trie._trie.get(model, {})
        for count, token in enumerate(tokens[:-1], start=1):
            if (node := node.get(token)) is None:
                break
            if "__value__" in node:
                found[count] = node["__value__"].prompt_cache
        return found

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        with self._lock:
            super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)

    def close(self) -> None:
        """Wait a while for contexts that are not written yet, and close the connections."""
        for contexts in self._contexts.values():
            contexts.close()


# -- mlx-lm's server ---------------------------------------------------------------------------------------------------


def serve(url: str) -> None:
    """Run mlx-lm's server, with the arguments of the process, and with contexts on the kvpage-server at `url`."""
    stored: list[StoredPromptCache] = []
    loaded = threading.Event()  # whether the model of `--model` can be looked up

    class Models(server.ModelProvider):  # type: ignore[misc]
        def _load(self, *key: Any) -> None:
            super()._load(*key)
            stored[0].attach(self.model_key, self.model, self.tokenizer)
            one_pass = stored[0].takes_one_pass(self.model_key)
            server.BatchGenerator = OnePassGenerator if one_pass else BatchGenerator  # the next one has this model
            loaded.set()

    class Generator(server.ResponseGenerator):  # type: ignore[misc]
        def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
            while self.cli_args.model and self.generation_available() and not loaded.wait(0.5):
                pass
            key, named = self.model_provider.model_key, generation_args.model.model
            if key and named in ("default_model", key[0]):  # another model is loaded for its first prompt
                self._prefetch(key, request, generation_args)
            return super().generate(request, generation_args, progress_callback)

        def _prefetch(self, key: Any, request: Any, args: Any) -> None:
            try:
                tokenized = super()._tokenize(self.model_provider.tokenizer, copy.deepcopy(request), args)
            except Exception:  # noqa: BLE001 - the generation thread raises it again, and answers with it
                return
            prompt, *_, vision = tokenized
            if vision is None:
                stored[0].prefetch(key, prompt)
                request.tokenized = key, tokenized

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            """Return the tokens from `_prefetch`, unless another model was loaded since."""
            key, tokenized = getattr(request, "tokenized", (None, None))
            same = key is not None and key == self.model_provider.model_key
            return tokenized if same else super()._tokenize(tokenizer, request, args)

    def prompt_cache(max_size: int) -> StoredPromptCache:
        stored.append(StoredPromptCache(url, max_size))
        return stored[0]

    server.ModelProvider, server.ResponseGenerator, server.LRUPromptCache = Models, Generator, prompt_cache
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # mlx-lm ends its thread after an interrupt
    try:
        server.main()
    finally:
        for cache in stored:
            cache.close()


# -- Named prompt caches -----------------------------------------------------------------------------------------------


def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
    """Save a prompt cache as mlx-lm does: in a file, or for ``redis://HOST:PORT#NAME`` on a kvpage-server.

    Raises ValueError for an URL without a name, and redis.RedisError if the server does not take it.
    """
    if "://" not in file_name:
        caches.save_prompt_cache(file_name, cache, metadata)
        return
    with _connected(file_name) as (client, key), tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cache.safetensors"
        caches.save_prompt_cache(path, cache, metadata)
        with open(path, "rb") as file:
            whole, pieces = xxhash.xxh3_128(), 0
            name = f"{key}:{os.urandom(8).hex()}"  # an older cache stays whole until its name is given to this one
            while piece := file.read(PIECE):
                client.set(f"{name}:{pieces}", piece)
                whole.update(piece)
                pieces += 1
        head = json.dumps({"name": name, "pieces": pieces, "xxh3_128": whole.hexdigest()})
        if older := cast(bytes | None, client.set(key, head, get=True)):
            client.delete(*_pieces(json.loads(older)))


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Load a prompt cache as mlx-lm does: from a file, or for ``redis://HOST:PORT#NAME`` from a kvpage-server.

    Raises ValueError for an URL without a name and for changed bytes, FileNotFoundError for a cache that was not stored
    or was evicted, and redis.RedisError if the server does not answer.
    """
    if "://" not in file_name:
        return caches.load_prompt_cache(file_name, return_metadata)
    with _connected(file_name) as (client, key), tempfile.TemporaryDirectory() as folder:
        path, whole = f"{folder}/cache.safetensors", xxhash.xxh3_128()
        head = json.loads(cast(bytes | None, client.get(key)) or "{}")
        with open(path, "wb") as file:
            for name in _pieces(head):
                piece = cast(bytes | None, client.get(name))
                if piece is None:
                    head = {}
                    break
                whole.update(piece)
                file.write(piece)
        if not head:
            raise FileNotFoundError(f"{file_name} was not stored, or was evicted")
        if whole.hexdigest() != head["xxh3_128"]:
            raise ValueError(f"{file_name} has other bytes than were stored")
        return caches.load_prompt_cache(path, return_metadata)


def check_named(url: str) -> None:
    """Raise ValueError for an URL without a name, and redis.RedisError if its server does not answer."""
    with _connected(url) as (client, _):
        client.ping()


def _pieces(head: dict[str, Any]) -> list[str]:
    return [f"{head['name']}:{i}" for i in range(head.get("pieces", 0))]


@contextmanager
def _connected(file_name: str) -> Iterator[tuple[redis.Redis, str]]:
    """Yield a connection to the server of a URL, and the key of its name."""
    url, name = urldefrag(file_name)
    if not name:
        raise ValueError(f"a prompt cache on a server needs a name, as in redis://HOST:PORT#NAME, got {file_name!r}")
    with closing(redis.Redis.from_url(with_credentials(url))) as client:
        yield client, f"mlx-prompt-cache:{name}"
