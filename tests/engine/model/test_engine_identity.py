"""Two models share contexts only if they compute the same: every change of answers changes the identity.

The differences are generated: every attribute that the modules of a family have is changed, and where that changes the
logits by a bit, the identity has to be another.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine_families import TOKENIZER, TOKENS
from engine_models import FAMILIES, tiny, tiny_llama
from pools import pool_of
from servers import RunningServer

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from engine.batch_engine import CHANGED, BlockPoolBatchEngine
from engine.model.identity import Identity
from engine.pool import BlockPool
from engine.scheduling.request import CompletedGeneration, SchedulerConfig
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

PROMPT = TOKENS[:70]  # longer than the families' windows


def digest(model: Any) -> str:
    return Identity(model).digest


def adapted(scale: float = 2.0, rank: int = 4, *, dora: bool = False) -> Any:
    """A Llama with the same adapter whatever its scale, as one file loaded with several settings."""
    model = tiny_llama()
    mx.random.seed(1)
    linear_to_lora_layers(model, 4, {"rank": rank, "dropout": 0.0, "scale": scale}, use_dora=dora)
    for module in model.modules():
        if "lora_b" in module:
            module.lora_b = mx.random.normal(module.lora_b.shape, scale=0.1)
    model.eval()
    return model


KINDS: dict[str, Callable[[], Any]] = {
    **{family: partial(tiny, family) for family in FAMILIES},
    "lora": adapted,
    "dora": partial(adapted, dora=True),
}
UNLIKE = ["llama", "gemma3_text", "gpt_oss", "deepseek_v32", "qwen3_next", "rwkv7", "lora"]  # layers of all sorts


@dataclass(frozen=True)
class Place:
    """The place of a value in a model."""

    path: str
    name: tuple[Any, ...]  # the common name of places of the same kind
    value: Any
    put: Callable[[Any], None]


def places(path: str, value: Any, seen: set[int]) -> Iterator[Place]:
    """Every place below `value`, however it is held."""
    if id(value) in seen:
        return
    seen.add(id(value))
    held: list[tuple[Any, Any, Callable[[Any], None]]] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        held += [(key, value[key], partial(value.__setitem__, key)) for key in keys]
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(getattr(value, "__code__", None)):
        held += [(key, part, partial(vars(value).__setitem__, key)) for key, part in vars(value).items()]
    for key, part, put in held:
        yield Place(f"{path}.{key}", (type(value), key), part, put)
        if not isinstance(part, (mx.array, str, int, float, type(None))):
            yield from places(f"{path}.{key}", part, seen)


def others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2]
        case float():
            return [value * 1.5 + 0.25]
        case None:
            return [1.0]
        case mx.array() if value.dtype in (mx.float32, mx.int32, mx.uint32, mx.int64):
            return [value + mx.ones_like(value)]
        case tuple() if value and isinstance(value[0], (int, float)):
            return [tuple(number * 2 + 1 for number in value)]
        case _ if callable(value) and not isinstance(value, (type, nn.Module)):
            return [lambda *args, **options: value(*args, **options) * 1.5]
    return []


def steps(model: Any) -> Iterator[Any]:
    """The logits of a prompt, and of two more tokens after it."""
    cache = make_prompt_cache(model)
    return (np.array(model(mx.array([tokens]), cache=cache)) for tokens in (PROMPT, [3], [5]))


def logits(model: Any) -> list[Any]:
    return list(steps(model))


def says_otherwise(model: Any, right: list[Any]) -> bool:
    """Return whether the output differs; a model that cannot be run has no output."""
    try:
        return not all(np.array_equal(one, two, equal_nan=True) for one, two in zip(steps(model), right, strict=True))
    except Exception:  # noqa: BLE001 - whatever a model makes of attributes that nobody would give it
        return False


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind not in UNLIKE)) for kind in KINDS]
)
def test_every_change_of_the_logits_changes_the_identity(kind: str) -> None:
    """Each attribute once for every class that has it, in the first module that has."""
    model = KINDS[kind]()
    right = logits(model)
    identity = Identity(model)
    changed, tried = set(), set()
    for place in list(places("model", model, set())):
        if place.name in tried:
            continue
        tried.add(place.name)
        for other in others(place.value):
            place.put(other)
            if says_otherwise(model, right):
                assert not identity.holds(), place.path
                assert Identity(model, identity).digest != identity.digest, place.path
                changed.add(place.name)
            place.put(place.value)
            if place.name in changed:
                break
    assert identity.holds(), "all was put back"
    assert len(changed) >= 8, "or the test has tried nothing"
    assert not says_otherwise(model, right)
    print(f"{kind}: {len(changed)} of {len(tried)} attributes change the logits")


@pytest.mark.parametrize("kind", KINDS)
def test_reloaded_and_used_models_have_the_same_identity(kind: str) -> None:
    model = KINDS[kind]()
    logits(model)
    identity = Identity(model)
    again = KINDS[kind]()
    logits(again)
    assert digest(again) == identity.digest
    cache = make_prompt_cache(again)
    for count in (1, 7, 300):
        again(mx.array([TOKENS[:count]]), cache=cache)
    logits(model)
    assert identity.holds()
    assert digest(again) == identity.digest


PRINTING = """
from test_engine_identity import KINDS, digest, logits
for kind, made in KINDS.items():
    model = made()
    logits(model)
    print(kind, digest(model))
