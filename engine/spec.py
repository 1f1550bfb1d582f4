"""The layout of a model's cache, measured with a few tokens, its fingerprint, and a trial of its results in a batch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import CacheList, make_prompt_cache

from .caches import (
    FullLayer,
    Layer,
    Matrices,
    Nesting,
    StateLayer,
    TokenLayer,
    UnsupportedCacheError,
    WindowLayer,
    assemble,
    describe,
    nesting,
    parts,
)
from .chains import SHARE_ALL, Chain, Sharing
from .generation.unbatched import Sampler, logits_after, normalised
from .model.identity import Identity, UnknownIdentityError

# -- The trial of a model's results in a batch -------------------------------------------------------------------------
#
# Do prompts have the same results in a batch as alone, and a question in one pass of the model as in two? In a batch,
# prompts of different lengths are padded, and some models include the padding in their state. Some models compute
# several tokens after a context with another mask or formula than one token. No attribute of a model reveals that, so
# it is run: at the beginning of a context and, if layers have windows, beyond the window.
#
# A trial takes about thirty steps of the model, most of one token, and twice that if there are windows. A long context
# is not computed: its caches repeat the rows of a short context, with noise.

_LENGTHS = (16, 15, 5, 9)  # of prompts, which differ by one and by many; the last joins late
_COMPARED = (5, 2, 2, 2)  # compared tokens of each answer; the first answer continues after the last prompt has joined
_BEGIN = (9, -4, None, 1)  # position of each prompt, relative to the end of a window; None: no context
_QUESTION = 6  # tokens
_FOLLOWING = 2  # compared tokens of its answer
_INDEXED = 4096  # tokens of context above which sparse attention omits some
_LIMITS = {
    mx.bfloat16: 4e-2,
    mx.float16: 1e-2,
    mx.float32: 1e-4,
}  # of `_error`: above rounding, below the effect of padding
_QUANTISED_LIMITS = {8: 2e-2, 4: 1e-1}  # by bits of a value; rounding may change a value by one quantisation step

_NOT_MADE_FOR_IT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

Start = Callable[[], list[Any]]  # returns new caches to continue from


class Trial:
    """Trial of a model, which is run when the model is loaded.

    `layers` are the codecs of its caches, `nesting` their nesting in CacheLists. `computed` are its caches after a few
    tokens. `vocabulary` is the number of token ids.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        nesting: Sequence[Nesting],
        computed: Sequence[Any],
        vocabulary: int,
    ) -> None:
        self._model = model
        self._layers = layers
        self._nesting = nesting
        self._prompts = [_tokens(i, length, vocabulary) for i, length in enumerate(_LENGTHS)]
        self._answers = [_tokens(i + 10, 4 * max(_COMPARED), vocabulary) for i, _ in enumerate(_LENGTHS)]
        self._limit = max([_limit(model), *(_QUANTISED_LIMITS[layer.packed[0]] for layer in layers if layer.packed)])
        together = [parts([cache]) for cache in assemble(nesting, iter(layers)) if type(cache) is CacheList]
        self._indexed = any(all(isinstance(layer, FullLayer) for layer in kept) for kept in together)
        self._computed = computed

    def batches(self) -> bool:
        """Return whether each prompt has the same results in a batch of mlx-lm as alone, within rounding.

        Return False, without a trial, if a context beyond the windows is larger than the model's weights: config.json
        gives a window of any length.
        """
        windows = [layer for layer in self._layers if isinstance(layer, WindowLayer)]
        context = sum(kept.nbytes for layer in windows for kept in layer.matrices(layer.window))
        if context > sum(array.nbytes for _, array in tree_flatten(self._model.parameters())):
            return False
        begun: list[list[Start]] = [[self._fresh for _ in _LENGTHS]]
        if self._sees_range:
            begun.append([self._fresh if at is None else partial(self._begun, at) for at in _BEGIN])
        return all(self._batches(starts) for starts in begun)

    def resumes(self) -> bool:
        """Return whether a question after a context has the same results in one pass as in two, of which the second has
        its last token.

        A recurrence accumulates rounding errors: a small error at the first token can change the sixth one. So with
        recurrent layers the limit of the error is that of float32.
        """
        recurrent = any(layer.RECURRENT for layer in self._layers)
        limit = _LIMITS[mx.float32] if recurrent else self._limit
        starts = [None, *(at for at in _BEGIN if at is not None and self._sees_range)]
        *rest, last = self._prompts[0][:_QUESTION]
        answer = [[token] for token in self._answers[0][: _FOLLOWING - 1]]
        return all(
            _error(
                self._logprobs(self._begun(at), [[*rest, last], *answer]),
                self._logprobs(self._begun(at), [rest, [last], *answer])[1:],
            )
            <= limit
            for at in starts
        )

    @property
    def _sees_range(self) -> bool:
        return self._indexed or any(isinstance(layer, WindowLayer) for layer in self._layers)

    def _batches(self, starts: Sequence[Start]) -> bool:
        try:
            found = self._together(starts)
        except _NOT_MADE_FOR_IT:
            return False
        for start, prompt, answer, together in zip(starts, self._prompts, self._answers, found, strict=True):
            following = [[token] for token in answer[: len(together) - 1]]
            alone = self._logprobs(start(), [prompt[:-1], prompt[-1:], *following])
            if not _error(together, alone[1:]) <= self._limit:  # "not <=", so that nan fails, too
                return False
        return True

    def _together(self, starts: Sequence[Start]) -> list[mx.array]:
        """Return the log-probabilities of each answer when all prompts run in a batch, ``[compared, vocabulary]``."""
        seen = [list[mx.array]() for _ in starts]
        generator = BatchGenerator(self._model)

        def insert(prompts: Sequence[int]) -> None:
            generator.insert_segments(
                [[self._prompts[i]] for i in prompts],
                max_tokens=[len(self._answers[i]) for i in prompts],
                caches=[starts[i]() for i in prompts],
                all_tokens=[[] for _ in prompts],
                samplers=[_recorder(seen[i], self._answers[i]) for i in prompts],
            )

        try:
            insert(range(len(seen) - 1))
            while not all(seen[:-1]):
                generator.next()
            insert([len(seen) - 1])
            while any(len(steps) < count for steps, count in zip(seen, _COMPARED, strict=True)):
                generator.next()
        finally:
            generator.close()
        return [mx.stack(steps[:count]) for steps, count in zip(seen, _COMPARED, strict=True)]

    def _logprobs(self, cache: list[Any], given: Sequence[Sequence[int]]) -> mx.array:
        """Run the model once for each item of `given`. Return the log-probabilities after each, ``[given,
        vocabulary]``.
        """
        logprobs = [
            normalised(logits_after(self._model, mx.array(list(tokens)), cache))[0].astype(mx.float32)
            for tokens in given
        ]
        return mx.stack(logprobs)

    def _fresh(self) -> list[Any]:
        return assemble(self._nesting, (layer.empty() for layer in self._layers))

    def _begun(self, at: int | None) -> list[Any]:
        """Return caches with content: the computed ones, or with `at` those of a simulated context.

        The simulated context ends `at` tokens after the end of a window, or before it if `at` is negative.
        """
        held = zip(self._layers, parts(self._computed), strict=True)
        return assemble(self._nesting, (self._grown(i, layer, cache, at) for i, (layer, cache) in enumerate(held)))

    def _grown(self, i: int, layer: Layer, cache: Any, at: int | None) -> Any:
        """Return a copy of a layer's cache, extended to a simulated context of the given end, as in `_begun`, if the
        kind allows it.
        """
        if not layer.planes:
            return layer.empty()
        if isinstance(layer, TokenLayer):
            tokens = cache.offset if at is None or not self._indexed else _INDEXED + at
            arrays = [array[0, :, : cache.offset] for array in layer.arrays(cache)]
            return layer.join([tuple(_longer(array, tokens, i) for array in arrays)], tokens)
        if isinstance(layer, WindowLayer) and at is not None:
            end = max(1, layer.window + at)
            rows = min(end, layer.window)
            keys, values, _ = layer.capture(cache)
            index = mx.array([[[rows]]], mx.uint32)
            return layer.restore((_longer(keys, rows, i), _longer(values, rows, i), index), end)
        return layer.restore(layer.capture(cache), getattr(cache, "offset", 0))


