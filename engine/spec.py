"""The layout of a model's cache, measured with a few tokens, and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .caches import Layer, Matrices, Nesting, StateLayer, TokenLayer, UnsupportedCacheError, describe, nesting, parts
from .chains import SHARE_ALL, Chain, Sharing
from .model.identity import Identity, UnknownIdentityError
from .model.trial import Trial

BLOCK_TOKENS = 256  # mlx-lm grows its buffers by this number; a page of one head has 32 to 64 KiB
PROBED = [1, 0] * 6  # token ids of the probe, which every vocabulary has; some arrays grow with the first tokens only
LAYOUT_VERSION = 2  # of the layout of blocks and pages, and of the hashes over them


@dataclass(frozen=True, slots=True)
class ModelTag:
    """Short description of a model for messages. Two models may have the same tag; their fingerprints differ."""

    model_id: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int


Shapes = tuple[tuple[Matrices, ...], ...]  # the arrays of each layer; () for a layer without arrays of this kind


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """Description of a model's cache: its layers, the shapes of their arrays, and the fingerprint that two caches must
    share to be exchanged.
    """

    model_id: str
    block_tokens: int
    layers: tuple[Layer, ...]  # caches in the order of the model's layers; a layer may have several
    nesting: tuple[Nesting, ...]  # the structure of the caches of each layer of the model
    vocab_size: int
    context: int | None  # maximum number of tokens; None if the model's configuration does not set it
    fingerprint: int  # 64 bits; caches with equal fingerprints can be exchanged
    batches: bool  # whether mlx-lm's batches give the same results as the model alone
    resumes: bool = False  # whether a question after a context has the same results in one pass of the model
    refusal: str | None = None  # the reason if contexts of this model cannot be kept; `layers` is then empty
    identity: str | None = None  # the digest of the model's computation; None if unknown
    quantised_from: int = 0  # tokens of a prompt that are computed before its cache is quantised
    sharing: Sharing = SHARE_ALL  # which blocks the clients of a tenant share

    @classmethod
    def probe(
        cls,
        model: nn.Module,
        tokenizer: Any,
        *,
        model_id: str = "",
        block_tokens: int = BLOCK_TOKENS,
        cache: Sequence[Any] | None = None,
        quantised_from: int = 0,
    ) -> ModelCacheSpec:
        """Run `model` with a few tokens to find the layout of its cache, and test whether prompts have the same results
        in a batch as alone. Return the description.

        `cache` is an empty cache in place of the model's own, such as a quantised one. `quantised_from` is the number
        of tokens of a prompt that are computed before its cache is quantised. If the kind of the model's own cache is
        unknown, or the model cannot be identified, the spec has a `refusal` and no layers.

        Raises UnsupportedCacheError if the kind of `cache` is unknown, and ValueError for `block_tokens` below 1.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        probed = make_prompt_cache(model) if cache is None else cache
        logits = model(mx.array([PROBED]), cache=probed)
        layers: tuple[Layer, ...] = ()
        nestings: tuple[Nesting, ...] = ()
        identity, refusal = _identity(model)
        try:
            layers, nestings = _describe_all(probed)
        except UnsupportedCacheError as error:
            if cache is not None:
                raise
            refusal = str(error)
        if refusal:
            layers, nestings = (), ()
        vocabulary = logits.shape[-1]
        batches = resumes = False
        if layers and not quantised_from and all(hasattr(layer.empty(), "merge") for layer in layers):
            trial = Trial(model, layers, nestings, probed, vocabulary)
            batches = trial.batches()
            resumes = batches and trial.resumes()
        return cls(
            model_id=model_id,
            block_tokens=block_tokens,
            layers=layers,
            nesting=nestings,
            vocab_size=vocabulary,
            context=_context(model),
            fingerprint=fingerprint(identity, tokenizer, layers, block_tokens, quantised_from),
            batches=batches,
            resumes=resumes,
            refusal=refusal,
            identity=identity,
            quantised_from=quantised_from,
        )

    @property
    def tag(self) -> ModelTag:
        """Short description for people. Its heads and head_dim are those of a block's first page, 0 without pages."""
        first = next(chain.from_iterable(layer.matrices(1) for layer in self.layers), None)
        heads, head_dim = (first.heads, first.plane.head_dim) if first else (0, 0)
        return ModelTag(self.model_id, len(self.nesting), heads, head_dim, self.block_tokens)

    @property
    def has_state(self) -> bool:
        """Whether contexts can be continued only at positions with a kept state."""
        return any(isinstance(layer, StateLayer) and layer.planes for layer in self.layers)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's rows in all layers, without states."""
        return _nbytes(self.token_shapes(1))

    def state_nbytes(self, end: int) -> int:
        """Return the bytes of all layers' states (windows, recurrences) after `end` tokens of a context."""
        return _nbytes(self.state_shapes(end))

    def token_shapes(self, tokens: int) -> Shapes:
        """Return the shapes of the arrays with a row per token, by layer, for `tokens` tokens. A layer without such
        arrays has ().
        """
        return tuple(layer.matrices(tokens) if isinstance(layer, TokenLayer) else () for layer in self.layers)

    def state_shapes(self, end: int) -> Shapes:
        """Return the shapes of the states, by layer, after `end` tokens of a context. A layer without a state has
        ().
        """
        return tuple(layer.matrices(end) if isinstance(layer, StateLayer) else () for layer in self.layers)

    def chain(self, agent_id: str, tokens: Sequence[int]) -> Chain:
        """Return the chain that names the blocks of an agent's context of these tokens."""
        return self.sharing.chain(agent_id, tokens, self.block_tokens)

    def answer_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return the maximum length of an answer in tokens: `max_tokens`, or less if the model's context is shorter."""
        return min(max_tokens, self.context - prompt_tokens) if self.context else max_tokens

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


