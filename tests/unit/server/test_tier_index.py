"""What a lower tier knows of its objects: bytes, recency, quotas, events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvwire.server.tiers.entries import TierSpace, Writing
from kvwire.server.tiers.format import (
    HEADER_BYTES,
    MANIFEST,
    Manifest,
    object_name,
    parse_name,
    read_manifest,
    server_folder,
    write_manifest,
)
from kvwire.server.tiers.index import ALREADY, TierIndex
from support.domain import CHUNK, FULL, layout, window_group
from support.tier_backend import Heard

if TYPE_CHECKING:
    from kvwire.server.layout import KvLayout

OBJECT = FULL.object_bytes + HEADER_BYTES
MANIFEST_BYTES = 100


def manifest(tenant: str = "", kv_layout: KvLayout | None = None, root: bytes = b"r") -> Manifest:
    return Manifest(root * 32, b"b" * 32, "model", tenant, kv_layout or layout(), CHUNK)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Filled:
    """An index with room for so many objects of the ordinary layout."""

    def __init__(
        self, objects: int, tenants: tuple[str, ...] = ("",), kv_layout: KvLayout | None = None
    ) -> None:
        self.heard = Heard()
        self.index = TierIndex(objects * OBJECT + len(tenants) * MANIFEST_BYTES, 0, self.heard)
        self.kv_layout = kv_layout
        for tenant in tenants:
            self.space(tenant)
        self.clock = 0

    def space(self, tenant: str = "") -> TierSpace:
        told = manifest(tenant, self.kv_layout, (tenant or "r").encode()[:1])
        return self.index.open_space(f"f/{told.folder}", told, MANIFEST_BYTES)

    def put(self, number: int, tenant: str = "", shard: int = 0, stamp: int = 0) -> str:
        """Empty when it is there, else why not."""
        self.clock += 1
        reserved = self.index.reserve(self.space(tenant), key(number), b"", shard, stamp or self.clock)
        if isinstance(reserved, str):
            return reserved
        self.index.commit(reserved)
        return ""

    def prompt(self, numbers: range) -> None:
        """Store a prompt as a server does: every store renews the chain, whose head is the latest."""
        for number in numbers:
            chain = [key(each) for each in range(numbers.start, number + 1)]
            self.index.touch(chain, range(self.clock + len(chain), self.clock, -1))
            stamp = self.clock + 1
            self.clock += len(chain)
            self.index.commit(self.index.reserve(self.space(), key(number), b"", 0, stamp))

    @property
    def numbers(self) -> list[int]:
        return sorted(int.from_bytes(chunk.key, "big") for chunk in self.index)


def test_bl53_the_tail_of_the_oldest_prompt_goes_first() -> None:
    tier = Filled(10)
    tier.prompt(range(4))
    tier.prompt(range(10, 14))
    tier.prompt(range(20, 24))
    assert tier.numbers == [0, 1, 10, 11, 12, 13, 20, 21, 22, 23]
    # A hit keeps the whole chain.
    tier.index.touch([key(0), key(1)], [tier.clock + 2, tier.clock + 1])
    tier.clock += 2
    tier.put(30)
    assert tier.numbers == [0, 1, 10, 11, 12, 20, 21, 22, 23, 30]


def test_a_prompt_larger_than_the_tier_keeps_its_head() -> None:
    tier = Filled(4)
    for number, stamp in zip(range(8), range(8, 0, -1), strict=True):
        tier.put(number, stamp=stamp)
    assert tier.numbers == [0, 1, 2, 3]
    assert tier.put(9, stamp=1) == "no room"


def test_what_is_read_or_written_is_not_evicted() -> None:
    tier = Filled(2)
    tier.put(1)
    tier.index.pin(tier.index.get(key(1)))
    tier.put(2)
    tier.put(3)
    assert tier.numbers == [1, 3]
    writing = tier.index.reserve(tier.space(), key(4), b"", 0, 99)
    assert isinstance(writing, Writing)
    assert tier.put(5, stamp=100) == "no room"
    tier.index.abort(writing, left=False)
    tier.index.unpin(tier.index.get(key(1)))
    assert tier.put(5, stamp=100) == ""
    tier.index.check_integrity()


def test_evicted_bytes_stay_accounted_until_they_have_gone() -> None:
    tier = Filled(1)
    tier.put(1)
    tier.put(2)
    name = object_name(tier.space().folder, key(1), 0)
    assert tier.index.doomed == {name: OBJECT}
    assert tier.index.used == 2 * OBJECT + MANIFEST_BYTES
    tier.index.deleted([name])
    assert tier.index.used == tier.index.kept == tier.index.capacity


def test_the_last_object_takes_its_manifest_along() -> None:
    tier = Filled(3)
    tier.put(1)
    folder = tier.space().folder
    assert tier.index.evict([key(1), key(7)]) == (1, 0)
    assert set(tier.index.doomed) == {f"{folder}/{MANIFEST}", object_name(folder, key(1), 0)}
    assert tier.index.kept == 0
    assert not tier.index.spaces


def test_an_object_without_room_opens_nothing() -> None:
    tier = Filled(0, tenants=())
    assert tier.put(1) == "no room"
    assert (tier.index.kept, tier.index.spaces) == (0, {})


def test_events_are_of_complete_chunks() -> None:
    tier = Filled(9, kv_layout=layout(2, FULL, window_group(3)))
    heard = tier.heard
    tier.put(1, shard=0)
    assert heard.take() == []
    tier.put(1, shard=2)
    assert heard.take() == [("store", key(1))]
    tier.put(1, shard=1)
    assert tier.put(1, shard=1) == ALREADY
    chunk = tier.index.get(key(1))
    assert not tier.index.drop_object(chunk, 0, 12345)
    tier.index.drop_object(chunk, 1, 0)
    assert heard.take() == []
    tier.index.drop_object(chunk, 2, 0)
    assert heard.take() == [("delete", key(1))]
    tier.index.evict([key(1)])
    assert heard.take() == []
    tier.index.check_integrity()


def test_one_event_tells_that_everything_went() -> None:
    tier = Filled(9)
    tier.put(1)
    tier.put(2)
    tier.heard.take()
    assert tier.index.clear() == (2, 0)
    assert tier.heard.take() == [("clear", b"")]
    tier.put(1)
    tier.put(2)
    tier.index.pin(tier.index.get(key(2)))
    tier.heard.take()
    assert tier.index.clear() == (1, 1)
    assert tier.heard.take() == [("delete", key(1))]


def test_what_is_being_written_while_all_is_cleared_is_not_kept() -> None:
    tier = Filled(9)
    writing = tier.index.reserve(tier.space(), key(1), b"", 0, 1)
    assert tier.index.clear() == (0, 1)
    assert not tier.index.commit(writing)
    assert len(tier.index) == 0
    assert object_name(writing.chunk.space.folder, key(1), 0) in tier.index.doomed
    tier.index.check_integrity()


def test_bl52_a_tenant_over_its_quota_gives_way_to_itself() -> None:
    tier = Filled(9, ("aa", "bb"))
    tier.index.set_quotas({"aa": 2 * OBJECT})
    for number in range(3):
        tier.put(10 + number, "bb")
    for number in range(3):
        tier.put(number, "aa")
    assert tier.numbers == [1, 2, 10, 11, 12]
    assert tier.index.tenants() == {"aa": 2 * OBJECT, "bb": 3 * OBJECT}
    tier.index.set_quotas({"aa": OBJECT, "bb": 1})
    assert tier.numbers == [2]
    assert tier.put(20, "bb") == "over the tenant's quota"
    tier.index.set_quotas({"bb": 0})
    assert tier.put(20, "bb") == ""
    tier.index.check_integrity()


def test_another_layout_of_the_same_keys_takes_their_place() -> None:
    tier = Filled(9)
    tier.put(1)
    other = manifest(kv_layout=layout(1, FULL, window_group(3)))
    space = tier.index.open_space(f"f/{other.folder}", other, MANIFEST_BYTES)
    assert not tier.index.found(space, key(1), 0, space.sizes[0])
    writing = tier.index.reserve(space, key(1), b"", 0, 5)
    tier.index.commit(writing)
    assert tier.heard.take() == [("store", key(1)), ("delete", key(1)), ("store", key(1))]
    tier.index.check_integrity()


def test_a_page_goes_on_after_the_last() -> None:
    tier = Filled(9)
    for number in range(5):
        tier.put(number)
    first = tier.index.page(0, 2)
    rest = tier.index.page(first[-1].serial, 9)
    assert [chunk.key for chunk in [*first, *rest]] == [key(number) for number in range(5)]


def test_bl50_names_are_digests_and_nothing_else() -> None:
    salted = Manifest(b"r" * 32, b"b" * 32, "../../a/b\n\0é" * 30, "ab" * 8, layout(), CHUNK)
    name = object_name(f"{server_folder('../x')}/{salted.folder}", key(5), 3)
    assert set(name) <= set("0123456789abcdef/.")
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.key, parsed.shard, parsed.is_manifest) == (key(5), 3, False)
    data = write_manifest(salted)
    assert len(data) == 4096
    assert read_manifest(data, parsed.folder) == salted
    for stranger in ("", name + "x", name.upper(), "a/" + name, name.replace(".3", ""), "manifest"):
        assert parse_name(stranger) is None


class Model(RuleBasedStateMachine):
    """Two tenants, two shards, room for six objects: whatever happens, every number agrees."""

    @initialize()
    def start(self) -> None:
        self.tier = Filled(6, ("aa", "bb"), layout(1, FULL, window_group(3)))
        self.index = self.tier.index
        self.index.capacity = 6 * OBJECT + 4 * MANIFEST_BYTES
        self.writings: list[Writing] = []
        self.pinned: list = []
        self.announced: set[bytes] = set()

    @rule(number=st.integers(0, 7), shard=st.integers(0, 1), back=st.integers(0, 6))
    def reserve(self, number: int, shard: int, back: int) -> None:
        self.tier.clock += 1
        space = self.tier.space("aa" if number < 4 else "bb")
        before = self.index.kept
        reserved = self.index.reserve(space, key(number), b"", shard, max(1, self.tier.clock - back))
        if isinstance(reserved, Writing):
            self.writings.append(reserved)
        else:
            assert self.index.kept <= before

    @rule(at=st.integers(0, 5), how=st.sampled_from(["commit", "left", "clean"]))
    def end(self, at: int, how: str) -> None:
        if at >= len(self.writings):
            return
        writing = self.writings.pop(at)
        if how == "commit":
            assert self.index.commit(writing) == (not writing.cancelled)
        else:
            self.index.abort(writing, left=how == "left")

    @rule(number=st.integers(0, 7))
    def pin(self, number: int) -> None:
        chunk = self.index.get(key(number))
        if chunk is not None and chunk.mask:
            self.index.pin(chunk)
            self.pinned.append(chunk)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.index.unpin(self.pinned.pop())

    @rule(number=st.integers(0, 7), shard=st.integers(0, 1), stale=st.booleans())
    def damage(self, number: int, shard: int, stale: bool) -> None:
        chunk = self.index.get(key(number))
        if chunk is not None and chunk.mask >> shard & 1:
            assert self.index.drop_object(chunk, shard, chunk.generation(shard) - stale) != stale

    @rule(numbers=st.lists(st.integers(0, 7), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.tier.clock += len(numbers)
        stamps = range(self.tier.clock, self.tier.clock - len(numbers), -1)
        self.index.touch([key(number) for number in numbers], stamps)

    @rule(numbers=st.lists(st.integers(0, 7), max_size=4))
    def evict(self, numbers: list[int]) -> None:
        self.index.evict([key(number) for number in numbers])

    @rule(tenant=st.sampled_from([None, "aa"]))
    def clear(self, tenant: str | None) -> None:
        self.index.clear(None if tenant is None else lambda chunk: chunk.space.tenant == tenant)

    @rule(limits=st.dictionaries(st.sampled_from(["aa", "bb"]), st.integers(0, 4).map(OBJECT.__mul__)))
    def quotas(self, limits: dict[str, int]) -> None:
        self.index.set_quotas(limits)

    @rule(count=st.integers(0, 4))
    def delete(self, count: int) -> None:
        self.index.deleted(list(self.index.doomed)[:count])

    @invariant()
    def everything_agrees(self) -> None:
        self.index.check_integrity()
        assert self.index.kept <= self.index.capacity
        for kind, each in self.tier.heard.take():
            if kind == "clear":
                self.announced.clear()
            elif kind == "store":
                assert each not in self.announced
                self.announced.add(each)
            else:
                self.announced.remove(each)
        assert self.announced == {chunk.key for chunk in self.index if chunk.is_complete}
        for folder, space in self.index.spaces.items():
            assert space.folder == folder


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