"""


def test_the_identity_is_independent_of_the_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """Here the seed is another in every run of the tests."""
    elsewhere = subprocess.run(
        [sys.executable, "-c", PRINTING],
        env={
            "PYTHONHASHSEED": "77",
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[2] / 'support'}",
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    exec(PRINTING, {})
    assert elsewhere == capsys.readouterr().out
    assert len(elsewhere.splitlines()) == len(KINDS)


def frozen(model: Any) -> Any:
    model.freeze()
    return model


@pytest.mark.parametrize("harmless", [lambda model: model.train(), lambda model: model.eval(), frozen])
def test_training_properties_do_not_change_the_identity(harmless: Callable[[Any], Any]) -> None:
    model = tiny_llama()
    before = digest(model)
    harmless(model)
    assert digest(model) == before


def test_training_counts_where_a_layer_asks_for_it() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Dropout(0.5))
    model.eval()
    answering = digest(model)
    model.train()
    assert digest(model) != answering


def scaled(by: float) -> Callable[[mx.array], mx.array]:
    return lambda x: x * by


def layer_class(by: float) -> type[nn.Module]:
    class Scaled(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return x * by

    return Scaled


class Settings:
    """An object of an unknown kind."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Loud(nn.Module):
    loudness = 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda: scaled(0.5), lambda: scaled(4.0), id="what a function closes over"),
        pytest.param(lambda: lambda x: x, lambda: lambda x: -x, id="what a function does"),
        pytest.param(lambda: lambda x=1: x, lambda: lambda x=2: x, id="what a function defaults to"),
        pytest.param(lambda: partial(mx.add, 1), lambda: partial(mx.add, 2), id="arguments given ahead"),
        pytest.param(lambda: mx.compile(scaled(0.5)), lambda: mx.compile(scaled(4.0)), id="what is compiled"),
        pytest.param(lambda: nn.silu, lambda: nn.gelu, id="another function"),
        pytest.param(lambda: mx.exp, lambda: mx.sin, id="another function of MLX's"),
        pytest.param(lambda: layer_class(0.5)(), lambda: layer_class(4.0)(), id="a class made while running"),
        pytest.param(lambda: Settings(a=1).__init__, lambda: Settings(a=2).__init__, id="a method of another"),
        pytest.param(lambda: Settings(nested=Settings(a=1)), lambda: Settings(nested=Settings(a=2)), id="objects"),
        pytest.param(lambda: Slotted(0.5), lambda: Slotted(4.0), id="slots"),
        pytest.param(lambda: {"a": {"b": [1]}}, lambda: {"a": {"b": [2]}}, id="nested"),
        pytest.param(lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, id="the order of a dictionary"),
        pytest.param(lambda: {1, 2}, lambda: {1, 3}, id="sets"),
        pytest.param(lambda: (1, (2, 3)), lambda: ((1, 2), 3), id="where a tuple ends"),
        pytest.param(lambda: "12", lambda: ["1", "2"], id="where a text ends"),
        pytest.param(lambda: None, lambda: 0, id="nothing and zero"),
        pytest.param(lambda: mx.zeros(4), lambda: mx.zeros((2, 2)), id="the shape of an array"),
        pytest.param(lambda: np.zeros(4), lambda: np.ones(4), id="numpy's arrays"),
        pytest.param(lambda: mx.float16, lambda: mx.bfloat16, id="dtypes"),
        pytest.param(lambda: float("nan"), lambda: float("inf"), id="not a number"),
    ],
)
def test_all_kinds_of_values_count(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    model = tiny_llama()
    digests = []
    for value in (one(), other(), one()):
        model.model.layers[2].self_attn._setting = value
        digests.append(digest(model))
        del model.model.layers[2].self_attn._setting
    assert digests[0] == digests[2]
    assert digests[0] != digests[1]


def test_a_classs_attributes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.loud = Loud()
    quiet = digest(model)
    monkeypatch.setattr(Loud, "loudness", 2.0)
    assert digest(model) != quiet


def test_a_model_that_refers_to_itself_has_an_identity() -> None:
    models = [tiny_llama(), tiny_llama()]
    for model in models:
        object.__setattr__(model.model.layers[0], "above", model)
    assert digest(models[0]) == digest(models[1])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (threading.Lock(), "lock"),
        ((i for i in range(3)), "generator"),
        (mx.default_stream(mx.cpu), "Stream"),
    ],
)
def test_an_indistinguishable_part_is_refused_by_its_path(value: Any, named: str) -> None:
    model = tiny_llama()
    model.model.layers[2].self_attn.helper = value
    spec = ModelCacheSpec.probe(model, TOKENIZER)
    assert spec.refusal
    assert spec.refusal.startswith("model.model.layers.2.self_attn.helper cannot be told from others: it is a ")
    assert named in spec.refusal
    assert (spec.layers, spec.batches, spec.identity) == ((), False, None)