def _identity(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the digest of the model's computation, and the reason why it has none; one of them is None.

    The model must have run once, because some models create parts of themselves in the first run.
    """
    try:
        return Identity(model).digest, None
    except UnknownIdentityError as error:
        return None, str(error)


def _describe_all(cache: Sequence[Any]) -> tuple[tuple[Layer, ...], tuple[Nesting, ...]]:
    layers = tuple(describe(i, part) for i, layer in enumerate(cache) for part in parts([layer]))
    if not any(layer.planes for layer in layers):
        raise UnsupportedCacheError("the model caches nothing that could be reused")
    return layers, tuple(nesting(layer) for layer in cache)


def _context(model: nn.Module) -> int | None:
    """Return the model's context length in tokens, from its configuration, or from that of the language model in a
    multimodal model. Return None if it is not set.
    """
    for args in _configuration(model).values():
        language = args.get("text_config") or args
        length: int | None = (language if isinstance(language, dict) else vars(language)).get("max_position_embeddings")
        if length:
            return length
    return None


def _nbytes(shapes: Shapes) -> int:
    return sum(kept.nbytes for layer in shapes for kept in layer)


def fingerprint(
    identity: str | None, tokenizer: Any, layers: Sequence[Layer], block_tokens: int, quantised_from: int
) -> int:
    """Return a 64-bit hash of everything that two engines must have in common to exchange caches.

    It covers the model's computation (`identity`: another fine-tune, adapter or scale of an adapter differs, a copy in
    another directory does not), the vocabulary, the geometry and dtypes of the cache, the block size, the start of
    quantisation and the layout's version, but not the model's name.
    """
    fields = {
        "layout": LAYOUT_VERSION,
        "model": identity,
        "vocabulary": hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(),
        "layers": [[layer.KIND.__name__, dataclasses.astuple(cast(Any, layer))] for layer in layers],
        "block_tokens": block_tokens,
        "quantised_from": quantised_from,
    }
    canonical = json.dumps(fields, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little")


def _configuration(model: nn.Module) -> dict[str, Any]:
    """Return the model's construction arguments, its `args` or `config`, by the name of the attribute."""
    return {name: vars(value) for name, value in vars(model).items() if dataclasses.is_dataclass(value)}
