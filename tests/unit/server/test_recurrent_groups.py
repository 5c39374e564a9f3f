"""Groups of recurrent state: a boundary needs the one in its last chunk, and other chunks need none."""

from __future__ import annotations

from kvwire.server.messages import ObjectRange, SlotState
from support.domain import FULL, Domain, layout, recurrent_group, states, tokens


def test_bl25_recurrent_state_belongs_to_the_boundary_alone() -> None:
    domain = Domain(kv_layout=layout(1, FULL, recurrent_group()))
    client = domain.register()
    domain.lookup(client, "w", tokens(4))
    # State is stored at the second boundary only.
    grant = domain.begin(client, "w", 0, 4, (ObjectRange(0, 0, 4), ObjectRange(1, 1, 1)))
    assert domain.commit(client, grant.lease_id).committed == 5
    assert domain.hit(tokens(4)) == 2
    assert domain.hit(tokens(1)) == 0


def with_states(pool: int, *chunks: int) -> tuple[Domain, int]:
    """A prompt of six chunks, with states in the given ones."""
    domain = Domain(pool=pool, kv_layout=layout(1, FULL, recurrent_group()))
    client = domain.register()
    domain.lookup(client, "w", tokens(6))
    ranges = (ObjectRange(0, 0, 6), *(ObjectRange(1, chunk, 1) for chunk in chunks))
    assert domain.commit(client, domain.begin(client, "w", 0, 6, ranges).lease_id).error is None
    domain.engine.end_session(client, ["w"], domain.now)
    return domain, client


def test_the_state_of_a_boundary_is_leased_with_the_kv_before_it() -> None:
    domain, client = with_states(16, 1, 3, 5)
    assert domain.lookup(client, "r", tokens(5)).hit_chunks == 4
    domain.engine.evict_to(0.0)
    # The other chunks have gone; the state that nobody resumes at stays with its chunk.
    assert domain.hit(tokens(6)) == 4
    grant = domain.retrieve(client, "r", 0, 4, (ObjectRange(0, 0, 4), ObjectRange(1, 3, 1)))
    assert (len(grant.slots), list(grant.missing)) == (5, [])
    domain.end(client, grant.lease_id)
    domain.check()


def test_a_boundary_whose_state_is_lost_gives_way_to_the_one_before() -> None:
    domain, client = with_states(16, 1, 3)
    domain.lookup(client, "r", tokens(4))
    grant = domain.retrieve(client, "r", 3, 1, (ObjectRange(1, 3, 1),))
    assert domain.engine.discard(domain.engine.live_lease(client, grant.lease_id, domain.now).objects[0])
    domain.end(client, grant.lease_id)
    assert domain.hit(tokens(6)) == 2
    # It can be stored again, beside the KV that is still there.
    domain.lookup(client, "again", tokens(4))
    grant = domain.begin(client, "again", 3, 1, (ObjectRange(0, 3, 1), ObjectRange(1, 3, 1)))
    assert states(grant) == [SlotState.ALREADY_STORED, SlotState.RESERVED]
    assert domain.hit(tokens(6)) == 2
    assert states(domain.begin(client, "again", 3, 1, (ObjectRange(1, 3, 1),))) == [SlotState.BEING_WRITTEN]
    domain.commit(client, grant.lease_id)
    assert domain.hit(tokens(6)) == 4
    domain.check()


def test_states_without_attention_need_no_chunk_before_them() -> None:
    """A model of recurrent layers alone: nothing of a prompt but the states where it ends."""
    domain = Domain(pool=4, kv_layout=layout(1, recurrent_group()))
    client = domain.register()
    for session, chunk in (("a", 4), ("b", 2)):
        domain.lookup(client, session, tokens(5))
        grant = domain.begin(client, session, chunk, 1, (ObjectRange(0, chunk, 1),))
        domain.commit(client, grant.lease_id)
        domain.engine.end_session(client, [session], domain.now)
    assert [domain.hit(tokens(length)) for length in (6, 5, 4, 3, 2)] == [5, 5, 3, 3, 0]
    assert domain.lookup(client, "r", tokens(4)).hit_chunks == 3
    domain.engine.evict_to(0.0)
    assert domain.hit(tokens(6)) == 3
    domain.check()
