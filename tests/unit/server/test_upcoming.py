"""What eviction would take next is what it takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.store.upcoming import upcoming
from support.domain import OBJECT_BYTES, Domain, tokens

PROMPTS = st.lists(
    st.tuples(st.sampled_from(["store", "look", "hold"]), st.integers(0, 4), st.integers(1, 6)), max_size=14
)


def filled(policy: str, prompts) -> tuple[Domain, int]:
    """Prompts of five families: those of one are prefixes of each other, and two share their first chunks."""
    domain = Domain(pool=24, policy=policy)
    client = domain.register()
    for number, (what, family, chunks) in enumerate(prompts):
        packed = tokens(2, 0) + tokens(chunks, family) if family > 2 else tokens(chunks, family)
        if what == "store":
            domain.store_prompt(client, f"s{number}", packed)
        else:
            domain.lookup(client, f"s{number}", packed)
            if what == "look":
                domain.engine.end_session(client, [f"s{number}"], domain.now)
    return domain, client


@pytest.mark.parametrize("policy", ["lru", "tenant"])
@settings(max_examples=120, deadline=None)
@given(prompts=PROMPTS, count=st.integers(0, 24))
def test_upcoming_tells_the_order_of_eviction_and_changes_nothing(policy: str, prompts, count: int) -> None:
    domain, _ = filled(policy, prompts)
    store = domain.engine.store
    told = [chunk.key for chunk in upcoming(store, count * OBJECT_BYTES, 100)]
    domain.engine.check_integrity()
    assert told == [chunk.key for chunk in upcoming(store, count * OBJECT_BYTES, 100)]
    domain.events.log.clear()
    store.evict_to(store.allocator.used - len(told) * OBJECT_BYTES)
    assert told == domain.events.removed[: len(told)]
    assert len(told) == count or not store.policy.victim(1 << 62)


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS)
def test_upcoming_under_arc_names_what_can_go_tails_first(prompts) -> None:
    domain, _ = filled("arc", prompts)
    store = domain.engine.store
    told = upcoming(store, 1 << 40, 100)
    assert len({chunk.key for chunk in told}) == len(told)
    gone: set[bytes] = set()
    for chunk in told:
        assert chunk.idle
        assert set(chunk.children or ()) <= gone
        gone.add(chunk.key)
    assert store.evict_to(0) == len(told) * OBJECT_BYTES
    domain.engine.check_integrity()


def test_no_more_are_looked_at_than_asked_for() -> None:
    domain, client = filled("lru", [("store", 1, 6)])
    assert len(upcoming(domain.engine.store, 1 << 40, 4)) == 4
    assert len(upcoming(domain.engine.store, 1, 4)) == 1
    assert upcoming(domain.engine.store, 0, 4) == []
    domain.lookup(client, "held", tokens(6, 1))
    assert upcoming(domain.engine.store, 1 << 40, 4) == []