def _tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """Return `count` pseudo-random token ids below `vocabulary`."""
    return [(7919 * (64 * seed + i) + 104729 * i * i) % vocabulary for i in range(1, count + 1)]


def _limit(model: nn.Module) -> float:
    """Return the largest accepted result of `_error` for the coarsest dtype of the model."""
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    return next((limit for dtype, limit in _LIMITS.items() if dtype in dtypes), _LIMITS[mx.float32])


def _recorder(seen: list[mx.array], answer: Sequence[int]) -> Sampler:
    """Return a sampler that appends the log-probabilities to `seen`, and returns the tokens of `answer` in order."""

    def sample(logprobs: mx.array) -> mx.array:
        seen.append(logprobs[0].astype(mx.float32))
        return mx.array([answer[(len(seen) - 1) % len(answer)]])

    return sample


def _longer(rows: mx.array, count: int, seed: int) -> mx.array:
    """Return ``[heads, count, dim]``: the first rows or, if there are too few, repeated rows with noise, so that no two
    are equal.
    """
    again = mx.concatenate([rows] * -(-count // rows.shape[1]), axis=1)[:, :count]
    if count <= rows.shape[1]:
        return again
    noise = mx.random.normal(again.shape, key=mx.random.key(seed)) * mx.std(rows.astype(mx.float32))
    return again + noise.astype(rows.dtype)


def _error(found: mx.array, right: mx.array) -> float:
    """Return the root mean square difference of log-probabilities, in standard deviations of `right`."""
    finite = mx.isfinite(right)  # some models exclude some tokens
    count = finite.sum()
    mean = mx.where(finite, right, 0).sum() / count
    variance = mx.where(finite, right - mean, 0).square().sum() / count
    differences = mx.where(found == right, 0, found - right).square().mean()
    return cast(float, mx.sqrt(differences / variance).item())


BLOCK_TOKENS = 256  # mlx-lm grows its buffers by this number; a page of one head has 32 to 64 KiB
PROBED = [1, 0] * 6  # token ids of the probe, which every vocabulary has; some arrays grow with the first tokens only
LAYOUT_VERSION = 2  # of the layout of blocks and pages, and of the hashes over them


# -- The layout and the fingerprint ------------------------------------------------------------------------------------


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
    def name(self) -> str:
        """The last part of the model's id, for the names of threads."""
        return self.model_id.rpartition("/")[2]

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

    @property
    def block_nbytes(self) -> int:
        """Bytes of a full block, with one state."""
        return self.block_tokens * self.token_nbytes + self.state_nbytes(self.block_tokens)

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
