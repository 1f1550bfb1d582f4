"""The hot tier: the least recently used context leaves first, nothing dirty is lost, and memory is bounded."""

from __future__ import annotations

from dataclasses import replace

from contexts import SPEC, made, some_tokens
from pools import pool_of

# isort: split

from engine.pool import BlockPool
from engine.tiers.hot import HotTier, LowerTier

MANY = 1 << 30
TEN = 10 * SPEC.token_nbytes  # bytes of ten tokens


pool = pool_of(64)


def keep(hot: HotTier, pool: BlockPool, agent_id: str, *unwritten_tiers: LowerTier, count: int = 10) -> None:
    hot.put(made(pool, agent_id, some_tokens(len(agent_id), count)), unwritten_tiers, whole=True)


def agents(hot: HotTier) -> list[str]:
    return [entry.context.agent_id for entry in hot]


def test_the_least_recently_used_leaves_first_and_pinned_stay(pool: BlockPool) -> None:
    hot = HotTier(pool, max_agents=2, max_bytes=MANY, max_leaving=0)
    for agent in ("alice", "bob", "carol"):
        keep(hot, pool, agent)
    hot.use("alice")
    entry = hot.look("bob")
    assert entry
    entry.pinned = True
    hot.trim(())
    assert agents(hot) == ["bob", "alice"]
    assert hot.evictions == 1
    assert hot.evict(())
    assert not hot.evict(())
    assert agents(hot) == ["bob"]
    keep(hot, pool, "bob")
    assert not hot.evict(()), "a new context of a pinned agent is pinned"
    hot.clear()


def test_a_newer_context_replaces_and_frees_the_older_one(pool: BlockPool) -> None:
    hot = HotTier(pool, 4, MANY, 0)
    keep(hot, pool, "alice", count=30)
    keep(hot, pool, "alice", count=10)
    assert (len(hot), hot.nbytes, pool.used_blocks) == (1, TEN, 2)
    hot.clear()


def test_bytes_that_agents_share_count_once(pool: BlockPool) -> None:
    hot = HotTier(pool, 4, 2 * TEN, 0)
    keep(hot, pool, "alice")
    entry = hot.look("alice")
    assert entry
    for fork in ("bob", "carol"):
        pool.share(entry.context.block_ids, fork)
        hot.put(replace(entry.context, agent_id=fork), (), whole=True)
    hot.trim(())
    assert (len(hot), hot.nbytes) == (3, TEN)
    keep(hot, pool, "david", count=20)
    hot.trim(())
    assert agents(hot) == ["david"]
    hot.clear()


def test_a_dirty_context_leaves_when_it_is_written(pool: BlockPool) -> None:
    hot = HotTier(pool, 1, MANY, max_leaving=TEN)
    keep(hot, pool, "alice", "page", "cold")
    keep(hot, pool, "bob", "page")
    hot.trim(())
    alice = hot.look("alice")
    assert alice
    assert alice.leaving
    assert hot.bytes_being_freed(()) == alice.sizes
    alice.unwritten_tiers.clear()
    hot.written(alice)
    assert agents(hot) == ["bob"]
    hot.clear()


def test_a_context_used_while_leaving_stays(pool: BlockPool) -> None:
    hot = HotTier(pool, 1, MANY, max_leaving=TEN)
    for agent in ("alice", "bob"):
        keep(hot, pool, agent, "page")
    hot.trim(())
    alice = hot.use("alice")
    assert alice
    hot.trim(())
    assert [(entry.context.agent_id, entry.leaving) for entry in hot] == [("bob", True), ("alice", False)]
    alice.unwritten_tiers.clear()
    hot.written(alice)
    assert hot.look("alice")
    hot.clear()


def test_a_newer_context_stays_when_the_older_was_written(pool: BlockPool) -> None:
    hot = HotTier(pool, 1, MANY, max_leaving=MANY)
    keep(hot, pool, "alice", "page")
    hot.evict(())
    older = hot.look("alice")
    assert older
    keep(hot, pool, "alice", "page", count=20)
    older.unwritten_tiers.clear()
    hot.written(older)
    assert hot.nbytes == 2 * TEN
    hot.clear()


def test_dirty_contexts_are_bounded_and_clean_ones_leave_instead(pool: BlockPool) -> None:
    hot = HotTier(pool, 1, MANY, max_leaving=TEN)
    keep(hot, pool, "alice", "page")
    keep(hot, pool, "bob", "page")
    keep(hot, pool, "carol")
    keep(hot, pool, "david", "page")
    hot.trim(())
    assert agents(hot) == ["alice", "bob", "david"]
    assert [entry.leaving for entry in hot] == [True, False, False], "one dirty context more than there should be"
    assert hot.lost == 0
    hot.clear()


def test_only_an_unwritable_context_is_dropped(pool: BlockPool) -> None:
    hot = HotTier(pool, 1, MANY, max_leaving=TEN)
    for agent in ("alice", "bob", "carol"):
        keep(hot, pool, agent, "page")
    alice = hot.look("alice")
    assert alice
    alice.kept = True  # there is a file of it
    hot.trim(["page"])
    assert (agents(hot), hot.lost) == (["bob", "carol"], 0)
    keep(hot, pool, "david", "page")
    hot.trim(["page"])
    assert (agents(hot), hot.lost) == (["carol", "david"], 1)
    assert hot.bytes_being_freed(["page"]) == {}
    hot.clear()
