from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import ConfigError
from kvwire.server.engine import make_store
from kvwire.server.layout import ShardMap
from kvwire.server.store import POLICIES, ArcPolicy, L1Store, Space, make_policy
from support.domain import BLOCK_BYTES, CHUNK, OBJECT_BYTES, layout


class Chains:
    """Prompts by name in a store without an engine: chunk i of prompt "a" has the key of "a" and i."""

    def __init__(self, pool: int, policy: str) -> None:
        self.store: L1Store = make_store(pool * OBJECT_BYTES, policy, base=0, alignment=BLOCK_BYTES)
        self.space = Space(b"root", b"base", "model", "", ShardMap(layout(), CHUNK))
        self._leases = 0

    @staticmethod
    def keys(prompt: str, count: int) -> list[bytes]:
        return [hashlib.sha256(f"{prompt}/{index}".encode()).digest() for index in range(count)]

    def put(self, prompt: str, count: int) -> int:
        """Store what is absent of the first `count` chunks; returns how many of them are there after."""
        keys = self.keys(prompt, count)
        protect = self.store.refresh(())
        tail = self.store.refresh([self.store.get(key) for key in keys])
        self._leases += 1
        for index, key in enumerate(keys):
            if self.store.get(key) is not None:
                continue
            parent = keys[index - 1] if index else b""
            stored = self.store.reserve(
                self.space, key, parent, 0,
                lease_id=self._leases, stamp=tail + count - 1 - index, protect=protect,
            )  # fmt: skip
            if stored is None:
                break
            self.store.commit(stored)
        self.store.check_integrity()
        return self.resident(prompt)

    def hit(self, prompt: str, count: int) -> int:
        found = self.store.find(self.space, self.keys(prompt, count))
        self.store.refresh(found.chunks)
        self.store.policy.hit(found.chunks)
        return found.boundary

    def resident(self, prompt: str) -> int:
        return self.store.find(self.space, self.keys(prompt, 64)).boundary

    def evict(self, chunks: int) -> None:
        self.store.evict_to(0, max_chunks=chunks)
        self.store.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tail_goes_before_the_head(policy: str) -> None:
    chains = Chains(16, policy)
    chains.put("a", 8)
    for left in range(7, -1, -1):
        chains.evict(1)
        assert chains.resident("a") == left


def test_lru_takes_the_least_recent_prompt_first() -> None:
    chains = Chains(16, "lru")
    for prompt in "abc":
        chains.put(prompt, 4)
    chains.hit("a", 4)
    chains.evict(4)
    assert [chains.resident(prompt) for prompt in "abc"] == [4, 0, 4]
    chains.evict(2)
    assert [chains.resident(prompt) for prompt in "abc"] == [4, 0, 2]


def test_a_hit_on_the_head_alone_leaves_the_tail_old() -> None:
    chains = Chains(16, "lru")
    chains.put("a", 4)
    chains.put("b", 4)
    chains.hit("a", 2)
    chains.evict(2)
    assert (chains.resident("a"), chains.resident("b")) == (2, 4)
    chains.evict(4)
    assert (chains.resident("a"), chains.resident("b")) == (2, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_demand_eviction_frees_no_more_than_is_needed(policy: str) -> None:
    chains = Chains(8, policy)
    chains.put("a", 8)
    assert chains.put("b", 3) == 3
    assert chains.resident("a") == 5
    assert chains.store.evicted_chunks == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_longer_than_the_pool_keeps_its_head(policy: str) -> None:
    chains = Chains(8, policy)
    chains.put("a", 4)
    assert chains.put("b", 20) == 8
    assert chains.resident("a") == 0


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(1, 6), st.sampled_from(["put", "hit", "evict"])),
        max_size=40,
    ),
)
def test_no_sequence_leaves_a_tail_without_its_head(policy: str, steps: list[tuple[str, int, str]]) -> None:
    chains = Chains(10, policy)
    for prompt, count, what in steps:
        if what == "put":
            chains.put(prompt, count)
        elif what == "hit":
            chains.hit(prompt, count)
        else:
            chains.evict(1)
        assert not chains.store.tree.unreachable
        resident = sum(chains.resident(name) for name in "abcdef")
        assert resident == len(chains.store)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 4)), min_size=1, max_size=25))
def test_lru_order_between_prompts_is_that_of_their_last_use(steps: list[tuple[str, int]]) -> None:
    chains = Chains(100, "lru")
    last_use: dict[str, int] = {}
    length: dict[str, int] = {}
    for step, (prompt, count) in enumerate(steps):
        # A use of the whole prompt: what only the head of was used is older at its tail.
        length[prompt] = max(length.get(prompt, 0), count)
        chains.put(prompt, length[prompt])
        last_use[prompt] = step
    expected = [
        (prompt, left)
        for prompt in sorted(last_use, key=lambda name: last_use[name])
        for left in range(length[prompt] - 1, -1, -1)
    ]
    for prompt, left in expected:
        chains.evict(1)
        assert chains.resident(prompt) == left


def scan(chains: Chains, prompts: int) -> None:
    for number in range(prompts):
        chains.put(f"scan {number}", 4)


def test_arc_keeps_what_is_used_often_through_a_scan() -> None:
    survivors = {}
    for policy in POLICIES:
        chains = Chains(16, policy)
        chains.put("hot", 8)
        chains.hit("hot", 8)
        scan(chains, 12)
        survivors[policy] = chains.resident("hot")
    assert survivors == {"lru": 0, "arc": 8, "tenant": 0}


def test_arc_moves_to_recency_when_what_was_seen_once_comes_back() -> None:
    chains = Chains(16, "arc")
    arc = chains.store.policy
    assert isinstance(arc, ArcPolicy)
    chains.put("hot", 8)
    chains.hit("hot", 8)
    scan(chains, 4)
    assert arc.target == 0
    # The first prompts of the scan were evicted a moment ago, and are asked for again.
    chains.put("scan 0", 4)
    assert arc.target >= 4 * OBJECT_BYTES
    grown = arc.target
    for number in range(8):
        chains.put(f"new {number}", 4)
    evicted_hot = 8 - chains.resident("hot")
    assert evicted_hot > 0
    # What was used often and is missed now pulls it back.
    chains.put("hot", 8)
    assert arc.target < grown


def test_arc_forgets_ghosts_in_time() -> None:
    chains = Chains(8, "arc")
    scan(chains, 200)
    arc = chains.store.policy
    assert isinstance(arc, ArcPolicy)
    ghosts = sum(len(ghosts) for ghosts in arc._ghosts.values())
    assert ghosts <= 16
    arc.check_integrity(chains.store.chunks())


@pytest.mark.parametrize("name", ["isolated-lru", "tenants", "LRU", "", "noop"])
def test_a_policy_that_is_not_implemented_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="use one of: lru, arc, tenant"):
        make_policy(name, 1024)
