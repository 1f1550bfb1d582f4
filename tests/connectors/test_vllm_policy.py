"""PrefixPolicy: the eviction policy of the store in vLLM's RAM tier."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kvpage_connectors import vllm_policy
from kvpage_connectors.vllm_policy import PrefixPolicy
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus


class Tier:
    """A RAM tier, which calls its policy in the order in which vLLM's CPUOffloadingManager does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
        self.policy = PrefixPolicy(cache_capacity=capacity)
        self.capacity = capacity
        self.keys: set[OffloadKey] = set()
        self.seconds = 1000.0
        monkeypatch.setattr(vllm_policy, "monotonic", lambda: self.seconds)

    def request(self, prompt: str, group: int = 0) -> int:
        """Store the prompt, a letter a chunk, ten seconds later. Return the number of chunks found before a miss."""
        self.seconds += 10
        context = ReqContext(prompt)
        keys = chunks(prompt, group)
        found = next((i for i, key in enumerate(keys) if self.policy.get(key) is None), len(keys))
        reused = {key for key in keys if self.policy.get(key)}
        new = [key for key in keys if key not in reused]
        self.policy.on_store_miss(new, context)
        if (count := len(self.keys) + len(new) - self.capacity) > 0:
            evicted = self.policy.evict(count, set(keys))
            assert evicted is not None
            self.keys -= {key for key, _ in evicted}
        for key in new:
            self.keys.add(key)
            self.policy.insert(key, ChunkStatus(0))
        for key in new:
            self.ready(key)
        self.policy.on_request_finished([keys], set(new), reused, context)
        return found

    def ready(self, key: OffloadKey) -> None:
        """End the last transfer of a chunk."""
        chunk = self.policy.get(key)
        assert chunk is not None
        chunk.ref_cnt = 0
        self.policy.mark_evictable(key)

    def transfer(self, key: OffloadKey) -> None:
        """Begin a transfer of a chunk."""
        chunk = self.policy.get(key)
        assert chunk is not None
        chunk.ref_cnt += 1
        self.policy.mark_non_evictable(key)

    def evict(self, count: int, protected: Sequence[OffloadKey] = ()) -> str:
        """Evict chunks. Return their letters in the order of eviction; "none" if there are too few."""
        evicted = self.policy.evict(count, set(protected))
        if evicted is None:
            return "none"
        self.keys -= {key for key, _ in evicted}
        return "".join(key[:1].decode() for key, _ in evicted)


def chunks(prompt: str, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(letter.encode() * 32, group) for letter in prompt]


def test_ends_of_prompts_are_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    tier.request("abcd")
    tier.request("abef")
    tier.request("0123456789")  # the last eight chunks are fresh
    order = tier.evict(6)
    assert sorted(order) == list("abcdef")
    assert all(order.index(later) < order.index(before) for before, later in ("ab", "bc", "cd", "be", "ef"))


def test_chunks_of_many_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 20)
    for prompt in ("abc1", "abc2", "abc3", "abc4"):
        tier.request(prompt)
    for prompt in ("ABCDEFGH", "IJKLMNOP", "QRSTUVWX"):
        assert tier.request(prompt) == 0
    assert tier.request("abc5") == 3


def test_an_evicted_chunk_keeps_the_number_of_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    for _ in range(4):
        tier.request("a")
    tier.request("b")
    tier.request("0123456789")
    assert tier.evict(1) == "b"
    while "a" not in tier.evict(1):
        pass
    tier.request("a")
    tier.request("b")
    tier.request("0123456789")
    assert tier.evict(1) != "a"


def test_chunks_in_transfer_and_protected_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    tier.request("abcdef")
    a, b, c, *_ = chunks("abcdef")
    tier.transfer(b)
    assert tier.evict(5, [c]) == "none"
    assert all(tier.policy.get(key) for key in chunks("abcdef"))
    assert sorted(tier.evict(4, [c])) == list("adef")
    assert tier.evict(2) == "none"
    tier.ready(b)
    assert sorted(tier.evict(2)) == ["b", "c"]
    assert tier.policy.get(a) is None
    assert tier.evict(0) == ""


def test_a_failed_store_removes_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    (key,) = chunks("a")
    tier.policy.insert(key, ChunkStatus(0))
    tier.policy.remove(key)
    assert tier.policy.get(key) is None
    assert tier.evict(1) == "none"
    tier.request("b")
    assert tier.evict(1) == "b"


def test_groups_are_separate_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    tier.request("abc", group=0)
    tier.request("abc", group=1)
    tier.request("0123456789")
    order = tier.evict(6)
    assert sorted(order) == list("aabbcc")
    assert "".join(dict.fromkeys(order)) == "cba"


def test_clear_removes_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    tier.request("abc")
    tier.policy.clear()
    assert tier.policy.get(chunks("a")[0]) is None
    assert tier.policy.evict(1, set()) is None


def test_touched_chunks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(monkeypatch, 100)
    tier.request("a")
    tier.request("b")
    tier.request("0123456789")
    tier.seconds += 10
    tier.policy.touch(chunks("a?"), ReqContext("another"))
    assert tier.evict(1) == "b"


@pytest.mark.parametrize("seed", range(20))
def test_every_evictable_chunk_can_be_evicted(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Make random requests and transfers, and compare the result of each eviction with the evictable chunks."""
    chance = random.Random(seed)
    tier = Tier(monkeypatch, 60)
    names = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    prompts = [[*chance.sample(names, 3), *chance.sample(names, chance.randrange(20))] for _ in range(10)]
    moving: set[OffloadKey] = set()
    for _ in range(300):
        what = chance.random()
        if what < 0.5:
            before = chance.choice(prompts)
            keys = [
                make_offload_key(name.encode() * 16, 0) for name in dict.fromkeys(before[: chance.randrange(1, 24)])
            ]
            new = [key for key in keys if key not in tier.keys]
            tier.seconds += chance.choice((0, 5))
            need = len(tier.keys) + len(new) - tier.capacity
            if need > 0:
                idle = tier.keys - moving - set(keys)
                evicted = tier.policy.evict(need, set(keys))
                assert (evicted is None) == (need > len(idle))
                if evicted is None:
                    continue
                assert len(evicted) == need
                assert {key for key, _ in evicted} <= idle
                tier.keys -= {key for key, _ in evicted}
            for key in new:
                tier.keys.add(key)
                tier.policy.insert(key, ChunkStatus(0))
                tier.ready(key)
            tier.policy.on_request_finished([keys], set(new), set(keys) - set(new), ReqContext("request"))
        elif what < 0.75 and tier.keys - moving:
            key = chance.choice(sorted(tier.keys - moving))
            moving.add(key)
            tier.transfer(key)
        elif moving:
            key = chance.choice(sorted(moving))
            moving.discard(key)
            tier.ready(key)
        assert all(tier.policy.get(key) is not None for key in tier.keys)
    idle = tier.keys - moving
    evicted = tier.policy.evict(len(idle), set())
    assert evicted is not None
    assert {key for key, _ in evicted} == idle
