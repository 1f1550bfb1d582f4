"""The restore planner on random stores: its plans are usable, and no longer plan is. It also tests the requests for a
plan.
"""

from __future__ import annotations

from block_pages import page_bodies
from engine_models import letter_tokenizer  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
from dataclasses import dataclass

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from engine.caches import ArraysLayer, FullLayer, Matrices
from engine.memory.blocks import arrays_in, block_names
from engine.spec import ModelCacheSpec
from engine.tiers.server.manifest import BlockPlace, ContextManifest, block_shape
from engine.tiers.server.restore_planner import Offer, Plan
from kvpage_server.page import BlockShape, DType, Plane

SIZE = 4
FULL = FullLayer((1,), (Plane(0, DType.FLOAT32, 2),))
CARRIED = ArraysLayer((Plane(0, DType.FLOAT32, 2),), ((1, 2),))


def spec_of(*layers: FullLayer | ArraysLayer) -> ModelCacheSpec:
    return ModelCacheSpec("planned", SIZE, layers, (None,) * len(layers), 97, None, 1, True)


@dataclass(frozen=True)
class Question:
    """A prompt, an agent's context or none, and the seals that are there."""

    spec: ModelCacheSpec
    wanted: tuple[int, ...]
    manifest: ContextManifest | None
    digests: dict[str, str]
    limit: int

    def ask(self, digests: dict[str, str] | None = None) -> Plan:
        offer = Offer(self.spec, self.wanted, self.manifest)
        return offer.plan(self.digests if digests is None else digests, self.limit)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    spec = draw(st.sampled_from([spec_of(FULL), spec_of(FULL, CARRIED), spec_of(CARRIED)]))
    wanted = draw(st.lists(st.integers(0, 1), max_size=18).map(tuple))
    manifest = None
    if draw(st.booleans()):
        tokens = (*wanted[: draw(st.integers(0, len(wanted)))], *draw(st.lists(st.integers(0, 1), max_size=6)))
        manifest = ContextManifest.of("agent", tokens, spec)
    places = all_places(spec, wanted, manifest)
    kept = [seal for place in places for seal in (place.seal, place.state().seal) if draw(st.integers(0, 5))]
    limit = len(wanted) - draw(st.integers(0, 1)) if wanted else 0
    return Question(spec, wanted, manifest, dict.fromkeys(kept, "digest"), limit)


def all_places(spec: ModelCacheSpec, wanted: tuple[int, ...], manifest: ContextManifest | None) -> list[BlockPlace]:
    """Return the places of the prompt's full blocks and of the agent's context."""
    whole = ContextManifest.of("nobody", wanted, spec).places(spec)
    return [*whole[: len(wanted) // SIZE], *(manifest.places(spec) if manifest else [])]


@given(questions())
def test_a_plan_is_a_stored_prefix_without_a_gap(question: Question) -> None:
    plan = question.ask()
    names = block_names(plan.tokens, question.spec)
    assert [place.name for place in plan.blocks] == list(names[: len(plan.blocks)])
    assert all(place.seal in question.digests for place in (*plan.blocks, *plan.states))
    assert plan.tokens[: plan.reach] == question.wanted[: plan.reach]
    assert plan.reach <= (plan.blocks[-1].end if plan.blocks else 0)


@given(questions())
def test_with_states_a_plan_ends_in_one_and_leaves_a_token(question: Question) -> None:
    plan = question.ask()
    if not question.spec.has_state:
        assert plan.states == ()
        return
    ends = [place.end for place in plan.states]
    assert ends == sorted(ends, reverse=True)
    assert set(ends) <= {place.end for place in plan.blocks}
    assert all(end <= question.limit for end in ends)
    assert plan.reach == max(ends, default=0) == (plan.blocks[-1].end if plan.blocks else 0)


def longest(question: Question) -> int:
    """How far one gets by trying everything: each of the two contexts, block after block."""
    best = 0
    whole = len(question.wanted) // SIZE  # blocks of the prompt; its rest belongs to no block
    for manifest, count in (
        (question.manifest, None),
        (ContextManifest.of("x", question.wanted, question.spec), whole),
    ):
        for place in manifest.places(question.spec)[:count] if manifest else []:
            if place.seal not in question.digests:
                break
            fits = manifest.tokens[: place.end] == question.wanted[: place.end]
            if not question.spec.has_state:
                best = max(best, common(manifest.tokens[: place.end], question.wanted))
            elif fits and place.state().seal in question.digests and place.end <= question.limit:
                best = max(best, place.end)
    return best


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(questions())
def test_no_longer_prefix_is_usable(question: Question) -> None:
    assert question.ask().reach == longest(question)


@given(questions(), st.data())
def test_a_lost_block_never_lengthens_the_prefix(question: Question, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(question.digests)))) if question.digests else set()
    left = {seal: digest for seal, digest in question.digests.items() if seal not in lost}
    assert question.ask(left).reach <= question.ask().reach
    assert question.ask({}).blocks == ()


@given(questions())
def test_the_plan_needs_no_digest_that_was_not_asked_for(question: Question) -> None:
    offer = Offer(question.spec, question.wanted, question.manifest)
    asked = {place.seal for place in offer.places}
    known = {seal: digest for seal, digest in question.digests.items() if seal in asked}
    assert question.ask(known) == question.ask()


def kept(kv_type: int, dtype: DType, dim: int, heads: int = 2, rows: int = 3) -> Matrices:
    return Matrices(Plane(kv_type, dtype, dim), heads, rows)


ALIKE = ((kept(0, DType.FLOAT16, 4), kept(1, DType.FLOAT16, 5)),) * 2
UNLIKE = [
    ((kept(0, DType.FLOAT32, 4),), (kept(0, DType.FLOAT32, 5),)),
    ((kept(0, DType.FLOAT32, 4), kept(1, DType.FLOAT32, 4, heads=1)),),
    ((kept(0, DType.BFLOAT16, 1, heads=1), kept(2, DType.UINT32, 1, heads=1, rows=1), kept(3, DType.FLOAT32, 2)),),
]


def test_the_server_gets_layers_if_all_are_alike_and_else_bytes() -> None:
    assert block_shape((ALIKE[0], (), ALIKE[1])) == BlockShape(2, 2, 3, tuple(of.plane for of in ALIKE[0]))
    for shapes in UNLIKE:
        nbytes = sum(of.nbytes for layer in shapes for of in layer)
        assert block_shape(shapes) == BlockShape(1, 1, 1, (Plane(0, DType.UINT8, nbytes),))


def test_arrays_in_memory_are_the_bytes_that_lie_there() -> None:
    """Also if their position is no multiple of the element size."""
    for shapes in [ALIKE, *UNLIKE]:
        body = bytes(range(sum(of.nbytes for layer in shapes for of in layer)))
        arrays = arrays_in(mx.array(list(body), mx.uint8), shapes)
        assert b"".join(page_bodies(arrays)) == body
        shaped = [[array.shape for array in layer] for layer in arrays]
        assert shaped == [[of.shape for of in layer] for layer in shapes]