def test_code_without_a_source_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "typed_in", "nn": nn}
    exec("class Layer(nn.Module):\n    def __call__(self, x): return x", namespace)
    model = tiny_llama()
    model.extra = namespace["Layer"]()
    refusal = ModelCacheSpec.probe(model, TOKENIZER).refusal
    assert refusal == "model.extra cannot be told from others: the module typed_in has no file"


def test_the_code_of_a_model_counts(tmp_path: Path) -> None:
    """Two versions of a file with one name, as before and after an upgrade of mlx-lm."""
    code = "import mlx.nn as nn\nclass Layer(nn.Module):\n    def __call__(self, x):\n        return x * {}\n"
    digests = []
    for by in (1, 2, 1):
        script = tmp_path / f"{len(digests)}" / "layers.py"
        script.parent.mkdir()
        script.write_text(code.format(by), encoding="utf-8")
        run = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import engine, layers; "
        run += "from engine.model.identity import Identity; print(Identity(layers.Layer()).digest)"
        digests.append(
            subprocess.run([sys.executable, "-c", run], capture_output=True, encoding="utf-8", check=True).stdout
        )
    assert digests[0] == digests[2] != digests[1]


def complete(batch: BlockPoolBatchEngine, cache: Any = None, tokens: int = 40) -> CompletedGeneration:
    batch.submit("alice", TOKENS[:tokens], cache, max_tokens=4)
    (done,) = batch.step()
    return done


pool = pool_of(64)


def freed(pool: BlockPool, *answers: CompletedGeneration) -> None:
    for done in answers:
        pool.free(done.blocks.block_ids)


@pytest.mark.parametrize("dora", [False, True])
def test_one_adapter_at_two_scales_shares_nothing(server: RunningServer, pool: BlockPool, dora: bool) -> None:
    """The same file with `scale` 0.5 and 4.0: neither by the agent's name, nor by common prefixes."""
    model = adapted(0.5, dora=dora)
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=16)
    done = complete(BlockPoolBatchEngine(model, TOKENIZER, spec, pool), tokens=60)
    with closing(PageTier(server.url, spec, pool)) as pages:
        pages.save(done.blocks)
    freed(pool, done)
    assert found(server, pool, adapted(4.0, dora=dora)) == [0, 0]
    assert found(server, pool, adapted(0.5, dora=dora)) == [64, 64]


def found(server: RunningServer, pool: BlockPool, model: Any) -> list[int]:
    """How many tokens of the prompt the agent that had it answered finds, and a stranger."""
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=16)
    with closing(PageTier(server.url, spec, pool)) as pages:
        contexts = [pages.load(agent, TOKENS[:60]) for agent in ("alice", "stranger")]
    for context in contexts:
        pool.free(context.block_ids if context else [])
    return [len(context) if context else 0 for context in contexts]


def spec_and_batch(model: Any, pool: BlockPool, **options: Any) -> tuple[ModelCacheSpec, BlockPoolBatchEngine]:
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=16)
    return spec, BlockPoolBatchEngine(model, TOKENIZER, spec, pool, SchedulerConfig(**options))


