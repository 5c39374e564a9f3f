"""Write leases that clients commit on their boards, without a call."""

from __future__ import annotations

import pytest

from kvwire.server.state import EngineConfig
from support.domain import CHUNK, Domain, tokens


@pytest.fixture
def domain() -> Domain:
    return Domain(config=EngineConfig(write_ttl=30.0))


def begun(domain: Domain, chunks: int = 2) -> tuple[int, int]:
    client = domain.register()
    domain.lookup(client, "s", tokens(chunks))
    grant = domain.begin(client, "s", 0, chunks)
    assert grant.lease_id
    return client, grant.lease_id


def test_an_arrival_publishes_all_slots_once(domain: Domain) -> None:
    client, lease_id = begun(domain)
    assert domain.hit(tokens(2)) == 0
    assert len(domain.engine.commit_arrived(client, lease_id, domain.now)) == 2
    assert domain.hit(tokens(2)) == 2
    assert domain.engine.commit_arrived(client, lease_id, domain.now) == ()
    assert domain.engine.counters.stored_objects == 2
    domain.check()


def test_an_arrival_that_comes_too_late_publishes_nothing_and_frees_the_slots(domain: Domain) -> None:
    client, lease_id = begun(domain)
    domain.now += 31
    domain.engine.expire(domain.now)
    assert domain.used == 2
    assert domain.engine.commit_arrived(client, lease_id, domain.now) == ()
    assert domain.hit(tokens(2)) == 0
    assert domain.used == 0
    domain.check()


def test_an_arrival_after_the_registration_has_ended_frees_the_slots(domain: Domain) -> None:
    client, lease_id = begun(domain)
    domain.engine.disconnect(client, domain.now)
    assert domain.used == 2
    assert domain.engine.commit_arrived(client, lease_id, domain.now) == ()
    assert domain.used == 0
    assert domain.engine.quarantined_owners() == ()
    assert domain.hit(tokens(2)) == 0
    domain.check()


def test_nobody_acknowledges_for_another(domain: Domain) -> None:
    client, lease_id = begun(domain)
    other = domain.register(engine_id="other")
    domain.engine.disconnect(client, domain.now)
    assert domain.engine.commit_arrived(other, lease_id, domain.now) == ()
    assert domain.engine.commit_arrived(other + 1, lease_id, domain.now) == ()
    assert domain.used == 2
    assert domain.lookup(other, "t", tokens(2)).hit_tokens == 0 * CHUNK
    domain.check()
