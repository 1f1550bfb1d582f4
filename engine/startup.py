"""Construction of an engine from command line options: model, memory and tiers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path

from kvpage_server.client.commands import Coding
from kvpage_server.kv_events import Event
from kvpage_server.system.durable import private_directory

from .agent_engine import AgentEngine
from .batch_engine import BlockPoolBatchEngine
from .caches import UnsupportedCacheError, parts, quantised
from .chains import Share, Sharing, common_prefix
from .generation.templates import Renderer
from .generation.text import ChatTemplate
from .memory.limits import set_limits
from .model import UnknownModelError, adapt, load, unusable
from .pool import BlockPool
from .spec import ModelCacheSpec
from .tiers.cold import SafetensorsCacheAdapter
from .tiers.pages import RESTORE_SECONDS, PageTier
from .tiers.store import AgentCacheStore, CacheConfig, Keep

log = logging.getLogger(__name__)

CANNOT_OPEN = (UnknownModelError, UnsupportedCacheError, ValueError, OSError)  # exceptions of Engine.open
KV_GROUP_SIZE = 64  # values that share a scale in quantised caches


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an engine, from the command line."""

    model: str  # a directory, or the id of a model in this machine's Hugging Face cache
    store: str | None = None  # the URL of a page server
    cold: Path | None = None  # a directory for contexts in files
    cold_code: bool = False  # write these files in the lossless code
    page_code: Coding = "auto"  # whether blocks travel to and from the page server in the lossless code
    kv_bits: int | None = None  # keep keys and values in 4 or 8 bits
    memory: int | None = None  # bytes of contexts in memory; a quarter of the machine's if None
    restore_within: float = RESTORE_SECONDS  # maximum seconds of a load
    kv_quantised_from: int = 0  # tokens of a prompt that are computed before its cache is quantised
    keep: Keep = "worth"  # which contexts without a name are written to the page server
    share: Share = "all"  # which first blocks of contexts the clients of a tenant share
    in_turns: bool = False  # never compute several prompts in one batch
    adapter: Path | None = None  # a directory with an adapter of mlx-lm for the model
    models: int = 1  # in this process, which have equal parts of `memory`
    publish: Callable[[Event], None] | None = None  # gets the KV events of blocks in memory

    def check(self) -> None:
        """Raise ValueError for an option that has no effect without another one."""
        if self.kv_quantised_from and not self.kv_bits:
            raise ValueError("without --kv-bits nothing is quantised, from no token on")
        if self.cold_code and not self.cold:
            raise ValueError("--cold-code needs --cold: it is the code of the files in that directory")
        if self.page_code == "always" and not self.store:
            raise ValueError("--page-code always needs --store: blocks travel to and from a page server")

    def weights_on_disk(self) -> int:
        """Return the bytes of the model's weights. Raises UnknownModelError if there is no such model."""
        return sum(path.stat().st_size for path in _directory(self.model).glob("model*.safetensors"))


@dataclass(frozen=True, slots=True)
class Engine:
    """A model, its contexts and their tiers. One thread owns it, and must call `close`, which saves dirty contexts."""

    model_id: str
    model: nn.Module
    weights: int  # bytes
    tokenizer: TokenizerWrapper
    spec: ModelCacheSpec
    pool: BlockPool
    batch: BlockPoolBatchEngine
    pages: PageTier | None
    store: AgentCacheStore
    agent_engine: AgentEngine

    @classmethod
    def open(cls, options: Options, report: Callable[[str], object] = lambda _: None) -> Self:
        """Load the model and connect the tiers. `report` is called with a text before each long step.

        Raises UnknownModelError, UnsupportedCacheError, ValueError for invalid options, and OSError for an unusable
        directory. A page server that does not answer is no error.
        """
        options.check()
        directory = _directory(options.model)
        if options.cold:
            _make_cold(options.cold.expanduser())
        begun = time.monotonic()
        limits = set_limits()
        report(f"loading the weights of {options.model}, {options.weights_on_disk() / 1e6:.0f} MB")
        model, tokenizer = load(directory)
        if options.adapter:
            report(f"adding the adapter in {options.adapter}")
            adapt(model, options.adapter)
        report("hashing the weights, and testing the model's cache")
        name = model_name(options.model, options.adapter)
        spec = _probe(model, tokenizer, name, options.kv_bits, options.kv_quantised_from)
        spec = replace(spec, sharing=sharing(options.share, tokenizer))
        # Only tokens that have logits can end an answer: MLX does not check indices.
        tokenizer.eos_token_ids = {id_ for id_ in tokenizer.eos_token_ids if id_ < spec.vocab_size}
        if options.in_turns:
            spec = replace(spec, batches=False, resumes=False)
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        pool = BlockPool(total_bytes=limits.contexts(weights, options.memory, options.models))
        report(limits.described(weights, pool.total_bytes))
        _check_space(spec, pool.total_bytes, options.models)
        within = options.restore_within
        pages = None
        if options.store:
            pages = PageTier(options.store, spec, pool, restore_within=within, code=options.page_code)
        cold = SafetensorsCacheAdapter(spec, pool, options.cold, code=options.cold_code) if options.cold else None
        config = CacheConfig(keep=options.keep, restore_within=within)
        store = AgentCacheStore(spec, pool, pages=pages, cold=cold, config=config, publish=options.publish)
        store.publish_statistics()
        batch = BlockPoolBatchEngine(model, tokenizer, spec, pool)
        agent_engine = AgentEngine(batch, store)
        report(f"{spec.model_id} was loaded in {time.monotonic() - begun:.1f} s")
        return cls(spec.model_id, model, weights, tokenizer, spec, pool, batch, pages, store, agent_engine)

    def close(self) -> int:
        """Drop unanswered prompts, write contexts that are not stored yet, and close the tiers.

        Return the number of contexts that could not be saved.
        """
        self.agent_engine.shutdown()
        return self.store.close()