def rescale(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.scale *= 2


def rebase(model: Any) -> None:
    model.model.layers[1].self_attn.rope.base = 5e5


def write_into(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.linear.weight[0, 0] = 3.0


def add_to(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.linear.weight += 1.0


def replace_layer(model: Any) -> None:
    model.model.layers[3] = adapted(9.0).model.layers[3]


@pytest.mark.parametrize("change", [rescale, rebase, write_into, add_to, replace_layer])
def test_an_engine_sees_that_its_model_was_changed(pool: BlockPool, change: Callable[[Any], None]) -> None:
    """Contexts from before the change are not used, contexts from now on are not stored; the answer is the changed
    model's.
    """
    model = adapted()
    _, batch = spec_and_batch(model, pool)
    first = complete(batch)
    change(model)
    second = complete(batch, first.blocks)
    assert (second.tokens_reused, second.not_kept, len(second.blocks)) == (0, CHANGED, 0)
    other = adapted()
    change(other)
    _, fresh = spec_and_batch(other, pool)
    right = complete(fresh)
    assert second.tokens == right.tokens
    freed(pool, first, right)


def test_a_model_changed_before_its_engine_keeps_nothing(pool: BlockPool) -> None:
    model = adapted()
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=16)
    rescale(model)
    done = complete(BlockPoolBatchEngine(model, TOKENIZER, spec, pool))
    assert done.not_kept == CHANGED


def test_an_adapter_that_is_back_finds_its_contexts(pool: BlockPool) -> None:
    """Two adapters on one model, each with an engine of its own, switched between answers."""
    model = adapted(0.5)
    engines = {}
    for scale in (0.5, 4.0):
        set_scale(model, scale)
        engines[scale] = spec_and_batch(model, pool)[1]
    first = {}
    for scale in (0.5, 4.0):
        set_scale(model, scale)
        first[scale] = complete(engines[scale])
    for scale in (0.5, 4.0):
        set_scale(model, scale)
        again = complete(engines[scale], first[scale].blocks)
        assert (again.tokens_reused, again.not_kept) == (39, None)
        assert again.tokens == first[scale].tokens
        other = complete(engines[4.5 - scale])
        assert other.not_kept == CHANGED
        freed(pool, again)
    freed(pool, *first.values())


def set_scale(model: Any, scale: float) -> None:
    for module in model.modules():
        if hasattr(module, "lora_b"):
            module.scale = scale


def test_answers_during_a_change_of_the_model_are_not_kept(pool: BlockPool) -> None:
    model = adapted()
    _, batch = spec_and_batch(model, pool)
    published: list[int] = []
    batch.submit("alice", TOKENS[:40], max_tokens=8, on_prompt=lambda blocks: published.append(len(blocks)))
    for _ in range(3):
        batch.step_once()
    rescale(model)
    (done,) = batch.step()
    assert (done.not_kept, len(done.blocks)) == (CHANGED, 0)


def test_a_change_that_was_undone_must_be_announced(pool: BlockPool) -> None:
    model = adapted(2.0)
    _, batch = spec_and_batch(model, pool)
    batch.submit("alice", TOKENS[:40], max_tokens=8)
    for _ in range(3):
        batch.step_once()
    set_scale(model, 4.0)
    batch.step_once()
    set_scale(model, 2.0)
    batch.model_changed()
    (done,) = batch.step()
    assert done.not_kept == CHANGED
    after = complete(batch)
    assert after.not_kept is None
    freed(pool, after)


def test_a_prompt_waiting_during_a_model_change_is_recomputed(pool: BlockPool) -> None:
    """Its cache was assembled from blocks of the unchanged model."""
    model = adapted()
    _, batch = spec_and_batch(model, pool, wait_for_blocks=True)
    first = complete(batch)
    hindrance = pool.allocate(pool.available_blocks, "somebody")
    batch.submit("alice", TOKENS[:40], first.blocks, max_tokens=4)
    assert batch.running == 0
    rescale(model)
    pool.free(hindrance)
    (done,) = batch.step()
    assert (done.tokens_reused, done.not_kept) == (0, CHANGED)
    other = adapted()
    rescale(other)
    right = complete(spec_and_batch(other, pool)[1])
    assert done.tokens == right.tokens
    freed(pool, first, right)


def test_a_model_is_let_go_of_with_its_engine(pool: BlockPool) -> None:
    """An identity refers to the weights; it must not outlive its owner."""
    model = tiny_llama()
    spec, batch = spec_and_batch(model, pool)
    ids = {id(module) for module in model.modules()}
    del model, batch
    gc.collect()
    assert not [1 for held in gc.get_objects() if isinstance(held, nn.Module) and id(held) in ids]
    assert spec.identity
