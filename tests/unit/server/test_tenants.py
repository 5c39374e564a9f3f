"""Quotas of tenants in the memory: who gives way to whom, and that no byte is ever lost or counted twice."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwire.server.engine import make_store
from kvwire.server.layout import ShardMap
from kvwire.server.store import L1Store, ObjectState, Space, StoredObject
from kvwire.server.store.upcoming import going, is_held_up, needs_room, upcoming, upcoming_of
from support.domain import BLOCK_BYTES, CHUNK, FULL, OBJECT_BYTES, layout, window_group

TENANTS = ["", "aa", "bb"]


class Shared:
    """A pool of so many objects for several tenants. Prompt "p" of two tenants has two sets of keys."""

    def __init__(self, pool: int, *groups: object) -> None:
        self.store: L1Store = make_store(pool * OBJECT_BYTES, "tenant", base=0, alignment=BLOCK_BYTES)
        shards = ShardMap(layout(1, *groups), CHUNK)
        self.spaces = {
            tenant: Space(tenant.encode(), b"base", "model", tenant, shards) for tenant in [*TENANTS, "cc"]
        }

    @staticmethod
    def keys(tenant: str, prompt: str, count: int) -> list[bytes]:
        return [hashlib.sha256(f"{tenant}/{prompt}/{index}".encode()).digest() for index in range(count)]

    def limit(self, **objects: float) -> None:
        """`none` is the tenant without a salt."""
        limits = {name.replace("none", ""): int(count * OBJECT_BYTES) for name, count in objects.items()}
        self.store.tenants.set_limits(limits)

    def reserve(self, tenant: str, prompt: str, count: int) -> list[StoredObject]:
        """What is absent of the first `count` chunks, as far as there is room."""
        space, keys = self.spaces[tenant], self.keys(tenant, prompt, count)
        protect = self.store.refresh(())
        tail = self.store.refresh([self.store.get(key) for key in keys])
        reserved: list[StoredObject] = []
        for index, key in enumerate(keys):
            for shard in range(space.shards.num_groups):
                if self.store.lookup_object(space, key, shard) is not None:
                    continue
                stored = self.store.reserve(
                    space, key, keys[index - 1] if index else b"", shard,
                    lease_id=1, stamp=tail + count - 1 - index, protect=protect,
                )  # fmt: skip
                if stored is None:
                    return reserved
                reserved.append(stored)
        return reserved

    def put(self, tenant: str, prompt: str, count: int) -> int:
        """Returns how many leading chunks are there after."""
        for stored in self.reserve(tenant, prompt, count):
            self.store.commit(stored)
        self.store.check_integrity()
        return self.resident(tenant, prompt)

    def resident(self, tenant: str, prompt: str) -> int:
        return self.store.find(self.spaces[tenant], self.keys(tenant, prompt, 64)).boundary

    def clear(self, tenant: str) -> tuple[int, int]:
        return self.store.clear(lambda space: space.tenant == tenant)

    def used(self, tenant: str) -> float:
        return self.store.tenants.used(tenant) / OBJECT_BYTES


def test_a_tenant_at_its_quota_gives_way_to_itself_tail_first() -> None:
    shared = Shared(32)
    shared.limit(aa=6)
    assert shared.put("bb", "old", 8) == 8
    assert shared.put("aa", "p", 4) == 4
    assert shared.put("aa", "q", 2) == 2
    assert shared.put("aa", "r", 3) == 3
    assert (shared.resident("aa", "p"), shared.resident("aa", "q")) == (1, 2)
    assert shared.resident("bb", "old") == 8
    assert shared.used("aa") == 6


def test_a_prompt_longer_than_its_quota_keeps_its_head_and_nobody_else_pays() -> None:
    shared = Shared(16)
    shared.limit(aa=4)
    shared.put("bb", "p", 10)
    assert shared.put("aa", "p", 9) == 4
    assert shared.resident("bb", "p") == 10
    assert shared.put("aa", "p", 12) == 4


def test_bl52_what_cannot_fit_into_the_quota_evicts_nothing() -> None:
    shared = Shared(16)
    shared.put("aa", "p", 3)
    shared.put("bb", "p", 3)
    # The quota of the tenant is in use: by a lease, by a pin, by a writer, and by one that may still write.
    shared.limit(aa=6)
    held = [shared.store.get(key) for key in shared.keys("aa", "p", 2)]
    shared.store.pin(chunk for chunk in held if chunk)
    shared.store.pin_keys(shared.keys("aa", "p", 3)[2:])
    reserved = shared.reserve("aa", "q", 3)
    shared.store.quarantine(reserved[2])
    assert shared.used("aa") == 6
    assert shared.reserve("aa", "r", 1) == []
    assert shared.store.evicted_chunks == 0
    shared.store.check_integrity()
    shared.store.release(reserved[2])
    assert len(shared.reserve("aa", "r", 1)) == 1
    assert (shared.resident("aa", "p"), shared.resident("bb", "p")) == (3, 3)


def test_an_object_larger_than_the_quota_evicts_nothing() -> None:
    shared = Shared(16)
    shared.put("aa", "p", 2)
    shared.limit(aa=0.5)
    assert shared.reserve("aa", "q", 1) == []
    assert shared.resident("aa", "p") == 2
    assert shared.store.evicted_chunks == 0


def test_without_a_quota_the_pool_is_the_limit_and_the_order_is_global() -> None:
    shared = Shared(9)
    for tenant in TENANTS:
        shared.put(tenant, "p", 3)
    assert shared.put("bb", "q", 4) == 4
    assert [shared.resident(tenant, "p") for tenant in TENANTS] == [0, 2, 3]


def test_what_has_no_salt_can_have_a_quota() -> None:
    shared = Shared(9)
    shared.limit(none=2)
    assert shared.put("", "p", 5) == 2
    assert shared.put("aa", "p", 5) == 5


def test_a_lower_quota_is_met_in_the_background_bit_by_bit() -> None:
    shared = Shared(32)
    shared.put("aa", "p", 10)
    shared.put("bb", "p", 10)
    shared.limit(aa=4, bb=8)
    assert shared.store.eviction.evict_over_quota(max_chunks=3) == 3 * OBJECT_BYTES
    assert shared.used("aa") == 7
    assert shared.store.eviction.evict_over_quota(max_chunks=4) == 4 * OBJECT_BYTES
    assert (shared.used("aa"), shared.used("bb")) == (4, 9)
    shared.store.eviction.evict_over_quota()
    assert (shared.resident("aa", "p"), shared.resident("bb", "p")) == (4, 8)
    assert shared.store.eviction.evict_over_quota() == 0
    shared.store.check_integrity()


def test_a_lower_quota_is_met_on_demand() -> None:
    shared = Shared(32)
    shared.put("aa", "p", 10)
    shared.put("bb", "p", 10)
    shared.limit(aa=4)
    assert shared.put("aa", "q", 1) == 1
    assert (shared.used("aa"), shared.resident("aa", "p"), shared.resident("bb", "p")) == (4, 3, 10)


def test_a_full_pool_takes_first_from_who_is_above_its_quota() -> None:
    shared = Shared(12)
    shared.put("bb", "p", 4)
    shared.put("aa", "p", 8)
    shared.limit(aa=6)
    assert shared.put("", "q", 3) == 3
    # Two of the tenant that had too much, and one of the least recent use.
    assert (shared.resident("aa", "p"), shared.resident("bb", "p")) == (6, 3)


def test_pins_of_a_tenant_above_its_quota_stay_and_count() -> None:
    shared = Shared(16)
    shared.store.pin_keys(shared.keys("aa", "p", 5))
    shared.put("aa", "p", 5)
    shared.limit(aa=3)
    assert shared.store.eviction.evict_over_quota() == 0
    assert shared.used("aa") == 5
    assert shared.put("bb", "p", 11) == 11
    assert shared.put("aa", "q", 1) == 0
    shared.store.unpin_keys(shared.keys("aa", "p", 5))
    shared.store.eviction.evict_over_quota()
    assert shared.resident("aa", "p") == 3


def test_what_nobody_can_resume_at_goes_first_within_a_quota() -> None:
    shared = Shared(16)
    shared.put("aa", "gap", 4)
    head = shared.store.get(shared.keys("aa", "gap", 1)[0])
    assert head is not None
    shared.put("aa", "p", 3)
    shared.store.eviction.drop([head.key])
    shared.store.refresh([shared.store.get(key) for key in shared.keys("aa", "gap", 4)])
    shared.limit(aa=6)
    assert shared.put("aa", "q", 2) == 2
    assert (shared.resident("aa", "p"), len(shared.store)) == (3, 6)


def test_a_tenant_is_forgotten_with_its_last_namespace_and_its_limit_is_not() -> None:
    shared = Shared(16)
    shared.limit(aa=2)
    shared.put("aa", "p", 2)
    shared.clear("aa")
    assert shared.store.tenants.used("aa") == 0
    del shared.spaces["aa"]
    shared.spaces["aa"] = Space(b"aa", b"base", "model", "aa", ShardMap(layout(), CHUNK))
    assert shared.put("aa", "p", 3) == 2


def test_clearing_one_tenant_leaves_the_others() -> None:
    shared = Shared(16)
    for tenant in TENANTS:
        shared.put(tenant, "p", 2)
    shared.store.pin([chunk] if (chunk := shared.store.get(shared.keys("aa", "p", 1)[0])) else [])
    assert shared.clear("aa") == (1, 1)
    assert shared.clear("") == (2, 0)
    assert [shared.resident(tenant, "p") for tenant in TENANTS] == [0, 1, 2]


def test_what_goes_for_a_tenant_is_known_before() -> None:
    shared = Shared(12)
    shared.put("aa", "p", 4)
    shared.put("bb", "p", 3)
    shared.limit(aa=5)

    def goes(**objects: int) -> list[str]:
        need = {tenant: count * OBJECT_BYTES for tenant, count in objects.items()}
        assert needs_room(shared.store, need) is bool(going(shared.store, need, 100))
        return [chunk.space.tenant for chunk in going(shared.store, need, 100)]

    assert goes(aa=1) == goes(bb=5) == goes(new=5) == []
    assert goes(aa=3) == ["aa", "aa"]
    assert goes(bb=6) == ["aa"]
    assert goes(aa=3, bb=6) == ["aa", "aa", "aa", "aa"]
    keys = shared.keys("aa", "p", 4)
    assert [chunk.key for chunk in going(shared.store, {"aa": 3 * OBJECT_BYTES}, 100)] == keys[3:1:-1]
    assert not is_held_up(shared.store, {"aa": 5 * OBJECT_BYTES})
    held = [chunk for key in keys[:2] if (chunk := shared.store.get(key))]
    shared.store.pin(held)
    assert is_held_up(shared.store, {"aa": 5 * OBJECT_BYTES})
    assert not is_held_up(shared.store, {"aa": 3 * OBJECT_BYTES})
    # It would find no room in the quota whatever is let go.
    assert not is_held_up(shared.store, {"aa": 6 * OBJECT_BYTES})
    assert is_held_up(shared.store, {"bb": 12 * OBJECT_BYTES})
    shared.store.unpin(held)
    shared.store.check_integrity()


TENANT = st.sampled_from(TENANTS)
PROMPT = st.sampled_from("pq")
COUNT = st.integers(1, 6)
POOL = 20


class TenantMachine(RuleBasedStateMachine):
    """Two groups of two sizes, so that a chunk has objects that may fail one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared(POOL, FULL, window_group(5, blocks=1))
        self.store = self.shared.store
        self.limits: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.reserved: list[StoredObject] = []
        self.quarantined: list[StoredObject] = []
        self.leases: list[list[bytes]] = []

    @rule(tenant=TENANT, prompt=PROMPT, count=COUNT, commit=st.booleans())
    def store_some(self, tenant: str, prompt: str, count: int, commit: bool) -> None:
        before = {each: self.store.tenants.used(each) for each in TENANTS}
        evicted, free = self.store.evicted_chunks, self.store.allocator.free_bytes
        limit = self.limits.get(tenant, 0)
        reserved = self.shared.reserve(tenant, prompt, count)
        asked = count * (OBJECT_BYTES + OBJECT_BYTES // 2)
        if limit and free >= asked and not self.fragmented(asked):
            # There is room in the pool: whatever this tenant needs is its own business.
            others = [each for each in TENANTS if each != tenant]
            assert all(self.store.tenants.used(each) == before[each] for each in others)
        if not reserved and limit and before[tenant] <= limit:
            use = self.shared.spaces[tenant].use
            smallest = OBJECT_BYTES // 2
            if use.used - use.evictable + smallest > limit:
                assert self.store.evicted_chunks == evicted
        for stored in reserved:
            if commit:
                self.store.commit(stored)
            else:
                self.reserved.append(stored)

    def fragmented(self, size: int) -> bool:
        return max(self.store.allocator._sizes, default=0) < size

    @precondition(lambda self: self.reserved)
    @rule(index=st.integers(0, 50), how=st.sampled_from(["commit", "abort", "quarantine"]))
    def end_a_write(self, index: int, how: str) -> None:
        stored = self.reserved.pop(index % len(self.reserved))
        getattr(self.store, how)(stored)
        if how == "quarantine":
            self.quarantined.append(stored)

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self) -> None:
        self.store.release(self.quarantined.pop())

    @rule(tenant=TENANT, prompt=PROMPT, count=COUNT)
    def hold(self, tenant: str, prompt: str, count: int) -> None:
        hit = self.store.find(self.shared.spaces[tenant], self.shared.keys(tenant, prompt, count))
        self.store.refresh(hit.chunks)
        self.store.pin(hit.chunks)
        self.leases.append([chunk.key for chunk in hit.chunks])

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 50))
    def let_go(self, index: int) -> None:
        keys = self.leases.pop(index % len(self.leases))
        self.store.unpin([chunk for key in keys if (chunk := self.store.get(key))])

    @rule(tenant=TENANT, prompt=PROMPT, first=st.integers(0, 4), pin=st.booleans())
    def pin_keys(self, tenant: str, prompt: str, first: int, pin: bool) -> None:
        keys = self.shared.keys(tenant, prompt, 6)[first:]
        (self.store.pin_keys if pin else self.store.unpin_keys)(keys)

    @rule(tenant=TENANT, prompt=PROMPT, index=st.integers(0, 5))
    def damage(self, tenant: str, prompt: str, index: int) -> None:
        key = self.shared.keys(tenant, prompt, 6)[index]
        stored = self.store.lookup_object(self.shared.spaces[tenant], key, 0)
        if stored is not None and stored.state is ObjectState.RESIDENT:
            self.store.discard(stored)

    @rule(tenant=TENANT, objects=st.sampled_from([0, 1, 3, 6, 12, POOL]))
    def set_limit(self, tenant: str, objects: int) -> None:
        self.limits[tenant] = objects * OBJECT_BYTES
        self.limits = {name: limit for name, limit in self.limits.items() if limit}
        self.store.tenants.set_limits(self.limits)
        self.most[tenant] = self.store.tenants.used(tenant)

    @rule(objects=st.integers(0, POOL), most=st.integers(1, 5))
    def evict(self, objects: int, most: int) -> None:
        """What was told to go next goes, and nothing else unless all leaves are in use."""
        told = upcoming(self.store, self.store.allocator.used - objects * OBJECT_BYTES, most)
        # What nobody can resume at takes along what comes behind it.
        certain = not self.store.tree.unreachable
        self.store.check_integrity()
        before = set(self.store.chunks())
        self.store.evict_to(objects * OBJECT_BYTES, most)
        gone = before - set(self.store.chunks())
        # Quotas are met even if there is room.
        over = not told or self.store.allocator.used < objects * OBJECT_BYTES
        assert set(told) <= gone or over or not certain
        assert len(gone) <= most

    @rule(tenant=TENANT, objects=st.integers(1, 6))
    def what_a_tenant_would_give_is_its_own(self, tenant: str, objects: int) -> None:
        use = self.store.tenants.get(tenant)
        if use is not None:
            told = upcoming_of(self.store, use, objects * OBJECT_BYTES, 3)
            assert all(chunk.space.use is use and chunk.idle for chunk in told)
            assert len(told) <= 3
        self.store.check_integrity()

    @rule(most=st.integers(1, 5))
    def sweep(self, most: int) -> None:
        self.store.eviction.evict_over_quota(most)

    @rule()
    def sweep_all(self) -> None:
        self.store.eviction.evict_over_quota()
        for tenant, limit in self.limits.items():
            use = self.shared.spaces[tenant].use
            assert use.used <= limit or not use.evictable

    @rule(tenant=TENANT, prompt=PROMPT, first=st.integers(0, 5))
    def drop(self, tenant: str, prompt: str, first: int) -> None:
        self.store.eviction.drop(self.shared.keys(tenant, prompt, 6)[first : first + 2])

    @rule(tenant=st.sampled_from(["aa", "cc"]))
    def clear(self, tenant: str) -> None:
        self.shared.clear(tenant)

    @invariant()
    def bytes_are_exact(self) -> None:
        self.store.check_integrity()
        uses = sum(self.store.tenants.used(tenant) for tenant in TENANTS)
        assert uses == self.store.allocator.used
        for tenant in TENANTS:
            own = [stored for stored in self.quarantined if stored.chunk.space.tenant == tenant]
            assert self.shared.spaces[tenant].use.quarantined == sum(stored.extent for stored in own)

    @invariant()
    def nobody_grows_above_a_limit(self) -> None:
        for tenant, limit in self.limits.items():
            used = self.store.tenants.used(tenant)
            assert used <= max(limit, self.most[tenant])
            self.most[tenant] = min(self.most[tenant], used)


TenantMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTenants = pytest.mark.timeout(120)(TenantMachine.TestCase)