def sharing(share: Share, tokenizer: TokenizerWrapper) -> Sharing:
    """Return the rule `share`: which first blocks the clients of a tenant may reuse from each other. For "system", find
    the tokens around a system message by applying the tokenizer's chat template to three short conversations.

    Raises ValueError if there is no template, or it does not put a system message before the user's.
    """
    if share != "system":
        return Sharing(share)

    def tokens(system: str, user: str) -> tuple[int, ...]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return tuple(chat.tokens(messages, asks=False))

    try:
        with closing(Renderer()) as renderer:
            chat = ChatTemplate(tokenizer, renderer)
            one, other, third = tokens("x", "a"), tokens("y", "a"), tokens("x", "b")
    except Exception as error:
        raise ValueError(f"--share system needs a chat template with system messages: {error}") from error
    head, user = common_prefix(one, other), common_prefix(one, third)
    mark = one[len(one) - common_prefix(one[::-1], other[::-1]) : user]
    if not mark or head >= user:
        raise ValueError("--share system needs a chat template in which a system message precedes that of a user")
    special = mark[0] in tokenizer.all_special_ids
    return Sharing(share, one[:head], mark[:1] if special else mark)


def _probe(
    model: nn.Module, tokenizer: TokenizerWrapper, model_id: str, kv_bits: int | None, quantised_from: int = 0
) -> ModelCacheSpec:
    """Probe the model, and return its description. With `kv_bits`, keys and values of layers with a row per token are
    quantised, from token `quantised_from` of a prompt on, and a warning names the kinds of the other layers.

    Raises UnknownModelError if MLX cannot compute the model here, and UnsupportedCacheError if the model cannot use
    such a cache.
    """
    failure = f"{model_id} cannot be computed on this machine"
    with unusable(failure):
        mx.eval(model(mx.array([[0]]), cache=make_prompt_cache(model)))
    made = make_prompt_cache(model)
    cache = [quantised(layer, KV_GROUP_SIZE, kv_bits) for layer in made] if kv_bits else made
    kinds = {type(part) for part in parts(cache)}
    if kv_bits and (whole := sorted(kind.__name__ for kind in kinds - {QuantizedKVCache})):
        log.warning("what these layers keep is not kept in %d bits but as it is: %s", kv_bits, ", ".join(whole))
    if QuantizedKVCache not in kinds:
        with unusable(failure):
            return ModelCacheSpec.probe(model, tokenizer, model_id=model_id)
    try:
        return ModelCacheSpec.probe(model, tokenizer, model_id=model_id, cache=cache, quantised_from=quantised_from)
    except Exception as error:
        raise UnsupportedCacheError(
            f"{model_id} cannot do with keys and values of {kv_bits} bits, in groups of {KV_GROUP_SIZE}: {error}"
        ) from error


def _check_space(spec: ModelCacheSpec, contexts: int, models: int) -> None:
    """Raise ValueError if a model's contexts have fewer bytes than a block, with the states of a prompt and an answer.
    All `models` models have as many.
    """
    least = spec.block_nbytes + spec.state_nbytes(spec.block_tokens)
    if contexts < least:
        raise ValueError(
            f"contexts of {spec.model_id} have {contexts:,} bytes of memory, and {spec.block_tokens} tokens take "
            f"{least:,}: --memory must be at least {-(-least * models >> 10)}kb"
        )


def model_name(model: str, adapter: Path | None = None) -> str:
    """Return the model's name for clients: the directory's name or the Hugging Face id, and the adapter's name."""
    path = Path(model)
    name = path.resolve().name if path.is_dir() else model
    return f"{name}+{adapter.resolve().name}" if adapter else name


def _directory(model: str) -> Path:
    """Return the directory of a model, or of the model with this id in the Hugging Face cache, without a download.
    Raises UnknownModelError.
    """
    if not Path(model).is_dir():
        with suppress(Exception):  # any exception of the hub's client means that the model is not in the cache
            return Path(hf_repo_to_path(model))
        raise UnknownModelError(
            f"{model} is neither a directory nor the id of a model in this machine's Hugging Face cache; "
            "`kvpage-engine fetch-model smollm2` gets a small one"
        )
    return Path(model)


def _make_cold(directory: Path) -> None:
    """Create the directory of the cold tier, for this user only. Raises OSError."""
    try:
        private_directory(directory)
    except OSError as error:
        raise OSError(
            f"--cold is a directory, which is made if it is missing: {directory}: {error.strerror}"
        ) from error
